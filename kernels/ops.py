"""The operations that callers use: arguments as in `kernels.reference`, run by the chosen variant."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from afm_mlx.kernels.dispatch import Case, device, select
from afm_mlx.kernels.operands import (
    PLAIN,
    AttentionPartials,
    HeadOptions,
    KeyValues,
    NewToken,
    PackedWeight,
    ProductOptions,
    QueryRope,
)
from afm_mlx.kernels.reference import attention, merge_partials


def packed_matmul(
    x: mx.array | AttentionPartials, weight: PackedWeight, options: ProductOptions = PLAIN
) -> mx.array:
    """See `reference.packed_matmul`; x can be attention's partials."""
    variant = select("packed_matmul", _product_case(x, weight))
    if isinstance(x, AttentionPartials) and not variant.merges_partials:
        x = merge_partials(x)
    return variant.run(x, weight, options)


def packed_matmul_each(
    x: mx.array, weights: Sequence[PackedWeight], options: ProductOptions = PLAIN
) -> list[mx.array]:
    """Return `packed_matmul` for each of several matrices, whose adapters are `options.adapters`.

    The matrices have the same inputs, bits, format and number of groups, and any numbers of outputs.
    """
    _refuse("packed_matmul_each", residual=options.residual)
    variant = select("packed_matmul", _product_case(x, weights[0]))
    if variant.run_each is not None:
        return variant.run_each(x, weights, options)
    return [variant.run(x, weight, options.of_matrix(i)) for i, weight in enumerate(weights)]


def packed_swiglu(
    x: mx.array, gate: PackedWeight, up: PackedWeight, options: ProductOptions = PLAIN
) -> mx.array:
    """See `reference.packed_swiglu`."""
    _refuse("packed_swiglu", residual=options.residual)
    return _run("packed_swiglu", x, gate, up, options)


def packed_argmax(
    x: mx.array, weight: PackedWeight, options: ProductOptions = PLAIN
) -> tuple[mx.array, mx.array]:
    """See `reference.packed_argmax`."""
    _refuse("packed_argmax", residual=options.residual, adapters=options.adapters or None)
    return _run("packed_argmax", x, weight, options)


def packed_embedding(tokens: mx.array, weight: PackedWeight, dtype: mx.Dtype) -> mx.array:
    """See `reference.packed_embedding`."""
    return _run("packed_embedding", tokens, weight, dtype)


def packed_gather(
    x: mx.array,
    weight: PackedWeight,
    indices: mx.array,
    experts: int,
    ascending: bool = False,
    activation_bits: int = 16,
) -> mx.array:
    """See `reference.packed_gather`."""
    return _run("packed_gather", x, weight, indices, experts, ascending, activation_bits)


def decode_attention(
    queries: mx.array,
    kv: KeyValues,
    lengths: mx.array,
    rope: QueryRope | None = None,
    merge: bool = True,
) -> mx.array | AttentionPartials:
    """See `reference.decode_attention`."""
    return _run("decode_attention", queries, kv, lengths, rope, merge)


def write_and_attend(
    qkv: mx.array, kv: KeyValues, lengths: mx.array, options: HeadOptions, merge: bool = True
) -> tuple[mx.array | AttentionPartials, mx.array]:
    """See `reference.write_and_attend`."""
    return _run("write_and_attend", qkv, kv, lengths, options, merge)


def reads_tails(dtype: mx.Dtype, head_dim: int, op: str = "decode_attention") -> bool:
    """True if a kernel attends to a float KV cache and its tail (the newest tokens) without joining them.

    `dtype` is the type of queries, keys and values; `op` may be "norm_rope_attend", too.
    """
    case = Case(device(), dtype, 1, head_dim=head_dim, stored=dtype)
    return select(op, case).backend != "reference"


def causal_attention(queries: mx.array, kv: KeyValues) -> mx.array:
    """See `reference.causal_attention`."""
    return _run("causal_attention", queries, kv)


def full_attention(queries: mx.array, kv: KeyValues) -> mx.array:
    """Return `reference.attention` without a mask: each query sees all tokens, whatever their number.

    On a CPU, `causal_attention` computes it: a query that is its row's only one sees all tokens, so a head with
    L queries counts as L heads with one.
    """
    batch, heads, length, dim = queries.shape
    alone = queries.reshape(batch, heads * length, 1, dim)
    if select("causal_attention", case_of("causal_attention", alone, kv)).backend != "cpu":
        return attention(queries, kv, None)
    return causal_attention(alone, kv).reshape(queries.shape)


def gelu(x: mx.array) -> mx.array:
    """See `reference.gelu`."""
    return _run("gelu", x)


def write_tokens(buffer: mx.array, tokens: mx.array, lengths: mx.array) -> mx.array:
    """See `reference.write_tokens`."""
    return _run("write_tokens", buffer, tokens, lengths)


def rope_norm_quantize(
    qkv: mx.array, offset: int | mx.array, options: HeadOptions
) -> tuple[mx.array, mx.array]:
    """See `reference.rope_norm_quantize`."""
    return _run("rope_norm_quantize", qkv, offset, options)


def case_of(op: str, *args: Any) -> Case:
    """Return what a variant's choice depends on, for operation `op` with these arguments."""
    return _CASES[op](*args)


def _run(op: str, *args: Any) -> Any:
    return select(op, _CASES[op](*args)).run(*args)


def _refuse(op: str, **given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{op} takes no {name}; packed_matmul does.")


def _product_case(x: mx.array | AttentionPartials, weight: PackedWeight, *_: object) -> Case:
    return _weight_case(x.dtype, math.prod(x.shape[:-1]), weight)


def _weight_case(dtype: mx.Dtype, rows: int, weight: PackedWeight) -> Case:
    return Case(device(), dtype, rows, *weight.format)


def norm_rope(
    heads: mx.array,
    periods: mx.array,
    offset: int | mx.array,
    weight: mx.array | None = None,
    eps: float = 0.0,
) -> mx.array:
    """See `reference.norm_rope`."""
    return _run("norm_rope", heads, periods, offset, weight, eps)


def norm_rope_attend(
    token: NewToken, kv: KeyValues, lengths: mx.array
) -> tuple[mx.array, mx.array]:
    """See `reference.norm_rope_attend`."""
    return _run("norm_rope_attend", token, kv, lengths)


def _rope_case(qkv: mx.array, _: object, options: HeadOptions) -> Case:
    rows, head_dim = qkv.shape[0] * qkv.shape[1], options.q_weight.shape[0]
    stored = qkv.dtype if options.key_scale is None else mx.int8
    return Case(device(), qkv.dtype, rows, head_dim=head_dim, stored=stored)


def _attention_case(queries: mx.array, kv: KeyValues, *_: object) -> Case:
    rows, head_dim = queries.shape[0] * queries.shape[2], queries.shape[3]
    return Case(device(), queries.dtype, rows, head_dim=head_dim, stored=kv.buffer.dtype)


_CASES: dict[str, Callable[..., Case]] = {
    "packed_matmul": _product_case,
    "packed_swiglu": _product_case,
    "packed_argmax": _product_case,
    "packed_gather": _product_case,
    "packed_embedding": lambda tokens, weight, dtype: _weight_case(dtype, tokens.size, weight),
    "rope_norm_quantize": _rope_case,
    "norm_rope": lambda heads, *_: Case(
        device(),
        heads.dtype,
        heads.shape[0] * heads.shape[2],
        head_dim=heads.shape[3],
        stored=heads.dtype,
    ),
    "norm_rope_attend": lambda token, kv, *_: Case(
        device(),
        token.queries.dtype,
        token.queries.shape[0],
        head_dim=kv.buffer.shape[3],
        stored=kv.buffer.dtype,
    ),
    "write_tokens": lambda buffer, tokens, lengths: Case(
        device(), buffer.dtype, tokens.shape[0] * tokens.shape[2]
    ),
    "decode_attention": _attention_case,
    "write_and_attend": lambda qkv, kv, lengths, options, *_: _rope_case(qkv, None, options),
    "causal_attention": _attention_case,
    "gelu": lambda x: Case(device(), x.dtype, x.size // max(1, x.shape[-1])),
}
