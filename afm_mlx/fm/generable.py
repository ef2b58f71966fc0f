"""Generated values: JSON that gives its fields as they are, or as instances of generable classes."""

from __future__ import annotations

import json
import uuid
from enum import Enum
from typing import Any, Protocol, get_args, get_origin

from afm_mlx.errors import shown
from afm_mlx.fm.generation_property import without_none
from afm_mlx.fm.generation_schema import GenerationSchema


class GenerationID:
    """The identity of generated content: equal and hashed by its UUID, which `str` gives."""

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
    """A JSON value that was generated, mostly an object.

    Args:
        content_dict: the value; None is an empty object.
        id: its identity; none makes a new one.

    Raises:
        TypeError: for what JSON can't hold.
    """

    def __init__(self, content_dict: Any = None, id: GenerationID | None = None) -> None:
        self._set({} if content_dict is None else content_dict, id)

    def _set(self, value: Any, id: GenerationID | None, is_complete: bool = True) -> None:
        try:
            text = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"Invalid content, not serializable as JSON: {error}.") from None
        self._content_dict = json.loads(text)
        self.id = id or GenerationID()
        self._is_complete = is_complete

    @classmethod
    def of(
        cls, value: Any, id: GenerationID | None = None, is_complete: bool = True
    ) -> GeneratedContent:
        """The content of a JSON value, of which None is null.

        Args:
            value: the value, or what there is of it so far.
            id: its identity; none makes a new one.
            is_complete: whether it was generated to its end.

        Raises:
            TypeError: for what JSON can't hold.
        """
        content = cls.__new__(cls)
        content._set(value, id, is_complete)
        return content

    @classmethod
    def from_json(cls, json_str: str) -> GeneratedContent:
        """The content of a JSON text.

        Raises:
            ValueError: when it isn't JSON (`json.JSONDecodeError`), or nested too deeply.
        """
        try:
            value = json.loads(json_str)
        except RecursionError as error:
            raise ValueError(f"The content is nested too deeply: {error}.") from None
        try:
            return cls.of(value)
        except TypeError as error:  # Python reads numbers that JSON doesn't have
            raise ValueError(str(error)) from None

    def to_json(self) -> str:
        """The content as JSON text."""
        return json.dumps(self._content_dict, ensure_ascii=False)

    @property
    def is_complete(self) -> bool:
        """True if it was generated to its end."""
        return self._is_complete

    def value(self, type_class: Any = None, for_property: str | None = None) -> Any:
        """The whole content, or one of its fields.

        Args:
            type_class: a generable class or an enum, a list of it or its option gives instances; other types
                leave the value as JSON has it, so that a whole number stays an int for `float`.
            for_property: the field; none means the whole content.

        Returns:
            None for a field that is missing; an empty list when `type_class` is a list.

        Raises:
            TypeError: when a list is asked for and the value is none; for a field of what is no object.
        """
        value = self._content_dict
        if for_property is not None:
            if not isinstance(value, dict):
                raise TypeError(
                    f"The content has no field {for_property!r}: it is no object, but {shown(value)}."
                )
            value = value.get(for_property)
        return value if type_class is None else as_instances(type_class, value, for_property)

    def __repr__(self) -> str:
        return f"GeneratedContent({self._content_dict!r})"


def as_instances(
    type_class: Any, value: Any, name: str | None = None, is_partial: bool = False
) -> Any:
    """Convert a JSON value to a type: objects to its generable classes, values to its enums' members.

    Args:
        type_class: the type.
        value: JSON; None where there is none.
        name: of the field, for messages.
        is_partial: make instances of the classes' `PartiallyGenerated`.

    Raises:
        TypeError: for a list type over what is no list.
        ValueError: for a value that no member of an enum has.
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
        made: Any = type_class.PartiallyGenerated if is_partial else type_class
        return made._from_generated_content(GeneratedContent(value))
    if isinstance(type_class, type) and issubclass(type_class, Enum):
        return type_class(value)
    return value


class ConvertibleFromGeneratedContent(Protocol):
    """A type, values of which can be made from generated content."""

    @classmethod
    def _from_generated_content(cls, content: GeneratedContent) -> Any:
        """An instance with the content's fields."""
        raise NotImplementedError


class ConvertibleToGeneratedContent(Protocol):
    """A type, values of which can be given to a model as generated content."""

    @property
    def generated_content(self) -> GeneratedContent:
        """The value's fields as content."""
        raise NotImplementedError


class _GenerableType(type):
    # By a mark, and not by attributes as a runtime protocol: that would compute an instance's
    # `generated_content` to find out whether there is one.
    def __instancecheck__(cls, instance: object) -> bool:
        return getattr(instance, "_generable", False) is True


class Generable(metaclass=_GenerableType):
    """What classes decorated with `generable` have: they and their instances are instances of this class."""

    _generable: bool = True
    _generable_description: str | None = None
    PartiallyGenerated: Any = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        raise TypeError(
            "Subclassing Protocol Generable is not allowed. Use the @fm.generable() decorator instead."
        )

    @classmethod
    def generation_schema(cls) -> GenerationSchema:
        """The schema that an answer of this class follows."""
        raise NotImplementedError
