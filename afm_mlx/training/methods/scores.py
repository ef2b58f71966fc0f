"""How well a model predicts the test split, with what was trained and without: the same batches for both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.adapters.adapter_folder import load_adapter
from afm_mlx.adapters.attach import attach_adapter
from afm_mlx.errors import TrainingError
from afm_mlx.loading.missing_kernels import warn_if_slow
from afm_mlx.training.data.batches import Batches
from afm_mlx.training.loop.losses import Acceptance, CrossEntropy
from afm_mlx.training.loop.mean_loss import mean_loss, perplexity
from afm_mlx.training.methods.data_splits import read_split
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.recipe import Recipe

WITHOUT_ADAPTER = "without the adapter"


@dataclass(frozen=True)
class SplitScore:
    """How well a model predicts a split of the data.

    Args:
        loss: cross-entropy, the weighted mean over scored tokens, in nats.
        tokens: number of scored tokens.
        acceptance: share of a draft model's proposals that its target keeps, see `losses.Acceptance`; None
            for other models.
    """

    loss: float
    tokens: int
    acceptance: float | None = None

    @property
    def perplexity(self) -> float:
        """`exp(loss)`."""
        return perplexity(self.loss)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; what was not measured is left out."""
        values = {"loss": self.loss, "perplexity": self.perplexity, "tokens": self.tokens}
        return values if self.acceptance is None else values | {"acceptance": self.acceptance}


@dataclass(frozen=True)
class Scores:
    """The same batches, measured twice.

    Args:
        untrained: the base without an adapter, or the model before training.
        trained: the adapted or trained model; None when there was none to measure.
        label: what `untrained` was measured with, such as "without the adapter".
    """

    untrained: SplitScore
    trained: SplitScore | None
    label: str


def measure_split(
    model: nn.Module,
    batches: Batches,
    count: int = -1,
    teacher: nn.Module | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SplitScore:
    """Measure how well a model predicts batches.

    Args:
        model: a model, which is in eval mode afterwards.
        batches: batches of the split.
        count: number of measured batches, counted from the first; -1 for all.
        teacher: target of a draft model, to measure its acceptance; None for other models.
        progress: called with batches done and batches in all.

    Raises:
        TrainingError: when the loss is not finite; names the batch and the layer.
    """
    loss = mean_loss(model, CrossEntropy(), batches, count, progress)
    n = batches.per_epoch if count == -1 else min(count, batches.per_epoch)
    tokens = sum(int(mx.sum(batches(i).weights > 0).item()) for i in range(n))
    kept = None if teacher is None else mean_loss(model, Acceptance(teacher), batches, count)
    return SplitScore(loss, tokens, kept)


def measure_adapter(
    recipe: Recipe,
    adapter_path: str | Path | None,
    *,
    on_data: Callable[[Batches], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Scores:
    """Measure test.jsonl with an adapter and without; nothing is trained.

    Args:
        recipe: model, data, and how it is batched.
        adapter_path: see `load_adapter`; None measures the base alone.
        on_data: called before measuring starts.
        progress: called with batches done and batches in all, of each measurement.

    Raises:
        AFMError: what is wrong with the data, the model or the adapter.
    """
    if adapter_path is not None:
        if not Path(adapter_path).exists():
            raise TrainingError(
                f"There is no adapter {adapter_path} to test. Name one (--adapter-path), or train one first "
                "(--train)."
            )
        load_adapter(adapter_path)  # raises before a model is loaded
    source = ModelSource.open(recipe.model)
    batches = read_split(recipe, source, "test")
    if on_data is not None:
        on_data(batches)
    model = source.load()
    warn_if_slow(model)
    measure = partial(measure_split, model, batches, recipe.test_batches, progress=progress)
    untrained, trained = measure(), None
    if adapter_path is not None:
        attach_adapter(model, adapter_path, base_folder=source.folder, force=recipe.force)
        trained = measure()
    return Scores(untrained, trained, WITHOUT_ADAPTER)
