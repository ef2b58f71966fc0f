"""Training of float weights: of a model, of its last blocks, or of a draft model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn

from afm_mlx.config import KV_SCALES
from afm_mlx.errors import ConfigError
from afm_mlx.training.data.batches import Batches
from afm_mlx.training.methods.method import Method
from afm_mlx.training.methods.model_folder import save_model_folder
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.recipe import Recipe


@dataclass(frozen=True)
class FullTraining(Method):
    """Train float weights; the scales of int8 keys and values stay as they are.

    Args:
        num_layers: number of trained blocks, counted from the last; -1 for the whole model.
    """

    num_layers: int = -1
    kind = "full"

    def check(self, recipe: Recipe, source: ModelSource) -> None:
        source.refuse_quantized("training of all weights")

    def prepare(self, model: nn.Module, source: ModelSource, batches: Batches, seed: int) -> None:
        blocks = model.layers
        if self.num_layers == -1:
            model.unfreeze()
        elif 1 <= self.num_layers <= len(blocks):
            model.freeze()
            for block in blocks[-self.num_layers :]:
                block.unfreeze()
        else:
            raise ConfigError(
                f"num_layers is {self.num_layers}; allowed are 1 to {len(blocks)}, and -1 for the whole model."
            )
        model.freeze(keys=list(KV_SCALES), strict=False)

    def manifest(self, model: nn.Module) -> dict[str, Any]:
        return {"num_layers": self.num_layers}

    def save(
        self, path: Path, model: nn.Module, source: ModelSource, facts: Mapping[str, str]
    ) -> None:
        save_model_folder(path, model, source.values, source, what=self._what(), facts=facts)

    def _what(self) -> str:
        """A sentence for the model card."""
        if self.num_layers == -1:
            return "Float weights, all of them trained further."
        return f"Float weights; those of the last {self.num_layers} blocks were trained further."


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
