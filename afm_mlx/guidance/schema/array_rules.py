"""Rules of arrays.

A grammar forgets the items that it has seen, so lists whose items must differ are marked, and who follows the
grammar forbids equal items (`unique_items`). Here they are made no longer than there are different items, so
that one can always follow.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from typing import Any

from afm_mlx.guidance.schema.builder import Builder
from afm_mlx.guidance.schema.cases import Arrays, Case, Numbers, Objects, Strings, Words, lesser
from afm_mlx.guidance.schema.formulas import FALSE, Formula, conjunction, negation
from afm_mlx.guidance.schema.keywords import MAX_COUNT
from afm_mlx.guidance.schema.numbers import number_terminals
from afm_mlx.guidance.schema.refusals import pointer, refuse
from afm_mlx.guidance.schema.regular import identity, values_of
from afm_mlx.guidance.schema.rules import (
    ALIKE,
    COMMA,
    EMPTY,
    NOTHING,
    VARIED,
    Rule,
    either,
    maybe,
    seq,
    text,
    times,
)
from afm_mlx.guidance.schema.strings import string_terminals

MAX_STATES = 3_000
"""Pairs of a position and counts of `contains` at most."""
_COUNTED = 64
"""Different items that are counted at most, where no more are asked for."""


def array_rule(case: Arrays, builder: Builder, place: str) -> Rule:
    """The texts of the arrays of a case."""
    case = replace(case, most=lesser(case.most, MAX_COUNT) if case.most is not None else None)
    if case.items == FALSE:
        case = replace(case, most=lesser(case.most, len(case.prefix)))
    if case.most is not None and case.least > case.most:
        return NOTHING
    mark = EMPTY
    if case.is_unique and case.most not in (0, 1):
        case = _with_different_items(case, builder, place)
        is_varied = case.prefix or case.contains
        mark = maybe(text(VARIED if is_varied else ALIKE)) if case.most != 1 else EMPTY
        if not is_varied and case.least > 1:
            builder.ask_for(case.items, case.least, pointer(place, "uniqueItems"))
    inside = _counted(case, builder, place) if case.contains else _plain(case, builder)
    return seq(text("["), mark, inside, text("]"))


def _with_different_items(case: Arrays, builder: Builder, place: str) -> Arrays:
    """An array that is not longer than there are different items for its places."""
    for position in range(max(len(case.prefix) + 1, case.least)):
        count = _count(case.item(position), max(_COUNTED, case.least), builder)
        if count is None and position >= len(case.prefix):
            return case
        if count is None:
            continue
        before = case.prefix[:position]
        rivals = sum(not builder.expansion.are_disjoint(one, case.item(position)) for one in before)
        if position >= len(case.prefix):
            return _cut(case, position + max(0, count - rivals), builder, place)
        if count <= rivals:
            return _cut(case, position, builder, place)
    return case


def _cut(case: Arrays, most: int, builder: Builder, place: str) -> Arrays:
    if case.least > most:
        refuse(
            pointer(place, "uniqueItems"),
            True,
            f"only {most} items can differ, and {case.least} are asked for. Ask for fewer.",
        )
    return replace(case, most=lesser(case.most, most))


def _count(schema: Formula, limit: int, builder: Builder) -> int | None:
    """How many values a schema has, when they are plain and fewer than a limit; else None."""
    found: set[Any] = set()
    for case in builder.expansion.cases(schema):
        values = _values(case, limit)
        if values is None or len(found := found | values) >= limit:
            return None
    return len(found)


def _values(case: Case, limit: int) -> set[Any] | None:
    """The `identity` of plain values, so many at most; None when they are hard to find."""
    is_free = isinstance(case, Strings) and case == Strings(case.shortest, formats=case.formats)
    if isinstance(case, Arrays | Objects) or is_free:
        return None
    if isinstance(case, Words):
        return {identity(json.loads(word)) for word in case.words}
    if case.values is not None:
        given = map(json.loads, case.values) if isinstance(case, Numbers) else case.values
        return set(map(identity, given))
    terminals = string_terminals(case) if isinstance(case, Strings) else number_terminals(case)
    found: set[Any] = set()
    for right in terminals:
        name = "x" if right.startswith("%json") else "X"
        values = values_of(f"start: {name}\n{name}: {right}", limit)
        if values is None:
            return None
        found |= values
    return found


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
