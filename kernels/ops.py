"""The operations as callers see them: arguments as in `kernels.reference`, run by the variant chosen."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx

from afm_mlx.kernels.dispatch import Case, device, select
from afm_mlx.kernels.formats import KeyValues, PackedWeight, QueryRope


def packed_matmul(x: mx.array, weight: PackedWeight, **options: Any) -> mx.array:
    """See `reference.packed_matmul`."""
    return select("packed_matmul", _case(x, weight, options)).run(x, weight, **options)


def packed_swiglu(x: mx.array, gate: PackedWeight, up: PackedWeight, **options: Any) -> mx.array:
    """See `reference.packed_swiglu`."""
    return select("packed_swiglu", _case(x, gate, options)).run(x, gate, up, **options)


def packed_embedding(tokens: mx.array, weight: PackedWeight, dtype: mx.Dtype) -> mx.array:
    """See `reference.packed_embedding`."""
    case = _weight_case(dtype, tokens.size, weight)
    return select("packed_embedding", case).run(tokens, weight, dtype)


def packed_argmax(x: mx.array, weight: PackedWeight, **options: Any) -> tuple[mx.array, mx.array]:
    """See `reference.packed_argmax`."""
    return select("packed_argmax", _case(x, weight, options)).run(x, weight, **options)


def packed_top_k(
    x: mx.array, weight: PackedWeight, k: int, **options: Any
) -> tuple[mx.array, mx.array]:
    """See `reference.packed_top_k`."""
    return select("packed_top_k", _case(x, weight, options)).run(x, weight, k, **options)


def decode_attention(
    queries: mx.array, kv: KeyValues, lengths: mx.array, rope: QueryRope | None = None
) -> mx.array:
    """See `reference.decode_attention`."""
    return select("decode_attention", _attention_case(queries, kv)).run(queries, kv, lengths, rope)


def causal_attention(queries: mx.array, kv: KeyValues) -> mx.array:
    """See `reference.causal_attention`."""
    return select("causal_attention", _attention_case(queries, kv)).run(queries, kv)


def write_tokens(buffer: mx.array, tokens: mx.array, lengths: mx.array) -> mx.array:
    """See `reference.write_tokens`."""
    return select("write_tokens", _write_case(buffer, tokens)).run(buffer, tokens, lengths)


def rope_norm_quantize(qkv: mx.array, q_weight: mx.array, *args: Any) -> tuple[mx.array, ...]:
    """See `reference.rope_norm_quantize`."""
    return select("rope_norm_quantize", _rope_case(qkv, q_weight)).run(qkv, q_weight, *args)


def case_of(op: str, *args: Any, **options: Any) -> Case:
    """What the choice of a variant depends on, for a call with these arguments."""
    if op in ("decode_attention", "causal_attention"):
        return _attention_case(*args[:2])
    if op == "write_tokens":
        return _write_case(*args[:2])
    if op == "rope_norm_quantize":
        return _rope_case(*args[:2])
    if op == "packed_embedding":
        tokens, weight, dtype = args
        return _weight_case(dtype, tokens.size, weight)
    return _case(args[0], args[1], options)


def _attention_case(queries: mx.array, kv: KeyValues) -> Case:
    return Case(
        device(),
        queries.dtype,
        rows=queries.shape[0] * queries.shape[2],
        capacity=kv.buffer.shape[2],
        head_dim=queries.shape[-1],
        group=queries.shape[1] // kv.n_kv_heads,
    )


def _write_case(buffer: mx.array, tokens: mx.array) -> Case:
    return Case(
        device(),
        buffer.dtype,
        rows=tokens.shape[0] * tokens.shape[2],
        capacity=buffer.shape[2],
        head_dim=buffer.shape[3],
    )


def _rope_case(qkv: mx.array, q_weight: mx.array) -> Case:
    return Case(device(), qkv.dtype, rows=qkv.shape[0] * qkv.shape[1], head_dim=q_weight.shape[0])


def _case(x: mx.array, weight: PackedWeight, options: dict[str, Any]) -> Case:
    low_rank = options.get("low_rank")
    if type(low_rank) is tuple:  # of gate and up; a LowRank is a subclass
        low_rank = low_rank[0]
    return _weight_case(x.dtype, math.prod(x.shape[:-1]), weight)._replace(
        low_rank=low_rank.rank if low_rank is not None else 0,
        activation_bits=options.get("activation_bits", 16),
    )


def _weight_case(dtype: mx.Dtype, rows: int, weight: PackedWeight) -> Case:
    return Case(
        device(),
        dtype,
        rows,
        weight.in_dims,
        weight.out_dims,
        weight.bits,
        weight.mode,
        weight.granularity,
        weight.group_size,
    )
