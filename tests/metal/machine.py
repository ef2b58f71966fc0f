"""Launches on buffers of bytes: compiled programs, the processes that they run in, and what these report."""

from __future__ import annotations

import collections
import ctypes
import functools
import math
import mmap
import os
import random
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from . import toolchain
from .toolchain import CompileError
from .translation import entry

THREADGROUP_BYTES = 32 * 1024
MAX_THREADS = 1024
MAX_BUFFERS = 31
SECONDS = 120

Buffers = Sequence[tuple[str, bytes | int]]
"""Names of a launch's buffers, in order, each with an input's bytes or an output's size."""


class EmulatorError(RuntimeError):
    """What a kernel did that it must not do, with the thread and, where known, the line."""


class Unit(NamedTuple):
    """A text with a kernel function, as a translation unit for clang.

    Args:
        text: the text.
        instance: the kernel in it, with its template arguments.
        parameters: the text between the parentheses of its declaration.
        buffers: names of its buffers in order.
        include: folders of the headers that it includes.
    """

    text: str
    instance: str
    parameters: str
    buffers: tuple[str, ...] = ()
    include: tuple[Path, ...] = ()

    @property
    def whole(self) -> str:
        """The text and the function that calls the kernel."""
        return f'{self.text}\n#line 1 "emulator"\n{entry(self.instance, self.parameters)}'


class Program:
    """A compiled kernel, ready to launch on buffers; for `options` see `toolchain.compile_library`."""

    def __init__(self, name: str, unit: Unit, **options):
        self.name = name
        try:
            self.library = toolchain.compile_library(unit.whole, include=unit.include, **options)
        except CompileError as error:
            raise CompileError(f"kernel `{name}` doesn't compile:\n{error}") from None
        toolchain.runtime()
        self._loaded = loaded = ctypes.CDLL(str(self.library))
        span = (ctypes.c_ulong * 2)()
        loaded.emulator_range(span)
        self.code = tuple(span)
        self.entry = ctypes.cast(loaded.emulator_entry, ctypes.c_void_p).value


class _Buffer(ctypes.Structure):
    _fields_ = (
        *(("name", ctypes.c_char_p), ("data", ctypes.c_void_p), ("size", ctypes.c_ulong)),
        *(("is_output", ctypes.c_int), ("written", ctypes.c_void_p)),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        *(("name", ctypes.c_char_p), ("entry", ctypes.c_void_p)),
        *(("buffers", ctypes.POINTER(_Buffer)), ("n_buffers", ctypes.c_uint)),
        *(("grid", ctypes.c_uint * 3), ("threadgroup", ctypes.c_uint * 3)),
        *(("seed", ctypes.c_ulong), ("schedule", ctypes.c_int), ("seconds", ctypes.c_uint)),
        *(("threadgroup_bytes", ctypes.c_uint), ("code_begin", ctypes.c_ulong)),
        *(("code_end", ctypes.c_ulong), ("lets_equals_race", ctypes.c_int)),
    )


_ERROR_BYTES = 4096
_launches: collections.Counter[str] = collections.Counter()


def _seed() -> int:
    """A launch's seed: in a test run, drawn from the run's seed, the test, and the launch's number in it."""
    run = os.environ.get("AFM_TEST_SEED")
    if not run:
        return random.getrandbits(48)
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    _launches[test] += 1
    return random.Random(f"{run} {test} {_launches[test]}").getrandbits(48)


def run(
    program: Program,
    buffers: Buffers,
    grid: Sequence[int],
    threadgroup: Sequence[int],
    *,
    types: Mapping[str, str] | None = None,
    lets_equals_race: bool = False,
    seed: int | None = None,
) -> list[np.ndarray]:
    """Bytes of the outputs of a launch, in the order of `buffers`, as uint8 arrays.

    Args:
        types: `float32` or `bfloat16` for outputs of these types, whose numbers may differ as far as denormals
            explain, since one of the two runs flushes them.
        lets_equals_race: let threads write what another one wrote, with no barrier in between, if they write
            the same value. It is undefined in Metal, too, but kernels of others live by it.
    """
    seed = _seed() if seed is None else seed

    def fail(what: str) -> None:
        raise EmulatorError(f"kernel `{program.name}`: {what} [seed {seed}]")

    if (threads := math.prod(threadgroup)) > MAX_THREADS:
        fail(f"{threads} threads in a threadgroup, at most {MAX_THREADS} run")
    if len(buffers) > MAX_BUFFERS:
        fail(f"{len(buffers)} buffers, Metal binds at most {MAX_BUFFERS}")
    error, runs = _run_twice(program, buffers, grid, threadgroup, seed, lets_equals_race)
    if error:
        fail(_with_line(program, error))
    outputs = [name for name, data in buffers if isinstance(data, int)]
    # Two schedules must write the same bytes with the same values.
    for name, (a, in_a), (b, in_b) in zip(outputs, *runs, strict=True):
        differs = (in_a != in_b) | (in_a & (a != b) & ~_alike(a, b, (types or {}).get(name)))
        if differs.any():
            fail(
                f"two schedules give different results: {int(differs.sum())} bytes of output `{name}`, the "
                f"first at byte {int(differs.argmax())} of {a.size}. It uses memory that nothing wrote, or "
                "depends on the order of threads, or on denormals, which the second run flushes"
            )
    return [data for data, _ in runs[0]]


def _alike(a: np.ndarray, b: np.ndarray, kind: str | None) -> np.ndarray:
    """Which bytes of two outputs are of numbers that denormals explain: next to nothing, or neighbours."""
    if kind == "float32":
        numbers = [x.view(np.float32) for x in (a, b)]
    elif kind == "bfloat16":
        numbers = [(x.view(np.uint16).astype(np.uint32) << 16).view(np.float32) for x in (a, b)]
    else:
        return np.zeros(a.shape, bool)
    tiny = [np.abs(x) < 2.0**-100 for x in numbers]
    with np.errstate(invalid="ignore"):  # infinities and NaN are alike in nothing but their bytes
        ulp = np.spacing(np.abs(numbers[0])) * (1 if kind == "float32" else 1 << 16)
        # A sum halfway between two floats goes to the side that a denormal is on.
        near = np.abs(numbers[0] - numbers[1]) <= ulp
    return np.repeat((tiny[0] & tiny[1]) | near, a.size // max(1, numbers[0].size))


def _run_twice(
    program: Program,
    buffers: Buffers,
    grid: Sequence[int],
    threadgroup: Sequence[int],
    seed: int,
    lets_equals_race: bool,
) -> tuple[str, list[list[tuple[np.ndarray, np.ndarray]]]]:
    """Both runs in a forked process: the error, or each run's outputs, bytes and which of them were written."""
    size = sum(2 * data for _, data in buffers if isinstance(data, int))
    # Shared with the forked process, which writes its report and the outputs there.
    shared = mmap.mmap(-1, _ERROR_BYTES + 2 * size)
    memory = np.frombuffer(shared, np.uint8)
    launches, runs, offset = (_Launch * 2)(), [], _ERROR_BYTES
    for schedule in range(2):
        table, results = (_Buffer * len(buffers))(), []
        for slot, (name, data) in zip(table, buffers, strict=True):
            slot.name = name.encode()
            if isinstance(data, int):
                slot.size, slot.is_output = data, 1
                ends = offset, offset + data, offset + 2 * data
                slot.data, slot.written = (memory.ctypes.data + end for end in ends[:2])
                results.append((memory[ends[0] : ends[1]], memory[ends[1] : ends[2]].view(bool)))
                offset = ends[2]
            else:
                slot.size, slot.data = len(data), ctypes.cast(data, ctypes.c_void_p)
        launches[schedule] = _Launch(
            *(program.name.encode(), program.entry, table, len(buffers)),
            *(tuple(grid), tuple(threadgroup), seed, schedule, SECONDS, THREADGROUP_BYTES),
            *(*program.code, lets_equals_race),
        )
        runs.append(results)
    failed = toolchain.runtime().emulator_run(
        launches, len(launches), ctypes.c_void_p(memory.ctypes.data), ctypes.c_ulong(_ERROR_BYTES)
    )
    if failed:
        return memory[:_ERROR_BYTES].tobytes().split(b"\0", 1)[0].decode(errors="replace"), []
    return "", runs


@functools.lru_cache(256)
def _line_of(library: Path, offset: int) -> str:
    tool = shutil.which("addr2line") or shutil.which("llvm-addr2line")
    if tool is None:
        return ""
    done = subprocess.run([tool, "-e", str(library), hex(offset)], capture_output=True, text=True)
    place = done.stdout.strip().split(" ")[0]
    return "" if place.startswith("?") or not place else f"({Path(place).name})"


def _with_line(program: Program, message: str) -> str:
    """Replace the address of an access by its line, where a tool that knows lines is installed."""
    found = re.search(r" ?@(0x[0-9a-f]+)", message)
    if not found:
        return message
    address, (begin, end) = int(found[1], 16), program.code
    place = _line_of(program.library, address - begin - 1) if begin <= address < end else ""
    return message.replace(found.group(), f" {place}" if place else "")
