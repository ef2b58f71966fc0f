"""The model folder that training starts from: its tokenizer first, its weights when all else is right."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from afm_mlx.checkpoint.fingerprint import arrays_fingerprint
from afm_mlx.checkpoint.stored_layers import quantization_of
from afm_mlx.config import MODEL_TYPE, PRESETS, ModelConfig, read_config_json
from afm_mlx.errors import AFMError, CheckpointError, ConfigError
from afm_mlx.loading.load import load_model, resolve_model
from afm_mlx.loading.mlx_lm_models import load_mlx_lm_folder
from afm_mlx.model.model import Model
from afm_mlx.quantization.packed_layers import PackedEmbedding, PackedLinear, activation_dtype
from afm_mlx.tokenizer.tokenizer import load_tokenizer

_QUANTIZED = (PackedLinear, PackedEmbedding, nn.QuantizedLinear, nn.QuantizedEmbedding)


@dataclass(frozen=True)
class Source:
    """A model folder, ours or of mlx-lm's zoo.

    Args:
        folder: holds config.json, weights, and tokenizer files.
        values: content of config.json.
    """

    folder: Path
    values: Mapping[str, Any]

    @classmethod
    def open(cls, model: str | Path | Source) -> Source:
        """Find a model by its path, its hub id, or the name of the embedded one; a source is itself.

        Raises:
            AFMError: when there is none.
        """
        if isinstance(model, Source):
            return model
        folder = resolve_model(model)
        return cls(folder, read_config_json(folder / "config.json"))

    @property
    def name(self) -> str:
        """The folder's bare name, for cards."""
        return self.folder.resolve().name

    @property
    def is_afm(self) -> bool:
        return self.values.get("model_type") == MODEL_TYPE

    @cached_property
    def tokenizer(self) -> Any:
        if self.is_afm:
            return load_tokenizer(self.folder)
        from mlx_lm.utils import load_tokenizer as load_of_zoo

        try:
            return load_of_zoo(self.folder, eos_token_ids=self.values.get("eos_token_id"))
        except (ValueError, OSError) as error:
            raise CheckpointError(
                f"mlx-lm can't load the tokenizer of {self.folder}: {' '.join(str(error).split())}."
            ) from None

    def refuse_quantized(self, purpose: str) -> None:
        """Raise `ConfigError` when weights are packed, which have no gradient."""
        if quantization_of(self.values, self.folder / "config.json"):
            raise ConfigError(
                f"{self.folder} is quantized, and {purpose} starts from float weights. Train the model that it "
                f"was made of, or make float weights of it: afm-mlx convert --model {self.folder} "
                "--mlx-path FLOAT -d."
            )

    def load(self) -> nn.Module:
        """The model in eval mode; on a CPU all its floats are float32, whose gradients are quick there."""
        if self.is_afm:
            return load_model(self.folder, self.values)
        model, _ = load_mlx_lm_folder(self.folder)
        packed = any(isinstance(module, _QUANTIZED) for module in model.modules())
        if activation_dtype() == mx.float32 and not packed:
            model.update(tree_map(_as_float32, model.parameters()))
            mx.eval(model.parameters())
        return model

    def is_same(self, other: Source) -> bool:
        """Whether both load the same weights."""
        return type(self) is type(other) and self.folder.resolve() == other.folder.resolve()

    def fingerprint(self, model: nn.Module) -> str:
        """What tells this model from others; `model` is what `load` gave."""
        return arrays_fingerprint(dict(self.values), dict(tree_flatten(model.parameters())))

    def load_teacher(self, student: Source) -> nn.Module:
        """The model, to be imitated by `student`.

        Raises:
            ConfigError: when the vocabularies differ.
        """
        if not self.is_same(student):
            mine, other = self.tokenizer.get_vocab(), student.tokenizer.get_vocab()
            self._refuse_vocabulary(student, len(mine), len(other), "pieces", mine == other)
            rows, of_student = (s.values.get("vocab_size") for s in (self, student))
            self._refuse_vocabulary(
                student, rows, of_student, "rows of the embedding", rows == of_student
            )
        return self.load()

    def _refuse_vocabulary(
        self, student: Source, mine: Any, other: Any, what: str, is_same: bool
    ) -> None:
        if not is_same:
            raise ConfigError(
                f"The teacher {self.name} and {student.name} have different vocabularies ({mine} and {other} "
                f"{what}): its predictions can't be imitated. A teacher is the model that {student.name} was "
                "made of, or that it drafts for."
            )


@dataclass(frozen=True)
class FreshSource(Source):
    """A model with random weights, made to draft for another; it has that one's tokenizer.

    Args:
        folder: of the target, whose tokenizer files it takes.
        values: content of its config.json.
        preset: name of its sizes in `config.PRESETS`.
        seed: of the weights, as MLX's layers draw them.
    """

    preset: str
    seed: int

    @classmethod
    def for_target(cls, target: str | Path, preset: str, seed: int = 0) -> FreshSource:
        """A draft model of a preset's sizes, with the target's vocabulary and context.

        Raises:
            ConfigError: for an unknown preset, or a target that is no AFM model.
            AFMError: when there is no such target.
        """
        if preset not in PRESETS:
            raise ConfigError(
                f"There is no preset {preset!r} of a model's sizes; allowed are {', '.join(PRESETS)}."
            )
        source = _open_teacher(target)
        if not source.is_afm:
            raise ConfigError(
                f"The teacher: {source.folder} is no AFM model, and {preset} has an AFM model's tokenizer. "
                "Choose an AFM model, or name a folder to start from (--model)."
            )
        shared = {name: source.values[name] for name in _OF_VOCABULARY if name in source.values}
        # The scales of int8 keys and values are measured on a trained model, and this one is none.
        sizes = dataclasses.replace(PRESETS[preset], kv_bits=None)
        return cls(source.folder, sizes.to_dict() | shared, preset, seed)

    @property
    def name(self) -> str:
        return self.preset

    def load(self) -> nn.Module:
        mx.random.seed(self.seed)
        model = Model(ModelConfig.from_dict(self.values, self.preset))
        dtype = activation_dtype()
        model.update(tree_map(lambda array: array.astype(dtype), model.parameters()))
        mx.eval(model.parameters())
        return model.eval()


_OF_VOCABULARY = ("vocab_size", "context_length", "eos_token_id", "bos_token_id", "pad_token_id")


def _as_float32(array: mx.array) -> mx.array:
    return array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array


def open_teacher(teacher: str | Path, student: Source) -> Source:
    """The folder of a teacher; "self" is the student's own, as it was before training."""
    return student if str(teacher) == "self" else _open_teacher(teacher)


def _open_teacher(teacher: str | Path) -> Source:
    try:
        return Source.open(teacher)
    except AFMError as error:
        raise type(error)(f"The teacher: {error}") from None
