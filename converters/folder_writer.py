"""Writing the parameters of an AFM model into a model folder, whatever format they come from.

A source says where each parameter is stored: a `Parameter` of floats, or a `StoredLayer` that is packed.
`FolderWriter` decides how each is written: packed, unpacked, repacked in MLX's own format, cast, or copied.
Weights go into the folder as a stream. Memory holds one packed layer or one chunk of a float tensor, and scales
that go to the end of the file because their type is narrower than the codes'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from afm_mlx.checkpoint.finite import check_finite, not_finite
from afm_mlx.checkpoint.folder_texts import write_card, write_config
from afm_mlx.checkpoint.safetensors_file import StoredTensor, TensorSpec, array_bytes, float_values
from afm_mlx.checkpoint.stored_layers import quantization_of
from afm_mlx.checkpoint.weights import write_weights
from afm_mlx.config import KV_SCALES, ModelConfig, parameter_shapes
from afm_mlx.converters.conversion_options import ConversionOptions
from afm_mlx.errors import AFMError, CheckpointError, named
from afm_mlx.kernels import PackedWeight
from afm_mlx.kernels.operands import dequantize_rows
from afm_mlx.progress import Progress
from afm_mlx.quantization.float_to_codes import Packing, Rows, pack
from afm_mlx.quantization.packed_layers import PARTS
from afm_mlx.quantization.quantize_model import quantized_config, with_quantization
from afm_mlx.quantization.rule import QuantizationRule

_OUR_KEYS = ("kv_bits", "context_length")
_MLX_GROUPS = (128, 64, 32)
_CHUNK_BYTES = 32 << 20
_UNPACK_ELEMENTS = 4 << 20


class Parameter(Protocol):
    """A float parameter of a checkpoint, read in parts."""

    @property
    def dtype(self) -> mx.Dtype: ...

    def rows(self) -> Rows: ...

    def chunks(self, dtype: mx.Dtype) -> Iterable[np.ndarray]:
        """Yield all numbers, row-major, as bytes of `dtype`; `CheckpointError` if it can't hold one."""
        ...


@dataclass(frozen=True)
class StoredParameter:
    """A tensor of a safetensors file; see `Parameter`."""

    tensor: StoredTensor

    @property
    def dtype(self) -> mx.Dtype:
        return self.tensor.dtype

    def rows(self) -> Rows:
        tensor = self.tensor
        height, width = tensor.shape
        row_bytes = width * tensor.dtype.size

        def read(start: int, stop: int) -> np.ndarray:
            part = float_values(tensor.read(start * row_bytes, stop * row_bytes), tensor.dtype)
            return part.astype(np.float32, copy=False).reshape(stop - start, width)

        return Rows((height, width), tensor.dtype, read, f"{tensor.path}: {tensor.name}")

    def chunks(self, dtype: mx.Dtype) -> Iterator[np.ndarray]:
        tensor = self.tensor
        for start in range(0, tensor.nbytes, _CHUNK_BYTES):
            chunk = tensor.read(start, min(start + _CHUNK_BYTES, tensor.nbytes))
            values = mx.array(chunk).view(tensor.dtype)
            cast = values if tensor.dtype == dtype else values.astype(dtype)
            if not_finite({tensor.name: cast}):
                raise CheckpointError(
                    f"{tensor.path}: {named(tensor.name)} holds NaN, infinity, or numbers that {dtype} can't "
                    "hold. Choose another dtype, or check the source."
                )
            yield chunk if cast is values else array_bytes(cast)

    def array(self) -> mx.array:
        """Read the whole tensor; raise `CheckpointError` unless its numbers are finite."""
        array = mx.array(self.tensor.read()).view(self.dtype).reshape(self.tensor.shape)
        check_finite({self.tensor.name: array}, self.tensor.path)
        return array


@dataclass(frozen=True)
class StoredLayer:
    """A matrix (N, K) that a folder stores packed.

    Args:
        parts: its stored tensors, by their names in `packed_layers.PARTS` and in that order.
        rule: how it is packed; pass None for a format of MLX's own layers only.
        settings: its settings in `quantization` of config.json.
        dtype: type of the folder's floats.
    """

    path: str
    shape: tuple[int, ...]
    parts: Mapping[str, StoredParameter]
    rule: QuantizationRule | None
    settings: Mapping[str, Any]
    dtype: mx.Dtype

    def chunks(self, dtype: mx.Dtype) -> Iterator[np.ndarray]:
        """Yield the numbers of all codes, row-major, as bytes of `dtype`."""
        if self.rule is None:
            arrays = [part.array() for part in self.parts.values()]
            settings = {key: self.settings[key] for key in ("group_size", "bits", "mode")}
            yield array_bytes(mx.dequantize(*arrays, **settings).astype(dtype))
            return
        packed = self.packed()
        height = max(1, _UNPACK_ELEMENTS // packed.in_dims)
        for start in range(0, packed.out_dims, height):
            rows = mx.arange(start, min(start + height, packed.out_dims))
            yield array_bytes(dequantize_rows(packed, rows, dtype))

    def packed(self) -> PackedWeight:
        assert self.rule is not None
        arrays = {name: part.array() for name, part in self.parts.items()}
        return PackedWeight(arrays.pop("weight"), self.rule.bits, self.rule.mode, **arrays)


# -- MLX's own format


def mlx_rule(rule: QuantizationRule, shape: Sequence[int], path: str) -> QuantizationRule:
    """Return the rule of MLX's own format that holds the numbers of a matrix (N, K) packed by `rule`.

    Raises:
        AFMError: names the layer if there is no such format.
    """
    if rule.is_mlx_format:
        return rule
    shared = shape[1] if rule.granularity != "group" else rule.group_size or 0
    group = next((g for g in _MLX_GROUPS if shared % g == 0), None)
    if rule.mode == "palette" or group is None:
        groups = ", ".join(map(str, _MLX_GROUPS))
        shares = f"scales that {shared} inputs share (its groups are of {groups})"
        missing = "palettes" if rule.mode == "palette" else shares
        raise AFMError(
            f"{path} can't be used by stock mlx-lm, whose layers have no {missing}. Write float weights (-d), "
            "or use the folder with afm-mlx."
        )
    return QuantizationRule(rule.bits, "affine", "group", group)


def to_mlx_format(packed: PackedWeight, rule: QuantizationRule) -> PackedWeight:
    """Return the same codes with scales and biases of `rule`, a result of `mlx_rule`."""
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


# -- layers that are packed on the way


@dataclass
class _PackedLayer:
    """A layer that is packed once its first part is read; parts are kept until they are read."""

    path: str
    shape: tuple[int, ...]
    rule: QuantizationRule
    make: Callable[[], Packing]
    dtype: mx.Dtype
    exact: bool = False
    _parts: dict[str, mx.array] = field(default_factory=dict)

    def read(self, spec: TensorSpec) -> list[np.ndarray]:
        """Return the bytes of the part that `spec` names: the codes, scales, biases or table."""
        if not self._parts:
            packed, self.exact = self.make()
            arrays = (packed.codes, packed.scales, packed.biases, packed.table)
            self._parts = {p: a for p, a in zip(PARTS, arrays, strict=True) if a is not None}
        array = self._parts.pop(spec.name.rpartition(".")[2])
        return [array_bytes(array.astype(spec.dtype))]


def _float_layer(
    path: str, rows: Rows, rule: QuantizationRule, options: ConversionOptions
) -> _PackedLayer:
    """Return the layer that packs a float matrix by a rule, in MLX's own format if `options` ask for that."""
    dtype = options.mlx_dtype
    if rule.is_mlx_format:
        rows = rows if dtype is None else rows.rounded(dtype)
        return _PackedLayer(path, rows.shape, rule, lambda: pack(rows, rule), rows.dtype)
    if not options.for_mlx_lm:
        return _PackedLayer(path, rows.shape, rule, lambda: pack(rows, rule), mx.float32)
    target = mlx_rule(rule, rows.shape, path)

    def make() -> Packing:
        packed, exact = pack(rows, rule)
        return Packing(to_mlx_format(packed, target), exact)

    return _PackedLayer(path, rows.shape, target, make, dtype or mx.float32)


def _layer_in_mlx_format(layer: StoredLayer) -> _PackedLayer:
    """Return a stored layer in MLX's own format; raise `AFMError` if that can't hold it."""
    if layer.rule is None:
        folder = layer.parts["weight"].tensor.path.parent
        raise AFMError(
            f"{folder}: {named(layer.path)} has {dict(layer.settings)}, which stock mlx-lm's afm7 can't load "
            "together with other formats. Write float weights (-d)."
        )
    target = mlx_rule(layer.rule, layer.shape, layer.path)

    def make() -> Packing:
        return Packing(to_mlx_format(layer.packed(), target), True)

    return _PackedLayer(layer.path, layer.shape, target, make, layer.parts["scales"].dtype)


class FolderWriter:
    """Writes the parameters of one model, all of `parameter_shapes` by name, into a folder.

    Raises:
        AFMError: names the layer that can't be packed by its rule, or that mlx-lm has no format for.
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: Mapping[str, Parameter | StoredLayer],
        options: ConversionOptions,
    ) -> None:
        self._config, self._options = config, options
        self._readers: dict[TensorSpec, Callable[[TensorSpec], Iterable[np.ndarray]]] = {}
        self._packed: list[_PackedLayer] = []
        rules = options.afm_rules(config) if options.quantize else {}
        for name, shape in parameter_shapes(config).items():
            parameter, path = parameters[name], name.removesuffix(".weight")
            if isinstance(parameter, StoredLayer) and not options.dequantize:
                if options.for_mlx_lm:
                    self._add_packed(_layer_in_mlx_format(parameter))
                    continue
                for part in parameter.parts.values():
                    self._add_cast(part.tensor.name, part.tensor.shape, part)
            elif path in rules:
                assert not isinstance(parameter, StoredLayer)
                self._add_packed(_float_layer(path, parameter.rows(), rules[path], options))
            else:
                self._add_cast(name, shape, parameter)

    def _add_packed(self, layer: _PackedLayer) -> None:
        self._packed.append(layer)
        for part, shape in layer.rule.part_shapes(layer.shape).items():
            dtype = mx.uint32 if part == "weight" else layer.dtype
            self._readers[TensorSpec(f"{layer.path}.{part}", shape, dtype)] = layer.read

    def _add_cast(
        self, name: str, shape: tuple[int, ...], parameter: Parameter | StoredLayer
    ) -> None:
        dtype = self._options.mlx_dtype
        if dtype is None:
            dtype = parameter.dtype
        elif name.endswith(KV_SCALES):
            dtype = mx.float32
        self._readers[TensorSpec(name, shape, dtype)] = lambda spec: parameter.chunks(spec.dtype)

    def write_weights(self, folder: Path, progress: Progress | None = None) -> None:
        write_weights(
            folder,
            list(self._readers),
            lambda spec: self._readers[spec](spec),
            total_parameters=self._config.num_parameters,
            progress=progress,
        )

    def write_texts(
        self, folder: Path, name: str, source: str, values: Mapping[str, Any], adapters: list[str]
    ) -> None:
        """Write `config.json` and the model card, after the weights.

        Args:
            name: the folder's name in the card.
            source: the checkpoint's bare name.
            values: further content of `config.json`; keys of the architecture and of packed layers override it.
            adapters: names of the adapters in the folder.
        """
        options, rules = self._options, {layer.path: layer.rule for layer in self._packed}
        stored = {} if options.dequantize else quantization_of(values, source)
        content = with_quantization({**values, **self._config.to_dict()}, stored)
        if rules:
            content = quantized_config(content, rules)
        if options.for_mlx_lm:
            content = {key: value for key, value in content.items() if key not in _OUR_KEYS}
        write_config(folder, content)
        exact = sum(layer.exact for layer in self._packed)
        note = (
            f"Of {len(self._packed)} packed layers, {exact} lay on a grid already and stay on it; the others "
            "were rounded to the nearest."
        )
        norm = next(spec for spec in self._readers if spec.name == "model.output_norm.weight")
        write_card(
            folder,
            name=name,
            source=source,
            config=self._config,
            dtype=norm.dtype,
            quantization=content.get("quantization"),
            note=note if options.quantize else "",
            adapters=adapters,
        )
