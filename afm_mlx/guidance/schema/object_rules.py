"""Rules of objects: listed properties in their order, then the others.

Properties that are not listed have names of one kind or more: which patterns they match decides on their
schema. Nothing keeps such a name from coming twice; readers of JSON take the last one, so where counting or the
presence of such a property matters, one at most is counted on, and it comes last.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from afm_mlx.guidance.schema.builder import Builder
from afm_mlx.guidance.schema.cases import Layer, Objects, Some, Strings
from afm_mlx.guidance.schema.formulas import FALSE, TRUE, Formula, conjunction
from afm_mlx.guidance.schema.patterns import is_like, searched
from afm_mlx.guidance.schema.refusals import pointer, refuse, refuse_at
from afm_mlx.guidance.schema.regular import Expr, both, complement, literal, quoted_text, union
from afm_mlx.guidance.schema.rules import (
    COLON,
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

MAX_STATES = 5_000
"""Pairs of a property and a count at most, where `minProperties` or `maxProperties` count optional ones."""
_PATTERNS = 5
"""Patterns whose combinations are all looked at; of more, each name matches one at most."""
MAX_PATTERNS = 30
"""Patterns of names at most."""
MAX_OPTIONAL = 900
"""Properties that may be left out at most: llguidance follows 2,000 ways at once, two for each of them."""
_CANDIDATES = 30
"""Listed properties that are tried as the one that must be there at most."""

ANY_PROPERTY = Some(TRUE)
Item = tuple[Rule, bool]


def object_rule(case: Objects, builder: Builder, place: str) -> Rule:
    """The texts of the objects of a case."""
    if case.some:
        return _with_some(case, builder, place)
    listed = _listed(case, builder, place)
    return _members(case, listed, _free(case, listed, builder, place), None, builder, place)


def _with_some(case: Objects, builder: Builder, place: str) -> Rule:
    """Objects with a property that is known by its kind only: a listed one, or the last one."""
    some, case = case.some[0], replace(case, some=case.some[1:])
    listed = _listed(case, builder, place)
    candidates = [name for name in listed if _is_kind(name, some, builder)][:_CANDIDATES]
    layers = [Layer(properties=((name, some.value),), is_evaluating=False) for name in candidates]
    options = [
        builder.case(
            replace(
                case,
                layers=(*case.layers, layer),
                required=tuple(dict.fromkeys((*case.required, name))),
            ),
            place,
        )
        for name, layer in zip(candidates, layers, strict=True)
    ]
    if case.some:
        builder.drop(place)
        return either(*options)
    last = either(*_free(case, listed, builder, place, some))
    free = _free(case, listed, builder, place)
    return either(*options, _members(case, listed, free, last, builder, place))


def _is_kind(name: str, some: Some, builder: Builder) -> bool:
    if name in some.besides or any(is_like(text, name) is not False for text in some.unlike):
        return False
    return (some.like is None or is_like(some.like, name) is True) and _is_named(
        name, (some.name,), builder
    )


def _is_named(name: str, schemas: tuple[Formula, ...], builder: Builder) -> bool:
    """True if a name is of the schemas of names."""
    return all(
        any(isinstance(one, Strings) and one.has(name) for one in builder.expansion.cases(schema))
        for schema in schemas
    )


def _listed(case: Objects, builder: Builder, place: str) -> dict[str, Formula]:
    """Properties that are known by name, with the schema of their value."""
    names = case.listed()
    finite = _finite_names(case, builder)
    if finite is not None:
        names = list(dict.fromkeys([*names, *finite]))
    result = {}
    for name in names:
        builder.expansion.check_time(place)
        is_named = _is_named(name, case.names, builder)
        result[name] = case.value(name, is_like) if is_named else FALSE
    return result


def _finite_names(case: Objects, builder: Builder) -> list[str] | None:
    """All names that the schemas of names allow; None when they are not listed."""
    for schema in case.names:
        texts = [one for one in builder.expansion.cases(schema) if isinstance(one, Strings)]
        if all(one.values is not None for one in texts):
            return [value for one in texts for value in one.values or ()]
    return None


def _free(
    case: Objects,
    listed: dict[str, Formula],
    builder: Builder,
    place: str,
    some: Some = ANY_PROPERTY,
) -> list[Rule]:
    """Properties that are not known by name: rules of a name and its value.

    Args:
        case: the objects.
        listed: properties that are known by name.
        builder: the grammar.
        place: of the schema.
        some: what kind they have to be of.
    """
    if _finite_names(case, builder) is not None:
        return []
    named = [text for layer in case.layers for text, _ in layer.patterns]
    needed = () if some.like is None else (some.like,)
    patterns = list(dict.fromkeys([*named, *needed, *some.unlike]))
    if len(patterns) > MAX_PATTERNS:
        at = pointer(place, "patternProperties")
        refuse(at, patterns, f"at most {MAX_PATTERNS} patterns are followed.")
    taken = [literal(name) for name in dict.fromkeys([*listed, *some.besides])]
    result = []
    for matched in _combinations(patterns):
        schema = conjunction(_free_value(case, matched), some.value)
        is_kind = set(needed) <= set(matched) and not set(some.unlike) & set(matched)
        if schema == FALSE or not is_kind:
            continue
        parts = [searched(text, wide=False) for text in matched]
        parts += [complement(searched(text, wide=True)) for text in patterns if text not in matched]
        parts += [complement(union(*taken))] if taken else []
        names = _names((*case.names, some.name), parts, builder)
        result += [seq(terminal(name), COLON, builder.value(schema)) for name in names]
    return result


def _combinations(patterns: list[str]) -> list[tuple[str, ...]]:
    largest = len(patterns) if len(patterns) <= _PATTERNS else 1
    return [chosen for size in range(largest + 1) for chosen in combinations(patterns, size)]


def _free_value(case: Objects, matched: tuple[str, ...]) -> Formula:
    """The schema of a property whose name is not listed and matches these patterns only."""
    parts: list[Formula] = []
    for layer in case.layers:
        own = [schema for text, schema in layer.patterns if text in matched]
        parts += own or [layer.rest]
    return conjunction(*parts)


def _names(schemas: tuple[Formula, ...], parts: list[Expr], builder: Builder) -> list[str]:
    """Terminals of the names that are of all schemas and parts."""
    options = [Strings()]
    for schema in dict.fromkeys(schemas):
        texts = [one for one in builder.expansion.cases(schema) if isinstance(one, Strings)]
        options = [found for a in options for b in texts if (found := a.meet(b)) is not None]
    return [right for option in options for right in string_terminals(option, both(*parts))]


def _members(
    case: Objects,
    listed: dict[str, Formula],
    free: list[Rule],
    last: Rule | None,
    builder: Builder,
    place: str,
) -> Rule:
    """An object's text.

    Args:
        case: the objects.
        listed: properties that are known by name.
        free: rules of the others.
        last: rule of a property that comes last; None when there need be none.
        builder: the grammar.
        place: of the schema.
    """
    if any(listed[name] == FALSE for name in case.required) or last == NOTHING:
        return NOTHING
    items = [
        (seq(text(quoted_text(name)), COLON, builder.value(schema)), name in case.required)
        for name, schema in listed.items()
        if schema != FALSE
    ]
    if (optional := sum(not is_required for _, is_required in items)) > MAX_OPTIONAL:
        refuse_at(
            place,
            f"{optional} properties may be left out, and {MAX_OPTIONAL} at most. Require more of them.",
        )
    n_required = sum(is_required for _, is_required in items) + (last is not None)
    is_counted = case.least > n_required or (
        case.most is not None and (len(items) > case.most or free)
    )
    if is_counted:
        inside = _counted(case, items, either(*free), last, builder, place)
    else:
        inside = _plain(items, either(*free), last, builder)
    return seq(text("{"), inside, text("}"))


def _plain(items: list[Item], free: Rule, last: Rule | None, builder: Builder) -> Rule:
    """Members without counting."""
    ending = seq(times(seq(COMMA, free), 0, None), *([COMMA, last] if last else []))
    alone = seq(times(seq(free, COMMA), 0, None), last) if last else _list_of(free, 0, None)
    first_required = next(
        (i for i, (_, is_required) in enumerate(items) if is_required), len(items)
    )
    after = (
        ending
        if first_required == len(items)
        else seq(*_following(items[first_required + 1 :]), ending)
    )
    if first_required < len(items):
        alone = seq(items[first_required][0], after)
        after = seq(COMMA, items[first_required][0], after)
    optional = [item for item, _ in items[:first_required]]
    return either(_some_of(optional, after, builder), alone)


def _some_of(items: list[Rule], after: Rule, builder: Builder) -> Rule:
    """One of the optional members or more, and what follows them.

    By halves: a rule for each of a thousand members would name the next one, too deep to compile.
    """
    if len(items) <= 1:
        return seq(*items, after) if items else NOTHING
    half = len(items) // 2
    after = builder.named(after)
    following = builder.named(seq(*(maybe(seq(COMMA, item)) for item in items[half:]), after))
    return either(
        _some_of(items[:half], following, builder), _some_of(items[half:], after, builder)
    )


def _following(items: list[Item]) -> list[Rule]:
    return [
        seq(COMMA, item) if is_required else maybe(seq(COMMA, item)) for item, is_required in items
    ]


def _list_of(item: Rule, low: int, high: int | None) -> Rule:
    """So many items with commas between them."""
    if high == 0 or (item == NOTHING and not low):
        return EMPTY
    rule = seq(item, times(seq(COMMA, item), max(0, low - 1), None if high is None else high - 1))
    return rule if low else maybe(rule)


def _counted(
    case: Objects, items: list[Item], free: Rule, last: Rule | None, builder: Builder, place: str
) -> Rule:
    """Members with a rule for each property and the number of those before it."""
    limit = min(case.least if case.most is None else case.most, len(items))
    if (len(items) + 1) * (limit + 1) > MAX_STATES:
        got = f"{len(items)} properties and a count of {limit}"
        refuse(
            pointer(place, "minProperties or maxProperties"),
            got,
            f"at most {MAX_STATES} pairs are followed.",
        )
    following = {n: _rest_of_count(case, n, free, last, builder, place) for n in range(limit + 1)}
    for i in range(len(items) - 1, -1, -1):
        item, is_required = items[i]
        rules = {}
        for n in range(min(i, limit) + 1):
            more = n + 1 if case.most is not None else min(n + 1, limit)
            separator = COMMA if n or (case.most is None and limit == 0 and i) else EMPTY
            taken = [seq(separator, item, following[more])] if more in following else []
            rules[n] = builder.named(either(*taken, *([] if is_required else [following[n]])))
        following = rules
    return following[0]


def _rest_of_count(
    case: Objects, n: int, free: Rule, last: Rule | None, builder: Builder, place: str
) -> Rule:
    """What may follow n listed properties."""
    low = max(0, case.least - n - (last is not None))
    high = None if case.most is None else case.most - n - (last is not None)
    if high is not None and high < low:
        return NOTHING
    ended = [last] if last else []
    if low > 1 and free != NOTHING:
        builder.drop(pointer(place, "minProperties"))
    if low > 1 or (low and free == NOTHING) or (low and last):
        return NOTHING
    if last:
        return seq(COMMA if n else EMPTY, times(seq(free, COMMA), 0, high), *ended)
    return times(seq(COMMA, free), low, high) if n else _list_of(free, low, high)
