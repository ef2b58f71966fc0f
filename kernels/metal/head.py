"""The largest products on Metal: the head of a model, without its logits where it can be."""

from __future__ import annotations

import math

import mlx.core as mx

from afm_mlx.kernels.formats import PackedWeight, ProductOptions
from afm_mlx.kernels.metal import products, runtime, unpacked
from afm_mlx.kernels.metal.products import Product
from afm_mlx.kernels.metal.runtime import Kernel

CHUNK = 4096  # numbers that one threadgroup selects from, as in packed_select.metal

_ARGMAX = Kernel(
    "packed_argmax",
    ("x", *products.MATRIX_INPUTS, *products.VECTOR_INPUTS),
    ("values", "indices"),
    (*products.HEADERS, "packed_order"),
)
_SELECT = Kernel(
    "packed_select",
    ("values", "indices"),
    ("top_values", "top_indices"),
    ("common", "packed_order"),
)


def argmax(x: mx.array, weight: PackedWeight, options: ProductOptions) -> tuple[mx.array, mx.array]:
    """See `reference.packed_argmax`. Two dispatches: winners of neighbouring rows, and the best."""
    rows = math.prod(x.shape[:-1])
    code_rows = products.most_code_rows(rows)
    tiles = -(-weight.out_dims // (code_rows * CHUNK))  # so that one chunk holds all winners
    per_simdgroup = code_rows * tiles
    groups = -(-weight.out_dims // (per_simdgroup * products.SIMDGROUPS))
    values, indices = runtime.launch(
        _ARGMAX,
        [x, *products.matrix_arrays(weight), *products.vector_arrays(options)],
        template=(
            *products.format_template(weight),
            ("NORM", options.norm is not None),
            ("ROWS", rows),
            ("CODE_ROWS", code_rows),
            ("TILES", tiles),
        ),
        grid=(32, groups * products.SIMDGROUPS, 1),
        threadgroup=(32, products.SIMDGROUPS, 1),
        output_shapes=[(rows, groups * products.SIMDGROUPS)] * 2,
        output_dtypes=[mx.float32, mx.uint32],
    )
    return _largest(values, indices, x.shape[:-1])


def argmax_of_products(
    x: mx.array, weight: PackedWeight, options: ProductOptions
) -> tuple[mx.array, mx.array]:
    """See `reference.packed_argmax`: the products are written down, for rows that are too many."""
    return _largest(_products(x, weight, options), None, x.shape[:-1])


def _products(x: mx.array, weight: PackedWeight, options: ProductOptions) -> mx.array:
    """(rows, N) float32."""
    rows = math.prod(x.shape[:-1])
    x = x.reshape(rows, -1)
    if rows > products.MATRIX_ROWS or not products.has_whole_groups(weight):
        return unpacked.matmul(x.astype(mx.float32), weight, options)
    multiply = products.vector if rows <= products.VECTOR_ROWS else products.matrix
    return multiply(Product(x, (weight,), options), mx.float32)


def _largest(
    values: mx.array, indices: mx.array | None, shape: tuple[int, ...]
) -> tuple[mx.array, mx.array]:
    """The largest of each row of values (rows, n), the first on a tie: its index, uint32, and itself.

    Args:
        values: (rows, n) float32.
        indices: (rows, n) uint32 that name the values; None for their places in the row.
        shape: shape of both results.
    """
    rows, length = values.shape
    while True:
        chunks = -(-length // CHUNK)
        values, indices = runtime.launch(
            _SELECT,
            [values, runtime.ints(0) if indices is None else indices],
            template=(("NAMED", indices is not None),),
            grid=(256 * chunks, rows, 1),
            threadgroup=(256, 1, 1),
            output_shapes=[(rows, chunks)] * 2,
            output_dtypes=[mx.float32, mx.uint32],
        )
        if chunks == 1:
            return indices.reshape(shape), values.reshape(shape)
        length = chunks
