"""AdamW, schedules and the average of weights against float64."""

import math

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

from afm_mlx.training.optimizer import AdamW, averaged, learning_rate_schedule, scaled_to_norm


@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_cosine_after_a_linear_warm_up(rng, warmup):
    peak, final = rng.uniform(1e-4, 1e-2), rng.uniform(0, 1e-4)
    schedule = learning_rate_schedule(peak, 20, warmup, "cosine", final)
    for t in range(25):
        if t < warmup:
            expected = peak * (t + 1) / (warmup + 1)
        else:
            done = min(1, (t - warmup) / (20 - warmup))
            expected = final + (peak - final) * (1 + math.cos(math.pi * done)) / 2
        assert schedule(mx.array(t, mx.uint64)).item() == pytest.approx(
            expected, rel=1e-4, abs=1e-9
        )


@pytest.mark.parametrize("warmup", [0, 3])
def test_a_constant_after_a_linear_warm_up(warmup):
    schedule = learning_rate_schedule(0.5, 20, warmup, "constant")
    rates = [schedule(mx.array(t, mx.uint64)).item() for t in range(20)]
    expected = [0.5 * min(1, (t + 1) / (warmup + 1)) for t in range(20)]
    assert rates == pytest.approx(expected)


def float64_adamw(weight, gradients, rate, decay):
    m = v = np.zeros_like(weight)
    for t, g in enumerate(gradients, start=1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        step = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        weight = weight * (1 - rate * decay) - rate * step
    return weight


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adamw_is_exact_for_weights_of_any_type(rng, dtype, decay):
    """Steps of 1e-4 are far below bfloat16's 8 bits; the master copy keeps them."""
    start = mx.array(rng.normal(size=(5, 3)), dtype=dtype)
    parameters = {"layers": [{}, {"weight": start}]}
    optimizer = AdamW(1e-4, decay)
    optimizer.init(parameters)
    gradients = rng.normal(size=(40, 5, 3)).astype(np.float32)
    for gradient in gradients:
        tree = {"layers": [{}, {"weight": mx.array(gradient)}]}
        parameters = optimizer.apply_gradients(tree, parameters)
    start = np.array(start.astype(mx.float32), np.float64)
    expected = float64_adamw(start, gradients.astype(np.float64), 1e-4, decay)
    exact = optimizer.exact(parameters)["layers"][1]["weight"]
    assert exact.dtype == mx.float32
    np.testing.assert_allclose(np.array(exact) - start, expected - start, rtol=2e-2, atol=1e-5)
    weight = parameters["layers"][1]["weight"]
    assert weight.dtype == dtype
    assert mx.array_equal(weight, exact.astype(dtype))


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.9999])
def test_the_average_has_no_bias(rng, decay):
    weights = rng.normal(size=(30, 4))
    average = {"w": mx.array(rng.normal(size=4), dtype=mx.float32)}  # the start has no part in it
    for t, weight in enumerate(weights, start=1):
        now = {"w": mx.array(weight, dtype=mx.float32)}
        average = averaged(average, now, decay, mx.array(t, mx.uint64))
        shares = decay ** np.arange(t - 1, -1, -1.0)
        expected = (shares[:, None] * weights[:t]).sum(0) / shares.sum()
        np.testing.assert_allclose(average["w"], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("limit", [0.01, 1e6, None])
def test_the_norm_is_that_of_all_gradients_together(rng, limit):
    gradients = {"a": rng.normal(size=(3, 4)), "b": [rng.normal(size=5)]}
    norm = math.sqrt((gradients["a"] ** 2).sum() + (gradients["b"][0] ** 2).sum())
    clipped, got = scaled_to_norm(tree_map(mx.array, gradients), limit)
    assert got.item() == pytest.approx(norm, rel=1e-5)
    factor = min(1, limit / norm) if limit else 1
    np.testing.assert_allclose(clipped["a"], gradients["a"] * factor, rtol=1e-4)
    np.testing.assert_allclose(clipped["b"][0], gradients["b"][0] * factor, rtol=1e-4)
