"""Training of a model together with the predictor of its masks (Instruction-Following Pruning)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from afm_mlx.adapters.mask_predictor import (
    PREDICTOR_FOLDER,
    RANK,
    MaskPredictor,
    PredictorConfig,
    has_predictor,
    small_model,
    write_head,
)
from afm_mlx.adapters.target_modules import unwrap_layers
from afm_mlx.checkpoint.folder_texts import write_config
from afm_mlx.checkpoint.weights import save_weights
from afm_mlx.config import KV_SCALES, ModelConfig
from afm_mlx.errors import ConfigError
from afm_mlx.loading.load import load_model, load_predictor
from afm_mlx.model.model import Model
from afm_mlx.quantization.packed_layers import activation_dtype
from afm_mlx.training.data.batches import AnyBatches
from afm_mlx.training.data.mask_batches import CHUNK, STAGES, MaskBatches
from afm_mlx.training.loop.losses import CrossEntropy, Loss
from afm_mlx.training.loop.masked_loss import PREDICTOR, MaskedLoss, add_masks
from afm_mlx.training.methods.method import FullTraining, save_model_folder
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.recipe import Recipe, read_batches

FFN = 0.5
GROUP = 16


@dataclass(frozen=True)
class IFPTraining(FullTraining):
    """Train float weights and a predictor that chooses the channels of every feed-forward.

    A model folder with a predictor continues with it; other models get a new one.

    Args:
        stage: where masks come from, see `training.data.mask_batches`: "chunk" for continued pre-training,
            "prompt" for fine-tuning after it.
        chunk_size: tokens of a chunk of the first stage.
        ffn: share of channels that a block keeps, 0.5 for a new predictor; rounded to whole groups.
        group: neighbouring channels that are kept or cut together, 16 for a new predictor.
        predictor: folder of a small model of the same vocabulary that a new predictor starts from, such as a
            draft model; pass None for new weights, see `small_model`.
        rank, temperature, binary: see `PredictorConfig`.

    Raises:
        ConfigError: for another stage, a chunk of less than a token, or a share out of (0, 1].
    """

    stage: str = "prompt"
    chunk_size: int = CHUNK
    ffn: float | None = None
    group: int | None = None
    predictor: str | Path | None = None
    rank: int | None = None
    temperature: float | None = None
    binary: bool | None = None
    kind = "ifp"

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise ConfigError(
                f"The stage is {self.stage!r}; allowed are {' and '.join(map(repr, STAGES))}."
            )
        if self.ffn is not None and not 0 < self.ffn <= 1:
            raise ConfigError(f"ffn is {self.ffn}; allowed are shares above 0, up to 1.")

    def check(self, recipe: Recipe, source: ModelSource) -> None:
        source.refuse_quantized("Instruction-Following Pruning")
        if not source.is_afm:
            raise ConfigError(
                f"{source.folder} is no AFM model, and a predictor of masks is trained only with AFM models. "
                "Choose an AFM model."
            )
        if has_predictor(source.folder):
            fixed = ("ffn", "group", "predictor", "rank", "temperature", "binary")
            if given := [name for name in fixed if getattr(self, name) is not None]:
                raise ConfigError(
                    f"{', '.join(given)}: {source.folder} has a predictor, which sets this. Leave it out."
                )
        else:
            self._new_config(ModelConfig.from_dict(source.values))

    def read_split(self, recipe: Recipe, source: ModelSource, split: str) -> MaskBatches:
        samples, options = read_batches(recipe, source, split)
        return MaskBatches(samples, self.stage, source.tokenizer, self.chunk_size, **options)

    def make_loss(self, recipe: Recipe, teacher: nn.Module | None) -> Loss:
        return MaskedLoss(super().make_loss(recipe, teacher))

    def test_loss(self) -> Loss:
        return MaskedLoss(CrossEntropy())

    def prepare(
        self, model: nn.Module, source: ModelSource, batches: AnyBatches, seed: int
    ) -> None:
        if has_predictor(source.folder):
            predictor = load_predictor(source.folder, model.args)
        else:
            config = self._new_config(model.args)
            predictor = MaskPredictor(self._body(model.args, seed), config, seed)
        super().prepare(model, source, batches, seed)
        add_masks(model)
        predictor.unfreeze()
        predictor.freeze(keys=list(KV_SCALES), strict=False)
        model[PREDICTOR] = predictor
        mx.eval(model.parameters())

    def _new_config(self, model: ModelConfig) -> PredictorConfig:
        ffn = FFN if self.ffn is None else self.ffn
        group = GROUP if self.group is None else self.group
        kept = max(round(model.ffn_dim * ffn / group), 1) * group if group > 0 else 0
        given = {
            name: value
            for name in ("temperature", "binary")
            if (value := getattr(self, name)) is not None
        }
        rank = RANK if self.rank is None else self.rank
        return PredictorConfig(model.num_layers, model.ffn_dim, kept, group, rank, **given)

    def _body(self, model: ModelConfig, seed: int) -> Model:
        if self.predictor is None:
            mx.random.seed(seed)
            body = Model(small_model(model))
            body.set_dtype(activation_dtype())
            return body
        source = ModelSource.open(self.predictor)
        source.refuse_quantized("a predictor of masks")
        if not source.is_afm or source.values.get("vocab_size") != model.vocab_size:
            raise ConfigError(
                f"The predictor {self.predictor} is no AFM model with the model's vocabulary of "
                f"{model.vocab_size} tokens. Choose a small model with its tokenizer, such as a draft model."
            )
        return load_model(source.folder, source.values)

    def manifest(self, model: nn.Module) -> dict[str, object]:
        config = model[PREDICTOR].config
        return super().manifest(model) | {
            "stage": self.stage,
            "chunk_size": self.chunk_size,
            "predictor": str(config),
            "predictor_model": str(model[PREDICTOR].body.args),
        }

    def save(
        self, path: Path, model: nn.Module, source: ModelSource, facts: Mapping[str, str]
    ) -> None:
        predictor = model.pop(PREDICTOR)
        unwrap_layers(model)

        def write_predictor(folder: Path) -> None:
            own = folder / PREDICTOR_FOLDER
            own.mkdir()
            save_weights(own, dict(tree_flatten(predictor.body.parameters())))
            write_config(own, predictor.body.args.to_dict())
            write_head(own, predictor)

        config = predictor.config
        what = (
            "Float weights, trained with a predictor of masks (Instruction-Following Pruning): for each prompt "
            f"it chooses {config.kept:,} of {config.ffn_dim:,} channels of every feed-forward."
        )
        facts = dict(facts) | {"masks": f"stage {self.stage!r}, groups of {config.group} channels"}
        save_model_folder(
            path, model, source.values, source, what=what, facts=facts, add=write_predictor
        )
