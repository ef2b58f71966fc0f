"""Quantization-aware training: weights that are rounded to a grid while they train, packed at the end."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import mlx.nn as nn

from afm_mlx.errors import ConfigError
from afm_mlx.quantization.packed_layers import PackedEmbedding, PackedLinear
from afm_mlx.quantization.quantize_model import Predicate
from afm_mlx.quantization.rule import QuantizationRule
from afm_mlx.training.data.batches import Batches
from afm_mlx.training.loop.training_options import TrainingOptions
from afm_mlx.training.methods.method import Method
from afm_mlx.training.methods.model_folder import save_model_folder
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.recipe import Recipe
from afm_mlx.training.qat.kv_scales import calibrate_kv_scales
from afm_mlx.training.qat.qat_layers import QATEmbedding, QATLinear, pack_qat, prepare_qat

QAT_RULE = QuantizationRule(bits=2, mode="balanced", granularity="tensor")
"""Rule of linear layers, as Apple has it: balanced, one learned factor for each matrix (arXiv 2507.13575)."""

QAT_EMBEDDING_RULE = QuantizationRule(bits=4, mode="balanced", granularity="row")
"""Rule of embeddings: rows, whose norms differ by the frequency of their tokens, have scales of their own."""


@dataclass(frozen=True)
class QATTraining(Method):
    """Train float weights that are rounded to their grids in the forward pass, see `training.qat`.

    Args:
        rule, embedding_rule, predicate: see `quantization.quantize_model`.
        calibrate_kv: number of batches that the int8 scales of keys and values are set by before training;
            0 keeps the model's own scales.
        learn_kv_scales: train the int8 scales of keys and values.
        average: keep an average of the weights where the loop's options name no decay; the decay is 0.999,
            less in runs under 10,000 steps.
    """

    rule: QuantizationRule = QAT_RULE
    embedding_rule: QuantizationRule | None = QAT_EMBEDDING_RULE
    predicate: Predicate | None = None
    calibrate_kv: int = 0
    learn_kv_scales: bool = False
    average: bool = True
    kind = "qat"
    untrained_label = "on the same grid, before training"
    may_imitate_itself = True

    def check(self, recipe: Recipe, source: ModelSource) -> None:
        source.refuse_quantized("quantization-aware training")
        if not source.is_afm:
            wanted = [name for name in ("calibrate_kv", "learn_kv_scales") if getattr(self, name)]
            if wanted:
                raise ConfigError(
                    f"{wanted[0]}: {source.folder} has no int8 scales of keys and values; AFM models do."
                )
        elif self.learn_kv_scales and not (self.calibrate_kv or source.values.get("kv_bits")):
            raise ConfigError(
                f"learn_kv_scales: {source.folder} stores keys and values as floats. Let calibrate_kv give it "
                "scales to start from."
            )

    def with_defaults(self, options: TrainingOptions) -> TrainingOptions:
        if options.ema_decay is not None or not self.average:
            return options
        # The average then covers the last tenth of the run or so.
        decay = min(0.999, 1 - 10 / options.iters)
        return dataclasses.replace(options, ema_decay=decay) if decay > 0 else options

    def prepare(self, model: nn.Module, source: ModelSource, batches: Batches, seed: int) -> None:
        model.unfreeze()
        if self.calibrate_kv:
            calibrate_kv_scales(model, (batches(i) for i in range(self.calibrate_kv)))
        prepare_qat(
            model,
            self.rule,
            self.embedding_rule,
            self.predicate,
            learn_kv_scales=self.learn_kv_scales,
        )

    def manifest(self, model: nn.Module) -> dict[str, Any]:
        layers = {p: m for p, m in model.named_modules() if isinstance(m, QATLinear | QATEmbedding)}
        rules = {path: layer.rule.to_dict() for path, layer in sorted(layers.items())}
        return {
            "q_rule": self.rule.to_dict(),
            "q_layers": sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest(),
            "calibrate_kv": self.calibrate_kv,
            "learn_kv_scales": self.learn_kv_scales,
        }

    def save(
        self, path: Path, model: nn.Module, source: ModelSource, facts: Mapping[str, str]
    ) -> None:
        packed, values = pack_qat(model, source.values)
        if source.is_afm:
            # Calibration may have given the model its scales.
            values["kv_bits"] = model.args.kv_bits
        layers = (m for m in packed.modules() if isinstance(m, PackedLinear | PackedEmbedding))
        bits = sorted({layer.bits for layer in layers})
        kind = f"{' and '.join(map(str, bits))} bits, {self.rule.mode}"
        what = f"Packed weights ({kind}), trained as such (quantization-aware)."
        save_model_folder(path, packed, values, source, what=what, facts=facts)
