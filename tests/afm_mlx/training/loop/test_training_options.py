"""Options of the training loop, and its learning rates against float64."""

import math

import mlx.core as mx
import pytest

from afm_mlx.errors import ConfigError
from afm_mlx.training.loop.training_options import TrainingOptions
from tests.tools.cases import each


@each(
    ("name", "value"),
    [
        ("iters", 0), ("learning_rate", 0.0), ("learning_rate", math.nan), ("warmup_iters", 10),
        ("schedule", "linear"), ("final_learning_rate", -1e-4), ("grad_accumulation_steps", 0),
        ("clip_grad_norm", 0.0), ("ema_decay", 1.0), ("steps_per_report", 0), ("steps_per_eval", 0),
        ("val_batches", 0), ("save_every", 0), ("patience", 0), ("seed", -1), ("weight_decay", -0.1),
        ("betas", (0.9, 1.0)), ("eps", 0.0), ("clear_cache_threshold", -1),
    ],
)  # fmt: skip
def test_one_out_of_range_is_named(name, value):
    with pytest.raises(ConfigError, match=f"^{name} is .*; allowed are "):
        TrainingOptions(**{"iters": 10, "learning_rate": 0.1, name: value})


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
