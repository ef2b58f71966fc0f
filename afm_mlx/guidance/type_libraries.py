"""The one reader of Python types: fields, JSON schemas, and instances from JSON.

msgspec reads Python's own types, pydantic its own; a function's parameters are read as a `TypedDict`. Schemas
get the form that AFM was trained on.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib import import_module
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NotRequired,
    TypedDict,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import inspect as msgspec_types

from afm_mlx.errors import ConstraintError
from afm_mlx.installation import package_problem

TypeForm = Any
"""A type as annotations have it: a class, a union, `Annotated[...]`, a `TypeAdapter` of pydantic."""
JsonSchema = dict[str, Any]
Reader = Callable[[str | bytes], object]  # converts JSON to instances of a type
_WRAPPERS = ("NotRequired", "Required", "ReadOnly")  # typing_extensions has its own
_PYDANTIC = ("pydantic", "pydantic_core", "annotated_types")  # packages
_PYDANTICS = ("__get_pydantic_core_schema__", "__pydantic_fields__")  # attributes of its classes
_PARAMETERS = {
    inspect.Parameter.POSITIONAL_ONLY: "can only be given by position; remove the / after it",
    inspect.Parameter.VAR_POSITIONAL: "takes any number of arguments; use a parameter of type list",
    inspect.Parameter.VAR_KEYWORD: "takes arguments of any names; use a parameter of type dict",
}
_SCHEMAS = ("items", "additionalProperties", "propertyNames", "contains", "not")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_MAPS = ("properties", "patternProperties", "$defs")
_ORDER = "type title description properties required additionalProperties x-order".split()

# -- annotations


class Field(NamedTuple):
    """A field of a class: attribute ("" for a tag, which is none), name in JSON, and annotation."""

    name: str
    key: str
    type: TypeForm


def fields_of(kind: TypeForm) -> tuple[Field, ...]:
    """Return the fields of a class whose JSON is an object, or a list of its fields; none for other types.

    These classes are dataclasses, `TypedDict`s, named tuples, and classes of msgspec, pydantic and attrs.
    """
    return _fields(kind) if isinstance(kind, type) else ()


@lru_cache(maxsize=1024)
def _fields(kind: TypeForm) -> tuple[Field, ...]:
    if issubclass(kind, msgspec.Struct):
        fields = [Field(f.name, f.encode_name, f.type) for f in msgspec.structs.fields(kind)]
        config = kind.__struct_config__
        if config.tag is not None:
            fields.insert(0, Field("", config.tag_field, Literal[config.tag]))
        return tuple(fields)
    if (model := getattr(kind, "__pydantic_fields__", None)) is not None:
        aliases = [(f.validation_alias, f.alias, name) for name, f in model.items()]
        keys = [next(alias for alias in some if isinstance(alias, str)) for some in aliases]
        parts = zip(keys, model.items(), strict=True)
        return tuple(Field(name, key, f.annotation) for key, (name, f) in parts)
    is_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
    elif is_tuple or is_typed_dict(kind) or hasattr(kind, "__attrs_attrs__"):
        names = None
    else:
        return ()
    hints = get_type_hints(kind, include_extras=True)
    names = list(hints) if names is None else names
    return tuple(Field(name, name, _unwrapped(hints[name])) for name in names)


def is_typed_dict(kind: TypeForm) -> bool:
    return issubclass(kind, dict) and hasattr(kind, "__required_keys__")


def bare(hint: TypeForm) -> TypeForm:
    """Unwrap `Annotated`, `Required`, type aliases, `NewType` and pydantic's root models."""
    while True:
        hint = _unwrapped(hint)
        if get_origin(hint) is Annotated:
            hint = get_args(hint)[0]
        elif hasattr(hint, "__supertype__"):
            hint = hint.__supertype__
        elif type(hint).__name__ == "TypeAliasType":
            hint = hint.__value__
        elif getattr(hint, "__pydantic_root_model__", False):
            hint = hint.__pydantic_fields__["root"].annotation
        else:
            return hint


def _unwrapped(hint: TypeForm) -> TypeForm:
    """Unwrap `Required`, `NotRequired` and `ReadOnly`."""
    while getattr(get_origin(hint), "_name", None) in _WRAPPERS:
        hint = get_args(hint)[0]
    return hint


def members_of(hint: TypeForm) -> list[TypeForm]:
    """Return the members of a union, or the type itself; without None."""
    hint = bare(hint)
    if get_origin(hint) in (Union, UnionType):
        return [each for member in get_args(hint) for each in members_of(member)]
    return [] if hint in (None, NoneType) else [hint]


# -- libraries


class Library:
    """A type, `kind`, as msgspec or pydantic reads it: its schema and its instances."""

    def __init__(self, kind: TypeForm, is_pydantic: bool) -> None:
        self.kind, self.is_pydantic = kind, is_pydantic
        self._readers: dict[int, tuple[TypeForm, Reader]] = {}  # by types' ids

    def schema(self) -> JsonSchema:
        """Return the type's JSON schema; refuse a type that no schema describes exactly."""
        if self.is_pydantic:
            from afm_mlx.guidance.pydantic_schema import ExactJsonSchema  # it imports pydantic

            return _adapter_of(self.kind).json_schema(schema_generator=ExactJsonSchema)
        parts = list(_parts(msgspec_types.type_info(self.kind), "", set()))
        for where, part in parts:
            _check(part, where)
        typed_dicts = [
            part.cls for _, part in parts if isinstance(part, msgspec_types.TypedDictType)
        ]
        (schema, *references), definitions = msgspec.json.schema_components(
            [self.kind, *typed_dicts], ref_template="#/$defs/{name}"
        )
        for kind, reference in zip(typed_dicts, references, strict=True):
            # msgspec sorts their fields.
            definition = definitions[reference["$ref"].removeprefix("#/$defs/")]
            keys = [field.key for field in fields_of(kind)]
            definition["properties"] = {key: definition["properties"][key] for key in keys}
            definition["required"] = [key for key in keys if key in definition["required"]]
        return {**schema, "$defs": definitions} if definitions else schema

    def decoded(self, text: str | bytes, kind: TypeForm = ...) -> object:
        """Convert JSON to an instance of the type, or of `kind` inside it; raise `ValueError` if it is none."""
        kind = self.kind if kind is ... else kind
        if id(kind) not in self._readers:
            reader = (
                _pydantic_reader(kind) if self.is_pydantic else msgspec.json.Decoder(kind).decode
            )
            self._readers[id(kind)] = kind, reader
        return self._readers[id(kind)][1](text)


def _pydantic_reader(kind: TypeForm) -> Reader:
    adapter = _adapter_of(kind)

    def read(text: str | bytes) -> object:
        try:
            return adapter.validate_json(text)
        except ValueError as error:
            errors = getattr(error, "errors", None)
            if errors is None:
                raise
            found = (f"{'.'.join(map(str, e['loc'])) or 'it'}: {e['msg']}" for e in errors())
            raise ValueError("; ".join(found)) from None

    return read


def _adapter_of(kind: TypeForm) -> TypeForm:
    if _is_adapter(kind):
        return kind
    try:
        from pydantic import TypeAdapter
    except ImportError as error:
        raise ConstraintError(
            f"{kind!r} has limits of annotated_types, which pydantic reads; use msgspec.Meta, or pydantic. "
            f"{package_problem(error) or error}"
        ) from error
    return TypeAdapter(kind)


def _is_adapter(kind: TypeForm) -> bool:
    return type(kind).__name__ == "TypeAdapter" and type(kind).__module__.startswith("pydantic")


def library_of(kind: TypeForm) -> Library:
    """Choose the library that reads a type; refuse parts of both libraries, and generable classes."""
    if _is_adapter(kind):
        return Library(kind, is_pydantic=True)
    owners = set(_owners(kind, set()))
    if "generable" in owners:
        raise ConstraintError(
            f"{kind!r} has a generable class, whose guides a session knows: "
            "await afm_mlx.fm.LanguageModelSession().respond(prompt, generating=...). There, classes around "
            "it have to be generable, too."
        )
    if len(owners) > 1:
        raise ConstraintError(
            f"{kind!r} has parts of msgspec (Struct, Meta) and of pydantic (BaseModel, Field), and neither "
            "reads the other's; use one of them."
        )
    return Library(kind, is_pydantic=owners == {"pydantic"})


def _owners(hint: TypeForm, seen: set[int]) -> Iterator[str]:
    """Yield the libraries whose classes and annotations are in a type."""
    if id(hint) in seen:
        return
    seen.add(id(hint))
    for note in getattr(hint, "__metadata__", ()):
        if isinstance(note, msgspec.Meta):
            yield "msgspec"
        elif type(note).__module__.partition(".")[0] in _PYDANTIC:
            yield "pydantic"
    for kind in (get_origin(hint) or hint, get_origin(bare(hint)) or bare(hint)):
        if not isinstance(kind, type):
            continue
        if hasattr(kind, "_generable"):
            yield "generable"
        elif issubclass(kind, msgspec.Struct):
            yield "msgspec"
        elif any(hasattr(kind, name) for name in _PYDANTICS):
            yield "pydantic"
    inner = [*members_of(hint), *get_args(bare(hint)), *(f.type for f in fields_of(kind))]
    for each in inner:
        yield from _owners(each, seen)


# -- types whose JSON schema says less than msgspec requires


_REFUSED: dict[str, str] = {
    **dict.fromkeys(["bytes", "bytearray", "memoryview"], "use str, and convert it"),
    "decimal": "use float or str, and convert it",
    "timedelta": "use a number of seconds, and convert it",
    **dict.fromkeys(["raw", "ext"], "use typing.Any"),
    "custom": "use a dataclass, or a class of msgspec or pydantic",
}
_KEYS = (msgspec_types.StrType, msgspec_types.AnyType)


def _parts(info: object, where: str, seen: set[int]) -> Iterator[tuple[str, object]]:
    """Yield a type and all types inside it, each once, with the path of fields to it."""
    if isinstance(info, msgspec_types.Metadata):
        info = info.type
    if id(info) in seen:
        return
    seen.add(id(info))
    yield where, info
    for field in getattr(info, "fields", ()):
        name = f"{where}.{field.encode_name}" if where else field.encode_name
        yield from _parts(field.type, name, seen)
    inner = [getattr(info, name, None) for name in ("item_type", "value_type")]
    for part in (*inner, *getattr(info, "item_types", ()), *getattr(info, "types", ())):
        if isinstance(part, msgspec_types.Type):
            yield from _parts(part, where, seen)


def _check(info: object, where: str) -> None:
    """Raise `ConstraintError` for a type whose schema allows texts that msgspec refuses."""
    name = type(info).__name__.removesuffix("Type").lower()
    what: object
    if name in _REFUSED:
        what, instead = getattr(info, "cls", None) or name, _REFUSED[name]
    elif name in ("datetime", "time") and getattr(info, "tz", None) is not True:
        what = f"{name} without a time zone"
        instead = "use Annotated[..., msgspec.Meta(tz=True)]"
    elif isinstance(info, msgspec_types.DictType) and not isinstance(info.key_type, _KEYS):
        what, instead = "dict with keys other than any str", "use dict[str, ...]"
    else:
        return
    place = f"The field {where}" if where else "The type"
    raise ConstraintError(f"{place} is {what}, which no JSON schema describes exactly; {instead}.")


# -- schemas


def afm_schema(schema: JsonSchema) -> JsonSchema:
    """Rewrite a schema of msgspec or pydantic to the form that AFM was trained on.

    The root is not a reference, but may be referred to as `#`. Objects have their listed properties only, in
    the order of `x-order`; properties get descriptions from the class's docstring. Arrays with `prefixItems`
    have no further items. Only classes keep their titles. The given schema stays unchanged.
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
    """Rewrite a nested schema; it keeps a title if `titled`."""
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


def _object(schema: JsonSchema) -> JsonSchema:
    """Close an object's schema, give it an order, and move its docstring's arguments to its properties."""
    schema = {"additionalProperties": False, **schema, "x-order": list(schema["properties"])}
    text, described = parsed_docstring(schema.pop("description", None))
    if text:
        schema["description"] = text
    for name, description in described.items():
        if name in schema["properties"] and schema["properties"][name] is not True:
            schema["properties"][name].setdefault("description", description)
    return schema


def parsed_docstring(docstring: str | None) -> tuple[str | None, dict[str, str]]:
    """Split a docstring into its description and the descriptions of its arguments or attributes by name."""
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


# -- functions


def arguments_type(
    function: Callable[..., object], read_as: Callable[[inspect.Parameter], TypeForm] | None = None
) -> TypeForm:
    """Make a `TypedDict` of a function's parameters, with the function's name and docstring.

    Parameters with defaults are not required.

    Args:
        function: a function with an annotation for each parameter.
        read_as: maps a parameter, its annotation resolved, to the type of its field; pass None to keep the
            annotation.

    Raises:
        ConstraintError: for a parameter that a JSON object can't give, or that has no annotation.
    """
    name = getattr(function, "__name__", type(function).__name__)
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    try:
        signature = inspect.signature(function)
        called = inner if inspect.isroutine(inner) else type(inner).__call__
        hints = get_type_hints(called, include_extras=True)
    except Exception as error:  # an annotation is any expression
        raise ConstraintError(
            f"The annotations of {name} can't be read ({error}); types that they name in quotes have to be "
            "known in its module."
        ) from None
    fields: dict[str, TypeForm] = {}
    for parameter in signature.parameters.values():
        where = f"The parameter {parameter.name} of {name}"
        if parameter.kind in _PARAMETERS:
            raise ConstraintError(f"{where} {_PARAMETERS[parameter.kind]}.")
        if parameter.name not in hints:
            raise ConstraintError(
                f"{where} has no annotation; give its type, such as {parameter.name}: str."
            )
        hint = hints[parameter.name]
        if read_as is not None:
            hint = read_as(parameter.replace(annotation=hint))
        is_required = parameter.default is inspect.Parameter.empty
        fields[parameter.name] = hint if is_required else NotRequired[hint]
    typed_dict: TypeForm = TypedDict
    kind = typed_dict(name, fields)
    if library_of(kind).is_pydantic:
        # Before Python 3.12 pydantic refuses the one of typing.
        typed_dict = import_module("typing_extensions").TypedDict
        kind = typed_dict(name, fields)
    kind.__doc__ = inspect.getdoc(function)
    return kind
