"""Products with packed matrices by MLX's own operations, for cases that no kernel of ours runs.

    quantized      `mx.quantized_matmul` multiplies with the codes
    dequantized    the matrix is dequantized, block by block, for a dense product

MLX's format has a scale and a bias for every 32, 64 or 128 inputs. A balanced matrix with one scale, or one for
each row, is multiplied as a grid that is the same for all matrices of its shape: a power of two times the codes
minus their offset. 16-bit floats hold these numbers exactly, and the matrix's own scales multiply the product,
in float32. Scales of larger groups are repeated, and groups of a balanced matrix get the biases of the equal
affine matrix. Each call computes both; they have at most 1/32 of the matrix's elements.

Nothing here is compiled (`mx.compile`): on a CPU that would start a C++ compiler, see `replay.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from afm_mlx.kernels import dispatch
from afm_mlx.kernels.dispatch import Case, Variant, other_than_floats
from afm_mlx.kernels.operands import LowRank, PackedWeight, ProductOptions, take_rows
from afm_mlx.kernels.reference import low_rank_factors, rms_norm

GROUPS = (128, 64, 32)  # group sizes of MLX, the cheapest first
# On a CPU, MLX multiplies with codes on one thread and without vectors, 0.7 to 1.3 ns per weight and row;
# dequantizing takes 3 to 10 ns, once. It pays from 4 (256 inputs) to 9 rows (2,048) if dense products run on
# OpenBLAS, and from 12 to 28 rows if they run on the BLAS of MLX's own wheel.
CPU_ROWS = 8
BLOCK = 1 << 21  # numbers dequantized at a time: 8 MB in float32, 24 MB during the computation


class Product(NamedTuple):
    """A product with a packed matrix, and what `add_up` adds to it.

    Args:
        numbers: (..., N), of any floating type; the product is `numbers * scales * factor`.
        scales: () or (N,) float; None for 1.
        factor: a power of two.
        adapters: of each adapter, its product (B, ..., N) without its scale, its scale (1,), and the batch rows
            that use it, (B, 1, ...) bool.
        residual: (..., N); None for none.
    """

    numbers: mx.array
    scales: mx.array | None = None
    factor: float = 1.0
    adapters: tuple[tuple[mx.array, mx.array, mx.array], ...] = ()
    residual: mx.array | None = None


Multiply = Callable[[mx.array, PackedWeight], Product]


def add_up(dtype: mx.Dtype, product: Product) -> mx.array:
    """Return the product with everything that is added to it, summed in float32."""
    numbers, scales, factor, adapters, residual = product
    y = numbers if scales is None else numbers * (scales.astype(mx.float32) * factor)
    for added, scale, uses in adapters:
        y = y + mx.where(uses, added * scale, 0.0)
    if residual is not None:
        y = y + residual
    return y.astype(dtype)


def swiglu(dtype: mx.Dtype, gate: Product, up: Product) -> mx.array:
    """Return `silu(gate) * up`, computed in float32."""
    g, u = add_up(mx.float32, gate), add_up(mx.float32, up)
    return (g * mx.sigmoid(g) * u).astype(dtype)


def multiply_quantized(x: mx.array, weight: PackedWeight) -> Product:
    """Return `x W^T`; MLX's quantized product multiplies with the codes."""
    if is_grid(weight):
        unit = grid_unit(weight.bits, weight.in_dims)
        scales, biases, size = _grid(weight.out_dims, weight.in_dims, weight.bits, x.dtype)
        rest = (weight.scales, 1 / unit)
    else:
        scales, biases, size = _affine(weight, x.dtype)
        rest = (None, 1.0)
    numbers = mx.quantized_matmul(
        x, weight.codes, scales, biases, transpose=True, group_size=size, bits=weight.bits
    )
    return Product(numbers, *rest)


def is_grid(weight: PackedWeight) -> bool:
    """True if a matrix is a grid that its scales multiply row by row."""
    return weight.mode == "balanced" and weight.granularity != "group"


def grid_unit(bits: int, in_dims: int) -> float:
    """Return the power of two with which a random grid's products have at most the vectors' size.

    So products fit into float16: they are at most 1.8 times as large as the vector's norm.
    """
    # Uniform codes have variance (4**bits - 1) / 12.
    return 2.0 ** -math.ceil(math.log2((4**bits - 1) / 12 * in_dims) / 2)


# Up to 0.9 MB for each shape of a 3B's blocks, and 20 MB for its head.
@functools.lru_cache(maxsize=16)
def _grid(
    out_dims: int, in_dims: int, bits: int, dtype: mx.Dtype
) -> tuple[mx.array, mx.array, int]:
    """Return scales and biases of a grid, (N, K / group_size), and the group size, in MLX's format."""
    size, unit = _mlx_group(in_dims), grid_unit(bits, in_dims)
    assert size is not None
    # MLX would copy an array whose numbers are not all in memory.
    arrays = [
        mx.full((out_dims, in_dims // size), n * unit, dtype) for n in (1, -(2**bits - 1) / 2)
    ]
    mx.eval(arrays)
    return *arrays, size


def multiply_dequantized(x: mx.array, weight: PackedWeight) -> Product:
    """Return `x W^T` by dense products with dequantized rows of W, a block of rows at a time."""
    rows = max(1, BLOCK // weight.in_dims)
    parts: list[mx.array] = []
    for start in range(0, weight.out_dims, rows):
        block = take_rows(weight, slice(start, start + rows))
        if parts:  # otherwise MLX allocates many blocks in advance, which is also slower
            (codes,) = mx.depends([block.codes], [parts[-1]])
            block = block._replace(codes=codes)
        parts.append(x @ _dequantize(block, x.dtype).T)
    return Product(parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1))


def _dequantize(weight: PackedWeight, dtype: mx.Dtype) -> mx.array:
    scales, biases, group_size = _affine(weight, dtype)
    return mx.dequantize(weight.codes, scales, biases, group_size, weight.bits)


def _affine(weight: PackedWeight, dtype: mx.Dtype) -> tuple[mx.array, mx.array, int]:
    """Return scales and biases, (N, K / group_size), and the group size, in MLX's format."""
    assert weight.scales is not None
    scales, biases = weight.scales.astype(dtype).astype(mx.float32), weight.biases
    if (
        biases is None
    ):  # of the rounded scale: two roundings of their own would move all weights of a group
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


def in_mlx_format(weight: PackedWeight, dtype: mx.Dtype) -> PackedWeight:
    """Return a balanced or affine matrix with the scales and biases of MLX's own format, in `dtype`."""
    scales, biases, _ = _affine(weight, dtype)
    return weight._replace(
        mode="affine", scales=mx.contiguous(scales), biases=mx.contiguous(biases)
    )


def _mlx_group(group_size: int) -> int | None:
    return next((size for size in GROUPS if group_size % size == 0), None)


# -- the operations, by a function that multiplies


def packed_matmul(
    multiply: Multiply,
    x: mx.array,
    weight: PackedWeight,
    options: ProductOptions,
    *,
    normed: Callable[[mx.array, PackedWeight, ProductOptions], mx.array] | None = None,
    finish: Callable[[mx.Dtype, Product], mx.array] = add_up,
) -> mx.array:
    """See `reference.packed_matmul`; `multiply` computes the product with the matrix.

    `normed` computes the norm, and `finish` the sum; by default, MLX's operations do.
    """
    vectors = normed(x, weight, options) if normed else _normed(x, options)
    product = _product(multiply, vectors, weight, options)
    return finish(x.dtype, product._replace(residual=options.residual))


def packed_swiglu(
    multiply: Multiply,
    x: mx.array,
    gate: PackedWeight,
    up: PackedWeight,
    options: ProductOptions,
    *,
    normed: Callable[[mx.array, PackedWeight, ProductOptions], mx.array] | None = None,
    finish: Callable[[mx.Dtype, Product, Product], mx.array] = swiglu,
) -> mx.array:
    """See `reference.packed_swiglu`, and `packed_matmul` for the functions."""
    vectors = normed(x, gate, options) if normed else _normed(x, options)
    g = _product(multiply, vectors, gate, options.of_matrix(0))
    u = _product(multiply, vectors, up, options.of_matrix(1))
    return finish(x.dtype, g, u)


def packed_argmax(
    multiply: Multiply, x: mx.array, weight: PackedWeight, options: ProductOptions
) -> tuple[mx.array, mx.array]:
    """See `reference.packed_argmax`; `multiply` computes the product with the matrix."""
    products = add_up(mx.float32, multiply(_normed(x.astype(mx.float32), options), weight))
    return mx.argmax(products, axis=-1), mx.max(products, axis=-1)


def packed_embedding(tokens: mx.array, weight: PackedWeight, dtype: mx.Dtype) -> mx.array:
    """See `reference.packed_embedding`."""
    values = _dequantize(take_rows(weight, tokens.reshape(-1)), mx.float32)
    return values.astype(dtype).reshape(*tokens.shape, weight.in_dims)


def packed_gather(
    x: mx.array,
    weight: PackedWeight,
    indices: mx.array,
    experts: int,
    ascending: bool = False,
    activation_bits: int = 16,
    *,
    finish: Callable[[mx.Dtype, Product], mx.array] = add_up,
) -> mx.array:
    """See `reference.packed_gather`; as `multiply_quantized`, with the matrices that `indices` choose.

    A grid is one for all experts, whose scales and biases MLX reads with strides of 0 between experts. `finish`
    computes the product with the matrices' own scales; by default, MLX's operations do.
    """
    dtype, each = x.dtype, indices.size // max(1, x.shape[0])
    x = x.astype(mx.float32) if dispatch.device() == "cpu" else x
    out_dims = weight.out_dims // experts
    of_rows, factor = None, 1.0
    if is_grid(weight):
        assert weight.scales is not None
        factor = 1 / grid_unit(weight.bits, weight.in_dims)
        scales, biases, size = _grid(out_dims, weight.in_dims, weight.bits, x.dtype)
        of_rows = weight.scales
        if of_rows.ndim:
            of_rows = of_rows.reshape(experts, -1)[indices]
        scales, biases = (mx.broadcast_to(a, (experts, *a.shape)) for a in (scales, biases))
    else:
        scales, biases, size = _affine(weight, x.dtype)
        scales, biases = (a.reshape(experts, out_dims, -1) for a in (scales, biases))
    pairs = (x.shape[0], each) if each != 1 else (x.shape[0],)
    numbers = mx.gather_qmm(
        x.reshape(x.shape[0], *[1] * len(pairs), weight.in_dims),
        weight.codes.reshape(experts, out_dims, -1),
        scales,
        biases,
        rhs_indices=indices.reshape(pairs),
        transpose=True,
        group_size=size,
        bits=weight.bits,
        sorted_indices=ascending,
    )
    return finish(dtype, Product(numbers.reshape(indices.size, out_dims), of_rows, factor))


def _normed(x: mx.array, options: ProductOptions) -> mx.array:
    # On a CPU, MLX sums in its operands' type, and half types are slow.
    x = x.astype(mx.float32) if dispatch.device() == "cpu" else x
    norm = options.norm
    return x if norm is None else rms_norm(x, norm.astype(x.dtype), options.eps)


def _product(
    multiply: Multiply, x: mx.array, weight: PackedWeight, options: ProductOptions
) -> Product:
    adapters = tuple(each for low_rank in options.adapters for each in _low_rank(x, low_rank))
    return multiply(x, weight)._replace(adapters=adapters)


def _low_rank(x: mx.array, low_rank: LowRank) -> Iterator[tuple[mx.array, mx.array, mx.array]]:
    """Yield what `Product.adapters` lists, in the type of x: `x A^T B^T` of all rows, for each adapter."""
    for slot, part in enumerate(low_rank.parts):
        if part.rank:
            a, b = low_rank_factors(low_rank, slot, x.shape[-1], x.dtype)
            if len(low_rank.sections) > 1:  # each section has its own columns of `x A^T`
                b = mx.where(_sections(low_rank.sections)[:, :, None], b[:, None], 0)
                b = b.reshape(b.shape[0], -1)
            uses = (low_rank.slots == slot).reshape(-1, *[1] * (x.ndim - 1))
            yield x @ a.T @ b.T, low_rank.scales[slot : slot + 1], uses


@functools.lru_cache(maxsize=64)
def _sections(ends: tuple[int, ...]) -> mx.array:
    """Return which section each row belongs to: (N, sections) bool."""
    row = np.arange(ends[-1])[:, None]
    return mx.array((row < ends) & (row >= (0, *ends[:-1])))


# -- which cases they run


def obstacle(case: Case) -> str | None:
    """Return why MLX has no product with a case's format; None if it has."""
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
    return obstacle(case)


def _by_both(op: str, run: Callable[..., Any], suffix: str = "") -> tuple[Variant, ...]:
    """Return an operation's two variants: `run` by products with codes, and with dequantized numbers."""
    return (
        Variant(op, f"mlx/quantized{suffix}", partial(run, multiply_quantized), _few_rows),
        Variant(op, f"mlx/dequantized{suffix}", partial(run, multiply_dequantized), obstacle),
    )


VARIANTS: tuple[Variant, ...] = (
    *_by_both("packed_matmul", packed_matmul),
    *_by_both("packed_swiglu", packed_swiglu, "_swiglu"),
    *_by_both("packed_argmax", packed_argmax, "_argmax"),
    Variant("packed_embedding", "mlx/dequantized_embedding", packed_embedding, obstacle),
    Variant("packed_gather", "mlx/quantized_gather", packed_gather, obstacle),
)
