"""Operations of a block of LLVM IR, by classes that a GPU has prices for (`bench/apple_gpus.py`)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set

from . import llvm_ir
from .llvm_ir import Block, Instruction

_FREE = set(
    """
    trunc zext sext bitcast addrspacecast inttoptr ptrtoint freeze fneg extractelement insertelement
    shufflevector getelementptr
    """.split()
)
_CLASSES = {
    **dict.fromkeys("fadd fsub fmul".split(), "float"),
    **dict.fromkeys("and or xor".split(), "bit"),
    **dict.fromkeys("add sub select".split(), "integer"),
    **dict.fromkeys("shl lshr ashr".split(), "shift"),
    **dict.fromkeys("uitofp sitofp fptoui fptosi".split(), "convert"),
    **dict.fromkeys("udiv sdiv urem srem".split(), "divide"),
    **{"mul": "multiply", "fdiv": "reciprocal", "frem": "divide", "load": "load", "store": "store"},
}
# Of functions, by a part of their name; the first that fits.
_FUNCTIONS = {
    "simdgroup_multiply_accumulate": "matrix",
    **dict.fromkeys("fmuladd llvm.fma minnum maxnum minimum maximum".split(), "float"),
    **dict.fromkeys("llvm.umin llvm.umax llvm.smin llvm.smax llvm.abs".split(), "integer"),
    **{"llvm.fabs": "", "copysign": "bit", "llvm.usub": "integer", "llvm.uadd": "integer"},
    **dict.fromkeys("llvm.fsh llvm.ct llvm.bitreverse llvm.bswap".split(), "shift"),
    **{"llvm.is.fpclass": "integer", "divide": "reciprocal", "fmod": "divide", "sqrt": "root"},
    **{"exp": "exponent", "log": "exponent", "pow": "power"},
    **dict.fromkeys("sin cos tan erf".split(), "sine"),
    **dict.fromkeys("floor ceil rint round trunc".split(), "convert"),
    **dict.fromkeys("llvm.assume llvm.experimental.noalias emulator_lane".split(), ""),
    **{"emulator_threadgroup_variable": "", "emulator_barrier": "barrier"},
    "emulator_collective": "",  # a barrier of a simdgroup: the others are opaque
}
# Bytes that one instruction loads or stores at most, and numbers.
_VECTOR_BYTES, _VECTOR = 16, 4


def _class(code: Instruction, fused: set[str], strings: Mapping[str, str]) -> tuple[str, int]:
    """The class of an instruction ("" for none), and how many of it there are."""
    found = re.match(r"<(\d+) x", code.type)
    lanes = int(found[1]) if found else 1
    wide = 2 if "i64" in code.type else 1
    if code.op == "call":
        kind = _function(code, strings)
        return (
            kind,
            1 if kind == "matrix" else lanes,
        )  # one multiplies 8x8 matrices, two numbers of each lane
    if code.op in ("fpext", "fptrunc"):  # half costs nothing as an operand or a result
        return ("bfloat" if "bfloat" in code.type + code.detail else ""), lanes
    if code.op in ("icmp", "fcmp"):
        return ("" if code.name in fused else "integer"), lanes
    if code.op in _FREE:
        return "", lanes
    if code.op in ("fadd", "fsub", "fmul") and "bfloat" in code.type:
        return "bfloat_float", lanes
    if code.op not in _CLASSES:
        raise NotImplementedError(
            f"no class of operations has LLVM's {code.op}; add it to tests/metal/operations.py."
        )
    return _CLASSES[code.op], lanes * wide


def _function(code: Instruction, strings: Mapping[str, str]) -> str:
    name = code.detail
    if "emulator_named" in name:
        name = strings[code.operands[0]].lower()
    if "opaque" in name:
        called = strings.get(code.operands[0], "")
        if "multiply" in called:
            return "matrix"
        return "shuffle" if re.search("shuffle|broadcast", called) else "reduction"
    for part, kind in _FUNCTIONS.items():
        if part in name:
            return kind
    raise NotImplementedError(
        f"no class of operations has the function {name}; add it to tests/metal/operations.py."
    )


def _fused(block: Block) -> set[str]:
    """Comparisons that a select or a branch of their block takes in."""
    chosen = {code.operands[0] for code in block.code if code.op == "select"} | {block.condition}
    others = {o for code in block.code if code.op != "select" for o in code.operands}
    return chosen - others


def operations(
    block: Block, strings: Mapping[str, str], uniform: Set[str] = frozenset()
) -> Counter[str]:
    """Operations of a block by class, without `uniform` names: computed once for all threads."""
    counts: Counter[str] = Counter()
    fused, places = _fused(block), _Places(block, uniform)
    for code in block.code:
        if code.name in uniform:
            continue
        kind, number = _class(code, fused, strings)
        if kind and kind not in ("load", "store") and code.name not in places.folded:
            counts[kind] += number
    counts["integer"] += 2 * len(places.computed)  # 64 bits each
    for kind, accesses in places.accesses.items():
        counts[kind] += _instructions(accesses)
    return counts


class _Places:
    """Where a block's loads and stores go: a base that is computed once, and a constant in the instruction.

    Attributes:
        accesses: of "load" and "store": base, bytes from there, bytes.
        computed: bases that the block computes.
        folded: names of sums that are part of an address and of nothing else.
    """

    def __init__(self, block: Block, uniform: Set[str]):
        self._defined = {code.name: code for code in block.code}
        self.accesses: dict[str, list[tuple[str, int, int]]] = {"load": [], "store": []}
        self.computed: set[str] = set()
        sums: set[str] = set()
        others: set[str] = set()
        for code in block.code:
            if code.op in self.accesses and code.name not in uniform:
                base, offset = self._place(code.operands[-1])
                self.accesses[code.op].append((base, offset, llvm_ir.size_of(code.type)))
                self.computed |= {base} if "+" in base else set()
            if code.op == "getelementptr":
                sums |= {name for name, _ in map(self._sum, code.operands[1:]) if name}
            elif code.op != "zext":
                others |= set(code.operands)
        self.folded = sums - others

    def _place(self, pointer: str) -> tuple[str, int]:
        """The base of a pointer that this block may have computed, and a constant."""
        code = self._defined.get(pointer)
        if code is None or code.op != "getelementptr" or len(code.operands) != 2:
            return pointer, 0
        base, offset = self._place(code.operands[0])
        size, index = llvm_ir.size_of(code.detail), code.operands[1]
        if re.fullmatch(r"-?\d+", index):
            return base, offset + int(index) * size
        _, (index, constant) = self._sum(index), self._terms(index)
        return f"{base}+{index}*{size}", offset + constant * size

    def _widened(self, index: str) -> str:
        code = self._defined.get(index)
        return code.operands[0] if code is not None and code.op in ("zext", "sext") else index

    def _sum(self, index: str) -> tuple[str, str]:
        """The sum that an index is, and what a constant is added to; empty where it is none."""
        name = self._widened(index)
        code = self._defined.get(name)
        if code is None or code.detail != "exact" or not re.fullmatch(r"\d+", code.operands[1]):
            return "", ""
        return name, code.operands[0]

    def _terms(self, index: str) -> tuple[str, int]:
        name, term = self._sum(index)
        if not name:
            return self._widened(index), 0
        return self._widened(term), int(self._defined[name].operands[1])


def _instructions(places: Sequence[tuple[str, int, int]]) -> int:
    """Instructions that access these places: neighbours of one size go together, four at most."""
    count, last, inside = 0, ("", 0, 0), 0
    for place in sorted(set(places)):
        root, offset, size = place
        follows = root == last[0] and size == last[2] and offset == last[1] + size
        if follows and inside < _VECTOR and (inside + 1) * size <= _VECTOR_BYTES:
            inside += 1
        else:
            count, inside = count + 1, 1
        last = place
    return count
