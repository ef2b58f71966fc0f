"""Layers that are packed, repacked or unpacked while a folder is written, one at a time.

A layer's parts are made when the first of them is written, and kept until the last one is. So memory holds
one layer, and the scales that go to the end of the file because their type is narrower than that of codes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from afm_mlx.checkpoint.finite import check_finite
from afm_mlx.checkpoint.stored_layers import stored_rule, stored_settings
from afm_mlx.checkpoint.weights import StoredTensor, TensorSpec, array_bytes
from afm_mlx.config import ModelConfig
from afm_mlx.errors import AFMError, ConfigError, shown
from afm_mlx.kernels import PackedWeight
from afm_mlx.kernels.packing import dequantize_rows
from afm_mlx.model.model import Model
from afm_mlx.quantization.packed_layers import PARTS
from afm_mlx.quantization.quantize import Predicate, quantization_entries, rule_chooser
from afm_mlx.quantization.rounding import Packing, Rows, pack, round_to
from afm_mlx.quantization.rule import AFM_RULE, QuantizationRule

RECIPES = {"mixed_2_4": (2, 4), "mixed_2_8": (2, 8), "mixed_4_8": (4, 8)}
"""Bits of most layers, and of those that suffer most; see `recipe`."""

MLX_LM_RECIPES = ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")
_STOCK_GROUPS = (128, 64, 32)
_UNPACK_ELEMENTS = 4 << 20


# -- rules


def layer_rules(
    config: ModelConfig,
    rule: QuantizationRule = AFM_RULE,
    embedding_rule: QuantizationRule | None = None,
    predicate: Predicate | None = None,
) -> dict[str, QuantizationRule]:
    """The rule of every layer of an AFM model that is packed, by its path; see `quantize_model`.

    Raises:
        ConfigError, CheckpointError: name the layer that can't be packed so.
    """
    choose = rule_chooser(rule, embedding_rule, predicate)
    result = {}
    # The model's arrays are lazy, and stay unmade.
    for path, module in Model(config).named_modules():
        if type(module) not in (nn.Linear, nn.Embedding):
            continue
        own = choose(path, module)
        if own is not None:
            own.check(module.weight.shape, path)
            result[path] = own
    if not result:
        raise ConfigError("No layer was chosen to be packed; the rule says no to all of them.")
    return result


def recipe(name: str, config: ModelConfig, rule: QuantizationRule) -> Predicate:
    """mlx-lm's choice of layers that get more bits, in bits that packed layers have.

    These are the values (here all of the fused QKV) and the down projection in the first and the last
    eighth of the blocks, and in every third block between.

    Source: mlx-lm 0.32.2, `mixed_quant_predicate_builder` of `mlx_lm/convert.py`, after llama.cpp.

    Raises:
        ConfigError: for mlx-lm's own recipes, which have 3 and 6 bits.
    """
    if name not in RECIPES:
        raise ConfigError(
            f"The recipe {shown(name)} has layers of 3 or 6 bits, or is none; an AFM model takes 2, 4 and 8: "
            f"{', '.join(RECIPES)}."
        )
    low, high = RECIPES[name]
    eighth = config.num_layers // 8

    def choose(path: str, module: nn.Module) -> QuantizationRule | bool:
        if isinstance(module, nn.Embedding):
            return True
        _, kind, number, *_ = path.split(".")
        block = int(number) + (config.num_kv_layers if kind == "kv_reuse_layers" else 0)
        outer = block < eighth or block >= 7 * config.num_layers // 8
        more = outer or (block - eighth) % 3 == 2
        suffers = path.endswith((".qkv_proj", ".down_proj"))
        return dataclasses.replace(rule, bits=high if more and suffers else low)

    return choose


# -- layers on their way into a folder


@dataclass
class PackedLayer:
    """A matrix on its way into a folder.

    Args:
        path: of the layer.
        shape: (N, K).
        rule: what it is packed to.
        make: the matrix, packed as the rule says.
        dtype: of scales, biases and tables.
        exact: set when it was written: whether the weights lay on a grid, and its codes are of that.
    """

    path: str
    shape: tuple[int, ...]
    rule: QuantizationRule
    make: Callable[[], Packing]
    dtype: mx.Dtype = mx.float32
    exact: bool = False
    _parts: dict[str, mx.array] = field(default_factory=dict)

    def specs(self) -> list[TensorSpec]:
        return [
            TensorSpec(f"{self.path}.{part}", shape, mx.uint32 if part == "weight" else self.dtype)
            for part, shape in self.rule.part_shapes(self.shape).items()
        ]

    def read(self, spec: TensorSpec) -> list[Any]:
        if not self._parts:
            packed, self.exact = self.make()
            found = zip(PARTS, (packed.codes, *packed[3:]), strict=True)
            self._parts = {part: array for part, array in found if array is not None}
        array = self._parts.pop(spec.name.rpartition(".")[2])
        return [array_bytes(array.astype(spec.dtype))]


class PackedLayers:
    """The packed layers of a folder that is being written."""

    def __init__(self) -> None:
        self._layers: dict[str, PackedLayer] = {}

    def add(self, layer: PackedLayer) -> list[TensorSpec]:
        """Take a layer; returns the specs of its tensors."""
        self._layers[layer.path] = layer
        return layer.specs()

    def reader(
        self, others: Callable[[TensorSpec], Iterable[Any]]
    ) -> Callable[[TensorSpec], Iterable[Any]]:
        """What `write_weights` calls: packed layers by themselves, other tensors by `others`."""

        def read(spec: TensorSpec) -> Iterable[Any]:
            layer = self._layers.get(spec.name.rpartition(".")[0])
            return others(spec) if layer is None else layer.read(spec)

        return read

    def entries(self) -> dict[str, Any]:
        """The keys for config.json; none where nothing is packed."""
        rules = {path: layer.rule for path, layer in self._layers.items()}
        if not rules:
            return {}
        fused = [path for path in rules if path.endswith(".qkv_proj")]
        entries = quantization_entries(rules, fused)
        return {"quantization": entries, "quantization_config": entries}

    def note(self) -> str:
        """For the card, once all is written: how many layers lay on a grid."""
        exact = sum(layer.exact for layer in self._layers.values())
        if not self._layers:
            return ""
        return (
            f"Of {len(self._layers)} packed layers, {exact} lay on a grid already and stay on it; the others "
            "were rounded to the nearest."
        )


def layer_of_rows(
    path: str, rows: Rows, rule: QuantizationRule, dtype: mx.Dtype | None, stock: bool
) -> PackedLayer:
    """A float matrix that gets packed.

    Args:
        path: of the layer.
        rows: the matrix.
        rule: what it is packed to.
        dtype: of the folder's floats, when it is not that of `rows`. MLX's own format rounds weights to
            it first, as mlx-lm does, and has scales of this type.
        stock: for stock mlx-lm, in an equal format of MLX's own.
    """
    if rule.is_stock and dtype is not None:
        rows = rounded(rows, dtype)
    own = rows.dtype if rule.is_stock else mx.float32
    if not stock or rule.is_stock:
        return PackedLayer(path, rows.shape, rule, lambda: pack(rows, rule), own)
    target = stock_rule(rule, rows.shape, path)

    def make() -> Packing:
        packed, exact = pack(rows, rule)
        return Packing(as_stock(packed, target), exact)

    return PackedLayer(path, rows.shape, target, make, dtype or mx.float32)


def rounded(rows: Rows, dtype: mx.Dtype) -> Rows:
    """The same matrix, its numbers rounded to `dtype`."""
    if dtype == rows.dtype:
        return rows

    def read(start: int, stop: int) -> np.ndarray:
        return round_to(rows.read(start, stop), dtype)

    return Rows(rows.shape, dtype, read, rows.name)


# -- MLX's own format


def stock_rule(rule: QuantizationRule, shape: tuple[int, ...], path: str) -> QuantizationRule:
    """MLX's own format that holds the same numbers.

    Args:
        rule: of the packed layer.
        shape: (N, K).
        path: of the layer, for errors.

    Raises:
        AFMError: names the layer when there is none.
    """
    if rule.is_stock:
        return rule
    shared = shape[1] if rule.granularity != "group" else rule.group_size or 0
    group = next((g for g in _STOCK_GROUPS if shared % g == 0), None)
    if rule.mode == "palette" or group is None:
        groups = ", ".join(map(str, _STOCK_GROUPS))
        lacks = f"scales that {shared} inputs share (its groups are of {groups})"
        if rule.mode == "palette":
            lacks = "palettes"
        raise AFMError(
            f"{path} can't be used by stock mlx-lm, whose layers have no {lacks}. Write float weights (-d), "
            "or use the folder with afm-mlx."
        )
    return QuantizationRule(rule.bits, "affine", "group", group)


def as_stock(packed: PackedWeight, rule: QuantizationRule) -> PackedWeight:
    """The same codes under the scales and biases of `rule`, one of `stock_rule`."""
    shape = rule.part_shapes((packed.out_dims, packed.in_dims))["scales"]
    assert packed.scales is not None

    def widen(array: mx.array) -> mx.array:
        per_row = array.reshape(*array.shape, *[1] * (2 - array.ndim))
        if per_row.shape[1] > 1:
            return mx.repeat(per_row, shape[1] // per_row.shape[1], axis=1)
        return mx.broadcast_to(per_row, shape)

    scales = widen(packed.scales)
    half = (2**packed.bits - 1) / 2
    biases = -half * scales if packed.biases is None else widen(packed.biases)
    return PackedWeight(packed.codes, packed.bits, "affine", scales, biases)


# -- layers that are stored packed


def stored_packed(
    path: str, rule: QuantizationRule, tensors: Mapping[str, StoredTensor]
) -> PackedWeight:
    """A packed matrix of a folder."""
    parts = {part: tensors.get(f"{path}.{part}") for part in PARTS}
    arrays = {part: read_stored(tensor) for part, tensor in parts.items() if tensor is not None}
    return PackedWeight(arrays.pop("weight"), rule.bits, rule.mode, **arrays)


def stock_layer(
    path: str,
    shape: tuple[int, ...],
    rule: QuantizationRule,
    tensors: Mapping[str, StoredTensor],
) -> PackedLayer:
    """A packed layer of a folder, for stock mlx-lm.

    Raises:
        AFMError: names the layer that stock mlx-lm has no format for.
    """
    target = stock_rule(rule, shape, path)
    return PackedLayer(
        path,
        shape,
        target,
        lambda: Packing(as_stock(stored_packed(path, rule, tensors), target), True),
        tensors[f"{path}.scales"].dtype,
    )


def unpacked(
    path: str,
    quantization: Mapping[str, Any],
    tensors: Mapping[str, StoredTensor],
    dtype: mx.Dtype,
    source: Path,
) -> Iterator[Any]:
    """The numbers of a stored packed layer, row-major, as bytes of `dtype` in chunks."""
    rule = stored_rule(quantization, path, source)
    if rule is None:
        settings = stored_settings(quantization, path)
        arrays = [
            read_stored(tensors[f"{path}.{part}"])
            for part in PARTS[:3]
            if f"{path}.{part}" in tensors
        ]
        yield array_bytes(mx.dequantize(*arrays, **settings).astype(dtype))
        return
    packed = stored_packed(path, rule, tensors)
    height = max(1, _UNPACK_ELEMENTS // packed.in_dims)
    for start in range(0, packed.out_dims, height):
        rows = mx.arange(start, min(start + height, packed.out_dims))
        yield array_bytes(dequantize_rows(packed, rows, dtype))


def read_stored(tensor: StoredTensor) -> mx.array:
    """A stored tensor as an array, whose numbers are finite."""
    array = mx.array(tensor.read()).view(tensor.dtype).reshape(tensor.shape)
    check_finite({tensor.name: array}, tensor.path)
    return array
