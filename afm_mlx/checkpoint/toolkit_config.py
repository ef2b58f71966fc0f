"""The JSON that describes a toolkit checkpoint, read as plain JSON.

`tamm` writes only what differs from its defaults, so the defaults stand here. The type tag has had several
spellings: `models:AFMTextV7Config` in the adapter toolkit 26.0, `module_configs:AFMTextV7Config` in
tamm 0.2.0, each with or without `tamm:` before it.

Source: `tamm` 0.2.0, `tamm/models/afm_text/afm_text_v7.py`, `tamm/layers/common/config.py`,
`tamm/_adapters_v1/model_adapters/lora.py`, `tamm/ao/arch_optimizers/kv_quant.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afm_mlx.config import ModelConfig, read_config_json
from afm_mlx.errors import ConfigError, named, shown
from afm_mlx.json_values import MAX_RANK, is_number, is_rank

_ARCHITECTURE_DEFAULTS: dict[str, Any] = {
    "vocab_size": 153600,
    "hidden_dim": 2048,
    "num_layers": 56,
    "num_kv_reuse_layers": 21,
    "num_heads": 16,
    "num_kv_heads": 2,
    "hidden_dim_scale_factor": 3.25,
    "rope_theta": 500000.0,
}
# Fields that matter to training or to tamm only: none changes what the trained model computes.
_WITHOUT_EFFECT = set(
    """
    attention_dropout_p hidden_dropout_p include_loss_layer output_hidden_states output_attentions
    sdpa_implementation active_adapter pretrained_path pretrained device dtype freeze_params metadata model_id
    description is_deprecated replacement_model_id __package_requirements__
    """.split()
)


@dataclass(frozen=True)
class LoRASpec:
    """What the config says of one adapter; `y = W x + scale * B A x` with `scale = alpha / rank`."""

    rank: int
    alpha: float
    dropout: float

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True)
class ToolkitConfig:
    """A parsed config: the architecture and the adapters by id.

    An adapter of another kind than LoRA is kept by the name of its type, because it matters only when the
    checkpoint holds tensors of it.
    """

    model: ModelConfig
    adapters: dict[str, LoRASpec | str]


def is_toolkit_config(values: Mapping[str, Any]) -> bool:
    """True if a JSON object has tamm's type tag."""
    return isinstance(values.get("__tamm_type__"), str)


def find_toolkit_config(folder: Path, names: Iterable[str]) -> Path | None:
    """The first of these files in a folder that is there and that tamm wrote."""
    files = [folder / name for name in names if (folder / name).is_file()]
    return next((file for file in files if is_toolkit_config(read_config_json(file))), None)


def read_toolkit_config(path: str | Path) -> ToolkitConfig:
    """Parse a `*-config.json` of tamm.

    Raises:
        ConfigError: on another model type, unknown keys, and options that this package can't honour.
    """
    values = read_config_json(path)
    kind = _type_name(values)
    if kind != "AFMTextV7Config":
        raise ConfigError(
            f"{path}: __tamm_type__ is {shown(values.get('__tamm_type__'))}; AFMTextV7Config is the "
            "architecture that can be converted."
        )
    known = set(_ARCHITECTURE_DEFAULTS) | _WITHOUT_EFFECT
    unknown = sorted(set(values) - known - {"__tamm_type__", "adapters", "arch_optimizers"})
    if unknown:
        raise ConfigError(
            f"{path}: unknown keys {named(', '.join(unknown))}. They may change what the model computes, so it "
            f"is not converted. Known are {', '.join(sorted(_ARCHITECTURE_DEFAULTS))}, adapters and "
            "arch_optimizers."
        )
    fields = {key: values.get(key, default) for key, default in _ARCHITECTURE_DEFAULTS.items()}
    if fields["num_kv_heads"] is None:
        fields["num_kv_heads"] = fields["num_heads"]
    fields["kv_bits"] = _kv_bits(_objects(values, "arch_optimizers", path), path)
    adapters = {
        name: _adapter(entry, f"{path}: adapter {shown(name)}")
        for name, entry in _objects(values, "adapters", path).items()
    }
    return ToolkitConfig(ModelConfig.from_dict(fields, source=str(path)), adapters)


def _type_name(values: Mapping[str, Any]) -> str:
    return str(values.get("__tamm_type__")).split(":")[-1]


def _objects(values: Mapping[str, Any], key: str, path: str | Path) -> dict[str, dict[str, Any]]:
    entries = values.get(key) or {}
    if not isinstance(entries, dict) or not all(isinstance(e, dict) for e in entries.values()):
        raise ConfigError(f"{path}: {key} must be an object of objects.")
    return entries


def _kv_bits(optimizers: Mapping[str, dict[str, Any]], path: str | Path) -> int | None:
    for name, entry in optimizers.items():
        if _type_name(entry) != "KVQuantArchOptimizer":
            raise ConfigError(
                f"{path}: arch_optimizers {shown(name)} is {shown(entry.get('__tamm_type__'))}; "
                "KVQuantArchOptimizer is the one that can be converted."
            )
        if entry.get("skip_quantize_for_first_token", False):
            raise ConfigError(
                f"{path}: arch_optimizers {shown(name)} sets skip_quantize_for_first_token, which computes "
                "the prompt's logits from unquantized keys and values. This package always reads "
                "what the cache holds; set it to false if that is what you want."
            )
    return 8 if optimizers else None


def _adapter(entry: Mapping[str, Any], where: str) -> LoRASpec | str:
    if _type_name(entry) != "LoRAModelAdapter":
        return str(entry.get("__tamm_type__"))
    rank, alpha, dropout = entry.get("rank", 8), entry.get("alpha"), entry.get("dropout_p", 0)
    alpha = rank if alpha is None else alpha
    if not is_rank(rank):
        raise ConfigError(
            f"{where}: rank is {shown(rank)}, and must be a whole number of 1 to {MAX_RANK}."
        )
    for name, value in (("alpha", alpha), ("dropout_p", dropout)):
        if not is_number(value) or value < 0:
            raise ConfigError(
                f"{where}: {name} is {shown(value)}, and must be a number of 0 or more."
            )
    return LoRASpec(rank, float(alpha), float(dropout))
