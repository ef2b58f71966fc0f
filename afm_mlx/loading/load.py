"""From a path, a hub id or a name to a model that is ready to run, and its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from afm_mlx.adapters.active import attach_adapter
from afm_mlx.checkpoint.finite import read_parameters
from afm_mlx.checkpoint.safetensors_file import load_stored
from afm_mlx.checkpoint.stored_layers import (
    check_folder_tensors,
    place_stored_layers,
    quantization_of,
    settle_scales,
)
from afm_mlx.checkpoint.weights import stored_tensors
from afm_mlx.config import KV_SCALES, MODEL_TYPE, ModelConfig, is_afm_config, read_config_json
from afm_mlx.errors import AFMError, ConfigError, shown
from afm_mlx.kernels.cpu.memory import prefer_huge_pages
from afm_mlx.kernels.replay import keep_compiler_out
from afm_mlx.kernels.selftest.checks import ensure_checked
from afm_mlx.loading.missing_kernels import warn_if_slow
from afm_mlx.loading.resolve import EMBEDDED_MODEL, resolve_adapter, resolve_model
from afm_mlx.model.model import Model
from afm_mlx.quantization.packed_layers import activation_dtype, set_activation_bits
from afm_mlx.threads import in_main_thread, in_mlx_thread
from afm_mlx.tokenizer.tokenizer import load_tokenizer


@in_mlx_thread
def load(
    path_or_hf_repo: str | Path = EMBEDDED_MODEL,
    tokenizer_config: Mapping[str, Any] | None = None,
    model_config: Mapping[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    activation_bits: int = 16,
    force_adapter: bool = False,
) -> Any:
    """Load a model and its tokenizer, with mlx-lm's signature.

    Folders of the AFM architecture (`model_type` "afm7") run through this package; any other
    architecture is loaded by mlx-lm, and runs in this package's engine all the same.

    Args:
        path_or_hf_repo: folder, hub id, or "afm-nano", the model that this package carries.
        tokenizer_config: options of the tokenizer; for mlx-lm's zoo only.
        model_config: keys that replace those of config.json.
        adapter_path: LoRA adapter that was made for this model: its path, or its name if it comes with the
            model, in a folder below `adapters`. All rows use it; see `AdapterPool` for several.
        lazy: leave the weights unread until they are used. Only names, shapes and types are checked then, not
            the numbers; and when a file is cut off before its tensors are read, MLX raises `RuntimeError` and
            the model has to be loaded anew. In any thread but the main one the weights are read at once:
            one thread can't read what another has begun to.
        return_config: return config.json's content too.
        revision: branch, tag or commit of a hub id.
        trust_remote_code: let a folder's own code run; for mlx-lm's zoo only.
        activation_bits: 16, or 8 to let packed layers round their input to int8 where that is faster.
        force_adapter: run an adapter that was made for another model, if its shapes fit.

    Returns:
        (model, tokenizer), or (model, tokenizer, config).

    Raises:
        AFMError: what is wrong with the folder, and where.

    Warns:
        SlowWarning: that the model runs without kernels made for it, why, and what to do.
    """
    keep_compiler_out()
    lazy = lazy and in_main_thread()
    folder = resolve_model(path_or_hf_repo, revision)
    values = _read_values(folder / "config.json", model_config)
    adapter = None if adapter_path is None else resolve_adapter(adapter_path, folder)
    if not is_afm_config(values):
        from afm_mlx.loading.mlx_lm_models import load_mlx_lm_folder

        model, tokenizer, values = load_mlx_lm_folder(
            folder, tokenizer_config, model_config, adapter, lazy, trust_remote_code
        )
    elif tokenizer_config:
        raise AFMError(
            f"tokenizer_config is {shown(dict(tokenizer_config))}: an AFM folder's tokenizer has no options."
        )
    else:
        model = load_model(folder, values, lazy=lazy)
        if adapter is not None:
            attach_adapter(model, adapter, base_folder=folder, force=force_adapter)
        tokenizer = load_tokenizer(folder)
    set_activation_bits(model, activation_bits)
    warn_if_slow(model)
    return (model, tokenizer, values) if return_config else (model, tokenizer)


def _read_values(path: Path, changes: Any) -> dict[str, Any]:
    """The content of config.json with some keys replaced; it names an architecture."""
    changes = {} if changes is None else changes
    if not isinstance(changes, Mapping) or not all(isinstance(key, str) for key in changes):
        raise ConfigError(
            f"model_config is {shown(changes)}; a mapping of config.json's keys to values is needed."
        )
    values = read_config_json(path) | dict(changes)
    if not isinstance(values.get("model_type"), str):
        raise ConfigError(
            f"{path}: model_type is {shown(values.get('model_type'))}; it names the architecture, "
            f"{MODEL_TYPE!r} for an AFM model."
        )
    return values


def load_model(folder: Path, values: Mapping[str, Any] | None = None, lazy: bool = False) -> Model:
    """Load the model of an AFM folder, without its tokenizer.

    Float weights take the activation dtype, but for the int8 scales, which stay float32.

    Args:
        folder: holds config.json and safetensors.
        values: content of config.json, when it was read already.
        lazy: leave the weights unread until they are used; see `load`.

    Raises:
        ConfigError, CheckpointError: name the file, and the key or the tensor.
    """
    ensure_checked()
    source = folder / "config.json"
    values = read_config_json(source) if values is None else values
    config = ModelConfig.from_dict(values, source=str(source))
    quantization = quantization_of(values, source)
    tensors = stored_tensors(folder)
    rules = check_folder_tensors(config, quantization, tensors, source)
    model = Model(config)
    weights, dtype = load_stored(tensors), activation_dtype()
    place_stored_layers(model, quantization, weights, source, dtype, rules)
    packed = {path for path, rule in rules.items() if rule is not None}
    rest = [(n, a) for n, a in weights.items() if n.rpartition(".")[0] not in packed]
    model.load_weights([(n, _cast(n, a, dtype)) for n, a in rest], strict=False)
    settle_scales(model)
    model.eval()
    if not lazy:
        prefer_huge_pages(read_parameters(model, folder).values())
    return model


def _cast(name: str, array: mx.array, dtype: mx.Dtype) -> mx.array:
    if name.endswith(KV_SCALES):
        return array.astype(mx.float32)
    return array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array
