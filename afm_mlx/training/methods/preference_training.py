"""Training of a LoRA adapter by preferences, with the model itself as the reference.

The reference is the model without an adapter, as in TRL and PEFT: of an adapter that goes on from an initial
one, too. `reference_adapter` names another; give the initial adapter to stay close to it.

The reference's log-probabilities are computed once, and kept in the run's folder: no second model is in memory,
and no step computes them. They are computed in the mode in which they are compared, for training data in
training mode, because packed kernels round otherwise. While the adapter adds nothing, the margins of the first
epoch's batches are then 0 to the last bit.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from afm_mlx.errors import ConfigError
from afm_mlx.progress import Progress
from afm_mlx.quantization.quantize_model import is_vision
from afm_mlx.ranks import join_ranks
from afm_mlx.training.data.batches import AnyBatches
from afm_mlx.training.data.preferences import (
    PAIR_FORM,
    PreferenceBatches,
    load_labeled_answers,
    load_preferences,
    mismatched_answers,
)
from afm_mlx.training.loop.losses import log_probabilities
from afm_mlx.training.loop.preference_losses import OBJECTIVES, PreferenceLoss
from afm_mlx.training.loop.run_folder import RunFolder
from afm_mlx.training.loop.trainer import OnEvent, Preparing
from afm_mlx.training.methods.image_inputs import with_pixels
from afm_mlx.training.methods.lora_training import (
    LoRATraining,
    as_reference,
    read_initial,
    reference_fingerprint,
)
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.recipe import DataSplits, Recipe, is_packed, max_sample_length

_REFERENCE = "log_probabilities"  # name of the kept tensor


@dataclass(frozen=True)
class PreferenceTraining(LoRATraining):
    """Train LoRA pairs by a loss over preferences, see `PreferenceLoss` and `data.preferences`.

    The recipe's `batch_size` is the number of pairs in a batch, or of labelled answers. It has no teacher, and
    none of the arguments about the parts of a chat.

    Args:
        loss: which loss, with its settings.
        reference_adapter: folder of the adapter that the reference runs with; pass None for the model alone.

    Raises:
        ConfigError: for a reference adapter, and a loss without a reference.
    """

    loss: PreferenceLoss = field(default_factory=PreferenceLoss)
    reference_adapter: str | Path | None = None
    kind = "preference"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reference_adapter is not None and not self._has_reference:
            raise ConfigError(
                f"reference_adapter would do nothing: {self.loss.objective} has no reference. Leave it out."
            )

    @property
    def _has_reference(self) -> bool:
        return OBJECTIVES[self.loss.objective].has_reference

    def check(self, recipe: Recipe, source: ModelSource) -> None:
        super().check(recipe, source)
        if self.reference_adapter is not None:
            read_initial(self.reference_adapter)
        for name, is_given, reason in (
            ("teacher", recipe.teacher is not None, "a loss of preferences has none"),
            ("prompt_weight", recipe.prompt_weight != 0, "preferences are about answers"),
            ("features", bool(recipe.features), f"a line is {PAIR_FORM}"),
        ):
            if is_given:
                raise ConfigError(f"{name} would do nothing: {reason}. Leave it out.")

    def read_split(self, recipe: Recipe, source: ModelSource, split: str) -> PreferenceBatches:
        has_pairs = OBJECTIVES[self.loss.objective].of_pairs is not None
        load = load_preferences if has_pairs else load_labeled_answers
        limit = max_sample_length(recipe, source)
        return PreferenceBatches(
            load(recipe.data, split, source.tokenizer, limit),
            batch_size=recipe.batch_size,
            max_seq_length=limit,
            packed=is_packed(recipe, source),
            strength=self.loss.strength,
            seed=recipe.options.seed,
            shuffle=split == "train",
        )

    def make_loss(self, recipe: Recipe, teacher: nn.Module | None) -> PreferenceLoss:
        return self.loss

    def test_loss(self) -> PreferenceLoss:
        return self.loss

    def complete_data(
        self,
        model: nn.Module,
        source: ModelSource,
        data: DataSplits,
        run: RunFolder,
        on_event: OnEvent,
    ) -> DataSplits:
        if not self._has_reference:
            return data
        ranks = join_ranks()
        manifest = run.manifest if ranks.is_first else {}
        known = [manifest.get(name) for name in ("model_weights", "reference_adapter")]

        def complete(batches: AnyBatches | None, split: str) -> Any:
            if batches is None:
                return None
            assert isinstance(batches, PreferenceBatches)
            # The fingerprint of the batches covers the tokens, and so the template.
            key = json.dumps([*known, batches.fingerprint])
            kept = run.kept(f"reference-{split}", key) if ranks.is_first else None
            if not ranks.any(kept is not None):
                what = f"{len(batches):,} {batches.unit} ({split})"
                what = f"the reference's log-probabilities of {what}"

                def progress(done: int, total: int) -> None:
                    on_event(Preparing(what, done, total))

                progress(0, batches.per_epoch)
                found = self._reference(model, source, batches, progress, split == "train")
                kept = {_REFERENCE: mx.array(found)}
                if ranks.is_first:
                    run.keep(f"reference-{split}", kept, key)
            values = kept[_REFERENCE] if kept else mx.zeros(batches.n_scored)
            return batches.with_reference(np.array(ranks.from_first(values)))

        return DataSplits(
            complete(data.train, "train"),
            complete(data.valid, "valid"),
            complete(data.test, "test"),
        )

    def complete_test(
        self,
        model: nn.Module,
        source: ModelSource,
        batches: AnyBatches,
        progress: Progress | None = None,
    ) -> AnyBatches:
        if not self._has_reference:
            return batches
        assert isinstance(batches, PreferenceBatches)
        return batches.with_reference(self._reference(model, source, batches, progress))

    def _reference(
        self,
        model: nn.Module,
        source: ModelSource,
        batches: PreferenceBatches,
        progress: Progress | None,
        training: bool = False,
    ) -> np.ndarray:
        """Return the reference's log-probabilities of all targets, (n_scored,) float32, by their numbers.

        The batches are the ones of the first epoch: equal batches give equal numbers, to the last bit.
        """
        found = np.zeros(batches.n_scored + 1, np.float32)
        adapter = self.reference_adapter
        if adapter is not None and any(map(is_vision, read_initial(adapter)[0])):
            batches = with_pixels(batches)  # the adapter sees images in its own way
        with as_reference(model, source, adapter, force=self.force):
            model.train(training)
            for step in range(batches.per_epoch):
                batch = batches(step)
                others = [] if batch.mismatched is None else [mismatched_answers(batch)]
                for rows in (batch, *others):
                    found[np.array(rows.numbers)] = np.array(log_probabilities(model, rows))
                if progress is not None:
                    progress(step + 1, batches.per_epoch)
        return found[:-1]

    def manifest(self, model: nn.Module) -> dict[str, object]:
        own = {
            "loss": dataclasses.asdict(self.loss),
            "reference_adapter": reference_fingerprint(self.reference_adapter),
        }
        return super().manifest(model) | own
