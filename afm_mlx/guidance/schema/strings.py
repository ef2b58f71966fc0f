"""Sets of strings, formats included, and their JSON text.

The drafts leave open whether formats are checked. Here strings have their format, and alternatives of `oneOf`
may differ by it. `PATTERNS` has, for each format that the drafts list, strings that every checker accepts;
`LOOSE` all that some checker accepts. Other formats are ignored.

Generated formats leave out the year 0000, which Python does not know, and leap seconds; international names are
ASCII, and regular expressions are simple ones.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache

from afm_mlx.errors import ConstraintError
from afm_mlx.guidance.schema.patterns import searched
from afm_mlx.guidance.schema.regular import (
    ANY,
    CHAR,
    NOTHING,
    Expr,
    both,
    complement,
    is_empty,
    literal,
    matches,
    quoted,
    quoted_text,
    union,
)

_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_BY_FOUR = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"(?:[0-9]{{2}}{_BY_FOUR}|{_BY_FOUR}00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,20}[A-Za-z0-9])?"
_HOST = f"{_LABEL}(?:\\.{_LABEL}){{0,5}}"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_HEX = "[0-9a-fA-F]{1,4}"
_PATH = "(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_TAIL = f"(?:\\?(?:{_PATH}|[/?])*)?(?:#(?:{_PATH}|[/?])*)?"
_URI = f"[A-Za-z][A-Za-z0-9+.-]*:(?://{_HOST}(?::[0-9]{{1,4}})?(?:/{_PATH}*)*|{_PATH}+(?:/{_PATH}*)*){_TAIL}"
_IPV6 = "|".join(
    [f"(?:{_HEX}:){{7}}{_HEX}", f"::(?:{_HEX}:){{0,5}}{_HEX}", f"(?:{_HEX}:){{1,6}}:{_HEX}", "::"]
)
_DURATION = (
    "P(?:[0-9]{1,4}W|(?:[0-9]{1,4}Y(?:[0-9]{1,4}M(?:[0-9]{1,4}D)?)?|[0-9]{1,4}M(?:[0-9]{1,4}D)?|[0-9]{1,4}D)"
    "(?:T(?:[0-9]{1,4}H(?:[0-9]{1,4}M(?:[0-9]{1,4}S)?)?|[0-9]{1,4}M(?:[0-9]{1,4}S)?|[0-9]{1,4}S))?"
    "|T(?:[0-9]{1,4}H(?:[0-9]{1,4}M(?:[0-9]{1,4}S)?)?|[0-9]{1,4}M(?:[0-9]{1,4}S)?|[0-9]{1,4}S))"
)
_EMAIL = f"[A-Za-z0-9!#$%&'*+/=?^_`{{|}}~-]+(?:\\.[A-Za-z0-9!#$%&'*+/=?^_`{{|}}~-]+)*@{_HOST}"
_POINTER = "(?:/(?:[^/~\\x00-\\x1f]|~[01])*)*"
_ATOM = r"(?:[A-Za-z0-9_ ,:;@/-]|\\[dwsDWS.*+?()]|\[\^?[A-Za-z0-9_]+\]|\.)(?:[*+?]|\{[0-9]\})?"
_REGEX = rf"\^?(?:{_ATOM}|\((?:\?:)?(?:{_ATOM})*(?:\|(?:{_ATOM})*)*\)[*+?]?)*\$?"
_FIRST = _PATH.replace(";=:@", ";=@")  # else it would be a scheme
_REFERENCE = f"(?:{_URI}|(?:/(?:{_PATH}+(?:/{_PATH}*)*)?|{_FIRST}+(?:/{_PATH}*)*)?{_TAIL})"

PATTERNS = {
    "date-time": f"^{_DATE}T{_TIME}$",
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "duration": f"^{_DURATION}$",
    "email": f"^{_EMAIL}$",
    "idn-email": f"^{_EMAIL}$",
    "hostname": f"^{_HOST}$",
    "idn-hostname": f"^{_HOST}$",
    "ipv4": f"^(?:{_BYTE}\\.){{3}}{_BYTE}$",
    "ipv6": f"^(?:{_IPV6})$",
    "uri": f"^{_URI}$",
    "iri": f"^{_URI}$",
    "uri-reference": f"^(?:{_REFERENCE})$",
    "iri-reference": f"^(?:{_REFERENCE})$",
    "uuid": "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^[1-9]{{0,3}}[0-9](?:#|{_POINTER[:-1]}+)$",
    "regex": f"^{_REGEX}$",
    "uri-template": f"^(?:{_PATH}|[/?]|\\{{[A-Za-z][A-Za-z0-9_]*\\}})*$",
}
LOOSE = dict.fromkeys(PATTERNS, "") | {
    "date-time": "^[0-9]{4}-[0-9]{2}-[0-9]{2}.[0-9]{2}:",
    "date": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$",
    "time": "^[0-9]{2}:[0-9]{2}:",
    "duration": "^P[0-9T]",
    "email": "@",
    "idn-email": "@",
    "ipv4": "^[0-9]+[.][0-9.]+$",
    "ipv6": "^[0-9A-Fa-f]*:[0-9A-Fa-f:.]*(?:%.*)?$",
    "uri": "^[A-Za-z][A-Za-z0-9+.-]*:",
    "iri": "^[A-Za-z][A-Za-z0-9+.-]*:",
    "uuid": "^[0-9A-Fa-f]{8}-[0-9A-Fa-f-]{27}$",
    "json-pointer": "^(?:/|$)",
    "relative-json-pointer": "^[0-9]",
    "hostname": "^[^:/@ ]*$",
    "idn-hostname": "^[^:/@ ]*$",
}

MAX_LENGTH = 100_000  # most characters of a bounded string; a larger `maxLength` counts as this


@dataclass(frozen=True)
class Strings:
    """A set of strings.

    Attributes:
        shortest, longest: bounds of the length in characters; longest is None without a bound.
        parts: expressions that all strings match.
        formats: names of formats that all strings have.
        values: the strings themselves; None if they are not listed.
        excluded: strings that are not in the set.
    """

    shortest: int = 0
    longest: int | None = None
    parts: tuple[Expr, ...] = ()
    formats: tuple[str, ...] = ()
    values: tuple[str, ...] | None = None
    excluded: frozenset[str] = frozenset()

    def intersect(self, other: Strings) -> Strings | None:
        if self.values is None and other.values is not None:
            return other.intersect(self)
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
        """True if the set has a string that some checker may accept for its formats.

        Raises `ValueError` if llguidance can't tell within its limits.
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
        """Write the set as an expression, formats left out."""
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
    """Write right sides of Lark terminals for the strings that a set and further expressions share.

    None if there are none. Raises `ValueError` if llguidance can't tell within its limits.
    """
    if strings.values is not None:
        texts = [v for v in strings.values if all(matches(part, v) for part in further)]
        return (" | ".join(json.dumps(quoted_text(text)) for text in texts),) if texts else ()
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
    """True unless the form of an expression shows that strings match."""
    kind = expression[0]
    if kind == "not":
        return not _is_finite(expression[1])
    if kind == "and":
        return True
    if kind == "chars":
        return not expression[1]
    if kind == "rep":
        return _may_be_empty(expression[1])
    return expression == NOTHING or any(map(_may_be_empty, expression[1]))


def _is_finite(expression: Expr) -> bool:
    """True if the form of an expression shows that finitely many strings match."""
    if expression[0] in ("cat", "alt"):
        return all(map(_is_finite, expression[1]))
    return expression[0] == "chars"
