"""The plain-MLX operations against a float64 NumPy oracle; what every later kernel will be held to."""

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.kernels import KeyValues, attention, dequantize_int8, quantize_int8, rope_norm

# A result of `dtype` is rounded once, and comes from float32 sums.
BOUND = {mx.float32: 2e-5, mx.bfloat16: 2.0**-7, mx.float16: 2.0**-9}


def draw(rng, shape, dtype):
    """Random numbers that `dtype` holds exactly, in MLX and in float64."""
    array = mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)
    return array, np.array(array.astype(mx.float32)).astype(np.float64)


def assert_within(got, wanted, dtype, slack=1.0):
    assert got.dtype == dtype
    error = np.abs(np.array(got.astype(mx.float32)) - wanted).max() / max(1.0, np.abs(wanted).max())
    assert error <= BOUND[dtype] * slack


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


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "length", "seen", "dim"),
    [(16, 2, 1, 33, 128), (4, 1, 7, 7, 12), (6, 3, 5, 40, 64), (2, 2, 1, 1, 2)],
)
def test_attention_over_int8_codes(rng, dtype, heads, kv_heads, length, seen, dim):
    q, q64 = draw(rng, (2, heads, length, dim), dtype)
    codes = rng.integers(-128, 128, (2, 2, kv_heads, seen, dim)).astype(np.int8)
    key_scale, value_scale = np.float32(rng.uniform(0.005, 0.03, 2))
    buffer = mx.array(np.concatenate(codes, axis=1))
    kv = KeyValues(buffer, mx.array(key_scale), mx.array(value_scale))
    visible = np.arange(seen) <= np.arange(seen - length, seen)[:, None]
    wanted = oracle_attention(
        q64, codes[0] * np.float64(key_scale), codes[1] * np.float64(value_scale), visible
    )
    slack = score_slack(q64, codes[0] * np.float64(key_scale))
    for mask in ("causal" if length > 1 else None, mx.array(visible)):
        assert_within(attention(q, kv, mask), wanted, dtype, slack)


@pytest.mark.parametrize("dtype", BOUND)
def test_attention_over_floats_with_a_mask_per_row(rng, dtype):
    q, q64 = draw(rng, (3, 4, 1, 16), dtype)
    k, k64 = draw(rng, (3, 2, 9, 16), dtype)
    v, v64 = draw(rng, (3, 2, 9, 16), dtype)
    lengths = rng.integers(1, 10, 3)
    visible = (np.arange(9) < lengths[:, None])[:, None, None]
    got = attention(q, KeyValues(mx.concatenate([k, v], axis=1)), mx.array(visible))
    wanted = oracle_attention(q64, k64, v64, visible)
    assert_within(got, wanted, dtype, score_slack(q64, k64))


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("offset", [0, 17, "rows"])
@pytest.mark.parametrize("dim", [2, 12, 128])
def test_rope_on_adjacent_pairs_then_norm(rng, dtype, offset, dim):
    x, x64 = draw(rng, (2, 3, 5, dim), dtype)
    weight, weight64 = draw(rng, (dim,), dtype)
    theta = float(rng.choice([100.0, 500000.0]))
    starts = rng.integers(0, 300, 2) if offset == "rows" else np.array([offset, offset])
    angles = (starts[:, None] + np.arange(5))[..., None] * theta ** (-np.arange(0, dim, 2) / dim)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    even, odd = x64[..., 0::2], x64[..., 1::2]
    turned = np.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x64.shape)
    norm = np.sqrt((turned**2).mean(-1, keepdims=True) + 1e-5)
    mlx_offset = mx.array(starts.astype(np.int32)) if offset == "rows" else offset
    got = rope_norm(x, weight, mlx_offset, theta, 1e-5)
    # Two operations round in turn, and float32 angles at position 300 are off by 300 eps.
    wanted = turned / norm * weight64
    error = np.abs(np.array(got.astype(mx.float32)) - wanted).max() / np.abs(wanted).max()
    assert got.dtype == dtype
    assert error <= 4 * BOUND[dtype] + 300 * 2**-23


@pytest.mark.parametrize("dtype", BOUND)
def test_quantization_rounds_half_to_even_and_clamps(rng, dtype):
    scale = mx.array(0.25)
    exact = mx.array([0.125, 0.375, -0.125, -0.375, 31.75, 40.0, -32.0, -40.0]).astype(dtype)
    codes = quantize_int8(exact, scale)
    assert codes.dtype == mx.int8
    assert codes.tolist() == [0, 2, 0, -2, 127, 127, -128, -128]
    x, x64 = draw(rng, (64, 7), dtype)
    scale = np.float32(rng.uniform(0.01, 0.05))
    codes = quantize_int8(x, mx.array(scale))
    back = np.array(dequantize_int8(codes, mx.array(scale), mx.float32))
    inside = np.abs(x64) < 127 * scale
    assert np.abs(back - x64)[inside].max() <= scale / 2 * (1 + 1e-5)
    assert dequantize_int8(codes, mx.array(scale), dtype).dtype == dtype
