"""Rules of a grammar as expressions, and as Lark for llguidance.

A rule is a tuple: `("text", literal)`, `("terminal", right side)`, `("rule", name)`, `("seq", parts)`,
`("or", parts)`, or `("times", part, low, high)`.
"""

from __future__ import annotations

from typing import Any

from afm_mlx.guidance.schema.regular import lark_string

Rule = tuple[Any, ...]
NOTHING: Rule = ("or", ())
EMPTY: Rule = ("seq", ())
COMMA: Rule = ("text", ", ")
COLON: Rule = ("text", ": ")


def text(literal: str) -> Rule:
    """The rule of one text."""
    return ("text", literal)


def terminal(right: str) -> Rule:
    """The rule of a Lark terminal, or of a `%json` rule, by its right side."""
    return ("terminal", right)


def seq(*parts: Rule) -> Rule:
    """The concatenation of parts."""
    kept = [part for part in parts if part != EMPTY]
    if NOTHING in kept:
        return NOTHING
    return kept[0] if len(kept) == 1 else ("seq", tuple(kept))


def either(*parts: Rule) -> Rule:
    """The alternatives of parts."""
    kept = tuple(dict.fromkeys(part for part in parts if part != NOTHING))
    return kept[0] if len(kept) == 1 else ("or", kept)


def maybe(part: Rule) -> Rule:
    """An optional part."""
    return times(part, 0, 1)


def times(part: Rule, low: int, high: int | None) -> Rule:
    """A part from `low` to `high` times; None is no bound."""
    if high == 0 or part == EMPTY:
        return EMPTY
    if part == NOTHING:
        return NOTHING if low else EMPTY
    return part if (low, high) == (1, 1) else ("times", part, low, high)


def names_in(part: Rule) -> list[str]:
    """Names of rules in an expression, in order."""
    found: dict[str, None] = {}
    pending = [part]
    while pending:
        one = pending.pop()
        if one[0] == "rule":
            found[one[1]] = None
        elif one[0] in ("seq", "or"):
            pending += reversed(one[1])
        elif one[0] == "times":
            pending.append(one[1])
    return list(found)


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
            for other in missing:
                waiting.setdefault(other, {})[name] = None
    return {name: pruned(rule, good) for name, rule in rules.items() if name in good}


def _missing(part: Rule, good: set[str]) -> set[str] | None:
    """None if an expression matches a text; else rules of which one is needed first."""
    kind = part[0]
    if kind == "rule":
        return None if part[1] in good else {part[1]}
    if kind == "seq":
        return next((m for one in part[1] if (m := _missing(one, good)) is not None), None)
    if kind == "times":
        return _missing(part[1], good) if part[2] else None
    if kind == "or":
        found: set[str] = set()
        for one in part[1]:
            missing = _missing(one, good)
            if missing is None:
                return None
            found |= missing
        return found
    return None


def pruned(part: Rule, good: set[str]) -> Rule:
    """An expression without rules that are not in `good`; `NOTHING` if nothing is left."""
    kind = part[0]
    if kind == "rule":
        return part if part[1] in good else NOTHING
    if kind == "seq":
        return seq(*(pruned(one, good) for one in part[1]))
    if kind == "or":
        return either(*(pruned(one, good) for one in part[1]))
    if kind == "times":
        return times(pruned(part[1], good), part[2], part[3])
    return part


def reachable(rules: dict[str, Rule], start: str) -> list[str]:
    """Names of the rules that a start needs, in depth-first order."""
    found: dict[str, None] = {}
    pending = [start]
    while pending:
        name = pending.pop()
        if name not in found:
            found[name] = None
            pending += reversed(names_in(rules[name]))
    return list(found)


def depth(rules: dict[str, Rule], start: str) -> int:
    """The deepest nesting of rules that llguidance compiles, which takes stack of the thread."""
    seen, deepest = {start}, 0
    path = [iter(names_in(rules[start]))]
    while path:
        deepest = max(deepest, len(path))
        name = next((one for one in path[-1] if one not in seen), None)
        if name is None:
            path.pop()
        else:
            seen.add(name)
            path.append(iter(names_in(rules[name])))
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
        """The grammar of one rule."""
        for name in reachable(self._rules, start):
            self._lines.append(f"{name}: {self._lark(self._rules[name])}")
        return "\n".join([f"start: {start}", *self._lines, ""])

    def _lark(self, part: Rule) -> str:
        kind = part[0]
        if kind == "text":
            return lark_string(part[1])
        if kind == "rule":
            return str(part[1])
        if kind == "terminal":
            return self._terminal(part[1])
        if kind == "times":
            inner, low, high = self._lark(part[1]), part[2], part[3]
            if (low, high) == (0, 1):
                return f"({inner})?"
            if high is None and low < 2:
                return f"({inner}){'+' if low else '*'}"
            return f"({inner}){{{low},{'' if high is None else high}}}"
        parts = [self._lark(one) for one in part[1]]
        if kind == "seq":
            return " ".join(parts) if parts else '""'
        return f"({' | '.join(parts)})"

    def _terminal(self, right: str) -> str:
        if right not in self._terminals:
            is_rule = right.startswith("%json")
            self._terminals[right] = name = f"{'j' if is_rule else 'T'}{len(self._terminals)}"
            self._lines.append(f"{name}: {right}")
        return self._terminals[right]
