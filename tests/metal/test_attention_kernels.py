"""Metal kernels around the matrix products, run by the emulator, against float64 NumPy."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx import kernels
from afm_mlx.kernels import HeadOptions, KeyValues, PackedWeight, QueryRope, dispatch
from afm_mlx.kernels.metal import attention
from afm_mlx.kernels.selftest import oracle
from tests.tools import compare
from tests.tools.cases import draw
from tests.tools.compare import UNIT_ROUNDOFF

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
THETA, EPS = 500000.0, 1e-5


def assert_right(got, wanted, dtype, bound, what="outputs"):
    """`bound` is relative to the largest number, and comes on top of one rounding to `dtype`."""
    assert got.dtype == dtype
    compare.assert_close(got, wanted, UNIT_ROUNDOFF[dtype] + bound, what)


# -- RoPE, QK-norm, int8 keys and values

ROPE_CASES = [
    # batch, length, n_heads, n_kv_heads, head_dim
    *(((1, 1, 16, 2, 128), dtype) for dtype in DTYPES),  # the 3B
    ((2, 3, 4, 2, 64), mx.float32),
    ((3, 2, 3, 1, 12), mx.bfloat16),
    ((1, 1, 1, 1, 2), mx.float16),  # fewer than 8 numbers in every weight
    ((9, 1, 2, 2, 6), mx.float32),  # 8 rows or more lie in another address space
    ((1, 2, 2, 1, 256), mx.bfloat16),
]


@pytest.mark.parametrize("case", ROPE_CASES, ids=str)
def test_rope_norm_quantize(metal, rng, case):
    (batch, length, n_heads, n_kv_heads, head_dim), dtype = case
    qkv = draw(rng, (batch, length, (n_heads + 2 * n_kv_heads) * head_dim), dtype)
    weights = [draw(rng, (head_dim,), dtype) for _ in range(2)]
    scales = tuple(mx.array(s, mx.float32) for s in rng.uniform(0.01, 0.03, 2))
    positions = rng.integers(0, 4096, batch).astype(np.int32)
    # An angle is off by a float32 rounding of its frequency and one of the product, at 4,096.
    angles = 4 * 4096 * 2.0**-24
    for offset in (mx.array(positions), int(positions[0])):
        arguments = (qkv, offset, HeadOptions(*weights, *scales, n_kv_heads, THETA, EPS))
        (q, codes), wanted = (m.rope_norm_quantize(*arguments) for m in (kernels, oracle))
        assert_right(q, wanted[0], dtype, angles)
        assert codes.dtype == mx.int8
        compare.assert_within(codes, wanted[1], 0.5 + 128 * angles, "codes")


def test_codes_are_rounded_half_to_even_and_clamped(metal):
    dtype = mx.bfloat16
    exact = [0.125, 0.375, -0.125, -0.375, 31.75, 40.0, -32.0, -40.0]
    qkv = mx.array([0.0] * 16 + exact).astype(dtype).reshape(1, 1, 24)
    one = mx.ones((8,), dtype)
    scale = mx.array(0.25)
    options = HeadOptions(one, one, scale, scale, 1, THETA, EPS)
    _, codes = kernels.rope_norm_quantize(qkv, 3, options)
    keys, values = codes.split(2, axis=1)
    assert keys.flatten().tolist() == [0] * 8
    assert values.flatten().tolist() == [0, 2, 0, -2, 127, 127, -128, -128]


def test_many_tokens_are_those_one_by_one(metal, rng):
    qkv, weight = draw(rng, (2, 4, 8 * 16)), draw(rng, (16,))
    offset = mx.array(rng.integers(0, 100, 2).astype(np.int32))
    scales = (mx.array(0.02), mx.array(0.02))
    options = HeadOptions(weight, weight, *scales, 2, THETA, EPS)
    together = kernels.rope_norm_quantize(qkv, offset, options)
    for t in range(4):
        alone = kernels.rope_norm_quantize(qkv[:, t : t + 1], offset + t, options)
        for whole, part in zip(together, alone, strict=True):
            compare.assert_same(whole[:, :, t : t + 1], part, f"token {t}")


# -- attention of one new token per row

LONG = attention.SINGLE_PASS + 1  # columns that take two passes

ATTENTION_CASES = [
    # batch, n_heads, n_kv_heads, capacity, head_dim
    *(((1, 16, 2, 96, 128), dtype) for dtype in DTYPES),  # the 3B
    ((3, 4, 2, 40, 64), mx.bfloat16),  # the embedded model
    ((2, 3, 1, 33, 12), mx.float32),
    ((1, 5, 5, 7, 4), mx.float16),
    ((1, 6, 1, 25, 256), mx.float32),
    ((9, 2, 1, 9, 36), mx.bfloat16),  # 8 rows or more lie in another address space
    ((1, 1, 1, 1, 4), mx.float32),  # the smallest
    *(((1, 8, 1, LONG, 128), dtype) for dtype in DTYPES),
    ((2, 3, 1, LONG + 500, 12), mx.float32),
    ((1, 2, 1, LONG + 7, 256), mx.bfloat16),
]


def draw_attention(rng, case, dtype, lengths=None):
    """Queries, int8 keys and values, and lengths; columns past a row's length hold the largest codes."""
    batch, n_heads, n_kv_heads, capacity, head_dim = case
    queries = draw(rng, (batch, n_heads, 1, head_dim), dtype)
    codes = rng.integers(-128, 128, (batch, 2 * n_kv_heads, capacity, head_dim))
    if lengths is None:
        # The shortest row, the longest, and what lies between.
        lengths = [1, capacity, *rng.integers(1, capacity + 1, batch)][:batch]
        lengths = [int(rng.integers(1, capacity + 1))] if batch == 1 else lengths
    for row, length in enumerate(lengths):
        codes[row, :, length:] = 127
    scales = (mx.array(s, mx.float32) for s in rng.uniform(0.01, 0.03, 2))
    kv = KeyValues(mx.array(codes.astype(np.int8)), *scales)
    return queries, kv, mx.array(np.array(lengths, dtype=np.int32))


def attention_bound(queries, kv):
    """A float32 score is off by its size times some roundings, and softmax makes that relative."""
    norms = np.linalg.norm(oracle.float64(queries), axis=-1).max() * float(kv.key_scale.item())
    score = norms * 128  # the longest key has sqrt(head_dim) * 128 codes
    return (8 + score) * 2.0**-21


def assert_decodes(queries, kv, lengths, what="outputs"):
    got = kernels.decode_attention(queries, kv, lengths)
    wanted = oracle.decode_attention(queries, kv, lengths)
    assert_right(got, wanted, queries.dtype, attention_bound(queries, kv), what)
    return got


@pytest.mark.parametrize("case", ATTENTION_CASES, ids=str)
def test_decode_attention(metal, rng, case):
    assert_decodes(*draw_attention(rng, *case))


@pytest.mark.parametrize("case", ATTENTION_CASES[2:-1:2], ids=str)
def test_decode_attention_of_raw_queries(metal, rng, case):
    (*_, capacity, head_dim), dtype = case
    queries, kv, lengths = draw_attention(rng, *case)
    rope = QueryRope(draw(rng, (head_dim,), dtype), THETA, EPS)
    got = kernels.decode_attention(queries, kv, lengths, rope)
    wanted = oracle.decode_attention(queries, kv, lengths, rope)
    turned = oracle.float64(rope.weight) * np.ones(head_dim)
    angles = 4 * capacity * 2.0**-24 * 128 * float(kv.key_scale.item()) * np.linalg.norm(turned)
    bound = attention_bound(mx.array(turned.astype(np.float32)), kv)
    assert_right(got, wanted, dtype, bound + angles)


def test_every_size_of_a_group(metal, rng):
    for group in range(1, 9):
        for capacity in (24, LONG):
            case = (1, 2 * group, 2, capacity, 12)
            assert_decodes(*draw_attention(rng, case, mx.float32), case)


@pytest.mark.parametrize("capacity", [64, LONG])
def test_columns_past_the_length_and_large_scores(metal, rng, capacity):
    """What lies past a row's length is never looked at, and scores of some 10,000 overflow nothing."""
    case = (3, 3, 1, capacity, 12)
    queries, kv, lengths = draw_attention(rng, case, mx.float32, lengths=[1, 17, 50])
    got = assert_decodes(queries, kv, lengths)
    outside = mx.arange(capacity)[:, None] >= lengths[:, None, None, None]
    other = mx.array(rng.integers(-128, 127), mx.int8)
    others = kv._replace(buffer=mx.where(outside, other, kv.buffer))
    compare.assert_same(kernels.decode_attention(queries, others, lengths), got)
    assert_decodes(queries * 1000, kv, lengths)


def test_the_best_key_in_the_last_of_many_ranges(metal, rng):
    capacity = 40 * attention.SPLIT  # more ranges than a simdgroup has lanes
    case = (1, 1, 1, capacity, 4)
    assert attention.plan(*case).splits == 40
    queries, kv, lengths = draw_attention(rng, case, mx.float32, lengths=[capacity])
    codes = np.array(kv.buffer)
    codes[:, :1] //= 2
    codes[0, 0, -1] = np.where(np.array(queries[0, 0, 0]) > 0, 127, -128)
    kv = kv._replace(buffer=mx.array(codes))
    for size in (0.1, 1000):  # all keys share the weight, or one has it
        assert_decodes(queries * size, kv, lengths, size)


def test_the_plan_covers_every_head_size():
    batches, groups, capacities = (1, 8, 64), (1, 3, 8), (256, 1280, 65536)
    cases = itertools.product(range(4, 257, 4), batches, groups, capacities)
    for head_dim, batch, group, capacity in cases:
        work = attention.plan(batch, 2 * group, 2, capacity, head_dim)
        assert group % work.heads == 0
        assert work.heads <= 4
        assert 32 % work.lanes == 0
        assert work.lanes * work.units * 4 >= head_dim
        assert work.heads * work.units * 4 <= 32  # registers for queries, and as many for sums
        assert 1 <= work.splits <= attention.MAX_SPLITS


# -- embedding

EMBEDDING_FORMATS = [
    *(
        (mode, granularity)
        for mode in ("balanced", "affine")
        for granularity in ("tensor", "row", "group")
    ),
    ("palette", "table"),
]


def draw_packed(rng, bits, mode, granularity, n=12, k=96, group=24):
    codes = mx.array(rng.integers(0, 2**32, (n, k * bits // 32), dtype=np.uint32))
    if mode == "palette":
        return PackedWeight(codes, bits, mode, table=draw(rng, (4 if n > 1 else 1, 2**bits)))
    shape = {"tensor": (), "row": (n,), "group": (n, k // group)}[granularity]
    scales = mx.array(rng.uniform(0.01, 1, shape).astype(np.float32))
    return PackedWeight(codes, bits, mode, scales, draw(rng, shape) if mode == "affine" else None)


def assert_looks_up(tokens, weight, dtype, what):
    got, wanted = (m.packed_embedding(tokens, weight, dtype) for m in (kernels, oracle))
    assert_right(got, wanted, dtype, 2.0**-22, what)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_packed_embedding(metal, rng, bits):
    dtype = {2: mx.float32, 4: mx.bfloat16, 8: mx.float16}[bits]
    for format_ in EMBEDDING_FORMATS:
        weight = draw_packed(rng, bits, *format_)
        for shape in ((1, 1), (3,)):
            tokens = mx.array(rng.integers(0, weight.out_dims, shape).astype(np.int32))
            assert_looks_up(tokens, weight, dtype, (*format_, shape))


def test_packed_embedding_of_many_wide_rows(metal, rng):
    indices = (mx.int32, mx.uint32, mx.int64)
    for index, dtype in zip(indices, (mx.float32, mx.bfloat16, mx.float16), strict=True):
        weight = draw_packed(rng, 4, "affine", "group", n=40, k=2208, group=32)
        scales, biases = weight.scales.astype(dtype), weight.biases.astype(dtype)
        tokens = mx.array(rng.integers(0, 40, (2, 5))).astype(index)  # 8 or more lie elsewhere
        assert_looks_up(tokens, weight._replace(scales=scales, biases=biases), dtype, index)


def test_packed_embedding_of_a_matrix_of_one_row(metal, rng):
    for format_ in EMBEDDING_FORMATS:
        weight = draw_packed(rng, 8, *format_, n=1, k=4, group=4)
        assert_looks_up(mx.array([0, 0]), weight, mx.float32, format_)


# -- what they can't run


def test_obstacles():
    for op, case, says in (
        ("rope_norm_quantize", {"head_dim": 13}, "even head sizes up to 256, not 13"),
        ("rope_norm_quantize", {"head_dim": 258}, "not 258"),
        ("decode_attention", {"head_dim": 30}, "4 divides up to 256, not 30"),
        ("decode_attention", {"head_dim": 260}, "not 260"),
        ("decode_attention", {"head_dim": 64, "dtype": mx.int8}, "int8"),
        ("packed_embedding", {"dtype": mx.int32}, "int32"),
        ("packed_embedding", {"rows": 0}, "one row at least"),
    ):
        case = dispatch.Case(**{"device": "gpu", "dtype": mx.float32, "rows": 1, **case})
        (variant,) = (v for v in attention.VARIANTS if v.op == op)
        assert says in (variant.obstacle(case) or "")
