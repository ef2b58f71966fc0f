"""Model folders of mlx-lm's `afm7`, to ours and back.

The layouts are the same. Ours has two more keys in `config.json`, `kv_bits` and `context_length`, which
stock mlx-lm ignores; the other way round there are models that stock mlx-lm would load and compute
something else, and those are refused.

Source: mlx-lm 0.32.2, `mlx_lm/models/afm7.py` and `mlx_lm/utils.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np

from afm_mlx.adapters.adapter_folder import load_adapter, save_adapter
from afm_mlx.architecture import KV_SCALES, parameter_shapes
from afm_mlx.checkpoint.fingerprint import folder_fingerprint
from afm_mlx.checkpoint.finite import check_finite, not_finite
from afm_mlx.checkpoint.folder_texts import copy_tokenizer_files, write_card, write_config
from afm_mlx.checkpoint.stored_layers import (
    check_folder_tensors,
    quantization_of,
    stored_rule,
    stored_settings,
)
from afm_mlx.checkpoint.tensors import StoredTensor, TensorSpec, array_bytes, float_values
from afm_mlx.checkpoint.weights import stored_tensors, write_weights
from afm_mlx.config import ModelConfig, read_config_json
from afm_mlx.converters.quantize import (
    PackedLayer,
    PackedLayers,
    layer_of_rows,
    stock_layer,
    unpacked,
)
from afm_mlx.errors import AFMError, CheckpointError, ConfigError, named
from afm_mlx.progress import Progress
from afm_mlx.quantization.packed_layers import PARTS
from afm_mlx.quantization.rounding import Rows
from afm_mlx.quantization.rule import QuantizationRule

_OUR_KEYS = ("kv_bits", "context_length")
_CHUNK_BYTES = 32 << 20

QUANTIZATION_KEYS = ("quantization", "quantization_config")
ChooseRules: TypeAlias = Callable[[ModelConfig], dict[str, QuantizationRule]]


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
        scaled = any(name.endswith(KV_SCALES) for name in tensors)
        values["kv_bits"] = 8 if scaled else None
    return ModelConfig.from_dict(values, source=str(path))


def check_stock(config: ModelConfig, source: str | Path) -> None:
    """Whether stock mlx-lm computes what this model computes.

    Raises:
        AFMError: says what stock mlx-lm would do otherwise.
    """
    reason = None
    if config.kv_bits is None:
        reason = "its afm7 always rounds keys and values to 8 bits, and this model has no scales for that"
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
    rules: ChooseRules | None = None,
    dequantize: bool = False,
    progress: Progress | None = None,
) -> None:
    """Check an afm7 folder and write it into an empty one.

    Args:
        source: a model folder, ours or mlx-lm's.
        folder: where to write.
        name: what the card calls the folder.
        dtype: of the weights; as in `source` when None. Scales of keys and values stay float32.
        stock: write what stock mlx-lm needs and nothing else; adapters are left out.
        rules: of layers to pack, by the architecture; None leaves all as they are.
        dequantize: write packed layers as the numbers that they stand for.
        progress: see `write_weights`.

    Raises:
        AFMError: when the folder is damaged, contradicts its config, or can't be what is asked for.
    """
    tensors = stored_tensors(source)
    config = read_config(source, tensors)
    values = read_config_json(source / "config.json")
    quantization = quantization_of(values, source / "config.json")
    if stock:
        check_stock(config, source)
    check_wishes(source, bool(quantization), dtype, rules is not None, dequantize)
    check_folder_tensors(config, quantization, tensors, source / "config.json")
    copied = _copy_tokenizer(source, folder)
    _check_vocabulary(folder, copied, config.vocab_size, source)

    plan = _Plan(source, config, quantization, tensors, dtype, stock)
    specs = plan.specs(rules(config) if rules else {}, dequantize)
    write_weights(
        folder,
        specs,
        plan.layers.reader(plan.read),
        total_parameters=config.num_parameters,
        progress=progress,
    )
    content = {k: v for k, v in values.items() if k not in QUANTIZATION_KEYS}
    if quantization and not plan.layers.entries() and not dequantize:
        content |= dict.fromkeys(QUANTIZATION_KEYS, quantization)
    content |= {**config.to_dict(), **plan.layers.entries()}
    write_config(folder, without_our_keys(content) if stock else content)
    adapters = [] if stock else _copy_adapters(source, folder, config, dtype)
    write_card(
        folder,
        name=name,
        source=source.resolve().name,
        config=config,
        dtype=next(s.dtype for s in specs if s.name == "model.output_norm.weight"),
        quantization=content.get("quantization"),
        note=plan.layers.note() if rules else "",
        adapters=adapters,
    )


def check_wishes(
    source: Path, quantized: bool, dtype: mx.Dtype | None, quantize: bool, dequantize: bool
) -> None:
    """Raise `AFMError` when a folder, quantized or not, can't become what is asked for."""
    if quantized and quantize:
        raise AFMError(
            f"{source} is quantized already; rounding it again would add one error to the other. Convert the "
            "checkpoint that the folder was made of, or make float weights of it first (-d)."
        )
    if quantized and dtype is not None and not dequantize:
        raise AFMError(
            f"{source} is quantized; its weights have no other dtype. Leave --dtype out, or convert the "
            "checkpoint that the folder was made of."
        )
    if dequantize and not quantized:
        raise AFMError(f"{source} is not quantized: there is nothing to dequantize. Leave -d out.")


@dataclass(frozen=True)
class _Plan:
    """What is made of each parameter of a folder."""

    source: Path
    config: ModelConfig
    quantization: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    dtype: mx.Dtype | None
    stock: bool
    layers: PackedLayers = field(default_factory=PackedLayers)
    unpacked: dict[str, str] = field(default_factory=dict)  # paths by the name of the weight

    def specs(self, rules: Mapping[str, QuantizationRule], dequantize: bool) -> list[TensorSpec]:
        """What to write, in the order of the float model's parameters."""
        float_dtype = self.dtype or self.tensors["model.output_norm.weight"].dtype
        specs: list[TensorSpec] = []
        for name, shape in parameter_shapes(self.config).items():
            path = name.removesuffix(".weight")
            parts = [f"{path}.{part}" for part in PARTS if f"{path}.{part}" in self.tensors]
            if path in rules:
                rows = stored_rows(self.tensors[name])
                layer = layer_of_rows(path, rows, rules[path], self.dtype, self.stock)
                specs += self.layers.add(layer)
            elif len(parts) <= 1:
                specs.append(TensorSpec(name, shape, _target(self.tensors[name], self.dtype)))
            elif dequantize:
                self.unpacked[name] = path
                specs.append(TensorSpec(name, shape, float_dtype))
            elif self.stock:
                specs += self.layers.add(self._stock_layer(path, shape))
            else:
                specs += [
                    TensorSpec(p, self.tensors[p].shape, self.tensors[p].dtype) for p in parts
                ]
        return specs

    def _stock_layer(self, path: str, shape: tuple[int, ...]) -> PackedLayer:
        rule = stored_rule(self.quantization, path, self.source)
        if rule is None:
            raise AFMError(
                f"{self.source}: {named(path)} has {stored_settings(self.quantization, path)}, which stock "
                "mlx-lm's afm7 can't load beside other formats. Write float weights (-d)."
            )
        return stock_layer(path, shape, rule, self.tensors)

    def read(self, spec: TensorSpec) -> Iterable[Any]:
        """The data of a tensor that is no part of a layer in `layers`."""
        if spec.name in self.unpacked:
            path = self.unpacked[spec.name]
            return unpacked(path, self.quantization, self.tensors, spec.dtype, self.source)
        return _cast(self.tensors[spec.name], spec.dtype)


def stored_rows(tensor: StoredTensor) -> Rows:
    """A stored float matrix, read in blocks of rows."""
    height, width = tensor.shape
    row = width * tensor.dtype.size

    def read(start: int, stop: int) -> np.ndarray:
        part = float_values(tensor.read(start * row, stop * row), tensor.dtype)
        return part.astype(np.float32, copy=False).reshape(stop - start, width)

    return Rows((height, width), tensor.dtype, read, f"{tensor.path}: {tensor.name}")


def _target(tensor: StoredTensor, dtype: mx.Dtype | None) -> mx.Dtype:
    if dtype is None or not mx.issubdtype(tensor.dtype, mx.floating):
        return tensor.dtype
    return mx.float32 if tensor.name.endswith(KV_SCALES) else dtype


def _cast(tensor: StoredTensor, dtype: mx.Dtype) -> Iterable[Any]:
    """A stored tensor's bytes as `dtype`, in chunks."""
    for start in range(0, tensor.nbytes, _CHUNK_BYTES):
        chunk = tensor.read(start, min(start + _CHUNK_BYTES, tensor.nbytes))
        values = mx.array(chunk).view(tensor.dtype)
        cast = values if tensor.dtype == dtype else values.astype(dtype)
        if not_finite({tensor.name: cast}):
            raise CheckpointError(
                f"{tensor.path}: {named(tensor.name)} holds NaN, infinity, or numbers that {dtype} can't hold. "
                "Choose another dtype, or check the source."
            )
        yield chunk if cast is values else array_bytes(cast)


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
        check_finite(tensors, path)
        if dtype is not None:
            tensors = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
        if plan.base_model_fingerprint == old:
            plan = dataclasses.replace(plan, base_model_fingerprint=new)
        save_adapter(folder / "adapters" / path.name, tensors, plan)
    return [path.name for path in paths]


def _copy_tokenizer(source: Path, folder: Path) -> list[str]:
    names = copy_tokenizer_files(source, folder)
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
