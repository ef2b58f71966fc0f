"""Packing the layers of a whole model by rules, and writing the rules into `config.json`.

`config.json` has mlx-lm's key `quantization`: `bits`, `mode` and `group_size` of most layers, and under a
layer's path its own entry if it differs. Ours adds `granularity`; without it, as in folders of mlx-lm, it is
"group".
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from afm_mlx.config import is_afm_config
from afm_mlx.errors import ConfigError
from afm_mlx.quantization.float_to_codes import pack
from afm_mlx.quantization.packed_layers import (
    PackedEmbedding,
    PackedExperts,
    PackedLinear,
    is_experts,
    packed_layer_for,
    stacked,
)
from afm_mlx.quantization.rule import AFM_RULE, VISION_RULE, QuantizationRule

_PATCH_EMBED = "vision.encoder.patch_embed"

Predicate: TypeAlias = Callable[[str, nn.Module], "QuantizationRule | bool | Mapping[str, Any]"]
"""Returns how the layer at a path is packed: a rule or its keys, True for the default, False for not at all."""


def quantize_model(
    model: nn.Module,
    config: Mapping[str, Any],
    rule: QuantizationRule = AFM_RULE,
    embedding_rule: QuantizationRule | None = None,
    predicate: Predicate | None = None,
    vision_rule: QuantizationRule = VISION_RULE,
) -> tuple[nn.Module, dict[str, Any]]:
    """Pack the linear layers, embeddings and experts of a model, ours or one of mlx-lm's, in place.

    Layers of other types that mlx-lm would pack (subclasses with a product of their own) are refused, unless
    the predicate says False to them.

    Args:
        model: a model with float weights.
        config: the content of its config.json.
        rule: rule of linear layers.
        embedding_rule: rule of embeddings and of a separate head (`lm_head`); by default `rule` with at least 4
            bits.
        predicate: chooses for each layer: True for one of these two rules, False to leave it float, or a rule;
            by default the architecture's predicate in mlx-lm, if it has one, which gives routers 8 bits.
        vision_rule: rule of the linear layers of an image encoder and its adaptor, except the first one, which
            embeds patches and stays float.

    Returns:
        The model, and `config` with the keys `quantization` and `quantization_config`.

    Raises:
        ConfigError, CheckpointError: name the layer that can't be packed, or not by its rule, and why.
    """
    rules = layer_rules(model, rule, embedding_rule, predicate, vision_rule)
    modules = dict(model.named_modules())
    for path, own in rules.items():
        replace_modules(model, [(path, pack_layer(modules.pop(path), own, path))])
    return model, quantized_config(config, rules)


def layer_rules(
    model: nn.Module,
    rule: QuantizationRule = AFM_RULE,
    embedding_rule: QuantizationRule | None = None,
    predicate: Predicate | None = None,
    vision_rule: QuantizationRule = VISION_RULE,
) -> dict[str, QuantizationRule]:
    """Return the rule of every layer of a float model that gets packed, by its path.

    `predicate(path, layer)` returns a rule or its keys, True for the one of these rules that is for the layer,
    or False for none; by default it is the architecture's, with its bits in the format of `rule`.
    """
    of_architecture: Any = getattr(model, "quant_predicate", None)

    def by_architecture(path: str, module: nn.Module) -> QuantizationRule | bool:
        answer = of_architecture(path, module)
        if isinstance(answer, Mapping):
            answer = dataclasses.replace(rule, bits=answer["bits"])
        return answer

    if predicate is None and of_architecture is not None:
        predicate = by_architecture
    choose = rule_chooser(rule, embedding_rule, predicate, vision_rule)
    check_layer_types(model, choose, can_be_packed)
    rules = {}
    for path, module in model.named_modules():
        if can_be_packed(module) and (own := choose(path, module)) is not None:
            own.check(module.weight.shape, path)
            rules[path] = own
    if not rules:
        raise ConfigError("No layer was chosen to be packed; the rule says no to all of them.")
    return rules


def can_be_packed(layer: nn.Module) -> bool:
    """True if a float layer is of a type that has a packed form."""
    return type(layer) in (nn.Linear, nn.Embedding) or is_experts(layer)


def check_layer_types(
    model: nn.Module,
    choose: Callable[[str, nn.Module], QuantizationRule | None],
    can_be: Callable[[nn.Module], bool],
) -> None:
    """Raise `ConfigError` if a layer gets a rule and is of a type that can't be packed.

    `choose` is a result of `rule_chooser`, and `can_be` returns True for layers that can be packed.
    """
    others = [
        (path, module)
        for path, module in model.named_modules()
        if hasattr(module, "to_quantized")
        and not can_be(module)
        and choose(path, module) is not None
    ]
    if not others:
        return
    path, module = min(others, key=lambda other: other[0])
    size = sum(array.size for _, m in others for _, array in tree_flatten(m.parameters()))
    share = size / sum(array.size for _, array in tree_flatten(model.parameters()))
    more = f" and {len(others) - 1} more layers" if len(others) > 1 else ""
    raise ConfigError(
        f"{path} ({type(module).__name__}){more} can't be packed here, and would stay float: {share:.0%} of "
        "the model's parameters. Take mlx-lm's own format, which packs them (--q-mode affine, without "
        "--q-granularity), or leave them out by a predicate."
    )


def rule_chooser(
    rule: QuantizationRule,
    embedding_rule: QuantizationRule | None = None,
    predicate: Predicate | None = None,
    vision_rule: QuantizationRule = VISION_RULE,
) -> Callable[[str, nn.Module], QuantizationRule | None]:
    """Return a function of a layer's path and module that returns its rule, or None if it stays float.

    `predicate(path, layer)` returns a rule or its keys, True for the one of these rules that is for the layer,
    or False for none. The layer that embeds an image's patches has none of them, and stays float.
    """
    outer = embedding_rule or dataclasses.replace(rule, bits=max(rule.bits, 4))

    def choose(path: str, module: nn.Module) -> QuantizationRule | None:
        default: QuantizationRule | None = outer if is_outer(path, module) else rule
        if is_vision(path):
            default = vision_rule if path != _PATCH_EMBED else None
        answer = True if predicate is None else predicate(path, module)
        if isinstance(answer, QuantizationRule):
            return answer
        if isinstance(answer, Mapping):
            try:
                return QuantizationRule.from_dict(answer)
            except ConfigError as error:
                raise ConfigError(f"{path}: {error}") from None
        if isinstance(answer, bool):
            return default if answer else None
        raise ConfigError(
            f"{path}: the predicate returned {answer!r}; allowed are a QuantizationRule, a mapping of its "
            "keys, True and False."
        )

    return choose


def is_outer(path: str, module: nn.Module) -> bool:
    """True if a layer is an embedding or a head: these take the embedding rule."""
    return isinstance(module, nn.Embedding) or path.split(".")[-1] == "lm_head"


def is_vision(path: str) -> bool:
    """True if a layer belongs to an AFM model's image encoder or its adaptor: these take the vision rule."""
    return path.startswith("vision.")


def pack_layer(module: nn.Module, rule: QuantizationRule, name: str) -> nn.Module:
    """Return a linear layer, an embedding or experts packed by `rule`; `name` is the layer's name in errors."""
    weight = module.weight
    if weight.ndim == 2:
        packed = pack(weight, rule, name=name).packed
    else:
        rule.check(weight.shape, name)
        packed = stacked(pack(weight.flatten(0, 1), rule, name=name).packed, weight.shape[0])
    return packed_layer_for(module, packed, weight.dtype)


def dequantize_model(model: nn.Module, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """Replace packed layers, in place, by float layers of the same numbers; returns the model."""
    layers = []
    for path, module in model.named_modules():
        if isinstance(module, PackedLinear):
            layers.append((path, module.to_linear(dtype)))
        elif isinstance(module, PackedEmbedding):
            layers.append((path, module.to_embedding(dtype)))
        elif isinstance(module, PackedExperts):
            layers.append((path, module.to_switch_linear(dtype)))
    replace_modules(model, layers)
    return model


# -- config.json


def quantized_config(
    config: Mapping[str, Any], rules: Mapping[str, QuantizationRule]
) -> dict[str, Any]:
    """Return the content of config.json with the rules of a packed model, by the layers' paths."""
    is_afm = is_afm_config(config)
    fused = [path for path in rules if is_afm and path.endswith(".qkv_proj")]
    return with_quantization(config, quantization_entries(rules, fused))


def with_quantization(config: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of config.json with `entries` as `quantization`; without that key if it is empty."""
    keys = ("quantization", "quantization_config")
    others = {key: value for key, value in config.items() if key not in keys}
    return others | dict.fromkeys(keys, entries) if entries else others


def quantization_entries(
    rules: Mapping[str, QuantizationRule], fused: Collection[str] = ()
) -> dict[str, Any]:
    """Return the content of `quantization`: the commonest rule, and the layers that differ.

    mlx-lm's `to_quantized` of `fused` QKV layers takes no mode: their entries have none.
    """
    commonest, _ = Counter(rules.values()).most_common(1)[0]
    entries: dict[str, Any] = commonest.to_dict()
    for path, rule in rules.items():
        if path in fused and rule.is_mlx_format and commonest.is_mlx_format:
            entries[path] = {"bits": rule.bits, "group_size": rule.group_size}
        elif rule != commonest:
            entries[path] = rule.to_dict()
    return entries


def replace_modules(model: nn.Module, leaves: list[tuple[str, nn.Module]]) -> None:
    """Replace a model's layers; `leaves` has the path of each, as in `named_modules`, and its new layer."""
    for path, module in leaves:
        *parents, last = path.split(".")
        owner: Any = model
        for key in parents:
            owner = owner[int(key)] if isinstance(owner, list) else owner[key]
        owner[int(last) if isinstance(owner, list) else last] = module
