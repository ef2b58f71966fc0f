"""The reference's operations, handed to the C++ extension: same names, arguments and results.

A decoded token passes here hundreds of times: nothing is built on the way that the extension can do itself.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from afm_mlx.kernels.cpu import extension
from afm_mlx.kernels.formats import KeyValues, LowRank, PackedWeight, QueryRope

_native: Any = extension.module()  # None: `obstacle` in __init__.py keeps callers away


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
    """See `reference.packed_matmul`."""
    return _native.packed_matmul(x, weight, norm, eps, residual, low_rank, activation_bits)


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
    """See `reference.packed_swiglu`."""
    of_gate, of_up = low_rank or (None, None)
    return _native.packed_swiglu(x, gate, up, norm, eps, of_gate, of_up, activation_bits)


def packed_embedding(tokens: mx.array, weight: PackedWeight, dtype: mx.Dtype) -> mx.array:
    """See `reference.packed_embedding`."""
    if tokens.dtype not in (mx.int32, mx.uint32):
        tokens = tokens.astype(mx.int32)
    return _native.packed_embedding(tokens, weight, dtype)


def packed_argmax(
    x: mx.array,
    weight: PackedWeight,
    *,
    norm: mx.array | None = None,
    eps: float = 1e-5,
    activation_bits: int = 16,
) -> tuple[mx.array, mx.array]:
    """See `reference.packed_argmax`."""
    return _native.packed_top_k(x, weight, 1, False, norm, eps, activation_bits)


def packed_top_k(
    x: mx.array,
    weight: PackedWeight,
    k: int,
    *,
    norm: mx.array | None = None,
    eps: float = 1e-5,
    activation_bits: int = 16,
) -> tuple[mx.array, mx.array]:
    """See `reference.packed_top_k`."""
    return _native.packed_top_k(x, weight, k, True, norm, eps, activation_bits)


def decode_attention(
    queries: mx.array, kv: KeyValues, lengths: mx.array, rope: QueryRope | None = None
) -> mx.array:
    """See `reference.decode_attention`."""
    if rope is None:
        return _native.decode_attention(queries, *kv, lengths)
    return _native.decode_attention(queries, *kv, lengths, *rope)


def causal_attention(queries: mx.array, kv: KeyValues) -> mx.array:
    """See `reference.causal_attention`."""
    return _native.causal_attention(queries, *kv)


def write_tokens(buffer: mx.array, tokens: mx.array, lengths: mx.array) -> mx.array:
    """See `reference.write_tokens`."""
    return _native.write_tokens(buffer, tokens, lengths)


def rope_norm_quantize(
    qkv: mx.array,
    q_weight: mx.array,
    k_weight: mx.array,
    offset: int | mx.array,
    scales: tuple[mx.array, mx.array],
    n_kv_heads: int,
    theta: float,
    eps: float,
) -> tuple[mx.array, mx.array]:
    """See `reference.rope_norm_quantize`."""
    return _native.rope_norm_quantize(
        qkv, q_weight, k_weight, offset, *scales, n_kv_heads, theta, eps
    )
