"""The plain-MLX operations against a float64 NumPy oracle; what every later kernel will be held to."""

import mlx.core as mx
import numpy as np

from afm_mlx.kernels import KeyValues, attention, dequantize_int8, quantize_int8, rope_norm
from tests.tools import compare
from tests.tools.cases import all_pairs
from tests.tools.cases import draw as draw_array
from tests.tools.compare import exact

# A result of `dtype` is rounded once, and comes from float32 sums.
BOUND = {mx.float32: 2e-5, mx.bfloat16: 2.0**-7, mx.float16: 2.0**-9}


def draw(rng, shape, dtype):
    """Random numbers that `dtype` holds exactly, in MLX and in float64."""
    array = draw_array(rng, shape, dtype)
    return array, exact(array)


def assert_close(got, wanted, dtype, slack, what):
    assert got.dtype == dtype
    compare.assert_close(got, wanted, BOUND[dtype] * slack, what, least=1)


def score_slack(q, k):
    """MLX's CPU backend rounds scores to `dtype`; softmax turns that into a relative error."""
    group = q.shape[1] // k.shape[1]
    scores = q @ np.repeat(k, group, axis=1).swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    return 2 + np.abs(scores).max()


def oracle_attention(q, k, v, visible):
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


SHAPES = ((16, 2, 1, 33, 128), (4, 1, 7, 7, 12), (6, 3, 5, 40, 64), (2, 2, 1, 1, 2))


def test_attention_over_int8_codes(rng):
    for case in all_pairs(list(BOUND), SHAPES):
        dtype, (heads, kv_heads, length, seen, dim) = case
        q, q64 = draw(rng, (2, heads, length, dim), dtype)
        codes = rng.integers(-128, 128, (2, 2, kv_heads, seen, dim)).astype(np.int8)
        scales = rng.uniform(0.005, 0.03, 2).astype(np.float32)
        kv = KeyValues(mx.array(np.concatenate(codes, axis=1)), *map(mx.array, scales))
        visible = np.arange(seen) <= np.arange(seen - length, seen)[:, None]
        k64, v64 = (codes[i] * np.float64(scales[i]) for i in range(2))
        wanted = oracle_attention(q64, k64, v64, visible)
        for mask in ("causal" if length > 1 else None, mx.array(visible)):
            assert_close(attention(q, kv, mask), wanted, dtype, score_slack(q64, k64), case)


def test_attention_over_floats_with_a_mask_per_row(rng):
    for dtype in BOUND:
        q, q64 = draw(rng, (3, 4, 1, 16), dtype)
        (k, k64), (v, v64) = (draw(rng, (3, 2, 9, 16), dtype) for _ in range(2))
        visible = (np.arange(9) < rng.integers(1, 10, 3)[:, None])[:, None, None]
        got = attention(q, KeyValues(mx.concatenate([k, v], axis=1)), mx.array(visible))
        wanted = oracle_attention(q64, k64, v64, visible)
        assert_close(got, wanted, dtype, score_slack(q64, k64), dtype)


def test_rope_on_adjacent_pairs_then_norm(rng):
    for case in all_pairs(list(BOUND), (0, 17, "rows"), (2, 12, 128), (100.0, 500000.0)):
        dtype, offset, dim, theta = case
        (x, x64), (weight, weight64) = (draw(rng, s, dtype) for s in ((2, 3, 5, dim), (dim,)))
        starts = rng.integers(0, 300, 2) if offset == "rows" else np.array([offset, offset])
        positions = (starts[:, None] + np.arange(5))[..., None]
        angles = positions * theta ** (-np.arange(0, dim, 2) / dim)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        even, odd = x64[..., 0::2], x64[..., 1::2]
        turned = np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x64.shape)
        norm = np.sqrt((turned**2).mean(-1, keepdims=True) + 1e-5)
        mlx_offset = mx.array(starts.astype(np.int32)) if offset == "rows" else offset
        got = rope_norm(x, weight, mlx_offset, theta, 1e-5)
        assert got.dtype == dtype
        # Two operations round in turn, and float32 angles at position 300 are off by 300 eps.
        bound = 4 * BOUND[dtype] + 300 * 2**-23
        compare.assert_close(got, turned / norm * weight64, bound, case)


def test_quantization_rounds_half_to_even_and_clamps(rng):
    values = [0.125, 0.375, -0.125, -0.375, 31.75, 40.0, -32.0, -40.0]
    for dtype in BOUND:
        codes = quantize_int8(mx.array(values).astype(dtype), mx.array(0.25))
        assert codes.dtype == mx.int8
        assert codes.tolist() == [0, 2, 0, -2, 127, 127, -128, -128]
        x, x64 = draw(rng, (64, 7), dtype)
        scale = np.float32(rng.uniform(0.01, 0.05))
        codes = quantize_int8(x, mx.array(scale))
        back = dequantize_int8(codes, mx.array(scale), mx.float32)
        inside = np.abs(x64) < 127 * scale
        compare.assert_within(exact(back)[inside], x64[inside], scale / 2 * (1 + 1e-5), dtype)
        assert dequantize_int8(codes, mx.array(scale), dtype).dtype == dtype
