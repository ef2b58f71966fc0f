"""Training of a draft model, which proposes tokens that a larger model accepts or rejects."""

from __future__ import annotations

from dataclasses import dataclass

from afm_mlx.errors import ConfigError
from afm_mlx.training.methods.full_training import FullTraining
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.recipe import Recipe


@dataclass(frozen=True)
class DraftTraining(FullTraining):
    """Train float weights of a draft model to predict what its target, the recipe's teacher, would.

    Apple's toolkit trains by the reverse divergence, which the recipe has to say: `divergence="reverse"`.

    Args:
        num_layers: number of trained blocks, counted from the last; -1 for the whole model.
    """

    kind = "draft"
    measures_acceptance = True

    def check(self, recipe: Recipe, source: ModelSource) -> None:
        if recipe.teacher is None:
            raise ConfigError(
                "A draft model learns from the model that it drafts for, and there is no teacher. Name it "
                "(--teacher)."
            )
        source.refuse_quantized("training of a draft model")

    def _what(self) -> str:
        return "A draft model for speculative decoding, trained to say what its teacher would."
