"""Cases: sets of values of one type; and what keywords say about the values of a type.

A schema is the union of its cases. Schemas of properties and items stay formulas in them, so recursion needs no
end here. The intersection of two cases of one type is one case, or None if it is known to be empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

from afm_mlx.guidance.schema.numbers import MAX_DIGITS, Numbers, exact, written
from afm_mlx.guidance.schema.patterns import is_like, searched
from afm_mlx.guidance.schema.references import (
    TRUE,
    Document,
    Formula,
    Node,
    conjunction,
    pointer,
    refuse,
)
from afm_mlx.guidance.schema.regular import Expr
from afm_mlx.guidance.schema.strings import LOOSE, MAX_LENGTH, Strings

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
MAX_COUNT = 10_000  # most items or properties that a schema may require
Keywords = Mapping[str, Any]


@dataclass(frozen=True)
class Words:
    """A set of `null`, `true` and `false`, as texts."""

    words: tuple[str, ...]

    def intersect(self, other: Words) -> Words | None:
        kept = tuple(word for word in self.words if word in other.words)
        return Words(kept) if kept else None


@dataclass(frozen=True)
class Contains:
    """Bounds for the number of items, from index `start` on, that are valid under a schema."""

    start: int
    schema: Formula
    least: int
    most: int | None


@dataclass(frozen=True)
class Arrays:
    """A set of arrays.

    Attributes:
        prefix: schemas of the first items.
        items: schema of the others.
        least, most: bounds of the number of items; most is None without a bound.
        contains: bounds for the number of items under further schemas.
        is_unique: True if all items differ.
        evaluated: the number of first items that a keyword has seen, for `unevaluatedItems`; None if all.
        evaluated_by: schemas of `contains`: items that are valid under one count as seen, too.
    """

    prefix: tuple[Formula, ...] = ()
    items: Formula = TRUE
    least: int = 0
    most: int | None = None
    contains: tuple[Contains, ...] = ()
    is_unique: bool = False
    evaluated: int | None = 0
    evaluated_by: tuple[Formula, ...] = ()

    def item(self, index: int) -> Formula:
        return self.prefix[index] if index < len(self.prefix) else self.items

    def needed(self) -> Iterator[Formula]:
        """Yield the schemas of items that every array of the set has, repeated ones once."""
        return map(self.item, range(min(self.least, len(self.prefix) + 1)))

    def intersect(self, other: Arrays) -> Arrays:
        length = max(len(self.prefix), len(other.prefix))
        evaluated = [n for n in (self.evaluated, other.evaluated) if n is not None]
        return Arrays(
            prefix=tuple(conjunction(self.item(i), other.item(i)) for i in range(length)),
            items=conjunction(self.items, other.items),
            least=max(self.least, other.least),
            most=lesser(self.most, other.most),
            contains=tuple(dict.fromkeys(self.contains + other.contains)),
            is_unique=self.is_unique or other.is_unique,
            evaluated=max(evaluated) if len(evaluated) == 2 else None,
            evaluated_by=tuple(dict.fromkeys(self.evaluated_by + other.evaluated_by)),
        )


@dataclass(frozen=True)
class Layer:
    """What one schema says about the properties of an object: one for each schema that an object must fulfil.

    Attributes:
        properties: schemas by name.
        patterns: schemas by the pattern of the name.
        rest: schema of all other properties.
        is_evaluating: True if the properties listed are evaluated: seen by a keyword, for
            `unevaluatedProperties`.
        is_rest_evaluated: True if all other properties are evaluated, too.
    """

    properties: tuple[tuple[str, Formula], ...] = ()
    patterns: tuple[tuple[str, Formula], ...] = ()
    rest: Formula = TRUE
    is_evaluating: bool = True
    is_rest_evaluated: bool = False

    @cached_property
    def by_name(self) -> dict[str, Formula]:
        return dict(self.properties)


@dataclass(frozen=True)
class Some:
    """The condition that an object has at least one property whose name and value match.

    Attributes:
        value, name: schemas of the property's value and of its name.
        like: pattern that the name matches; None if there is none.
        besides: names that the property does not have.
        unlike: patterns that the name does not match.
    """

    value: Formula
    like: str | None = None
    besides: tuple[str, ...] = ()
    unlike: tuple[str, ...] = ()
    name: Formula = TRUE


@dataclass(frozen=True)
class Objects:
    """A set of objects.

    Attributes:
        layers: for each schema that the objects fulfil, what it says about properties; all of them hold.
        required: names of properties that all have.
        least, most: bounds of the number of properties; most is None without a bound.
        names: schemas of all names.
        some: conditions, each of which at least one property of every object meets.
    """

    layers: tuple[Layer, ...] = ()
    required: tuple[str, ...] = ()
    least: int = 0
    most: int | None = None
    names: tuple[Formula, ...] = ()
    some: tuple[Some, ...] = ()

    def intersect(self, other: Objects) -> Objects:
        return Objects(
            layers=tuple(dict.fromkeys(self.layers + other.layers)),
            required=tuple(dict.fromkeys(self.required + other.required)),
            least=max(self.least, other.least),
            most=lesser(self.most, other.most),
            names=tuple(dict.fromkeys(self.names + other.names)),
            some=tuple(dict.fromkeys(self.some + other.some)),
        )

    def listed(self) -> list[str]:
        """List the names that schemas list, in their order, and then the other required ones."""
        names = dict.fromkeys(name for layer in self.layers for name, _ in layer.properties)
        return list(names | dict.fromkeys(self.required))

    def value(self, name: str) -> Formula:
        """Return the schema of one property's value.

        Where validators differ on whether a pattern matches the name, the schemas of both sides hold.
        """
        parts: list[Formula] = []
        for layer in self.layers:
            own = [layer.by_name[name]] if name in layer.by_name else []
            verdicts = [(is_like(pattern, name), schema) for pattern, schema in layer.patterns]
            own += [schema for verdict, schema in verdicts if verdict is not False]
            is_sure = any(verdict for verdict, _ in verdicts) or name in layer.by_name
            parts += own if is_sure else [*own, layer.rest]
        return conjunction(*parts)

    def needed(self) -> Iterator[Formula]:
        """Yield the schemas of values that every object of the set has."""
        return map(self.value, self.required)


Case = Words | Numbers | Strings | Arrays | Objects
EVERY_CASE: dict[str, Case] = {
    "null": Words(("null",)),
    "boolean": Words(("true", "false")),
    "number": Numbers(),
    "string": Strings(),
    "array": Arrays(),
    "object": Objects(),
}
"""The cases of a schema that allows everything, by type."""


def joined(cases: Iterable[Case]) -> tuple[Case, ...]:
    """Remove duplicates; listed strings become one case, and listed numbers."""
    others: dict[Case, None] = {}
    strings: dict[str, None] = {}
    numbers: dict[str, None] = {}
    for case in cases:
        if isinstance(case, Strings) and case.values is not None:
            strings |= dict.fromkeys(case.values)
        elif isinstance(case, Numbers) and case.values is not None:
            numbers |= dict.fromkeys(case.values)
        else:
            others[case] = None
    listed: list[Case] = [Strings(values=tuple(strings))] if strings else []
    listed += [Numbers(values=tuple(numbers))] if numbers else []
    return (*listed, *others)


def unevaluating(case: Case) -> Case:
    """Return the case with nothing marked as evaluated, as in complements and listed values."""
    if isinstance(case, Arrays):
        return replace(case, evaluated=0, evaluated_by=())
    if isinstance(case, Objects):
        layers = (replace(one, is_evaluating=False, is_rest_evaluated=False) for one in case.layers)
        return replace(case, layers=tuple(layers))
    return case


def lesser(a: int | None, b: int | None) -> int | None:
    """Return the smaller of two bounds; None is no bound."""
    return b if a is None else a if b is None else min(a, b)


# -- keywords


def types(value: Keywords, place: str) -> tuple[str, ...]:
    """List the types that a schema allows; without `type`, all."""
    if "type" not in value:
        return tuple(EVERY_CASE)
    named = value["type"] if isinstance(value["type"], list) else [value["type"]]
    for name in named:
        if name not in TYPES:
            refuse(pointer(place, "type"), name, f"a type is one of {', '.join(TYPES)}.")
    return tuple(name for name in named if not (name == "integer" and "number" in named))


def typed_case(name: str, value: Keywords, node: Node, document: Document, is_wide: bool) -> Case:
    """Return what the honoured keywords of a node say about the values of a type.

    If `is_wide`, formats and patterns match by any validator's rules. Raises `ConstraintError` for a keyword
    that can't be honoured.
    """
    match name:
        case "integer" | "number":
            return numbers(value, node.place, name == "integer")
        case "string":
            return strings(value, node.place, is_wide)
        case "array":
            return arrays(value, node, document)
        case "object":
            return objects(value, node, document)
    return EVERY_CASE[name]


def numbers(value: Keywords, place: str, is_integer: bool) -> Numbers:
    low = _number(value, "minimum", place)
    high = _number(value, "maximum", place)
    above = below = False
    for key, is_low in (("exclusiveMinimum", True), ("exclusiveMaximum", False)):
        given = value.get(key)
        if isinstance(given, bool) or given is None:  # draft 4
            above, below = (bool(given), below) if is_low else (above, bool(given))
            continue
        bound = _number(value, key, place)
        if is_low and bound is not None and (low is None or bound >= low):
            low, above = bound, True
        if not is_low and bound is not None and (high is None or bound <= high):
            high, below = bound, True
    step = _number(value, "multipleOf", place)
    if step is not None and step <= 0:
        refuse(pointer(place, "multipleOf"), value["multipleOf"], "it is a number above 0.")
    if step is not None and (step > 10**9 or step < Fraction(1, 10**9)):
        reason = "multiples of numbers from 10^-9 to 10^9 are honoured. Use another unit."
        refuse(pointer(place, "multipleOf"), value["multipleOf"], reason)
    return Numbers(is_integer or None, low, above, high, below, step)


def _number(value: Keywords, key: str, place: str) -> Fraction | None:
    """Read a keyword whose value is a number; None if it is missing."""
    if key not in value:
        return None
    given = value[key]
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if not is_number or given != given or abs(given) == float("inf"):
        refuse(pointer(place, key), given, "it is a number.")
    if abs(given) >= 10**MAX_DIGITS:
        refuse(pointer(place, key), given, f"numbers have {MAX_DIGITS} digits at most.")
    bound = exact(given)
    if isinstance(given, float) and abs(given) >= 2**53:
        # 1e23 is stored as less than 10^23: both the text and the stored number bound values.
        stored = Fraction(given)
        return (max if key.endswith("inimum") else min)(bound, stored)
    return bound


def _count(value: Keywords, key: str, place: str, largest: int | None = None) -> int | None:
    """Read a keyword whose value is a count; None if it is missing."""
    if key not in value:
        return None
    given = value[key]
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if not is_number or given < 0 or given != given // 1:
        refuse(pointer(place, key), given, "it is an integer from 0 on.")
    if largest is not None and given > largest:
        refuse(pointer(place, key), given, f"at most {largest} is allowed. Use a smaller number.")
    return int(min(given, 10**9))


def pattern(text: object, place: str, wide: bool = False) -> Expr:
    """Return the strings in which a schema's pattern is found, as `searched` does; refuse an unreadable one."""
    if not isinstance(text, str):
        refuse(place, text, "a pattern is a text.")
    try:
        return searched(text, wide=wide)
    except ValueError as error:
        refuse(place, text, f"as a pattern {error}. Use one without that.")


def strings(value: Keywords, place: str, is_wide: bool) -> Strings:
    at = pointer(place, "pattern")
    parts = [pattern(value["pattern"], at, is_wide)] if "pattern" in value else []
    formats = (value["format"],) if isinstance(value.get("format"), str) else ()
    if is_wide:
        parts += [searched(LOOSE[name], wide=True) for name in formats if name in LOOSE]
        formats = ()
    return Strings(
        shortest=_count(value, "minLength", place, MAX_LENGTH) or 0,
        longest=_count(value, "maxLength", place),
        parts=tuple(parts),
        formats=formats,
    )


def arrays(value: Keywords, node: Node, document: Document) -> Arrays:
    place = node.place
    least = _count(value, "minItems", place, MAX_COUNT) or 0
    most = _count(value, "maxItems", place)
    prefix_key = "prefixItems" if node.draft >= 2020 else "items"
    prefix: tuple[Formula, ...] = ()
    rest_key = "items"
    if isinstance(value.get(prefix_key), list):
        prefix = tuple(document.below(node, prefix_key, i) for i in range(len(value[prefix_key])))
        rest_key = "items" if node.draft >= 2020 else "additionalItems"
    elif "prefixItems" in value and node.draft >= 2020:
        refuse(pointer(place, "prefixItems"), value["prefixItems"], "it is a list of schemas.")
    has_rest = rest_key in value
    contains: tuple[Contains, ...] = ()
    if "contains" in value:
        fewest = _count(value, "minContains", place, MAX_COUNT)
        most_contained = _count(value, "maxContains", place)
        schema = document.below(node, "contains")
        contains = (Contains(0, schema, 1 if fewest is None else fewest, most_contained),)
    is_trivial = contains and contains[0].least == 0 and contains[0].most is None
    return Arrays(
        prefix=prefix,
        items=document.below(node, rest_key) if has_rest else TRUE,
        least=least,
        most=most,
        contains=() if is_trivial else contains,
        is_unique=value.get("uniqueItems") is True,
        evaluated=None if has_rest else len(prefix),
        evaluated_by=(contains[0].schema,) if contains and node.draft >= 2020 else (),
    )


def objects(value: Keywords, node: Node, document: Document) -> Objects:
    place = node.place
    for key in ("properties", "patternProperties"):
        if not isinstance(value.get(key, {}), dict):
            refuse(pointer(place, key), value[key], "it is an object of schemas.")
    patterns = value.get("patternProperties", {})
    for text in patterns:
        for wide in (False, True):
            pattern(text, pointer(place, "patternProperties", text), wide=wide)
    order = node.value.get("x-order", [])
    if not isinstance(order, list) or not all(isinstance(name, str) for name in order):
        refuse(pointer(place, "x-order"), order, "it is a list of names of properties.")
    properties = value.get("properties", {})
    names = dict.fromkeys([*(name for name in order if name in properties), *properties])
    has_rest = "additionalProperties" in value
    layer = Layer(
        properties=tuple((name, document.below(node, "properties", name)) for name in names),
        patterns=tuple(
            (text, document.below(node, "patternProperties", text)) for text in patterns
        ),
        rest=document.below(node, "additionalProperties") if has_rest else TRUE,
        is_rest_evaluated=has_rest,
    )
    required = value.get("required", [])
    if isinstance(required, bool):
        required = []  # draft 3's, which later drafts ignore at the property
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        refuse(pointer(place, "required"), required, "it is a list of names.")
    return Objects(
        layers=() if layer == Layer() else (layer,),
        required=tuple(dict.fromkeys(required)),
        least=_count(value, "minProperties", place, MAX_COUNT) or 0,
        most=_count(value, "maxProperties", place),
        names=(document.below(node, "propertyNames"),) if "propertyNames" in value else (),
    )


def constants(node: Node, document: Document, key: str) -> tuple[list[Case], list[Formula]]:
    """Read the values that `const` or `enum` lists: cases of plain values, formulas of arrays and objects."""
    values = [node.value[key]] if key == "const" else node.value[key]
    if not isinstance(values, list) or not values:
        refuse(pointer(node.place, key), values, "it is a list of values, with one at least.")
    names = {None: "null", True: "true", False: "false"}
    words = [names[v] for v in values if v is None or isinstance(v, bool)]
    counted = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    texts = [v for v in values if isinstance(v, str)]
    cases: list[Case] = [Words(tuple(dict.fromkeys(words)))] if words else []
    cases += [Numbers(values=tuple(dict.fromkeys(map(written, counted))))] if counted else []
    cases += [Strings(values=tuple(dict.fromkeys(texts)))] if texts else []
    nested = [(i, v) for i, v in enumerate(values) if isinstance(v, list | dict)]
    # Equal objects have one text, by which `unique_items` tells them apart.
    is_sorted = document.has_unique
    return cases, [document.made(node, _exactly(v, is_sorted), key, i) for i, v in nested]


def _exactly(value: list[Any] | dict[str, Any], is_sorted: bool) -> dict[str, Any]:
    """Make a schema under which only `value` is valid; if `is_sorted`, its properties come sorted by name."""
    schema: dict[str, Any] = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    if isinstance(value, list):
        items = [{**schema, "const": v} for v in value]
        counts = {"minItems": len(value), "maxItems": len(value)}
        return {**schema, "type": "array", "prefixItems": items, **counts}
    pairs = sorted(value.items()) if is_sorted else value.items()
    properties = {name: {**schema, "const": v} for name, v in pairs}
    closed = {"required": list(value), "additionalProperties": False}
    return {**schema, "type": "object", "properties": properties, **closed}
