"""Patterns of JSON schemas (ECMA 262) as sets of strings.

`jsonschema` searches with Python's `re`, other validators by ECMA's rules, which differ in what `\\d`, `\\w`,
`\\s`, `.` and `$` match. A pattern therefore has two sets: strings that match by both rules (`narrow`), and
strings that match by at least one (`wide`), whose complement never matches.

Look-ahead intersects the rest of the string with a set or its complement; it is read outside of repetitions,
and as `(?:(?!x).)*$`. Look-behind, word borders, back-references, flags and Unicode properties raise
`ValueError`: llguidance can't follow them, or the rules differ.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from afm_mlx.guidance.schema.regular import (
    ANY,
    EMPTY,
    LAST,
    Expr,
    Ranges,
    both,
    cat,
    complement,
    inverted,
    joined,
    literal,
    matches,
    union,
)

Tree = tuple[Any, ...]
"""A parsed pattern: ("set", narrow, wide), ("seq", items), ("or", items), ("many", item, low, high),
("start",), ("end",), or ("ahead", item, is_negated)."""

MAX_PATTERN = 5_000  # characters
MAX_DEPTH = 40  # nested groups
MAX_ALTERNATIVES = 64  # of groups that hold anchors, multiplied out
MAX_REPEAT = 100_000

_DIGIT: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_BEYOND: Ranges = ((0x80, LAST),)
# White space by both rules, and by at least one: Python has 0x1c to 0x1f and 0x85, ECMA has 0xfeff.
_SPACE: Ranges = (
    *((0x9, 0xD), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)),
)
_ANY_SPACE = joined([*_SPACE, (0x1C, 0x1F), (0x85, 0x85), (0xFEFF, 0xFEFF)])
_CLASSES = {
    "d": (_DIGIT, joined([*_DIGIT, *_BEYOND])),
    "w": (_WORD, joined([*_WORD, *_BEYOND])),
    "s": (_SPACE, _ANY_SPACE),
}
_DOT = (inverted(((0xA, 0xA), (0xD, 0xD), (0x2028, 0x2029))), inverted(((0xA, 0xA),)))
_COUNTS = re.compile("{([0-9]+)(?:(,)([0-9]*))?}")
_ESCAPES = {"n": 0xA, "r": 0xD, "t": 0x9, "f": 0xC, "v": 0xB, "0": 0}


@lru_cache(maxsize=256)
def searched(pattern: str, *, wide: bool) -> Expr:
    """Return the set of strings in which a pattern is found.

    Args:
        pattern: a regular expression that ECMA 262 and Python's `re` both read.
        wide: True for strings that match by at least one of these rules, False for strings that match by both.

    Raises:
        ValueError: for a pattern that is invalid or can't be honoured, with the reason.
    """
    return _found(_parsed(pattern), wide)


@lru_cache(maxsize=4096)
def is_like(pattern: str, text: str) -> bool | None:
    """True if a pattern is found in a text; None if the rules differ. Raises `ValueError` as `searched`."""
    narrow, wide = (matches(searched(pattern, wide=wide), text) for wide in (False, True))
    return narrow if narrow == wide else None


@lru_cache(maxsize=256)
def _parsed(pattern: str) -> Tree:
    if len(pattern) > MAX_PATTERN:
        raise ValueError(f"it has more than {MAX_PATTERN} characters")
    parser = _Parser(pattern)
    tree = parser.alternatives(0)
    if parser.at < len(pattern):
        raise ValueError("it has a ) without its (")
    return tree


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self.at = 0

    def alternatives(self, depth: int) -> Tree:
        if depth > MAX_DEPTH:
            raise ValueError(f"its groups are nested more than {MAX_DEPTH} deep")
        options = [self._sequence(depth)]
        while self._take("|"):
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else ("or", tuple(options))

    def _sequence(self, depth: int) -> Tree:
        items = []
        while self.at < len(self._text) and self._text[self.at] not in "|)":
            items.append(self._repeated(self._atom(depth)))
        return ("seq", tuple(items))

    def _atom(self, depth: int) -> Tree:
        c = self._next()
        if c == "(":
            return self._group(depth)
        if c == "[":
            return self._class()
        if c == ".":
            return ("set", *_DOT)
        if c in "^$":
            return ("start",) if c == "^" else ("end",)
        if c == "\\":
            return self._escape()
        if c in "*+?":
            raise ValueError(f"nothing stands before its {c}")
        return _one(ord(c))

    def _group(self, depth: int) -> Tree:
        kind = None
        if self._take("?"):
            kind = self._next()
            if kind in "P<" and self._text[self.at - 1 : self.at + 1] not in ("<=", "<!"):
                if kind == "P" and self._next() != "<":
                    raise ValueError("it has a back-reference")
                while self._next() != ">":
                    pass
            elif kind not in ":=!":
                raise ValueError("it has look-behind or flags")
        inside = self.alternatives(depth + 1)
        if not self._take(")"):
            raise ValueError("it has a ( without its )")
        return ("ahead", inside, kind == "!") if kind in ("=", "!") else inside

    def _repeated(self, item: Tree) -> Tree:
        while (bounds := self._bounds()) is not None:
            low, high = bounds
            if max(low, high or 0) > MAX_REPEAT or (high is not None and high < low):
                raise ValueError(
                    f"it repeats {{{low},{high}}}; at most {MAX_REPEAT} times, in order"
                )
            if self._take("+"):
                raise ValueError("it has a possessive quantifier")
            self._take("?")  # lazy: the same strings
            item = ("many", item, low, high)
        return item

    def _bounds(self) -> tuple[int, int | None] | None:
        for sign, bounds in {"*": (0, None), "+": (1, None), "?": (0, 1)}.items():
            if self._take(sign):
                return bounds
        found = _COUNTS.match(self._text, self.at)
        if found is None:
            return None
        if len(found[0]) > 22:
            raise ValueError("it has a number of repetitions that is too large")
        self.at = found.end()
        low, comma, high = int(found[1]), found[2], found[3]
        return low, low if not comma else int(high) if high else None

    def _escape(self) -> Tree:
        c = self._next()
        if c.lower() in _CLASSES:
            narrow, wide = _CLASSES[c.lower()]
            sets = (narrow, wide) if c.islower() else (inverted(wide), inverted(narrow))
            return ("set", *sets)
        if c in "AZ":
            return ("start",) if c == "A" else ("end",)
        return _one(self._code(c))

    def _code(self, c: str) -> int:
        """Return the code point that an escape stands for."""
        if c in _ESCAPES and not (c == "0" and self._text[self.at : self.at + 1].isdigit()):
            return _ESCAPES[c]
        if c in "xu":
            if c == "u" and self._take("{"):
                raise ValueError("it has \\u{...}, which Python's re does not read")
            digits = self._text[self.at : self.at + (2 if c == "x" else 4)]
            self.at += len(digits)
            return int(digits, 16)
        if c.isascii() and c.isalnum():
            raise ValueError(
                f"it has \\{c}, which is a word border, a back-reference, a Unicode property or nothing"
            )
        return ord(c)

    def _class(self) -> Tree:
        is_inverted = self._take("^")
        if self._text[self.at : self.at + 1] == "]":
            raise ValueError("it has an empty class")
        narrow: list[tuple[int, int]] = []
        wide: list[tuple[int, int]] = []
        while not self._take("]"):
            low = high = self._member()
            if len(low) == 3:
                narrow, wide = [*narrow, *low[1]], [*wide, *low[2]]
                continue
            following = self._text[self.at : self.at + 2]
            if following[:1] == "-" and following != "-]":
                self.at += 1
                high = self._member()
                if len(high) == 3:
                    raise ValueError("it has a range that ends in a class")
            if high[0] < low[0]:
                raise ValueError("it has a range that runs backwards")
            narrow, wide = [*narrow, (low[0], high[0])], [*wide, (low[0], high[0])]
        sets = joined(narrow), joined(wide)
        return ("set", inverted(sets[1]), inverted(sets[0])) if is_inverted else ("set", *sets)

    def _member(self) -> Tree:
        """Read a character, as a tuple of its code point, or a set."""
        c = self._next()
        if c == "\\":
            c = self._next()
            if c == "b":
                return (0x08,)
            if c.lower() in _CLASSES:
                self.at -= 1
                return self._escape()
            return (self._code(c),)
        if c == "[" and self._text[self.at : self.at + 1] in (":", "=", "."):
            raise ValueError("it has a POSIX class")
        return (ord(c),)

    def _next(self) -> str:
        if self.at >= len(self._text):
            raise ValueError("it ends too early")
        self.at += 1
        return self._text[self.at - 1]

    def _take(self, c: str) -> bool:
        if self._text[self.at : self.at + 1] != c:
            return False
        self.at += 1
        return True


def _one(code: int) -> Tree:
    return ("set", ((code, code),), ((code, code),))


def _found(tree: Tree, wide: bool, at_start: bool = False) -> Expr:
    """Return the strings in which a pattern matches anywhere, or `at_start`; for `wide`, see `searched`."""
    return union(*(_sequence(items, wide, at_start) for items in _spread(tree)))


def _sequence(items: list[Tree], wide: bool, at_start: bool) -> Expr:
    is_first = bool(items) and items[0] == ("start",)
    while items and items[0] == ("start",):
        items = items[1:]
    is_last = bool(items) and items[-1] == ("end",)
    while items and items[-1] == ("end",):
        items = items[:-1]
    rest = (("rep", literal("\n"), 0, 1) if wide else EMPTY) if is_last else ANY
    for i in range(len(items) - 1, -1, -1):
        item = items[i]
        if item[0] == "ahead":
            seen = _found(item[1], wide is not item[2], at_start=True)
            rest = both(rest, complement(seen) if item[2] else seen)
        elif i == len(items) - 1 and is_last and (tempered := _tempered(item, wide)):
            rest = cat(tempered, rest)
        else:
            rest = cat(_plain(item, wide), rest)
    return rest if is_first or at_start else cat(ANY, rest)


def _tempered(item: Tree, wide: bool) -> Expr | None:
    """Return the strings without x if `item`, the end of a pattern, is `(?:(?!x).)*`; else None."""
    if item[0] != "many" or item[3] is not None or item[1][0] != "seq" or len(item[1][1]) != 2:
        return None
    ahead, one = item[1][1]
    if ahead[0] != "ahead" or not ahead[2] or one[0] != "set" or _has_anchor(ahead[1]):
        return None
    return both(
        ("rep", _plain(one, wide), item[2], None),
        complement(cat(ANY, _plain(ahead[1], not wide), ANY)),
    )


def _spread(tree: Tree) -> list[list[Tree]]:
    """Write a tree as alternatives of sequences; groups with anchors or look-ahead are expanded."""
    if not _has_anchor(tree):
        return [[tree]]
    if tree[0] == "or":
        options = [items for option in tree[1] for items in _spread(option)]
    elif tree[0] == "seq":
        options = [[]]
        for item in tree[1]:
            parts = _spread(item)
            options = [[*items, *part] for items in options for part in parts]
            if len(options) > MAX_ALTERNATIVES:
                break
    else:
        options = [[tree]]
    if len(options) > MAX_ALTERNATIVES:
        raise ValueError("its anchors and alternatives multiply beyond bounds")
    return options


def _has_anchor(tree: Tree) -> bool:
    if tree[0] in ("start", "end", "ahead"):
        return True
    return tree[0] != "set" and any(map(_has_anchor, [tree[1]] if tree[0] == "many" else tree[1]))


def _plain(tree: Tree, wide: bool) -> Expr:
    kind = tree[0]
    if kind == "set":
        return ("chars", tree[2 if wide else 1])
    if kind == "many":
        return ("rep", _plain(tree[1], wide), tree[2], tree[3])
    if kind == "seq":
        return cat(*(_plain(item, wide) for item in tree[1]))
    if kind == "or":
        return union(*(_plain(item, wide) for item in tree[1]))
    raise ValueError("it has an anchor or look-ahead in the middle or in a repetition")
