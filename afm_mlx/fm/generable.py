"""Generable classes: the decorator, and generated values as JSON and as instances."""

from __future__ import annotations

import dataclasses
import json
import sys
import uuid
from collections.abc import Callable
from enum import Enum
from types import FrameType
from typing import (
    Any,
    ForwardRef,
    Protocol,
    TypeVar,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from afm_mlx.errors import shown
from afm_mlx.fm.errors import InvalidGenerationSchemaError
from afm_mlx.fm.generation_schema import (
    GenerationSchema,
    Property,
    TypeForm,
    guide,
    inner_types,
    is_same_class,
    without_none,
)


class GenerationID:
    """The identity of generated content: a UUID, which `str` returns."""

    def __init__(self) -> None:
        self._id = str(uuid.uuid4())

    def __str__(self) -> str:
        return self._id

    def __repr__(self) -> str:
        return f"GenerationID({self._id})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GenerationID) and self._id == other._id

    def __hash__(self) -> int:
        return hash(self._id)


class GeneratedContent:
    """A generated JSON value, usually an object.

    Args:
        content_dict: the value; pass None for an empty object.
        id: the content's identity; pass None for a new one.

    Raises:
        TypeError: for a value that JSON can't hold.
    """

    def __init__(self, content_dict: object = None, id: GenerationID | None = None) -> None:
        self._set({} if content_dict is None else content_dict, id)

    def _set(self, value: object, id: GenerationID | None, is_complete: bool = True) -> None:
        try:
            text = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"Invalid content, not serializable as JSON: {error}.") from None
        self._content_dict = json.loads(text)
        self.id = id or GenerationID()
        self._is_complete = is_complete

    @classmethod
    def of(
        cls, value: object, id: GenerationID | None = None, is_complete: bool = True
    ) -> GeneratedContent:
        """Make content of a JSON value, or of its beginning if not `is_complete`. A `value` of None is null.

        Raises:
            TypeError: for a value that JSON can't hold.
        """
        content = cls.__new__(cls)
        content._set(value, id, is_complete)
        return content

    @classmethod
    def from_json(cls, json_str: str) -> GeneratedContent:
        """Parse JSON; raise `ValueError` for other text (`json.JSONDecodeError`), and for deep nesting."""
        try:
            value = json.loads(json_str)
        except RecursionError as error:
            raise ValueError(f"The content is nested too deeply: {error}.") from None
        try:
            return cls.of(value)
        except TypeError as error:  # Python reads numbers that JSON doesn't have
            raise ValueError(str(error)) from None

    def to_json(self) -> str:
        """Write the content as JSON."""
        return json.dumps(self._content_dict, ensure_ascii=False)

    @property
    def is_complete(self) -> bool:
        """True if the content was generated to its end."""
        return self._is_complete

    def value(self, type_class: TypeForm = None, for_property: str | None = None) -> Any:
        """Return the whole content, or one field; None for a missing field, [] if `type_class` is a list.

        Args:
            type_class: a generable class or an enum, optional or in a list, to make instances of; other types
                leave the JSON value as it is, so a whole number stays an int for `float`.
            for_property: the field; pass None for the whole content.

        Raises:
            TypeError: if `type_class` is a list and the value is not; for a field of content that is
                not an object.
        """
        value = self._content_dict
        if for_property is not None:
            if not isinstance(value, dict):
                raise TypeError(
                    f"The content has no field {for_property!r}: it is not an object, but {shown(value)}."
                )
            value = value.get(for_property)
        return value if type_class is None else as_instances(type_class, value, for_property)

    def __repr__(self) -> str:
        return f"GeneratedContent({self._content_dict!r})"


def as_instances(
    type_class: TypeForm, value: object, name: str | None = None, is_partial: bool = False
) -> Any:
    """Convert a JSON value to a type: objects to generable classes, values to enum members.

    `name` is the field's, for errors; `is_partial` makes instances of the classes' `PartiallyGenerated`. A
    missing value, None, becomes None, or an empty list for a list that is not optional.

    Raises:
        TypeError: if the type is a list and the value is not.
        ValueError: for a value that is not a member of an enum.
    """
    type_class, is_optional = without_none(type_class)
    is_list = get_origin(type_class) is list
    if value is None:
        return [] if is_list and not is_optional else None
    if is_list:
        if not isinstance(value, list):
            field = "the content" if name is None else f"the field {name!r}"
            raise TypeError(f"{field} must be a list, got {shown(value)}.")
        (element,) = get_args(type_class)
        return [as_instances(element, v, name, is_partial) for v in value]
    if isinstance(type_class, Generable):
        made: TypeForm = type_class.PartiallyGenerated if is_partial else type_class
        return made._from_generated_content(GeneratedContent(value))
    if isinstance(type_class, type) and issubclass(type_class, Enum):
        return type_class(value)
    return value


class ConvertibleFromGeneratedContent(Protocol):
    """A type whose values can be made from generated content."""

    @classmethod
    def _from_generated_content(cls, content: GeneratedContent) -> Any:
        """Make an instance with the content's fields."""
        raise NotImplementedError


class ConvertibleToGeneratedContent(Protocol):
    """A type whose values can be given to a model as generated content."""

    @property
    def generated_content(self) -> GeneratedContent:
        """The value's fields as content."""
        raise NotImplementedError


class _GenerableType(type):
    # By a flag: a runtime protocol would compute an instance's `generated_content` to see that it exists.
    def __instancecheck__(cls, instance: object) -> bool:
        return getattr(instance, "_generable", False) is True


class Generable(metaclass=_GenerableType):
    """The interface of classes decorated with `generable`; they and their instances pass `isinstance`."""

    _generable: bool = True
    _generable_description: str | None = None
    PartiallyGenerated: Any = None

    def __init_subclass__(cls, **kwargs: object) -> None:
        raise TypeError(
            "Subclassing Protocol Generable is not allowed. Use the @fm.generable() decorator instead."
        )

    @classmethod
    def generation_schema(cls) -> GenerationSchema:
        """The schema of answers of this class."""
        raise NotImplementedError


# -- the decorator

T = TypeVar("T")


class GenerableDecoratorError(InvalidGenerationSchemaError):
    """`generable` was applied to an unsuitable class."""


@overload
def generable(arg: type[T], /) -> type[T]: ...
@overload
def generable(arg: str | None = None, /) -> Callable[[type[T]], type[T]]: ...


@dataclass_transform(field_specifiers=(guide, dataclasses.field))
def generable(arg: Any = None) -> Any:
    """Let a model generate instances of a class.

    The class becomes a dataclass if it is none. It gets the class method `generation_schema()`, the property
    `generated_content`, and the class `PartiallyGenerated`: the same fields, all of which may be None.
    Written `@generable`, `@generable()` or `@generable("a description")`.

    Args:
        arg: the class, or its description for the model.

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
    cls: TypeForm, description: str | None, frame: FrameType | None = None
) -> Any:
    """Make `cls` generable; its annotations may use local names of `frame`."""
    # Apple's own tests call this function, without a frame.
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
    name: str = cls.__name__
    made: TypeForm = cls
    if "__dataclass_fields__" not in vars(cls):
        try:
            made = dataclasses.dataclass(cls)
        except Exception as error:  # dataclass raises several types
            line = "tags: list[str] = field(default_factory=list)"
            raise GenerableDecoratorError(
                f"{name} can't be made a dataclass: {error}. A default that can be changed needs "
                f"field(default_factory=...).\n{_example('Example of correct usage', name, line)}"
            ) from error
    if not dataclasses.fields(made):
        raise GenerableDecoratorError(
            f"@generable needs a class with type-annotated fields; {name} has none.\n"
            f"{_example('Correct usage', name)}\n"
            f"Incorrect usage:\n    class {name}:\n        name = ''  # a value, but no type"
        )
    try:
        # Before Python 3.13 `f_locals` keeps the frame's objects alive until it ends: read only if needed.
        written = vars(made).get("__annotations__", {}).values()
        needs_names = sys.version_info >= (3, 13) or any(map(_has_text, written))
        names = frame.f_locals if frame and needs_names else {}
        hints = get_type_hints(made, localns={**names, name: made})
    except Exception as error:  # an annotation is any expression
        line = "parent: Optional['MyClass'] = None  # a class is known from its own line on"
        raise GenerableDecoratorError(
            f"The type hints of {name} can't be resolved: {error}. Each type must be defined "
            f"above the class.\n{_example('Example of correct usage', 'MyClass', line)}"
        ) from error
    made._generable = True
    made._generable_description = description
    # Kept here: applying `dataclass` again loses the metadata of fields without a default.
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


def _has_text(annotation: TypeForm) -> bool:
    """True if an annotation, or a part of it, is written as text."""
    is_text = isinstance(annotation, str | ForwardRef)
    return is_text or any(map(_has_text, get_args(annotation)))


def generation_schema(cls: TypeForm, description: str | None = None) -> GenerationSchema:
    """Make the schema of a generable class, with `description` in place of the class's own, if it is given.

    Raises:
        TypeError: for a list without a type of its elements.
    """
    found = [cls]  # the class, and those that it refers to, directly or not
    for one in found:
        for property in one._generable_properties:
            for inner in inner_types(property.type_class):
                is_class = isinstance(inner, type) and isinstance(inner, Generable)
                if is_class and not any(is_same_class(inner, known) for known in found):
                    found.append(inner)
    nested = [
        GenerationSchema(c, c._generable_description, list(c._generable_properties))
        for c in found[1:]
    ]
    description = description or cls._generable_description
    return GenerationSchema(cls, description, list(cls._generable_properties), nested)


def _from_generated_content(cls: TypeForm, content: GeneratedContent) -> Any:
    """Make an instance with the content's fields; raise `ValueError` for a value of another type."""
    values = {}
    for one in cls._generable_properties:
        try:
            values[one.name] = content.value(one.type_class, for_property=one.name)
        except (TypeError, ValueError) as error:
            raise ValueError(f"No {cls.__name__} can be made of this content: {error}") from error
    return cls(**values)


def _generated_content(self: Any) -> GeneratedContent:
    """Convert the instance's fields to content; fields that are None are left out."""
    values = {p.name: getattr(self, p.name) for p in self._generable_properties}
    return GeneratedContent({n: _as_json(v) for n, v in values.items() if v is not None})


def _as_json(value: object) -> object:
    if isinstance(value, Generable):
        content: GeneratedContent = value.generated_content  # type: ignore[attr-defined]
        return content.value()
    if isinstance(value, Enum):
        return value.value
    return [_as_json(v) for v in value] if isinstance(value, list) else value


def _partially_generated(cls: TypeForm) -> type:
    """Make a dataclass of the same fields, all None by default, and `id`."""
    properties = cls._generable_properties
    fields: list[Any] = [(p.name, Any, dataclasses.field(default=None)) for p in properties]
    has_id = any(p.name == "id" for p in properties)
    if not has_id:
        fields.append(("id", GenerationID, dataclasses.field(default_factory=GenerationID)))

    def _from_generated_content(cls: TypeForm, content: GeneratedContent) -> Any:
        """Make an instance with the fields that the content has; the rest are None."""
        found = content.value()
        values: dict[str, object] = {
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
