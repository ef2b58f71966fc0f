"""Schemas of generable classes, in the JSON dialect of Apple's framework: guides, fields, objects."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, Flag
from typing import Any, Literal, TypeGuard, Union, get_args, get_origin

from afm_mlx.errors import shown
from afm_mlx.fm.errors import InvalidGenerationSchemaError, UnsupportedGuideError

# -- guides


class GuideType(Enum):
    """Kinds of limits on a field's value."""

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
    """A limit on the value of a field. Its fit to the field's type is checked when a schema is made.

    Args:
        guide_type: the kind of limit.
        value: the argument of the kind's class method.

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
        """Allow these strings."""
        return cls(GuideType.anyOf, values)

    @classmethod
    def constant(cls, value: str) -> GenerationGuide:
        """Allow this string only."""
        return cls(GuideType.constant, value)

    @classmethod
    def count(cls, count: int) -> GenerationGuide:
        """Require a list of `count` elements."""
        return cls(GuideType.count, count)

    @classmethod
    def element(cls, guide: GenerationGuide) -> GenerationGuide:
        """Apply a guide to all elements of a list."""
        return cls(GuideType.element, guide)

    @classmethod
    def max_items(cls, value: int) -> GenerationGuide:
        """Limit a list to `value` elements."""
        return cls(GuideType.maxItems, value)

    @classmethod
    def maximum(cls, value: int | float) -> GenerationGuide:
        """Set the largest allowed number."""
        return cls(GuideType.maximum, value)

    @classmethod
    def min_items(cls, value: int) -> GenerationGuide:
        """Require at least `value` elements in a list."""
        return cls(GuideType.minItems, value)

    @classmethod
    def minimum(cls, value: int | float) -> GenerationGuide:
        """Set the smallest allowed number."""
        return cls(GuideType.minimum, value)

    @classmethod
    def range(cls, range_tuple: tuple[int | float, int | float]) -> GenerationGuide:
        """Allow numbers from the first to the second, both included."""
        return cls(GuideType.range, range_tuple)

    @classmethod
    def regex(cls, pattern: str) -> GenerationGuide:
        """Require a string that the pattern matches as a whole."""
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
    """Define a field of a generable class, with a description for the model and limits on its value.

    Args:
        description: the purpose of the field.
        anyOf: allowed strings; for a list of strings, of each element.
        constant: the only allowed string.
        count: number of elements of a list.
        element: a guide for each element of a list.
        max_items: largest number of elements of a list.
        maximum: the largest number.
        min_items: smallest number of elements of a list.
        minimum: the smallest number.
        range: the smallest and the largest number.
        regex: a pattern that matches the whole string.

    Returns:
        A `dataclasses.field` without a default, with the metadata `description` and `guides`.

    Raises:
        ValueError: for a value that its guide can't have, and a description that is not a string.
    """
    if description is not None and not isinstance(description, str):
        raise ValueError(f"description must be a string, got {shown(description)}.")
    values = (
        *(anyOf, constant, count, element, max_items),
        *(maximum, min_items, minimum, range, regex),
    )
    guides = [
        GenerationGuide(kind, value)
        for kind, value in zip(GuideType, values, strict=True)
        if value is not None
    ]
    return field(metadata={"description": description, "guides": guides})


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object) -> bool:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return is_whole or (isinstance(value, float) and math.isfinite(value))


def _is_range(value: Any) -> bool:
    is_pair = isinstance(value, tuple) and len(value) == 2 and all(map(_is_number, value))
    return is_pair and value[0] <= value[1]


def _is_strings(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, str) for v in value)


# For each kind: its argument of `guide`, the check of its value, and what is allowed.
_VALUES: dict[GuideType, tuple[str, Callable[[object], bool], str]] = {
    GuideType.anyOf: ("anyOf", _is_strings, "a list of strings, at least one"),
    GuideType.constant: ("constant", lambda v: isinstance(v, str), "a string"),
    GuideType.count: ("count", lambda v: _is_count(v) and v > 0, "a positive integer"),
    GuideType.element: ("element", lambda v: isinstance(v, GenerationGuide), "a GenerationGuide"),
    GuideType.maxItems: ("max_items", _is_count, "a non-negative integer"),
    GuideType.maximum: ("maximum", _is_number, "a number"),
    GuideType.minItems: ("min_items", _is_count, "a non-negative integer"),
    GuideType.minimum: ("minimum", _is_number, "a number"),
    GuideType.range: ("range", _is_range, "a tuple of two numbers, the smaller one first"),
    GuideType.regex: ("regex", lambda v: isinstance(v, str), "a string"),
}


# -- fields

Schema = dict[str, Any]
TypeForm = Any
"""A type as annotations have it."""
Reference = Callable[[TypeForm], Schema]
"""Makes the schema that refers to a class."""

_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean"}
_OF_STRINGS = {GuideType.anyOf, GuideType.constant, GuideType.regex}
_OF_NUMBERS = {GuideType.minimum, GuideType.maximum, GuideType.range}
_OF_LISTS = {GuideType.count, GuideType.minItems, GuideType.maxItems, GuideType.element}
_FROM_BELOW = {GuideType.count, GuideType.minItems, GuideType.minimum, GuideType.range}
_FROM_ABOVE = {GuideType.count, GuideType.maxItems, GuideType.maximum, GuideType.range}


@dataclass(eq=False)
class Property:
    """A field of an object.

    Args:
        name: the field's key.
        type_class: str, int, float, bool, a generable class, a `Literal` or an `Enum` of strings or of
            integers, `list[T]` or `Optional[T]` of these.
        description: the field's description for the model.
        guides: limits on the field's value.
    """

    name: str
    type_class: TypeForm
    description: str | None = None
    guides: list[GenerationGuide] = field(default_factory=list)

    @property
    def is_optional(self) -> bool:
        """True if the field may be missing; it is never null."""
        return without_none(self.type_class)[1]

    def to_dict(self, reference: Reference) -> Schema:
        """Convert to the field's JSON schema; `reference` makes the schema that refers to a class.

        Raises:
            UnsupportedGuideError: for a guide that the field's type can't have.
            InvalidGenerationSchemaError: for guides that no value meets, or raised by `reference`.
        """
        try:
            schema = _value(self.type_class, self.guides, reference)
        except (UnsupportedGuideError, InvalidGenerationSchemaError) as error:
            raise type(error)(f"The field {self.name!r}: {error}") from None
        return schema | _present(description=self.description or None)


def without_none(type_class: TypeForm) -> tuple[TypeForm, bool]:
    """Split an optional type: `(T, True)` for `Optional[T]` or a `Literal` with None, else `(T, False)`."""
    if get_origin(type_class) is Literal and None in get_args(type_class):
        return Literal[tuple(v for v in get_args(type_class) if v is not None)], True
    if get_origin(type_class) in (Union, types.UnionType):
        others = [t for t in get_args(type_class) if t is not type(None)]
        if len(others) == 1:
            return without_none(others[0])[0], len(get_args(type_class)) == 2
    return type_class, False


def choices_of(type_class: TypeForm) -> list[object] | None:
    """Return the JSON values of a `Literal` or an `Enum`; None for any other type."""
    if get_origin(type_class) is Literal:
        return list(get_args(type_class))
    if isinstance(type_class, type) and issubclass(type_class, Enum):
        return [member.value for member in type_class]
    return None


def inner_types(type_class: TypeForm) -> list[TypeForm]:
    """List a type, the type of its elements, of their elements, ..., each without None."""
    found = [without_none(type_class)[0]]
    while get_origin(found[-1]) is list:
        (element,) = get_args(found[-1]) or (list,)  # typing.List has no type of its elements
        found.append(without_none(element)[0])
    return found


def _value(type_class: TypeForm, guides: Sequence[GenerationGuide], reference: Reference) -> Schema:
    """Write the JSON schema of a type's values under guides."""
    type_class, _ = without_none(type_class)
    if get_origin(type_class) is list:
        (element,) = get_args(type_class)
        inner, _ = without_none(element)
        # A choice of strings on a list of strings is a choice for each of them.
        of_each = {GuideType.anyOf, GuideType.constant} if inner is str else set()
        _refuse(guides, _OF_LISTS | of_each, f"list[{getattr(inner, '__name__', inner)}]")
        of_elements = [
            g.value if g.guide_type is GuideType.element else g
            for g in guides
            if g.guide_type in of_each | {GuideType.element}
        ]
        lower, upper = _bounds(guides, "number of elements", least=0)
        schema = {"type": "array", "items": _value(element, of_elements, reference)}
        return schema | _present(minItems=lower or None, maxItems=upper)
    if type_class is bool:  # Apple's SDK lets guides pass here, and doesn't use them
        return {"type": "boolean"}
    name = getattr(type_class, "__name__", str(type_class))
    if type_class is str:
        _refuse(guides, _OF_STRINGS, name)
        return {"type": "string"} | _string_limits(guides)
    if type_class in (int, float):
        _refuse(guides, _OF_NUMBERS, name)
        lower, upper = _bounds(guides, "number", is_whole=type_class is int)
        return {"type": _SCALARS[type_class]} | _present(minimum=lower, maximum=upper)
    choices = choices_of(type_class)
    schema = reference(type_class) if choices is None else _choice(type_class, choices)
    _refuse(guides, set(), name)
    return schema


def _choice(type_class: TypeForm, choices: Sequence[Any]) -> Schema:
    is_flag = isinstance(type_class, type) and issubclass(type_class, Flag)
    for kind in (str, int):
        is_plain = (isinstance(v, kind) and not isinstance(v, bool | Enum) for v in choices)
        if choices and not is_flag and all(is_plain):
            return {"type": _SCALARS[kind], "enum": [kind(value) for value in choices]}
    raise InvalidGenerationSchemaError(
        f"{type_class} has the values {shown(choices)}; allowed are strings only or integers only, one or more."
    )


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


def _bounds(
    guides: Sequence[GenerationGuide], what: str, least: float = -math.inf, is_whole: bool = False
) -> tuple[float | None, float | None]:
    """Return the lower bound (or `least`) and the upper bound that guides set; None where there is none.

    Bounds are rounded inwards if `is_whole`. If they exclude all, the error calls the value `what`.
    """
    lower, upper = least, math.inf
    for g in guides:
        first, last = g.value if g.guide_type is GuideType.range else (g.value, g.value)
        if g.guide_type in _FROM_BELOW:
            lower = max(lower, math.ceil(first) if is_whole else first)
        if g.guide_type in _FROM_ABOVE:
            upper = min(upper, math.floor(last) if is_whole else last)
    if lower > upper:
        raise InvalidGenerationSchemaError(
            f"no {what} is at least {lower} and at most {upper}. Widen its guides."
        )
    return None if lower == -math.inf else lower, None if upper == math.inf else upper


def _refuse(guides: Sequence[GenerationGuide], allowed: set[GuideType], name: str) -> None:
    for g in guides:
        if g.guide_type not in allowed:
            kinds = ", ".join(sorted(kind.name for kind in allowed)) or "none"
            raise UnsupportedGuideError(
                f"a value of the type {name} can't have the guide {g.guide_type.name}; allowed: {kinds}."
            )


def _present(**values: object) -> Schema:
    return {name: value for name, value in values.items() if value is not None}


# -- objects


class GenerationSchema:
    """The schema of an answer or of a tool's arguments: an object's fields.

    `generable` makes it from a class, so it is seldom made by hand.

    Args:
        type_class: the class, which gives the schema its name.
        description: the description for the model.
        properties: the fields, in the order in which they are generated.
        dynamic_nested_types: the schemas of all classes that fields refer to.

    Raises:
        TypeError: for a list without a type of its elements.
    """

    def __init__(
        self,
        type_class: type,
        description: str | None = None,
        properties: list[Property] | None = None,
        dynamic_nested_types: Sequence[GenerationSchema] = (),
    ) -> None:
        self.type_class = type_class
        self.description = description
        self.properties = properties or []
        self.dynamic_nested_types = list(dynamic_nested_types)
        for one in self.properties:
            if list in inner_types(one.type_class):
                raise TypeError(
                    f"The field {one.name!r} has the type {one.type_class}, without a type of its elements. "
                    "Write list[str], for example."
                )

    @property
    def name(self) -> str:
        """The class's name, the schema's `title`."""
        return self.type_class.__name__

    def to_dict(self) -> Schema:
        """Convert to JSON schema: `x-order` has the order of the fields, `$defs` the classes they refer to.

        Raises:
            UnsupportedGuideError: for a guide on a type of field that can't have it.
            InvalidGenerationSchemaError: for a field of another type, guides that no value meets, and two
                classes of one name.
        """
        nested: dict[str, GenerationSchema] = {}  # all schemas below this one, by name
        waiting = list(self.dynamic_nested_types)
        while waiting:
            inner = waiting.pop(0)
            known = self if inner.name == self.name else nested.get(inner.name)
            if known is None:
                nested[inner.name] = inner
                waiting += inner.dynamic_nested_types
            elif not is_same_class(known.type_class, inner.type_class):
                raise InvalidGenerationSchemaError(
                    f"Invalid generation schema {self.name!r}. Two of its classes have the name "
                    f"{inner.name}, in {known.type_class.__module__} and "
                    f"{inner.type_class.__module__}. Rename one."
                )

        def reference(type_class: TypeForm) -> Schema:
            name = type_class.__name__ if isinstance(type_class, type) else str(type_class)
            if name == self.name:
                return {"$ref": "#"}
            if name not in nested:
                raise InvalidGenerationSchemaError(
                    f"{name} can't be generated; allowed are str, int, float, bool, Literal and "
                    "Enum, classes decorated with @generable, list[T] and Optional[T] of these."
                )
            return {"$ref": f"#/$defs/{name}"}

        try:
            schema = self.object_schema(reference)
            if nested:
                schema["$defs"] = {name: n.object_schema(reference) for name, n in nested.items()}
        except (UnsupportedGuideError, InvalidGenerationSchemaError) as error:
            raise type(error)(f"Invalid generation schema {self.name!r}. {error}") from None
        return schema

    def response_format(self) -> Schema:
        """Make the `response_format` of a chat message; raises what `to_dict` raises."""
        described = _present(description=self.description or None)
        schema = {"name": self.name, **described, "schema": self.to_dict()}
        return {"type": "json_schema", "json_schema": schema}

    def object_schema(self, reference: Reference) -> Schema:
        """Convert to JSON schema without `$defs`; raise what `Property.to_dict` does.

        `reference` takes a field's class and returns the schema that refers to it, such as a `$ref`.
        """
        return {
            "title": self.name,
            **_present(description=self.description or None),
            "type": "object",
            "properties": {p.name: p.to_dict(reference) for p in self.properties},
            "required": [p.name for p in self.properties if not p.is_optional],
            "additionalProperties": False,
            "x-order": [p.name for p in self.properties],
        }


def is_same_class(a: type, b: type) -> bool:
    """True if two classes are one, or one was made from the other, as by `dataclass(slots=True)`."""
    return a is b or (a.__module__, a.__qualname__) == (b.__module__, b.__qualname__)


def with_whole_patterns(schema: Any) -> Any:
    """Anchor the patterns of a schema: guides match whole strings, JSON Schema any part."""
    if isinstance(schema, list):
        return [with_whole_patterns(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {key: with_whole_patterns(value) for key, value in schema.items()}
    if isinstance(schema.get("pattern"), str):
        changed["pattern"] = f"^(?:{schema['pattern']})$"
    return changed
