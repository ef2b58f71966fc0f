"""A tiny model, its data and its loss, for tests of the training loop; and a process that trains them."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import afm_mlx  # noqa: F401  before mlx.core, so that a process of its own has the same BLAS

# isort: split
import mlx.core as mx
import mlx.nn as nn

from afm_mlx.training.data.batches import Batch
from afm_mlx.training.loop.run_folder import RunFolder
from afm_mlx.training.loop.trainer import train
from afm_mlx.training.loop.training_options import TrainingOptions

VOCABULARY = 13


class ToyBlock(nn.Module):
    def __init__(self, dims: int, dropout: float):
        super().__init__()
        self.up = nn.Linear(dims, 2 * dims)
        self.down = nn.Linear(2 * dims, dims)
        self.dropout = nn.Dropout(dropout)

    def __call__(self, x: mx.array) -> mx.array:
        return x + self.down(self.dropout(nn.relu(self.up(x))))


class ToyModel(nn.Module):
    """Predicts each token's successor from the token alone. Weights come from `seed`."""

    def __init__(self, dims: int = 6, dropout: float = 0.0, seed: int = 0):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dims)
        self.layers = [ToyBlock(dims, dropout) for _ in range(2)]
        self.norm = nn.RMSNorm(dims)
        rng = np.random.default_rng(seed)
        self.apply(lambda p: mx.array(rng.normal(0, 0.5, p.shape), dtype=mx.float32))

    def __call__(self, inputs: mx.array) -> mx.array:
        x = self.embedding(inputs)
        for layer in self.layers:
            x = layer(x)
        return self.embedding.as_linear(self.norm(x))


def toy_loss(model: nn.Module, batch: Batch) -> mx.array:
    logits = model(batch.inputs).reshape(-1, VOCABULARY)[batch.positions]
    return (nn.losses.cross_entropy(logits, batch.labels) * batch.weights).sum()


class ToyBatches:
    """Random tokens whose successors follow a rule. A function of the seed and the number of a batch."""

    unit = "tokens"

    def __init__(self, seed: int = 0, rows: int = 3, length: int = 8, per_epoch: int = 4):
        self.seed, self.rows, self.length, self.per_epoch = seed, rows, length, per_epoch

    def __call__(self, step: int) -> Batch:
        rng = np.random.default_rng([self.seed, step])
        tokens = rng.integers(0, VOCABULARY, (self.rows, self.length))
        chosen = rng.permutation(tokens.size)[: tokens.size - 2]
        weights = rng.uniform(0.1, 2, chosen.size)
        weights[0] = 0
        return Batch(
            mx.array(tokens, dtype=mx.int32),
            None,
            mx.array(chosen, dtype=mx.int32),
            mx.array((3 * tokens.reshape(-1)[chosen] + 1) % VOCABULARY, dtype=mx.int32),
            mx.array(weights, dtype=mx.float32),
        )


def joined(batches: list[Batch]) -> Batch:
    sizes = np.cumsum([0] + [batch.inputs.size for batch in batches])
    positions = [b.positions + int(size) for b, size in zip(batches, sizes[:-1], strict=True)]
    others = {
        name: mx.concatenate([getattr(batch, name) for batch in batches])
        for name in ("inputs", "labels", "weights")
    }
    return Batch(segments=None, positions=mx.concatenate(positions), **others)


def toy_run(
    folder: Any,
    iters: int,
    on_event: Any = None,
    resume: bool = False,
    stopping: Any = None,
    **options: Any,
) -> Any:
    """Train a toy with everything that a checkpoint has to keep; returns the model and the outcome."""
    defaults = {
        "learning_rate": 0.02,
        "warmup_iters": 2,
        "grad_accumulation_steps": 2,
        "ema_decay": 0.8,
        "steps_per_report": 3,
        "steps_per_eval": 5,
        "save_every": 4,
    }
    chosen = TrainingOptions(iters, **(defaults | options))
    batches = ToyBatches(1), ToyBatches(2)
    with (RunFolder.open if resume else RunFolder.create)(folder, {"iters": iters}) as run:
        # Other weights where there is a checkpoint: all of them have to come from there.
        model = ToyModel(dropout=0.2, seed=99 if run.steps() else 1)
        outcome = train(model, toy_loss, batches[0], chosen, run, batches[1], on_event, stopping)
    return model, outcome


if __name__ == "__main__":
    # A checkpoint at every step, until it is done or killed: folder, steps, "resume" or "start".
    toy_run(
        sys.argv[1],
        int(sys.argv[2]),
        lambda event: print(type(event).__name__, flush=True),
        resume=sys.argv[3] == "resume",
        save_every=1,
    )
