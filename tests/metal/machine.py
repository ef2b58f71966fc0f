"""Launches on buffers of bytes: compiled programs, the processes that they run in, and what these report.

`python -m tests.metal.machine` is the process that launches are forked from. It is small, and so is each fork:
a copy of a test run's own process, with its gigabytes, takes longer than most kernels.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import math
import mmap
import os
import pickle
import random
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import toolchain
from .toolchain import CompileError
from .translation import entry

THREADGROUP_BYTES = 32 * 1024
MAX_THREADS = 1024
MAX_BUFFERS = 31
SECONDS = 120
ROOT = Path(__file__).parents[2]

Buffers = Sequence[tuple[str, bytes | int]]
"""Names of a launch's buffers, in order, each with an input's bytes or an output's size."""

Runs = list[list[tuple[np.ndarray, np.ndarray]]]
"""For each run and output: its bytes, and which of them were written."""


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
        toolchain.runtime()  # compiled here, where an error is seen


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
    launch = _Asked(
        *(str(program.library), program.name, buffers, grid, threadgroup),
        *(seed, lets_equals_race, SECONDS),
    )
    error, runs = _launcher.run(launch)
    if error:
        fail(error)
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


class _Asked(NamedTuple):
    """What the process that launches are forked from is asked for."""

    library: str
    name: str
    buffers: Buffers
    grid: Sequence[int]
    threadgroup: Sequence[int]
    seed: int
    lets_equals_race: bool
    seconds: int  # of each of the two runs, at most
    record: tuple[str, int] | None = None


class _Launcher:
    """The process that launches are forked from, started at the first launch."""

    def __init__(self) -> None:
        self.record: tuple[str, int] | None = None
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, launch: _Asked) -> tuple[str, Runs]:
        with self._lock:
            if self._process is None:
                command = [sys.executable, "-m", "tests.metal.machine"]
                pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
                self._process = subprocess.Popen(command, cwd=ROOT, **pipes)
            process = self._process
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                pickle.dump(launch._replace(record=self.record), process.stdin, -1)
                process.stdin.flush()
                return pickle.load(process.stdout)
            except BaseException:  # half a message may be left in the pipes
                process.kill()
                process.communicate()
                self._process = None
                raise


_launcher = _Launcher()


def record_to(file: Path | None, width: int = 0) -> None:
    """Have launches record the ways that they take in a file: `width` bytes for each branch."""
    _launcher.record = file and (str(file), width)


def _serve() -> None:
    """Run the launches that the parent process asks for, until it closes its pipe or ends."""
    replies, sys.stdout = sys.stdout.buffer, sys.stderr
    recorded = None
    while True:
        try:
            launch: _Asked = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        if launch.record != recorded:
            recorded, address, width = launch.record, None, 0
            if recorded is not None:
                name, width = recorded
                with open(name, "r+b") as file:
                    table = mmap.mmap(file.fileno(), 0)
                address = ctypes.addressof(ctypes.c_char.from_buffer(table))
            record_to = toolchain.runtime().emulator_record_to
            record_to(ctypes.c_void_p(address), ctypes.c_uint(width))
        pickle.dump(_run_twice(launch), replies, -1)
        replies.flush()


@functools.cache
def _load(library: str) -> tuple[ctypes.CDLL, int, tuple[int, int]]:
    """A compiled program: the address of its function, and where its code begins and ends."""
    toolchain.runtime()
    loaded = ctypes.CDLL(library)
    span = (ctypes.c_ulong * 2)()
    loaded.emulator_range(span)
    return loaded, ctypes.cast(loaded.emulator_entry, ctypes.c_void_p).value or 0, tuple(span)


def _run_twice(launch: _Asked) -> tuple[str, Runs]:
    """Both runs in a forked process: the error, or each run's outputs, bytes and which of them were written."""
    buffers = launch.buffers
    _, entry, code = _load(launch.library)
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
            *(launch.name.encode(), entry, table, len(buffers)),
            *(tuple(launch.grid), tuple(launch.threadgroup), launch.seed, schedule),
            *(launch.seconds, THREADGROUP_BYTES, *code, launch.lets_equals_race),
        )
        runs.append(results)
    failed = toolchain.runtime().emulator_run(
        launches, len(launches), ctypes.c_void_p(memory.ctypes.data), ctypes.c_ulong(_ERROR_BYTES)
    )
    if failed:
        error = memory[:_ERROR_BYTES].tobytes().split(b"\0", 1)[0].decode(errors="replace")
        return _with_line(launch, error), []
    return "", runs


@functools.lru_cache(256)
def _line_of(library: str, offset: int) -> str:
    tool = shutil.which("addr2line") or shutil.which("llvm-addr2line")
    if tool is None:
        return ""
    done = subprocess.run([tool, "-e", library, hex(offset)], capture_output=True, text=True)
    place = done.stdout.strip().split(" ")[0]
    return "" if place.startswith("?") or not place else f"({Path(place).name})"


def _with_line(launch: _Asked, message: str) -> str:
    """Replace the address of an access by its line, where a tool that knows lines is installed."""
    found = re.search(r" ?@(0x[0-9a-f]+)", message)
    if not found:
        return message
    address, (begin, end) = int(found[1], 16), _load(launch.library)[2]
    place = _line_of(launch.library, address - begin - 1) if begin <= address < end else ""
    return message.replace(found.group(), f" {place}" if place else "")


if __name__ == "__main__":
    from tests.metal import machine

    machine._serve()
