"""The decorator `generable`: classes, instances of which a model can generate."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from enum import Enum
from types import FrameType
from typing import Any, ForwardRef, TypeVar, dataclass_transform, get_args, get_type_hints, overload

from afm_mlx.fm.errors import InvalidGenerationSchemaError
from afm_mlx.fm.generable import (
    ConvertibleFromGeneratedContent,
    Generable,
    GeneratedContent,
    GenerationID,
    as_instances,
)
from afm_mlx.fm.generation_guide import guide
from afm_mlx.fm.generation_property import Property, inner_types
from afm_mlx.fm.generation_schema import GenerationSchema, is_same_class

T = TypeVar("T")


class GenerableDecoratorError(InvalidGenerationSchemaError):
    """A class that `generable` can't be applied to."""


@overload
def generable(arg: type[T], /) -> type[T]: ...
@overload
def generable(arg: str | None = None, /) -> Callable[[type[T]], type[T]]: ...


@dataclass_transform(field_specifiers=(guide, dataclasses.field))
def generable(arg: Any = None) -> Any:
    """Make a class one that a model can generate instances of.

    The class becomes a dataclass if it is none. It gets the class method `generation_schema()`, the property
    `generated_content`, and the class `PartiallyGenerated`: the same fields, all of which may be None.
    Written `@generable`, `@generable()` or `@generable("what the class is")`.

    Args:
        arg: the class, or what the model is told about it.

    Raises:
        GenerableDecoratorError: for a class without annotated fields, a mutable default, or annotations
            that name unknown types.
    """
    if arg is not None and not isinstance(arg, str):
        return _apply_generable_decorator(arg, None, sys._getframe(1))

    def decorate(cls: type[T]) -> Any:
        return _apply_generable_decorator(cls, arg, sys._getframe(1))

    return decorate


def _apply_generable_decorator(
    cls: Any, description: str | None, frame: FrameType | None = None
) -> Any:
    """`cls` with what generable classes have; its annotations may use the names of `frame`."""
    if not isinstance(cls, type):
        raise GenerableDecoratorError(
            f"@generable can only be applied to classes, got a {type(cls).__name__}.\n"
            f"{_example('Correct usage', 'MyClass')}"
        )
    if issubclass(cls, Enum):
        line = f"kind: {cls.__name__}"
        raise GenerableDecoratorError(
            f"{cls.__name__} is an enum, and needs no decorator to be the type of a field.\n"
            f"{_example('Correct usage', 'MyClass', line)}"
        )
    made: Any = _as_dataclass(cls)
    hints = _type_hints(made, frame)
    made._generable = True
    made._generable_description = description
    # Kept here, for a `dataclass` that is applied once more forgets what is said about fields without default.
    made._generable_properties = tuple(
        Property(
            name=field.name,
            type_class=hints[field.name],
            description=field.metadata.get("description"),
            guides=list(field.metadata.get("guides", ())),
        )
        for field in dataclasses.fields(made)
        if field.init
    )
    made.generation_schema = classmethod(generation_schema)
    made._from_generated_content = classmethod(_from_generated_content)
    made.generated_content = property(_generated_content)
    made.PartiallyGenerated = _partially_generated(made)
    return made


def _example(title: str, name: str, line: str = "name: str  # Type annotation is required") -> str:
    return f"{title}:\n    @fm.generable\n    class {name}:\n        {line}"


def _as_dataclass(cls: type) -> type:
    name = cls.__name__
    if "__dataclass_fields__" not in vars(cls):
        try:
            cls = dataclasses.dataclass(cls)
        except Exception as error:  # whatever dataclass finds wrong
            line = "tags: list[str] = field(default_factory=list)"
            raise GenerableDecoratorError(
                f"{name} can't be made a dataclass: {error}. A default that can be changed needs "
                f"field(default_factory=...).\n{_example('Example of correct usage', name, line)}"
            ) from error
    if not dataclasses.fields(cls):  # type: ignore[arg-type]  # it is a dataclass
        raise GenerableDecoratorError(
            f"@generable needs a class with type-annotated fields; {name} has none.\n"
            f"{_example('Correct usage', name)}\n"
            f"Incorrect usage:\n    class {name}:\n        name = ''  # a value, but no type"
        )
    return cls


def _type_hints(cls: type, frame: FrameType | None) -> dict[str, Any]:
    try:
        # Before Python 3.13 a frame keeps the objects of `f_locals` until it ends: it is asked for at need.
        written = vars(cls).get("__annotations__", {}).values()
        needs_names = sys.version_info >= (3, 13) or any(map(_has_text, written))
        names = frame.f_locals if frame and needs_names else {}
        return get_type_hints(cls, localns={**names, cls.__name__: cls})
    except Exception as error:  # an annotation is any expression
        line = "parent: Optional['MyClass'] = None  # a class is known from its own line on"
        raise GenerableDecoratorError(
            f"The type hints of {cls.__name__} can't be resolved: {error}. Each type must be defined "
            f"above the class.\n{_example('Example of correct usage', 'MyClass', line)}"
        ) from error


def _has_text(annotation: Any) -> bool:
    """True if an annotation, or a part of it, is written as text."""
    is_text = isinstance(annotation, str | ForwardRef)
    return is_text or any(map(_has_text, get_args(annotation)))


def generation_schema(cls: Any, description: str | None = None) -> GenerationSchema:
    """The schema of a generable class.

    Args:
        cls: the class.
        description: what the model is told about it, instead of what was said at its definition.

    Raises:
        TypeError: for a list that doesn't say what its elements are.
    """
    nested = [_schema(c, c._generable_description, []) for c in referenced_classes(cls)]
    return _schema(cls, description or cls._generable_description, nested)


def _schema(cls: Any, description: str | None, nested: list[GenerationSchema]) -> GenerationSchema:
    return GenerationSchema(cls, description, list(cls._generable_properties), nested)


def referenced_classes(cls: Any) -> list[Any]:
    """The generable classes that a class's fields have, their fields have, ..., without the class itself."""
    found = [cls]
    for one in found:
        for property in one._generable_properties:
            for inner in inner_types(property.type_class):
                is_class = isinstance(inner, type) and isinstance(inner, Generable)
                if is_class and not any(is_same_class(inner, known) for known in found):
                    found.append(inner)
    return found[1:]


def _from_generated_content(cls: Any, content: GeneratedContent) -> Any:
    """An instance with the content's fields.

    Raises:
        ValueError: when a field has a value that it can't have.
    """
    values = {}
    for one in cls._generable_properties:
        try:
            values[one.name] = content.value(one.type_class, for_property=one.name)
        except (TypeError, ValueError) as error:
            raise ValueError(f"No {cls.__name__} can be made of this content: {error}") from error
    return cls(**values)


def _generated_content(self: Any) -> GeneratedContent:
    """The instance's fields; those that are None are left out."""
    values = {p.name: getattr(self, p.name) for p in self._generable_properties}
    return GeneratedContent({n: _as_json(v) for n, v in values.items() if v is not None})


def _as_json(value: Any) -> Any:
    if isinstance(value, Generable):
        content: GeneratedContent = value.generated_content  # type: ignore[attr-defined]
        return content.value()
    if isinstance(value, Enum):
        return value.value
    return [_as_json(v) for v in value] if isinstance(value, list) else value


def _partially_generated(cls: Any) -> type:
    """A dataclass of the same fields, all None until they are generated, and `id`."""
    properties = cls._generable_properties
    fields: list[Any] = [(p.name, Any, dataclasses.field(default=None)) for p in properties]
    has_id = any(p.name == "id" for p in properties)
    if not has_id:
        fields.append(("id", GenerationID, dataclasses.field(default_factory=GenerationID)))

    def _from_generated_content(cls: Any, content: GeneratedContent) -> Any:
        """An instance with those of the fields that the content has; the rest are None."""
        found = content.value()
        values: dict[str, Any] = {
            p.name: as_instances(p.type_class, found[p.name], p.name, is_partial=True)
            for p in properties
            if found.get(p.name) is not None
        }
        return cls(**values) if has_id else cls(**values, id=content.id)

    return dataclasses.make_dataclass(
        f"{cls.__name__}PartiallyGenerated",
        fields,
        bases=(ConvertibleFromGeneratedContent,),
        namespace={
            "_from_generated_content": classmethod(_from_generated_content),
            "__module__": cls.__module__,
            "__qualname__": f"{cls.__qualname__}.PartiallyGenerated",
        },
    )
