"""Products of many vectors: the numbers of a packed matrix for MLX's own products.

Only these reach the M5's neural accelerators. They are plain: what goes along with a product is done by MLX.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import mlx.core as mx

from afm_mlx.kernels.formats import LowRank, PackedWeight
from afm_mlx.kernels.metal import products
from afm_mlx.kernels.reference import low_rank_product

BLOCK = 1 << 25  # numbers that are unpacked at a time: 64 MB at 16 bits

Multiply = Callable[[mx.array, PackedWeight], mx.array]


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


def multiply_by_mlx(x: mx.array, weight: PackedWeight) -> mx.array:
    """`x W^T`, (..., N), of a matrix in MLX's own format."""
    assert weight.scales is not None
    assert weight.biases is not None
    if weight.column_scale is not None:
        x = x * weight.column_scale.astype(x.dtype)
    return mx.quantized_matmul(
        x,
        weight.codes,
        weight.scales.astype(x.dtype),
        weight.biases.astype(x.dtype),
        transpose=True,
        group_size=weight.group_size,
        bits=weight.bits,
    )


def around_matmul(multiply: Multiply) -> Callable[..., mx.array]:
    """`packed_matmul` around a product that does nothing else."""

    def packed_matmul(
        x: mx.array,
        weight: PackedWeight,
        *,
        norm: mx.array | None = None,
        eps: float = 1e-5,
        residual: mx.array | None = None,
        low_rank: LowRank | None = None,
        activation_bits: int = 16,
    ) -> mx.array:
        if norm is not None:
            x = mx.fast.rms_norm(x, norm.astype(x.dtype), eps)
        y = multiply(x, weight)
        if low_rank is not None:
            y = (y + low_rank_product(x, low_rank)).astype(x.dtype)
        return y if residual is None else y + residual.astype(x.dtype)

    return packed_matmul


def around_swiglu(multiply: Multiply) -> Callable[..., mx.array]:
    """`packed_swiglu` around a product that does nothing else."""
    product = around_matmul(multiply)

    def packed_swiglu(
        x: mx.array,
        gate: PackedWeight,
        up: PackedWeight,
        *,
        norm: mx.array | None = None,
        eps: float = 1e-5,
        low_rank: tuple[LowRank, LowRank] | None = None,
        activation_bits: int = 16,
    ) -> mx.array:
        if norm is not None:
            x = mx.fast.rms_norm(x, norm.astype(x.dtype), eps)
        of_gate, of_up = low_rank or (None, None)
        return silu_product(product(x, gate, low_rank=of_gate), product(x, up, low_rank=of_up))

    return packed_swiglu


@functools.partial(mx.compile, shapeless=True)
def silu_product(gate: mx.array, up: mx.array) -> mx.array:
    """`silu(gate) * up`, one kernel."""
    return gate * mx.sigmoid(gate) * up


matmul = around_matmul(multiply_unpacked)
swiglu = around_swiglu(multiply_unpacked)
mlx_matmul = around_matmul(multiply_by_mlx)
mlx_swiglu = around_swiglu(multiply_by_mlx)
