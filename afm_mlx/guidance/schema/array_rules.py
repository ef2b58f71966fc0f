"""Rules of arrays.

Unique items can't be told by a grammar that forgets them. So items are put into slots, and each slot is taken
once at most: a listed value is a slot of its own, other strings share one by their first letter, numbers by
their sign and first digit, objects by the value of one property; lists and other objects have one slot. Items
in different slots differ.
"""

from __future__ import annotations

import string
from dataclasses import replace
from itertools import product
from typing import Any

from afm_mlx.guidance.schema.builder import Builder
from afm_mlx.guidance.schema.cases import Arrays, Case, Numbers, Objects, Strings, Words, lesser
from afm_mlx.guidance.schema.formulas import FALSE, Formula, conjunction, negation
from afm_mlx.guidance.schema.keywords import MAX_COUNT
from afm_mlx.guidance.schema.numbers import exact, first_digits
from afm_mlx.guidance.schema.patterns import searched
from afm_mlx.guidance.schema.refusals import pointer, refuse
from afm_mlx.guidance.schema.regular import is_empty, quoted_text
from afm_mlx.guidance.schema.rules import (
    COMMA,
    EMPTY,
    NOTHING,
    Rule,
    either,
    maybe,
    seq,
    terminal,
    text,
    times,
)
from afm_mlx.guidance.schema.strings import string_terminals

MAX_STATES = 3_000
"""Pairs of a position and counts of `contains` at most."""
_LISTED = 50
"""Values that have slots of their own at most."""


def array_rule(case: Arrays, builder: Builder, place: str) -> Rule:
    """The texts of the arrays of a case."""
    case = replace(case, most=lesser(case.most, MAX_COUNT) if case.most is not None else None)
    if case.items == FALSE:
        case = replace(case, most=lesser(case.most, len(case.prefix)))
    if case.most is not None and case.least > case.most:
        return NOTHING
    if case.is_unique and case.most not in (0, 1):
        if not case.prefix and not case.contains:
            return seq(text("["), _distinct(case, builder, place), text("]"))
        builder.drop(pointer(place, "uniqueItems"))
        if case.least > 1:
            return NOTHING
        case = replace(case, most=1)
    inside = _counted(case, builder, place) if case.contains else _plain(case, builder)
    return seq(text("["), inside, text("]"))


def _plain(case: Arrays, builder: Builder) -> Rule:
    if case.most == 0:
        return EMPTY
    length = len(case.prefix)
    start = max(1, length)
    rule = EMPTY
    if case.most is None or case.most > start:
        high = None if case.most is None else case.most - start
        rule = times(seq(COMMA, builder.value(case.items)), max(0, case.least - start), high)
    for i in range(min(length, case.most or length) - 1, 0, -1):
        rule = seq(COMMA, builder.value(case.prefix[i]), rule)
        rule = rule if i < case.least else builder.named(maybe(rule))
    first = seq(builder.value(case.item(0)), rule)
    return first if case.least else maybe(first)


def _counted(case: Arrays, builder: Builder, place: str) -> Rule:
    """Items with counts: a rule for each position and the counts of all `contains` before it."""
    limits = [one.least if one.most is None else one.most for one in case.contains]
    starts = [one.start for one in case.contains]
    last = max(case.least, len(case.prefix), 1, *starts) if case.most is None else case.most
    states = last + 1
    for limit in limits:
        states *= limit + 1
    if states > MAX_STATES:
        refuse(
            pointer(place, "contains"),
            f"{states} combinations",
            f"at most {MAX_STATES} are followed. Use fewer.",
        )
    rules = {
        state: builder.reserved()
        for state in product(range(last + 1), *(range(limit + 1) for limit in limits))
    }
    for state, name in rules.items():
        position, counts = state[0], state[1:]
        is_end = position >= case.least and all(
            n >= one.least for n, one in zip(counts, case.contains, strict=True)
        )
        options = [EMPTY] if is_end else []
        for choice in product((True, False), repeat=len(counts)):
            after = (min(position + 1, last), *map(sum, zip(counts, choice, strict=True)))
            item = None if position == case.most else _choice(case, position, choice)
            if item is not None and after in rules:
                separator = COMMA if position else EMPTY
                options.append(seq(separator, builder.value(item), rules[after]))
        builder.define(name, either(*options))
    return rules[(0, *[0] * len(limits))]


def _choice(case: Arrays, position: int, choice: tuple[bool, ...]) -> Formula | None:
    """The schema of an item that counts for some `contains`; None where it can't."""
    parts = [case.item(position)]
    for one, is_taken in zip(case.contains, choice, strict=True):
        if is_taken and position < one.start:
            return None
        if is_taken:
            parts.append(one.schema)
        elif one.most is not None and position >= one.start:
            parts.append(negation(one.schema))
    return conjunction(*parts)


def _distinct(case: Arrays, builder: Builder, place: str) -> Rule:
    """Items of which no two share a slot."""
    items = builder.expansion.cases(case.items)
    if items and all(isinstance(item, Objects) for item in items):
        options = _object_slots(case.items, items, builder)
    else:
        listed = _listed_values(items)
        options = [pair for item in items for pair in _slots(item, listed, builder, place)]
    count = len({slot for slot, _ in options})
    if case.least > count:
        refuse(
            pointer(place, "uniqueItems"),
            True,
            f"with these items only {count} can be told apart, and minItems is {case.least}. Use fewer.",
        )
    return ("distinct", tuple(options), case.least, case.most)


def _listed_values(items: tuple[Case, ...]) -> set[type]:
    """Of strings and numbers, those that the schema lists: so few that each can have a slot."""
    sizes = {
        kind: [len(item.values or ()) or _LISTED + 1 for item in items if isinstance(item, kind)]
        for kind in (Strings, Numbers)
    }
    return {kind for kind, own in sizes.items() if sum(own) <= _LISTED // 2}


def _slots(item: Case, listed: set[type], builder: Builder, place: str) -> list[tuple[str, Rule]]:
    """The slots of the items of a case, each with the rule of its items."""
    if isinstance(item, Words):
        return [(word, text(word)) for word in item.words]
    if isinstance(item, Strings) and Strings in listed:
        return [(f"string {v}", text(quoted_text(v))) for v in item.values or ()]
    if isinstance(item, Numbers) and Numbers in listed:
        return [(f"number {exact(v)}", text(v)) for v in item.values or ()]
    if isinstance(item, Strings):
        starts = {letter: searched(pattern, wide=False) for letter, pattern in _STARTS.items()}
        return [
            (f"string {letter}", terminal(right))
            for letter, start in starts.items()
            for right in string_terminals(item, start)
        ]
    if isinstance(item, Numbers):
        heads = [sign + str(digit) for sign in ("", "-") for digit in range(10)]
        return [
            (f"number {head}", terminal(right))
            for head in heads
            for right in first_digits(item, head)
            if is_empty(right) is False
        ]
    return [(type(item).__name__, builder.case(item, place))]


def _object_slots(
    schema: Formula, items: tuple[Case, ...], builder: Builder
) -> list[tuple[str, Rule]]:
    """Objects by the value of one property, which all of them have then; without such a property, one slot."""
    document = builder.expansion.document
    listed = [item.listed() for item in items if isinstance(item, Objects)]
    required = [item.required for item in items if isinstance(item, Objects)]
    shared = [name for name in listed[0] if all(name in names for names in listed)]
    shared.sort(key=lambda name: not all(name in names for names in required))
    for name in shared:
        options = []
        for slot, value in _VALUES.items():
            own = {"type": "object", "required": [name], "properties": {name: value}}
            part = conjunction(schema, document.own(own))
            if not builder.expansion.is_void(part, 0):
                options.append((slot, builder.value(part)))
        if len(options) > 1:
            return options
    return [("an object", builder.value(schema))]


_STARTS = {c: f"^[{c}{c.upper()}]" for c in string.ascii_lowercase} | {
    c: f"^{c}" for c in string.digits
}
_STARTS["other"] = "^(?![A-Za-z0-9])"
"""Slots of strings, as patterns: the first letter, whether small or not, or digit."""
_VALUES: dict[str, dict[str, Any]] = {
    slot: {"type": "string", "pattern": pattern} for slot, pattern in _STARTS.items()
}
_VALUES |= {f"{n}": {"type": "integer", "minimum": n, "maximum": n} for n in range(20)}
_VALUES |= {"more": {"type": "integer", "minimum": 20}, "less": {"type": "integer", "maximum": -1}}
"""Slots of objects, as schemas of a property."""
