"""What annotations are made of: a class's fields and their names in JSON, the members of a union."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec

_WRAPPERS = ("NotRequired", "Required", "ReadOnly")  # typing_extensions has its own


class Field(NamedTuple):
    """A field of a class.

    Args:
        name: the attribute; "" for a tag, which is none.
        key: its name in JSON.
        type: its annotation.
    """

    name: str
    key: str
    type: Any


def fields_of(kind: Any) -> tuple[Field, ...]:
    """The fields of a class whose instances are objects in JSON, or lists of their fields; else none.

    These are dataclasses, `TypedDict`s, named tuples, and classes of msgspec, pydantic and attrs.
    """
    return _fields(kind) if isinstance(kind, type) else ()


@lru_cache(maxsize=1024)
def _fields(kind: Any) -> tuple[Field, ...]:
    if issubclass(kind, msgspec.Struct):
        fields = [Field(f.name, f.encode_name, f.type) for f in msgspec.structs.fields(kind)]
        config = kind.__struct_config__
        if config.tag is not None:
            fields.insert(0, Field("", config.tag_field, Literal[config.tag]))
        return tuple(fields)
    if (model := getattr(kind, "__pydantic_fields__", None)) is not None:
        return tuple(Field(name, _alias(f) or name, f.annotation) for name, f in model.items())
    is_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
    elif is_tuple or is_typed_dict(kind) or hasattr(kind, "__attrs_attrs__"):
        names = None
    else:
        return ()
    hints = get_type_hints(kind, include_extras=True)
    if names is None:
        names = list(hints)
    return tuple(Field(name, name, _unwrapped(hints[name])) for name in names)


def is_typed_dict(kind: Any) -> bool:
    """True if a class is a `TypedDict`, of `typing` or of `typing_extensions`."""
    return issubclass(kind, dict) and hasattr(kind, "__required_keys__")


def _alias(field: Any) -> str | None:
    aliases = (field.validation_alias, field.alias)
    return next((alias for alias in aliases if isinstance(alias, str)), None)


def bare(hint: Any) -> Any:
    """A type without `Annotated` and `Required`, names of types and pydantic's root models around it."""
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


def _unwrapped(hint: Any) -> Any:
    """A `TypedDict`'s field without what says whether it has to be there."""
    while getattr(get_origin(hint), "_name", None) in _WRAPPERS:
        hint = get_args(hint)[0]
    return hint


def members_of(hint: Any) -> list[Any]:
    """The types that a value may have, but None: those of a union, or the type itself."""
    hint = bare(hint)
    if get_origin(hint) in (Union, UnionType):
        return [each for member in get_args(hint) for each in members_of(member)]
    return [] if hint in (None, NoneType) else [hint]
