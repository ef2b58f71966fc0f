"""AdamW, schedules and the average of weights against float64."""

import math

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.errors import ConfigError
from afm_mlx.training.loop.optimizer import (
    AdamW,
    averaged,
    learning_rate_schedule,
    mlx_lm_schedule,
)
from afm_mlx.training.loop.training_options import TrainingOptions


def test_cosine_after_a_linear_warm_up(rng):
    for warmup in [0, 1, 5]:
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


def test_a_constant_after_a_linear_warm_up():
    for warmup in [0, 3]:
        schedule = learning_rate_schedule(0.5, 20, warmup, "constant")
        rates = [schedule(mx.array(t, mx.uint64)).item() for t in range(20)]
        expected = [0.5 * min(1, (t + 1) / (warmup + 1)) for t in range(20)]
        assert rates == pytest.approx(expected)


def test_schedules_in_mlx_lms_words():
    for values in [
        {"name": "cosine_decay", "arguments": [3e-3, 12, 1e-4], "warmup": 5, "warmup_init": 1e-5},
        {"name": "exponential_decay", "arguments": [0.1, 0.9]},
        {"name": "step_decay", "arguments": [0.1, 0.5, 3], "warmup": 1},
        {"name": "linear_schedule", "arguments": [0.1, 0.01, 7]},
    ]:
        build_schedule = pytest.importorskip("mlx_lm.tuner.utils").build_schedule
        theirs = build_schedule(values)
        options = TrainingOptions(iters=20, learning_rate=1.0, lr_schedule=values)
        for schedule in (mlx_lm_schedule(values), options.rates):
            for t in range(20):
                step = mx.array(t, mx.uint64)
                assert float(schedule(step)) == pytest.approx(float(theirs(step)), rel=1e-5)


def test_schedules_that_there_are_not():
    for values, message in [
        ({}, "name is None; allowed are cosine_decay"),
        ({"name": "cosine", "arguments": [1.0]}, "name is 'cosine'"),
        ({"name": "cosine_decay"}, "arguments is None"),
        ({"name": "cosine_decay", "arguments": []}, "a list of numbers"),
        ({"name": "cosine_decay", "arguments": ["1e-5", 10]}, "a list of numbers"),
        ({"name": "cosine_decay", "arguments": [1e-5]}, "arguments are .* missing"),
        ({"name": "step_decay", "arguments": [1, 2, 3], "warmup": 1.5}, "warmup is 1.5"),
        ({"name": "step_decay", "arguments": [1, 2, 3], "warmup": 2, "warmup_init": -1}, "is -1"),
        ({"name": "step_decay", "arguments": [1, 2, 3], "cycles": 2}, "keys is .*cycles"),
    ]:
        with pytest.raises(ConfigError, match=f"lr_schedule: .*{message}"):
            TrainingOptions(iters=20, learning_rate=1.0, lr_schedule=values)


def float64_adamw(weight, gradients, rate, decay, betas=(0.9, 0.999), eps=1e-8):
    m = v = np.zeros_like(weight)
    b1, b2 = betas
    for t, g in enumerate(gradients, start=1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        step = (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
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


def test_adamw_takes_other_settings(rng):
    start = rng.normal(size=(5, 3))
    betas, eps = (float(rng.uniform(0, 0.9)), float(rng.uniform(0.5, 0.99))), 0.1
    optimizer = AdamW(1e-2, 0.01, betas, eps)
    parameters = {"w": mx.array(start, dtype=mx.float32)}
    optimizer.init(parameters)
    gradients = rng.normal(size=(20, 5, 3))
    for gradient in gradients:
        tree = {"w": mx.array(gradient, dtype=mx.float32)}
        parameters = optimizer.apply_gradients(tree, parameters)
    expected = float64_adamw(start, gradients, 1e-2, 0.01, betas, eps)
    np.testing.assert_allclose(parameters["w"], expected, atol=1e-5)


def test_the_average_has_no_bias(rng):
    for decay in [0.5, 0.9, 0.9999]:
        weights = rng.normal(size=(30, 4))
        average = {
            "w": mx.array(rng.normal(size=4), dtype=mx.float32)
        }  # the start has no part in it
        for t, weight in enumerate(weights, start=1):
            now = {"w": mx.array(weight, dtype=mx.float32)}
            average = averaged(average, now, decay, mx.array(t, mx.uint64))
            shares = decay ** np.arange(t - 1, -1, -1.0)
            expected = (shares[:, None] * weights[:t]).sum(0) / shares.sum()
            np.testing.assert_allclose(average["w"], expected, atol=1e-5, rtol=0)
