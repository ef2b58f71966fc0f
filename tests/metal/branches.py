"""Which ways the branches of the Metal texts were never taken, over all that the tests run.

With `AFM_METAL_BRANCHES=FOLDER`, the emulator compiles the project's kernels with a record at every
condition, loop and minimum, and each process of a test run leaves a file in FOLDER. `python -m
tests.metal.branches FOLDER` then lists what no launch did: a condition that was never true or never false,
a loop that never ran zero, one or several times, a `min` or `max` that always chose the same side. `make
branches` does both.

Conditions that are known when a kernel is compiled count like others: over all variants, both ways are wanted.
Left out are those in constant expressions, and loops that are unrolled, whose length is a constant.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from afm_mlx.kernels.metal.runtime import FOLDER, _read

from . import machine
from .lint import without_comments
from .translation import closing

SWITCH = "AFM_METAL_BRANCHES"
OUTCOMES = {
    "condition": ("false", "true"),
    "loop": ("skipped", "run once", "run several times"),
    "min": ("its first argument", "its second argument"),
    "max": ("its first argument", "its second argument"),
}
WIDTH = max(map(len, OUTCOMES.values()))  # bytes of a site's record

_SKIPPED, _ONCE, _SEVERAL = OUTCOMES["loop"]
# What no launch can do: reasons, and the texts, some of them of one file, with what they never do.
_REASONS: dict[str, dict[str, tuple[str, ...]]] = {
    "template arguments of 1 or more": {
        "uint tile = 0; tile < TILES; tile++": (_SKIPPED,),
    },
    "constants above 1": {
        "uint part = 0; part < SIMDGROUPS; part++": (_SKIPPED, _ONCE),
        "uint i = 0; i < CODES; i++": (_SKIPPED, _ONCE),
        "uint i = 0; i < THREADS / LANES; i++": (_SKIPPED, _ONCE),
    },
    "a single range isn't merged": {"uint s = 0; s < splits; s++": (_SKIPPED, _ONCE)},
}
IMPOSSIBLE = {
    (text, outcome)
    for texts in _REASONS.values()
    for text, outcomes in texts.items()
    for outcome in outcomes
}

_OPENING, _CLOSING = "([{", ")]}"


class Site(NamedTuple):
    """A place where the text may go more than one way; `kind` is one of `OUTCOMES`.

    `begin` to `end` is the condition, the three parts of a loop's head, or the two arguments, which are `text`;
    the statement or call begins at `start`.
    """

    file: str
    line: int
    kind: str
    begin: int
    end: int
    start: int
    text: str


def _is_edge(code: str, i: int) -> bool:
    """True if an operand of `?`, `&&` or `||` ends at the character `i`."""
    pair = code[i - 1 : i + 1], code[i : i + 2]
    if code[i] in ",;?" or {"&&", "||"} & set(pair):
        return True
    if code[i] == ":":
        return "::" not in pair
    # An assignment, `+=` too, but no comparison.
    return code[i] == "=" and code[i + 1] != "=" and code[i - 1] not in "=!<>"


def _operand_before(code: str, at: int) -> int:
    """Where the operand begins that ends before `at`."""
    depth, i = 0, at - 1
    while i >= 0:
        depth += (code[i] in _CLOSING) - (code[i] in _OPENING)
        if depth < 0 or (depth == 0 and _is_edge(code, i)) or (depth == 1 and code[i] == "}"):
            break
        if depth == 0 and re.match(r"return\b", code[i:]) and not code[i - 1].isalnum():
            i += len("return") - 1
            break
        i -= 1
    return at - len(code[i + 1 : at].lstrip())


def _operand_after(code: str, at: int) -> int:
    """Where the operand ends that begins at `at`."""
    depth, i = 0, at
    while i < len(code):
        depth += (code[i] in _OPENING) - (code[i] in _CLOSING)
        if depth < 0 or (depth == 0 and i > at and _is_edge(code, i)):
            break
        i += 1
    return at + len(code[at:i].rstrip())


def _is_constant(code: str, at: int) -> bool:
    """True if the compiler knows a statement's expressions."""
    for head in re.finditer(r"\bconstexpr\b[^;{}()=]*\([^;{}]*\)[^;{}]*\{", code):
        if head.end() <= at < closing(code, head.end() - 1):
            return True
    start = max(code.rfind(c, 0, at) for c in ";{}") + 1
    return bool(re.match(r"\s*(?:#.*\n\s*)*(?:[\w\s]*\bconstexpr\b|threadgroup\b)", code[start:at]))


def _found(code: str) -> Iterator[tuple[str, int, int, int]]:
    """Kind, begin, end and start of every site."""
    for match in re.finditer(r"\b(if|while|for)\s*\(", code):
        begin = match.end()
        end = closing(code, begin - 1)
        if match[1] != "for":
            yield "condition", begin, end, begin
        elif not re.search(r"UNROLL\s*$", code[: match.start()]):
            yield "loop", begin, end, match.start()
    operands = set()
    for match in re.finditer(r"\?|&&|\|\|", code):
        operands.add((begin := _operand_before(code, match.start()), match.start()))
        if match[0] != "?":
            begin = match.end() + len(code[match.end() :]) - len(code[match.end() :].lstrip())
            operands.add((begin, _operand_after(code, begin)))
    for begin, end in operands:
        yield "condition", begin, begin + len(code[begin:end].rstrip()), begin
    for match in re.finditer(r"(?<![\w.:])(?:metal::)?(min|max)\s*\(", code):
        yield match[1], match.end(), closing(code, match.end() - 1), match.start()


@functools.cache
def sites() -> tuple[Site, ...]:
    """The sites of all files; the index of one is its number in the records."""
    found = []
    for path in sorted(FOLDER.glob("*.metal")):
        text = _read(path.stem)
        # Conditions of the preprocessor are decided before, for each form.
        code = re.sub(
            r"^#if.*", lambda line: " " * len(line[0]), without_comments(text), flags=re.MULTILINE
        )
        for kind, begin, end, start in sorted(set(_found(code))):
            if not _is_constant(code, start):
                line = code.count("\n", 0, start) + 1
                found.append(Site(path.stem, line, kind, begin, end, start, text[begin:end]))
    return tuple(found)


def instrumented(name: str, text: str) -> str:
    """The text of a file of the project with a record at every site, on the same lines."""
    edits: list[tuple[int, int, int, str]] = []  # from, order among these, to, what instead
    for number, site in enumerate(sites()):
        if site.file != name:
            continue
        # Of what begins at one place, the longest comes first; of what ends there, the shortest.
        size = site.end - site.begin
        if site.kind == "condition":
            edits.append((site.begin, -size, site.begin, f"emulator::branch({number}, bool("))
            edits.append((site.end, size - len(text), site.end, "))"))
        elif site.kind == "loop":
            first, second = (site.begin + m.start() for m in re.finditer(";", site.text))
            record = f"for (emulator::Loop emulator_loop({number}); emulator_loop.once();) "
            edits.append((site.start, 0, site.start, record))
            edits.append((first + 1, -len(text), first + 1, " emulator_loop.next("))
            edits.append((second, 0, second, ")"))
        else:
            edits.append((site.start, 0, site.begin, f"emulator::{site.kind}_of({number}, "))
    result, done = "", 0
    for begin, _, end, what in sorted(edits):
        result, done = result + text[done:begin] + what, end
    return result + text[done:]


def _digest() -> str:
    """Of what is recorded: a record of other texts says nothing."""
    return hashlib.sha256(repr(sites()).encode()).hexdigest()[:16]


@functools.cache
def start() -> bool:
    """Have what launches of this process do recorded, when the switch is on; done once."""
    folder = os.environ.get(SWITCH)
    if not folder:
        return False
    Path(folder).mkdir(parents=True, exist_ok=True)
    table = Path(folder) / f"{_digest()}-{os.getpid()}.taken"
    table.write_bytes(bytes(WIDTH * len(sites())))
    machine.record_to(table, WIDTH)
    return True


def source(name: str, text: str) -> str:
    """A file's text as the emulator compiles it: with records when the switch is on."""
    return instrumented(name, text) if start() else text


def untaken(folder: Path) -> list[str]:
    """One line for each way that no launch took, other than impossible ones."""
    taken = np.zeros((len(sites()), WIDTH), bool)
    records = sorted(folder.glob(f"{_digest()}-*.taken"))
    if not records:
        raise ValueError(
            f"no records of these texts in {folder}: run the tests with {SWITCH}={folder}"
        )
    for path in records:
        taken |= np.frombuffer(path.read_bytes(), np.uint8).reshape(taken.shape) > 0
    lines = []
    for site, outcomes in zip(sites(), taken, strict=True):
        for outcome, seen in zip(OUTCOMES[site.kind], outcomes, strict=False):
            text = " ".join(site.text.split())
            known = {(text, outcome), (f"{site.file}.metal: {text}", outcome)}
            if not seen and not known & IMPOSSIBLE:
                lines.append(
                    f"{site.file}.metal:{site.line}: {site.kind} `{text}` was never {outcome}"
                )
    return lines


def main() -> int:
    lines = untaken(Path(sys.argv[1]))
    ways = sum(len(OUTCOMES[site.kind]) for site in sites())
    print(*lines, f"{len(lines)} of {ways} ways were never taken", sep="\n")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
