"""The CPU primitives around attention against a float64 NumPy oracle, with every instruction set there is."""

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.kernels import HeadOptions, KeyValues, QueryRope
from afm_mlx.kernels.cpu import extension
from afm_mlx.kernels.cpu import native as ops
from tests.tools import compare
from tests.tools.cases import all_pairs
from tests.tools.cases import draw as draw_array
from tests.tools.compare import exact

native = extension.module()
pytestmark = pytest.mark.skipif(native is None, reason=extension.unavailable())

THETA, EPS = 500000.0, 1e-5
ROUNDING = {mx.float32: 2.0**-23, mx.bfloat16: 2.0**-8, mx.float16: 2.0**-11}
# (heads, kv_heads, head_dim): aligned and not, one head to a group, more than a tile's rows to one.
SHAPES = [(16, 2, 128), (4, 2, 64), (6, 2, 80), (3, 3, 2), (40, 1, 36), (5, 1, 512)]


def draw(rng, shape, dtype=mx.float32):
    """Random numbers that `dtype` holds exactly, in MLX and in float64."""
    array = draw_array(rng, shape, dtype)
    return array, exact(array)


def draw_kv(rng, batch, kv_heads, capacity, dim):
    codes = rng.integers(-128, 128, (batch, 2 * kv_heads, capacity, dim)).astype(np.int8)
    scales = rng.uniform(0.005, 0.03, 2).astype(np.float32)
    kv = KeyValues(mx.array(codes), *map(mx.array, scales))
    keys, values = np.split(codes, 2, axis=1)
    return kv, keys * scales[0].astype(np.float64), values * scales[1].astype(np.float64)


def oracle_rope_norm(x, weight, positions):
    """x (B, heads, L, D), positions (B, L)."""
    dim = x.shape[-1]
    angles = (positions[..., None] * THETA ** (-np.arange(0, dim, 2) / dim))[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = np.stack(
        [
            even * np.cos(angles) - odd * np.sin(angles),
            even * np.sin(angles) + odd * np.cos(angles),
        ],
        -1,
    ).reshape(x.shape)
    return turned / np.sqrt((turned**2).mean(-1, keepdims=True) + EPS) * weight


def oracle_attention(q, k, v, visible):
    """Outputs, and how far int16 queries and weights may move them."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.where(visible, q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    total = weights.sum(-1, keepdims=True)
    # A query is off by half a unit in every element, in the worst case all in a key's direction.
    unit = np.abs(q).max(-1, keepdims=True) / 32767
    shift = unit / 2 * np.abs(k).sum(-1)[..., None, :] / np.sqrt(q.shape[-1])
    shift = np.where(visible, shift, 0).max(-1, keepdims=True) + 1e-6 * (
        1 + np.abs(np.where(visible, scores, 0)).max(-1, keepdims=True)
    )
    rounding = visible.sum(-1, keepdims=True) / 65534 / total
    bound = (2 * shift + 2 * rounding + 1e-6) * np.abs(v).max()
    return weights / total @ v, bound


def assert_close(got, wanted, bound, dtype=mx.float32, what="outputs"):
    assert got.dtype == dtype
    compare.assert_within(got, wanted, bound + ROUNDING[dtype] * np.abs(wanted), what)


def up_to(lengths, capacity):
    return (np.arange(capacity) < lengths[:, None])[:, None, None]


def test_decode_attention(rng, isa):
    for case in all_pairs(SHAPES, list(ROUNDING), (90, 1300)):
        (heads, kv_heads, dim), dtype, capacity = case
        q, q64 = draw(rng, (3, heads, 1, dim), dtype)
        kv, k64, v64 = draw_kv(rng, 3, kv_heads, capacity, dim)
        lengths = np.array([1, rng.integers(2, capacity // 2), capacity])
        got = ops.decode_attention(q, kv, mx.array(lengths.astype(np.int32)))
        wanted, bound = oracle_attention(q64, k64, v64, up_to(lengths, capacity))
        assert_close(got, wanted, bound, dtype, case)


def test_decode_attention_turns_and_normalizes_raw_queries(rng, isa):
    for dtype in ROUNDING:
        q, q64 = draw(rng, (2, 8, 1, 64), dtype)
        weight, weight64 = draw(rng, (64,), dtype)
        kv, k64, v64 = draw_kv(rng, 2, 2, 50, 64)
        lengths = rng.integers(1, 51, 2)
        turned = oracle_rope_norm(q64, weight64, lengths[:, None] - 1)
        rope = QueryRope(weight, THETA, EPS)
        got = ops.decode_attention(q, kv, mx.array(lengths.astype(np.int32)), rope)
        wanted, bound = oracle_attention(turned, k64, v64, up_to(lengths, 50))
        assert_close(got, wanted, bound + 1e-5, dtype, dtype)


def test_decode_attention_reads_buffers_where_they_are(rng):
    """A slice of a cache, transposed queries and a step along the head: no copy that changes the result."""
    kv, k64, v64 = draw_kv(rng, 2, 4, 90, 64)
    q, q64 = draw(rng, (2, 1, 9, 32))
    part = kv._replace(buffer=kv.buffer[:, 1:7, 10:60, ::2][:, ::-1])
    lengths = np.array([50, 17])
    got = ops.decode_attention(q.swapaxes(1, 2), part, mx.array(lengths.astype(np.int32)))
    both = np.concatenate([k64 / kv.key_scale.item(), v64 / kv.value_scale.item()], axis=1)
    k64, v64 = np.split(both[:, 1:7, 10:60, ::2][:, ::-1], 2, axis=1)
    k64, v64 = k64 * kv.key_scale.item(), v64 * kv.value_scale.item()
    assert_close(got, *oracle_attention(q64.swapaxes(1, 2), k64, v64, up_to(lengths, 50)))


def test_decode_attention_never_looks_beyond_the_buffer(rng):
    """Lengths that no cache has: more than the capacity is the capacity, and nothing seen is zero."""
    q, q64 = draw(rng, (2, 2, 1, 8))
    kv, k64, v64 = draw_kv(rng, 2, 1, 5, 8)
    got = ops.decode_attention(q, kv, mx.array([2**30, 0], dtype=mx.int32))
    wanted, bound = oracle_attention(q64[:1], k64[:1], v64[:1], np.ones((1, 1, 1, 5), bool))
    assert_close(got[:1], wanted, bound)
    assert not got[1].any()


def test_causal_attention(rng, isa):
    for case in all_pairs((1, 7, 200), SHAPES[:4]):
        length, (heads, kv_heads, dim) = case
        seen = length + int(rng.integers(0, 150))
        q, q64 = draw(rng, (2, heads, length, dim))
        kv, k64, v64 = draw_kv(rng, 2, kv_heads, seen, dim)
        visible = np.arange(seen) <= np.arange(seen - length, seen)[:, None]
        wanted, bound = oracle_attention(q64, k64, v64, visible[None, None])
        assert_close(ops.causal_attention(q, kv), wanted, bound, what=case)


def test_rope_norm_quantize(rng):
    for case in all_pairs(list(ROUNDING), (0, 4000, "rows"), SHAPES[:4]):
        dtype, offset, (heads, kv_heads, dim) = case
        qkv, qkv64 = draw(rng, (2, 3, (heads + 2 * kv_heads) * dim), dtype)
        (q_weight, qw64), (k_weight, kw64) = (draw(rng, (dim,), dtype) for _ in range(2))
        starts = rng.integers(0, 5000, 2) if offset == "rows" else np.array([offset, offset])
        given = mx.array(starts.astype(np.int32)) if offset == "rows" else offset
        scales = rng.uniform(0.01, 0.05, 2).astype(np.float32)
        options = HeadOptions(q_weight, k_weight, *map(mx.array, scales), kv_heads, THETA, EPS)
        q, codes = ops.rope_norm_quantize(qkv, given, options)
        parts = qkv64.reshape(2, 3, -1, dim).swapaxes(1, 2)
        positions = starts[:, None] + np.arange(3)
        wanted = oracle_rope_norm(parts[:, :heads], qw64, positions)
        assert_close(q, wanted, 2e-6 * np.abs(wanted).max(), dtype, case)
        assert codes.dtype == mx.int8
        keys = oracle_rope_norm(parts[:, heads : heads + kv_heads], kw64, positions) / scales[0]
        values = parts[:, heads + kv_heads :] / scales[1].astype(np.float64)
        wanted = np.clip(np.concatenate([keys, values], axis=1), -128, 127)
        # A quotient this near to a half may go either way.
        compare.assert_within(codes, wanted, 0.5 + 2e-4, case)


def test_quantization_rounds_half_to_even_and_clamps():
    values = [0.125, 0.375, -0.125, -0.375, 31.75, 40.0, -32.0, -40.0]
    qkv = mx.array([0.0] * 16 + values).reshape(1, 1, 24)
    ones, scale = mx.ones(8), mx.array(0.25)
    _, codes = ops.rope_norm_quantize(qkv, 0, HeadOptions(ones, ones, scale, scale, 1, THETA, EPS))
    assert codes[:, 1].reshape(-1).tolist() == [0, 2, 0, -2, 127, 127, -128, -128]


def test_shapes_that_do_not_fit_are_refused(rng):
    kv, *_ = draw_kv(rng, 1, 2, 4, 8)
    lengths, q = mx.array([4]), mx.zeros((1, 4, 1, 8))
    cases = [
        (mx.zeros((1, 3, 1, 8)), kv, lengths, "3 query heads are no multiple of 2"),
        (mx.zeros((1, 4, 1, 6)), kv, lengths, "head_dim 6"),
        (q, kv._replace(buffer=kv.buffer.astype(mx.float32)), lengths, "int8"),
        (q, kv._replace(buffer=kv.buffer[:, :3]), lengths, r"keys and values \(B, 2 \* n_kv_heads"),
        (q, kv._replace(buffer=kv.buffer[0]), lengths, r"keys and values \(B, 2 \* n_kv_heads"),
        (q, kv, mx.array([4, 4]), "lengths"),
        (q.astype(mx.int32), kv, lengths, "float32, bfloat16 or float16"),
    ]
    for queries, given, seen, message in cases:
        with pytest.raises(ValueError, match=message):
            ops.decode_attention(queries, given, seen)
    with pytest.raises(ValueError, match="doesn't hold"):
        options = HeadOptions(mx.ones(8), mx.ones(8), *(lengths * 1.0,) * 2, 2, THETA, EPS)
        ops.rope_norm_quantize(mx.zeros((1, 1, 32)), 0, options)
