"""Sources of models to train or to imitate: a folder, or random weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from afm_mlx.checkpoint.fingerprint import arrays_fingerprint
from afm_mlx.checkpoint.stored_layers import quantization_of
from afm_mlx.config import PRESETS, ModelConfig, is_afm_config, read_config_json
from afm_mlx.errors import AFMError, ConfigError
from afm_mlx.loading.load import load_model
from afm_mlx.loading.mlx_lm_models import load_mlx_lm_folder, load_mlx_lm_tokenizer
from afm_mlx.loading.resolve import resolve_model
from afm_mlx.model.model import Model
from afm_mlx.quantization.packed_layers import activation_dtype
from afm_mlx.tokenizer.protocol import Tokenizer
from afm_mlx.tokenizer.tokenizer import load_tokenizer


@dataclass(frozen=True)
class ModelSource:
    """A model folder, AFM's or one that mlx-lm loads, with its config.json; `load` reads the weights."""

    folder: Path
    values: Mapping[str, Any]

    @classmethod
    def open(cls, model: str | Path | ModelSource) -> ModelSource:
        """Find a model by its path, hub id, or the embedded model's name; return a source unchanged.

        Raises `AFMError` when there is no such model.
        """
        if isinstance(model, ModelSource):
            return model
        folder = resolve_model(model)
        return cls(folder, read_config_json(folder / "config.json"))

    @property
    def name(self) -> str:
        """The folder's own name, for model cards."""
        return self.folder.resolve().name

    @property
    def is_afm(self) -> bool:
        return is_afm_config(self.values)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        if self.is_afm:
            return load_tokenizer(self.folder)
        return load_mlx_lm_tokenizer(self.folder, self.values)

    def refuse_quantized(self, purpose: str) -> None:
        """Raise `ConfigError` if the weights are packed: they have no gradient."""
        if quantization_of(self.values, self.folder / "config.json"):
            raise ConfigError(
                f"{self.folder} is quantized, and {purpose} starts from float weights. Train the model that it "
                f"was made from, or convert it to float weights: afm-mlx convert --model {self.folder} "
                "--mlx-path FLOAT -d."
            )

    def load(self) -> nn.Module:
        """Load the model in eval mode; on a CPU all its floats are float32, whose gradients are fast there."""
        if self.is_afm:
            return load_model(self.folder, self.values)
        return load_mlx_lm_folder(self.folder)[0]

    def is_same(self, other: ModelSource) -> bool:
        """Return True if both load the same weights."""
        return type(self) is type(other) and self.folder.resolve() == other.folder.resolve()

    def fingerprint(self, model: nn.Module) -> str:
        """Return the fingerprint of the weights and config.json; `model` is what `load` returned."""
        return arrays_fingerprint(dict(self.values), dict(tree_flatten(model.parameters())))


@dataclass(frozen=True)
class FreshSource(ModelSource):
    """A draft model with random weights and the tokenizer of its target.

    Args:
        folder: folder of the target, for its tokenizer files.
        values: content of the draft model's config.json.
        preset: name of the draft model's sizes in `config.PRESETS`.
        seed: seed of the weights, which MLX's layers draw.
    """

    preset: str
    seed: int

    @classmethod
    def for_target(cls, target: str | Path, preset: str, seed: int = 0) -> FreshSource:
        """Make the source of a draft model with a preset's sizes and the target's vocabulary and context.

        Raises:
            ConfigError: for an unknown preset, or a target that is not an AFM model.
            AFMError: when there is no such target.
        """
        if preset not in PRESETS:
            raise ConfigError(
                f"There is no preset {preset!r} of a model's sizes; allowed are {', '.join(PRESETS)}."
            )
        source = open_as_teacher(target)
        if not source.is_afm:
            raise ConfigError(
                f"The teacher: {source.folder} is no AFM model, and {preset} has an AFM model's tokenizer. "
                "Choose an AFM model, or name a folder to start from (--model)."
            )
        shared = {name: source.values[name] for name in _SHARED_KEYS if name in source.values}
        # Int8 scales of keys and values are measured on a trained model.
        sizes = dataclasses.replace(PRESETS[preset], kv_bits=None)
        return cls(source.folder, sizes.to_dict() | shared, preset, seed)

    @property
    def name(self) -> str:
        return self.preset

    def load(self) -> nn.Module:
        mx.random.seed(self.seed)
        model = Model(ModelConfig.from_dict(self.values, self.preset))
        model.set_dtype(activation_dtype())
        mx.eval(model.parameters())
        return model.eval()


def open_as_teacher(model: str | Path) -> ModelSource:
    """Find a teacher model; errors say that it is the teacher."""
    try:
        return ModelSource.open(model)
    except AFMError as error:
        raise type(error)(f"The teacher: {error}") from None


_SHARED_KEYS = ("vocab_size", "context_length", "eos_token_id", "bos_token_id", "pad_token_id")
