"""Guides: what the value of a field must be like."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from afm_mlx.errors import shown


class GuideType(Enum):
    """The kinds of guides; values are the names that they have in a schema, or their own."""

    anyOf = "enum"
    constant = "constant"
    count = "count"
    element = "element"
    maxItems = "maxItems"
    maximum = "maximum"
    minItems = "minItems"
    minimum = "minimum"
    range = "range"
    regex = "regex"


@dataclass(eq=False)
class GenerationGuide:
    """One guide. Which fields it can be applied to is checked when a schema is made of it.

    Args:
        guide_type: what it limits.
        value: a string, number, list, tuple or guide, as the class method of its kind takes it.

    Raises:
        ValueError: for a value that this kind of guide can't have.
    """

    guide_type: GuideType
    value: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.guide_type, GuideType):
            raise ValueError(f"guide_type must be a GuideType, got {shown(self.guide_type)}.")
        name, is_right, allowed = _VALUES[self.guide_type]
        if not is_right(self.value):
            raise ValueError(f"{name} must be {allowed}, got {shown(self.value)}.")

    @classmethod
    def anyOf(cls, values: list[str]) -> GenerationGuide:
        """One of these strings."""
        return cls(GuideType.anyOf, values)

    @classmethod
    def constant(cls, value: str) -> GenerationGuide:
        """This string."""
        return cls(GuideType.constant, value)

    @classmethod
    def count(cls, count: int) -> GenerationGuide:
        """A list of just so many elements."""
        return cls(GuideType.count, count)

    @classmethod
    def element(cls, guide: GenerationGuide) -> GenerationGuide:
        """A list, the elements of which all follow a guide."""
        return cls(GuideType.element, guide)

    @classmethod
    def max_items(cls, value: int) -> GenerationGuide:
        """A list of so many elements at most."""
        return cls(GuideType.maxItems, value)

    @classmethod
    def maximum(cls, value: int | float) -> GenerationGuide:
        """A number that is not larger."""
        return cls(GuideType.maximum, value)

    @classmethod
    def min_items(cls, value: int) -> GenerationGuide:
        """A list of so many elements at least."""
        return cls(GuideType.minItems, value)

    @classmethod
    def minimum(cls, value: int | float) -> GenerationGuide:
        """A number that is not smaller."""
        return cls(GuideType.minimum, value)

    @classmethod
    def range(cls, range_tuple: tuple[int | float, int | float]) -> GenerationGuide:
        """A number from the first to the second, both included."""
        return cls(GuideType.range, range_tuple)

    @classmethod
    def regex(cls, pattern: str) -> GenerationGuide:
        """A string that the pattern matches as a whole."""
        return cls(GuideType.regex, pattern)


def guide(
    description: str | None = None,
    *,
    anyOf: list[str] | None = None,
    constant: str | None = None,
    count: int | None = None,
    element: GenerationGuide | None = None,
    max_items: int | None = None,
    maximum: int | float | None = None,
    min_items: int | None = None,
    minimum: int | float | None = None,
    range: tuple[int | float, int | float] | None = None,
    regex: str | None = None,
) -> Any:
    """A field of a generable class, with what the model is told about it and what its value must be like.

    Args:
        description: what the field is for.
        anyOf: the strings it may be; in a list of strings, each of its elements.
        constant: the string it is.
        count: elements of a list.
        element: a guide for each element of a list.
        max_items: elements of a list at most.
        maximum: the largest number.
        min_items: elements of a list at least.
        minimum: the smallest number.
        range: the smallest and the largest number.
        regex: a pattern that matches the whole string.

    Returns:
        A `dataclasses.field` without a default, its metadata being `description` and `guides`.

    Raises:
        ValueError: for a value that its guide can't have, and a description that is no string.
    """
    if description is not None and not isinstance(description, str):
        raise ValueError(f"description must be a string, got {shown(description)}.")
    values = {
        GuideType.anyOf: anyOf,
        GuideType.constant: constant,
        GuideType.count: count,
        GuideType.element: element,
        GuideType.maxItems: max_items,
        GuideType.maximum: maximum,
        GuideType.minItems: min_items,
        GuideType.minimum: minimum,
        GuideType.range: range,
        GuideType.regex: regex,
    }
    guides = [GenerationGuide(kind, value) for kind, value in values.items() if value is not None]
    return field(metadata={"description": description, "guides": guides})


def _is_string(value: Any) -> bool:
    return isinstance(value, str)


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, str) for v in value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return is_whole or (isinstance(value, float) and math.isfinite(value))


def _is_range(value: Any) -> bool:
    is_pair = isinstance(value, tuple) and len(value) == 2 and all(map(_is_number, value))
    return is_pair and value[0] <= value[1]


# For each kind: the name it has as an argument of `guide`, the check of its value, what is allowed.
_VALUES: dict[GuideType, tuple[str, Callable[[Any], bool], str]] = {
    GuideType.anyOf: ("anyOf", _is_strings, "a list of strings, at least one"),
    GuideType.constant: ("constant", _is_string, "a string"),
    GuideType.count: ("count", lambda value: _is_count(value) and value > 0, "a positive integer"),
    GuideType.element: (
        "element",
        lambda value: isinstance(value, GenerationGuide),
        "a GenerationGuide",
    ),
    GuideType.maxItems: ("max_items", _is_count, "a non-negative integer"),
    GuideType.maximum: ("maximum", _is_number, "a number"),
    GuideType.minItems: ("min_items", _is_count, "a non-negative integer"),
    GuideType.minimum: ("minimum", _is_number, "a number"),
    GuideType.range: ("range", _is_range, "a tuple of two numbers, the smaller one first"),
    GuideType.regex: ("regex", _is_string, "a string"),
}
