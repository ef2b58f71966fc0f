"""Kernels' texts without what a launch does not need: MLX hashes the whole text at each launch.

Every step is one that a compiler would take: conditions of the preprocessor are decided, definitions that
nothing mentions are left out, and names and blanks become as short as they can be.
"""

from __future__ import annotations

import functools
import itertools
import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

_WORD = re.compile(r'"[^"]*"|\b[A-Za-z_]\w*')
# Words of the language after which, or as which, no name is declared.
_NO_TYPES = set(
    "case const constant constexpr device else inline namespace return static template thread threadgroup "
    "using".split()
)
_NO_NAMES = _NO_TYPES | set(
    "auto bool char do float for half if int operator short switch uint while".split()
)
_DECLARED = (
    re.compile(r"\b([A-Za-z_]\w*)(?= ([A-Za-z]\w*))"),
    # Formatted text has a blank on both sides of an operator, and a type's last character before the blank.
    re.compile(r"(?<=[\w>])([*&>]) ([A-Za-z_]\w*)(?=\s*[;=,()\[{])"),
    re.compile(r"(typename|struct|#define) ([A-Za-z_]\w*)"),
    re.compile(r"(\(&)(\w+)\)"),
)


# What is there for readers, or can be said in less.
_SHORTER = (
    (
        r"(?<!constexpr )\bconst (?=(?:auto|bool|char4|float[24]?|half2|int|size_t|uint3?) \w+ = )",
        "",
    ),
    (r"\bmetal::(?!\w+;)", ""),  # its namespace is used
    (r"(?<=\d)\.0f\b", ".f"),
)
# What texts say often, and a macro that says it.
_PHRASES = (
    (r"static constant constexpr const\b", "CONSTANT_", "static constant constexpr const"),
    (
        r"UNROLL for \((\w+) (\w+) = 0; \2 < ([^;()]+); \2\+\+\)",
        r"EACH_(\1, \2, \3)",
        "UNROLL for (type_ i_ = 0; i_ < count_; i_++)",
    ),
)
_LINE = r"^#(?:.*\\\n)*.*\n?"  # of the preprocessor
_INCLUDE = re.compile(r"^#include.*\n", re.MULTILINE)
_CONDITIONS = ("#if", "#ifdef", "#else", "#endif")


def resolved(text: str, known: Mapping[str, int]) -> str:
    """Decide `#if`, `#ifdef`, `#else` and `#endif`; what is not `known` is 0, or not defined.

    Lines stay where they are: a condition, and what is left out, becomes a blank line.
    """
    lines, decided = [], []
    for line in text.splitlines():
        kind, _, condition = line.partition(" ")
        if kind == "#ifdef":
            decided.append(condition in known)
        elif kind == "#if":
            decided.append(bool(_value(condition, known)))
        elif kind == "#else":
            decided[-1] = not decided[-1]
        elif kind == "#endif":
            decided.pop()
        lines.append(line if all(decided) and kind not in _CONDITIONS else "")
    return "\n".join(lines)


def _value(condition: str, known: Mapping[str, int]) -> int:
    numbers = _WORD.sub(lambda name: str(int(known.get(name[0], 0))), condition)
    python = re.sub(r"!(?!=)", " not ", numbers.replace("&&", " and ").replace("||", " or "))
    if not re.fullmatch(r"(?:\d+|and|or|not|[=!<>]=|[<>()+*-]|\s)+", python):
        raise ValueError(f"#if {condition}: only names, numbers and comparisons are allowed.")
    return eval(python, {"__builtins__": {}})


def with_words(text: str, words: Mapping[str, str]) -> str:
    """Replace whole words."""
    return _WORD.sub(lambda word: words.get(word[0], word[0]), text)


# -- definitions


class _Piece(NamedTuple):
    """A definition, or a part of a struct's: its beginning, a member, or its end."""

    owner: int | None  # of a part, the index of the struct's beginning
    names: frozenset[str]  # that it defines; none if it stays wherever its owner does
    text: str
    words: frozenset[str]


def reached(header: str, body: str) -> str:
    """Return a header without the definitions, and members of structs, that the body doesn't need."""
    pieces = _pieces(header)
    words, kept, grows = set(_WORD.findall(body)), set[int](), True
    while grows:
        grows = False
        for i, piece in enumerate(pieces):
            needed = not piece.names or not words.isdisjoint(piece.names)
            if i not in kept and needed and (piece.owner is None or piece.owner in kept):
                kept.add(i)
                words |= piece.words
                grows = True
    return "".join(pieces[i].text for i in sorted(kept))


@functools.cache
def _pieces(header: str) -> list[_Piece]:
    pieces: list[_Piece] = []

    def add(owner: int | None, names: Iterable[str], text: str) -> None:
        pieces.append(_Piece(owner, frozenset(names), text, frozenset(_WORD.findall(text))))

    for definition in _definitions(header):
        opening, brace, rest = definition.partition("{")
        struct = re.search(r"\bstruct (\w+)\s*$", opening)
        if struct is None:
            add(None, _names(definition), definition)
            continue
        owner = len(pieces)
        add(None, {struct[1]}, opening + brace)
        members, _, end = rest.rpartition("}")
        for member in _definitions(members):
            add(owner, _names(member), member)
        add(owner, (), "}" + end)
    return pieces


def _definitions(text: str) -> Iterator[str]:
    """Split a text into definitions and lines of the preprocessor."""
    depth = begin = 0
    for match in re.finditer(rf"{_LINE}|[({{\[]|[)}}\]];?\n?|;\n?", text, re.MULTILINE):
        if match[0][0] == "#":
            ends = depth == 0
        else:
            depth += (match[0] in "({[") - (match[0][0] in ")}]")
            ends = depth == 0 and (";" in match[0] or match[0][0] == "}")
        if ends:
            yield text[begin : match.end()]
            begin = match.end()


def _names(definition: str) -> set[str]:
    """Return the names that a function, variable or macro has; none for what has to stay."""
    code = re.sub(r"^\s*template <.*?>\n", "", definition, flags=re.DOTALL).strip()
    if code.startswith("#"):
        return set(re.findall(r"^#define (\w+)", code)) if code.startswith("#define") else set()
    if code.startswith("using "):
        return set()
    declared = re.match(r"[^(={;]*?(\w+)\s*(?:[(={;]|\[)", code)
    assert declared is not None, definition
    return {declared[1]}


# -- names and blanks


class Form(NamedTuple):
    """A kernel's text: functions, the body that calls them, and the names of its buffers."""

    header: str
    body: str
    buffers: tuple[str, ...]


def shortened(header: str, body: str, buffers: Sequence[str]) -> Form:
    """Shorten the names of buffers and those that a header and a body declare, and leave out blanks.

    What the texts say often becomes a macro. Names of one or two characters stay.
    """
    for phrase, short in _SHORTER:
        header, body = (re.sub(phrase, short, text) for text in (header, body))
    macros = ""
    for phrase, short, long in _PHRASES:
        if len(re.findall(phrase, header + body)) > 3:
            header, body = (re.sub(phrase, short, text) for text in (header, body))
            arguments = "(type_, i_, count_)" if "(" in short else ""
            macros += f"#define {short.partition('(')[0]}{arguments} {long}\n"
    # No macro may come before what is included.
    included = "".join(_INCLUDE.findall(header))
    texts = included + macros + _INCLUDE.sub("", header), body
    joined = "\n".join(texts)
    used = Counter(_WORD.findall(joined))
    declared = {
        name
        for pattern in _DECLARED
        for before, name in pattern.findall(joined)
        if before not in _NO_TYPES and name not in _NO_NAMES
    }
    letters = string.ascii_letters
    every = itertools.chain(letters, map("".join, itertools.product(letters, letters)))
    free = (name for name in every if name not in {*used, *buffers, "do", "if", "or"})
    # A macro replaces a word everywhere, so it is none that others use, such as a single letter.
    defined = re.findall(r"^#define (\w{3,})\b", joined, re.MULTILINE)
    names = {name: f"{next(free)}_" for name in defined}
    # MLX looks for a buffer's name and "_shape" anywhere in a text: names of one letter come first.
    for name in buffers:
        short = names[name] = name if len(name) == 1 else next(free)
        names |= {f"{name}_{what}": f"{short}_{what}" for what in ("shape", "strides", "ndim")}
    names |= dict(zip(("type_", "i_", "count_"), free, strict=False))
    often = [name for name, _ in used.most_common() if name in declared and len(name) > 2]
    names |= dict(zip((name for name in often if name not in names), free, strict=False))
    header, body = (_without_blanks(with_words(text, names)) for text in texts)
    return Form(header, body, tuple(names[name] for name in buffers))


def _without_blanks(text: str) -> str:
    parts = re.split(rf"({_LINE})", text, flags=re.MULTILINE)
    for i in range(0, len(parts), 2):
        part = " ".join(parts[i].split())
        # No two operators become one.
        part = re.sub(r"(?<=\w) (?=[^\w ])|(?<=[^\w ]) (?=\w)", "", part)
        parts[i] = re.sub(r"(?<=[(){}\[\];,]) | (?=[(){}\[\];,])", "", part)
        if parts[i] and i + 1 < len(parts):
            parts[i] += "\n"
    return "".join(parts)
