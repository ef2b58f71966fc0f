"""`packed_matmul` and `packed_swiglu` on Metal, by how many vectors they multiply.

vector      up to 4 rows: a stream over the codes; all fusions in one dispatch
matrix      up to 32 rows: 8x8 matrices, each code unpacked once for all rows; the same fusions
many rows   the matrix is unpacked block by block for `mx.matmul`, or left to `mx.quantized_matmul`
            where MLX knows the format: only MLX's own products reach the M5's neural accelerators
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import mlx.core as mx

from afm_mlx.kernels.dispatch import Case, Variant, other_than_floats
from afm_mlx.kernels.formats import AttentionParts, PackedWeight, ProductOptions
from afm_mlx.kernels.metal import head, products, unpacked
from afm_mlx.kernels.metal.low_rank import is_pair
from afm_mlx.kernels.metal.products import MATRIX_ROWS, VALUES, VECTOR_ROWS, Product
from afm_mlx.kernels.mlx import GROUPS

Fused = Callable[[Product, mx.Dtype], mx.array]


def packed_matmul(
    multiply: Fused, x: mx.array | AttentionParts, weight: PackedWeight, options: ProductOptions
) -> mx.array:
    """See `reference.packed_matmul`: all of it by one kernel."""
    return multiply(Product(x, (weight,), options), x.dtype)


def packed_swiglu(
    multiply: Fused, x: mx.array, gate: PackedWeight, up: PackedWeight, options: ProductOptions
) -> mx.array:
    """See `reference.packed_swiglu`: all of it by one kernel if the two matrices are alike."""
    if _is_pair(gate, up) and is_pair(options.adapters):
        return multiply(Product(x, (gate, up), options), x.dtype)
    g = multiply(Product(x, (gate,), options.of_matrix(0)), mx.float32)
    u = multiply(Product(x, (up,), options.of_matrix(1)), mx.float32)
    return unpacked.silu_product(g, u).astype(x.dtype)


def _is_pair(gate: PackedWeight, up: PackedWeight) -> bool:
    """True if one kernel can take both matrices: it has one set of inputs and one format."""

    def format_of(weight: PackedWeight) -> list[object]:
        arrays = products.matrix_arrays(weight)
        return [products.format_template(weight), *((a.dtype, a.shape) for a in arrays)]

    return format_of(gate) == format_of(up)


# -- which cases they take


def _up_to(rows: int) -> Callable[[Case], str | None]:
    def obstacle(case: Case) -> str | None:
        if case.rows > rows:
            return f"takes up to {rows} rows, not {case.rows}"
        if not products.has_whole_groups(case):
            return f"takes groups of a multiple of {VALUES} inputs, not of {case.group_size}"
        return other_than_floats(case)

    return obstacle


def _mlx_obstacle(case: Case) -> str | None:
    if case.mode != "affine" or case.granularity != "group" or case.group_size not in GROUPS:
        return (
            "takes affine weights in groups of 32, 64 or 128, not "
            f"{case.mode} ones per {case.granularity} of {case.group_size}"
        )
    return other_than_floats(case)


_few, _some = _up_to(VECTOR_ROWS), _up_to(MATRIX_ROWS)

VARIANTS: tuple[Variant, ...] = (
    Variant("packed_matmul", "metal/vector", partial(packed_matmul, products.vector), _few, True),
    Variant("packed_matmul", "metal/matrix", partial(packed_matmul, products.matrix), _some),
    Variant("packed_matmul", "metal/mlx_quantized", unpacked.mlx_matmul, _mlx_obstacle),
    Variant("packed_matmul", "metal/unpacked", unpacked.matmul, other_than_floats),
    Variant("packed_swiglu", "metal/swiglu_vector", partial(packed_swiglu, products.vector), _few),
    Variant("packed_swiglu", "metal/swiglu_matrix", partial(packed_swiglu, products.matrix), _some),
    Variant("packed_swiglu", "metal/swiglu_mlx_quantized", unpacked.mlx_swiglu, _mlx_obstacle),
    Variant("packed_swiglu", "metal/swiglu_unpacked", unpacked.swiglu, other_than_floats),
    Variant("packed_argmax", "metal/argmax", head.argmax, _few),
    Variant(
        "packed_argmax", "metal/argmax_of_products", head.argmax_of_products, other_than_floats
    ),
)
