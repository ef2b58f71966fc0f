"""Rules of a grammar as expressions, and as Lark for llguidance."""

from __future__ import annotations

from dataclasses import dataclass

from afm_mlx.guidance.schema.regular import lark_string


@dataclass(frozen=True, slots=True)
class Text:
    """A literal text."""

    text: str


@dataclass(frozen=True, slots=True)
class LarkTerminal:
    """A Lark terminal, or a `%json` rule, by its right side."""

    right: str


@dataclass(frozen=True, slots=True)
class Named:
    """A reference to a rule, by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class Seq:
    """The concatenation of parts. Made by `seq`."""

    parts: tuple[Rule, ...]


@dataclass(frozen=True, slots=True)
class Either:
    """The alternatives of parts. Made by `either`."""

    parts: tuple[Rule, ...]


@dataclass(frozen=True, slots=True)
class Times:
    """A part from `low` to `high` times; None is no bound. Made by `times`."""

    part: Rule
    low: int
    high: int | None


Rule = Text | LarkTerminal | Named | Seq | Either | Times
NOTHING: Rule = Either(())
EMPTY: Rule = Seq(())
COMMA: Rule = Text(", ")
COLON: Rule = Text(": ")


def seq(*parts: Rule) -> Rule:
    """The concatenation of parts; `NOTHING` if one of them matches nothing."""
    kept = [part for part in parts if part != EMPTY]
    if NOTHING in kept:
        return NOTHING
    return kept[0] if len(kept) == 1 else Seq(tuple(kept))


def either(*parts: Rule) -> Rule:
    """The alternatives of parts."""
    kept = tuple(dict.fromkeys(part for part in parts if part != NOTHING))
    return kept[0] if len(kept) == 1 else Either(kept)


def maybe(part: Rule) -> Rule:
    """An optional part."""
    return times(part, 0, 1)


def times(part: Rule, low: int, high: int | None) -> Rule:
    """A part from `low` to `high` times; None is no bound."""
    if high == 0 or part == EMPTY:
        return EMPTY
    if part == NOTHING:
        return NOTHING if low else EMPTY
    return part if (low, high) == (1, 1) else Times(part, low, high)


def fulfilled(rules: dict[str, Rule]) -> dict[str, Rule]:
    """Remove rules, and alternatives of rules, that no finite text matches."""
    waiting: dict[str, dict[str, None]] = {}
    good: set[str] = set()
    pending = list(rules)  # from the last one on: rules come before those that they name
    while pending:
        name = pending.pop()
        if name in good:
            continue
        missing = _missing(rules[name], good)
        if missing is None:
            good.add(name)
            pending += waiting.pop(name, {})
        else:
            for other in missing:  # one entry each, or the work would be exponential
                waiting.setdefault(other, {})[name] = None
    return {name: _pruned(rule, good) for name, rule in rules.items() if name in good}


def _missing(part: Rule, good: set[str]) -> set[str] | None:
    """None if an expression matches a text; else rules of which one is needed first."""
    if isinstance(part, Named):
        return None if part.name in good else {part.name}
    if isinstance(part, Seq):
        return next((m for one in part.parts if (m := _missing(one, good)) is not None), None)
    if isinstance(part, Times):
        return _missing(part.part, good) if part.low else None
    if isinstance(part, Either):
        found: set[str] = set()
        for one in part.parts:
            missing = _missing(one, good)
            if missing is None:
                return None
            found |= missing
        return found
    return None


def _pruned(part: Rule, good: set[str]) -> Rule:
    """An expression without rules that are not in `good`; `NOTHING` if nothing is left."""
    if isinstance(part, Named):
        return part if part.name in good else NOTHING
    if isinstance(part, Seq):
        return seq(*(_pruned(one, good) for one in part.parts))
    if isinstance(part, Either):
        return either(*(_pruned(one, good) for one in part.parts))
    if isinstance(part, Times):
        return times(_pruned(part.part, good), part.low, part.high)
    return part


def _names_in(part: Rule) -> list[str]:
    """Names of rules in an expression, in order."""
    found: dict[str, None] = {}
    pending = [part]
    while pending:
        one = pending.pop()
        if isinstance(one, Named):
            found[one.name] = None
        elif isinstance(one, Seq | Either):
            pending += reversed(one.parts)
        elif isinstance(one, Times):
            pending.append(one.part)
    return list(found)


def depth(rules: dict[str, Rule], start: str) -> int:
    """The deepest nesting of rules that llguidance compiles, which takes stack of the thread."""
    seen, deepest = {start}, 0
    path = [iter(_names_in(rules[start]))]
    while path:
        deepest = max(deepest, len(path))
        name = next((one for one in path[-1] if one not in seen), None)
        if name is None:
            path.pop()
        else:
            seen.add(name)
            path.append(iter(_names_in(rules[name])))
    return deepest


class Printer:
    """Writes rules in Lark syntax.

    Args:
        rules: rules by name, with all that they name.
    """

    def __init__(self, rules: dict[str, Rule]) -> None:
        self._rules = rules
        self._lines: list[str] = []
        self._terminals: dict[str, str] = {}

    def grammar(self, start: str) -> str:
        """Write one rule as the start, and the rules that it needs in depth-first order."""
        done: set[str] = set()
        pending = [start]
        while pending:
            name = pending.pop()
            if name not in done:
                done.add(name)
                self._lines.append(f"{name}: {self._lark(self._rules[name])}")
                pending += reversed(_names_in(self._rules[name]))
        return "\n".join([f"start: {start}", *self._lines, ""])

    def _lark(self, part: Rule) -> str:
        if isinstance(part, Text):
            return lark_string(part.text)
        if isinstance(part, Named):
            return part.name
        if isinstance(part, LarkTerminal):
            return self._terminal(part.right)
        if isinstance(part, Times):
            inner = self._lark(part.part)
            if (part.low, part.high) == (0, 1):
                return f"({inner})?"
            if part.high is None and part.low < 2:
                return f"({inner}){'+' if part.low else '*'}"
            return f"({inner}){{{part.low},{'' if part.high is None else part.high}}}"
        parts = [self._lark(one) for one in part.parts]
        if isinstance(part, Seq):
            return " ".join(parts) if parts else '""'
        return f"({' | '.join(parts)})"

    def _terminal(self, right: str) -> str:
        if right not in self._terminals:
            is_rule = right.startswith("%json")
            self._terminals[right] = name = f"{'j' if is_rule else 'T'}{len(self._terminals)}"
            self._lines.append(f"{name}: {right}")
        return self._terminals[right]
