"""Products with packed matrices by MLX's own operations, for cases that no kernel of ours runs.

    quantized      `mx.quantized_matmul` multiplies with the codes
    dequantized    the matrix is dequantized, block by block, for a dense product

MLX's format has a scale and a bias for every 32, 64 or 128 inputs. Scales of larger groups are repeated, and a
balanced matrix gets the biases of the equal affine matrix. Each call computes both; they have at most 1/32 of
the matrix's elements.

Nothing here is compiled (`mx.compile`): on a CPU that would start a C++ compiler, see `replay.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx

from afm_mlx.kernels import dispatch
from afm_mlx.kernels.dispatch import Case, Variant, other_than_floats
from afm_mlx.kernels.operands import PackedWeight, ProductOptions, take_rows
from afm_mlx.kernels.reference import low_rank_product, rms_norm

GROUPS = (128, 64, 32)  # group sizes of MLX, the cheapest first
# On a CPU, MLX multiplies with codes on one thread and without vectors, 0.7 to 1.3 ns per weight and row;
# dequantizing takes 3 to 10 ns, once. It pays from 4 (256 inputs) to 9 rows (2,048) if dense products run on
# OpenBLAS, and from 12 to 28 rows if they run on the BLAS of MLX's own wheel.
CPU_ROWS = 8
BLOCK = 1 << 21  # numbers dequantized at a time: 8 MB in float32, 24 MB during the computation

Multiply = Callable[[mx.array, PackedWeight], mx.array]


def multiply_quantized(x: mx.array, weight: PackedWeight) -> mx.array:
    """Return `x W^T`; MLX's quantized product multiplies with the codes."""
    scales, biases, group_size = _affine(weight, x.dtype)
    return mx.quantized_matmul(
        x, weight.codes, scales, biases, transpose=True, group_size=group_size, bits=weight.bits
    )


def multiply_dequantized(x: mx.array, weight: PackedWeight) -> mx.array:
    """Return `x W^T` by dense products with dequantized rows of W, a block of rows at a time."""
    rows = max(1, BLOCK // weight.in_dims)
    parts: list[mx.array] = []
    for start in range(0, weight.out_dims, rows):
        block = take_rows(weight, slice(start, start + rows))
        if parts:  # otherwise MLX allocates many blocks in advance, which is also slower
            (codes,) = mx.depends([block.codes], [parts[-1]])
            block = block._replace(codes=codes)
        parts.append(x @ _dequantize(block, x.dtype).T)
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)


def _dequantize(weight: PackedWeight, dtype: mx.Dtype) -> mx.array:
    scales, biases, group_size = _affine(weight, dtype)
    return mx.dequantize(weight.codes, scales, biases, group_size, weight.bits)


def _affine(weight: PackedWeight, dtype: mx.Dtype) -> tuple[mx.array, mx.array, int]:
    """Return scales and biases, (N, K / group_size), and the group size, in MLX's format."""
    assert weight.scales is not None
    scales, biases = weight.scales.astype(mx.float32), weight.biases
    if biases is None:
        biases = scales * (-(2**weight.bits - 1) / 2)
    size = _mlx_group(weight.group_size)
    assert size is not None

    def spread(array: mx.array) -> mx.array:
        if array.ndim == 2:
            repeats = weight.group_size // size
            return array if repeats == 1 else mx.repeat(array, repeats, axis=1)
        shape = (weight.out_dims, weight.in_dims // size)
        return mx.broadcast_to(array[:, None] if array.ndim else array, shape)

    return spread(scales).astype(dtype), spread(biases).astype(dtype), size


def _mlx_group(group_size: int) -> int | None:
    return next((size for size in GROUPS if group_size % size == 0), None)


# -- the operations, by a function that multiplies


def packed_matmul(
    multiply: Multiply, x: mx.array, weight: PackedWeight, options: ProductOptions
) -> mx.array:
    """See `reference.packed_matmul`; `multiply` computes the product with the matrix."""
    y = _product(multiply, _normed(x, options), weight, options)
    return (y if options.residual is None else y + options.residual).astype(x.dtype)


def silu_product(gate: mx.array, up: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * up


def packed_swiglu(
    multiply: Multiply,
    x: mx.array,
    gate: PackedWeight,
    up: PackedWeight,
    options: ProductOptions,
    *,
    combine: Callable[[mx.array, mx.array], mx.array] = silu_product,
) -> mx.array:
    """See `reference.packed_swiglu`; `multiply` computes each product, `combine` silu(gate) * up."""
    normed = _normed(x, options)
    g = _product(multiply, normed, gate, options.of_matrix(0))
    u = _product(multiply, normed, up, options.of_matrix(1))
    return combine(g, u).astype(x.dtype)


def packed_argmax(
    multiply: Multiply, x: mx.array, weight: PackedWeight, options: ProductOptions
) -> tuple[mx.array, mx.array]:
    """See `reference.packed_argmax`; `multiply` computes the product with the matrix."""
    products = multiply(_normed(x.astype(mx.float32), options), weight)
    return mx.argmax(products, axis=-1), mx.max(products, axis=-1)


def packed_embedding(tokens: mx.array, weight: PackedWeight, dtype: mx.Dtype) -> mx.array:
    """See `reference.packed_embedding`."""
    values = _dequantize(take_rows(weight, tokens.reshape(-1)), mx.float32)
    return values.astype(dtype).reshape(*tokens.shape, weight.in_dims)


def _normed(x: mx.array, options: ProductOptions) -> mx.array:
    # On a CPU, MLX sums in its operands' type, and half types are slow.
    x = x.astype(mx.float32) if dispatch.device() == "cpu" else x
    norm = options.norm
    return x if norm is None else rms_norm(x, norm.astype(x.dtype), options.eps)


def _product(
    multiply: Multiply, x: mx.array, weight: PackedWeight, options: ProductOptions
) -> mx.array:
    y = multiply(x, weight)
    for low_rank in options.adapters:
        y = y + low_rank_product(x, low_rank)
    return y


# -- which cases they run


def _obstacle(case: Case) -> str | None:
    if reason := other_than_floats(case):
        return reason
    if case.mode not in ("affine", "balanced"):
        return f"MLX knows no {case.mode}"
    if _mlx_group(case.group_size) is None:
        return f"MLX takes groups of a multiple of 32 inputs, not of {case.group_size}"
    return None


def _few_rows(case: Case) -> str | None:
    if case.device == "cpu" and case.rows > CPU_ROWS:
        return f"takes up to {CPU_ROWS} rows on a CPU, not {case.rows}"
    return _obstacle(case)


def _by_both(op: str, run: Callable[..., Any], suffix: str = "") -> tuple[Variant, ...]:
    """Return an operation's two variants: `run` by products with codes, and with dequantized numbers."""
    return (
        Variant(op, f"mlx/quantized{suffix}", partial(run, multiply_quantized), _few_rows),
        Variant(op, f"mlx/dequantized{suffix}", partial(run, multiply_dequantized), _obstacle),
    )


VARIANTS: tuple[Variant, ...] = (
    *_by_both("packed_matmul", packed_matmul),
    *_by_both("packed_swiglu", packed_swiglu, "_swiglu"),
    *_by_both("packed_argmax", packed_argmax, "_argmax"),
    Variant("packed_embedding", "mlx/dequantized_embedding", packed_embedding, _obstacle),
)
