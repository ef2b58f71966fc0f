"""Training of a reward model: a LoRA adapter with a reward head, from pairs of a better and a worse answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.nn as nn

from afm_mlx.adapters.adapter_folder import AdapterConfig, RewardUse, open_folder
from afm_mlx.adapters.reward_head import (
    RewardHead,
    head_dim,
    load_reward_head,
    save_reward_head,
)
from afm_mlx.errors import CheckpointError, ConfigError
from afm_mlx.model.pooling import check_states, hidden_dim_of
from afm_mlx.training.data.batches import AnyBatches
from afm_mlx.training.data.preferences import PAIR_FORM, load_preferences
from afm_mlx.training.data.reward_pairs import RewardBatches
from afm_mlx.training.loop.reward_loss import GRADE_WEIGHT, RewardLoss
from afm_mlx.training.methods.lora_training import LoRATraining
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.recipe import Recipe, max_sample_length


@dataclass(frozen=True)
class RewardTraining(LoRATraining):
    """Train LoRA pairs and a reward head by `RewardLoss`.

    The recipe's `batch_size` is the number of pairs in a batch. It has no teacher, no packing, and none of the
    arguments about the parts of a chat. An initial adapter with a reward head gives its head, too; other
    initial adapters get a new one.

    Args:
        grade_weight: lambda, see `RewardLoss`.
    """

    grade_weight: float = GRADE_WEIGHT
    kind = "reward"

    def __post_init__(self) -> None:
        super().__post_init__()
        RewardLoss(self.grade_weight)  # raises for a weight out of range

    def check(self, recipe: Recipe, source: ModelSource) -> None:
        super().check(recipe, source)
        for name, is_given, reason in (
            ("teacher", recipe.teacher is not None, "a reward model has none"),
            ("packing", bool(recipe.packing), "each answer has a row"),
            ("prompt_weight", recipe.prompt_weight != 0, "a reward is about whole answers"),
            ("features", bool(recipe.features), f"a pair is {PAIR_FORM}"),
        ):
            if is_given:
                raise ConfigError(f"{name} would do nothing: {reason}. Leave it out.")

    def read_split(self, recipe: Recipe, source: ModelSource, split: str) -> RewardBatches:
        most = max_sample_length(recipe, source)
        return RewardBatches(
            load_preferences(recipe.data, split, source.tokenizer, most),
            batch_size=recipe.batch_size,
            seed=recipe.options.seed,
            shuffle=split == "train",
        )

    def make_loss(self, recipe: Recipe, teacher: nn.Module | None) -> RewardLoss:
        return RewardLoss(self.grade_weight)

    def test_loss(self) -> RewardLoss:
        """Return the loss; a model without a reward head is measured with the initial adapter's."""
        return RewardLoss(self.grade_weight, self._initial_head())

    def prepare(
        self, model: nn.Module, source: ModelSource, batches: AnyBatches, seed: int
    ) -> None:
        check_states(model)
        super().prepare(model, source, batches, seed)
        dim, initial = hidden_dim_of(model), self._initial_head()
        axes = set(batches.axes) if isinstance(batches, RewardBatches) else set()
        if initial is not None:
            if head_dim(initial) != dim:
                raise CheckpointError(
                    f"{self.initial_adapter} has a reward head for states of width {head_dim(initial)}, and "
                    f"the model's have {dim}."
                )
            axes |= set(initial.grades)
        head = RewardHead(dim, RewardUse.of(axes), seed)
        if initial is not None:
            head.update(initial.parameters())
        model.reward_head = head

    def _initial_head(self) -> RewardHead | None:
        if self.initial_adapter is None or not Path(self.initial_adapter).is_dir():
            return None
        config = open_folder(self.initial_adapter)[1]
        return None if config.reward is None else load_reward_head(self.initial_adapter, config)

    def manifest(self, model: nn.Module) -> dict[str, object]:
        values = {"grade_weight": self.grade_weight, "grades": list(model.reward_head.grades)}
        return super().manifest(model) | values

    def save(
        self, path: Path, model: nn.Module, source: ModelSource, facts: Mapping[str, str]
    ) -> None:
        save_reward_head(path, model.reward_head)
        super().save(path, model, source, facts)

    def config(self, model: nn.Module, source: ModelSource) -> AdapterConfig:
        use = RewardUse.of(model.reward_head.grades)
        return replace(super().config(model, source), reward=use)
