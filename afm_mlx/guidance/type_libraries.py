"""The libraries that know types: msgspec for Python's own, pydantic where the caller's type is pydantic's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, get_args, get_origin

import msgspec
from msgspec import inspect

from afm_mlx.errors import ConstraintError
from afm_mlx.guidance.type_fields import bare, fields_of, members_of
from afm_mlx.installation import package_problem

_PYDANTIC = ("pydantic", "pydantic_core", "annotated_types")  # packages
_PYDANTICS = ("__get_pydantic_core_schema__", "__pydantic_fields__")  # attributes of its classes


class Library(ABC):
    """A type as a library sees it.

    Args:
        kind: the type.
    """

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self._readers: dict[int, tuple[Any, Callable[[str | bytes], Any]]] = {}  # by types' ids

    @abstractmethod
    def schema(self) -> dict[str, Any]:
        """The type's JSON schema."""

    @abstractmethod
    def reader(self, kind: Any) -> Callable[[str | bytes], Any]:
        """What makes instances of a type from JSON; its `ValueError` names the field that does not fit."""

    def decoded(self, text: str | bytes, kind: Any = ...) -> Any:
        """An instance from JSON, of the type or of `kind`, which is inside it.

        Raises:
            ValueError: which names the field that does not fit.
        """
        kind = self.kind if kind is ... else kind
        if id(kind) not in self._readers:
            self._readers[id(kind)] = kind, self.reader(kind)
        return self._readers[id(kind)][1](text)


class Msgspec(Library):
    """A type of Python's, or of msgspec's."""

    def schema(self) -> dict[str, Any]:
        parts = list(_parts(inspect.type_info(self.kind), "", set()))
        for where, part in parts:
            _check(part, where)
        typed_dicts = [part.cls for _, part in parts if isinstance(part, inspect.TypedDictType)]
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

    def reader(self, kind: Any) -> Callable[[str | bytes], Any]:
        return msgspec.json.Decoder(kind).decode


class Pydantic(Library):
    """A type that has something of pydantic's in it; or a `TypeAdapter`."""

    def schema(self) -> dict[str, Any]:
        from afm_mlx.guidance.pydantic_schema import ExactJsonSchema  # it imports pydantic

        return _adapter_of(self.kind).json_schema(schema_generator=ExactJsonSchema)

    def reader(self, kind: Any) -> Callable[[str | bytes], Any]:
        adapter = _adapter_of(kind)

        def read(text: str | bytes) -> Any:
            try:
                return adapter.validate_json(text)
            except ValueError as error:
                errors = getattr(error, "errors", None)
                if errors is None:
                    raise
                found = (f"{'.'.join(map(str, e['loc'])) or 'it'}: {e['msg']}" for e in errors())
                raise ValueError("; ".join(found)) from None

        return read


def _adapter_of(kind: Any) -> Any:
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


def _is_adapter(kind: Any) -> bool:
    return type(kind).__name__ == "TypeAdapter" and type(kind).__module__.startswith("pydantic")


def library_of(kind: Any) -> Library:
    """The library that reads a type.

    Raises:
        ConstraintError: when parts of it are msgspec's and others pydantic's, or it has generable classes.
    """
    if _is_adapter(kind):
        return Pydantic(kind)
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
    return Pydantic(kind) if owners == {"pydantic"} else Msgspec(kind)


def _owners(hint: Any, seen: set[int]) -> Iterator[str]:
    """The libraries whose classes and annotations a type has in it."""
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


# -- types whose JSON schema says less than msgspec asks for


_STRINGS = "use str, and convert it"
_REFUSED: tuple[tuple[type[inspect.Type], str], ...] = (
    (inspect.BytesType, _STRINGS),
    (inspect.ByteArrayType, _STRINGS),
    (inspect.MemoryViewType, _STRINGS),
    (inspect.DecimalType, "use float or str, and convert it"),
    (inspect.TimeDeltaType, "use a number of seconds, and convert it"),
    (inspect.RawType, "use typing.Any"),
    (inspect.ExtType, "use typing.Any"),
    (inspect.CustomType, "use a dataclass, or a class of msgspec or pydantic"),
)


_KEYS = (inspect.StrType, inspect.AnyType)


def _parts(info: Any, where: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """A type and all types inside it, each once, with the fields that lead to it."""
    if isinstance(info, inspect.Metadata):
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
        if isinstance(part, inspect.Type):
            yield from _parts(part, where, seen)


def _check(info: Any, where: str) -> None:
    """Refuse a type under whose schema there are texts that are no instances of it."""
    name = type(info).__name__.removesuffix("Type").lower()
    for kind, instead in _REFUSED:
        if isinstance(info, kind):
            _refuse(where, getattr(info, "cls", None) or name, instead)
    if isinstance(info, inspect.DateTimeType | inspect.TimeType) and info.tz is not True:
        _refuse(where, f"{name} without a time zone", "use Annotated[..., msgspec.Meta(tz=True)]")
    if isinstance(info, inspect.DictType) and not isinstance(info.key_type, _KEYS):
        _refuse(where, "dict with keys other than any str", "use dict[str, ...]")


def _refuse(where: str, what: Any, instead: str) -> None:
    place = f"The field {where}" if where else "The type"
    raise ConstraintError(f"{place} is {what}, which no JSON schema describes exactly; {instead}.")
