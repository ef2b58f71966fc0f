"""`packed_matmul`, `packed_swiglu`, `packed_argmax` and `packed_gather` on Metal, by the number of vectors.

vector      1 to 6 rows, and some of 9 to 19: a stream over the codes, once for 6 rows; all in one dispatch
matrix      other numbers up to 32: 8x8 matrices, each code unpacked once for up to 16 rows; the same fusions
many rows   MLX's own products, which use the matrix units of an M5: `mx.quantized_matmul` multiplies with the
            codes, or the matrix is unpacked block by block for `mx.matmul`. A norm before, and everything that
            is added, are a dispatch each

Products with experts are `mx.gather_qmm`, for any number of vectors; rows' scales are two dispatches more.

`mx.quantized_matmul` unpacks codes for every 32 vectors again, in tiles; unpacking the matrix moves 4 bytes per
number, for any number of vectors. So before M5, unpacking is faster for many vectors (`MOST_WITH_CODES`). On
matrix units the product with codes is as fast as the other one: Apple measured 3.97 times the speed of an M4
for prompts at 4 bits, and 3.62 times in bfloat16 (machinelearning.apple.com/research/exploring-llms-mlx-m5).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import partial

import mlx.core as mx

from afm_mlx.kernels import dispatch, mlx
from afm_mlx.kernels.dispatch import Case, Variant, other_than_floats
from afm_mlx.kernels.metal import products, prompts, runtime
from afm_mlx.kernels.metal.products import MAX_ROWS, VALUES, Product
from afm_mlx.kernels.metal.runtime import Kernel, floats
from afm_mlx.kernels.mlx import GROUPS
from afm_mlx.kernels.operands import AttentionPartials, PackedWeight, ProductOptions

Fused = Callable[[Product, mx.Dtype], mx.array]

CHUNK = 4096  # numbers of which one threadgroup selects the largest, as in packed_select.metal

_ARGMAX = Kernel(
    "packed_argmax",
    ("x", *products.MATRIX_INPUTS, *products.VECTOR_INPUTS),
    ("values", "indices"),
    (*products.HEADERS, "packed_products", "packed_order"),
)
# Vectors up to which MLX's product with codes takes less time than unpacking the matrix, by the generation of
# the GPU (15 is M3, 16 is M4). By the counts of both kernels, unpacking is faster from 75 (M1 Max) or 146 (M1)
# vectors on, and from 184 (M4 Max) or 315 (M3); by published speeds, from 64 to 128, and from 384 to 576.
MOST_WITH_CODES = {15: 256, 16: 256}
OTHER_MOST_WITH_CODES = 128
NAX_INPUTS = 64  # MLX's product with codes uses matrix units if this divides the number of inputs

_SELECTED = ("top_values", "top_indices")
_SELECT = Kernel("packed_select", ("values", "indices"), _SELECTED, ("common", "packed_order"))


def packed_matmul(
    multiply: Fused, x: mx.array | AttentionPartials, weight: PackedWeight, options: ProductOptions
) -> mx.array:
    """See `reference.packed_matmul`; `multiply` computes norm, product, adapters and residual in one kernel."""
    return multiply(Product(x, (weight,), options), x.dtype)


def packed_swiglu(
    multiply: Fused, x: mx.array, gate: PackedWeight, up: PackedWeight, options: ProductOptions
) -> mx.array:
    """See `reference.packed_swiglu`; `multiply` needs one kernel if the two matrices have the same format."""
    if _format(gate) == _format(up) and products.have_one_table(options.adapters):
        return multiply(Product(x, (gate, up), options), x.dtype)
    g = multiply(Product(x, (gate,), options.of_matrix(0)), mx.float32)
    u = multiply(Product(x, (up,), options.of_matrix(1)), mx.float32)
    return prompts.swiglu(x.dtype, mlx.Product(g), mlx.Product(u))


def _format(weight: PackedWeight) -> list[object]:
    """Return what two matrices must have in common for one kernel to take both."""
    arrays = products.matrix_arrays(weight)
    return [products.format_template(weight), *((a.dtype, a.shape) for a in arrays)]


# -- the head: the largest product


def argmax(x: mx.array, weight: PackedWeight, options: ProductOptions) -> tuple[mx.array, mx.array]:
    """See `reference.packed_argmax`; x is one vector.

    Two dispatches: largest of neighbouring rows, and the largest of these.
    """
    code_rows = products.CODE_ROWS
    # So many that the first dispatch's results fit one chunk.
    tiles = -(-weight.out_dims // (code_rows * CHUNK))
    groups = -(-weight.out_dims // (code_rows * tiles * products.SIMDGROUPS))
    norm = floats(0.0) if options.norm is None else options.norm  # a placeholder is never read
    values, indices = runtime.launch(
        _ARGMAX,
        [x, *products.matrix_arrays(weight), norm, floats(options.eps)],
        template=(
            *products.format_template(weight),
            ("NORM", options.norm is not None),
            ("ROWS", 1),
            ("CODE_ROWS", code_rows),
            ("TILES", tiles),
        ),
        grid=(32, groups * products.SIMDGROUPS, 1),
        threadgroup=(32, products.SIMDGROUPS, 1),
        output_shapes=[(1, groups * products.SIMDGROUPS)] * 2,
        output_dtypes=[mx.float32, mx.uint32],
    )
    return _largest(values, indices, x.shape[:-1])


def argmax_of_products(
    x: mx.array, weight: PackedWeight, options: ProductOptions
) -> tuple[mx.array, mx.array]:
    """See `reference.packed_argmax`; the products are written to memory, 4 bytes each."""
    shape, rows = x.shape[:-1], math.prod(x.shape[:-1])
    x = x.reshape(rows, -1)
    if rows > MAX_ROWS or not products.has_whole_groups(weight):
        x = x.astype(mx.float32)
        case = Case(dispatch.device(), x.dtype, rows, *weight.format)
        y = dispatch.select("packed_matmul", case).run(x, weight, options)
    else:
        multiply = products.vector if products.takes_vectors(rows) else products.matrix
        y = multiply(Product(x, (weight,), options), mx.float32)
    return _largest(y, None, shape)


@functools.cache
def _positions() -> mx.array:
    """Return what stands for the positions in a row: as fewer numbers, it would be in another address space."""
    return mx.array([0] * 8, dtype=mx.uint32)


def _largest(
    values: mx.array, indices: mx.array | None, shape: tuple[int, ...]
) -> tuple[mx.array, mx.array]:
    """Find the largest value of each row of (rows, n), the first on a tie; return its index, uint32, and the
    value.

    `indices` (rows, n) are the values' own; pass None for their positions in the row. Results have `shape`.
    """
    rows, length = values.shape
    while True:
        chunks = -(-length // CHUNK)
        values, indices = runtime.launch(
            _SELECT,
            [values, _positions() if indices is None else indices],
            grid=(256 * chunks, rows, 1),
            threadgroup=(256, 1, 1),
            output_shapes=[(rows, chunks)] * 2,
            output_dtypes=[mx.float32, mx.uint32],
        )
        if chunks == 1:
            return indices.reshape(shape), values.reshape(shape)
        length = chunks


# -- which cases they run


def _some(case: Case) -> str | None:
    if case.rows > MAX_ROWS:
        return f"takes up to {MAX_ROWS} rows, not {case.rows}"
    if not products.has_whole_groups(case):
        return f"takes groups of a multiple of {VALUES} inputs, not of {case.group_size}"
    return other_than_floats(case)


def _one(case: Case) -> str | None:
    return f"takes one row, not {case.rows}" if case.rows > 1 else _some(case)


def _few(case: Case) -> str | None:
    if case.rows <= MAX_ROWS and not products.takes_vectors(case.rows):
        return f"takes longer for {case.rows} rows than products of matrices"
    return _some(case)


def _mlx_obstacle(case: Case) -> str | None:
    if reason := other_than_floats(case):
        return reason
    has_units, groups = runtime.has_matrix_units(), case.granularity == "group"
    most = MOST_WITH_CODES.get(runtime.gpu_generation(), OTHER_MOST_WITH_CODES)
    if case.rows > most and not has_units:
        return f"takes up to {most} rows on this GPU, not {case.rows}"
    if case.mode == "affine" and groups and case.group_size in GROUPS:
        return None
    if case.mode != "balanced":
        return (
            "takes balanced weights, and affine ones in groups of 32, 64 or 128, not "
            f"{case.mode} ones per {case.granularity} of {case.group_size}"
        )
    if groups and not has_units:
        return "takes balanced weights in groups only on a GPU with matrix units"
    multiple = NAX_INPUTS if has_units and not groups else min(GROUPS)
    if case.group_size % multiple:
        what = "groups" if groups else "rows"
        return f"takes {what} of a multiple of {multiple} inputs, not of {case.group_size}"
    return None


_matmul = partial(mlx.packed_matmul, normed=prompts.normed, finish=prompts.add_up)
_swiglu = partial(mlx.packed_swiglu, normed=prompts.normed, finish=prompts.swiglu)
_unpacked_matmul = partial(_matmul, prompts.multiply_unpacked)
_unpacked_swiglu = partial(_swiglu, prompts.multiply_unpacked)
_mlx_matmul = partial(_matmul, mlx.multiply_quantized)


_gather = partial(mlx.packed_gather, finish=prompts.add_up)


def _mlx_swiglu(
    x: mx.array, gate: PackedWeight, up: PackedWeight, options: ProductOptions
) -> mx.array:
    """See `reference.packed_swiglu`; the rule for a case has seen the format of `gate` alone."""
    is_same = gate.format == up.format
    multiply = mlx.multiply_quantized if is_same else prompts.multiply_unpacked
    return _swiglu(multiply, x, gate, up, options)


VARIANTS: tuple[Variant, ...] = (
    Variant("packed_matmul", "metal/vector", partial(packed_matmul, products.vector), _few, True),
    Variant("packed_matmul", "metal/matrix", partial(packed_matmul, products.matrix), _some),
    Variant("packed_matmul", "metal/mlx_quantized", _mlx_matmul, _mlx_obstacle),
    Variant("packed_matmul", "metal/unpacked", _unpacked_matmul, other_than_floats),
    Variant("packed_swiglu", "metal/swiglu_vector", partial(packed_swiglu, products.vector), _few),
    Variant("packed_swiglu", "metal/swiglu_matrix", partial(packed_swiglu, products.matrix), _some),
    Variant("packed_swiglu", "metal/swiglu_mlx_quantized", _mlx_swiglu, _mlx_obstacle),
    Variant("packed_swiglu", "metal/swiglu_unpacked", _unpacked_swiglu, other_than_floats),
    Variant("packed_gather", "metal/mlx_gather", _gather, mlx.obstacle),
    Variant("packed_argmax", "metal/argmax", argmax, _one),
    Variant("packed_argmax", "metal/argmax_of_products", argmax_of_products, other_than_floats),
)
