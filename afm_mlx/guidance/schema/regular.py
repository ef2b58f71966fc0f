"""Sets of strings as regular expressions with `and` and `not`, and their JSON text in llguidance's Lark syntax.

An expression is a tuple: `("chars", ranges)`, `("cat", parts)`, `("alt", parts)`, `("rep", part, low, high)`,
`("and", parts)`, `("not", part)`; ranges are inclusive pairs of code points. It describes the *decoded*
string. The JSON text of a string has one form only (no `\\u0061` for `a`), so intersections and complements
of texts are intersections and complements of strings.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from afm_mlx.guidance.deep_stack import LIMITS, with_deep_stack
from afm_mlx.guidance.unique_items import identity

Expr = tuple[Any, ...]
Ranges = tuple[tuple[int, int], ...]

LAST = 0x10FFFF
EMPTY: Expr = ("cat", ())
NOTHING: Expr = ("alt", ())
CHAR: Expr = ("chars", ((0, LAST),))
ANY: Expr = ("rep", CHAR, 0, None)  # all strings

_SHORT = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r", 0x22: '"', 0x5C: "\\"}
_RAW: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7E), (0x80, 0xD7FF), (0xE000, LAST))
_NO_TEXT = "[^\\s\\S]"
_MAX_FLOATING = 9
_STEPS = 300  # texts that are continued to count values of a grammar, and 30 more for each value
_MAX_COUNTED = 400  # most bytes of a value that is counted


def literal(text: str) -> Expr:
    return ("cat", tuple(("chars", ((ord(c), ord(c)),)) for c in text))


def cat(*parts: Expr) -> Expr:
    flat: list[Expr] = []
    for part in parts:
        flat.extend(part[1] if part[0] == "cat" else [part])
    return flat[0] if len(flat) == 1 else ("cat", tuple(flat))


def union(*parts: Expr) -> Expr:
    distinct = tuple(dict.fromkeys(parts))
    return distinct[0] if len(distinct) == 1 else ("alt", distinct)


def both(*parts: Expr) -> Expr:
    distinct = tuple(part for part in dict.fromkeys(parts) if part != ANY)
    if not distinct:
        return ANY
    return distinct[0] if len(distinct) == 1 else ("and", distinct)


def complement(part: Expr) -> Expr:
    return part[1] if part[0] == "not" else ("not", part)


def overlap(a: Ranges, b: Ranges) -> Ranges:
    met = [(max(x[0], y[0]), min(x[1], y[1])) for x in a for y in b]
    return tuple(sorted((low, high) for low, high in met if low <= high))


def joined(ranges: list[tuple[int, int]]) -> Ranges:
    """Sort code point ranges, and merge the ones that touch."""
    result: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if result and low <= result[-1][1] + 1:
            result[-1] = (result[-1][0], max(high, result[-1][1]))
        else:
            result.append((low, high))
    return tuple(result)


def inverted(ranges: Ranges) -> Ranges:
    """Return the code points outside of ranges."""
    result, start = [], 0
    for low, high in joined(list(ranges)):
        if start < low:
            result.append((start, low - 1))
        start = high + 1
    return (*result, (start, LAST)) if start <= LAST else tuple(result)


def quoted(expr: Expr) -> str:
    """Write a Lark terminal of the JSON texts of a set; raise `ValueError` if too many patterns lack a `^`."""
    if (count := _floating(expr)) > _MAX_FLOATING:
        raise ValueError(
            f"{count} patterns without a ^ (or look-aheads) are about one string, and {_MAX_FLOATING} are "
            "followed at most, because their states multiply"
        )
    return f'"\\"" {_lark(expr, False)} "\\""'


def _floating(expr: Expr) -> int:
    """Return the largest number of sets in one intersection that begin with any text, as `.*` does."""
    kind = expr[0]
    if kind == "chars":
        return 0
    if kind in ("rep", "not"):
        return _floating(expr[1])
    if kind != "and":
        return max(map(_floating, expr[1]), default=0)
    bare = [part[1] if part[0] == "not" else part for part in expr[1]]
    return sum(_floating(part) or _is_floating(part) for part in bare)


def _is_floating(expr: Expr) -> bool:
    if expr[0] == "cat":
        return bool(expr[1]) and _is_floating(expr[1][0])
    if expr[0] == "alt":
        return any(map(_is_floating, expr[1]))
    return expr[0] == "rep" and expr[3] is None and expr[1][0] == "chars"


def quoted_text(text: str) -> str:
    """Write the JSON text of one string, as `quoted` matches it."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _lark(expr: Expr, negated: bool) -> str:
    """Write Lark for the inside of a JSON string; `negated` if a complement is around it."""
    kind = expr[0]
    if kind == "and":
        return f"({' & '.join(_lark(part, negated) for part in expr[1])})"
    if kind == "not":
        return f"(~{_lark(expr[1], not negated)} & {_lark(ANY, negated)})"
    if _is_plain(expr):
        regex = _regex(expr, negated)
        return f"/{regex}/" if regex else '""'
    if kind == "rep":
        high = "" if expr[3] is None else expr[3]
        return f"({_lark(expr[1], negated)}){{{expr[2]},{high}}}"
    parts = [_lark(part, negated) for part in expr[1]]
    return f"({' '.join(parts)})" if kind == "cat" else f"({' | '.join(parts)})"


@lru_cache(maxsize=512)
def _is_plain(expr: Expr) -> bool:
    if expr[0] in ("and", "not"):
        return False
    return expr[0] == "chars" or all(map(_is_plain, [expr[1]] if expr[0] == "rep" else expr[1]))


def _regex(expr: Expr, negated: bool) -> str:
    kind = expr[0]
    if kind == "chars":
        return _chars(expr[1], negated)
    if kind == "cat":
        return "".join(_regex(part, negated) for part in expr[1])
    if kind == "alt":
        parts = "|".join(_regex(part, negated) for part in expr[1])
        return f"(?:{parts})" if expr[1] else _NO_TEXT
    high = "" if expr[3] is None else expr[3]
    return f"(?:{_regex(expr[1], negated)}){{{expr[2]},{high}}}"


@lru_cache(maxsize=512)
def _chars(ranges: Ranges, negated: bool) -> str:
    """Write a pattern of the JSON texts of characters.

    Control characters without a short escape are left out unless `negated`: a complement would allow them.
    """
    raw = overlap(ranges, _RAW)
    inside = "".join(_point(a) + (f"-{_point(b)}" if b > a else "") for a, b in raw)
    forms = [f"[{inside}]"] if raw else []
    short = [c for c in _SHORT if any(a <= c <= b for a, b in ranges)]
    if short:
        escapes = "".join(f"\\x{{{ord(_SHORT[c]):x}}}" for c in short)
        forms.append(f"\\x{{5c}}[{escapes}]")
    if negated or not forms:
        control = [c for c in (*range(0x20), 0x7F) if c not in _SHORT]
        codes = [f"{c:02x}" for c in control if any(a <= c <= b for a, b in ranges)]
        if codes:
            forms.append(f"\\x{{5c}}u00(?:{'|'.join(codes)})")
    if len(forms) == 1:
        return forms[0]
    return f"(?:{'|'.join(forms)})" if forms else _NO_TEXT


def _point(code: int) -> str:
    c = chr(code)
    return c if c.isascii() and c.isalnum() else f"\\x{{{code:x}}}"


def compile_error(grammar: str) -> str:
    """Return the first line of llguidance's error for a grammar; empty if it compiles.

    `LLMatcher.validate_grammar` misses some limits, such as 65,525 symbols.
    """
    matcher = _compiled(grammar)
    return matcher.get_error().partition("\n")[0][:200] if matcher.is_error() else ""


@lru_cache(maxsize=256)
def _matcher(terminal: str) -> LLMatcher:
    return _compiled(LLMatcher.grammar_from_lark(f"start: X\nX: {terminal}"))


def _compiled(grammar: str) -> LLMatcher:
    return with_deep_stack(LLMatcher, _byte_tokenizer(), grammar, log_level=0, limits=LIMITS)


_byte_tokenizer = lru_cache(lambda: LLTokenizer("byte"))


@lru_cache(maxsize=256)
def is_empty(terminal: str) -> bool | None:
    """True if a Lark terminal matches no text; None if llguidance can't tell within its limits."""
    matcher = _matcher(terminal).deep_copy()
    if matcher.is_error():
        return None
    mask = matcher.compute_bitmask()
    if error := matcher.get_error() if matcher.is_error() else "":
        return True if "NoExtension" in error else None
    return not any(mask)


def matches(expr: Expr, text: str) -> bool:
    """True if a string is in a set; raise `ValueError` if llguidance can't tell within its limits."""
    return has_text(f'"\\"" {_lark(expr, True)} "\\""', quoted_text(text))


@lru_cache(maxsize=256)
def has_text(terminal: str, text: str) -> bool:
    """True if a Lark terminal matches a text; raise `ValueError` if llguidance can't tell within its limits."""
    matcher = _matcher(terminal).deep_copy()
    tokens = list(text.encode())
    taken = 0 if matcher.is_error() else matcher.try_consume_tokens(tokens)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return taken == len(tokens) and matcher.is_accepting()


def values_of(grammar: str, limit: int) -> set[Any] | None:
    """Return the `identity` of up to `limit` JSON values of a Lark grammar; None if that takes too long."""
    matcher = _compiled(LLMatcher.grammar_from_lark(grammar))
    found: set[Any] = set()
    pending = [(matcher, b"", b"")]
    for _ in range(_STEPS + 30 * limit):
        if not pending or len(found) >= limit:
            return found
        before, text, byte = pending.pop()
        state, text = before.deep_copy(), text + byte
        if byte:
            state.consume_token(byte[0])
        if state.is_accepting():
            found.add(identity(json.loads(text)))
        if state.is_error() or len(text) > _MAX_COUNTED:
            return None
        if state.is_stopped():
            continue
        bits = np.unpackbits(np.frombuffer(state.compute_bitmask(), np.uint8), bitorder="little")
        # Ends of values are tried first, ASCII before the rest. Marks of unique lists are in no text.
        further = [code for code in np.flatnonzero(bits[:256]).tolist() if code >= 0x20]
        further.sort(key=lambda code: (code in b'"]}', code < 0x80))
        pending += [(state, text, bytes([code])) for code in further]
    return None
