"""The JSON schema of a Python type, in the form in which AFM was shown schemas."""

from __future__ import annotations

from typing import Any

_SCHEMAS = ("items", "additionalProperties", "propertyNames", "contains", "not")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_MAPS = ("properties", "patternProperties", "$defs")
_ORDER = (
    "type",
    "title",
    "description",
    "properties",
    "required",
    "additionalProperties",
    "x-order",
)


def as_afm_reads_it(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema of msgspec or pydantic with objects as AFM was shown them.

    The root is no reference, but may be referred to as `#`. Objects have their properties only, in the order of
    `x-order`; their properties take descriptions from the class's docstring. Arrays with
    `prefixItems` have no further items. Only classes keep their titles.

    Args:
        schema: the schema, which stays as it is.
    """
    definitions = dict(schema.get("$defs", {}))
    root = schema.get("$ref", "")
    if root:
        schema = definitions.pop(root.removeprefix("#/$defs/"))
    whole = _rewritten({**schema, "$defs": definitions}, root, titled=True)
    if not definitions:
        del whole["$defs"]
    return whole


def _rewritten(schema: Any, root: str, titled: bool = False) -> Any:
    """A schema inside a schema; `titled` where a class's title may stand."""
    if not isinstance(schema, dict):
        return schema
    new = dict(schema)
    for key in _SCHEMAS:
        if key in new:
            new[key] = _rewritten(new[key], root)
    for key in _LISTS:
        if key in new:
            new[key] = [_rewritten(item, root) for item in new[key]]
    for key in _MAPS:
        if key in new:
            new[key] = {n: _rewritten(s, root, key == "$defs") for n, s in new[key].items()}
    if root and new.get("$ref") == root:
        new["$ref"] = "#"
    if "prefixItems" in new:
        new.setdefault("items", False)
    if "properties" in new:
        new = _object(new)
    elif not titled:
        new.pop("title", None)
    first = {key: new.pop(key) for key in _ORDER if key in new}
    return first | new


def _object(schema: dict[str, Any]) -> dict[str, Any]:
    """An object that is closed and has an order; what its docstring says of properties is moved to them."""
    schema = {"additionalProperties": False, **schema, "x-order": list(schema["properties"])}
    text, described = parsed_docstring(schema.pop("description", None))
    if text:
        schema["description"] = text
    for name, description in described.items():
        if name in schema["properties"] and schema["properties"][name] is not True:
            schema["properties"][name].setdefault("description", description)
    return schema


def parsed_docstring(docstring: str | None) -> tuple[str | None, dict[str, str]]:
    """What a docstring says of the whole, and of each argument or attribute; Google's style and others."""
    if docstring is None or "\n" not in docstring.strip():
        return docstring and docstring.strip(), {}
    from docstring_parser import ParseError, parse  # 30 ms

    try:
        parsed = parse(docstring)
    except ParseError:
        return docstring.strip(), {}
    described = {
        name.strip(): " ".join(param.description.split())
        for param in parsed.params
        if param.description
        for name in param.arg_name.split(",")
    }
    return parsed.description and parsed.description.strip(), described
