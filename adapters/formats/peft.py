"""Folders of Hugging Face's PEFT: `adapter_model.safetensors` and `adapter_config.json`.

`base_model.model.<layer>.lora_A.weight` is (rank, inputs) and `lora_B.weight` (outputs, rank): both transposed.
The layer computes `y = W x + scale * B A x`, with `scale = lora_alpha / r`, or `lora_alpha / sqrt(r)` with
rsLoRA; patterns give single layers other ranks and alphas. Pairs of lower rank are filled up with zeros to the
highest, and B is multiplied, in float32, where scales differ. Options that change nothing that is computed are
ignored, and all others refused by name, unknown ones too.

An AFM model's queries, keys and values may be one layer, `qkv_proj`, or three, `q_proj`, `k_proj` and `v_proj`.
PEFT has one A for the fused layer. Three different A become one of three times the rank, and B is zero where an
A is not its own; a B of that form is taken apart again when it is read. Layers of mlx-lm's models have mlx-lm's
names, which are transformers' as a rule.

Source: `peft` 0.21, `peft/utils/save_and_load.py`, `peft/tuners/lora/config.py`, `get_pattern_key`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from safetensors import safe_open

from afm_mlx.adapters.adapter_folder import CONFIG_NAME, AdapterConfig, is_a
from afm_mlx.adapters.formats.pair_order import (
    Architecture,
    Tensors,
    check_names,
    complete_fused,
    exact_alpha,
    keys_of,
    layer_of,
    num_layers_of,
)
from afm_mlx.adapters.target_modules import ZooBase
from afm_mlx.checkpoint.safetensors_file import (
    StoredTensor,
    load_stored,
    read_header,
    reading,
    save_file,
)
from afm_mlx.config import read_config_json
from afm_mlx.errors import CheckpointError, ConfigError, named, shown
from afm_mlx.files import atomic_folder
from afm_mlx.json_values import MAX_RANK, is_number, is_rank, is_text

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
# Architectures whose linear layers mlx-lm multiplies by constants of config.json when it reads them.
_FOLDED = ("falcon_h1",)


def read(path: Path, model_config: Architecture | None) -> tuple[Tensors, AdapterConfig]:
    """Read a folder; see `read_adapter`."""
    zoo = _zoo_of(model_config, path)
    settings = read_settings(path / CONFIG_NAME)
    if not (path / TENSORS_NAME).is_file() and (path / "adapter_model.bin").is_file():
        raise CheckpointError(
            f"{path} holds adapter_model.bin, a pickle that could run code; only {TENSORS_NAME} is read. Save "
            "it again with PEFT: model.save_pretrained(folder, safe_serialization=True)."
        )
    stored = read_header(path / TENSORS_NAME)
    matrices = _matrices(path, stored, zoo)
    loaded = load_stored(stored)
    tensors: Tensors = {}
    scales: dict[str, float] = {}
    for layer, names in sorted(matrices.items()):
        matched = _NAME.fullmatch(names["A"])
        assert matched is not None
        rank, scale = settings.of(matched["layer"].removeprefix(PREFIX))
        a, b = loaded[names["A"]], loaded[names["B"]]
        if a.ndim != 2 or b.ndim != 2 or (a.shape[0], b.shape[1]) != (rank, rank):
            raise CheckpointError(
                f"{path}: the pair of {named(layer)} is {shown(list(a.shape))} and {shown(list(b.shape))}, "
                f"and rank {rank} needs [{rank}, in] and [out, {rank}]."
            )
        with reading(path / TENSORS_NAME):
            pairs = _pairs(path, layer, a, b, zoo)
        tensors |= pairs
        scales |= dict.fromkeys(pairs, scale)
    rank, scale = _common(tensors, scales, path)
    with safe_open(path / TENSORS_NAME, framework="np") as file:
        fingerprint = (file.metadata() or {}).get(FINGERPRINT)
    return tensors, AdapterConfig(
        rank=rank,
        scale=scale,
        num_layers=num_layers_of(tensors, model_config),
        keys=keys_of(tensors),
        dropout=settings.dropout,
        base_model_fingerprint=fingerprint if is_text(fingerprint) else None,
    )


def _zoo_of(config: Architecture | None, path: Path) -> ZooBase | None:
    """Return the base if it is one of mlx-lm's zoo; raise if mlx-lm changes the weights that PEFT adapts."""
    if not isinstance(config, ZooBase):
        return None
    if config.model_type in _FOLDED:
        raise CheckpointError(
            f"{path}: PEFT's adapters are for the published weights, and mlx-lm stores a {config.model_type} "
            "with its multipliers inside the weights, so the numbers would be wrong. Train the adapter here, "
            "or with mlx-lm."
        )
    return config


def _pairs(path: Path, layer: str, a: mx.array, b: mx.array, zoo: ZooBase | None) -> Tensors:
    """Return the pair `a`, `b` of PEFT's `layer` as tensors by their names in an adapter folder.

    A fused layer of queries, keys and values of an AFM model has three pairs.
    """
    if zoo is not None:
        return {f"{layer}.lora_a": a.T, f"{layer}.lora_b": b.T}
    if match := _SPLIT.fullmatch(layer):
        part = _PARTS[match["which"]]
        fused = f"{match['attention']}.qkv_proj"
        return {f"{fused}.lora_a.{part}": a.T, f"{fused}.lora_b.{part}": b.T}
    if not layer.endswith(".qkv_proj"):
        return {f"{layer}.lora_a": a.T, f"{layer}.lora_b": b.T}
    # Queries are as wide as the model; keys and values share the other rows.
    width, rows = a.shape[1], b.shape[0] - a.shape[1]
    if rows <= 0 or rows % 2:
        raise CheckpointError(
            f"{path}: lora_B of {named(layer)} has {b.shape[0]} rows; queries have {width}, and keys and "
            "values must share the rest evenly."
        )
    sections = mx.split(b, [width, width + rows // 2])
    third, rest = divmod(a.shape[0], 3)
    own = [slice(None)] * 3
    if not rest:  # each section may have columns of its own, and zeros elsewhere
        blocks = [mx.split(section, 3, axis=1) for section in sections]
        others = [blocks[i][j] for i in range(3) for j in range(3) if i != j]
        if not any(mx.any(block).item() for block in others):
            own = [slice(part * third, (part + 1) * third) for part in range(3)]
    tensors = {}
    for part, section in enumerate(sections):
        tensors[f"{layer}.lora_a.{part}"] = a[own[part]].T
        tensors[f"{layer}.lora_b.{part}"] = section[:, own[part]].T
    return tensors


def _matrices(
    path: Path, stored: Mapping[str, StoredTensor], zoo: ZooBase | None
) -> dict[str, dict[str, str]]:
    """Return a mapping from each layer's path to the names that its "A" and "B" have in the file."""
    found: dict[str, dict[str, str]] = {}
    for name, tensor in stored.items():
        match = _NAME.fullmatch(name)
        if match is None or not mx.issubdtype(tensor.dtype, mx.floating):
            raise CheckpointError(
                f"{path}: {named(name)} ({tensor.dtype}) is no matrix of a LoRA pair; names end in "
                "lora_A.weight and lora_B.weight. Other tensors would change what the model computes."
            )
        layer = match["layer"].removeprefix(PREFIX)
        if not layer.startswith("model.") and (zoo is None or layer not in zoo.shapes):
            layer = f"model.{layer}"
        # Before patterns are matched: long names would take long.
        if zoo is None:
            fused = _SPLIT.sub(r"\g<attention>.qkv_proj", layer)
            check_names([f"{fused}.lora_a{'.0' * fused.endswith('.qkv_proj')}"], path)
        elif layer not in zoo.shapes:
            raise CheckpointError(
                f"{path}: the base, a {zoo.model_type}, has no linear layer {named(layer)} that an adapter can "
                "change."
            )
        if match["side"] in found.setdefault(layer, {}):
            raise CheckpointError(
                f"{path}: two tensors are lora_{match['side']} of {named(layer)}."
            )
        found[layer][match["side"]] = name
    alone = [layer for layer, names in found.items() if len(names) == 1]
    if alone or not found:
        what = f"one matrix of {named(alone[0])}" if alone else "no tensors"
        raise CheckpointError(f"{path} holds {what}; LoRA has pairs.")
    for layer in found if zoo is None else ():
        if (match := _SPLIT.fullmatch(layer)) and f"{match['attention']}.qkv_proj" in found:
            raise CheckpointError(
                f"{path} holds pairs of {named(layer)} and of {named(match['attention'])}.qkv_proj, which "
                "holds it too. A model has one or the other."
            )
    return found


def _common(tensors: Tensors, scales: Mapping[str, float], path: Path) -> tuple[int, float]:
    """Convert all pairs, in place, to the highest rank and the largest scale; return that rank and scale.

    `scales` has the scale of each tensor's pair.
    """
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
    model_config: Architecture | None,
    qkv: str = "fused",
) -> None:
    """Write a folder that PEFT loads; see `write_adapter`."""
    if qkv not in QKV:
        raise CheckpointError(f"qkv is {shown(qkv)}; allowed are {', '.join(QKV)}.")
    if _zoo_of(model_config, path) is None:
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
    ranks = {layer: a.shape[0] for layer, (a, _) in pairs.items()}
    others = {layer: rank for layer, rank in ranks.items() if rank != config.rank}
    fused = [layer for layer in ranks if layer.endswith("qkv_proj")]
    if len(set(others.values())) == 1 and sorted(others) == sorted(fused):
        others = {"qkv_proj": next(iter(others.values()))}
    values = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": config.rank,
        "lora_alpha": exact_alpha(config.rank, config.scale),
        "lora_dropout": config.dropout,
        "use_rslora": False,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        # Whole paths: an adapter need not be on every block.
        "target_modules": sorted(ranks),
        "rank_pattern": others,
        "alpha_pattern": {layer: exact_alpha(rank, config.scale) for layer, rank in others.items()},
    }
    with atomic_folder(path) as folder:
        save_file(folder / TENSORS_NAME, matrices, metadata)
        text = json.dumps(values, indent=2, sort_keys=True)
        (folder / CONFIG_NAME).write_text(text, encoding="utf-8")


def _fused(path: Path, layer: str, parts: Mapping[int, Matrices]) -> Matrices:
    """Join the pairs of queries, keys and values: at their rank if they share one A, else at three times it."""
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


# -- the config


# Options that change what an adapter computes, and their names in errors.
_MUST_BE_OFF = {
    "use_dora": "DoRA",
    "lora_bias": "a bias of B",
    "modules_to_save": "layers that were trained whole",
    "fan_in_fan_out": "transposed base layers",
    "layer_replication": "replicated layers",
    "trainable_token_indices": "trained tokens",
    "target_parameters": "adapters of bare parameters",
    "alora_invocation_tokens": "activated LoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
}
# Options about how an adapter was made, or which layers it has: its tensors show that.
_WITHOUT_EFFECT = set(
    """
    task_type auto_mapping peft_version base_model_name_or_path revision inference_mode target_modules
    exclude_modules layers_to_transform layers_pattern megatron_config megatron_core loftq_config eva_config
    corda_config lora_ga_config qalora_group_size runtime_config ensure_weight_tying unsloth_fixed
    """.split()
)
_READ = set(
    """
    peft_type bias init_lora_weights r lora_alpha lora_dropout use_rslora rank_pattern alpha_pattern
    """.split()
)
_MAX_PATTERNS = 2000  # the 3B has 280 layers
_PATTERNS = "simple patterns of layers (three of * + ? { ( at most)"
# Others, such as pissa and loftq, change the base model's weights too.
_INITS = (True, False, "gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True)
class LoRASettings:
    """The options of a config that decide what the adapter computes.

    `ranks` and `alphas` are of single layers, by patterns of layer names; `rs` is True for rsLoRA's scales.
    """

    rank: int
    alpha: float
    rs: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    dropout: float

    def of(self, layer: str) -> tuple[int, float]:
        """Return the rank and scale of a layer."""
        rank = self.ranks.get(_pattern(self.ranks, layer), self.rank)
        alpha = self.alphas.get(_pattern(self.alphas, layer), self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.rs else rank)


def read_settings(path: Path) -> LoRASettings:
    """Read a PEFT config, or raise `ConfigError` with the option that can't be converted, or its value."""
    values = read_config_json(path)
    kind = values.get("peft_type")
    if kind != "LORA":
        raise ConfigError(
            f"{path}: peft_type is {shown(kind)}; 'LORA' is the kind that works here."
        )
    for name, what in _MUST_BE_OFF.items():
        if values.get(name):
            raise ConfigError(
                f"{path}: {name} is {shown(values[name])}; {what} can't be converted."
            )
    known = _MUST_BE_OFF.keys() | _WITHOUT_EFFECT | _READ
    unknown = next((name for name, value in values.items() if value and name not in known), None)
    if unknown is not None:
        raise ConfigError(
            f"{path} has the option {shown(unknown)}, which is unknown here and may change what the adapter "
            "computes. Set it to null if it doesn't."
        )
    bias, init = values.get("bias", "none"), values.get("init_lora_weights", True)
    rank: Any = values.get("r")
    alpha: Any = values.get("lora_alpha")
    dropout, rs = values.get("lora_dropout", 0.0), values.get("use_rslora", False)
    ranks, alphas = (values.get(key) or {} for key in ("rank_pattern", "alpha_pattern"))

    def is_pattern(value: object, allowed: Callable[[object], bool]) -> bool:
        if not isinstance(value, dict) or len(value) > _MAX_PATTERNS:
            return False
        return all(_is_safe(k) and allowed(v) for k, v in value.items())

    base_stays = "one that leaves the base's weights as they are"
    for name, value, holds, allowed in (
        ("bias", bias, bias == "none", "'none': the base has no biases"),
        ("init_lora_weights", init, init in _INITS, base_stays),
        ("r", rank, is_rank(rank), f"a whole number of 1 to {MAX_RANK}"),
        ("lora_alpha", alpha, is_number(alpha), "a finite number of float32"),
        ("lora_dropout", dropout, is_number(dropout) and 0 <= dropout < 1, "in [0, 1)"),
        ("use_rslora", rs, isinstance(rs, bool), "true or false"),
        ("rank_pattern", ranks, is_pattern(ranks, is_rank), f"{_PATTERNS} to ranks"),
        ("alpha_pattern", alphas, is_pattern(alphas, is_number), f"{_PATTERNS} to numbers"),
    ):
        if not holds:
            raise ConfigError(f"{path}: {name} is {shown(value)}, and must be {allowed}.")
    return LoRASettings(rank, float(alpha), rs, ranks, alphas, float(dropout))


def _is_safe(pattern: str) -> bool:
    """Return True if an untrusted regular expression compiles and can't take forever to match."""
    # Each group and each repetition multiplies the ways to try; a name has some 40 characters.
    bare = re.sub(r"\\.", "", pattern).replace("(?:", "(")
    if len(pattern) > 200 or re.search(r"\)[*+?{]", bare) or len(re.findall(r"[*+?{(]", bare)) > 3:
        return False
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def _pattern(patterns: Mapping[str, object], layer: str) -> str:
    """Return the first pattern that matches the layer's name or its end; the name if there is none."""
    return next((p for p in patterns if re.match(rf"(.*\.)?({p})$", layer)), layer)
