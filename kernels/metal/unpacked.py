"""Products of many vectors: the numbers of a packed matrix for MLX's own products.

Only these reach the M5's neural accelerators. They are plain: what goes along with a product is done by MLX.
"""

from __future__ import annotations

import mlx.core as mx

from afm_mlx.kernels.formats import PackedWeight
from afm_mlx.kernels.metal import products
from afm_mlx.kernels.mlx import matmul_by, multiply_quantized, swiglu_by
from afm_mlx.kernels.mlx import silu_product as silu_product_of_mlx

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


silu_product = mx.compile(silu_product_of_mlx, shapeless=True)  # one kernel

matmul = matmul_by(multiply_unpacked)
swiglu = swiglu_by(multiply_unpacked, silu_product)
mlx_matmul = matmul_by(multiply_quantized)
mlx_swiglu = swiglu_by(multiply_quantized, silu_product)
