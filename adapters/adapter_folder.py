"""Adapter folders: mlx-lm's `adapters.safetensors` and `adapter_config.json`.

A LoRA pair of a layer is `<layer>.lora_a` [in, rank] and `<layer>.lora_b` [rank, out]; the fused query, key
and value layer has three, `lora_a.0` to `lora_a.2` and so on. The layer computes
`y = W x + scale * (x @ lora_a) @ lora_b`, and `scale` is alpha / rank. Besides mlx-lm's keys the config has
`base_model_fingerprint`, which identifies the model that the adapter was made for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx

from afm_mlx.checkpoint.safetensors_file import StoredTensor, load_stored, read_header, save_file
from afm_mlx.config import read_config_json
from afm_mlx.errors import AFMError, CheckpointError, ConfigError, named, shown
from afm_mlx.files import atomic_write
from afm_mlx.json_values import MAX_RANK, is_number, is_rank, is_text
from afm_mlx.model.pooling import POOLINGS

TENSORS_NAME = "adapters.safetensors"
CONFIG_NAME = "adapter_config.json"
LoRATensor: TypeAlias = mx.array | StoredTensor
"""A matrix in memory, or in a safetensors file of which only the header was read."""

_TENSOR_NAME = re.compile(r"(?P<layer>.+)\.lora_(?P<side>[ab])(?P<part>\.\d+)?")


@dataclass(frozen=True)
class EmbeddingUse:
    """How an adapter that was trained for embeddings is used."""

    pooling: str = "last"  # or "mean"
    instruction: str | None = None  # before queries, unless the caller says another one

    @classmethod
    def from_value(cls, value: object, source: str | Path) -> EmbeddingUse | None:
        """Parse the config's `embedding`; raise `ConfigError` if it can't be used."""
        if value is None:
            return None
        found = value if isinstance(value, dict) else {}
        pooling, instruction = found.get("pooling"), found.get("instruction")
        if pooling not in POOLINGS or not (instruction is None or is_text(instruction)):
            raise ConfigError(
                f"{source}: embedding is {shown(value)}, and must have a pooling, {' or '.join(POOLINGS)}, and "
                "may have an instruction, a text."
            )
        return cls(pooling, instruction)


GRADED_AXES = ("instruction_following", "verbosity", "truthfulness", "harmlessness")
"""What single answers may be graded for, in three levels."""


@dataclass(frozen=True)
class RewardUse:
    """What the reward head of an adapter's folder computes, besides the reward: grades of these axes."""

    grades: tuple[str, ...] = ()

    @classmethod
    def from_value(cls, value: object, source: str | Path) -> RewardUse | None:
        """Parse the config's `reward`; raise `ConfigError` if it can't be used."""
        if value is None:
            return None
        grades = value.get("grades") if isinstance(value, dict) else None
        if not isinstance(grades, list) or not set(map(str, grades)) <= set(GRADED_AXES):
            raise ConfigError(
                f"{source}: reward is {shown(value)}, and must have grades, a list of "
                f"{', '.join(GRADED_AXES)} or none of them."
            )
        return cls.of(grades)

    @classmethod
    def of(cls, grades: Collection[str]) -> RewardUse:
        """Make a use whose axes have their usual order."""
        return cls(tuple(axis for axis in GRADED_AXES if axis in grades))


@dataclass(frozen=True)
class AdapterConfig:
    """The content of an adapter folder's `adapter_config.json`."""

    rank: int  # columns of A and rows of B, the same for every pair in the folder
    scale: float  # alpha / rank
    num_layers: int  # how many blocks, from the last, may carry the adapter (mlx-lm's meaning)
    keys: tuple[str, ...] = ()  # adapted layers within a block, such as `mlp.up_proj`
    dropout: float = 0.0  # of the inputs of A in training
    base_model_fingerprint: str | None = None  # None when unknown, as in folders of mlx-lm
    embedding: EmbeddingUse | None = None  # of an adapter that was trained for embeddings
    reward: RewardUse | None = None  # of an adapter with a reward head

    def to_dict(self) -> dict[str, object]:
        """Return the content of `adapter_config.json`."""
        values: dict[str, object] = {
            "fine_tune_type": "lora",
            "num_layers": self.num_layers,
            "lora_parameters": {
                "rank": self.rank,
                "scale": self.scale,
                "dropout": self.dropout,
                "keys": list(self.keys),
            },
        }
        if self.base_model_fingerprint is not None:
            values["base_model_fingerprint"] = self.base_model_fingerprint
        if self.embedding is not None:
            values["embedding"] = asdict(self.embedding)
        if self.reward is not None:
            values["reward"] = {"grades": list(self.reward.grades)}
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str | Path) -> AdapterConfig:
        """Parse the content of an `adapter_config.json`; options of mlx-lm's training are ignored.

        Raises `ConfigError`, which names what is missing or can't be used, and `source`.
        """
        kind = values.get("fine_tune_type", "lora")
        if kind != "lora":
            raise ConfigError(
                f"{source}: fine_tune_type is {shown(kind)}; 'lora' is the kind that works here. Models of "
                "mlx-lm that are float, or in mlx-lm's format, run adapters of other kinds as their only one "
                "(load(adapter_path=...), generate --adapter-path)."
            )
        if "peft_type" in values:
            raise ConfigError(
                f"{source} is of PEFT. Convert the folder: afm-mlx adapter convert --adapter-path FOLDER --to "
                "mlx-lm --output OUT."
            )
        parameters = values.get("lora_parameters")
        if not isinstance(parameters, dict):
            raise ConfigError(f"{source}: lora_parameters is missing; it holds rank and scale.")
        rank: Any = parameters.get("rank")
        scale: Any = parameters.get("scale")
        dropout, num_layers = parameters.get("dropout", 0.0), values.get("num_layers", -1)
        keys, fingerprint = parameters.get("keys") or (), values.get("base_model_fingerprint")
        is_fingerprint = fingerprint is None or is_text(fingerprint)
        are_names = isinstance(keys, list | tuple) and all(isinstance(name, str) for name in keys)
        for name, value, holds, allowed in (
            ("rank", rank, is_rank(rank), f"a whole number of 1 to {MAX_RANK}"),
            ("scale", scale, is_number(scale), "a finite number of float32, alpha / rank"),
            ("dropout", dropout, is_number(dropout) and 0 <= dropout < 1, "in [0, 1)"),
            ("num_layers", num_layers, type(num_layers) is int, "a whole number, -1 for all"),
            ("keys", keys, are_names, "a list of layer names"),
            ("base_model_fingerprint", fingerprint, is_fingerprint, "a string of Unicode"),
        ):
            if not holds:
                raise ConfigError(f"{source}: {name} is {shown(value)}, and must be {allowed}.")
        return cls(
            rank,
            float(scale),
            num_layers,
            tuple(keys),
            float(dropout),
            fingerprint,
            EmbeddingUse.from_value(values.get("embedding"), source),
            RewardUse.from_value(values.get("reward"), source),
        )


def embedding_use(path: str | Path) -> EmbeddingUse | None:
    """Return how an adapter is used for embeddings; None if its folder doesn't say, as other formats don't.

    Raises `ConfigError` when the config can't be used.
    """
    config = Path(path) / CONFIG_NAME
    if not config.is_file():
        return None
    return EmbeddingUse.from_value(read_config_json(config).get("embedding"), config)


def save_adapter(
    folder: str | Path, tensors: Mapping[str, mx.array], config: AdapterConfig
) -> None:
    """Write an adapter folder; each of its two files is replaced whole or not at all.

    Raises `CheckpointError` when the tensors are no LoRA pairs of the config's rank, `AFMError` when the disk
    is full.
    """
    folder = Path(folder)
    check_pairs(tensors, config, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / TENSORS_NAME) as path:
            save_file(path, dict(sorted(tensors.items())))
        with atomic_write(folder / CONFIG_NAME) as path:
            text = json.dumps(config.to_dict(), indent=4, sort_keys=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise AFMError(f"The adapter folder {folder} can't be written: {error}.") from None


def load_adapter(folder: str | Path) -> tuple[dict[str, mx.array], AdapterConfig]:
    """Read an adapter folder as `open_folder` does; the tensors are lazy, and NaN is not looked for."""
    stored, config = open_folder(folder)
    return load_stored(stored), config


def open_folder(folder: str | Path) -> tuple[dict[str, StoredTensor], AdapterConfig]:
    """Read the header of an adapter folder's tensors, and its config.

    Raises `CheckpointError` when files are missing, damaged, or hold no LoRA pairs of the config's rank, and
    `ConfigError` when the config can't be used.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is no folder; an adapter is a folder with {TENSORS_NAME} and {CONFIG_NAME}. Other "
            "formats become one: afm-mlx adapter convert --adapter-path PATH --to mlx-lm --output OUT."
        )
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise ConfigError(
            f"{path} is missing; an adapter folder holds it and {TENSORS_NAME}. Other formats become such a "
            "folder: afm-mlx adapter convert."
        )
    config = AdapterConfig.from_dict(read_config_json(path), path)
    stored = read_header(folder / TENSORS_NAME)
    check_pairs(stored, config, folder)
    return stored, config


def check_pairs(
    tensors: Mapping[str, LoRATensor], config: AdapterConfig, source: str | Path
) -> None:
    """Raise `CheckpointError` unless names, shapes and types are LoRA pairs of the config's rank."""
    check_floating(tensors, source)
    experts = {_layer(name) for name, tensor in tensors.items() if len(tensor.shape) == 3}
    if experts:
        raise CheckpointError(
            f"{source} changes each expert of {named(', '.join(sorted(experts)))}. Such an adapter runs as the "
            "only one of a float model, or one in mlx-lm's format (load(adapter_path=...), generate "
            "--adapter-path). To switch adapters, train one without these layers (--keys)."
        )
    for name, tensor in tensors.items():
        match = _TENSOR_NAME.fullmatch(name)
        if match is None:
            raise CheckpointError(
                f"{source}: {named(name)} is no LoRA tensor; names end in lora_a or lora_b, with .0 to .2 "
                "for a fused layer."
            )
        side = match["side"]
        other = f"{match['layer']}.lora_{'b' if side == 'a' else 'a'}{match['part'] or ''}"
        if other not in tensors:
            raise CheckpointError(f"{source}: {named(name)} has no {named(other)}; LoRA has pairs.")
        shape = tuple(tensor.shape)
        if len(shape) != 2 or shape[1 if side == "a" else 0] != config.rank:
            allowed = f"[in, {config.rank}]" if side == "a" else f"[{config.rank}, out]"
            raise CheckpointError(
                f"{source}: {named(name)} is {shown(list(shape))}, and rank {config.rank} needs {allowed}."
            )
    if not tensors:
        raise CheckpointError(f"{source} holds no LoRA tensors.")


def check_floating(tensors: Mapping[str, LoRATensor], source: str | Path) -> None:
    """Raise `CheckpointError` for a tensor of integers or booleans."""
    for name, tensor in tensors.items():
        if not mx.issubdtype(tensor.dtype, mx.floating):
            kind = str(tensor.dtype).removeprefix("mlx.core.")
            raise CheckpointError(
                f"{source}: {named(name)} is {kind}; an adapter's tensors are float16, bfloat16 or float32. "
                "The file is damaged, or of a format that is not read here."
            )


def _layer(name: str) -> str:
    return name.rpartition(".lora_")[0]


def is_a(name: str) -> bool:
    """Return True if a tensor's name is of an A (inputs, rank), False for a B (rank, outputs)."""
    return ".lora_a" in name
