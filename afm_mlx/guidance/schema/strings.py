"""Strings: what a schema allows of them, and their JSON text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from afm_mlx.errors import ConstraintError
from afm_mlx.guidance.schema.formats import LOOSE, PATTERNS
from afm_mlx.guidance.schema.patterns import searched
from afm_mlx.guidance.schema.regular import (
    ANY,
    CHAR,
    Expr,
    both,
    complement,
    is_empty,
    lark_string,
    literal,
    matches,
    quoted,
    quoted_text,
    union,
)

MAX_LENGTH = 100_000
"""Characters of a bounded string at most; a larger `maxLength` counts as this."""


@dataclass(frozen=True)
class Strings:
    """A set of strings.

    Attributes:
        shortest, longest: characters; longest is None without a bound.
        parts: expressions that they are all of.
        formats: names of formats that they have.
        values: the only ones there are; None when they are not listed.
        excluded: strings that are not of the set.
    """

    shortest: int = 0
    longest: int | None = None
    parts: tuple[Expr, ...] = ()
    formats: tuple[str, ...] = ()
    values: tuple[str, ...] | None = None
    excluded: frozenset[str] = frozenset()

    def meet(self, other: Strings) -> Strings | None:
        """Strings of both sets; None when there are none."""
        if self.values is None and other.values is not None:
            return other.meet(self)
        if self.values is not None:
            theirs = None if other.values is None else set(other.values)
            kept = [v for v in self.values if (theirs is None or v in theirs) and other.has(v)]
            return replace(self, values=tuple(kept)) if kept else None
        longest = [n for n in (self.longest, other.longest) if n is not None]
        met = Strings(
            shortest=max(self.shortest, other.shortest),
            longest=min(longest) if longest else None,
            parts=tuple(dict.fromkeys(self.parts + other.parts)),
            formats=tuple(dict.fromkeys(self.formats + other.formats)),
            excluded=self.excluded | other.excluded,
        )
        return None if met.is_void() else met

    def has(self, text: str) -> bool:
        """True if the set contains a string and some checker may accept it for the set's formats.

        Raises:
            ValueError: when llguidance can't tell within its limits.
        """
        if len(text) < self.shortest or (self.longest is not None and len(text) > self.longest):
            return False
        if text in self.excluded or (self.values is not None and text not in self.values):
            return False
        formats = (searched(LOOSE[name], wide=True) for name in self.formats if name in LOOSE)
        return all(matches(part, text) for part in (*self.parts, *formats))

    def is_void(self) -> bool:
        """True if values, lengths or a simple pattern alone show that the set is empty."""
        if self.values is not None:
            return not self.values
        if self.longest is not None and self.shortest > self.longest:
            return True
        is_simple = len(self.parts) + bool(self.excluded) + (self.longest is not None) < 2
        if is_simple:
            return False
        try:
            return is_empty(quoted(self.expression())) is True
        except ConstraintError:
            raise
        except ValueError:
            return False  # it is refused where it is written

    def expression(self) -> Expr:
        """The set as an expression, without its formats."""
        if self.values is not None:
            return union(*map(literal, self.values))
        parts = list(self.parts)
        if self.shortest or self.longest is not None:
            longest = None if self.longest is None else min(self.longest, MAX_LENGTH)
            parts.append(("rep", CHAR, self.shortest, longest))
        if self.excluded:
            parts.append(complement(union(*map(literal, sorted(self.excluded)))))
        return both(*parts)


@lru_cache(maxsize=256)
def string_terminals(strings: Strings, *further: Expr) -> tuple[str, ...]:
    """Right sides of Lark terminals whose texts are the strings of a set.

    Args:
        strings: the set.
        further: expressions that the strings are of, too.

    Raises:
        ValueError: when llguidance can't tell within its limits whether there are any.
    """
    if strings.values is not None:
        texts = [v for v in strings.values if all(matches(part, v) for part in further)]
        return (" | ".join(lark_string(quoted_text(text)) for text in texts),) if texts else ()
    patterns = [
        searched(PATTERNS[name], wide=False) for name in strings.formats if name in PATTERNS
    ]
    expression = both(strings.expression(), *further, *patterns)
    if expression == ANY or expression[0] == "chars" or not _may_be_empty(expression):
        return (quoted(expression),)
    verdict = is_empty(quoted(expression))
    if verdict is None:
        raise ValueError("its patterns are too complex to tell whether any string matches")
    return () if verdict else (quoted(expression),)


def _may_be_empty(expression: Expr) -> bool:
    kind = expression[0]
    if kind in ("and", "not"):
        return True
    if kind == "chars":
        return not expression[1]
    return any(
        map(_may_be_empty, [expression[1]] if kind == "rep" else expression[1])
    ) or expression == ("alt", ())
