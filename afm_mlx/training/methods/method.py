"""Methods of training: which weights each trains, and what it saves.

| class | trains | saves |
| --- | --- | --- |
| `FullTraining` | float weights | a model folder |
| `DraftTraining` | float weights of a draft model | a model folder |
| `QATTraining` | float weights that are rounded to a grid in the forward pass | a packed model folder |
| `IFPTraining` (`ifp_training.py`) | float weights and a predictor of masks | a model folder |
| `LoRATraining` (`lora_training.py`) | LoRA pairs on a frozen model | an adapter folder |
| `ContrastiveTraining` (`contrastive_training.py`) | LoRA pairs for embeddings | an adapter folder |
| `PreferenceTraining` (`preference_training.py`) | LoRA pairs by preferences | an adapter folder |
| `RewardTraining` (`reward_training.py`) | LoRA pairs and a reward head, by preferences | an adapter folder |
| `PolicyTraining` (`policy_training.py`) | LoRA pairs by rewards of sampled answers | an adapter folder |
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import mlx.nn as nn
from mlx.utils import tree_flatten

from afm_mlx.adapters.target_modules import TEXT
from afm_mlx.checkpoint.folder_texts import copy_tokenizer_files, write_config, write_trained_card
from afm_mlx.checkpoint.weights import save_weights
from afm_mlx.config import KV_SCALES
from afm_mlx.errors import AFMError, ConfigError, TrainingError
from afm_mlx.files import atomic_folder, refuse_existing
from afm_mlx.model.model import is_afm
from afm_mlx.progress import Progress
from afm_mlx.quantization.packed_layers import PackedEmbedding, PackedLinear
from afm_mlx.quantization.quantize_model import Predicate, is_vision
from afm_mlx.quantization.rule import QuantizationRule
from afm_mlx.track_config import MODEL_TYPE as TRACK_MODEL
from afm_mlx.training.data.batches import AnyBatches, Batches
from afm_mlx.training.loop.losses import CrossEntropy, Distillation, Loss
from afm_mlx.training.loop.routing_loss import RoutingLoss
from afm_mlx.training.loop.run_folder import RunFolder
from afm_mlx.training.loop.trainer import OnEvent
from afm_mlx.training.loop.training_options import TrainingOptions
from afm_mlx.training.methods.image_inputs import check_parts, freeze_others, parts_manifest
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.recipe import DataSplits, Recipe, read_split
from afm_mlx.training.qat.kv_scales import calibrate_kv_scales
from afm_mlx.training.qat.qat_layers import QATEmbedding, QATLinear, pack_qat, prepare_qat

WITHOUT_ADAPTER = "without the adapter"
"""Label of a score of the base model alone."""


class Method:
    """Base class of training methods. `train.train_by` calls its functions in their order here.

    Attributes:
        kind: name of the method, in the run's manifest.
        untrained_label: label of the test score before training.
        may_imitate_itself: True if the teacher may be the model itself, as it is before `prepare`.
        measures_acceptance: True if the test also measures the share of draft tokens that the teacher accepts.
    """

    kind: ClassVar[str]
    untrained_label: ClassVar[str] = "before training"
    may_imitate_itself: ClassVar[bool] = False
    measures_acceptance: ClassVar[bool] = False

    def default_run_path(self, path: Path) -> Path:
        """Return the run's folder for a result that is saved to `path`."""
        return Path(f"{path}-run")

    def check_path(self, path: Path, run_path: Path, resume: bool) -> None:
        """Raise `AFMError` if the result would overwrite something at `path`, or a resumed run is finished."""
        if resume and (path / "config.json").is_file() and (run_path / "run.json").is_file():
            raise TrainingError(
                f"The run in {run_path} is finished: {path} is its result, and nothing is left to do. To train "
                "longer, start another run, into another folder."
            )
        refuse_existing(path)

    def check(self, recipe: Recipe, source: ModelSource) -> None:
        """Raise `AFMError` if this method can't train the model; called before anything is loaded."""

    def with_defaults(self, options: TrainingOptions) -> TrainingOptions:
        """Return the loop's options, with the method's defaults for those that are not set."""
        return options

    def read_split(self, recipe: Recipe, source: ModelSource, split: str) -> AnyBatches:
        """Read and tokenize the split "train", "valid" or "test"; raises as `recipe.read_data` does."""
        return read_split(recipe, source, split)

    def make_loss(self, recipe: Recipe, teacher: nn.Module | None) -> Loss:
        """Return the loss to train and to validate by; `teacher` is None if the recipe has none."""
        if teacher is None:
            return CrossEntropy()
        return Distillation(
            teacher,
            recipe.distillation_weight,
            recipe.distillation_temperature,
            recipe.divergence,
        )

    def test_loss(self) -> Loss:
        """Return the loss to test by."""
        return CrossEntropy()

    def prepare(
        self, model: nn.Module, source: ModelSource, batches: AnyBatches, seed: int
    ) -> None:
        """Change a model in place so that exactly the parameters to train are trainable.

        `model` is what `source.load` returned; `batches` are the training data, for calibration; `seed` draws
        new weights.
        """
        raise NotImplementedError

    def manifest(self, model: nn.Module) -> dict[str, object]:
        """Return the settings that must not change when a run resumes; `model` is prepared, but not trained."""
        return {}

    def complete_data(
        self,
        model: nn.Module,
        source: ModelSource,
        data: DataSplits,
        run: RunFolder,
        on_event: OnEvent,
    ) -> DataSplits:
        """Return the data to train on, with what only the prepared, untrained model can add to it.

        What takes long to compute is kept in the run's folder, for when it resumes; `on_event` gets `Preparing`
        before it and after each of its batches.
        """
        return data

    def complete_test(
        self,
        model: nn.Module,
        source: ModelSource,
        batches: AnyBatches,
        progress: Progress | None = None,
    ) -> AnyBatches:
        """Return the batches to test with, likewise, from a model that is not prepared."""
        return batches

    def as_untrained(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which a prepared model computes as before training."""
        return nullcontext()

    def round_as_saved(self, model: nn.Module) -> None:
        """Round the trained weights to the numbers that `save` writes."""

    def save(
        self, path: Path, model: nn.Module, source: ModelSource, facts: Mapping[str, str]
    ) -> None:
        """Write the result's folder for a model with its best weights; `facts` are rows of its model card."""
        raise NotImplementedError


def save_model_folder(
    path: str | Path,
    model: nn.Module,
    values: Mapping[str, object],
    source: ModelSource,
    *,
    what: str,
    facts: Mapping[str, str],
    add: Callable[[Path], None] | None = None,
) -> Path:
    """Write a model folder that `afm_mlx.load` and mlx-lm read, whole or not at all.

    `values` is the content of config.json; the tokenizer files are the source's. `what` is a sentence for the
    card that describes the weights, and `facts` are values for the card by their labels. `add` writes more
    into the folder.

    Raises `AFMError` when `path` exists or can't be written.
    """
    path = Path(path)
    try:
        with atomic_folder(path) as folder:
            weights = dict(tree_flatten(model.parameters()))
            # Packed layers have fewer elements than parameters.
            total = model.args.num_parameters if source.is_afm else None
            save_weights(folder, weights, total_parameters=total)
            write_config(folder, values)
            copy_tokenizer_files(source.folder, folder)
            write_trained_card(
                folder,
                name=path.name,
                source=source.name,
                model_type=str(values.get("model_type")),
                what=what,
                facts=facts,
            )
            if add is not None:
                add(folder)
    except OSError as error:
        raise AFMError(f"The model folder {path} can't be written: {error}.") from None
    return path


# -- float weights


@dataclass(frozen=True)
class FullTraining(Method):
    """Train float weights; the int8 scales of keys and values stay fixed.

    Args:
        num_layers: number of trained blocks, counted from the last; -1 for the whole model.
        train_parts: trained parts of a model that takes images, some of `target_modules.PARTS`.

    A model of parallel tracks is trained to use its experts evenly, too; see `routing_loss`.
    """

    num_layers: int = -1
    train_parts: tuple[str, ...] = (TEXT,)
    kind = "full"

    def check(self, recipe: Recipe, source: ModelSource) -> None:
        source.refuse_quantized("training of all weights")
        check_parts(self.train_parts, source)

    def make_loss(self, recipe: Recipe, teacher: nn.Module | None) -> Loss:
        loss = super().make_loss(recipe, teacher)
        if ModelSource.open(recipe.model).values.get("model_type") != TRACK_MODEL:
            return loss
        if recipe.options.grad_checkpoint:
            raise ConfigError(
                "grad_checkpoint: routers of a model of parallel tracks have losses, and their logits don't "
                "outlast a recomputed block. Leave --grad-checkpoint out."
            )
        return RoutingLoss(loss)

    def prepare(
        self, model: nn.Module, source: ModelSource, batches: AnyBatches, seed: int
    ) -> None:
        blocks = model.layers
        if self.num_layers == -1:
            model.unfreeze()
        elif 1 <= self.num_layers <= len(blocks):
            model.freeze()
            for block in blocks[-self.num_layers :]:
                block.unfreeze()
            if is_afm(model) and model.vision is not None:
                model.vision.unfreeze()
        else:
            raise ConfigError(
                f"num_layers is {self.num_layers}; allowed are 1 to {len(blocks)}, and -1 for the whole model."
            )
        model.freeze(keys=list(KV_SCALES), strict=False)
        freeze_others(model, self.train_parts)

    def manifest(self, model: nn.Module) -> dict[str, object]:
        return {"num_layers": self.num_layers} | parts_manifest(self.train_parts)

    def save(
        self, path: Path, model: nn.Module, source: ModelSource, facts: Mapping[str, str]
    ) -> None:
        save_model_folder(path, model, source.values, source, what=self._what, facts=facts)

    @property
    def _what(self) -> str:
        if self.num_layers == -1:
            return "Float weights, all of them trained further."
        return f"Float weights; the last {self.num_layers} blocks were trained further."


@dataclass(frozen=True)
class DraftTraining(FullTraining):
    """Train float weights of a draft model to predict the tokens of its target, the recipe's teacher.

    The divergence is the recipe's, "forward" by default. Apple's toolkit uses the reverse one:
    `Recipe(divergence="reverse")`.

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
        check_parts(self.train_parts, source)

    _what = "A draft model for speculative decoding, trained to predict its teacher's tokens."


# -- quantization-aware training


QAT_RULE = QuantizationRule(bits=2, mode="balanced", granularity="tensor")
"""Rule of linear layers, as in Apple's models: balanced, one learned factor per matrix (arXiv 2507.13575)."""

QAT_EMBEDDING_RULE = QuantizationRule(bits=4, mode="balanced", granularity="row")
"""Rule of embeddings: one scale per row, since norms of rows depend on the frequency of their tokens."""


@dataclass(frozen=True)
class QATTraining(Method):
    """Train float weights that are rounded to grids in the forward pass, see `training.qat.qat_layers`.

    Args:
        rule, embedding_rule, predicate: see `quantization.quantize_model`.
        calibrate_kv: number of batches for setting the int8 scales of keys and values before training; 0 keeps
            the model's scales.
        learn_kv_scales: train the int8 scales of keys and values.
        average: average the weights if the loop's options name no decay, with a decay of 0.999, less in runs
            under 10,000 steps.
        train_parts: trained parts of a model that takes images, some of `target_modules.PARTS`. The text model
            is on a grid in any case; the vision part stays float.
    """

    rule: QuantizationRule = QAT_RULE
    embedding_rule: QuantizationRule | None = QAT_EMBEDDING_RULE
    predicate: Predicate | None = None
    calibrate_kv: int = 0
    learn_kv_scales: bool = False
    average: bool = True
    train_parts: tuple[str, ...] = (TEXT,)
    kind = "qat"
    untrained_label = "on the same grid, before training"
    may_imitate_itself = True

    def check(self, recipe: Recipe, source: ModelSource) -> None:
        source.refuse_quantized("quantization-aware training")
        check_parts(self.train_parts, source)
        if self.learn_kv_scales and TEXT not in self.train_parts:
            raise ConfigError(
                f"learn_kv_scales trains numbers of the text model, and train_parts is "
                f"{', '.join(self.train_parts)}. Add {TEXT}, or leave learn_kv_scales out."
            )
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
        # The average then covers about the last tenth of the run.
        decay = min(0.999, 1 - 10 / options.iters)
        return dataclasses.replace(options, ema_decay=decay) if decay > 0 else options

    def prepare(
        self, model: nn.Module, source: ModelSource, batches: AnyBatches, seed: int
    ) -> None:
        model.unfreeze()
        if self.calibrate_kv:
            assert isinstance(batches, Batches)
            calibrate_kv_scales(model, (batches(i) for i in range(self.calibrate_kv)))
        prepare_qat(
            model,
            self.rule,
            self.embedding_rule,
            self._predicate,
            learn_kv_scales=self.learn_kv_scales,
        )
        freeze_others(model, self.train_parts)

    def _predicate(
        self, path: str, module: nn.Module
    ) -> QuantizationRule | bool | Mapping[str, Any]:
        if is_vision(path):
            return False
        return True if self.predicate is None else self.predicate(path, module)

    def manifest(self, model: nn.Module) -> dict[str, object]:
        layers = {p: m for p, m in model.named_modules() if isinstance(m, QATLinear | QATEmbedding)}
        rules = {path: layer.rule.to_dict() for path, layer in sorted(layers.items())}
        return {
            "q_rule": self.rule.to_dict(),
            "q_layers": sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest(),
            "calibrate_kv": self.calibrate_kv,
            "learn_kv_scales": self.learn_kv_scales,
            **parts_manifest(self.train_parts),
        }

    def save(
        self, path: Path, model: nn.Module, source: ModelSource, facts: Mapping[str, str]
    ) -> None:
        packed, values = pack_qat(model, source.values)
        if source.is_afm:
            # Calibration may have added scales to the model.
            values["kv_bits"] = model.args.kv_bits
        kinds = PackedLinear | PackedEmbedding
        bits = sorted({layer.bits for layer in packed.modules() if isinstance(layer, kinds)})
        what = (
            f"Packed weights ({' and '.join(map(str, bits))} bits, {self.rule.mode}), trained as such "
            "(quantization-aware)."
        )
        save_model_folder(path, packed, values, source, what=what, facts=facts)
