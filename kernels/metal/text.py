"""Kernels' texts without what a launch does not need: MLX hashes the whole text at each launch.

Every step is one that a compiler would take: conditions of the preprocessor are decided, definitions that
nothing mentions are left out, and names and blanks become as short as they can be.
"""

from __future__ import annotations

import itertools
import re
import string
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

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


_CONSTANT = "static constant constexpr const"
_LINE = r"^#(?:.*\\\n)*.*\n?"  # of the preprocessor
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


def reached(header: str, body: str) -> str:
    """Return a header without the definitions, and members of structs, that the body doesn't need."""
    definitions = [_parts(definition) for definition in _definitions(header)]
    words = set(_WORD.findall(body))
    while True:
        kept, known = [], len(words)
        for names, opening, members, end in definitions:
            if not names or words & names:
                inside = [m for m in members if words & _names(m)]
                kept.append(opening + "".join(inside) + end)
                words.update(_WORD.findall(kept[-1]))
        if len(words) == known:
            return "".join(kept)


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


def _parts(definition: str) -> tuple[set[str], str, list[str], str]:
    """Return the names that a definition makes, and its text as beginning, members of a struct, and end."""
    opening, brace, rest = definition.partition("{")
    if not re.search(r"\bstruct \w+\s*$", opening):
        return _names(definition), definition, [], ""
    members, _, end = rest.rpartition("}")
    return (
        set(re.findall(r"\bstruct (\w+)", opening)),
        opening + brace,
        list(_definitions(members)),
        "}" + end,
    )


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


def shortened(texts: Iterable[str], fixed: Collection[str]) -> list[str]:
    """Shorten the names that the texts declare, the same way in all of them, and leave out blanks.

    `fixed` are names that others know. Names of one or two characters stay.
    """
    texts = list(texts)
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
    free = (name for name in every if name not in {*used, *fixed, "do", "if", "or"})
    # A macro replaces a word everywhere, so it is none that others use, such as a single letter.
    macros = re.findall(r"^#define (\w{3,})\b", joined, re.MULTILINE)
    short = {name: f"{next(free)}_" for name in macros}
    often = [name for name, _ in used.most_common() if name in declared and len(name) > 2]
    short |= dict(
        zip((name for name in often if name not in {*fixed, *macros}), free, strict=False)
    )
    found = [_without_blanks(with_words(text, short)) for text in texts]
    if (at := found[0].find(_CONSTANT)) >= 0:
        line, name = found[0].rfind("\n", 0, at) + 1, f"{next(free)}_"
        code = found[0][line:].replace(_CONSTANT, name)
        found[0] = f"{found[0][:line]}#define {name} {_CONSTANT}\n{code}"
    return found


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
