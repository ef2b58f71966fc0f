"""The largest products on Metal: the head of a model, without its logits where it can be."""

from __future__ import annotations

import math

import mlx.core as mx

from afm_mlx.kernels.formats import PackedWeight
from afm_mlx.kernels.metal import products, runtime, unpacked
from afm_mlx.kernels.metal.products import Product
from afm_mlx.kernels.metal.runtime import Kernel

CHUNK = 4096  # numbers that one threadgroup selects from, as in packed_select.metal
MAX_SELECTED = CHUNK // 4  # sorting is faster beyond

_ARGMAX = Kernel(
    "packed_argmax",
    ("x", *products.MATRIX_INPUTS, *products.VECTOR_INPUTS),
    ("values", "indices"),
    (*products.HEADERS, "packed_order"),
)
_SELECT = Kernel(
    "packed_select",
    ("values", "indices", "count"),
    ("top_values", "top_indices"),
    ("common", "packed_order"),
)


def argmax(
    x: mx.array,
    weight: PackedWeight,
    *,
    norm: mx.array | None = None,
    eps: float = 1e-5,
    activation_bits: int = 16,
) -> tuple[mx.array, mx.array]:
    """See `reference.packed_argmax`. Two dispatches: winners of neighbouring rows, and the best."""
    rows = math.prod(x.shape[:-1])
    code_rows = products.rows_per_simdgroup(rows, weight.out_dims)
    tiles = -(-weight.out_dims // (code_rows * CHUNK))  # so that one chunk holds all winners
    per_simdgroup = code_rows * tiles
    groups = -(-weight.out_dims // (per_simdgroup * products.SIMDGROUPS))
    values, indices = runtime.launch(
        _ARGMAX,
        [x, *products.matrix_arrays(weight), *products.vector_arrays(weight, norm, eps)],
        template=(
            *products.format_template(weight),
            ("NORM", norm is not None),
            ("COLUMN_SCALE", weight.column_scale is not None),
            ("ROWS", rows),
            ("CODE_ROWS", code_rows),
            ("TILES", tiles),
        ),
        grid=(32, groups * products.SIMDGROUPS, 1),
        threadgroup=(32, products.SIMDGROUPS, 1),
        output_shapes=[(rows, groups * products.SIMDGROUPS)] * 2,
        output_dtypes=[mx.float32, mx.uint32],
    )
    return _best(values, indices, x.shape[:-1])


def argmax_of_products(
    x: mx.array,
    weight: PackedWeight,
    *,
    norm: mx.array | None = None,
    eps: float = 1e-5,
    activation_bits: int = 16,
) -> tuple[mx.array, mx.array]:
    """See `reference.packed_argmax`: the products are written down, for rows that are too many."""
    return _best(_products(x, weight, norm, eps), None, x.shape[:-1])


def _best(
    values: mx.array, indices: mx.array | None, shape: tuple[int, ...]
) -> tuple[mx.array, mx.array]:
    indices, values = _select(values, indices, 1)
    return indices.reshape(shape), values.reshape(shape)


def top_k(
    x: mx.array,
    weight: PackedWeight,
    k: int,
    *,
    norm: mx.array | None = None,
    eps: float = 1e-5,
    activation_bits: int = 16,
) -> tuple[mx.array, mx.array]:
    """See `reference.packed_top_k`: the products, then the best of ever more candidates at a time.

    Three dispatches for 153,600 rows and k up to 100. The products are written down: 4 bytes for each of
    K * bits / 8 bytes of codes.
    """
    logits = _products(x, weight, norm, eps)
    k = min(k, weight.out_dims)
    if k > MAX_SELECTED:
        indices = mx.argsort(-logits, axis=-1)[..., :k]
        values = mx.take_along_axis(logits, indices, axis=-1)
    else:
        indices, values = _select(logits, None, k)
    shape = (*x.shape[:-1], k)
    return indices.reshape(shape), values.reshape(shape)


def _products(x: mx.array, weight: PackedWeight, norm: mx.array | None, eps: float) -> mx.array:
    """(rows, N) float32."""
    rows = math.prod(x.shape[:-1])
    x = x.reshape(rows, -1)
    if rows > products.MATRIX_ROWS or not products.has_whole_groups(weight):
        return unpacked.matmul(x.astype(mx.float32), weight, norm=norm, eps=eps)
    multiply = products.vector if rows <= products.VECTOR_ROWS else products.matrix
    return multiply(Product(x, (weight,), norm, eps), mx.float32)


def _select(values: mx.array, indices: mx.array | None, count: int) -> tuple[mx.array, mx.array]:
    """The `count` largest of each row, in order: indices uint32 and values, (rows, count).

    `indices` name the values, their places do by default; equal values keep their order.
    """
    rows, length = values.shape
    while True:
        chunks = -(-length // CHUNK)
        values, indices = runtime.launch(
            _SELECT,
            [values, runtime.ints(0) if indices is None else indices, runtime.ints(count)],
            template=(("NAMED", indices is not None),),
            grid=(256 * chunks, rows, 1),
            threadgroup=(256, 1, 1),
            output_shapes=[(rows, chunks * count)] * 2,
            output_dtypes=[mx.float32, mx.uint32],
        )
        length = chunks * count
        if chunks == 1:
            return indices, values
