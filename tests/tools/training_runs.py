"""What tests of whole training runs share."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from afm_mlx.adapters.lora import add_lora, lora_tensors, save_lora
from afm_mlx.loading.load import load
from afm_mlx.training.loop.trainer import Stepped
from afm_mlx.training.loop.training_options import TrainingOptions

OPTIONS = TrainingOptions(iters=6, learning_rate=5e-3, steps_per_eval=3, save_every=2, seed=3)


def parameters(folder):
    return dict(tree_flatten(load(folder)[0].parameters()))


class Break(Exception):
    """Ends a run early, as a crash does."""


def break_at(step):
    """Make a function for `on_event` that raises `Break` after a step."""

    def on_event(event):
        if isinstance(event, Stepped) and event.step == step:
            raise Break

    return on_event


class Watcher:
    """Keeps what a run tells."""

    def __init__(self):
        self.plan, self.events = None, []

    def hooks(self):
        return {"on_plan": lambda plan: setattr(self, "plan", plan), "on_event": self.events.append}

    def losses(self, kind, field):
        return [getattr(event, field) for event in self.events if isinstance(event, kind)]


def random_adapter(folder, path, rng, rank=4, size=0.1, keys=None):
    """An adapter of a model's folder that changes what it says."""
    base = add_lora(load(folder)[0], rank, 2.0, keys)
    drawn = [
        (name, mx.array(rng.normal(0, size, array.shape).astype(np.float32)))
        for name, array in lora_tensors(base).items()
    ]
    base.load_weights(drawn, strict=False)
    save_lora(base, path, folder)
    return path
