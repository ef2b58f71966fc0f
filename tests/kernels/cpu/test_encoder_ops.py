"""Operations of the image encoder: the exact GELU, and attention without a mask."""

import math

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.kernels import KeyValues, dispatch, full_attention, reference
from afm_mlx.kernels.selftest.specs import DTYPES
from tests.tools.cases import all_pairs, draw
from tests.tools.compare import assert_close, assert_same, assert_within


def test_gelu_of_small_and_large_numbers(ops):
    x = np.concatenate([np.linspace(-9, 9, 3001), [-1e4, -30, -1e-9, 0, 1e-9, 30, 1e4]])
    x = x.astype(np.float32)
    wanted = [0.5 * n * math.erfc(-n / math.sqrt(2)) for n in x.astype(float)]
    got = ops.gelu(mx.array(x))
    assert_within(got, np.array(wanted), 4e-7 * np.maximum(1, np.abs(x)))
    assert mx.isnan(ops.gelu(mx.array(math.nan))).item()
    assert ops.gelu(mx.array(math.inf)).item() == math.inf


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_of_views_and_of_any_number_of_axes(ops, rng, dtype):
    """On each side of a piece of work."""
    for shape in ((), (0,), (3, 4096), (5, 7, 300)):
        x = draw(rng, shape, dtype)
        got = ops.gelu(x)
        assert (got.shape, got.dtype) == (x.shape, dtype)
        assert_close(
            got, reference.gelu(x.astype(mx.float32)), 1e-2 if dtype != mx.float32 else 1e-6
        )
    x = draw(rng, (60, 90), dtype)
    assert_same(ops.gelu(x.T), ops.gelu(x).T)


def test_every_query_sees_all_tokens(rng, isas):
    """On each side of the rows from which keys are turned, of a block of keys, and of turned dimensions."""
    for _ in isas():
        for batch, (heads, kv_heads), queries, tokens, dim in all_pairs(
            (1, 3), ((4, 2), (3, 3)), (1, 31, 32, 63, 64, 200), (1, 63, 65, 130), (16, 64, 80, 160)
        ):
            q = draw(rng, (batch, heads, queries, dim))
            kv = KeyValues(draw(rng, (batch, 2 * kv_heads, tokens, dim)))
            assert_close(full_attention(q, kv), reference.attention(q, kv, None), 1e-5)
        # Views, such as parts of one projection.
        qkv = draw(rng, (2, 70, 9, 16)).swapaxes(1, 2)
        q, kv = qkv[:, :3], KeyValues(qkv[:, 3:])
        assert_close(full_attention(q, kv), reference.attention(q, kv, None), 1e-5)


def test_attention_to_all_tokens_without_a_kernel(rng):
    q, kv = draw(rng, (2, 4, 9, 16)), KeyValues(draw(rng, (2, 4, 20, 16)))
    with dispatch.force("reference"):
        assert_same(full_attention(q, kv), reference.attention(q, kv, None))
