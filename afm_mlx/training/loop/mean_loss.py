"""The mean loss of a model over batches, for validation and for the test split."""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.nn as nn

from afm_mlx.errors import TrainingError
from afm_mlx.training.data.batches import Batches
from afm_mlx.training.loop.diagnosis import find_non_finite
from afm_mlx.training.loop.losses import Loss


def mean_loss(
    model: nn.Module,
    loss: Loss,
    batches: Batches,
    count: int = -1,
    progress: Callable[[int, int], None] | None = None,
) -> float:
    """The weighted mean of a loss over the first batches of an epoch, without dropout.

    Args:
        model: a model, which is in eval mode afterwards.
        loss: the loss of one batch.
        batches: the batches to read.
        count: number of batches, from the first of an epoch; -1 for all of an epoch.
        progress: called with batches done and batches in all.

    Raises:
        TrainingError: when the loss is not finite; names the batch and the layer.
    """
    model.eval()
    total = weight = 0.0
    n = batches.per_epoch if count == -1 else min(count, batches.per_epoch)
    for index in range(n):
        batch = batches(index)
        value = loss(model, batch).item()
        if not math.isfinite(value):
            cause = find_non_finite(model, loss, [batch])
            raise TrainingError(f"The loss of batch {index} is {value:g}: {cause}.")
        total += value
        weight += batch.weights.sum().item()
        if progress is not None:
            progress(index + 1, n)
    return total / weight


def perplexity(loss: float) -> float:
    """`exp(loss)` of a mean cross-entropy in nats; infinite where that is too large for a number."""
    return math.exp(loss) if loss < 700 else math.inf
