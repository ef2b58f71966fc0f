"""Metal kernels on a CPU: the very text that MLX would compile, run with every access checked.

A launch takes the arguments of an `mx.fast.metal_kernel` call, builds the function that MLX builds around it,
compiles it with clang (`toolchain.py`) and runs it in a process of its own (`machine.py`, `runtime.cpp`): one
fiber per thread, simdgroups one at a time in random order. It is run twice, with other schedules, other
poison in memory that nobody wrote, and buffers placed against the other guard page; both must agree.

Found, and raised as `EmulatorError` with the place: accesses out of bounds, misaligned, or racing; writes to
inputs; simdgroup functions and barriers that not all threads reach together; more than 32 KB of threadgroup
memory; use of memory that nothing wrote; integer overflow, shifts too far, indices out of an array.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from afm_mlx.kernels.metal import runtime as metal_runtime

from .machine import EmulatorError, Output, Program, run
from .signature import generate
from .toolchain import CompileError
from .translation import translate

__all__ = ["CompileError", "EmulatorError", "Kernel", "emulated", "launch", "raw_bytes"]

# Registers may allow no more threads in a threadgroup on older GPUs.
PROJECT_THREADS = 256


def raw_bytes(array: mx.array) -> bytes:
    """An array's numbers as they lie in memory."""
    flat = mx.reshape(array, (-1,))
    return np.array(flat.view(mx.uint16) if array.dtype == mx.bfloat16 else flat).tobytes()


def _array(data: np.ndarray, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    if dtype == mx.bool_:
        return mx.array(data.astype(bool)).reshape(shape)
    if data.size == 0:
        return mx.zeros(shape, dtype)
    return mx.array(data).view(dtype).reshape(shape)


def _row_contiguous_strides(shape: Sequence[int]) -> list[int]:
    return [int(np.prod(shape[i + 1 :], dtype=np.int64)) for i in range(len(shape))]


class Kernel:
    """`mx.fast.metal_kernel`, run by the emulator: a function of one call's inputs, shapes and grid."""

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        atomic_outputs: bool = False,
        *,
        of_project: bool = False,
    ):
        self.name, self.source, self.header = name, source, header
        self.input_names, self.output_names = tuple(input_names), tuple(output_names)
        self.atomic_outputs = atomic_outputs
        # The project's kernels bring the lines of their files, and keep to its own stricter rules.
        self.of_project = of_project
        self.source_file = f"{name.removeprefix('afm_')}.metal" if of_project else f"{name}.source"
        self._programs: dict[str, Program] = {}

    def text(
        self,
        inputs: Sequence[mx.array],
        output_dtypes: Sequence[mx.Dtype],
        template: Sequence[tuple[str, Any]],
    ) -> tuple[str, str]:
        """Signature and instance of the function for these arguments."""
        _, signature, instance = generate(
            self.name,
            self.source,
            list(zip(self.input_names, inputs, strict=True)),
            list(zip(self.output_names, output_dtypes, strict=True)),
            template,
            self.atomic_outputs,
        )
        return signature, instance

    def program(self, signature: str, instance: str) -> Program:
        key = signature + instance
        if key not in self._programs:
            marker = "" if self.of_project else f'#line 1 "{self.name}.header"\n'
            text = (
                f"#include <mlx_prelude.h>\n{marker}{translate(self.header)}{signature}"
                f'#line 1 "{self.source_file}"\n{translate(self.source)}\n}}\n'
            )
            parameters = signature[signature.index("(\n") + 2 : signature.rindex(") {")]
            self._programs[key] = Program(
                self.name, text, instance, parameters, bfloat_arithmetic=not self.of_project
            )
        return self._programs[key]

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, Any]] | None = None,
        init_value: float | None = None,
        seed: int | None = None,
    ) -> list[mx.array]:
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        signature, instance = self.text(arrays, output_dtypes, template or ())
        buffers: list[tuple[str, bytes] | Output] = []
        for name, x in zip(self.input_names, arrays, strict=True):
            buffers.append((name, raw_bytes(x)))
            if x.ndim > 0:
                if f"{name}_shape" in self.source:
                    buffers.append((f"{name}_shape", np.array(x.shape, np.int32).tobytes()))
                if f"{name}_strides" in self.source:
                    strides = np.array(_row_contiguous_strides(x.shape), np.int64)
                    buffers.append((f"{name}_strides", strides.tobytes()))
                if f"{name}_ndim" in self.source:
                    buffers.append((f"{name}_ndim", np.array(x.ndim, np.int32).tobytes()))
        for name, shape, dtype in zip(self.output_names, output_shapes, output_dtypes, strict=True):
            n = int(np.prod(shape, dtype=np.int64))
            initial = None if init_value is None else raw_bytes(mx.full((n,), init_value, dtype))
            buffers.append(Output(name, n * dtype.size, initial))
        # A threadgroup that is larger than the grid is cut, as MLX does.
        threadgroup = tuple(min(t, g) for t, g in zip(threadgroup, grid, strict=True))
        results = run(
            self.program(signature, instance), buffers, tuple(grid), threadgroup, seed=seed
        )
        return [
            _array(data, tuple(shape), dtype)
            for data, shape, dtype in zip(results, output_shapes, output_dtypes, strict=True)
        ]


@functools.cache
def _project_kernel(kernel: metal_runtime.Kernel) -> Kernel:
    header = "\n".join(
        f'#line 1 "{name}.metal"\n{(metal_runtime.FOLDER / f"{name}.metal").read_text(encoding="utf-8")}'
        for name in kernel.headers
    )
    return Kernel(
        f"afm_{kernel.name}",
        kernel.inputs,
        kernel.outputs,
        kernel.source,
        header,
        of_project=True,
    )


def launch(
    kernel: metal_runtime.Kernel,
    inputs: Sequence[mx.array],
    *,
    template: metal_runtime.Template = (),
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    output_shapes: Sequence[tuple[int, ...]],
    output_dtypes: Sequence[mx.Dtype],
) -> list[mx.array]:
    """`kernels.metal.runtime.launch`, run by the emulator under the project's own limits.

    Raises:
        EmulatorError: for a threadgroup that older GPUs may not run, or one that the grid cuts, as well.
    """
    threads = int(np.prod(threadgroup))
    if threads > PROJECT_THREADS:
        raise EmulatorError(
            f"kernel `{kernel.name}`: {threads} threads in a threadgroup; registers may allow no more than "
            f"{PROJECT_THREADS}"
        )
    if any(g % t for g, t in zip(grid, threadgroup, strict=True)):
        raise EmulatorError(
            f"kernel `{kernel.name}`: grid {grid} isn't a multiple of the threadgroup {threadgroup}"
        )
    return _project_kernel(kernel)(
        inputs=inputs,
        template=template,
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=output_shapes,
        output_dtypes=output_dtypes,
    )


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Run the project's Metal kernels in the emulator instead of on a GPU."""
    original = metal_runtime.launch
    metal_runtime.launch = launch
    mx.disable_compile()  # a launch computes, which a trace may not
    try:
        yield
    finally:
        metal_runtime.launch = original
        mx.enable_compile()
