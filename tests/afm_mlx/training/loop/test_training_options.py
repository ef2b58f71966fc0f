"""Options of the training loop."""

import math

import pytest

from afm_mlx.errors import ConfigError
from afm_mlx.training.loop.training_options import TrainingOptions
from tests.tools.cases import each


@each(
    ("name", "value"),
    [
        ("iters", 0),
        ("learning_rate", 0.0),
        ("learning_rate", math.nan),
        ("warmup_iters", 10),
        ("schedule", "linear"),
        ("final_learning_rate", -1e-4),
        ("grad_accumulation_steps", 0),
        ("clip_grad_norm", 0.0),
        ("ema_decay", 1.0),
        ("steps_per_report", 0),
        ("steps_per_eval", 0),
        ("val_batches", 0),
        ("save_every", 0),
        ("patience", 0),
        ("seed", -1),
        ("weight_decay", -0.1),
        ("betas", (0.9, 1.0)),
        ("eps", 0.0),
        ("clear_cache_threshold", -1),
    ],
)
def test_one_out_of_range_is_named(name, value):
    with pytest.raises(ConfigError, match=f"^{name} is .*; allowed are "):
        TrainingOptions(**{"iters": 10, "learning_rate": 0.1, name: value})
