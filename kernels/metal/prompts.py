"""What a prompt's many vectors need on Metal besides MLX's own products and attention: one dispatch each.

`mx.compile` makes one kernel of the elementwise operations between two products.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import partial

import mlx.core as mx

from afm_mlx.kernels import mlx, reference
from afm_mlx.kernels.dispatch import Variant, other_than_floats
from afm_mlx.kernels.metal import products, runtime
from afm_mlx.kernels.metal.runtime import Kernel, floats
from afm_mlx.kernels.operands import KeyValues, PackedWeight, ProductOptions

BLOCK = 1 << 25  # numbers that are unpacked at a time: 64 MB at 16 bits

_NORM = Kernel("rms_norm", ("x", *products.VECTOR_INPUTS), ("out",), ("common", "vectors"))


def normed(x: mx.array, weight: PackedWeight, options: ProductOptions) -> mx.array:
    """Return `rms_norm(x) * norm` for a product with `weight`; x if there is no norm. One dispatch.

    NaN where the sum of squares overflows. The result has the type of x. On a GPU without bfloat16, where MLX's
    products with it take some 15 % longer than with float16, a grid's vectors are float16: a norm leaves no
    number above `sqrt(K) * max(norm)`, and products with a grid are at most 1.8 times the vector's norm.
    """
    if options.norm is None:
        return x
    rows, dtype = math.prod(x.shape[:-1]), x.dtype
    if dtype == mx.bfloat16 and not runtime.has_bfloat() and mlx.is_grid(weight):
        dtype = mx.float16
    (out,) = runtime.launch(
        _NORM,
        [x.reshape(rows, -1), options.norm, floats(options.eps)],
        template=(("T", dtype), ("NORM", True)),
        grid=(32, rows, 1),
        threadgroup=(32, math.gcd(rows, 8), 1),
        output_shapes=[x.shape],
        output_dtypes=[dtype],
    )
    return out


@functools.cache
def _fused(function: Callable[..., mx.array], dtype: mx.Dtype) -> Callable[..., mx.array]:
    return mx.compile(partial(function, dtype), shapeless=True)


def add_up(dtype: mx.Dtype, product: mlx.Product) -> mx.array:
    """See `mlx.add_up`. One dispatch, or none where nothing is added."""
    if product.scales is None and not product.adapters and product.residual is None:
        return product.numbers.astype(dtype)
    return _fused(mlx.add_up, dtype)(product)


def swiglu(dtype: mx.Dtype, gate: mlx.Product, up: mlx.Product) -> mx.array:
    """See `mlx.swiglu`. One dispatch."""
    return _fused(mlx.swiglu, dtype)(gate, up)


def multiply_unpacked(x: mx.array, weight: PackedWeight) -> mlx.Product:
    """Return `x W^T`; unpack a block of rows of W at a time, in float16 as a grid."""
    scales, factor = None, 1.0
    if x.dtype == mx.float16 and mlx.is_grid(weight):
        unit = mlx.grid_unit(weight.bits, weight.in_dims)
        scales, factor = weight.scales, 1 / unit
        weight = weight._replace(scales=floats(unit).reshape(()))
    rows = max(1, BLOCK // weight.in_dims)
    parts = []
    for start in range(0, weight.out_dims, rows):
        end = min(start + rows, weight.out_dims)
        parts.append(x @ products.unpack(weight, start, end, x.dtype).T)
    numbers = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)
    return mlx.Product(numbers, scales, factor)


def causal_attention(queries: mx.array, kv: KeyValues) -> mx.array:
    """See `reference.causal_attention`. Four dispatches; with floats one, MLX's attention."""
    if kv.key_scale is None or kv.value_scale is None:
        return reference.causal_attention(queries, kv)
    scaled = _fused(times, queries.dtype)
    numbers = KeyValues(kv.buffer.astype(queries.dtype))
    output = reference.causal_attention(scaled(queries, kv.key_scale), numbers)
    # MLX's attention stores a token's heads side by side, as the next product needs them.
    return scaled(output.swapaxes(1, 2), kv.value_scale).swapaxes(1, 2)


def times(dtype: mx.Dtype, x: mx.array, scale: mx.array) -> mx.array:
    return (x * scale).astype(dtype)


VARIANTS: tuple[Variant, ...] = (
    Variant("causal_attention", "metal/causal_attention", causal_attention, other_than_floats),
)
