"""Cases: what a schema allows, as alternatives of one type each.

A schema means the union of its cases. Schemas of properties and items stay formulas in them, so that recursion
needs no end here. Two cases of one type meet in one case, which has what both ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from afm_mlx.guidance.schema.formulas import TRUE, Formula, conjunction
from afm_mlx.guidance.schema.numbers import Numbers
from afm_mlx.guidance.schema.strings import Strings


@dataclass(frozen=True)
class Words:
    """Null or Booleans: a set of `null`, `true`, `false`."""

    words: tuple[str, ...]

    def meet(self, other: Words) -> Words | None:
        """Words of both sets; None when there are none."""
        kept = tuple(word for word in self.words if word in other.words)
        return Words(kept) if kept else None


@dataclass(frozen=True)
class Contains:
    """How many items from an index on are of a schema."""

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
        least, most: items; most is None without a bound.
        contains: how many items are of some schemas.
        is_unique: whether no two items are equal.
        evaluated: items that a keyword has looked at, from the first on; None when all.
        evaluated_by: schemas of `contains`: items that are of them are evaluated, too.
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
        """The schema of one item."""
        return self.prefix[index] if index < len(self.prefix) else self.items

    def meet(self, other: Arrays) -> Arrays | None:
        """Arrays of both sets; None when there can be seen to be none."""
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
    """What one schema says of the properties of an object.

    Attributes:
        properties: schemas by name.
        patterns: schemas by the pattern of the name.
        rest: schema of all other properties.
        is_evaluating: whether what it lists counts as evaluated, for `unevaluatedProperties`.
        is_rest_evaluated: whether all other properties count, too.
    """

    properties: tuple[tuple[str, Formula], ...] = ()
    patterns: tuple[tuple[str, Formula], ...] = ()
    rest: Formula = TRUE
    is_evaluating: bool = True
    is_rest_evaluated: bool = False

    @cached_property
    def by_name(self) -> dict[str, Formula]:
        """Schemas of the listed properties."""
        return dict(self.properties)


@dataclass(frozen=True)
class Some:
    """That an object has a property of a kind.

    Attributes:
        like: pattern of its name; None for any.
        besides: names that it does not have.
        unlike: patterns that its name does not match.
        name: schema of its name.
        value: schema of its value.
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
        layers: what schemas say of properties; all of them hold.
        required: names of properties that all have.
        least, most: properties; most is None without a bound.
        names: schemas of all names.
        some: properties that all have, which are not known by name.
    """

    layers: tuple[Layer, ...] = ()
    required: tuple[str, ...] = ()
    least: int = 0
    most: int | None = None
    names: tuple[Formula, ...] = ()
    some: tuple[Some, ...] = ()

    def meet(self, other: Objects) -> Objects | None:
        """Objects of both sets; None when there can be seen to be none."""
        return Objects(
            layers=tuple(dict.fromkeys(self.layers + other.layers)),
            required=tuple(dict.fromkeys(self.required + other.required)),
            least=max(self.least, other.least),
            most=lesser(self.most, other.most),
            names=tuple(dict.fromkeys(self.names + other.names)),
            some=tuple(dict.fromkeys(self.some + other.some)),
        )

    def listed(self) -> list[str]:
        """Names that schemas list, in their order, and then the other required ones."""
        names = dict.fromkeys(name for layer in self.layers for name, _ in layer.properties)
        return list(names | dict.fromkeys(self.required))

    def value(self, name: str, is_like: Callable[[str, str], bool | None]) -> Formula:
        """The schema of one property's value.

        Args:
            name: of the property.
            is_like: whether a pattern matches a name; None when that depends on who asks.
        """
        parts: list[Formula] = []
        for layer in self.layers:
            own = [layer.by_name[name]] if name in layer.by_name else []
            verdicts = [(is_like(pattern, name), schema) for pattern, schema in layer.patterns]
            own += [schema for verdict, schema in verdicts if verdict is not False]
            is_sure = any(verdict for verdict, _ in verdicts) or name in layer.by_name
            parts += own if is_sure else [*own, layer.rest]
        return conjunction(*parts)


Case = Words | Numbers | Strings | Arrays | Objects


def every_case() -> list[Case]:
    """The cases of a schema that allows everything."""
    return [Words(("null",)), Words(("true", "false")), Numbers(), Strings(), Arrays(), Objects()]


def met(a: Case, b: Case) -> Case | None:
    """What two cases share; None when there can be seen to be nothing."""
    return a.meet(b) if type(a) is type(b) else None  # type: ignore[arg-type]


def joined(cases: Iterable[Case]) -> tuple[Case, ...]:
    """Cases without those that come twice. Listed strings become one case, and listed numbers."""
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
    listed: list[Case] = [Numbers(values=tuple(numbers))] if numbers else []
    return (*([Strings(values=tuple(strings))] if strings else []), *listed, *others)


def unevaluating(case: Case) -> Case:
    """A case of a complement or of listed values, which evaluate nothing."""
    if isinstance(case, Arrays):
        return replace(case, evaluated=0, evaluated_by=())
    if isinstance(case, Objects):
        layers = tuple(
            replace(layer, is_evaluating=False, is_rest_evaluated=False) for layer in case.layers
        )
        return replace(case, layers=layers)
    return case


def lesser(a: int | None, b: int | None) -> int | None:
    """The smaller of two bounds, of which each may be none."""
    return b if a is None else a if b is None else min(a, b)
