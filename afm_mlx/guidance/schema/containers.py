"""Rules of cases: of plain values, arrays and objects.

A grammar forgets the items that it has seen. Arrays whose items must differ are marked, and whoever follows the
grammar forbids equal items (`unique_items`). Here they get no longer than there are different items, so that
another one can always follow.

Objects have their listed properties in order, then the others. Which patterns the name of an unlisted
property matches decides its schema. Nothing keeps such a name from coming twice, and readers of JSON take the
last one; so where counts or the presence of such a property matter, only one is relied on, and it comes last.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from dataclasses import replace
from itertools import chain, combinations, product, takewhile
from typing import Any

from afm_mlx.errors import ConstraintError
from afm_mlx.guidance.schema.cases import (
    MAX_COUNT,
    Arrays,
    Case,
    Layer,
    Numbers,
    Objects,
    Some,
    Strings,
    Words,
    lesser,
)
from afm_mlx.guidance.schema.expansion import Expansion
from afm_mlx.guidance.schema.numbers import number_terminals
from afm_mlx.guidance.schema.patterns import is_like, searched
from afm_mlx.guidance.schema.references import (
    FALSE,
    TRUE,
    CompileBudget,
    Document,
    Formula,
    conjunction,
    negation,
    pointer,
    refuse,
    refuse_at,
)
from afm_mlx.guidance.schema.regular import (
    both,
    complement,
    literal,
    quoted_text,
    union,
    values_of,
)
from afm_mlx.guidance.schema.rules import (
    COLON,
    COMMA,
    EMPTY,
    NOTHING,
    LarkTerminal,
    Named,
    Rule,
    Text,
    either,
    maybe,
    seq,
    times,
)
from afm_mlx.guidance.schema.strings import string_terminals
from afm_mlx.guidance.unique_items import ALIKE, VARIED, identity

MAX_RULES = 15_000  # most rules of a grammar


class Builder:
    """A grammar that rules are added to.

    Attributes:
        document: the schemas.
        expansion: turns formulas into cases.
        rules: rules by name.
        names: the rule of a formula, or of a case at a place.
        pending: formulas whose rules have names, but are not made yet.
        dropped: places where some valid values are left out.
        counted: formulas that need at least a count of different values, with count and place.
    """

    def __init__(self, document: Document) -> None:
        self.document = document
        self.expansion = Expansion(document, CompileBudget())
        self.rules: dict[str, Rule] = {}
        self.names: dict[Any, Named] = {}
        self.pending: list[Formula] = []
        self.dropped: list[str] = []
        self.counted: list[tuple[Formula, int, str]] = []

    def value(self, formula: Formula) -> Named:
        """Name the rule of a formula; if it is new, it becomes pending."""
        if formula not in self.names:
            self.names[formula] = self.reserved(self.document.place(formula))
            self.pending.append(formula)
        return self.names[formula]

    def case(self, case: Case, place: str) -> Rule:
        """Make the rule of one case of the schema at a place."""
        try:
            if isinstance(case, Words):
                return either(*map(Text, case.words))
            if isinstance(case, Numbers):
                # `unique_items` compares items by their text.
                is_unique = self.document.has_unique
                return either(*map(LarkTerminal, number_terminals(case, is_canonical=is_unique)))
            if isinstance(case, Strings):
                return either(*map(LarkTerminal, string_terminals(case)))
            key = (case, place)
            if key not in self.names:
                self.names[key] = name = self.reserved(place)
                make = _array if isinstance(case, Arrays) else _object
                self.rules[name.name] = make(case, self, place)  # type: ignore[arg-type]
            return self.names[key]
        except ConstraintError:
            raise
        except ValueError as error:
            refuse_at(place, f"{error}. Use simpler patterns.")

    def named(self, rule: Rule) -> Rule:
        """Define a rule under a new name, so that it can be used many times."""
        if isinstance(rule, Named | Text) or rule in (EMPTY, NOTHING):
            return rule
        name = self.reserved()
        self.rules[name.name] = rule
        return name

    def reserved(self, place: str = "#") -> Named:
        """Add a name whose rule is defined later; refuse the schema at a place if there are too many."""
        if len(self.rules) >= MAX_RULES:
            refuse_at(place, f"the grammar has {MAX_RULES} rules already. Give a smaller schema.")
        name = f"r{len(self.rules)}"
        self.rules[name] = NOTHING
        return Named(name)


# -- arrays

MAX_CONTAINS_STATES = 3_000  # most pairs of a position and counts of `contains`
_COUNTED = 64  # most different items that are counted, unless `minItems` needs more


def _array(case: Arrays, builder: Builder, place: str) -> Rule:
    case = replace(case, most=lesser(case.most, MAX_COUNT) if case.most is not None else None)
    if case.items == FALSE:
        case = replace(case, most=lesser(case.most, len(case.prefix)))
    if case.most is not None and case.least > case.most:
        return NOTHING
    mark = EMPTY
    if case.is_unique and case.most not in (0, 1):
        case = _with_different_items(case, builder, place)
        is_varied = case.prefix or case.contains
        mark = maybe(Text(VARIED if is_varied else ALIKE)) if case.most != 1 else EMPTY
        if not is_varied and case.least > 1:
            builder.counted.append((case.items, case.least, pointer(place, "uniqueItems")))
    is_counted = bool(case.contains)
    inside = _counted_items(case, builder, place) if is_counted else _uncounted_items(case, builder)
    return seq(Text("["), mark, inside, Text("]"))


def _with_different_items(case: Arrays, builder: Builder, place: str) -> Arrays:
    """Shorten arrays to the number of different items that their positions can have."""
    for position in range(max(len(case.prefix) + 1, case.least)):
        is_listed = position < len(case.prefix)
        count = _count(case.item(position), max(_COUNTED, case.least), builder)
        if count is None and is_listed:
            continue
        if count is None:
            break
        before = case.prefix[:position]
        rivals = sum(not builder.expansion.are_disjoint(one, case.item(position)) for one in before)
        if is_listed and count > rivals:
            continue
        most = position + max(0, count - rivals)
        if case.least > most:
            reason = f"only {most} items can differ, but {case.least} are required. Require fewer."
            refuse(pointer(place, "uniqueItems"), True, reason)
        return replace(case, most=lesser(case.most, most))
    return case


def _count(schema: Formula, limit: int, builder: Builder) -> int | None:
    """Count the different values of a schema; None if some are not plain, or if the limit is reached."""
    found: set[Hashable] = set()
    for case in builder.expansion.cases(schema):
        values = _values(case, limit)
        if values is None or len(found := found | values) >= limit:
            return None
    return len(found)


def _values(case: Case, limit: int) -> set[Hashable] | None:
    """Return the `identity` of each plain value of a case; None for lists, objects, free text and long values.

    The search may end once `limit` values were found, and listed values are all returned.
    """
    is_free = isinstance(case, Strings) and case == Strings(case.shortest, formats=case.formats)
    if isinstance(case, Arrays | Objects) or is_free:
        return None
    if isinstance(case, Words):
        return {identity(json.loads(word)) for word in case.words}
    if case.values is not None:
        given = map(json.loads, case.values) if isinstance(case, Numbers) else case.values
        return set(map(identity, given))
    terminals = string_terminals(case) if isinstance(case, Strings) else number_terminals(case)
    found: set[Hashable] = set()
    for right in terminals:
        name = "x" if right.startswith("%json") else "X"
        values = values_of(f"start: {name}\n{name}: {right}", limit)
        if values is None:
            return None
        found |= values
    return found


def _uncounted_items(case: Arrays, builder: Builder) -> Rule:
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


def _counted_items(case: Arrays, builder: Builder, place: str) -> Rule:
    """Make the rule of arrays with `contains`: one for each position and count of matching items before it."""
    limits = [one.least if one.most is None else one.most for one in case.contains]
    starts = [one.start for one in case.contains]
    last = max(case.least, len(case.prefix), 1, *starts) if case.most is None else case.most
    states = last + 1
    for limit in limits:
        states *= limit + 1
    if states > MAX_CONTAINS_STATES:
        reason = f"at most {MAX_CONTAINS_STATES} are followed. Use fewer."
        refuse(pointer(place, "contains"), f"{states} combinations", reason)
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
        builder.rules[name.name] = either(*options)
    return rules[(0, *[0] * len(limits))]


def _choice(case: Arrays, position: int, choice: tuple[bool, ...]) -> Formula | None:
    """Return the schema of the item at `position` that counts for the chosen `contains`; None if it can't.

    `choice` is True for each chosen one. The item matches none of the others that have a maximum.
    """
    parts = [case.item(position)]
    for one, is_taken in zip(case.contains, choice, strict=True):
        if is_taken and position < one.start:
            return None
        if is_taken:
            parts.append(one.schema)
        elif one.most is not None and position >= one.start:
            parts.append(negation(one.schema))
    return conjunction(*parts)


# -- objects

MAX_STATES = 5_000
"""Most pairs of a property and a count, if `minProperties` or `maxProperties` count optional ones."""
_PATTERNS = 5
"""Most patterns whose combinations are all followed; of more, each name matches at most one."""
MAX_PATTERNS = 30  # most patterns of names
MAX_OPTIONAL = 900
"""Most optional properties: llguidance follows 2,000 alternatives at once, two for each."""
_CANDIDATES = 30  # most listed properties that are tried as the required one of a kind

ANY_PROPERTY = Some(TRUE)
Item = tuple[Rule, bool]


def _object(case: Objects, builder: Builder, place: str) -> Rule:
    listed = _listed(case, builder, place)
    if not case.some:
        return _members(case, listed, _free(case, listed, builder, place), None, builder, place)
    # One of the listed properties is the required one of the first kind, or the last property is.
    some, case = case.some[0], replace(case, some=case.some[1:])
    options = []
    for name in [name for name in listed if _is_kind(name, some, builder)][:_CANDIDATES]:
        layer = Layer(properties=((name, some.value),), is_evaluating=False)
        required = tuple(dict.fromkeys((*case.required, name)))
        chosen = replace(case, layers=(*case.layers, layer), required=required)
        options.append(builder.case(chosen, place))
    if case.some:
        builder.dropped.append(place)
        return either(*options)
    last = either(*_free(case, listed, builder, place, some))
    free = _free(case, listed, builder, place)
    return either(*options, _members(case, listed, free, last, builder, place))


def _is_kind(name: str, some: Some, builder: Builder) -> bool:
    """True if a property of this name surely meets the condition `some`, given the right value."""
    if name in some.besides or any(is_like(text, name) is not False for text in some.unlike):
        return False
    is_liked = some.like is None or is_like(some.like, name) is True
    return is_liked and _is_named(name, (some.name,), builder)


def _is_named(name: str, schemas: tuple[Formula, ...], builder: Builder) -> bool:
    """True if a name is valid under the schemas of names."""
    return all(
        any(isinstance(one, Strings) and one.has(name) for one in builder.expansion.cases(schema))
        for schema in schemas
    )


def _listed(case: Objects, builder: Builder, place: str) -> dict[str, Formula]:
    """Map the properties of known name to the schemas of their values."""
    result = {}
    for name in dict.fromkeys([*case.listed(), *(_finite_names(case, builder) or ())]):
        builder.expansion.budget.spend(place, 0)
        is_named = _is_named(name, case.names, builder)
        result[name] = case.value(name) if is_named else FALSE
    return result


def _finite_names(case: Objects, builder: Builder) -> list[str] | None:
    """List all names that the schemas of names allow; None if no schema lists them."""
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
    """Make rules of unlisted properties that meet `some`, one for each set of patterns that names match."""
    if _finite_names(case, builder) is not None:
        return []
    needed = () if some.like is None else (some.like,)
    named = [text for layer in case.layers for text, _ in layer.patterns]
    patterns = list(dict.fromkeys([*named, *needed, *some.unlike]))
    if len(patterns) > MAX_PATTERNS:
        at = pointer(place, "patternProperties")
        refuse(at, patterns, f"at most {MAX_PATTERNS} patterns are followed.")
    taken = [literal(name) for name in dict.fromkeys([*listed, *some.besides])]
    largest = len(patterns) if len(patterns) <= _PATTERNS else 1
    result = []
    for matched in chain.from_iterable(combinations(patterns, n) for n in range(largest + 1)):
        values: list[Formula] = []
        for layer in case.layers:
            own = [schema for text, schema in layer.patterns if text in matched]
            values += own or [layer.rest]
        schema = conjunction(*values, some.value)
        is_kind = set(needed) <= set(matched) and not set(some.unlike) & set(matched)
        if schema == FALSE or not is_kind:
            continue
        parts = [searched(text, wide=False) for text in matched]
        parts += [complement(searched(text, wide=True)) for text in patterns if text not in matched]
        parts += [complement(union(*taken))] if taken else []
        names = [Strings()]
        for one in dict.fromkeys((*case.names, some.name)):
            texts = [text for text in builder.expansion.cases(one) if isinstance(text, Strings)]
            names = [met for a in names for b in texts if (met := a.intersect(b)) is not None]
        for right in [right for name in names for right in string_terminals(name, both(*parts))]:
            result.append(seq(LarkTerminal(right), COLON, builder.value(schema)))
    return result


def _members(
    case: Objects,
    listed: dict[str, Formula],
    free: list[Rule],
    last: Rule | None,
    builder: Builder,
    place: str,
) -> Rule:
    """Make the rule of objects from listed properties, rules of free ones, and the rule of a last one."""
    if any(listed[name] == FALSE for name in case.required) or last == NOTHING:
        return NOTHING
    items = [
        (seq(Text(quoted_text(name)), COLON, builder.value(schema)), name in case.required)
        for name, schema in listed.items()
        if schema != FALSE
    ]
    if (optional := sum(not is_required for _, is_required in items)) > MAX_OPTIONAL:
        refuse_at(
            place,
            f"{optional} properties may be left out; at most {MAX_OPTIONAL} are followed. Require more.",
        )
    n_required = len(items) - optional + (last is not None)
    is_bounded = case.most is not None and (len(items) > case.most or free)
    if case.least > n_required or is_bounded:
        inside = _counted_members(case, items, either(*free), last, builder, place)
    else:
        inside = _uncounted_members(items, either(*free), last, builder)
    return seq(Text("{"), inside, Text("}"))


def _uncounted_members(items: list[Item], free: Rule, last: Rule | None, builder: Builder) -> Rule:
    after = seq(times(seq(COMMA, free), 0, None), *([COMMA, last] if last else []))
    alone = seq(times(seq(free, COMMA), 0, None), last) if last else _list_of(free, 0, None)
    optional = [item for item, _ in takewhile(lambda item: not item[1], items)]
    if len(optional) < len(items):
        (first, _), *following = items[len(optional) :]
        commas = [(seq(COMMA, item), is_required) for item, is_required in following]
        after = seq(*(item if needed else maybe(item) for item, needed in commas), after)
        alone, after = seq(first, after), seq(COMMA, first, after)
    return either(_some_of(optional, after, builder), alone)


def _some_of(items: list[Rule], after: Rule, builder: Builder) -> Rule:
    """Make the rule of one or more of `items`, optional properties, in their order with commas, and `after`.

    No items: a rule that matches nothing. By halves: a chain of a thousand rules would be too deep to compile.
    """
    if len(items) <= 1:
        return seq(*items, after) if items else NOTHING
    half = len(items) // 2
    after = builder.named(after)
    following = builder.named(seq(*(maybe(seq(COMMA, item)) for item in items[half:]), after))
    return either(
        _some_of(items[:half], following, builder), _some_of(items[half:], after, builder)
    )


def _list_of(item: Rule, low: int, high: int | None) -> Rule:
    """Make the rule of `low` to `high` items with commas between them; pass None for no end."""
    if high == 0 or (item == NOTHING and not low):
        return EMPTY
    rule = seq(item, times(seq(COMMA, item), max(0, low - 1), None if high is None else high - 1))
    return rule if low else maybe(rule)


def _counted_members(
    case: Objects, items: list[Item], free: Rule, last: Rule | None, builder: Builder, place: str
) -> Rule:
    """Make the rule of objects whose properties are counted: one for each position and count before it."""
    limit = min(case.least if case.most is None else case.most, len(items))
    if (len(items) + 1) * (limit + 1) > MAX_STATES:
        got = f"{len(items)} properties and a count of {limit}"
        at = pointer(place, "minProperties or maxProperties")
        refuse(at, got, f"at most {MAX_STATES} pairs are followed.")

    def rest(n: int) -> Rule:
        """Make the rule of what may follow n listed properties."""
        low = max(0, case.least - n - (last is not None))
        high = None if case.most is None else case.most - n - (last is not None)
        if high is not None and high < low:
            return NOTHING
        if low > 1 and free != NOTHING:
            builder.dropped.append(pointer(place, "minProperties"))
        if low > 1 or (low and (last or free == NOTHING)):
            return NOTHING
        if last:
            return seq(COMMA if n else EMPTY, times(seq(free, COMMA), 0, high), last)
        return times(seq(COMMA, free), low, high) if n else _list_of(free, low, high)

    following = {n: rest(n) for n in range(limit + 1)}
    for i, (item, is_required) in reversed(list(enumerate(items))):
        rules = {}
        for n in range(min(i, limit) + 1):
            more = n + 1 if case.most is not None else min(n + 1, limit)
            separator = COMMA if n or (case.most is None and limit == 0 and i) else EMPTY
            taken = [seq(separator, item, following[more])] if more in following else []
            rules[n] = builder.named(either(*taken, *([] if is_required else [following[n]])))
        following = rules
    return following[0]
