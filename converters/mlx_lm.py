"""Model folders of mlx-lm's `afm7`, to ours and back.

The layouts are the same. Ours has two more keys in `config.json`, `kv_bits` and `context_length`, which
stock mlx-lm ignores; the other way round there are models that stock mlx-lm would load and compute
something else, and those are refused.

Source: mlx-lm 0.32.2, `mlx_lm/models/afm7.py` and `mlx_lm/utils.py`.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from afm_mlx.adapters.files import load_adapter, save_adapter
from afm_mlx.config import ModelConfig, read_config_json
from afm_mlx.converters.output import write_card, write_config
from afm_mlx.errors import AFMError, CheckpointError, ConfigError
from afm_mlx.fingerprint import folder_fingerprint
from afm_mlx.weights import (
    Progress,
    Shapes,
    StoredTensor,
    TensorSpec,
    array_bytes,
    check_weights,
    parameter_shapes,
    stored_tensors,
    write_weights,
)

_TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
)
_OUR_KEYS = ("kv_bits", "context_length")
_CHUNK_BYTES = 32 << 20


def read_config(folder: str | Path, tensors: Mapping[str, Any]) -> ModelConfig:
    """The config of an afm7 folder, ours or mlx-lm's; `kv_bits` comes from the tensors where it is absent.

    Raises:
        ConfigError: on a missing `rope_theta`, which mlx-lm fills with a value that no AFM model has.
    """
    path = Path(folder) / "config.json"
    values = read_config_json(path)
    if "rope_theta" not in values:
        raise ConfigError(
            f"{path}: rope_theta is missing. mlx-lm takes 50000 then, and Apple's models were trained with "
            '500000: positions would be rotated wrongly. Add "rope_theta" with the value of the '
            "checkpoint that the folder was made of."
        )
    if "kv_bits" not in values:
        scaled = any(name.endswith(".quant_key_scale") for name in tensors)
        values["kv_bits"] = 8 if scaled else None
    return ModelConfig.from_dict(values, source=str(path))


def check_stock(config: ModelConfig, quantized: bool, source: str | Path) -> None:
    """Whether stock mlx-lm computes what this model computes.

    Raises:
        AFMError: says what stock mlx-lm would do otherwise.
    """
    reason = None
    if config.kv_bits is None:
        reason = "its afm7 always rounds keys and values to 8 bits, and this model has no scales for that"
    elif quantized:
        reason = "its afm7 can't load quantized layers (TypeError in FusedLinear.to_quantized)"
    elif int(config.hidden_dim * config.hidden_dim_scale_factor) != config.ffn_dim:
        reason = f"it rounds the feed-forward width down, and this model's is rounded up to {config.ffn_dim}"
    elif config.rms_norm_eps != 1e-5:
        reason = (
            f"its query and key norms always use 1e-5, and rms_norm_eps is {config.rms_norm_eps}"
        )
    if reason:
        raise AFMError(
            f"{source} can't be used by stock mlx-lm 0.32: {reason}. Use it with afm-mlx."
        )


def without_our_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a `config.json` without the keys that mlx-lm does not know."""
    return {key: value for key, value in values.items() if key not in _OUR_KEYS}


def write_mlx_lm(
    source: Path,
    folder: Path,
    *,
    name: str,
    dtype: mx.Dtype | None = None,
    stock: bool = False,
    progress: Progress | None = None,
) -> None:
    """Check an afm7 folder and write it into an empty one.

    Args:
        source: a model folder, ours or mlx-lm's.
        folder: where to write.
        name: what the card calls the folder.
        dtype: of the weights; as in `source` when None. Scales of keys and values stay float32.
        stock: write what stock mlx-lm needs and nothing else; adapters are left out.
        progress: see `write_weights`.

    Raises:
        AFMError: when the folder is damaged, contradicts its config, or can't be what `stock` asks for.
    """
    tensors = stored_tensors(source)
    config = read_config(source, tensors)
    values = read_config_json(source / "config.json")
    quantization = values.get("quantization") or values.get("quantization_config")
    if stock:
        check_stock(config, bool(quantization), source)
    if quantization and dtype is not None:
        raise AFMError(
            f"{source} is quantized; its weights have no other dtype. Leave --dtype out, or convert the "
            "checkpoint that the folder was made of."
        )
    expected = _quantized_shapes(parameter_shapes(config), tensors, quantization or {}, source)
    check_weights(expected, tensors, source)
    copied = _copy_tokenizer(source, folder)
    _check_vocabulary(folder, copied, config.vocab_size, source)

    specs = [TensorSpec(n, tensors[n].shape, _target(tensors[n], dtype)) for n in expected]
    write_weights(
        folder,
        specs,
        lambda spec: _cast(tensors[spec.name], spec.dtype),
        total_parameters=config.num_parameters,
        progress=progress,
    )
    content = {**values, **config.to_dict()}
    write_config(folder, without_our_keys(content) if stock else content)
    adapters = [] if stock else _copy_adapters(source, folder, config, dtype)
    stored = next(s.dtype for s in specs if s.name == "model.output_norm.weight")
    write_card(
        folder,
        name=name,
        source=source.resolve().name,
        config=config,
        dtype=stored,
        adapters=adapters,
    )


def _target(tensor: StoredTensor, dtype: mx.Dtype | None) -> mx.Dtype:
    if dtype is None or not mx.issubdtype(tensor.dtype, mx.floating):
        return tensor.dtype
    return mx.float32 if tensor.name.endswith(("_key_scale", "_value_scale")) else dtype


def _cast(tensor: StoredTensor, dtype: mx.Dtype) -> Iterable[Any]:
    """A stored tensor's bytes as `dtype`, in chunks."""
    width = tensor.dtype.size
    data = np.memmap(tensor.path, np.uint8, "r", tensor.offset, (max(1, tensor.nbytes),))
    for start in range(0, tensor.nbytes, _CHUNK_BYTES):
        chunk = data[start : min(start + _CHUNK_BYTES // width * width, tensor.nbytes)]
        if tensor.dtype == dtype:
            yield chunk
            continue
        values = mx.array(chunk).view(tensor.dtype)
        cast = values.astype(dtype)
        if not mx.all(mx.isfinite(cast)).item():
            raise CheckpointError(
                f"{tensor.path}: {tensor.name} holds NaN, infinity, or numbers that {dtype} can't hold. "
                "Choose another dtype, or check the source."
            )
        yield array_bytes(cast)


def _copy_adapters(
    source: Path, folder: Path, config: ModelConfig, dtype: mx.Dtype | None
) -> list[str]:
    """Copy the adapters inside a folder of ours; those made for its base now belong to the new one."""
    paths = sorted(path.parent for path in source.glob("adapters/*/adapter_config.json"))
    if not paths:
        return []
    old, new = folder_fingerprint(config, source), folder_fingerprint(config, folder)
    for path in paths:
        tensors, plan = load_adapter(path)
        if dtype is not None:
            tensors = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
        if plan.base_model_fingerprint == old:
            plan = dataclasses.replace(plan, base_model_fingerprint=new)
        save_adapter(folder / "adapters" / path.name, tensors, plan)
    return [path.name for path in paths]


def _quantized_shapes(
    shapes: Shapes,
    tensors: Mapping[str, StoredTensor],
    quantization: Mapping[str, Any],
    source: Path,
) -> Shapes:
    """Replace the weights that `tensors` hold packed by packed weight, scales and biases."""
    result: Shapes = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if f"{module}.scales" not in tensors:
            result[name] = shape
            continue
        settings = {**quantization, **_as_dict(quantization.get(module))}
        bits: Any = settings.get("bits")
        group: Any = settings.get("group_size")
        if not all(type(value) is int and value > 0 for value in (bits, group)):
            raise ConfigError(
                f"{source}: {module} is quantized, and config.json has no bits and group_size for it."
            )
        *rows, columns = shape
        result[name] = (*rows, math.ceil(columns * bits / 32))
        result[f"{module}.scales"] = (*rows, math.ceil(columns / group))
        if settings.get("mode", "affine") == "affine":
            result[f"{module}.biases"] = (*rows, math.ceil(columns / group))
    return result


def _as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _copy_tokenizer(source: Path, folder: Path) -> list[str]:
    files = sorted({file for pattern in _TOKENIZER_FILES for file in source.glob(pattern)})
    for file in files:
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    names = [file.name for file in files]
    if not {"tokenizer.json", "tokenizer.model"} & set(names):
        raise CheckpointError(f"{source} has no tokenizer.json and no tokenizer.model.")
    return names


def _check_vocabulary(folder: Path, names: list[str], vocab_size: int, source: Path) -> None:
    if "tokenizer.json" not in names:
        return
    from tokenizers import Tokenizer

    try:
        pieces = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    # The library raises bare Exception.
    except Exception as error:
        raise CheckpointError(f"{source / 'tokenizer.json'} is no tokenizer: {error}.") from None
    if pieces > vocab_size:
        raise CheckpointError(
            f"{source}: the tokenizer has {pieces} tokens, and the embedding {vocab_size} rows. "
            "They belong to different models."
        )
