"""Folders of Hugging Face's PEFT: `adapter_model.safetensors` and `adapter_config.json`.

`base_model.model.<layer>.lora_A.weight` is (rank, inputs) and `lora_B.weight` (outputs, rank): both transposed.
The layer computes `y = W x + scale * B A x`; ranks and scales are those of `peft_config.py`. Where they differ,
pairs are filled up with zeros to the highest rank, and B takes what its scale differs by, in float32.

Queries, keys and values may be one layer, `qkv_proj`, or three, `q_proj`, `k_proj` and `v_proj`. PEFT has one A
for the fused layer. Three different A become one of three times the rank, and B is zero where an A is not its
own; a B of that form is taken apart again when it is read.

Source: `peft` 0.21, `peft/utils/save_and_load.py`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
from safetensors import safe_open

from afm_mlx.adapters.adapter_folder import CONFIG_NAME, AdapterConfig, is_a
from afm_mlx.adapters.formats.pair_order import (
    Tensors,
    check_names,
    complete_fused,
    keys_of,
    layer_of,
    num_layers_of,
)
from afm_mlx.adapters.formats.peft_config import config_json, read_settings
from afm_mlx.checkpoint.safetensors_file import (
    StoredTensor,
    load_stored,
    read_header,
    reading,
    save_file,
)
from afm_mlx.config import ModelConfig
from afm_mlx.errors import CheckpointError, named, shown
from afm_mlx.files import atomic_folder
from afm_mlx.json_values import is_text

TENSORS_NAME = "adapter_model.safetensors"
Matrices = tuple[mx.array, mx.array]
"""A (rank, inputs) and B (outputs, rank): as PEFT stores them."""

PREFIX = "base_model.model."
FINGERPRINT = "base_model_fingerprint"
QKV = ("fused", "split")

_NAME = re.compile(r"(?P<layer>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
_SPLIT = re.compile(r"(?P<attention>model\.layers\.\d+\.self_attn)\.(?P<which>[qkv])_proj")
_PARTS = {"q": 0, "k": 1, "v": 2}
_MAX_FILL = 64


def read(path: Path, model_config: ModelConfig | None) -> tuple[Tensors, AdapterConfig]:
    """Read a folder; see `read_adapter`."""
    settings = read_settings(path / CONFIG_NAME)
    if not (path / TENSORS_NAME).is_file() and (path / "adapter_model.bin").is_file():
        raise CheckpointError(
            f"{path} holds adapter_model.bin, a pickle that could run code; only {TENSORS_NAME} is read. Save "
            "it again with PEFT: model.save_pretrained(folder, safe_serialization=True)."
        )
    stored = read_header(path / TENSORS_NAME)
    matrices = _matrices(path, stored)
    loaded = load_stored(stored)
    tensors: Tensors = {}
    scales: dict[str, float] = {}
    for layer, names in sorted(matrices.items()):
        matched = _NAME.fullmatch(names["A"])
        assert matched is not None
        rank, scale = settings.of(matched["layer"].removeprefix(PREFIX))
        a, b = loaded[names["A"]], loaded[names["B"]]
        _check_pair(path, layer, a, b, rank)
        with reading(path / TENSORS_NAME):
            pairs = _pairs(path, layer, a, b)
        tensors |= pairs
        scales |= dict.fromkeys(pairs, scale)
    rank, scale = _common(tensors, scales, path)
    return tensors, AdapterConfig(
        rank=rank,
        scale=scale,
        num_layers=num_layers_of(tensors, model_config),
        keys=keys_of(tensors),
        dropout=settings.dropout,
        base_model_fingerprint=_fingerprint(path / TENSORS_NAME),
    )


def _fingerprint(path: Path) -> str | None:
    with safe_open(path, framework="np") as file:
        value = (file.metadata() or {}).get(FINGERPRINT)
    return value if is_text(value) else None


def _matrices(path: Path, stored: Mapping[str, StoredTensor]) -> dict[str, dict[str, str]]:
    """Names of A and B in the file, by layer."""
    found: dict[str, dict[str, str]] = {}
    for name, tensor in stored.items():
        match = _NAME.fullmatch(name)
        if match is None or not mx.issubdtype(tensor.dtype, mx.floating):
            raise CheckpointError(
                f"{path}: {named(name)} ({tensor.dtype}) is no matrix of a LoRA pair; names end in "
                "lora_A.weight and lora_B.weight. Other tensors would change what the model computes."
            )
        layer = match["layer"].removeprefix(PREFIX)
        if not layer.startswith("model."):
            layer = f"model.{layer}"
        # Before patterns are matched: long names would take long.
        fused = _SPLIT.sub(r"\g<attention>.qkv_proj", layer)
        check_names([f"{fused}.lora_a{'.0' * fused.endswith('.qkv_proj')}"], path)
        if match["side"] in found.setdefault(layer, {}):
            raise CheckpointError(
                f"{path}: two tensors are lora_{match['side']} of {named(layer)}."
            )
        found[layer][match["side"]] = name
    alone = [layer for layer, names in found.items() if len(names) == 1]
    if alone or not found:
        what = f"one matrix of {named(alone[0])}" if alone else "no tensors"
        raise CheckpointError(f"{path} holds {what}; LoRA has pairs.")
    for layer in found:
        if (match := _SPLIT.fullmatch(layer)) and f"{match['attention']}.qkv_proj" in found:
            raise CheckpointError(
                f"{path} holds pairs of {named(layer)} and of {named(match['attention'])}.qkv_proj, which "
                "holds it too. A model has one or the other."
            )
    return found


def _check_pair(path: Path, layer: str, a: mx.array, b: mx.array, rank: int) -> None:
    if a.ndim != 2 or b.ndim != 2 or (a.shape[0], b.shape[1]) != (rank, rank):
        raise CheckpointError(
            f"{path}: the pair of {named(layer)} is {shown(list(a.shape))} and {shown(list(b.shape))}, and "
            f"rank {rank} needs [{rank}, in] and [out, {rank}]."
        )


def _pairs(path: Path, layer: str, a: mx.array, b: mx.array) -> Tensors:
    """A layer's tensors by our names; a fused layer has three pairs."""
    if match := _SPLIT.fullmatch(layer):
        part = _PARTS[match["which"]]
        fused = f"{match['attention']}.qkv_proj"
        return {f"{fused}.lora_a.{part}": a.T, f"{fused}.lora_b.{part}": b.T}
    if not layer.endswith(".qkv_proj"):
        return {f"{layer}.lora_a": a.T, f"{layer}.lora_b": b.T}
    # Queries are as wide as the model, and the others share what is left.
    width, rows = a.shape[1], b.shape[0] - a.shape[1]
    if rows <= 0 or rows % 2:
        raise CheckpointError(
            f"{path}: lora_B of {named(layer)} has {b.shape[0]} rows; queries have {width}, and keys and "
            "values must share the rest evenly."
        )
    sections = mx.split(b, [width, width + rows // 2])
    stacked = _is_block_diagonal(sections)
    tensors = {}
    for part, section in enumerate(sections):
        rank = a.shape[0] // 3 if stacked else a.shape[0]
        own = slice(part * rank, (part + 1) * rank) if stacked else slice(None)
        tensors[f"{layer}.lora_a.{part}"] = a[own].T
        tensors[f"{layer}.lora_b.{part}"] = section[:, own].T
    return tensors


def _is_block_diagonal(sections: list[mx.array]) -> bool:
    rank = sections[0].shape[1]
    if rank % 3:
        return False
    blocks = [mx.split(section, 3, axis=1) for section in sections]
    others = [blocks[i][j] for i in range(3) for j in range(3) if i != j]
    return not any(mx.any(block).item() for block in others)


def _common(tensors: Tensors, scales: Mapping[str, float], path: Path) -> tuple[int, float]:
    """Give all pairs the highest rank and the largest scale, in place; returns the two."""
    ranks = {name: tensors[name].shape[1 if is_a(name) else 0] for name in tensors}
    rank, scale = max(ranks.values()), max(scales.values(), key=abs)
    stored = sum(tensor.size for tensor in tensors.values())
    filled = sum(tensor.size // ranks[name] * rank for name, tensor in tensors.items())
    if filled > _MAX_FILL * stored:
        raise CheckpointError(
            f"{path} has pairs of ranks {min(ranks.values())} to {rank}. Filled up to one rank they would be "
            f"{filled / stored:.0f} times as large; {_MAX_FILL} times is allowed. Train with "
            "ranks that differ less."
        )
    for name, tensor in tensors.items():
        # Quotients of two alphas and ranks may differ in the last bit and mean the same.
        if not is_a(name) and not math.isclose(scales[name], scale, rel_tol=1e-12):
            tensor = tensor.astype(mx.float32) * (scales[name] / scale)
        if missing := rank - ranks[name]:
            widths = ((0, 0), (0, missing)) if is_a(name) else ((0, missing), (0, 0))
            tensor = mx.pad(tensor, widths)
        tensors[name] = tensor
    return rank, scale


def write(
    path: Path,
    tensors: Mapping[str, mx.array],
    config: AdapterConfig,
    model_config: ModelConfig | None,
    qkv: str = "fused",
) -> None:
    """Write a folder that PEFT loads; see `write_adapter`."""
    if qkv not in QKV:
        raise CheckpointError(f"qkv is {shown(qkv)}; allowed are {', '.join(QKV)}.")
    check_names(tensors, path)
    if model_config is not None and qkv == "fused":
        tensors = complete_fused(tensors, model_config, config.rank)
    pairs: dict[str, Matrices] = {}
    for layer in dict.fromkeys(layer_of(name) for name in tensors):
        if f"{layer}.lora_a" in tensors:
            pairs[layer] = tensors[f"{layer}.lora_a"].T, tensors[f"{layer}.lora_b"].T
            continue
        parts = {
            i: (tensors[f"{layer}.lora_a.{i}"].T, tensors[f"{layer}.lora_b.{i}"].T)
            for i in range(3)
            if f"{layer}.lora_a.{i}" in tensors
        }
        if qkv == "fused":
            pairs[layer] = _fused(path, layer, parts)
        else:
            start = layer.removesuffix("qkv_proj")
            pairs |= {f"{start}{which}_proj": parts[i] for which, i in _PARTS.items() if i in parts}
    matrices = {f"{PREFIX}{layer}.lora_A.weight": a for layer, (a, _) in pairs.items()}
    matrices |= {f"{PREFIX}{layer}.lora_B.weight": b for layer, (_, b) in pairs.items()}
    metadata = {"format": "pt"}
    if config.base_model_fingerprint is not None:
        metadata[FINGERPRINT] = config.base_model_fingerprint
    values = config_json(config, {layer: a.shape[0] for layer, (a, _) in pairs.items()})
    with atomic_folder(path) as folder:
        save_file(folder / TENSORS_NAME, matrices, metadata)
        text = json.dumps(values, indent=2, sort_keys=True)
        (folder / CONFIG_NAME).write_text(text, encoding="utf-8")


def _fused(path: Path, layer: str, parts: Mapping[int, Matrices]) -> Matrices:
    """One pair for queries, keys and values, of their rank when they share one A, else of three times that."""
    if len(parts) != 3:
        raise CheckpointError(
            f"{path}: {named(layer)} has pairs for {len(parts)} of queries, keys and values. One fused "
            "layer needs the widths of all: name the model folder (--model), or write three layers "
            "(--qkv split)."
        )
    a, b = ([parts[i][side] for i in range(3)] for side in (0, 1))
    if all(mx.array_equal(a[0], other).item() for other in a[1:]):
        return a[0], mx.concatenate(b)
    rank = a[0].shape[0]
    wide = [mx.pad(each, ((0, 0), (i * rank, (2 - i) * rank))) for i, each in enumerate(b)]
    return mx.concatenate(a), mx.concatenate(wide)
