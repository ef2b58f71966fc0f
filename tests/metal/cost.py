"""What a kernel costs a GPU: operations of one lane by class, bytes from memory, registers.

The very text that MLX would compile is optimized for a register machine, and one lane is walked through it
(`walk.py`) with the grid and the arrays' shapes of a launch, so that every block is counted as often as it
runs. Prices of the classes are `bench/apple_gpus.py`'s.

clang's AMD target stands for Apple's, which is not to be had: a machine with 32-bit registers and 32 lanes,
whose optimizer unrolls and keeps arrays in registers as a GPU's does. What lanes do together is an opaque
call that is known by its name.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from afm_mlx.kernels.metal import runtime as metal_runtime
from bench.apple_gpus import Launch

from . import llvm_ir, toolchain
from .emulator import project_kernel, shape_buffers
from .llvm_ir import Block
from .machine import Unit
from .operations import operations
from .registers import registers, uniform_names
from .toolchain import CompileError
from .walk import Pointer, Walk

TARGET = ("-triple", "amdgcn-amd-amdhsa", "-target-cpu", "gfx1100")
# All of a kernel in one function; arrays that the optimizer leaves in memory stay visible as such.
_PASSES = ("-inline-threshold=1000000", "-disable-promote-alloca-to-vector")
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


class CostError(RuntimeError):
    """What would make a kernel slow on every GPU, such as an array in memory."""


class Argument(NamedTuple):
    """A buffer of a launch; control flow may depend on its `contents`, None for numbers that nobody knows."""

    name: str
    nbytes: int
    contents: np.ndarray | None = None


@functools.lru_cache(256)
def _parsed(unit: Unit) -> tuple[dict[str, Block], dict[str, str]]:
    """The blocks of a unit's LLVM IR at -O2, and its constants."""
    key = f"{toolchain._salt()}{unit.include}{unit.whole}"
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    with toolchain._cached(f"{name}.ll") as (file, out):
        if out is not None:
            source = out.with_name("kernel.cpp")
            source.write_text(unit.whole, encoding="utf-8")
            _optimize(source, out, unit.include)
    ir = file.read_text(encoding="utf-8")
    return llvm_ir.parse(ir, "emulator_entry"), llvm_ir.constants_of(ir)


def _optimize(source: Path, out: Path, include: tuple[Path, ...]) -> None:
    # Variables that the emulator fills with a pattern are left alone here.
    language = (flag for flag in toolchain.LANGUAGE if "auto-var-init" not in flag)
    flags = ("-O2", "-std=c++17", "-x", "c++", "-DMSL_OPAQUE", "-fgnuc-version=4.2.1")
    passes = (flag for each in _PASSES for flag in ("-mllvm", each))
    try:
        toolchain._run(
            *(toolchain.zig(), "clang", "-cc1", *TARGET, *flags, "-ffp-contract=on"),
            *("-Werror=pass-failed", *passes, *language, *toolchain.WARNINGS),
            *(*toolchain._search(include), "-emit-llvm", "-o", str(out), str(source)),
        )
    except CompileError as error:
        if "-Werror,-Wpass-failed" not in str(error):
            raise
        lines = "\n".join(re.findall(r"^.*pass-failed.*$", str(error), re.MULTILINE))
        raise CostError(f"a loop can't be unrolled:\n{lines}") from None


def count(
    name: str,
    unit: Unit,
    arguments: Sequence[Argument],
    grid: Sequence[int],
    threadgroup: Sequence[int],
    *,
    registers_at_most: float = REGISTERS,
) -> Launch:
    """The cost of a launch, from the walk of its first lane; `grid` and `threadgroup` are in threads.

    Raises:
        CostError: for an array that stays in memory, a loop that should unroll and does not, or more registers.
    """
    blocks, strings = _parsed(unit)
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
    groups = math.prod(-(-g // t) for g, t in zip(grid, threadgroup, strict=True))
    simdgroups = groups * -(-math.prod(threadgroup) // LANES)
    device = {int(b): n for b, n in loaded.items() if b.isdigit()}
    shared = sum(n for b, n in loaded.items() if b.startswith("threadgroup"))
    return Launch(
        name,
        groups,
        simdgroups,
        {kind: n for kind, n in sorted(lane.items()) if n},
        lane_bytes=sum(device.values()) + shared,
        # What all lanes touch together may be the same: no array is read twice from memory.
        memory_bytes=sum(
            min(arguments[i].nbytes, simdgroups * LANES * n) for i, n in device.items()
        ),
    )


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


def count_launch(
    kernel: metal_runtime.Kernel, inputs: Sequence[mx.array], options: Mapping[str, Any]
) -> Launch:
    """The cost of a call of `kernels.metal.runtime.launch`.

    Integer inputs of up to 64 numbers, such as a row's length, are computed: control flow depends on them.
    """
    dtypes = options["output_dtypes"]
    made = project_kernel(kernel, tuple(options["template"]))
    unit = made.unit(inputs, dtypes, ())
    buffers = dict(zip(made.output_names, options["output_shapes"], strict=True))
    arguments = {
        name: Argument(name, math.prod(shape) * dtype.size)
        for (name, shape), dtype in zip(buffers.items(), dtypes, strict=True)
    }
    for name, x in zip(made.input_names, inputs, strict=True):
        known = np.array(x) if x.size <= 64 and mx.issubdtype(x.dtype, mx.integer) else None
        arguments[name] = Argument(name, x.nbytes, known)
        arguments |= {k: Argument(k, v.nbytes, v) for k, v in shape_buffers(name, x).items()}
    given = [arguments[name] for name in unit.buffers]
    return count(kernel.name, unit, given, options["grid"], options["threadgroup"])


def check_launch(
    kernel: metal_runtime.Kernel,
    inputs: Sequence[mx.array],
    options: Mapping[str, Any],
    registers_at_most: float = REGISTERS,
) -> None:
    """Raise `CostError` for what makes the kernel of a launch slow on every GPU, see `count`."""
    made = project_kernel(kernel, tuple(options["template"]))
    blocks, _ = _parsed(made.unit(inputs, options["output_dtypes"], ()))
    check(kernel.name, blocks, registers_at_most)
