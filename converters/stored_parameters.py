"""The parameters of a model folder as sources of another: float tensors, and layers that are stored packed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from afm_mlx.checkpoint.finite import check_finite, not_finite
from afm_mlx.checkpoint.stored_tensor import StoredTensor, array_bytes, float_values
from afm_mlx.converters.layer_packing import PackedLayer, mlx_rule, to_mlx_format
from afm_mlx.errors import AFMError, CheckpointError, named
from afm_mlx.kernels import PackedWeight
from afm_mlx.kernels.packing import dequantize_rows
from afm_mlx.quantization.float_to_codes import Packing, Rows
from afm_mlx.quantization.rule import QuantizationRule

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
