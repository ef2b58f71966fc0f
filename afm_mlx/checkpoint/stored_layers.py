"""Layers that a folder stores packed: their settings in `config.json`, compared with their tensors.

Balanced, affine and palette matrices of 2, 4 and 8 bits become packed layers, in folders of mlx-lm too.
Other formats (3, 5 and 6 bits, mxfp4 and the like) stay MLX's own layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.checkpoint.safetensors_file import TensorLike
from afm_mlx.checkpoint.weights import check_weights
from afm_mlx.config import ModelConfig, parameter_shapes
from afm_mlx.errors import CheckpointError, ConfigError, named, shown
from afm_mlx.kernels import BITS, PackedWeight, dispatch
from afm_mlx.kernels.cpu import extension
from afm_mlx.quantization.packed_layers import (
    PARTS,
    PackedEmbedding,
    PackedExperts,
    PackedLinear,
    activation_dtype,
    is_experts,
    packed_layer_for,
)
from afm_mlx.quantization.quantize_model import can_be_packed, replace_modules
from afm_mlx.quantization.rule import RULE_KEYS, QuantizationRule

_PACKED = (PackedLinear, PackedEmbedding, PackedExperts)
_MLX_MODES = ("mxfp4", "mxfp8", "nvfp4")
_MLX_BITS = (1, 3, 5, 6)
_MLX_MOST_BITS, _MLX_MOST_IN_GROUP = 8, 128


def quantization_of(values: Mapping[str, Any], source: str | Path) -> dict[str, Any]:
    """Return the object `quantization` in the content of a config.json; empty if the folder is not quantized.

    Raises:
        ConfigError: if `quantization` is no JSON object; names `source`.
    """
    quantization = values.get("quantization") or values.get("quantization_config") or {}
    if not isinstance(quantization, dict):
        raise ConfigError(f"{source}: quantization is {shown(quantization)}; an object is needed.")
    return quantization


def stored_settings(quantization: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the settings of the layer at a path: its own entry over the common keys of `quantization`.

    An entry with another mode takes none of the common keys. One with its own group size or granularity takes
    neither of these two from them. The default mode is affine.
    """
    common = {"mode": "affine"} | {k: quantization[k] for k in RULE_KEYS if k in quantization}
    own = quantization.get(path)
    if not isinstance(own, Mapping):
        return common
    if own.get("mode", common["mode"]) != common["mode"]:
        return dict(own)
    if "group_size" in own or "granularity" in own:
        common.pop("group_size", None)
        common.pop("granularity", None)
    return common | dict(own)


def stored_rule(
    quantization: Mapping[str, Any], path: str, source: str | Path
) -> QuantizationRule | None:
    """Return the rule of a stored layer; None for a format of MLX's own layers only.

    Raises:
        ConfigError: names the layer, and the key that is missing or invalid.
    """
    settings = stored_settings(quantization, path)
    mode, bits, group = settings["mode"], settings.get("bits"), settings.get("group_size")
    of_mlx = mode in _MLX_MODES or (mode == "affine" and bits in _MLX_BITS)
    limits = (bits, _MLX_MOST_BITS), (group, _MLX_MOST_IN_GROUP)
    if of_mlx and all(type(value) is int and 1 <= value <= most for value, most in limits):
        return None
    try:
        if type(bits) is not int:
            raise ConfigError(f"bits is {shown(bits)}; allowed are {', '.join(map(str, BITS))}.")
        grouped = settings.get("granularity", "group") == "group"
        if mode in ("affine", *_MLX_MODES) and grouped and type(group) is not int:
            raise ConfigError(f"group_size is {shown(group)}; a number of inputs is needed.")
        return QuantizationRule.from_dict(settings)
    except ConfigError as error:
        raise ConfigError(f"{source}: the quantization of {path} can't be used: {error}") from None


StoredRules: TypeAlias = dict[str, QuantizationRule | None]
"""Rules of the layers that are stored packed, by path; None for a format of MLX's own layers only."""


def stored_rules(
    shapes: Mapping[str, tuple[int, ...]],
    quantization: Mapping[str, Any],
    tensors: Mapping[str, TensorLike],
    source: str | Path,
) -> StoredRules:
    """Find the layers that are stored packed, and compare their tensors with their settings.

    Args:
        shapes: shapes of the float weights, by name.
        quantization: a result of `quantization_of`.
        tensors: the folder's tensors, by name.
        source: the folder's config.json, for errors.

    Raises:
        ConfigError, CheckpointError: name the layer whose tensors and settings do not fit.
    """
    rules: StoredRules = {}
    known: StoredRules = {}  # rules by path; "" for layers without an entry of their own
    for name, shape in shapes.items():
        path, _, kind = name.rpartition(".")
        if kind != "weight" or len(shape) < 2:
            continue
        own, weight = quantization.get(path), tensors.get(name)
        has_entry = own is not None and isinstance(own, Mapping)
        found = {part: tensors[f"{path}.{part}"] for part in PARTS if f"{path}.{part}" in tensors}
        packed = any(part != "weight" for part in found) or (
            weight is not None and weight.dtype == mx.uint32
        )
        if packed and (not quantization or own is False):
            says = "nothing of it" if not quantization else shown(own)
            got = f"{path} is stored packed, and its quantization says {says}"
        elif has_entry and not packed:
            got = f"the quantization says that {path} is {shown(own)}, and the folder stores it as "
            got += "nothing" if weight is None else _described(weight)
        else:
            if packed:
                key = path if has_entry else ""
                if key not in known:
                    known[key] = stored_rule(quantization, path, source)
                rules[path] = rule = known[key]
                if rule is not None:
                    _check_parts(f"{source}: {path}", rule, shape, found)
            continue
        raise CheckpointError(
            f"{source}: {got}. The config and the weights are not of the same model: copy or convert it again."
        )
    return rules


def _check_parts(
    where: str, rule: QuantizationRule, shape: tuple[int, ...], found: Mapping[str, TensorLike]
) -> None:
    """Raise unless a layer's tensors have the shapes and types of its rule for a matrix of `shape`."""
    rule.check(shape, where)
    wanted = rule.part_shapes(shape)
    problems = [f"{part} is missing" for part in wanted if part not in found]
    problems += [
        f"{part} does not belong to mode {rule.mode}" for part in found if part not in wanted
    ]
    for part, tensor in found.items():
        kind = "uint32" if part == "weight" else "float"
        right = tensor.dtype == mx.uint32 if part == "weight" else _is_float(tensor)
        if part in wanted and (not right or tuple(tensor.shape) != wanted[part]):
            problems.append(
                f"{part} is {_described(tensor)} and must be {kind} {list(wanted[part])}"
            )
    if problems:
        raise CheckpointError(
            f"{where} is {list(shape)} and its quantization {rule.to_dict()}, which its tensors do "
            f"not fit: {'; '.join(problems)}. Check that the config and the weights are of the same model."
        )


def check_folder_tensors(
    config: ModelConfig,
    quantization: Mapping[str, Any],
    tensors: Mapping[str, TensorLike],
    source: Path,
) -> StoredRules:
    """Compare the headers of an AFM folder's tensors with its config, before anything is built.

    For arguments and result see `stored_rules`.

    Raises:
        ConfigError, CheckpointError: name the tensors that are missing, not of the model, of another shape, or
            integers instead of floats.
    """
    shapes = parameter_shapes(config)
    rules = stored_rules(shapes, quantization, tensors, source)
    floats = {n: s for n, s in shapes.items() if n.removesuffix(".weight") not in rules}
    expected = dict(floats)
    for path, rule in rules.items():
        if rule is None:
            shape = shapes[f"{path}.weight"]
            parts = _mlx_part_shapes(path, shape, quantization, tensors, source)
            expected |= {f"{path}.{part}": of_part for part, of_part in parts.items()}
        else:  # `stored_rules` has compared these shapes
            names = [f"{path}.{part}" for part in PARTS]
            expected |= {name: tuple(tensors[name].shape) for name in names if name in tensors}
    check_weights(expected, tensors, source.parent)
    for name in floats:
        if not _is_float(tensors[name]):
            raise CheckpointError(
                f"{source.parent}: {name} is {_name(tensors[name].dtype)} and must be float. The weights were "
                "damaged or saved in a wrong type: copy or convert them again."
            )
    return rules


def _is_float(tensor: TensorLike) -> bool:
    return mx.issubdtype(tensor.dtype, mx.floating)


def _mlx_part_shapes(
    path: str,
    shape: tuple[int, ...],
    quantization: Mapping[str, Any],
    tensors: Mapping[str, TensorLike],
    source: str | Path,
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer in MLX's own format; raise for wrong types: only affine scales are float."""
    settings = stored_settings(quantization, path)
    affine, (rows, inputs) = settings["mode"] == "affine", shape
    groups = (rows, math.ceil(inputs / settings["group_size"]))
    codes = (rows, math.ceil(inputs * settings["bits"] / 32))
    parts: dict[str, tuple[int, ...]] = {"weight": codes, "scales": groups}
    if affine:
        parts["biases"] = groups
    for part in parts:
        tensor = tensors.get(f"{path}.{part}")
        if tensor is not None and _is_float(tensor) != (affine and part != "weight"):
            raise CheckpointError(
                f"{source}: {path}.{part} is {_name(tensor.dtype)}, which mode {settings['mode']} does not "
                "have. Check that the config and the weights are of the same model."
            )
    return parts


def place_stored_layers(
    model: nn.Module,
    quantization: Mapping[str, Any],
    weights: Mapping[str, mx.array],
    source: str | Path,
    dtype: mx.Dtype,
    rules: StoredRules | None = None,
) -> None:
    """Replace the layers that a folder stores packed by packed layers of its arrays.

    Args:
        model: a model with float layers, which may be unevaluated.
        weights: arrays by name, usually lazy.
        dtype: type that embeddings return.
        rules: the result of `stored_rules` for this model; pass None to call it here.

    Raises:
        ConfigError, CheckpointError: name the layer.
    """
    modules = dict(model.named_modules())
    floats = {path: module for path, module in modules.items() if can_be_packed(module)}
    if rules is None:
        shapes = {f"{path}.weight": module.weight.shape for path, module in floats.items()}
        rules = stored_rules(shapes, quantization, weights, source)
    # Layers that have no packed form here stay MLX's own.
    others = {
        path
        for path, module in modules.items()
        if path not in floats and hasattr(module, "to_quantized") and f"{path}.scales" in weights
    }
    layers: list[tuple[str, nn.Module]] = []
    for path, rule in rules.items():
        if rule is None:
            others.add(path)
            continue
        parts = {part: weights.get(f"{path}.{part}") for part in PARTS[1:]}
        packed = PackedWeight(weights[f"{path}.weight"], rule.bits, rule.mode, **parts)
        layers.append((path, packed_layer_for(floats[path], packed, dtype)))
    replace_modules(model, layers)
    if not others:
        return

    def settings(path: str, module: nn.Module) -> bool | dict[str, Any]:
        own = stored_settings(quantization, path)
        return path in others and {k: value for k, value in own.items() if k != "granularity"}

    try:
        nn.quantize(model, class_predicate=settings)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{source}: the quantization {shown(dict(quantization))} can't be used: {named(str(error))}. It "
            "needs group_size, bits and mode, as mlx-lm writes them."
        ) from None


def repack_mlx_layers(model: nn.Module) -> None:
    """Replace MLX's own quantized layers, where the format allows it, by packed layers for our kernels."""
    layers: list[tuple[str, nn.Module]] = []
    for path, module in model.named_modules():
        quantized = type(module) in (nn.QuantizedLinear, nn.QuantizedEmbedding)
        quantized = quantized or is_experts(module, quantized=True)
        if not quantized or module.mode != "affine" or module.bits not in BITS:
            continue
        parts = (module.scales, module.biases)
        packed = PackedWeight(module.weight, module.bits, "affine", *parts)
        layers.append((path, packed_layer_for(module, packed, module.scales.dtype)))
    replace_modules(model, layers)


def settle_scales(model: nn.Module) -> None:
    """Cast the scales of packed layers to the type for kernels: affine scales keep theirs, others are float32.

    On a CPU without the extension, where no kernels run, affine ones are cast to float32 too, the type of
    activations. Where MLX's own product multiplies with experts, they get scales and biases in MLX's format.
    """
    on_cpu = dispatch.device() == "cpu"
    plain = on_cpu and extension.module() is None
    dtypes = [layer.dtype for layer in model.modules() if isinstance(layer, PackedEmbedding)]
    for module in model.modules():
        if isinstance(module, PackedExperts) and (plain or not on_cpu):
            module.prepare_for_mlx(mx.float32 if plain else [*dtypes, activation_dtype()][0])
        if not isinstance(module, _PACKED) or (module.mode == "affine" and not plain):
            continue
        for part in PARTS[1:]:
            if part in module:
                module[part] = module[part].astype(mx.float32)


def settle_floats(model: nn.Module) -> None:
    """Cast a model's floats to float32 on a CPU, where MLX computes half types 10 to 100 times slower.

    Parts of packed layers keep their type.
    """
    if activation_dtype() != mx.float32:
        return

    def computes(module: nn.Module, name: str, value: Any) -> bool:
        packed = isinstance(module, _PACKED) and name in PARTS
        return nn.Module.valid_parameter_filter(module, name, value) and not packed

    model.apply(lambda x: x.astype(mx.float32) if _is_float(x) else x, computes)
    for module in model.modules():
        if isinstance(module, PackedEmbedding):
            module.dtype = mx.float32


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _described(tensor: TensorLike) -> str:
    return f"{_name(tensor.dtype)} {shown(list(tensor.shape))}"
