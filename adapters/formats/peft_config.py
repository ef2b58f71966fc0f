"""The `adapter_config.json` of a PEFT folder: what an adapter computes, or why it can't be read.

A layer has the scale `lora_alpha / r`, or `lora_alpha / sqrt(r)` with rsLoRA. Patterns give single layers ranks
and alphas of their own. Other options change nothing that is computed or are refused by name, unknown ones too.

Source: `peft` 0.21, `peft/tuners/lora/config.py`, `get_pattern_key`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afm_mlx.adapters.adapter_folder import AdapterConfig
from afm_mlx.adapters.formats.pair_order import exact_alpha
from afm_mlx.config import read_config_json
from afm_mlx.errors import ConfigError, shown
from afm_mlx.json_values import MAX_RANK, is_number, is_rank

# Options that change what an adapter computes, and what each is called.
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
# Options that say how an adapter was made or which layers it has, which its tensors show.
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
    """The options of a config that say what the adapter computes.

    Args:
        rank, alpha: rank and alpha of layers that no pattern names.
        rs: whether scales are those of rsLoRA.
        ranks, alphas: ranks and alphas of single layers, by patterns of their names, see `get_pattern_key`.
        dropout: share of a layer's inputs that training dropped.
    """

    rank: int
    alpha: float
    rs: bool
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    dropout: float

    def of(self, layer: str) -> tuple[int, float]:
        """Rank and scale of a layer."""
        rank = self.ranks.get(_pattern(self.ranks, layer), self.rank)
        alpha = self.alphas.get(_pattern(self.alphas, layer), self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.rs else rank)


def read_settings(path: Path) -> LoRASettings:
    """Read a config.

    Raises:
        ConfigError: names the option that can't be converted, or its value that can't be used.
    """
    values = read_config_json(path)
    _check_options(values, path)
    bias, init = values.get("bias", "none"), values.get("init_lora_weights", True)
    rank: Any = values.get("r")
    alpha: Any = values.get("lora_alpha")
    dropout, rs = values.get("lora_dropout", 0.0), values.get("use_rslora", False)
    ranks, alphas = (values.get(key) or {} for key in ("rank_pattern", "alpha_pattern"))
    checks = (
        ("bias", bias, bias == "none", "'none': the base has no biases"),
        (
            "init_lora_weights",
            init,
            init in _INITS,
            "one that leaves the base's weights as they are",
        ),
        ("r", rank, is_rank(rank), f"a whole number of 1 to {MAX_RANK}"),
        ("lora_alpha", alpha, is_number(alpha), "a finite number of float32"),
        ("lora_dropout", dropout, is_number(dropout) and 0 <= dropout < 1, "in [0, 1)"),
        ("use_rslora", rs, isinstance(rs, bool), "true or false"),
        ("rank_pattern", ranks, _is_pattern(ranks, is_rank), f"{_PATTERNS} to ranks"),
        ("alpha_pattern", alphas, _is_pattern(alphas, is_number), f"{_PATTERNS} to numbers"),
    )
    for name, value, holds, allowed in checks:
        if not holds:
            raise ConfigError(f"{path}: {name} is {shown(value)}, and must be {allowed}.")
    return LoRASettings(rank, float(alpha), rs, ranks, alphas, float(dropout))


def _check_options(values: Mapping[str, Any], path: Path) -> None:
    """Raise `ConfigError` on options that would make an adapter compute something else."""
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


def _is_pattern(value: Any, allowed: Callable[[Any], bool]) -> bool:
    return (
        isinstance(value, dict)
        and len(value) <= _MAX_PATTERNS
        and all(_is_safe(k) and allowed(v) for k, v in value.items())
    )


def _is_safe(pattern: str) -> bool:
    """True if an untrusted regular expression compiles, and can't take forever to match."""
    # Each group and each repetition multiplies the ways to try; a name has some 40 characters.
    bare = re.sub(r"\\.", "", pattern).replace("(?:", "(")
    if len(pattern) > 200 or re.search(r"\)[*+?{]", bare) or len(re.findall(r"[*+?{(]", bare)) > 3:
        return False
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def _pattern(patterns: Mapping[str, Any], layer: str) -> str:
    """The first pattern that is the layer's name, or its end."""
    return next((p for p in patterns if re.match(rf"(.*\.)?({p})$", layer)), layer)


def config_json(config: AdapterConfig, ranks: Mapping[str, int]) -> dict[str, Any]:
    """The config that PEFT writes for a LoRA.

    Args:
        config: the adapter's rank, scale and layers.
        ranks: rank of each layer, by its path; they all have the same scale.
    """
    others = {layer: rank for layer, rank in ranks.items() if rank != config.rank}
    fused = [layer for layer in ranks if layer.endswith("qkv_proj")]
    if len(set(others.values())) == 1 and sorted(others) == sorted(fused):
        others = {"qkv_proj": next(iter(others.values()))}
    return {
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
