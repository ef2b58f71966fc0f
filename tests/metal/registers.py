"""Registers that a loop needs, and what a GPU computes once for all threads: read in LLVM IR."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from . import llvm_ir
from .llvm_ir import Block, Instruction


def uniform_names(blocks: Mapping[str, Block]) -> set[str]:
    """Names of values that are a thread's attributes, or follow from a launch's sizes and addresses alone."""
    uniform = {"%b"}
    for _ in range(2):  # blocks may be listed before those that they follow
        for block in blocks.values():
            for code in block.code:
                names = {o for o in code.operands if o.startswith("%")}
                if names <= uniform and code.op not in ("alloca", "call"):
                    uniform.add(code.name)
    attributes = {"%t"}
    for block in blocks.values():
        for code in block.code:
            if (
                code.operands
                and code.operands[0] in attributes
                and code.op in ("getelementptr", "load")
            ):
                attributes.add(code.name)
    return (uniform | attributes) - {""}


def _registers_of(type_: str) -> float:
    """32-bit registers of a value; comparisons and pointers to a buffer's beginning take none."""
    return 0 if type_ in ("i1", "void") or type_[0] == "{" else max(0.5, llvm_ir.size_of(type_) / 4)


def registers(blocks: Mapping[str, Block]) -> float:
    """Most 32-bit registers that are live at once in a loop, or anywhere where there is none: an estimate.

    What follows from sizes alone is not counted: Apple's GPUs compute it once for all threads.
    """
    blocks, uniform = _with_offsets_in_accesses(blocks), uniform_names(blocks)
    live_out = _live_out(blocks)
    code = [code for block in blocks.values() for code in block.code]
    types = {code.name: code.type for code in code if code.name not in uniform}
    types |= {name: type_ for block in blocks.values() for name, type_ in block.types.items()}
    sizes = {name: _registers_of(type_) for name, type_ in types.items()}
    loops = {label for label in blocks if _reaches(blocks, label)} or set(blocks)
    return max(_widest(blocks[label], live_out[label], sizes) for label in loops)


def _with_offsets_in_accesses(blocks: Mapping[str, Block]) -> dict[str, Block]:
    """The blocks without addresses that are another one and a constant, which is part of the access."""
    bases = {
        code.name: code.operands[0]
        for block in blocks.values()
        for code in block.code
        if code.op == "getelementptr" and not any(o.startswith("%") for o in code.operands[1:])
    }

    def base(name: str) -> str:
        while name in bases:
            name = bases[name]
        return name

    return {
        label: replace(
            block,
            phis={n: {b: base(v) for b, v in of.items()} for n, of in block.phis.items()},
            code=[
                code._replace(operands=tuple(map(base, code.operands)))
                for code in block.code
                if code.name not in bases
            ],
        )
        for label, block in blocks.items()
    }


def _live_out(blocks: Mapping[str, Block]) -> dict[str, set[str]]:
    used, made = {}, {}
    for label, block in blocks.items():
        live = {block.condition} - {""}
        for code in reversed(block.code):
            live = (live - {code.name}) | {o for o in code.operands if o.startswith("%")}
        used[label] = live | block.phis.keys()
        made[label] = {code.name for code in block.code}
    live_in: dict[str, set[str]] = {label: set() for label in blocks}
    live_out: dict[str, set[str]] = {label: set() for label in blocks}
    changed = True
    while changed:
        changed = False
        for label in reversed(blocks):
            out: set[str] = set()
            for successor in blocks[label].successors:
                phis = blocks[successor].phis
                out |= live_in[successor] - phis.keys()
                out |= {v[label] for v in phis.values() if v[label].startswith("%")}
            live = used[label] | (out - made[label])
            changed |= out != live_out[label] or live != live_in[label]
            live_out[label], live_in[label] = out, live
    return live_out


def _reaches(blocks: Mapping[str, Block], label: str) -> bool:
    seen, todo = set(), list(blocks[label].successors)
    while todo:
        at = todo.pop()
        if at == label:
            return True
        if at not in seen:
            seen.add(at)
            todo.extend(blocks[at].successors)
    return False


def _widest(block: Block, live: set[str], sizes: Mapping[str, float]) -> float:
    """Most registers in a block: in the order of the IR or, where that takes fewer, values as they are used."""
    return min(_widest_in(order, live, sizes) for order in (block.code, _as_needed(block, live)))


def _as_needed(block: Block, live: set[str]) -> list[Instruction]:
    """A block's instructions with operands right before the first use."""
    defined = {code.name: code for code in block.code if code.name}
    order: list[Instruction] = []
    done: set[str] = set()
    ends = [c for c in block.code if not c.name or c.name in live or c.name == block.condition]
    todo = [(code, False) for code in reversed(ends)]
    while todo:
        code, ready = todo.pop()
        if code.name in done and code.name:
            continue
        if ready:
            order.append(code)
            done.add(code.name)
        else:
            todo.append((code, True))
            todo.extend(
                (defined[o], False)
                for o in reversed(code.operands)
                if o in defined and o not in done
            )
    return order


def _widest_in(order: Sequence[Instruction], live: set[str], sizes: Mapping[str, float]) -> float:
    live = set(live)
    widest = now = sum(sizes.get(name, 0) for name in live)  # what isn't computed is a parameter
    for code in reversed(order):
        if code.name in live:
            live.remove(code.name)
            now -= sizes.get(code.name, 0)
        for name in code.operands:
            if name not in live and name.startswith("%"):
                live.add(name)
                now += sizes.get(name, 0)
        widest = max(widest, now)
    return widest
