"""Reading LLVM IR: the blocks of a function."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from typing import NamedTuple

from .translation import split

_DEFINE = re.compile(r"^define [^\n]*@(\w+)\([^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_LABEL = re.compile(r'^("?[\w.$-]+"?):')
_INSTRUCTION = re.compile(r"^  (?:(%[\w.$-]+) = )?(?:tail |musttail |notail )?(\w+)\s*(.*)$")
_NAME = re.compile(r"%[\w.$-]+")
_WORDS = re.compile(
    r"\b(?:nsw|nuw|nneg|exact|disjoint|inbounds|nusw|samesign|volatile|fast|nnan|ninf|nsz|arcp|contract|afn|"
    r"reassoc|noundef|addrspace\(\d+\)|inrange\([^)]*\))(?![\w.])\s*"
)
_WIDTHS = {1: "i1 i8", 2: "i16 half bfloat", 4: "i32 float", 8: "i64 double ptr"}
_BYTES = {name: size for size, names in _WIDTHS.items() for name in names.split()}


class Instruction(NamedTuple):
    """One instruction: `name = op type operands`; the type is of the result, or of what is stored or compared.

    `detail` is the predicate of a comparison, the name of what is called, the element type of an address, or
    "exact" for a sum that can't wrap around (`or` of different bits, too).
    """

    name: str
    op: str
    type: str
    operands: tuple[str, ...]
    detail: str = ""


@dataclass
class Block:
    """A basic block: `phis` (values by the block that control comes from) and `code`, except its last
    instruction.

    That one goes to `successors` by a `condition`: when it is true, when it is false; or where none of `cases`
    fits, and then for each case.
    """

    phis: dict[str, dict[str, str]] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    code: list[Instruction] = field(default_factory=list)
    condition: str = ""
    successors: tuple[str, ...] = ()
    cases: tuple[int, ...] = ()


def split_arguments(text: str) -> list[str]:
    return [part.strip() for part in split(text)] if text.strip() else []


@functools.cache
def size_of(type_: str) -> int:
    if array := re.fullmatch(r"[<\[](\d+) x (.*)[>\]]", type_):
        return int(array[1]) * size_of(array[2])
    return _BYTES[type_]


def constants_of(ir: str) -> dict[str, str]:
    """The strings among a module's constants, by name."""
    return dict(re.findall(r'^(@[\w.]+) = .*? c"([^"]*)\\00"', ir, re.MULTILINE))


def parse(ir: str, function: str) -> dict[str, Block]:
    """Blocks of a function by label, the first one first."""
    body = next(text for name, text in _DEFINE.findall(ir) if name == function)
    blocks: dict[str, Block] = {}
    label = "%entry"
    # The cases of a `switch` are on several lines.
    cases = re.compile(r"\[\n(.*?)\n\s*\]", re.DOTALL)
    for line in cases.sub(lambda m: "[" + " ".join(m[1].split()) + "]", body).split("\n"):
        if found := _LABEL.match(line):
            label = f"%{found[1]}"
            blocks[label] = Block()
        elif found := _INSTRUCTION.match(line):
            _add(blocks.setdefault(label, Block()), found[1] or "", found[2], found[3])
    return blocks


def _add(block: Block, name: str, op: str, rest: str) -> None:
    rest = re.sub(r",? ![\w.]+ ![\w.]+", "", rest)
    if op == "br":
        labels = re.findall(r"label (%[\w.$-]+)", rest)
        condition = re.match(r"i1 ([^,]+),", rest)
        block.condition, block.successors = condition[1] if condition else "", tuple(labels)
    elif op in ("ret", "unreachable"):
        block.successors = ()
    elif op == "switch":
        condition = re.match(r"i\d+ ([^,]+),", rest)
        block.condition = condition[1] if condition else ""
        block.successors = tuple(re.findall(r"label (%[\w.$-]+)", rest))
        block.cases = tuple(int(n) for n in re.findall(r"i\d+ (-?\d+), label", rest))
    elif op == "phi":
        block.phis[name] = {
            label: value for value, label in re.findall(r"\[ ([^\]]*?), (%[\w.$-]+) \]", rest)
        }
        block.types[name] = _type(_WORDS.sub("", rest))[0]
    elif not (op == "call" and "@llvm.lifetime" in rest):
        block.code.append(_instruction(name, op, rest))


def _type(text: str) -> tuple[str, str]:
    """A type at the beginning of a text, and what follows it."""
    if text[0] in "<[{":
        depth = 0
        for i, c in enumerate(text):
            depth += (c in "<[{") - (c in ">]}")
            if depth == 0:
                return text[: i + 1], text[i + 1 :].strip()
    if found := re.match(r'(%"[^"]*")\s*(.*)', text):
        return found[1], found[2]
    word, _, after = text.partition(" ")
    return word, after.strip()


def _instruction(name: str, op: str, rest: str) -> Instruction:
    if op == "call":
        return _call(name, rest)
    exact = op in ("or", "add") and re.match(r"disjoint|nuw|nsw", rest) is not None
    rest = _WORDS.sub("", rest)
    if op in ("icmp", "fcmp"):
        predicate, _, rest = rest.partition(" ")
        type_, rest = _type(rest)
        return Instruction(name, op, type_, tuple(split_arguments(rest)), predicate)
    if op == "getelementptr":
        element, *others = split_arguments(rest)
        return Instruction(name, op, "ptr", tuple(_type(o)[1] for o in others), element)
    if op == "load":
        type_, pointer, *_ = split_arguments(rest)
        return Instruction(name, op, type_, (_type(pointer)[1],))
    if op == "store":
        value, pointer, *_ = split_arguments(rest)
        return Instruction(name, op, _type(value)[0], (_type(value)[1], _type(pointer)[1]))
    if " to " in rest and op not in ("select",):
        value, _, type_ = rest.partition(" to ")
        return Instruction(name, op, type_.strip(), (_type(value)[1],), _type(value)[0])
    if op in ("select", "extractelement", "insertelement", "shufflevector"):
        parts = [_type(part) for part in split_arguments(rest)]
        type_ = parts[1][0] if op == "select" else parts[0][0]
        return Instruction(name, op, type_, tuple(value for _, value in parts))
    type_, rest = _type(rest)
    return Instruction(name, op, type_, tuple(split_arguments(rest)), "exact" if exact else "")


def _call(name: str, rest: str) -> Instruction:
    found = re.match(r'(.*?)(@"?[\w.$]+"?)\((.*)\)[^)]*$', rest)
    if found is None:
        raise NotImplementedError(f"a call: {rest}")
    given = [_WORDS.sub("", part) for part in split_arguments(found[3])]
    result = re.search(r"(<[^>]*>|\{.*\}|\S+)\s*$", found[1])
    arguments = tuple(_argument(part) for part in given)
    return Instruction(name, "call", result[1] if result else "void", arguments, found[2])


def _argument(text: str) -> str:
    if named := re.search(r"@[\w.]+", text):  # a constant, as a pointer of whatever kind
        return named[0]
    return re.sub(
        r"^(?:align \d+|dereferenceable\(\d+\)|zeroext|signext|\w+\([^)]*\))\s+", "", _type(text)[1]
    )
