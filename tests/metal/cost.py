"""What a kernel costs a GPU: operations of one lane by class, bytes from memory, registers.

The very text that MLX would compile is optimized for a register machine (`register_machine.py`), and one lane
is walked through it (`walk.py`) with the grid and the arrays' shapes of a launch, so that every block is
counted as often as it runs. Prices of the classes are `bench/predict.py`'s.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from afm_mlx.kernels.metal import runtime as metal_runtime
from bench.predict import Launch

from . import llvm_ir
from .emulator import Unit, project_kernel, shape_buffers
from .llvm_ir import Block
from .operations import operations
from .register_machine import CostError, optimized
from .registers import registers, uniform_names
from .translation import entry
from .walk import Pointer, Walk

LANES = 32
# 32-bit registers of a lane: the most that Apple's instructions can name.
REGISTERS = 128
# Where `emulator::Thread` holds what, in the order of runtime.h: three numbers each, then one each.
_THREE = """
thread_position_in_grid thread_position_in_threadgroup threadgroup_position_in_grid threadgroups_per_grid
threads_per_grid threads_per_threadgroup dispatch_threads_per_threadgroup grid_size grid_origin
""".split()
_ONE = """
thread_index_in_threadgroup thread_index_in_simdgroup thread_index_in_quadgroup simdgroup_index_in_threadgroup
quadgroup_index_in_threadgroup simdgroups_per_threadgroup quadgroups_per_threadgroup
dispatch_simdgroups_per_threadgroup dispatch_quadgroups_per_threadgroup thread_execution_width
threads_per_simdgroup
""".split()


def _thread(grid: Sequence[int], threadgroup: Sequence[int]) -> dict[int, int]:
    """The first thread's attributes by their place in `emulator::Thread`."""
    groups = [-(-g // t) for g, t in zip(grid, threadgroup, strict=True)]
    simdgroups = -(-math.prod(threadgroup) // LANES)
    three = {
        "threadgroups_per_grid": groups,
        "threads_per_grid": grid,
        "threads_per_threadgroup": threadgroup,
        "dispatch_threads_per_threadgroup": threadgroup,
        "grid_size": grid,
    }
    one = {
        "simdgroups_per_threadgroup": simdgroups,
        "dispatch_simdgroups_per_threadgroup": simdgroups,
        "thread_execution_width": LANES,
        "threads_per_simdgroup": LANES,
    }
    numbers = [n for name in _THREE for n in three.get(name, (0, 0, 0))]
    numbers += [one.get(name, 0) for name in _ONE]
    return {4 * i: n for i, n in enumerate(numbers)}


class Argument(NamedTuple):
    """A buffer of a launch.

    Args:
        name: for messages.
        nbytes: its size.
        contents: what control flow may depend on; None for numbers that nobody knows.
    """

    name: str
    nbytes: int
    contents: np.ndarray | None = None


@functools.lru_cache(256)
def _parsed(unit: str, include: tuple) -> tuple[dict[str, Block], dict[str, str]]:
    ir = optimized(unit, include)
    return llvm_ir.parse(ir, "emulator_entry"), llvm_ir.constants_of(ir)


def unit_of(text: str, instance: str, parameters: str) -> str:
    """The translation unit of a kernel as the emulator runs it."""
    return f'{text}\n#line 1 "emulator"\n{entry(instance, parameters)}'


def count(
    name: str,
    unit: str,
    arguments: Sequence[Argument],
    grid: Sequence[int],
    threadgroup: Sequence[int],
    *,
    include: tuple = (),
    registers_at_most: float = REGISTERS,
) -> Launch:
    """The cost of a launch, from the walk of its first lane.

    Args:
        name: of the kernel.
        unit: see `unit_of`.
        arguments: its buffers in order.
        grid, threadgroup: in threads.
        include: folders of headers.
        registers_at_most: budget of 32-bit registers.

    Raises:
        CostError: for an array that stays in memory, a loop that should unroll and does not, or more registers.
    """
    blocks, strings = _parsed(unit, include)
    check(name, blocks, registers_at_most)
    thread = _thread(grid, threadgroup)

    def memory(pointer: Pointer, type_: str) -> Any:
        if pointer.buffer == "thread":
            return thread.get(pointer.offset or 0)
        if pointer.buffer == "buffers":
            return Pointer(str((pointer.offset or 0) // 8), 0)
        if not pointer.buffer.isdigit():
            return None
        contents = arguments[int(pointer.buffer)].contents
        if contents is None or "float" in type_ or type_ == "half":
            return None
        size = llvm_ir.size_of(type_)
        data = contents.tobytes()[pointer.offset : (pointer.offset or 0) + size]
        return int.from_bytes(data, "little") if len(data) == size else None

    calls = {
        "emulator_threadgroup_variable": lambda operands: Pointer(f"threadgroup {operands[0]}", 0),
        "emulator_lane": lambda operands: 0,
    }
    given = {"%t": Pointer("thread", 0), "%b": Pointer("buffers", 0)}
    walk = Walk(blocks, given, memory, calls)
    return _launch(name, blocks, strings, walk, arguments, grid, threadgroup)


def check(name: str, blocks: Mapping[str, Block], registers_at_most: float = REGISTERS) -> None:
    """Raise `CostError` for what makes a kernel slow on every GPU."""
    arrays = [code for block in blocks.values() for code in block.code if code.op == "alloca"]
    if arrays:
        what = ", ".join(f"{code.name} ({code.type})" for code in arrays)
        raise CostError(f"kernel `{name}`: arrays stay in memory instead of registers: {what}")
    if (wide := registers(blocks)) > registers_at_most:
        raise CostError(
            f"kernel `{name}`: about {wide:.0f} registers of 32 bits are live at once in a loop; the budget is "
            f"{registers_at_most}"
        )


def _launch(
    name: str,
    blocks: Mapping[str, Block],
    strings: Mapping[str, str],
    walk: Walk,
    arguments: Sequence[Argument],
    grid: Sequence[int],
    threadgroup: Sequence[int],
) -> Launch:
    lane: Counter[str] = Counter()
    uniform = uniform_names(blocks)
    for label, times in walk.visits.items():
        block = operations(blocks[label], strings, uniform)
        lane.update({kind: times * n for kind, n in block.items()})
    loaded: Counter[str] = Counter()
    for (label, place, buffer), times in walk.touched.items():
        code = blocks[label].code[place]
        if code.name not in uniform:
            loaded[buffer] += times * llvm_ir.size_of(code.type)
    groups = [-(-g // t) for g, t in zip(grid, threadgroup, strict=True)]
    simdgroups = math.prod(groups) * -(-math.prod(threadgroup) // LANES)
    lanes = simdgroups * LANES
    device = {int(b): n for b, n in loaded.items() if b.isdigit()}
    # What all lanes touch together may be the same: no array is read twice from memory.
    memory = sum(min(arguments[i].nbytes, lanes * n) for i, n in device.items())
    shared = sum(n for b, n in loaded.items() if b.startswith("threadgroup"))
    return Launch(
        name,
        math.prod(groups),
        simdgroups,
        {kind: n for kind, n in sorted(lane.items()) if n},
        lane_bytes=sum(device.values()) + shared,
        memory_bytes=memory,
    )


def count_launch(
    kernel: metal_runtime.Kernel, inputs: Sequence[mx.array], options: Mapping[str, Any]
) -> Launch:
    """The cost of a call of `kernels.metal.runtime.launch`.

    Integer inputs of up to 64 numbers, such as a row's length, are computed: control flow depends on them.
    """
    dtypes = options["output_dtypes"]
    unit = _unit(kernel, inputs, options)
    buffers = dict(zip(kernel.outputs, options["output_shapes"], strict=True))
    arguments = {
        name: Argument(name, math.prod(shape) * dtype.size)
        for (name, shape), dtype in zip(buffers.items(), dtypes, strict=True)
    }
    for name, x in zip(kernel.inputs, inputs, strict=True):
        known = np.array(x) if x.size <= 64 and mx.issubdtype(x.dtype, mx.integer) else None
        arguments[name] = Argument(name, x.nbytes, known)
        arguments |= {k: Argument(k, v.nbytes, v) for k, v in shape_buffers(name, x).items()}
    given = [arguments[name] for name in unit.buffers]
    size = options["grid"], options["threadgroup"]
    return count(kernel.name, unit_of(*unit[:3]), given, *size)


def check_launch(
    kernel: metal_runtime.Kernel,
    inputs: Sequence[mx.array],
    options: Mapping[str, Any],
    registers_at_most: float = REGISTERS,
) -> None:
    """Raise `CostError` for what makes the kernel of a launch slow on every GPU, see `count`."""
    blocks, _ = _parsed(unit_of(*_unit(kernel, inputs, options)[:3]), ())
    check(kernel.name, blocks, registers_at_most)


def _unit(
    kernel: metal_runtime.Kernel, inputs: Sequence[mx.array], options: Mapping[str, Any]
) -> Unit:
    return project_kernel(kernel).unit(inputs, options["output_dtypes"], options["template"])
