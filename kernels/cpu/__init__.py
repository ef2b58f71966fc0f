"""The operations as C++ primitives for MLX's CPU backend.

`extension.py` finds and loads the library. In C++, `matmul.h` and `attention.h` are the kernels on plain
pointers, with one source file per instruction set; `pool.h` is the thread pool; `primitives.h` makes them
nodes of MLX's graph, and `bindings.cpp` is the Python module.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from afm_mlx.kernels.cpu import extension
from afm_mlx.kernels.dispatch import FLOATS, Case, Obstacle, Variant, dtype_name, other_than_floats
from afm_mlx.kernels.operands import HeadOptions, KeyValues, NewToken, PackedWeight, QueryRope

_extension: Any = extension.module()  # None if the rules below refuse every case


def _packed_embedding(tokens: mx.array, weight: PackedWeight, dtype: mx.Dtype) -> mx.array:
    if tokens.dtype not in (mx.int32, mx.uint32):
        tokens = tokens.astype(mx.int32)
    return _extension.packed_embedding(tokens, weight, dtype)


def _packed_gather(
    x: mx.array,
    weight: PackedWeight,
    indices: mx.array,
    experts: int,
    ascending: bool = False,
    activation_bits: int = 16,
) -> mx.array:
    if indices.dtype not in (mx.int32, mx.uint32):
        indices = indices.astype(mx.int32)
    return _extension.packed_gather(x, weight, indices, experts, activation_bits)


def _decode_attention(
    queries: mx.array,
    kv: KeyValues,
    lengths: mx.array,
    rope: QueryRope | None = None,
    merge: bool = True,
) -> mx.array:
    tail = {"tail": kv.tail, "starts": kv.starts}
    of_rope = {} if rope is None else {"weight": rope.weight, "theta": rope.theta, "eps": rope.eps}
    return _extension.decode_attention(
        queries, kv.buffer, kv.key_scale, kv.value_scale, lengths, **tail, **of_rope
    )


def _write_and_attend(
    qkv: mx.array, kv: KeyValues, lengths: mx.array, options: HeadOptions, merge: bool = True
) -> tuple[mx.array, mx.array]:
    queries, codes = _extension.rope_norm_quantize(qkv, lengths - 1, options)
    tail = _extension.write_tokens(kv.tail, codes, kv.tail_ends(lengths, codes.shape[2]))
    return _decode_attention(queries, kv._replace(tail=tail), lengths), tail


def _norm_rope_attend(
    token: NewToken, kv: KeyValues, lengths: mx.array
) -> tuple[mx.array, mx.array]:
    *projections, norms, eps = token
    return _extension.norm_rope_attend(*projections, kv, lengths, norms, eps)


def _causal_attention(queries: mx.array, kv: KeyValues) -> mx.array:
    return _extension.causal_attention(queries, kv.buffer, kv.key_scale, kv.value_scale)


# -- which cases they take


def _missing(case: Case) -> str | None:
    reason = extension.unavailable()
    return f"the C++ extension isn't there: {reason}" if reason else None


def _obstacle(case: Case) -> str | None:
    return _missing(case) or other_than_floats(case)


def _attention_obstacle(case: Case) -> str | None:
    if reason := _obstacle(case):
        return reason
    if case.stored not in (mx.int8, *FLOATS):
        return f"takes int8 or float keys and values, not {dtype_name(case.stored)}"
    limit = _extension.max_head_dim
    return f"head_dim is at most {limit}" if case.head_dim > limit else None


def _rope_obstacle(case: Case) -> str | None:
    return _obstacle(case) or ("head_dim must be even" if case.head_dim % 2 else None)


def _writing_obstacle(case: Case) -> str | None:
    return _attention_obstacle(case) or _rope_obstacle(case)


def _norm_rope_attend_obstacle(case: Case) -> str | None:
    if case.stored != case.dtype:
        return f"takes keys and values of the queries' type only, not {dtype_name(case.stored)}"
    return _writing_obstacle(case)


def _variant(op: str, obstacle: Obstacle, run: Callable[..., Any] | None = None) -> Variant:
    """Return the variant that calls the extension's function of that name, or `run` if its arguments differ."""
    own: Any = getattr(_extension, op, None)
    return Variant(op, f"cpu/{op}", run or own, obstacle)


VARIANTS: tuple[Variant, ...] = (
    _variant("packed_matmul", _obstacle)._replace(
        run_each=getattr(_extension, "packed_matmul_each", None)
    ),
    _variant("packed_swiglu", _obstacle),
    _variant("packed_embedding", _obstacle, _packed_embedding),
    _variant("packed_gather", _obstacle, _packed_gather),
    _variant("packed_argmax", _obstacle),
    _variant("decode_attention", _attention_obstacle, _decode_attention),
    _variant("write_and_attend", _writing_obstacle, _write_and_attend),
    _variant("causal_attention", _attention_obstacle, _causal_attention),
    _variant("write_tokens", _missing),
    _variant("gelu", _obstacle),
    _variant("rope_norm_quantize", _rope_obstacle),
    _variant("norm_rope", _rope_obstacle),
    _variant("norm_rope_attend", _norm_rope_attend_obstacle, _norm_rope_attend),
)
