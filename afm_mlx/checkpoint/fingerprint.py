"""Fingerprints: 64 hex digits of SHA-256 that identify a model.

Prompt caches, adapters and masks hold the fingerprint of their model, so that they are never used with another
one. It covers the architecture and, for each tensor in the order of names, its name, its shape, its type (all
floating-point types count as one), and up to 256 elements that are an odd number apart. Sampling keeps it
quick: a 3B model gives 160,000 numbers, not 6 GB. It is no protection against forgery.

Of an AFM model, the architecture is all of `ModelConfig` except `context_length`, which changes no weight. Of a
model of mlx-lm, it is all settings of `model.args` that differ from mlx-lm's defaults, such as RoPE's.

Floating-point elements are hashed as float32, integers unchanged. So a model that was loaded as bfloat16 and
widened to float32 has the fingerprint of its file; one that was rounded to fewer bits has another, for its
output differs too. Numbers below float32's normal range count as zero, because devices differ in whether they
keep them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from afm_mlx.checkpoint.safetensors_file import StoredTensor, array_bytes, float_values
from afm_mlx.checkpoint.weights import stored_tensors
from afm_mlx.config import ModelConfig, read_config_json

_SAMPLES = 256
_READ_WHOLE = 1 << 16  # up to this many bytes are read at once, faster than single elements
_Sampled = tuple[str, Iterable[int], mx.Dtype, np.ndarray]  # name, shape, type, bytes of elements
_LORA = re.compile(r"\.lora_[ab](\.\d+)?$")


def model_fingerprint(config: ModelConfig, parameters: Mapping[str, mx.array]) -> str:
    """Compute the fingerprint of a model from its arrays by name.

    A lazy array is evaluated, which reads it whole; `folder_fingerprint` reads samples only.
    """
    return arrays_fingerprint(_architecture(config), parameters)


def base_model_fingerprint(model: nn.Module) -> str:
    """Compute the fingerprint of a model in memory, AFM's or mlx-lm's, without its adapters and LoRA layers."""
    return arrays_fingerprint(_architecture(model.args), base_parameters(model))


def base_parameters(model: nn.Module) -> dict[str, mx.array]:
    """Return the parameters of a model by their names in a folder, without LoRA layers.

    Names in a folder lack `.linear`, the attribute of a wrapper (`afm_mlx.model.fused_layers`) for its layer.
    """
    parameters = tree_flatten(model.parameters())
    return {n.replace(".linear.", "."): a for n, a in parameters if not _LORA.search(n)}


def arrays_fingerprint(head: Any, arrays: Mapping[str, mx.array]) -> str:
    """Compute the fingerprint of arrays by name, and of `head`, a JSON value such as an adapter's scale."""
    samples = {}
    for name, array in arrays.items():
        stride, count = _stride(array.size)
        samples[name] = array.reshape(-1)[: stride * count : stride]
    mx.eval(samples)
    items = sorted(arrays.items())
    return _digest(head, ((n, a.shape, a.dtype, array_bytes(samples[n])) for n, a in items))


def folder_fingerprint(config: ModelConfig, folder: str | Path) -> str:
    """Compute the fingerprint of a model folder from samples of its tensors; equal to `model_fingerprint`."""
    return _stored_digest(_architecture(config), folder)


def weights_fingerprint(folder: str | Path) -> str:
    """Compute the fingerprint of a folder of any architecture from config.json and tensors' samples."""
    return _stored_digest(read_config_json(Path(folder, "config.json")), folder)


def _stored_digest(head: Any, folder: str | Path) -> str:
    tensors = sorted(stored_tensors(folder).items())
    return _digest(head, ((n, t.shape, t.dtype, _sample_stored(t)) for n, t in tensors))


def _stride(size: int) -> tuple[int, int]:
    """Return the stride and the number of the elements that are hashed."""
    stride = max(1, size // _SAMPLES)
    # An even stride would visit few columns of a matrix, whose rows are a power of two long as a rule.
    stride -= stride > 1 and stride % 2 == 0
    return stride, min(size, _SAMPLES)


def _sample_stored(tensor: StoredTensor) -> np.ndarray:
    width = tensor.dtype.size
    if tensor.size == 0:
        return np.empty(0, np.uint8)
    stride, count = _stride(tensor.size)
    if stride * count * width <= _READ_WHOLE:
        rows = tensor.read(0, stride * count * width).reshape(-1, width)
        return rows[::stride].reshape(-1)
    return tensor.read_elements(range(0, stride * count, stride))


def _architecture(config: Any) -> dict[str, Any]:
    if isinstance(config, ModelConfig):
        return {k: v for k, v in config.to_dict().items() if k != "context_length"}
    # Defaults are left out, because a newer mlx-lm may have more settings.
    settings = ((field, getattr(config, field.name)) for field in dataclasses.fields(config))
    return {field.name: value for field, value in settings if value != _default(field)}


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is dataclasses.MISSING:
        return field.default
    return field.default_factory()


def _digest(head: Any, tensors: Iterable[_Sampled]) -> str:
    digest = hashlib.sha256(json.dumps(head, sort_keys=True, default=str).encode())
    for name, shape, dtype, raw in tensors:
        floating = mx.issubdtype(dtype, mx.floating)
        kind = "float" if floating else str(dtype).removeprefix("mlx.core.")
        digest.update(json.dumps([name, list(shape), kind]).encode())
        if floating:  # 0 for subnormal numbers and -0
            values = float_values(raw, dtype).astype("<f4", copy=False)
            raw = np.where(np.abs(values) < np.finfo(np.float32).tiny, np.float32(0), values)
            raw = raw.astype("<f4", copy=False)
        digest.update(raw.tobytes())
    return digest.hexdigest()
