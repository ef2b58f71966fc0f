"""Metal kernels from `.metal` files: source, signature and launch in one place.

A kernel's file holds the body that `mx.fast.metal_kernel` wraps into a function; what it calls lies in
header files. Launches go through `launch`, so that the emulator of the tests can take its place.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

FOLDER = Path(__file__).parent

Template = tuple[tuple[str, Any], ...]
"""Names and values (int, bool or Dtype) of a kernel's template arguments."""


@dataclass(frozen=True)
class Kernel:
    """A kernel in a `.metal` file of this folder.

    Args:
        name: name of the kernel, and of its file without suffix.
        inputs: names of the input buffers, in the order in which `launch` takes them.
        outputs: names of the output buffers.
        headers: files that the body's functions lie in, without suffix, in order.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    headers: tuple[str, ...] = ("common",)

    @property
    def source(self) -> str:
        return _read(self.name)

    @property
    def header(self) -> str:
        return "\n".join(map(_read, self.headers))


@functools.cache
def _read(name: str) -> str:
    """A file without comments and indentation: MLX goes through all of it at each launch."""
    text = (FOLDER / f"{name}.metal").read_text(encoding="utf-8")
    return "\n".join(line.partition("//")[0].strip() for line in text.splitlines())


@functools.cache
def floats(*values: float) -> mx.array:
    """A float32 array, made once."""
    return mx.array(values, dtype=mx.float32)


@functools.cache
def ints(*values: int) -> mx.array:
    """An int32 array, made once."""
    return mx.array(values, dtype=mx.int32)


@functools.cache
def _compiled(kernel: Kernel) -> Any:
    return mx.fast.metal_kernel(
        name=f"afm_{kernel.name}",
        input_names=list(kernel.inputs),
        output_names=list(kernel.outputs),
        source=kernel.source,
        header=kernel.header,
    )


def launch(
    kernel: Kernel,
    inputs: Sequence[mx.array],
    *,
    template: Template = (),
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    output_shapes: Sequence[tuple[int, ...]],
    output_dtypes: Sequence[mx.Dtype],
) -> list[mx.array]:
    """Run a kernel; `grid` counts threads, and is a multiple of `threadgroup` on every axis."""
    return _compiled(kernel)(
        inputs=list(inputs),
        template=list(template),
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=list(output_shapes),
        output_dtypes=list(output_dtypes),
    )
