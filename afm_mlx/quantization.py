"""What a layer's matrix is packed to: rules, models that follow them, and their place in `config.json`.

`config.json` has mlx-lm's key `quantization`: `bits`, `mode` and `group_size` of most layers, and under a
layer's path what differs there. Ours adds `granularity`; a folder of mlx-lm has none, and means groups.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from afm_mlx.config import MODEL_TYPE, ModelConfig
from afm_mlx.errors import ConfigError, named, shown
from afm_mlx.kernels import BITS, MODES, PackedWeight
from afm_mlx.kernels.cpu.memory import prefer_huge_pages
from afm_mlx.model import Model
from afm_mlx.packed import PackedEmbedding, PackedLinear, activation_dtype, check_width
from afm_mlx.rounding import pack

GRANULARITIES = ("tensor", "row", "group")
RULE_KEYS = ("bits", "mode", "granularity", "group_size")
_DEFAULT_GRANULARITY = {"balanced": "row", "affine": "group", "palette": "group"}
_MOST_IN_GROUP = 1 << 24
_DEFAULT_GROUP = {"balanced": 64, "affine": 64, "palette": 16}


@dataclass(frozen=True)
class QuantizationRule:
    """How one matrix is packed.

    Args:
        bits: 2, 4 or 8.
        mode: "balanced", "affine" or "palette"; see `kernels.formats`.
        granularity: what has a scale of its own: "tensor", "row", or "group". In a palette, what has a
            table of its own, and a group is a number of rows. By default "row" for balanced, and "group".
        group_size: inputs that share a scale, or rows that share a table. By default 64, and 16 rows.

    Raises:
        ConfigError: names the field, what it is and what is allowed.
    """

    bits: int = 2
    mode: str = "balanced"
    granularity: str | None = None
    group_size: int | None = None

    def __post_init__(self) -> None:
        _one_of("bits", self.bits, BITS)
        _one_of("mode", self.mode, MODES)
        if self.granularity is None:
            implied = "group" if self.group_size else _DEFAULT_GRANULARITY[self.mode]
            object.__setattr__(self, "granularity", implied)
        _one_of("granularity", self.granularity, GRANULARITIES)
        if self.granularity != "group":
            if self.group_size is not None:
                raise ConfigError(
                    f"group_size is {shown(self.group_size)} with granularity {self.granularity!r}; only "
                    'groups have a size. Leave it out, or set granularity to "group".'
                )
        elif self.group_size is None:
            object.__setattr__(self, "group_size", _DEFAULT_GROUP[self.mode])
        elif type(self.group_size) is not int or not 1 <= self.group_size <= _MOST_IN_GROUP:
            raise ConfigError(
                f"group_size is {shown(self.group_size)}; allowed is a positive integer of a matrix's size."
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> QuantizationRule:
        """Parse a layer's entry of `config.json`.

        Raises:
            ConfigError: names every unknown key.
        """
        unknown = sorted(map(str, set(values) - set(RULE_KEYS)))
        if unknown:
            raise ConfigError(
                f"unknown keys {named(', '.join(unknown))}; known are {', '.join(RULE_KEYS)}."
            )
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The entry for `config.json`; for a matrix in MLX's own format that of mlx-lm."""
        values = {"bits": self.bits, "group_size": self.group_size, "mode": self.mode}
        return values if self.is_stock else values | {"granularity": self.granularity}

    @property
    def is_stock(self) -> bool:
        """Whether MLX's own quantized layers hold this format."""
        return (
            self.mode == "affine"
            and self.granularity == "group"
            and self.group_size in (32, 64, 128)
        )

    def check(self, shape: tuple[int, ...], name: str) -> None:
        """Whether a matrix of this shape can be packed so.

        Raises:
            CheckpointError: when a row does not fill whole words.
            ConfigError: when the groups do not divide the matrix; both name the layer.
        """
        rows, inputs = shape
        check_width(inputs, self.bits, name)
        if self.granularity != "group":
            return
        assert self.group_size is not None
        size, what = (rows, "rows") if self.mode == "palette" else (inputs, "inputs")
        if size % self.group_size:
            raise ConfigError(
                f"{name} has {size} {what}, which groups of {self.group_size} do not divide. Take a group size "
                f'that divides {size}, or granularity "row" or "tensor".'
            )

    def part_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Shapes of the parts that a matrix (N, K) is packed to, by their names."""
        rows, inputs = shape
        parts: dict[str, tuple[int, ...]] = {"weight": (rows, inputs * self.bits // 32)}
        if self.mode == "palette":
            tables = {"tensor": 1, "row": rows}.get(
                self.granularity or "", rows // (self.group_size or 1)
            )
            return parts | {"table": (tables, 2**self.bits)}
        groups = inputs // (self.group_size or inputs)
        per = {"tensor": (), "row": (rows,), "group": (rows, groups)}[self.granularity or ""]
        parts["scales"] = per
        return parts | {"biases": per} if self.mode == "affine" else parts

    def nbytes(self, shape: tuple[int, ...], dtype: mx.Dtype = mx.float32) -> int:
        """Bytes of a packed matrix (N, K) in a folder, scales and tables included.

        Args:
            shape: (N, K).
            dtype: of the folder's floats, which MLX's own format takes for its scales; ours are float32.
        """
        width = dtype.size if self.is_stock else 4
        return sum(
            math.prod(part) * (4 if name == "weight" else width)
            for name, part in self.part_shapes(shape).items()
        )


def rule_of(packed: PackedWeight) -> QuantizationRule:
    """The rule of a packed matrix."""
    if packed.table is not None:
        tables = packed.table.shape[0]
        if tables in (1, packed.out_dims):
            return QuantizationRule(packed.bits, packed.mode, "tensor" if tables == 1 else "row")
        return QuantizationRule(packed.bits, packed.mode, "group", packed.out_dims // tables)
    group = packed.group_size if packed.granularity == "group" else None
    return QuantizationRule(packed.bits, packed.mode, packed.granularity, group)


def _one_of(name: str, value: Any, allowed: tuple) -> None:
    if value not in allowed or isinstance(value, bool):
        raise ConfigError(f"{name} is {shown(value)}; allowed are {', '.join(map(str, allowed))}.")


AFM_RULE = QuantizationRule()
"""Body of the 3B: two bits, balanced, one scale per row."""

AFM_EMBEDDING_RULE = QuantizationRule(bits=4)

PRESET_RULES = {
    "afm-2024": (QuantizationRule(4, "palette"), QuantizationRule(8)),
}
"""Presets that were published with other rules of body and embedding than the 3B's.

Source: arXiv 2407.21075, its part on compression: every 16 rows share a table of 16 entries, and the
embedding is int8 per row. The mix with 2-bit layers that brings the average to 3.7 bits is not published.
"""

Predicate: TypeAlias = Callable[[str, nn.Module], "QuantizationRule | bool | Mapping[str, Any]"]
"""What the layer at a path is packed to: a rule or its keys, True for the default, False for nothing."""


def quantize_model(
    model: nn.Module,
    config: Mapping[str, Any],
    rule: QuantizationRule = AFM_RULE,
    embedding_rule: QuantizationRule | None = None,
    predicate: Predicate | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """Pack the linear layers and embeddings of a model, ours or one of mlx-lm's zoo, in place.

    Layers of other types (experts, subclasses with a product of their own) stay as they are.

    Args:
        model: with float weights.
        config: the content of its config.json.
        rule: of linear layers.
        embedding_rule: of embeddings and of a head that is no embedding (`lm_head`); `rule` with 4 bits at
            least when None.
        predicate: decides for each layer: one of these two rules (True), none (False), or its own.

    Returns:
        the model, and `config` with the keys `quantization` and `quantization_config`.

    Raises:
        ConfigError, CheckpointError: name the layer that can't be packed so, and why.
    """
    choose = rule_chooser(rule, embedding_rule, predicate)
    rules: dict[str, QuantizationRule] = {}
    for path, module in model.named_modules():
        if type(module) not in (nn.Linear, nn.Embedding):
            continue
        own = choose(path, module)
        if own is None:
            continue
        replace_modules(model, [(path, pack_layer(module, own, path))])
        rules[path] = own
    if not rules:
        raise ConfigError("No layer was chosen to be packed; the rule says no to all of them.")
    return model, quantized_config(config, rules)


def rule_chooser(
    rule: QuantizationRule,
    embedding_rule: QuantizationRule | None = None,
    predicate: Predicate | None = None,
) -> Callable[[str, nn.Module], QuantizationRule | None]:
    """The rule of each layer, None for those that stay as they are; see `quantize_model`.

    The function that is returned raises `ConfigError`, which names the layer.
    """
    outer = embedding_rule or dataclasses.replace(rule, bits=max(rule.bits, 4))

    def choose(path: str, module: nn.Module) -> QuantizationRule | None:
        default = outer if is_outer(path, module) else rule
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
    """Whether a layer is an embedding or a head, which follow the rule of embeddings."""
    return isinstance(module, nn.Embedding) or path.split(".")[-1] == "lm_head"


def pack_layer(module: nn.Module, rule: QuantizationRule, name: str) -> nn.Module:
    """The packed layer of a linear layer or an embedding."""
    packed = pack(module.weight, rule, name=name).packed
    if isinstance(module, nn.Embedding):
        return PackedEmbedding(packed, module.weight.dtype).train(module.training)
    return PackedLinear(packed, module.get("bias")).train(module.training)


def dequantize_model(model: nn.Module, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """Undo `quantize_model`: packed layers become float layers of the numbers that they stand for."""
    layers = []
    for path, module in model.named_modules():
        if isinstance(module, PackedLinear):
            layers.append((path, module.to_linear(dtype)))
        elif isinstance(module, PackedEmbedding):
            layers.append((path, module.to_embedding(dtype)))
    replace_modules(model, layers)
    return model


# -- config.json


def quantized_config(
    config: Mapping[str, Any], rules: Mapping[str, QuantizationRule]
) -> dict[str, Any]:
    """The content of config.json with the rules, by path of the layer, that its model was packed by."""
    entries = quantization_entries(rules, fused=_fused_in_stock(config, rules))
    return {**config, "quantization": entries, "quantization_config": entries}


def quantization_entries(
    rules: Mapping[str, QuantizationRule], fused: Collection[str] = ()
) -> dict[str, Any]:
    """The content of `quantization`: the commonest rule, and the layers that differ.

    Args:
        rules: by path of the layer.
        fused: layers that stock mlx-lm's `to_quantized` takes no mode for (its fused QKV); they get an
            entry without one, with which it loads them.
    """
    commonest, _ = Counter(rules.values()).most_common(1)[0]
    entries: dict[str, Any] = commonest.to_dict()
    for path, rule in rules.items():
        if path in fused and rule.is_stock and commonest.is_stock:
            entries[path] = {"bits": rule.bits, "group_size": rule.group_size}
        elif rule != commonest:
            entries[path] = rule.to_dict()
    return entries


def _fused_in_stock(config: Mapping[str, Any], paths: Iterable[str]) -> list[str]:
    if config.get("model_type") != MODEL_TYPE:
        return []
    return [path for path in paths if path.endswith(".qkv_proj")]


# -- models made of random codes


def random_packed_model(
    config: ModelConfig,
    rule: QuantizationRule = AFM_RULE,
    embedding_rule: QuantizationRule = AFM_EMBEDDING_RULE,
    seed: int = 0,
) -> Model:
    """A model of real shapes with random codes, for benchmarks: nothing is ever a float matrix.

    Weights have the variance of a fresh model's, norms are 1, and the scales of keys and values fit
    normed activations, so that sums stay in the range that a trained model has.
    """
    rng = np.random.default_rng(seed)
    dtype = activation_dtype()
    model = Model(config)
    leaves: list[tuple[str, nn.Module]] = []
    for path, module in model.named_modules():
        if type(module) is nn.Linear:
            packed = _random_packed(module.weight.shape, rule, rng, path)
            leaves.append((path, PackedLinear(packed)))
        elif type(module) is nn.Embedding:
            packed = _random_packed(module.weight.shape, embedding_rule, rng, path)
            leaves.append((path, PackedEmbedding(packed, dtype)))
        elif isinstance(module, nn.RMSNorm):
            module.weight = mx.ones(module.weight.shape, dtype)
    replace_modules(model, leaves)
    if config.kv_bits:
        for layer in model.model.layers:
            # A normed value rarely passes 4 standard deviations.
            layer.self_attn.quant_key_scale = mx.array(4 / 127)
            layer.self_attn.quant_value_scale = mx.array(4 / 127)
    mx.eval(model.parameters())
    prefer_huge_pages(array for _, array in tree_flatten(model.parameters()))
    return model.eval()


def _random_packed(
    shape: tuple[int, ...], rule: QuantizationRule, rng: np.random.Generator, name: str
) -> PackedWeight:
    rule.check(shape, name)
    parts = rule.part_shapes(shape)
    codes = rng.integers(0, 2**32, parts["weight"], dtype=np.uint32)
    deviation = shape[1] ** -0.5
    table = scales = biases = None
    if rule.mode == "palette":
        table = mx.array(np.sort(rng.normal(0, deviation, parts["table"])).astype(np.float32))
    else:
        # Codes are uniform, so their variance is (4^bits - 1) / 12.
        step = deviation * (12 / (4**rule.bits - 1)) ** 0.5
        values = rng.uniform(0.8 * step, 1.2 * step, parts["scales"])
        scales = mx.array(np.asarray(values, np.float32))
    if rule.mode == "affine":
        biases = scales * -((2**rule.bits - 1) / 2)
    return PackedWeight(mx.array(codes), rule.bits, rule.mode, scales, biases, table)


def replace_modules(model: nn.Module, leaves: list[tuple[str, nn.Module]]) -> None:
    """Put layers in the places of others, at paths as `named_modules` gives them."""
    for path, module in leaves:
        *parents, last = path.split(".")
        owner: Any = model
        for key in parents:
            owner = owner[int(key)] if isinstance(owner, list) else owner[key]
        owner[int(last) if isinstance(owner, list) else last] = module
