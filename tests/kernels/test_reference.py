"""What the self-test doesn't run of the plain-MLX operations, against float64 NumPy."""

import mlx.core as mx
import numpy as np

from afm_mlx.kernels import KeyValues, attention, dequantize_int8, quantize_int8
from tests.tools import compare
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


def test_attention_over_floats_with_a_mask_per_row(rng):
    for dtype in BOUND:
        q, q64 = draw(rng, (3, 4, 1, 16), dtype)
        (k, k64), (v, v64) = (draw(rng, (3, 2, 9, 16), dtype) for _ in range(2))
        visible = (np.arange(9) < rng.integers(1, 10, 3)[:, None])[:, None, None]
        got = attention(q, KeyValues(mx.concatenate([k, v], axis=1)), mx.array(visible))
        wanted = oracle_attention(q64, k64, v64, visible)
        assert_close(got, wanted, dtype, score_slack(q64, k64), dtype)


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
