"""Products of many vectors: the numbers of a packed matrix for MLX's own products.

Only these reach the M5's neural accelerators. They are plain: what goes along with a product is done by MLX.
"""

from __future__ import annotations

from functools import partial

import mlx.core as mx

from afm_mlx.kernels import mlx
from afm_mlx.kernels.formats import PackedWeight
from afm_mlx.kernels.metal import products

BLOCK = 1 << 25  # numbers that are unpacked at a time: 64 MB at 16 bits


def multiply_unpacked(x: mx.array, weight: PackedWeight) -> mx.array:
    """`x W^T`, (..., N), a block of rows of W at a time."""
    rows = max(1, BLOCK // weight.in_dims)
    starts = range(0, weight.out_dims, rows)
    ends = [min(start + rows, weight.out_dims) for start in starts]
    blocks = [
        products.unpack(weight, start, end, x.dtype)
        for start, end in zip(starts, ends, strict=True)
    ]
    parts = [x @ block.T for block in blocks]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)


silu_product = mx.compile(mlx.silu_product, shapeless=True)  # one kernel

matmul = partial(mlx.packed_matmul, multiply_unpacked)
swiglu = partial(mlx.packed_swiglu, multiply_unpacked, combine=silu_product)
mlx_matmul = partial(mlx.packed_matmul, mlx.multiply_quantized)
mlx_swiglu = partial(mlx.packed_swiglu, mlx.multiply_quantized, combine=silu_product)
