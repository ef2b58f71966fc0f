"""Rules of a grammar as expressions, and as Lark for llguidance."""

from __future__ import annotations

import json
from dataclasses import dataclass


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
    """A reference to a rule."""

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
    """A part from `low` to `high` times; without an end if `high` is None. Made by `times`."""

    part: Rule
    low: int
    high: int | None


Rule = Text | LarkTerminal | Named | Seq | Either | Times
NOTHING: Rule = Either(())
EMPTY: Rule = Seq(())
COMMA: Rule = Text(", ")
COLON: Rule = Text(": ")


def seq(*parts: Rule) -> Rule:
    """Concatenate parts; `NOTHING` if one of them matches nothing."""
    kept = [part for part in parts if part != EMPTY]
    if NOTHING in kept:
        return NOTHING
    return kept[0] if len(kept) == 1 else Seq(tuple(kept))


def either(*parts: Rule) -> Rule:
    """Join alternatives; `NOTHING` if no part matches a text."""
    kept = tuple(dict.fromkeys(part for part in parts if part != NOTHING))
    return kept[0] if len(kept) == 1 else Either(kept)


def maybe(part: Rule) -> Rule:
    return times(part, 0, 1)


def times(part: Rule, low: int, high: int | None) -> Rule:
    """Repeat a part from `low` to `high` times; pass None for no end."""
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
    """None if a text matches an expression; else names of rules, one of which is needed first."""
    match part:
        case Named(name):
            return None if name in good else {name}
        case Seq(parts):
            return next((m for one in parts if (m := _missing(one, good)) is not None), None)
        case Times(inner, low):
            return _missing(inner, good) if low else None
        case Either(parts):
            found: set[str] = set()
            for one in parts:
                if (missing := _missing(one, good)) is None:
                    return None
                found |= missing
            return found
    return None


def _pruned(part: Rule, good: set[str]) -> Rule:
    """Remove rules that are not in `good` from an expression; `NOTHING` if nothing is left."""
    match part:
        case Named(name):
            return part if name in good else NOTHING
        case Seq(parts):
            return seq(*(_pruned(one, good) for one in parts))
        case Either(parts):
            return either(*(_pruned(one, good) for one in parts))
        case Times(inner, low, high):
            return times(_pruned(inner, good), low, high)
    return part


def _names_in(part: Rule) -> list[str]:
    """List the rules that an expression names, in order."""
    found: dict[str, None] = {}
    pending = [part]
    while pending:
        match pending.pop():
            case Named(name):
                found[name] = None
            case Seq(parts) | Either(parts):
                pending += reversed(parts)
            case Times(inner):
                pending.append(inner)
    return list(found)


def depth(rules: dict[str, Rule], start: str) -> int:
    """Count the deepest nesting of rules below `start`; llguidance's compiler recurses as deep."""
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


def lark_grammar(rules: dict[str, Rule], start: str) -> str:
    """Write the rule `start`, and the rules that it needs in depth-first order, in Lark syntax."""
    lines: list[str] = []
    terminals: dict[str, str] = {}

    def lark(part: Rule) -> str:
        match part:
            case Text(text):
                return json.dumps(text)
            case Named(name):
                return name
            case LarkTerminal(right):
                if right not in terminals:
                    kind = "j" if right.startswith("%json") else "T"
                    terminals[right] = f"{kind}{len(terminals)}"
                    lines.append(f"{terminals[right]}: {right}")
                return terminals[right]
            case Times(inner, 0, 1):
                return f"({lark(inner)})?"
            case Times(inner, 0 | 1 as low, None):
                return f"({lark(inner)}){'+' if low else '*'}"
            case Times(inner, low, high):
                return f"({lark(inner)}){{{low},{'' if high is None else high}}}"
            case Seq(parts):
                return " ".join(map(lark, parts)) or '""'
            case Either(parts):
                return f"({' | '.join(map(lark, parts))})"

    done: set[str] = set()
    pending = [start]
    while pending:
        name = pending.pop()
        if name not in done:
            done.add(name)
            lines.append(f"{name}: {lark(rules[name])}")
            pending += reversed(_names_in(rules[name]))
    return "\n".join([f"start: {start}", *lines, ""])
