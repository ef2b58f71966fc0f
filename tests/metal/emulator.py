"""Metal kernels on a CPU: the very text that MLX would compile, run with every access checked.

A launch takes the arguments of an `mx.fast.metal_kernel` call, has MLX build the function around the kernel's
source, compiles it with clang (`toolchain.py`) and runs it in a process of its own (`machine.py`,
`runtime.cpp`): one fiber per thread, simdgroups one at a time in random order. It is run twice, with other
schedules, other poison in memory that nobody wrote, buffers placed against the other guard page, and denormals
kept or flushed; both must agree.

What Metal leaves open is drawn, from the launch's seed: functions of float are off by as much as its
specification allows, to either side (`functions.h`), and sums over a simdgroup are added in any order.

Found, and raised as `EmulatorError` with the place: accesses out of bounds, misaligned, or racing; writes to
inputs; simdgroup functions and barriers that not all threads reach together; more than 32 KB of threadgroup
memory; use of memory that nothing wrote; integer overflow, shifts too far, indices out of an array.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np

from afm_mlx.kernels import replay
from afm_mlx.kernels.metal import runtime as metal_runtime

from . import branches
from .machine import EmulatorError, Program, Unit, run
from .toolchain import CompileError
from .translation import translate

# Registers may allow no more threads in a threadgroup on older GPUs.
PROJECT_THREADS = 256
LINES = "AFM_METAL_LINES"


def raw_bytes(array: mx.array) -> bytes:
    """An array's numbers in their order in memory."""
    flat = mx.reshape(array, (-1,))
    return np.array(flat.view(mx.uint16) if array.dtype == mx.bfloat16 else flat).tobytes()


def shape_buffers(name: str, array: mx.array) -> dict[str, np.ndarray]:
    """Buffers that MLX passes with an input, by their names."""
    strides = [math.prod(array.shape[i + 1 :]) for i in range(array.ndim)]
    return {
        f"{name}_shape": np.array(array.shape, np.int32),
        f"{name}_strides": np.array(strides, np.int64),
        f"{name}_ndim": np.array(array.ndim, np.int32),
    }


class Kernel:
    """`mx.fast.metal_kernel`, run by the emulator: a function of one call's inputs, shapes and grid.

    With `of_project`, it keeps to the project's own stricter rules, and its header names the files that lines
    are counted in.
    """

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        *,
        of_project: bool = False,
    ):
        self.name, self.of_project = name, of_project
        self.header = header if of_project else f'#line 1 "{name}.header"\n{header}\n'
        self.input_names, self.output_names = tuple(input_names), tuple(output_names)
        names = list(self.input_names), list(self.output_names)
        self._of_mlx = mx.fast.metal_kernel(name, *names, source, self.header)
        self._programs: dict[Any, tuple[Program, tuple[str, ...]]] = {}

    def generated(
        self, inputs: Sequence[mx.array], output_dtypes: Sequence[mx.Dtype], template: Sequence
    ) -> str:
        """The text that MLX would compile for these arguments; it shows while a function is exported."""

        def call(*arrays: mx.array) -> Any:
            return self._of_mlx(
                inputs=list(arrays),
                template=list(template),
                grid=(1, 1, 1),
                threadgroup=(1, 1, 1),
                output_shapes=[(1,)] * len(output_dtypes),
                output_dtypes=list(output_dtypes),
            )

        events: list[dict] = []
        mx.export_function(events.append, call, *inputs)
        return next(e["arguments"][1] for e in events if e.get("name") == "CustomKernel")

    def unit(
        self, inputs: Sequence[mx.array], output_dtypes: Sequence[mx.Dtype], template: Sequence
    ) -> Unit:
        """The translation unit that MLX would compile for these arguments."""
        text = self.generated(inputs, output_dtypes, template)
        signature, end, body = text.removeprefix(self.header).partition(") {\n")
        body, _, instantiated = body.partition("\ntemplate [[host_name(")
        found = re.search(r"decltype\((.*)\) ", instantiated) or re.search(r"void (\w+)", signature)
        assert found is not None
        name = self.name.removeprefix("afm_").partition("__")[0]
        file = f"{name}.{'metal' if self.of_project else 'source'}"
        unit = f"#include <mlx_prelude.h>\n{translate(self.header)}{signature}{end}"
        unit += f'#line 1 "{file}"\n{translate(body)}'
        parameters = signature.partition("(\n")[2]
        names = tuple(re.findall(r"(\w+) \[\[buffer\(", parameters))
        return Unit(unit, found[1], parameters, names)

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, Any]] = (),
        seed: int | None = None,
    ) -> list[mx.array]:
        # MLX's text depends on these: arrays of few elements are in constant memory, and 0-d arrays are values.
        kinds = tuple((x.dtype, x.ndim > 0, x.size < 8) for x in inputs)
        key = (kinds, tuple(output_dtypes), tuple(template))
        if key not in self._programs:
            unit = self.unit(inputs, output_dtypes, template)
            options = {"bfloat_arithmetic": not self.of_project}
            self._programs[key] = Program(self.name, unit, **options), unit.buffers
        program, names = self._programs[key]
        values: dict[str, bytes | int] = {}
        for name, x in zip(self.input_names, inputs, strict=True):
            values[name] = raw_bytes(x)
            values.update({key: part.tobytes() for key, part in shape_buffers(name, x).items()})
        for name, shape, dtype in zip(self.output_names, output_shapes, output_dtypes, strict=True):
            values[name] = math.prod(shape) * dtype.size
        # A threadgroup that is larger than the grid is cut, as MLX does.
        threadgroup = tuple(map(min, threadgroup, grid))
        types = {
            name: str(dtype).removeprefix("mlx.core.")
            for name, dtype in zip(self.output_names, output_dtypes, strict=True)
        }
        buffers = [(n, values[n]) for n in names]
        results = run(program, buffers, grid, threadgroup, types=types, seed=seed)
        return [
            mx.array(data).view(dtype).reshape(shape) if data.size else mx.zeros(shape, dtype)
            for data, shape, dtype in zip(results, output_shapes, output_dtypes, strict=True)
        ]


def probe(
    source: str,
    *inputs: mx.array,
    n: int = 64,
    outputs: int = 1,
    dtype: mx.Dtype = mx.float32,
    size: int | None = None,
    seed: int | None = None,
) -> list[mx.array]:
    """Outputs `x`, `y`, ... of a kernel over `n` threads, of `size` numbers; `a`, `b`, ... are its inputs.

    `i` is the thread, and `lane` its place in the simdgroup.
    """
    prelude = (
        "uint i = thread_position_in_grid.x; uint lane = thread_index_in_simdgroup; (void)lane;\n"
    )
    return Kernel("probe", "abcdefg"[: len(inputs)], "xyz"[:outputs], prelude + source)(
        inputs=inputs,
        grid=(n, 1, 1),
        threadgroup=(n, 1, 1),
        output_shapes=[(n if size is None else size,)] * outputs,
        output_dtypes=[dtype] * outputs,
        seed=seed,
    )


@functools.cache
def project_kernel(kernel: metal_runtime.Kernel, template: metal_runtime.Template) -> Kernel:
    """A form of a project's kernel: the very text that MLX would compile.

    With `AFM_METAL_LINES=1`, names and lines are the files' own, for whoever looks for a fault.
    """
    header, body, buffers = metal_runtime.form(kernel, template)
    if os.environ.get(LINES) or branches.start():
        read = metal_runtime._read
        with mock.patch.object(metal_runtime, "_read", lambda n: branches.source(n, read(n))):
            decided = functools.partial(kernel.decided, template)
            header = "".join(
                f'#line 1 "{name}.metal"\n{decided(name)}\n' for name in kernel.headers
            )
            body = decided(kernel.name)
        buffers = *kernel.inputs, *kernel.outputs
    names = buffers[: len(kernel.inputs)], buffers[len(kernel.inputs) :]
    return Kernel(kernel.function(template), *names, body, header, of_project=True)


def launch(
    kernel: metal_runtime.Kernel, inputs: Sequence[mx.array], **options: Any
) -> list[mx.array]:
    """`kernels.metal.runtime.launch`, run by the emulator under the project's own limits."""
    grid, threadgroup = options["grid"], options["threadgroup"]
    if math.prod(threadgroup) > PROJECT_THREADS:
        raise EmulatorError(
            f"kernel `{kernel.name}`: {math.prod(threadgroup)} threads in a threadgroup; registers may allow "
            f"no more than {PROJECT_THREADS}"
        )
    if any(g % t for g, t in zip(grid, threadgroup, strict=True)):
        raise EmulatorError(
            f"kernel `{kernel.name}`: grid {grid} isn't a multiple of the threadgroup {threadgroup}"
        )
    template = tuple(options.pop("template", ()))
    try:
        return project_kernel(kernel, template)(inputs=inputs, **options)
    except (CompileError, EmulatorError) as error:
        if not os.environ.get(LINES):
            error.add_note(f"{LINES}=1 shows names and lines of the files.")
        raise


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Run the project's Metal kernels in the emulator instead of on a GPU."""
    original = metal_runtime.launch
    metal_runtime.launch = launch
    try:
        # A launch computes, which a trace may not.
        with mock.patch.object(replay, "is_available", return_value=False):
            yield
    finally:
        metal_runtime.launch = original
