"""The reference's operations, handed to the C++ extension: same names, arguments and results.

A decoded token passes here hundreds of times: nothing is built on the way that the extension can do itself.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from afm_mlx.kernels.cpu import extension
from afm_mlx.kernels.formats import (
    PLAIN,
    HeadOptions,
    KeyValues,
    PackedWeight,
    ProductOptions,
    QueryRope,
)

_extension: Any = extension.module()  # None: `obstacle` in __init__.py keeps callers away


def packed_matmul(x: mx.array, weight: PackedWeight, options: ProductOptions = PLAIN) -> mx.array:
    """See `reference.packed_matmul`."""
    return _extension.packed_matmul(x, weight, options)


def packed_swiglu(
    x: mx.array, gate: PackedWeight, up: PackedWeight, options: ProductOptions = PLAIN
) -> mx.array:
    """See `reference.packed_swiglu`."""
    return _extension.packed_swiglu(x, gate, up, options)


def packed_argmax(
    x: mx.array, weight: PackedWeight, options: ProductOptions = PLAIN
) -> tuple[mx.array, mx.array]:
    """See `reference.packed_argmax`."""
    return _extension.packed_argmax(x, weight, options)


def packed_embedding(tokens: mx.array, weight: PackedWeight, dtype: mx.Dtype) -> mx.array:
    """See `reference.packed_embedding`."""
    if tokens.dtype not in (mx.int32, mx.uint32):
        tokens = tokens.astype(mx.int32)
    return _extension.packed_embedding(tokens, weight, dtype)


def decode_attention(
    queries: mx.array, kv: KeyValues, lengths: mx.array, rope: QueryRope | None = None
) -> mx.array:
    """See `reference.decode_attention`."""
    if rope is None:
        return _extension.decode_attention(queries, *kv, lengths)
    return _extension.decode_attention(queries, *kv, lengths, *rope)


def causal_attention(queries: mx.array, kv: KeyValues) -> mx.array:
    """See `reference.causal_attention`."""
    return _extension.causal_attention(queries, *kv)


def write_tokens(buffer: mx.array, tokens: mx.array, lengths: mx.array) -> mx.array:
    """See `reference.write_tokens`."""
    return _extension.write_tokens(buffer, tokens, lengths)


def rope_norm_quantize(
    qkv: mx.array, offset: int | mx.array, options: HeadOptions
) -> tuple[mx.array, mx.array]:
    """See `reference.rope_norm_quantize`."""
    return _extension.rope_norm_quantize(qkv, offset, options)
