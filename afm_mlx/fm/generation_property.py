"""One field of a schema: its type and its guides as JSON schema."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, Flag
from typing import Any, Literal, Union, get_args, get_origin

from afm_mlx.errors import shown
from afm_mlx.fm.errors import InvalidGenerationSchemaError, UnsupportedGuideError
from afm_mlx.fm.generation_guide import GenerationGuide, GuideType

Schema = dict[str, Any]

_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean"}
_OF_STRINGS = {GuideType.anyOf, GuideType.constant, GuideType.regex}
_OF_NUMBERS = {GuideType.minimum, GuideType.maximum, GuideType.range}
_OF_LISTS = {GuideType.count, GuideType.minItems, GuideType.maxItems, GuideType.element}


@dataclass(eq=False)
class Property:
    """A field of an object.

    Args:
        name: its key.
        type_class: str, int, float, bool, a generable class, a `Literal` or an `Enum` of strings or of
            integers, `list[T]` or `Optional[T]` of these.
        description: what the model is told about it.
        guides: what its value must be like.
    """

    name: str
    type_class: Any
    description: str | None = None
    guides: list[GenerationGuide] = field(default_factory=list)

    @property
    def is_optional(self) -> bool:
        """True if it may be left out; it is never null."""
        return without_none(self.type_class)[1]

    def check_lists(self) -> None:
        """Raise `TypeError` for a list that doesn't say what its elements are."""
        if list in inner_types(self.type_class):
            raise TypeError(
                f"The field {self.name!r} has the type {self.type_class}, a list of what is not said. "
                "Write list[str], for example."
            )

    def to_dict(self, reference: Callable[[Any], Schema]) -> Schema:
        """The field's JSON schema.

        Args:
            reference: gives the schema that refers to a class.

        Raises:
            UnsupportedGuideError: for a guide that its type can't have.
            InvalidGenerationSchemaError: for guides that no value can follow, and what `reference` raises.
        """
        try:
            schema = _value(self.type_class, self.guides, reference)
        except (UnsupportedGuideError, InvalidGenerationSchemaError) as error:
            raise type(error)(f"The field {self.name!r}: {error}") from None
        return schema | ({"description": self.description} if self.description else {})


def without_none(type_class: Any) -> tuple[Any, bool]:
    """`(T, True)` for `Optional[T]`, `T | None` and a `Literal` with None, else the type itself and False."""
    if get_origin(type_class) is Literal and None in get_args(type_class):
        return Literal[tuple(v for v in get_args(type_class) if v is not None)], True
    if get_origin(type_class) in (Union, types.UnionType):
        others = [t for t in get_args(type_class) if t is not type(None)]
        if len(others) == 1:
            return without_none(others[0])[0], len(get_args(type_class)) == 2
    return type_class, False


def choices_of(type_class: Any) -> list[Any] | None:
    """The values of a `Literal`, or of an `Enum`'s members, as JSON has them; None for any other type."""
    if get_origin(type_class) is Literal:
        return list(get_args(type_class))
    if isinstance(type_class, type) and issubclass(type_class, Enum):
        return [member.value for member in type_class]
    return None


def inner_types(type_class: Any) -> list[Any]:
    """A type, that of its elements, of their elements, ...; options taken off."""
    found = [without_none(type_class)[0]]
    while get_origin(found[-1]) is list:
        (element,) = get_args(found[-1]) or (list,)  # typing.List says nothing of its elements
        found.append(without_none(element)[0])
    return found


def _value(
    type_class: Any, guides: Sequence[GenerationGuide], reference: Callable[[Any], Schema]
) -> Schema:
    type_class, _ = without_none(type_class)
    if get_origin(type_class) is list:
        return _list(get_args(type_class)[0], guides, reference)
    if type_class is bool:  # Apple's SDK lets guides pass here, and doesn't use them
        return {"type": "boolean"}
    name = getattr(type_class, "__name__", str(type_class))
    if type_class is str:
        _refuse(guides, _OF_STRINGS, name)
        return {"type": "string"} | _string_limits(guides)
    if type_class in (int, float):
        _refuse(guides, _OF_NUMBERS, name)
        return {"type": _SCALARS[type_class]} | _number_limits(guides, type_class is int)
    choices = choices_of(type_class)
    schema = reference(type_class) if choices is None else _choice(type_class, choices)
    _refuse(guides, set(), name)
    return schema


def _choice(type_class: Any, choices: Sequence[Any]) -> Schema:
    for kind in (str, int):
        is_flag = isinstance(type_class, type) and issubclass(type_class, Flag)
        if choices and not is_flag and all(_is_plain(value, kind) for value in choices):
            return {"type": _SCALARS[kind], "enum": [kind(value) for value in choices]}
    raise InvalidGenerationSchemaError(
        f"{type_class} has the values {shown(choices)}; allowed are strings only or integers only, one or more."
    )


def _is_plain(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool | Enum)


def _list(
    element: Any, guides: Sequence[GenerationGuide], reference: Callable[[Any], Schema]
) -> Schema:
    inner, _ = without_none(element)
    # A choice of strings on a list of strings is a choice for each of them.
    of_each = {GuideType.anyOf, GuideType.constant} if inner is str else set()
    _refuse(guides, _OF_LISTS | of_each, f"list[{getattr(inner, '__name__', inner)}]")
    of_elements = [
        g.value if g.guide_type is GuideType.element else g
        for g in guides
        if g.guide_type in of_each | {GuideType.element}
    ]
    lower, upper = 0, math.inf
    for g in guides:
        if g.guide_type in (GuideType.count, GuideType.minItems):
            lower = max(lower, g.value)
        if g.guide_type in (GuideType.count, GuideType.maxItems):
            upper = min(upper, g.value)
    _check_order(lower, upper, "number of elements")
    schema = {"type": "array", "items": _value(element, of_elements, reference)}
    return schema | _present(minItems=lower or None, maxItems=None if upper == math.inf else upper)


def _string_limits(guides: Sequence[GenerationGuide]) -> Schema:
    choices: list[str] | None = None
    pattern = None
    for g in guides:
        if g.guide_type is GuideType.regex:
            if pattern is not None:
                raise UnsupportedGuideError("two patterns; join them to one.")
            pattern = g.value
        else:
            own = list(g.value) if g.guide_type is GuideType.anyOf else [g.value]
            choices = own if choices is None else [c for c in choices if c in own]
    if choices == []:
        raise InvalidGenerationSchemaError("its guides have no string in common.")
    return _present(enum=choices, pattern=pattern)


def _number_limits(guides: Sequence[GenerationGuide], is_whole: bool) -> Schema:
    lower, upper = -math.inf, math.inf
    for g in guides:
        first, last = g.value if g.guide_type is GuideType.range else (g.value, g.value)
        if g.guide_type is not GuideType.maximum:
            lower = max(lower, math.ceil(first) if is_whole else first)
        if g.guide_type is not GuideType.minimum:
            upper = min(upper, math.floor(last) if is_whole else last)
    _check_order(lower, upper, "number")
    return _present(
        minimum=None if lower == -math.inf else lower, maximum=None if upper == math.inf else upper
    )


def _check_order(lower: float, upper: float, what: str) -> None:
    if lower > upper:
        raise InvalidGenerationSchemaError(
            f"no {what} is at least {lower} and at most {upper}. Widen its guides."
        )


def _refuse(guides: Sequence[GenerationGuide], allowed: set[GuideType], name: str) -> None:
    """Raise for the first guide that is not of an allowed kind."""
    for g in guides:
        if g.guide_type not in allowed:
            kinds = ", ".join(sorted(kind.name for kind in allowed)) or "none"
            raise UnsupportedGuideError(
                f"a value of the type {name} can't have the guide {g.guide_type.name}; allowed: {kinds}."
            )


def _present(**values: Any) -> Schema:
    return {name: value for name, value in values.items() if value is not None}
