"""AdamW, schedules and the average of weights against float64."""

import math

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.errors import ConfigError
from afm_mlx.training.loop.step import AdamW, averaged
from afm_mlx.training.loop.training_options import TrainingOptions
from tests.tools.cases import each


def rates(schedule, steps):
    return [float(schedule(mx.array(t, mx.uint64))) for t in range(steps)]


@pytest.mark.parametrize("warmup", [0, 1, 5])
@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_a_rate_after_a_linear_warm_up(rng, warmup, schedule):
    peak, final = rng.uniform(1e-4, 1e-2), rng.uniform(0, 1e-4)
    expected = []
    for t in range(25):
        done = min(1, (t - warmup) / (20 - warmup)) if schedule == "cosine" else 0
        after = final + (peak - final) * (1 + math.cos(math.pi * done)) / 2
        expected.append(peak * (t + 1) / (warmup + 1) if t < warmup else after)
    options = TrainingOptions(20, peak, warmup, schedule, final)
    assert rates(options.rates, 25) == pytest.approx(expected, rel=1e-4, abs=1e-9)


@pytest.mark.parametrize(
    "values",
    [
        {"name": "cosine_decay", "arguments": [3e-3, 12, 1e-4], "warmup": 5, "warmup_init": 1e-5},
        {"name": "exponential_decay", "arguments": [0.1, 0.9]},
        {"name": "step_decay", "arguments": [0.1, 0.5, 3], "warmup": 1},
        {"name": "linear_schedule", "arguments": [0.1, 0.01, 7]},
    ],
)
def test_a_schedule_in_mlx_lms_words(values):
    theirs = pytest.importorskip("mlx_lm.tuner.utils").build_schedule(values)
    options = TrainingOptions(iters=20, learning_rate=1.0, lr_schedule=values)
    assert rates(options.rates, 20) == pytest.approx(rates(theirs, 20), rel=1e-5)


@each(
    ("values", "message"),
    [
        ({}, "name is None; allowed are cosine_decay"),
        ({"name": "cosine", "arguments": [1.0]}, "name is 'cosine'"),
        ({"name": "cosine_decay"}, "arguments is None"),
        ({"name": "cosine_decay", "arguments": []}, "a list of numbers"),
        ({"name": "cosine_decay", "arguments": ["1e-5", 10]}, "a list of numbers"),
        ({"name": "cosine_decay", "arguments": [1e-5]}, "arguments are .* missing"),
        ({"name": "step_decay", "arguments": [1, 2, 3], "warmup": 1.5}, "warmup is 1.5"),
        ({"name": "step_decay", "arguments": [1, 2, 3], "warmup": 2, "warmup_init": -1}, "is -1"),
        ({"name": "step_decay", "arguments": [1, 2, 3], "cycles": 2}, "keys is .*cycles"),
    ],
)
def test_a_schedule_that_there_is_not(values, message):
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
@pytest.mark.parametrize(
    "settings", [(1e-4, 0.0), (1e-4, 0.1), (1e-2, 0.01, (0.7, 0.9), 0.1)], ids=str
)
def test_adamw_is_exact_for_weights_of_any_type(rng, dtype, settings):
    """Steps of 1e-4 are far below bfloat16's 8 bits; the master copy keeps them."""
    start = mx.array(rng.normal(size=(5, 3)), dtype=dtype)
    parameters = {"layers": [{}, {"weight": start}]}
    optimizer = AdamW(*settings)
    optimizer.init(parameters)
    gradients = rng.normal(size=(40, 5, 3)).astype(np.float32)
    for gradient in gradients:
        tree = {"layers": [{}, {"weight": mx.array(gradient)}]}
        parameters = optimizer.apply_gradients(tree, parameters)
    start = np.array(start.astype(mx.float32), np.float64)
    expected = float64_adamw(start, gradients.astype(np.float64), *settings)
    exact = optimizer.exact(parameters)["layers"][1]["weight"]
    assert exact.dtype == mx.float32
    np.testing.assert_allclose(np.array(exact) - start, expected - start, rtol=2e-2, atol=1e-5)
    weight = parameters["layers"][1]["weight"]
    assert weight.dtype == dtype
    assert mx.array_equal(weight, exact.astype(dtype))


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.9999])
def test_the_average_has_no_bias(rng, decay):
    weights = rng.normal(size=(30, 4))
    average = mx.array(rng.normal(size=4), dtype=mx.float32)  # the start has no part in it
    for t, weight in enumerate(weights, start=1):
        now = mx.array(weight, dtype=mx.float32)
        average = averaged(average, now, decay, mx.array(t, mx.uint64))
        shares = decay ** np.arange(t - 1, -1, -1.0)
        expected = (shares[:, None] * weights[:t]).sum(0) / shares.sum()
        np.testing.assert_allclose(average, expected, atol=1e-5, rtol=0)
