"""SoftTopK: its sum, its gradient against finite differences in float64, and the masks that it makes."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.soft_top_k import soft_top_k, to_channels, top_k_mask, training_mask
from afm_mlx.errors import ConfigError


def oracle(z: np.ndarray, kept: int, temperature: float) -> np.ndarray:
    """SoftTopK of one row in float64, by 200 bisections between bounds that hold any tau."""
    low, high = z.min() - 50 * temperature, z.max() + 50 * temperature
    for _ in range(200):
        tau = (low + high) / 2
        soft = 1 / (1 + np.exp(-(z - tau) / temperature))
        low, high = (tau, high) if soft.sum() > kept else (low, tau)
    return soft


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(35)


@pytest.mark.parametrize(("n", "kept"), [(2, 1), (16, 15), (100, 25), (6656, 3328), (24576, 6656)])
@pytest.mark.parametrize(("spread", "temperature"), [(1e-4, 1.0), (1.0, 1.0), (8.0, 0.1)])
def test_the_sum_is_exact_and_numbers_equal_the_oracle(rng, n, kept, spread, temperature):
    z = rng.normal(0, spread, (2, n)).astype(np.float32)
    soft = np.array(soft_top_k(mx.array(z), kept, temperature), np.float64)
    assert soft.min() >= 0
    assert soft.max() <= 1
    np.testing.assert_allclose(soft.sum(-1), kept, rtol=0, atol=1e-5)
    for row, numbers in zip(z, soft, strict=True):
        expected = oracle(row.astype(np.float64), kept, temperature)
        np.testing.assert_allclose(numbers, expected, atol=5e-6)


@pytest.mark.parametrize(("n", "kept"), [(2, 1), (12, 3), (64, 48)])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_gradient_equals_finite_differences(rng, n, kept, temperature):
    z, weights = rng.normal(0, 1.5, (2, n)).astype(np.float32)

    def loss(scores: mx.array) -> mx.array:
        return (soft_top_k(scores, kept, temperature) * mx.array(weights)).sum()

    found = np.array(mx.grad(loss)(mx.array(z)), np.float64)
    z64, step = z.astype(np.float64), 1e-5
    shifts = step * np.eye(n)
    expected = [
        (oracle(z64 + s, kept, temperature) - oracle(z64 - s, kept, temperature)) @ weights
        for s in shifts
    ]
    np.testing.assert_allclose(found, np.array(expected) / (2 * step), atol=1e-6)
    compiled = mx.compile(mx.grad(loss))(mx.array(z))
    np.testing.assert_allclose(np.array(compiled), found, atol=1e-6)


def test_rows_are_independent_and_saturated_rows_have_finite_gradients():
    z = mx.array([[1e4, 1e4, -1e4, -1e4], [0.3, -0.2, 0.9, 0.1]])
    gradient = mx.grad(lambda s: (soft_top_k(s, 2) * mx.arange(4)).sum())(z)
    alone = mx.grad(lambda s: (soft_top_k(s, 2) * mx.arange(4)).sum())(z[1:])
    assert mx.isfinite(gradient).all().item()
    assert (gradient[0] == 0).all().item()
    np.testing.assert_allclose(np.array(gradient[1:]), np.array(alone), atol=1e-7)


@pytest.mark.parametrize("spread", [0.0, 1e-3, 30.0])
@pytest.mark.parametrize("kept", [1, 7, 31, 32])
def test_masks_keep_exactly_so_many(rng, kept, spread):
    z = mx.array(rng.normal(0, spread, (3, 5, 32)).astype(np.float32))
    soft, hard = training_mask(z, kept), top_k_mask(z, kept)
    assert ((soft > 0).sum(-1) == kept).all().item()
    assert (hard.sum(-1) == kept).all().item()
    assert hard.dtype == mx.bool_
    assert ((soft > 0) == hard).all().item()
    ranks = np.argsort(-np.array(z), axis=-1, kind="stable")[..., :kept]
    assert np.take_along_axis(np.array(hard), ranks, -1).all()


def test_all_kept_are_ones_without_gradient():
    z = mx.array([0.5, -3.0, 2.0])
    assert (soft_top_k(z, 3) == 1).all().item()
    assert (mx.grad(lambda s: training_mask(s, 3).sum())(z) == 0).all().item()


def test_the_gradient_of_a_training_mask_reaches_scores_that_it_drops():
    z = mx.array([0.2, 0.1, 0.0, -0.1])
    gradient = mx.grad(lambda s: training_mask(s, 2)[0])(z)
    assert gradient[0].item() > 0
    assert (gradient[1:] < 0).all().item()


def test_groups_share_a_number():
    mask = mx.array([[0.25, 1.0], [0.0, 0.5]])
    assert to_channels(mask, 1) is mask
    expected = [[0.25] * 3 + [1.0] * 3, [0.0] * 3 + [0.5] * 3]
    assert to_channels(mask, 3).tolist() == expected


@pytest.mark.parametrize("kept", [0, 5, -1])
def test_an_impossible_number_is_refused(kept):
    for call in (soft_top_k, training_mask, top_k_mask):
        with pytest.raises(ConfigError, match=f"{kept} of 4 scores"):
            call(mx.zeros(4), kept)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("inf"), float("nan")])
def test_an_impossible_temperature_is_refused(temperature):
    with pytest.raises(ConfigError, match="temperature"):
        soft_top_k(mx.zeros(4), 2, temperature)
