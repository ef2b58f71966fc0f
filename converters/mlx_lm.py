"""Folders of AFM models, ours and mlx-lm's `afm7`, one to the other.

The layouts are the same. Ours has two more keys in `config.json`, `kv_bits` and `context_length`, which
mlx-lm ignores. A folder for mlx-lm is refused if mlx-lm would load the model, but compute it differently.

Source: mlx-lm 0.32.2, `mlx_lm/models/afm7.py` and `mlx_lm/utils.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from afm_mlx.adapters.adapter_folder import load_adapter, save_adapter
from afm_mlx.checkpoint.fingerprint import folder_fingerprint
from afm_mlx.checkpoint.finite import check_finite
from afm_mlx.checkpoint.folder_texts import copy_tokenizer_files
from afm_mlx.checkpoint.safetensors_file import StoredTensor
from afm_mlx.checkpoint.stored_layers import (
    StoredRules,
    check_folder_tensors,
    quantization_of,
    stored_settings,
)
from afm_mlx.checkpoint.weights import stored_tensors
from afm_mlx.config import KV_SCALES, ModelConfig, parameter_shapes, read_config_json
from afm_mlx.converters.conversion_options import ConversionOptions
from afm_mlx.converters.folder_writer import FolderWriter, StoredLayer, StoredParameter
from afm_mlx.errors import AFMError, CheckpointError, ConfigError
from afm_mlx.progress import Progress
from afm_mlx.quantization.packed_layers import PARTS


def read_config(folder: Path, tensors: Mapping[str, Any]) -> ModelConfig:
    """Read the config of an afm7 folder, ours or mlx-lm's; a missing `kv_bits` follows from the tensors.

    Raises:
        ConfigError: if `rope_theta` is missing, for which mlx-lm has a default that no AFM model uses.
    """
    path = folder / "config.json"
    values = read_config_json(path)
    if "rope_theta" not in values:
        raise ConfigError(
            f"{path}: rope_theta is missing. mlx-lm takes 50000 then, and Apple's models were trained with "
            '500000: positions would be rotated wrongly. Add "rope_theta" with the value of the '
            "checkpoint that the folder was made of."
        )
    if "kv_bits" not in values:
        scaled = any(name.endswith(KV_SCALES) for name in tensors)
        values["kv_bits"] = 8 if scaled else None
    return ModelConfig.from_dict(values, source=str(path))


def check_mlx_lm_computes(config: ModelConfig, source: str | Path) -> None:
    """Raise `AFMError`, which says why, if mlx-lm itself would compute this model differently."""
    if config.vision_config is not None:
        reason = "its afm7 reads text only, and this model has an image encoder"
    elif config.kv_bits is None:
        reason = "its afm7 always rounds keys and values to 8 bits, and this model has no scales for that"
    elif int(config.hidden_dim * config.hidden_dim_scale_factor) != config.ffn_dim:
        reason = f"it rounds the feed-forward width down, and this model's is rounded up to {config.ffn_dim}"
    elif (eps := config.rms_norm_eps) != 1e-5:
        reason = f"its query and key norms always use 1e-5, and rms_norm_eps is {eps}"
    else:
        return
    raise AFMError(f"{source} can't be used by stock mlx-lm 0.32: {reason}. Use it with afm-mlx.")


def write_mlx_lm(
    source: Path,
    folder: Path,
    name: str,
    options: ConversionOptions,
    progress: Progress | None = None,
) -> None:
    """Check an afm7 folder, ours or mlx-lm's, and convert it into an empty folder; see `write_toolkit`.

    Raises:
        AFMError: if the folder is damaged, contradicts its config, or can't be converted with these options.
    """
    tensors, path = stored_tensors(source), source / "config.json"
    config = read_config(source, tensors)
    values = read_config_json(path)
    quantization = quantization_of(values, path)
    if options.for_mlx_lm:
        check_mlx_lm_computes(config, source)
    options.check_source(source, bool(quantization))
    rules = check_folder_tensors(config, quantization, tensors, path)
    names = copy_tokenizer_files(source, folder)
    if not {"tokenizer.json", "tokenizer.model"} & set(names):
        raise CheckpointError(f"{source} has no tokenizer.json and no tokenizer.model.")
    if "tokenizer.json" in names:
        from tokenizers import Tokenizer

        try:
            pieces = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
        # The library raises bare Exception.
        except Exception as error:
            raise CheckpointError(
                f"{source / 'tokenizer.json'} is no tokenizer: {error}."
            ) from None
        if pieces > config.vocab_size:
            raise CheckpointError(
                f"{source}: the tokenizer has {pieces} tokens, and the embedding {config.vocab_size} rows. "
                "They belong to different models."
            )
    writer = FolderWriter(config, stored_parameters(config, tensors, rules, quantization), options)
    writer.write_weights(folder, progress)
    dtype = options.mlx_dtype
    adapters = [] if options.for_mlx_lm else _copy_adapters(source, folder, config, dtype)
    writer.write_texts(
        folder, name=name, source=source.resolve().name, values=values, adapters=adapters
    )


def stored_parameters(
    config: ModelConfig,
    tensors: Mapping[str, StoredTensor],
    rules: StoredRules,
    quantization: Mapping[str, Any],
) -> dict[str, StoredParameter | StoredLayer]:
    """Return where the folder stores each parameter, by name."""
    found: dict[str, StoredParameter | StoredLayer] = {}
    stored = {name: StoredParameter(tensor) for name, tensor in tensors.items()}
    dtype = tensors["model.output_norm.weight"].dtype
    for name, shape in parameter_shapes(config).items():
        path = name.removesuffix(".weight")
        if path not in rules:
            found[name] = stored[name]
            continue
        parts = {part: stored[f"{path}.{part}"] for part in PARTS if f"{path}.{part}" in stored}
        settings = stored_settings(quantization, path)
        found[name] = StoredLayer(path, shape, parts, rules[path], settings, dtype)
    return found


def _copy_adapters(
    source: Path, folder: Path, config: ModelConfig, dtype: mx.Dtype | None
) -> list[str]:
    """Copy the adapters in a folder, with the new folder's fingerprint for the old one; return their names."""
    paths = sorted(path.parent for path in source.glob("adapters/*/adapter_config.json"))
    if not paths:
        return []
    old, new = folder_fingerprint(config, source), folder_fingerprint(config, folder)
    for path in paths:
        tensors, plan = load_adapter(path)
        check_finite(tensors, path)
        if dtype is not None:
            tensors = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
        if plan.base_model_fingerprint == old:
            plan = dataclasses.replace(plan, base_model_fingerprint=new)
        save_adapter(folder / "adapters" / path.name, tensors, plan)
    return [path.name for path in paths]
