"""Layers that are packed while a folder is written, in this package's formats or in MLX's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from afm_mlx.checkpoint.stored_tensor import TensorSpec, array_bytes
from afm_mlx.errors import AFMError
from afm_mlx.kernels import PackedWeight
from afm_mlx.quantization.float_to_codes import Packing, Rows, pack
from afm_mlx.quantization.packed_layers import PARTS
from afm_mlx.quantization.rule import QuantizationRule

_MLX_GROUPS = (128, 64, 32)


@dataclass
class PackedLayer:
    """A layer on its way into a folder, packed when its first part is read; parts are kept until they are read.

    Args:
        path: the layer's path in the model.
        shape: (N, K).
        rule: how it is packed.
        make: packs the matrix by the rule.
        dtype: type of scales, biases and tables.
        exact: whether the weights lay on a grid, whose codes they got; set when the layer is packed.
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
        """The bytes of one of the parts."""
        if not self._parts:
            packed, self.exact = self.make()
            found = zip(PARTS, (packed.codes, *packed[3:]), strict=True)
            self._parts = {part: array for part, array in found if array is not None}
        array = self._parts.pop(spec.name.rpartition(".")[2])
        return [array_bytes(array.astype(spec.dtype))]


def float_layer(
    path: str, rows: Rows, rule: QuantizationRule, dtype: mx.Dtype | None, to_mlx: bool
) -> PackedLayer:
    """A float matrix that gets packed.

    Args:
        path: the layer's path in the model.
        rows: the matrix.
        rule: how it is packed.
        dtype: type of the folder's floats, when it is not that of `rows`. MLX's own format rounds weights to
            it first, as mlx-lm does, and has scales of this type.
        to_mlx: write the format of MLX's own that holds the same numbers.
    """
    if rule.is_mlx_format and dtype is not None:
        rows = rows.rounded(dtype)
    own = rows.dtype if rule.is_mlx_format else mx.float32
    if not to_mlx or rule.is_mlx_format:
        return PackedLayer(path, rows.shape, rule, lambda: pack(rows, rule), own)
    target = mlx_rule(rule, rows.shape, path)

    def make() -> Packing:
        packed, exact = pack(rows, rule)
        return Packing(to_mlx_format(packed, target), exact)

    return PackedLayer(path, rows.shape, target, make, dtype or mx.float32)


# -- MLX's own format


def mlx_rule(rule: QuantizationRule, shape: tuple[int, ...], path: str) -> QuantizationRule:
    """The rule of MLX's own format that holds the same numbers.

    Args:
        rule: how the layer is packed.
        shape: (N, K).
        path: the layer's path, for errors.

    Raises:
        AFMError: names the layer when there is none.
    """
    if rule.is_mlx_format:
        return rule
    shared = shape[1] if rule.granularity != "group" else rule.group_size or 0
    group = next((g for g in _MLX_GROUPS if shared % g == 0), None)
    if rule.mode == "palette" or group is None:
        groups = ", ".join(map(str, _MLX_GROUPS))
        shares = f"scales that {shared} inputs share (its groups are of {groups})"
        lacks = "palettes" if rule.mode == "palette" else shares
        raise AFMError(
            f"{path} can't be used by stock mlx-lm, whose layers have no {lacks}. Write float weights (-d), "
            "or use the folder with afm-mlx."
        )
    return QuantizationRule(rule.bits, "affine", "group", group)


def to_mlx_format(packed: PackedWeight, rule: QuantizationRule) -> PackedWeight:
    """The same codes under the scales and biases of `rule`, one of `mlx_rule`."""
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
