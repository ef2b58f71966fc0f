"""Times of products by their number of vectors, as counted: what `products.takes_vectors` is set by.

    python -m tests.metal.rows [--shape gateup]    # or qkv, out, down, head: the 3B's

Prints microseconds of the kernel that is chosen on each chip, and of the one that MLX would choose, and what a
pass of each kernel costs in vectors of the vector kernel: `products.Prices`.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from unittest import mock

import mlx.core as mx
import numpy as np

from afm_mlx.kernels import PackedWeight, ProductOptions
from afm_mlx.kernels.metal import products, runtime
from afm_mlx.kernels.metal.products import Product
from bench.apple_gpus import CHIPS, Launch, seconds

from . import mlx_wheel
from .cost import Argument, count, count_launch
from .launches import record

COUNTS = (*range(1, 14), 16, 17, 18, 19, 20, 24, 25, 32)
GROUP = 64  # of MLX's weights: what mlx-lm quantizes to


class On(NamedTuple):
    """A chip, and what is known of it when a program runs: its GPU's generation, and its kind's cores."""

    chip: str
    generation: int
    cores: int


ON = (
    On("m1", 13, 20),
    On("m2-max", 14, 40),
    On("m4", 16, 20),
    On("m4-max", 16, 40),
    On("m5-max", 17, 40),
)


class Shape(NamedTuple):
    """A product of the 3B."""

    out_dims: int
    in_dims: int
    bits: int
    matrices: int = 1
    norm: bool = True


SHAPES = {
    "qkv": Shape(2560, 2048, 2),
    "out": Shape(2048, 2048, 2, norm=False),
    "gateup": Shape(6656, 2048, 2, 2),
    "down": Shape(2048, 6656, 2, norm=False),
    "head": Shape(153600, 2048, 4),
}


@functools.cache
def ours(name: str, rows: int, kernel: str, cores: int) -> list[Launch]:
    """The launch of "vector" or "matrix", on a GPU for whose cores work is split."""
    shape = SHAPES[name]
    n, k = shape.out_dims, shape.in_dims
    codes = mx.zeros((n, k * shape.bits // 32), mx.uint32)
    weight = PackedWeight(codes, shape.bits, "balanced", mx.zeros((n,)))
    norm = mx.zeros((k,), mx.bfloat16) if shape.norm else None
    x = mx.zeros((rows, k), mx.bfloat16)
    product = Product(x, (weight,) * shape.matrices, ProductOptions(norm=norm))
    with mock.patch.object(runtime, "gpu_cores", return_value=cores):
        calls = record(lambda: getattr(products, kernel)(product, mx.bfloat16))
    return [count_launch(*call) for call in calls]


def chosen(name: str, rows: int, on: On) -> list[Launch]:
    with mock.patch.object(runtime, "gpu_generation", return_value=on.generation):
        kernel = "vector" if products.takes_vectors(rows) else "matrix"
    return ours(name, rows, kernel, on.cores)


def microseconds(launches: Sequence[Launch], on: On) -> float:
    return 1e6 * seconds(launches, CHIPS[on.chip]).total


# -- MLX


def of_mlx(name: str, rows: int, on: On) -> list[Launch] | None:
    """MLX's launches, side by side; None for those on an M5's matrix units, whose time nothing here counts.

    `get_qmv_batch_limit` (mlx/backend/metal/quantized.cpp) is 6 for matrices of this size up to M2, then 13.
    """
    shape = SHAPES[name]
    sizes = (shape.bits, rows, shape.out_dims, shape.in_dims)
    if rows < (6 if on.generation < 15 else 13):
        wide = rows > 1 and on.generation >= 15
        return [(_wide if wide else _fast)(*sizes)] * shape.matrices
    return None if on.generation >= 17 else [_tiled(*sizes)] * shape.matrices


@functools.cache
def _fast(bits: int, m: int, n: int, k: int) -> Launch:
    return _count(
        "affine_qmv_fast", f"{bits}, false", bits, (m, n, k), (32 * m, 2 * (n // 8), 1), (32, 2, 1)
    )


@functools.cache
def _wide(bits: int, m: int, n: int, k: int) -> Launch:
    """Up to 5 vectors of a threadgroup, and 8 lanes of each row."""
    groups = -(-m // 5)
    grid = (32 * groups, 2 * (n // 8), 1)
    return _count(
        "affine_qmv_wide", f"{bits}, {-(-m // groups)}, 8, false", bits, (m, n, k), grid, (32, 2, 1)
    )


@functools.cache
def _tiled(bits: int, m: int, n: int, k: int) -> Launch:
    grid = (32 * (n // 32), 2 * -(-m // 32), 2)
    return _count("affine_qmm_t", f"{bits}, true, false", bits, (m, n, k), grid, (32, 2, 2))


def _count(
    function: str, template: str, bits: int, of: tuple, grid: tuple, threadgroup: tuple
) -> Launch:
    m, n, k = of
    quantized = ("utils.h", "steel/gemm/gemm.h", "quantized_utils.h")
    template = f"bfloat16_t, {GROUP}, {template}"
    unit = mlx_wheel.source("quantized.h", function, template, before=quantized)
    sizes = [
        Argument(name, 4, np.array(value, np.int32))
        for name, value in zip("KNM", (k, n, m), strict=True)
    ]
    arguments = [
        Argument("w", n * k * bits // 8),
        *(Argument(name, n * k // GROUP * 2) for name in ("scales", "biases")),
        *(Argument(name, length * 2) for name, length in (("x", m * k), ("y", m * n))),
        *(sizes[:2] if function == "affine_qmv_fast" else sizes),
        *(Argument(name, 8, np.zeros(1, np.int64)) for name in "abcdefgh"),
    ]
    return count(function, unit, arguments, grid, threadgroup, registers_at_most=math.inf)


# -- what follows


def prices(on: On, name: str = "gateup") -> products.Prices:
    """What passes cost in vectors of the vector kernel, without the cost of a launch."""

    def of(rows: int, kernel: str) -> float:
        time = seconds(ours(name, rows, kernel, on.cores), CHIPS[on.chip])
        return time.total - time.launch

    one = (of(6, "vector") - of(3, "vector")) / 3
    return products.Prices(of(6, "vector") / one - 6, of(8, "matrix") / one, of(16, "matrix") / one)


def table(name: str) -> Iterator[str]:
    yield f"| rows | {' | '.join(f'{CHIPS[on.chip].label} (MLX)' for on in ON)} |"
    yield f"| ---: |{' ---: |' * len(ON)}"
    for rows in COUNTS:
        cells = []
        for on in ON:
            other = of_mlx(name, rows, on)
            mlx = "" if other is None else f" ({microseconds(other, on):.0f})"
            cells.append(f"{microseconds(chosen(name, rows, on), on):.0f}{mlx}")
        yield f"| {rows} | {' | '.join(cells)} |"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="gateup")
    name = parser.parse_args(argv).shape
    print("\n".join(table(name)))
    for on in ON:
        print(f"{CHIPS[on.chip].label}: {', '.join(f'{price:.2f}' for price in prices(on, name))}")


if __name__ == "__main__":
    main()
