"""The operations around the matrix products on Metal: embedding, RoPE with QK-norm, decode attention.

Attention of a row's few new tokens streams over int8 keys and values. Each threadgroup has some query heads,
some of the tokens, and one range of the columns (split-K). The product that follows merges the ranges'
partials if it can; if it can't, a second dispatch does, which pays from `SINGLE_PASS` columns on.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import mlx.core as mx

from afm_mlx.kernels.dispatch import Case, Variant, dtype_name, other_than_floats
from afm_mlx.kernels.metal import runtime
from afm_mlx.kernels.metal.products import MAX_MERGED, MAX_PARTIALS, merge_partials
from afm_mlx.kernels.metal.runtime import CORES, Kernel, gpu_cores
from afm_mlx.kernels.operands import (
    AttentionPartials,
    HeadOptions,
    KeyValues,
    PackedWeight,
    QueryRope,
)
from afm_mlx.kernels.reference import with_new_codes

MAX_HEAD_DIM = 256  # threads of a threadgroup, one per dimension when sums are merged
SINGLE_PASS = 1024  # columns that one dispatch reads where another one would have to merge
SPLIT = 128  # columns that are worth a threadgroup of their own
MAX_SPLITS = 64
MAX_WRITTEN = 8  # tokens of a row that `write_and_attend` has memory for
MAX_QUERIES = 4  # of a threadgroup, of up to 128 numbers: more don't fit into a lane's registers
MERGED_ROWS = 2  # rows whose partials a product can merge

_EMBEDDING = Kernel("embedding", ("tokens", "codes", "scales", "biases", "table"), ("out",))
_HEADERS = ("common", "rope", "attention")
_HEAD_INPUTS = ("q_weight", "k_weight", "key_scale", "value_scale", "constants")
_ROPE = Kernel(
    "rope_norm_quantize",
    ("qkv", "offset", *_HEAD_INPUTS),
    ("queries", "codes"),
    headers=("common", "rope"),
)
_COLUMNS = ("kv", "tail", "starts", "lengths")
_DECODE = Kernel(
    "attention_decode",
    ("queries", *_COLUMNS, "key_scale", "value_scale", "norm_weight", "constants"),
    ("out",),
    _HEADERS,
)
_WRITE = Kernel(
    "write_and_attend", ("qkv", *_COLUMNS, *_HEAD_INPUTS), ("out", "new_tail"), _HEADERS
)


@functools.cache
def _constants(head_dim: int, theta: float, eps: float) -> mx.array:
    """Return RoPE's frequency of each pair of a head, eps, and the scores' factor: (head_dim / 2 + 2,) float32.

    Powers that a kernel computes are off by up to 4 ulps, and the position multiplies that error. The factor,
    `log2(e) / sqrt(head_dim)`, makes weights powers of two.
    """
    frequencies = (theta ** (-2 * i / head_dim) for i in range(head_dim // 2))
    return mx.array([*frequencies, eps, math.log2(math.e) * head_dim**-0.5], dtype=mx.float32)


def _obstacle(case: Case) -> str | None:
    return other_than_floats(case) or (None if case.rows else "takes one row at least")


# -- embedding


def packed_embedding(tokens: mx.array, weight: PackedWeight, dtype: mx.Dtype) -> mx.array:
    """See `reference.packed_embedding`. One dispatch."""
    words = weight.codes.shape[1]
    threads = min(256, -(-words // 32) * 32)
    # Optional arrays that a mode has not are bound to one that it has, and never read.
    given = weight.table if weight.scales is None else weight.scales
    assert given is not None
    optional = (weight.scales, weight.biases, weight.table)
    arrays = [given if array is None else array for array in optional]
    (out,) = runtime.launch(
        _EMBEDDING,
        [tokens.reshape(-1), weight.codes, *(array.reshape(-1) for array in arrays)],
        template=(
            ("O", dtype),
            ("bits", weight.bits),
            ("palette", weight.mode == "palette"),
            ("affine", weight.mode == "affine"),
        ),
        grid=(-(-words // threads) * threads, tokens.size, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(*tokens.shape, weight.in_dims)],
        output_dtypes=[dtype],
    )
    return out


# -- RoPE, QK-norm, int8 keys and values


def rope_norm_quantize(
    qkv: mx.array, offset: int | mx.array, options: HeadOptions
) -> tuple[mx.array, mx.array]:
    """See `reference.rope_norm_quantize`. One dispatch.

    Nothing is rounded between projection and codes, so a key near the boundary of two codes can get another
    code than by `rope_norm` in a narrow dtype.
    """
    batch, length, width = qkv.shape
    head_dim, n_kv_heads = options.q_weight.shape[0], options.n_kv_heads
    heads = width // head_dim
    n_heads = heads - 2 * n_kv_heads
    offsets = runtime.ints(offset) if isinstance(offset, int) else offset.reshape(-1)
    queries, codes = runtime.launch(
        _ROPE,
        [qkv, offsets, *_head_arrays(options)],
        template=(
            ("T", qkv.dtype),
            ("HEAD_DIM", head_dim),
            ("N_HEADS", n_heads),
            ("N_KV_HEADS", n_kv_heads),
        ),
        grid=(32, heads, batch * length),
        threadgroup=(32, math.gcd(heads, 8), 1),
        output_shapes=[
            (batch, n_heads, length, head_dim),
            (batch, 2 * n_kv_heads, length, head_dim),
        ],
        output_dtypes=[qkv.dtype, mx.int8],
    )
    return queries, codes


def _head_arrays(options: HeadOptions) -> list[mx.array | None]:
    constants = _constants(options.q_weight.shape[0], options.theta, options.eps)
    return [options.q_weight, options.k_weight, options.key_scale, options.value_scale, constants]


def _heads_obstacle(case: Case) -> str | None:
    if case.stored != mx.int8:
        return f"takes int8 keys and values, not {dtype_name(case.stored)}"
    return _obstacle(case)


def _rope_obstacle(case: Case) -> str | None:
    if case.head_dim % 2 or case.head_dim > MAX_HEAD_DIM:
        return f"takes even head sizes up to {MAX_HEAD_DIM}, not {case.head_dim}"
    return _heads_obstacle(case)


# -- attention of one new token per row


class AttentionPlan(NamedTuple):
    """Division of attention's work among threadgroups and lanes.

    Args:
        heads: query heads of one threadgroup; divides the heads that share a KV head.
        tokens: tokens of a row that one threadgroup attends with: 1, 2 or 4. A number for each length would be
            a kernel more to compile.
        lanes: lanes that share a key, a power of two.
        units: runs of four dimensions per lane.
        splits: ranges that the columns are divided into; if there are several, each makes a partial.
    """

    heads: int
    tokens: int
    lanes: int
    units: int
    splits: int


@functools.cache
def plan(
    batch: int,
    n_heads: int,
    n_kv_heads: int,
    capacity: int,
    head_dim: int,
    merge: bool = True,
    cores: int = CORES["s"],
    tokens: int = 1,
) -> AttentionPlan:
    """Divide attention's work among threadgroups and lanes, for a KV cache of this shape.

    Args:
        merge: True if another dispatch has to merge the partials of several ranges.
        cores: cores of the GPU. With two threadgroups per core, one computes while the other waits; that gains
            less than a dispatch costs.
        tokens: new tokens of each row.
    """
    group = n_heads // n_kv_heads
    # Two query heads share the conversions of a key's codes. Four would leave the largest chips idle; tokens
    # fill the threadgroup's registers.
    heads = max(h for h in (1, 2) if group % h == 0)
    queries = MAX_QUERIES if head_dim <= 128 else MAX_QUERIES // 2
    per_group = min(queries // heads, 1 << (tokens - 1).bit_length())
    threadgroups = batch * -(-tokens // per_group) * n_heads // heads
    most = MAX_SPLITS if merge else MAX_PARTIALS
    wanted = cores if merge else 2 * cores
    splits = min(-(-capacity // SPLIT), max(1, wanted // threadgroups), most)
    single = splits == 1 or (merge and capacity <= SINGLE_PASS)
    # A lane holds its dimensions of every query and of every sum: 32 registers at most. With twice as many, a
    # simdgroup would take more than an Apple GPU's instructions can name.
    units = max(1, 4 // (heads * per_group))
    lanes = 1
    while lanes < 32 and lanes * units * 4 < head_dim:
        lanes *= 2
    units = -(-head_dim // (4 * lanes))
    return AttentionPlan(heads, per_group, lanes, units, 1 if single else splits)


def decode_attention(
    queries: mx.array,
    kv: KeyValues,
    lengths: mx.array,
    rope: QueryRope | None = None,
    merge: bool = True,
) -> mx.array | AttentionPartials:
    """See `reference.decode_attention`.

    One dispatch. With `merge`, a second one merges the partials, beyond `SINGLE_PASS` columns of batches that
    don't fill the GPU.
    """
    batch, n_heads, count, head_dim = queries.shape
    # Without RoPE, the norm's weight is bound to the queries, and never read.
    of_rope = QueryRope(queries, 1.0, 0.0) if rope is None else rope
    constants = _constants(head_dim, of_rope.theta, of_rope.eps)
    # A projection has its tokens first: where they were swapped with the heads, nothing is copied.
    ordered = queries if count == 1 else queries.swapaxes(1, 2)
    inputs = [ordered, *_columns(kv, lengths), kv.key_scale, kv.value_scale]
    inputs += [of_rope.weight, constants]
    shape = (batch, count, n_heads, head_dim)
    out, _ = _attend(_DECODE, inputs, kv, shape, merge, ("ROPE", rope is not None))
    return out


def write_and_attend(
    qkv: mx.array, kv: KeyValues, lengths: mx.array, options: HeadOptions, merge: bool = True
) -> tuple[mx.array | AttentionPartials, mx.array]:
    """See `reference.write_and_attend`. As many dispatches as `decode_attention` takes."""
    batch, count, width = qkv.shape
    if count > MAX_WRITTEN:
        queries, codes = rope_norm_quantize(qkv, lengths - 1, options)
        kv = with_new_codes(kv, codes, lengths)
        return decode_attention(queries, kv, lengths), kv.tail
    head_dim = kv.buffer.shape[3]
    shape = (batch, count, width // head_dim - 2 * options.n_kv_heads, head_dim)
    inputs = [qkv, *_columns(kv, lengths), *_head_arrays(options)]
    out, (tail,) = _attend(_WRITE, inputs, kv, shape, merge)
    return out, tail


def _columns(kv: KeyValues, lengths: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Return the inputs that `_COLUMNS` names.

    Without a tail, `starts` is past all columns in use, so that nothing is read from the tail's placeholder.
    """
    if kv.tail is None or kv.starts is None:
        return kv.buffer, kv.buffer, lengths, lengths
    return kv.buffer, kv.tail, kv.starts, lengths


def _attend(
    kernel: Kernel,
    inputs: list[mx.array],
    kv: KeyValues,
    shape: tuple[int, ...],
    merge: bool,
    *flags: tuple[str, bool],
) -> tuple[mx.array | AttentionPartials, list[mx.array]]:
    """Launch a kernel that attends; return attention's output (B, n_heads, L, head_dim), and its other outputs.

    `shape` is (B, L, n_heads, head_dim), of the queries. The output has the type of the first input; `merge` is
    `decode_attention`'s. `flags` are template arguments that only this kernel has.
    """
    (batch, count, n_heads, head_dim), dtype = shape, inputs[0].dtype
    # Two rows keep a GPU busy by themselves. A product merges its inputs in its threadgroups' memory.
    merge = merge or batch > MERGED_ROWS or math.prod(shape) * dtype.size > MAX_MERGED or count > 1
    sizes = (batch, n_heads, kv.n_kv_heads, kv.buffer.shape[2], head_dim)
    work = plan(*sizes, merge, gpu_cores(), count)
    split = work.splits > 1
    writes = [kv.tail] if kernel is _WRITE and kv.tail is not None else []
    final = shape if count > 1 else (batch, n_heads, 1, head_dim)
    partial = (batch * count, n_heads, work.splits, head_dim + 2)
    out, *rest = runtime.launch(
        kernel,
        inputs,
        template=(
            ("O", dtype),
            ("HEAD_DIM", head_dim),
            ("HEADS", work.heads),
            ("SEVERAL", count > 1),
            ("TOKENS", work.tokens),
            ("RUN", work.lanes),
            ("UNITS", work.units),
            *flags,
        ),
        grid=(256 * n_heads // work.heads, batch * -(-count // work.tokens), work.splits),
        threadgroup=(256, 1, 1),
        # Results are stored in the memory of floats, so that one kernel serves any number of ranges.
        output_shapes=[
            partial if split else (*final[:-1], head_dim * dtype.size // mx.float32.size),
            *(tail.shape for tail in writes),
        ],
        output_dtypes=[mx.float32, *(tail.dtype for tail in writes)],
    )
    if split:
        assert kv.value_scale is not None
        parts = AttentionPartials(out, kv.value_scale, dtype)
        if not merge:
            return parts, rest
        out = merge_partials(parts).reshape(final)
    else:
        out = out.view(dtype)
    return out if count == 1 else out.swapaxes(1, 2), rest


def _attention_obstacle(case: Case) -> str | None:
    if case.head_dim % 4 or case.head_dim > MAX_HEAD_DIM:
        return f"takes head sizes that 4 divides up to {MAX_HEAD_DIM}, not {case.head_dim}"
    return _heads_obstacle(case)


VARIANTS: tuple[Variant, ...] = (
    Variant("packed_embedding", "metal/embedding", packed_embedding, _obstacle),
    Variant("rope_norm_quantize", "metal/rope_norm_quantize", rope_norm_quantize, _rope_obstacle),
    Variant("decode_attention", "metal/attention", decode_attention, _attention_obstacle),
    Variant("write_and_attend", "metal/write_and_attend", write_and_attend, _attention_obstacle),
)
