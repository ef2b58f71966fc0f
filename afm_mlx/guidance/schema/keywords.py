"""What the keywords of one schema say about values of each type, checked for their form."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from afm_mlx.guidance.schema.cases import Arrays, Case, Contains, Layer, Objects, Words
from afm_mlx.guidance.schema.formats import LOOSE
from afm_mlx.guidance.schema.formulas import TRUE, Formula
from afm_mlx.guidance.schema.numbers import MAX_DIGITS, Numbers, exact, written
from afm_mlx.guidance.schema.patterns import searched
from afm_mlx.guidance.schema.references import Document, Node
from afm_mlx.guidance.schema.refusals import pointer, refuse
from afm_mlx.guidance.schema.regular import Expr
from afm_mlx.guidance.schema.strings import MAX_LENGTH, Strings

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
MAX_COUNT = 10_000
"""Items or properties at most that a schema may ask for."""


def types(value: Mapping[str, Any], place: str) -> tuple[str, ...]:
    """The types that a schema allows, all of them when it doesn't say."""
    if "type" not in value:
        return ("null", "boolean", "number", "string", "array", "object")
    named = value["type"] if isinstance(value["type"], list) else [value["type"]]
    for name in named:
        if name not in TYPES:
            refuse(pointer(place, "type"), name, f"a type is one of {', '.join(TYPES)}.")
    return tuple(name for name in named if not (name == "integer" and "number" in named))


def typed_case(
    name: str, value: Mapping[str, Any], node: Node, document: Document, is_wide: bool
) -> Case:
    """What a schema's keywords say about the values of a type.

    Args:
        name: of the type.
        value: the keywords that are honoured.
        node: the schema.
        document: what it is in.
        is_wide: formats and patterns match by any rule.

    Raises:
        ConstraintError: for a keyword that can't be honoured.
    """
    if name == "null":
        return Words(("null",))
    if name == "boolean":
        return Words(("true", "false"))
    if name in ("integer", "number"):
        return numbers(value, node.place, name == "integer")
    if name == "string":
        return strings(value, node.place, is_wide)
    return arrays(value, node, document) if name == "array" else objects(value, node, document)


def numbers(value: Mapping[str, Any], place: str, is_integer: bool) -> Numbers:
    """What a schema says about numbers."""
    low = number(value, "minimum", place)
    high = number(value, "maximum", place)
    above = below = False
    for key, is_low in (("exclusiveMinimum", True), ("exclusiveMaximum", False)):
        given = value.get(key)
        if isinstance(given, bool) or given is None:  # draft 4
            above, below = (bool(given), below) if is_low else (above, bool(given))
            continue
        bound = number(value, key, place)
        if is_low and bound is not None and (low is None or bound >= low):
            low, above = bound, True
        if not is_low and bound is not None and (high is None or bound <= high):
            high, below = bound, True
    return Numbers(is_integer or None, low, above, high, below, _step(value, place))


def _step(value: Mapping[str, Any], place: str) -> Fraction | None:
    if "multipleOf" not in value:
        return None
    step = number(value, "multipleOf", place)
    if step is None or step <= 0:
        refuse(pointer(place, "multipleOf"), value["multipleOf"], "it is a number above 0.")
    if step > 10**9 or step < Fraction(1, 10**9):
        refuse(
            pointer(place, "multipleOf"),
            value["multipleOf"],
            "multiples of numbers from 10^-9 to 10^9 are honoured. Use another unit.",
        )
    return step


def number(value: Mapping[str, Any], key: str, place: str) -> Fraction | None:
    """The number of a keyword, None when it is not there."""
    if key not in value:
        return None
    given = value[key]
    if (
        isinstance(given, bool)
        or not isinstance(given, int | float)
        or given != given
        or abs(given) == float("inf")
    ):
        refuse(pointer(place, key), given, "it is a number.")
    if abs(given) >= 10**MAX_DIGITS:
        refuse(pointer(place, key), given, f"numbers have {MAX_DIGITS} digits at most.")
    bound = exact(given)
    if isinstance(given, float) and abs(given) >= 2**53:
        # 1e23 is stored as less than 10^23: within bounds is what is so for the text and for the number.
        stored = Fraction(given)
        return (max if key.endswith("inimum") else min)(bound, stored)
    return bound


def count(value: Mapping[str, Any], key: str, place: str, largest: int | None = None) -> int | None:
    """The count of a keyword, None when it is not there."""
    if key not in value:
        return None
    given = value[key]
    if isinstance(given, bool) or not isinstance(given, int | float) or given < 0:
        refuse(pointer(place, key), given, "it is an integer from 0 on.")
    if given != given // 1:
        refuse(pointer(place, key), given, "it is an integer from 0 on.")
    if largest is not None and given > largest:
        refuse(
            pointer(place, key), given, f"at most {largest} can be asked for. Use a smaller number."
        )
    return int(min(given, 10**9))


def pattern(text: Any, place: str, wide: bool = False) -> Expr:
    """The strings in which a schema's pattern is found."""
    if not isinstance(text, str):
        refuse(place, text, "a pattern is a text.")
    try:
        return searched(text, wide=wide)
    except ValueError as error:
        refuse(place, text, f"as a pattern {error}. Use one without that.")


def strings(value: Mapping[str, Any], place: str, is_wide: bool) -> Strings:
    """What a schema says about strings."""
    parts = (
        [pattern(value["pattern"], pointer(place, "pattern"), is_wide)]
        if "pattern" in value
        else []
    )
    formats = (value["format"],) if isinstance(value.get("format"), str) else ()
    if is_wide:
        parts += [searched(LOOSE[name], wide=True) for name in formats if name in LOOSE]
        formats = ()
    return Strings(
        shortest=count(value, "minLength", place, MAX_LENGTH) or 0,
        longest=count(value, "maxLength", place),
        parts=tuple(parts),
        formats=formats,
    )


def arrays(value: Mapping[str, Any], node: Node, document: Document) -> Arrays:
    """What a schema says about arrays."""
    place = node.place
    least = count(value, "minItems", place, MAX_COUNT) or 0
    most = count(value, "maxItems", place)
    prefix_key = "prefixItems" if node.draft >= 2020 else "items"
    prefix: tuple[Formula, ...] = ()
    rest_key: str | None = "items"
    if isinstance(value.get(prefix_key), list):
        prefix = tuple(document.below(node, prefix_key, i) for i in range(len(value[prefix_key])))
        rest_key = "items" if node.draft >= 2020 else "additionalItems"
    elif "prefixItems" in value and node.draft >= 2020:
        refuse(pointer(place, "prefixItems"), value["prefixItems"], "it is a list of schemas.")
    elif node.draft < 2019 and "items" not in value:
        rest_key = None
    has_rest = rest_key is not None and rest_key in value
    rest = document.below(node, rest_key) if has_rest and rest_key else TRUE
    contains: tuple[Contains, ...] = ()
    if "contains" in value:
        fewest = count(value, "minContains", place, MAX_COUNT)
        contains = (
            Contains(
                0,
                document.below(node, "contains"),
                1 if fewest is None else fewest,
                count(value, "maxContains", place),
            ),
        )
    is_counting = contains and node.draft >= 2020
    is_trivial = contains and contains[0].least == 0 and contains[0].most is None
    return Arrays(
        prefix=prefix,
        items=rest,
        least=least,
        most=most,
        contains=() if is_trivial else contains,
        is_unique=value.get("uniqueItems") is True,
        evaluated=None if has_rest else len(prefix),
        evaluated_by=(contains[0].schema,) if is_counting else (),
    )


def objects(value: Mapping[str, Any], node: Node, document: Document) -> Objects:
    """What a schema says about objects."""
    place = node.place
    for key in ("properties", "patternProperties"):
        if not isinstance(value.get(key, {}), dict):
            refuse(pointer(place, key), value[key], "it is an object of schemas.")
    listed = ordered_names(node.value, list(value.get("properties", {})), place)
    patterns = value.get("patternProperties", {})
    for text in patterns:
        pattern(text, pointer(place, "patternProperties", text))
        pattern(text, pointer(place, "patternProperties", text), wide=True)
    has_rest = "additionalProperties" in value
    layer = Layer(
        properties=tuple((name, document.below(node, "properties", name)) for name in listed),
        patterns=tuple(
            (text, document.below(node, "patternProperties", text)) for text in patterns
        ),
        rest=document.below(node, "additionalProperties") if has_rest else TRUE,
        is_rest_evaluated=has_rest,
    )
    return Objects(
        layers=() if layer == Layer() else (layer,),
        required=required(value, "required", place),
        least=count(value, "minProperties", place, MAX_COUNT) or 0,
        most=count(value, "maxProperties", place),
        names=(document.below(node, "propertyNames"),) if "propertyNames" in value else (),
    )


def required(value: Mapping[str, Any], key: str, place: str) -> tuple[str, ...]:
    """The names in a list of required properties."""
    names = value.get(key, [])
    if isinstance(names, bool) and key == "required":
        return ()  # draft 3's, which later drafts ignore at the property
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        refuse(pointer(place, key), names, "it is a list of names.")
    return tuple(dict.fromkeys(names))


def ordered_names(schema: Mapping[str, Any], names: list[str], place: str) -> list[str]:
    """Names of properties in the order of `x-order`, then the others as they are listed."""
    order = schema.get("x-order", [])
    if not isinstance(order, list) or not all(isinstance(name, str) for name in order):
        refuse(pointer(place, "x-order"), order, "it is a list of names of properties.")
    given = set(names)
    return list(dict.fromkeys([*(name for name in order if name in given), *names]))


def constants(node: Node, document: Document, key: str) -> tuple[list[Case], list[Formula]]:
    """The values that `const` or `enum` lists.

    Returns:
        cases: of the plain values, one for each type.
        formulas: of the arrays and objects, one for each.
    """
    values = [node.value[key]] if key == "const" else node.value[key]
    if not isinstance(values, list) or not values:
        refuse(pointer(node.place, key), values, "it is a list of values, with one at least.")
    words = [json_word(v) for v in values if v is None or isinstance(v, bool)]
    counted = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    texts = [v for v in values if isinstance(v, str)]
    cases: list[Case] = []
    if words:
        cases.append(Words(tuple(dict.fromkeys(words))))
    if counted:
        cases.append(Numbers(values=tuple(dict.fromkeys(written(_plain(v)) for v in counted))))
    if texts:
        cases.append(Strings(values=tuple(dict.fromkeys(texts))))
    nested = [(i, v) for i, v in enumerate(values) if isinstance(v, list | dict)]
    return cases, [document.made(node, exactly(v), key, i) for i, v in nested]


def exactly(value: Any) -> dict[str, Any]:
    """A schema of draft 2020-12 that has one array or object only."""
    schema: dict[str, Any] = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    if isinstance(value, list):
        items = [{**schema, "const": v} for v in value]
        return schema | {
            "type": "array",
            "prefixItems": items,
            "minItems": len(value),
            "maxItems": len(value),
        }
    properties = {name: {**schema, "const": v} for name, v in value.items()}
    return schema | {
        "type": "object",
        "properties": properties,
        "required": list(value),
        "additionalProperties": False,
    }


def json_word(value: bool | None) -> str:
    """`null`, `true` or `false`."""
    return "null" if value is None else "true" if value else "false"


def _plain(value: int | float) -> int | float:
    """1 for 1.0: they are equal, and 1 is an integer in every draft."""
    return (
        int(value)
        if isinstance(value, float) and value.is_integer() and abs(value) < 1e15
        else value
    )
