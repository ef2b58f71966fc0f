"""Adapters of Apple's training toolkit: a `.pt` file with the LoRA pairs of a state dict.

The toolkit's trainer saves no rank and alpha, which are in the base model's config. So reading looks for a
config of tamm's kind next to the file (`<stem>-config.json`, `<stem>.json`, `config.json`,
`base-model-config.json`), and writing adds one. Without a config, rank 32 means the toolkit's alpha of 16.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from afm_mlx.adapters.adapter_folder import AdapterConfig, check_pairs, is_a
from afm_mlx.adapters.formats.pair_order import (
    Tensors,
    check_fits,
    complete,
    config_for,
    exact_alpha,
    keys_of,
    num_layers_of,
    pair_targets,
    without_empty,
)
from afm_mlx.checkpoint.safetensors_file import array_bytes
from afm_mlx.checkpoint.toolkit_checkpoint import (
    LoRASpec,
    adapter_key,
    find_toolkit_config,
    import_torch,
    map_keys,
    mlx_dtype,
    open_state_dict,
    read_toolkit_config,
    tensor_chunks,
)
from afm_mlx.config import ModelConfig, read_config_json
from afm_mlx.errors import AFMError, CheckpointError, ConfigError, named, shown
from afm_mlx.files import atomic_write, refuse_existing
from afm_mlx.json_values import is_number, is_text

if TYPE_CHECKING:
    import torch

RANK, ALPHA = 32, 16
ADAPTER_ID = "base_adapter"
# A key in the `metadata` of tamm's config, which is free for users' notes.
FINGERPRINT = "base_model_fingerprint"

_CONFIGS = ("{}-config.json", "{}.json", "config.json", "base-model-config.json")
_MAX_SHARED = 4  # most bytes that tensors may claim, in file sizes: tensors may share numbers


def read_pairs(
    state: Mapping[str, torch.Tensor],
    keys: Mapping[str, str],
    dtype: mx.Dtype | None,
    source: str | Path,
) -> Tensors:
    """Convert tensors of a state dict to arrays.

    `keys` maps the name of each array to its tensor's key in `state`; `dtype` is None for the stored types.
    Raises `CheckpointError` on NaN, infinity, integers, and numbers that the dtype can't hold; it names
    `source`.
    """
    tensors = {}
    for name, key in keys.items():
        stored = mlx_dtype(state[key])
        if stored is None:
            raise CheckpointError(
                f"{source}: {named(key)} is of type {state[key].dtype}; an adapter's tensors are floats."
            )
        target = dtype or stored
        data = b"".join(tensor_chunks(state[key], target, f"{source}: {key}"))
        flat = mx.array(np.frombuffer(data, np.uint8)).view(target)
        tensors[name] = flat.reshape(tuple(state[key].shape))
    return tensors


def read(
    path: Path, model_config: ModelConfig | None, alpha: float | None = None
) -> tuple[Tensors, AdapterConfig]:
    """Read a `.pt` file with one adapter; see `read_adapter`."""
    state = open_state_dict(path)
    found = map_keys(state, str(path)).adapters
    if len(found) != 1:
        names = ", ".join(sorted(found)) or "none"
        raise CheckpointError(
            f"{path} holds {len(found)} adapters ({named(names)}), and one is needed. A base model with "
            "several is split by afm-mlx convert."
        )
    ((adapter, keys),) = found.items()
    spec, fingerprint = None, None
    if config := find_toolkit_config(path.parent, [name.format(path.stem) for name in _CONFIGS]):
        parsed = read_toolkit_config(config)
        spec = _spec(parsed.adapters, adapter, config)
        notes = read_config_json(config).get("metadata")
        value = notes.get(FINGERPRINT) if isinstance(notes, dict) else None
        fingerprint = value if is_text(value) else None
        model_config = model_config or parsed.model
    shaped = {name: state[key] for name, key in keys.items()}
    if model_config is not None:
        check_fits(shaped, model_config, path)
    # Tensors may share what is stored: a few bytes can claim to be gigabytes.
    size, claimed = path.stat().st_size, sum(tensor.nbytes for tensor in shaped.values())
    if claimed > _MAX_SHARED * size:
        raise CheckpointError(
            f"{path} has {size:,} bytes, and its tensors would take {claimed:,}: they repeat what is "
            "stored, or were made to fill memory. Save them whole: tensor.clone()."
        )
    ranks = set()
    for name, tensor in shaped.items():
        if tensor.ndim != 2:
            raise CheckpointError(
                f"{path}: {named(keys[name])} is {shown(list(tensor.shape))}; a matrix is needed."
            )
        ranks.add(tensor.shape[1 if is_a(name) else 0])
    if len(ranks) != 1 or 0 in ranks:
        raise CheckpointError(
            f"{path} holds pairs of the ranks {shown(sorted(ranks))}; one rank is needed."
        )
    (rank,) = ranks
    scale = _scale(rank, alpha, spec, path)
    tensors = without_empty(read_pairs(state, keys, None, path))
    result = AdapterConfig(
        rank=rank,
        scale=scale,
        num_layers=num_layers_of(tensors, model_config),
        keys=keys_of(tensors),
        dropout=spec.dropout if spec and 0 <= spec.dropout < 1 else 0.0,
        base_model_fingerprint=fingerprint,
    )
    check_pairs(tensors, result, path)
    return tensors, result


def _spec(adapters: Mapping[str, LoRASpec | str], adapter: str, config: Path) -> LoRASpec | None:
    """Return the entry of the id `adapter`; a single entry whatever its id is; None if there is no entry."""
    if not adapters:
        return None
    entry = adapters.get(adapter) or next(iter(adapters.values()))
    if adapter not in adapters and len(adapters) > 1:
        raise ConfigError(
            f"{config} has the adapters {named(', '.join(adapters))}, and none is {shown(adapter)}, as in "
            "the .pt file. Put the config of its training run there."
        )
    if not isinstance(entry, LoRASpec):
        raise ConfigError(
            f"{config}: the adapter is of type {shown(entry)}; LoRAModelAdapter can be read."
        )
    return entry


def _scale(rank: int, alpha: float | None, spec: LoRASpec | None, path: Path) -> float:
    if alpha is not None:
        if not is_number(alpha) or alpha < 0:
            raise ConfigError(f"The alpha is {shown(alpha)}; it is a finite number of 0 or more.")
        return alpha / rank
    if spec is not None:
        if spec.rank != rank:
            raise CheckpointError(
                f"{path} holds pairs of rank {rank}, and the config next to it says {spec.rank}. They are of "
                "different training runs."
            )
        return spec.scale
    if rank != RANK:
        raise CheckpointError(
            f"{path} holds pairs of rank {rank} and no alpha: only with rank {RANK} is it known, {ALPHA}. Put "
            "the config of the training run next to it, or give the alpha (--alpha)."
        )
    return ALPHA / RANK


def write(
    path: Path,
    tensors: Mapping[str, mx.array],
    config: AdapterConfig,
    model_config: ModelConfig | None,
) -> None:
    """Write a `.pt` file in float32, the toolkit's type, and its config; see `write_adapter`."""
    if path.suffix != ".pt":
        raise CheckpointError(
            f"The toolkit's adapters are .pt files; {path.name} is no name of one."
        )
    torch = import_torch()
    config_path = path.with_name(f"{path.stem}-config.json")
    refuse_existing(path)
    refuse_existing(config_path)
    model_config = config_for(tensors, model_config, path)
    state = {}
    for name, array in complete(tensors, pair_targets(model_config), config.rank).items():
        data = array_bytes(array.astype(mx.float32)).copy()
        key = adapter_key(name, ADAPTER_ID, model_config.num_kv_reuse_layers > 0)
        state[key] = torch.from_numpy(data.view(np.float32).reshape(array.shape))
    values: dict[str, object] = {"__tamm_type__": "module_configs:AFMTextV7Config"}
    left_out = ("rms_norm_eps", "kv_bits", "context_length", "vision_config")
    values |= {k: v for k, v in dataclasses.asdict(model_config).items() if k not in left_out}
    values["adapters"] = {
        ADAPTER_ID: {
            "__tamm_type__": "adapters:LoRAModelAdapter",
            "rank": config.rank,
            "alpha": exact_alpha(config.rank, config.scale),
            "dropout_p": config.dropout,
        }
    }
    if model_config.kv_bits is not None:
        values["arch_optimizers"] = {"kv_quant": {"__tamm_type__": "ao:KVQuantArchOptimizer"}}
    if config.base_model_fingerprint is not None:
        values["metadata"] = {FINGERPRINT: config.base_model_fingerprint}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(values, indent=4)
    with atomic_write(config_path) as config_file, atomic_write(path) as weights_file:
        config_file.write_text(text, encoding="utf-8")
        try:
            torch.save(state, weights_file)
        except RuntimeError as error:  # PyTorch's for a full disk
            why = (str(error).splitlines() or ["?"])[0]
            raise AFMError(f"{path} can't be written: {why}. Check room and permissions.") from None
