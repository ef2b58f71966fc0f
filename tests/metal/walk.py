"""A walk of one lane through a function of LLVM IR: how often it comes to each block.

It computes what control flow can depend on: integers, pointers, and what is loaded from memory whose contents
are known. Everything else is unknown, and so is what is computed from it.
"""

from __future__ import annotations

import functools
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .llvm_ir import Block, Instruction, size_of


class Pointer(NamedTuple):
    """A place in memory: a named buffer, and bytes from its beginning (None when unknown)."""

    buffer: str
    offset: int | None


Memory = Callable[[Pointer, str], Any]
"""A value of a type in memory; None if it is unknown."""

_UNSIGNED: dict[str, Callable[[int, int], int]] = {
    **{"add": operator.add, "sub": operator.sub, "mul": operator.mul},
    **{"and": operator.and_, "or": operator.or_, "xor": operator.xor},
    **{"shl": operator.lshift, "lshr": operator.rshift},
    **{"udiv": operator.floordiv, "urem": operator.mod, "@llvm.umin": min, "@llvm.umax": max},
}
_SIGNED: dict[str, Callable[[int, int], int]] = {
    "sdiv": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "srem": lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
    "ashr": operator.rshift,
    "@llvm.smin": min,
    "@llvm.smax": max,
}
_COMPARE = {"eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt,
            "ge": operator.ge}  # fmt: skip
MOST_STEPS = 2_000_000  # instructions of a walk


@functools.cache
def _bits(type_: str) -> int:
    return int(type_[1:]) if re.fullmatch(r"i\d+", type_) else 64


@functools.cache
def _constant(text: str, type_: str) -> Any:
    if text in ("true", "false"):
        return int(text == "true")
    if re.fullmatch(r"-?\d+", text):
        return int(text) % (1 << _bits(type_))
    if text == "null":
        return Pointer("", 0)
    return 0 if text == "zeroinitializer" else None


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) & 1 else value


class Walk:
    """One lane's way through a function.

    Args:
        memory: what is known of memory.
        calls: results of functions that are no intrinsics of LLVM, by a part of their name.

    Attributes:
        visits: how often each block was run.
        touched: for each load and store, by its place (block, number), how often which buffer was touched.
    """

    def __init__(
        self,
        blocks: Mapping[str, Block],
        arguments: Mapping[str, Any],
        memory: Memory,
        calls: Mapping[str, Callable[[Sequence[Any]], Any]],
    ):
        self._blocks, self._memory, self._calls = blocks, memory, calls
        self._values: dict[str, Any] = dict(arguments)
        self.visits: Counter[str] = Counter()
        self.touched: Counter[tuple[str, int, str]] = Counter()
        self._run()

    def _run(self) -> None:
        label, came, steps = next(iter(self._blocks)), "", 0
        while label:
            block = self._blocks[label]
            self.visits[label] += 1
            self._values.update(
                {n: self._value(v[came], block.types[n]) for n, v in block.phis.items()}
            )
            for place, instruction in enumerate(block.code):
                self._values[instruction.name] = self._result(label, place, instruction)
            steps += len(block.code)
            if steps > MOST_STEPS:
                raise RuntimeError(
                    f"a lane runs more than {MOST_STEPS:,} instructions; use smaller shapes."
                )
            came, label = label, self._next(block)

    def _next(self, block: Block) -> str:
        if len(block.successors) < 2:
            return block.successors[0] if block.successors else ""
        condition = self._value(block.condition, "i1")
        if block.cases:
            place = block.cases.index(condition) + 1 if condition in block.cases else 0
            return block.successors[place]
        if condition is not None:
            return block.successors[0 if condition else 1]
        # Where lanes may differ, those that go the long way are waited for.
        first, second = block.successors
        return second if self._blocks[second].successors == (first,) else first

    def _value(self, text: str, type_: str) -> Any:
        return self._values.get(text) if text[0] == "%" else _constant(text, type_)

    def _result(self, label: str, place: int, code: Instruction) -> Any:
        op = code.op
        if op in ("load", "store"):
            pointer = self._value(code.operands[-1], "ptr")
            buffer = pointer.buffer if isinstance(pointer, Pointer) else "?"
            self.touched[label, place, buffer] += 1
            known = op == "load" and isinstance(pointer, Pointer) and pointer.offset is not None
            return self._memory(pointer, code.type) if known else None
        if op == "getelementptr":
            return self._address(code)
        if op == "call":
            return self._called(code)
        if op == "select":
            condition, *values = code.operands
            chosen = self._value(condition, "i1")
            if chosen is None:
                return None
            return self._value(values[0 if chosen else 1], code.type)
        values = [self._value(o, code.type) for o in code.operands]
        if any(value is None for value in values):
            return None
        return self._computed(code, values)

    def _computed(self, code: Instruction, values: list[Any]) -> Any:
        op, bits = code.op, _bits(code.type)
        if op in ("zext", "trunc", "bitcast", "addrspacecast", "inttoptr", "ptrtoint", "freeze"):
            return values[0] % (1 << bits) if isinstance(values[0], int) else values[0]
        if op == "sext":
            return _signed(values[0], _bits(code.detail)) % (1 << bits)
        if not all(isinstance(value, int) for value in values):
            return None
        if op == "icmp":
            signed = code.detail[0] == "s"
            a, b = (_signed(v, bits) for v in values) if signed else values
            return int(_COMPARE[code.detail[-2:]](a, b))
        if op in _UNSIGNED:
            return _UNSIGNED[op](*values) % (1 << bits)
        if op in _SIGNED:
            return _SIGNED[op](
                *(_signed(v, bits) for v in values[:1]), _signed(values[1], bits)
            ) % (1 << bits)
        return None

    def _called(self, code: Instruction) -> Any:
        for part, function in self._calls.items():
            if part in code.detail:
                return function(code.operands)
        kind = ".".join(code.detail.split(".")[:2])
        values = [self._value(o, code.type) for o in code.operands]
        if kind not in (*_UNSIGNED, *_SIGNED) or any(value is None for value in values):
            return None
        return self._computed(code._replace(op=kind), values)

    def _address(self, code: Instruction) -> Any:
        base = self._value(code.operands[0], "ptr")
        if not isinstance(base, Pointer):
            return None
        offset, element = base.offset, code.detail
        for i, index in enumerate(code.operands[1:]):
            if i and (inner := re.fullmatch(r"[<\[]\d+ x (.*)[>\]]", element)):
                element = inner[1]
            value = self._value(index, "i64")
            if offset is None or value is None:
                return Pointer(base.buffer, None)
            offset += _signed(value, 64) * size_of(element)
        return Pointer(base.buffer, offset)
