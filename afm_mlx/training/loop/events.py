"""Events that a training run reports while it runs, for progress bars and metrics."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias


@dataclass(frozen=True)
class Resumed:
    """The run goes on after the checkpoint of `step`."""

    step: int


@dataclass(frozen=True)
class Stepped:
    """One step is done.

    Args:
        step: number of the step, from 1.
        loss: weighted mean loss of its batch, before its update.
    """

    step: int
    loss: float


@dataclass(frozen=True)
class Report:
    """A line of metrics.jsonl.

    Args:
        step: the step after which this is reported.
        loss: weighted mean loss over the steps since the report before.
        learning_rate: learning rate of this step.
        grad_norm: global norm of this step's gradient, before clipping.
        tokens: number of targets that were trained on since step 1.
        tokens_per_second: speed since the report before, without the time of evaluation and saving.
        peak_memory: most bytes that MLX has held in this process.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    tokens_per_second: float
    peak_memory: int


@dataclass(frozen=True)
class Validation:
    """A line of metrics.jsonl.

    Args:
        step: number of the step after which the weights were evaluated; 0 before the first.
        valid_loss: weighted mean over the validation batches.
        valid_perplexity: exponential of `valid_loss`; meaningful where that is a cross-entropy.
    """

    step: int
    valid_loss: float
    valid_perplexity: float


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint was written."""

    step: int
    path: Path


@dataclass(frozen=True)
class Testing:
    """The test split is about to be measured.

    Args:
        what: what is measured, such as "without the adapter"; None for what was trained.
    """

    __test__ = False  # not one of pytest's

    what: str | None


Event: TypeAlias = Resumed | Stepped | Report | Validation | CheckpointSaved | Testing
