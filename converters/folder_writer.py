"""Writes the parameters of an AFM model into a model folder, whatever format they come from.

A source says where each parameter lies (`Parameter`). How it is written is decided here: packed, unpacked,
repacked in MLX's own format, cast, or copied. Weights go into the folder as a stream. Memory holds one packed
layer or one chunk of a float tensor, and those scales that go to the end of the file because their type is
narrower than that of codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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


class Parameter(Protocol):
    """A float parameter of a checkpoint, read in parts."""

    @property
    def dtype(self) -> mx.Dtype: ...

    def rows(self) -> Rows:
        """A matrix, to be packed."""
        ...

    def chunks(self, dtype: mx.Dtype) -> Iterable[Any]:
        """All numbers, row-major, as bytes of `dtype`.

        Raises:
            CheckpointError: for NaN, infinity, and numbers that `dtype` can't hold.
        """
        ...


class FolderWriter:
    """The parameters of one model on their way into a folder.

    Args:
        config: the architecture.
        parameters: every parameter of `parameter_shapes`, by name.
        options: how the checkpoint is converted.

    Raises:
        AFMError: names the layer that can't be packed as asked for, or that mlx-lm has no format for.
    """

    def __init__(
        self,
        config: ModelConfig,
        parameters: Mapping[str, Parameter | StoredLayer],
        options: ConversionOptions,
    ) -> None:
        self._config, self._options = config, options
        self._readers: dict[TensorSpec, Callable[[TensorSpec], Iterable[Any]]] = {}
        self._packed: list[PackedLayer] = []
        rules = options.afm_rules(config) if options.quantize else {}
        for name, shape in parameter_shapes(config).items():
            parameter, path = parameters[name], name.removesuffix(".weight")
            if isinstance(parameter, StoredLayer) and not options.dequantize:
                self._keep(parameter)
            elif path in rules:
                assert not isinstance(parameter, StoredLayer)
                rows, dtype = parameter.rows(), options.mlx_dtype
                self._pack(float_layer(path, rows, rules[path], dtype, options.for_mlx_lm))
            else:
                self._cast(name, shape, parameter)

    def _keep(self, layer: StoredLayer) -> None:
        if self._options.for_mlx_lm:
            self._pack(layer.in_mlx_format())
            return
        for part in layer.parts.values():
            self._cast(part.tensor.name, part.tensor.shape, part)

    def _pack(self, layer: PackedLayer) -> None:
        self._packed.append(layer)
        self._readers |= dict.fromkeys(layer.specs(), layer.read)

    def _cast(self, name: str, shape: tuple[int, ...], parameter: Parameter | StoredLayer) -> None:
        dtype = self._options.mlx_dtype
        if dtype is None:
            dtype = parameter.dtype
        elif name.endswith(KV_SCALES):
            dtype = mx.float32
        spec = TensorSpec(name, shape, dtype)
        self._readers[spec] = lambda spec: parameter.chunks(spec.dtype)

    def write_weights(self, folder: Path, progress: Progress | None = None) -> None:
        """Write the weight files."""
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
        """Write `config.json` and the card, after the weights.

        Args:
            folder: the folder to write into.
            name: what the card calls the folder.
            source: the checkpoint's bare name.
            values: further content of `config.json`; keys of the architecture and of packed layers go over it.
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


# -- layer_packing

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


# -- stored_parameters

_CHUNK_BYTES = 32 << 20
_UNPACK_ELEMENTS = 4 << 20


@dataclass(frozen=True)
class StoredParameter:
    """A tensor of a safetensors file; see `folder_writer.Parameter`."""

    tensor: StoredTensor

    @property
    def dtype(self) -> mx.Dtype:
        return self.tensor.dtype

    def rows(self) -> Rows:
        tensor = self.tensor
        height, width = tensor.shape
        row = width * tensor.dtype.size

        def read(start: int, stop: int) -> np.ndarray:
            part = float_values(tensor.read(start * row, stop * row), tensor.dtype)
            return part.astype(np.float32, copy=False).reshape(stop - start, width)

        return Rows((height, width), tensor.dtype, read, f"{tensor.path}: {tensor.name}")

    def chunks(self, dtype: mx.Dtype) -> Iterator[Any]:
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
        """The whole tensor, whose numbers are finite."""
        array = mx.array(self.tensor.read()).view(self.dtype).reshape(self.tensor.shape)
        check_finite({self.tensor.name: array}, self.tensor.path)
        return array


@dataclass(frozen=True)
class StoredLayer:
    """A layer that a folder stores packed.

    Args:
        path: the layer's path in the model.
        shape: (N, K).
        parts: its stored tensors, by their names in `packed_layers.PARTS` and in that order.
        rule: how it is packed; None for a format that only MLX's own layers hold.
        settings: what `quantization` in config.json says of it.
        dtype: type of the folder's floats.
    """

    path: str
    shape: tuple[int, ...]
    parts: Mapping[str, StoredParameter]
    rule: QuantizationRule | None
    settings: Mapping[str, Any]
    dtype: mx.Dtype

    def chunks(self, dtype: mx.Dtype) -> Iterator[Any]:
        """The numbers that the codes stand for, row-major, as bytes of `dtype`."""
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

    def in_mlx_format(self) -> PackedLayer:
        """The layer as MLX's own format holds it.

        Raises:
            AFMError: names the layer that mlx-lm can't load.
        """
        rule = self.rule
        if rule is None:
            folder = self.parts["weight"].tensor.path.parent
            raise AFMError(
                f"{folder}: {named(self.path)} has {dict(self.settings)}, which stock mlx-lm's afm7 can't load "
                "beside other formats. Write float weights (-d)."
            )
        target = mlx_rule(rule, self.shape, self.path)

        def make() -> Packing:
            return Packing(to_mlx_format(self.packed(), target), True)

        return PackedLayer(self.path, self.shape, target, make, self.parts["scales"].dtype)

    def packed(self) -> PackedWeight:
        """The layer in memory; `rule` is not None."""
        rule = self.rule
        assert rule is not None
        arrays = {name: part.array() for name, part in self.parts.items()}
        return PackedWeight(arrays.pop("weight"), rule.bits, rule.mode, **arrays)
