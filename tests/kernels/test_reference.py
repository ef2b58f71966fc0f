"""Cases of the plain-MLX operations that the self-test doesn't run, against float64 NumPy."""

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.kernels import KeyValues, attention, dequantize_int8, quantize_int8, rope_norm
from afm_mlx.kernels.selftest import oracle
from tests.tools.cases import draw
from tests.tools.compare import assert_close, assert_within, exact

# A result is rounded once to its type, and comes from float32 sums.
BOUND = {mx.float32: 2e-5, mx.bfloat16: 2.0**-7, mx.float16: 2.0**-9}


@pytest.mark.parametrize("dtype", BOUND)
def test_attention_over_floats_with_a_mask_per_row(rng, dtype):
    queries, kv = draw(rng, (3, 4, 1, 16), dtype), KeyValues(draw(rng, (3, 4, 9, 16), dtype))
    lengths = mx.array(rng.integers(1, 10, 3))
    visible = (mx.arange(9) < lengths[:, None])[:, None, None]
    got, wanted = attention(queries, kv, visible), oracle.decode_attention(queries, kv, lengths)
    assert got.dtype == dtype
    # MLX's CPU backend rounds scores to the type; softmax turns that into a relative error.
    assert_close(got, wanted, 8 * BOUND[dtype], least=1)


def test_a_position_for_every_token_is_that_of_the_token_alone(rng):
    x, weight, offsets = (
        draw(rng, (2, 3, 4, 8)),
        draw(rng, (8,)),
        mx.array([[5, 6, 6, 9], [0, 1, 2, 2]]),
    )
    together = rope_norm(x, weight, offsets, 1e4, 1e-5)
    for t in range(4):
        alone = rope_norm(x[:, :, t : t + 1], weight, offsets[:, t], 1e4, 1e-5)
        assert_close(together[:, :, t : t + 1], alone, 1e-6, f"token {t}")


@pytest.mark.parametrize("dtype", BOUND)
def test_quantization_rounds_half_to_even_and_clamps(rng, dtype):
    values = mx.array([0.125, 0.375, -0.125, -0.375, 31.75, 40.0, -32.0, -40.0])
    codes = quantize_int8(values.astype(dtype), mx.array(0.25))
    assert codes.dtype == mx.int8
    assert codes.tolist() == [0, 2, 0, -2, 127, 127, -128, -128]
    x, scale = draw(rng, (64, 7), dtype), mx.array(np.float32(rng.uniform(0.03, 0.05)))
    x = mx.clip(x, -126 * scale.astype(dtype), 126 * scale.astype(dtype))
    codes = quantize_int8(x, scale)
    back = dequantize_int8(codes, scale, mx.float32)
    assert_within(back, x, float(exact(scale)) / 2 * (1 + 1e-5))
    assert dequantize_int8(codes, scale, dtype).dtype == dtype
