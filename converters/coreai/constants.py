"""Matrices as constants of a Core AI module; packed matrices stay packed.

| the folder's matrix | operations |
| --- | --- |
| float | a constant, stored transposed, (K, N), for products |
| balanced | `blockwise_shift_scale` of codes: `scale * code + offset`, offset = -scale * (2**bits - 1) / 2 |
| affine | the same, with the biases as offsets |
| palette | `lut_to_dense` of codes |
"""

from __future__ import annotations

import functools
import math
from typing import Any

import ml_dtypes
import numpy as np
from coreai import authoring  # first: coreai-core's modules import each other in circles
from coreai._compiler.dialects import coreai
from coreai._compiler.ir import Attribute, DenseResourceElementsAttr, Value

from afm_mlx.converters.graph_source import Float, Source, check_held, per_row, shared_tables
from afm_mlx.kernels import PackedWeight

_CODE_TYPES = {
    2: np.dtype(ml_dtypes.uint2),
    4: np.dtype(ml_dtypes.uint4),
    8: np.dtype(np.uint8),
}


def tensor_type(shape: tuple[int, ...], dtype: Any) -> Any:
    """Return the module's type of an array; a dimension of -1 is dynamic."""
    return authoring.TensorType(shape, dtype)._to_mlir()


class Constants:
    """The constants of all functions of a module, each stored once; `nbytes` counts them."""

    def __init__(self, source: Source, dtype: Float) -> None:
        self._source, self._dtype = source, dtype
        self._attributes: dict[str, Attribute] = {}
        self._mappings: dict[str, dict[str, np.ndarray]] = {}
        self._last: tuple[str, PackedWeight] | None = None
        self.nbytes = 0

    def array(self, key: str, array: np.ndarray) -> Value:
        """Return a constant of the function that is being built; `key` is the same in all functions."""
        return self._constant(key, array.shape, array.dtype, lambda: array)

    def _constant(self, key: str, shape: tuple[int, ...], dtype: Any, read: Any) -> Value:
        """Return a constant; `read` returns its bytes, of codes in their packing, unless `key` is known."""
        if key not in self._attributes:
            data = np.ascontiguousarray(read())
            self.nbytes += data.nbytes
            self._attributes[key] = DenseResourceElementsAttr.get_from_buffer(
                data, "constant", tensor_type(shape, dtype)
            )
        return coreai.ConstantOp(value=self._attributes[key]).result

    # -- matrices

    def transposed(self, path: str) -> Value:
        """Return the matrix at a path as (K, N) numbers, for products `x @ W.T`."""
        matrix = self._source.matrix(path)
        if matrix.rule is None:
            height, width = matrix.shape
            read = functools.partial(matrix.floats, slice(0, height), self._dtype)
            return self._constant(path, (width, height), self._dtype, lambda: read().T)
        return coreai.transpose(self.decoded(path), np.array([1, 0], np.uint32))

    def floats(self, path: str) -> Value:
        """Return a float matrix as it is, (N, K)."""
        matrix = self._source.matrix(path)
        read = functools.partial(matrix.floats, slice(0, matrix.shape[0]), self._dtype)
        return self._constant(path, matrix.shape, self._dtype, read)

    def decoded(self, path: str) -> Value:
        """Return a packed matrix as numbers (N, K)."""
        codes = self.codes(path)
        if (parts := self.scales(path)) is None:
            lut = self.array(f"{path}.table", self._mapping(path)["table"][:, None, :, None])
            return coreai.lut_to_dense(codes, lut, coreai.constant(np.array(0, np.int16)))
        scale, offset = parts
        shape, bits = tuple(scale.type.shape), self._packed(path).bits
        size = -(-math.prod(shape) * bits // 8)
        zeros = self._constant(
            f"zeros.{bits}.{shape}", shape, _CODE_TYPES[bits], lambda: np.zeros(size, np.uint8)
        )
        return coreai.blockwise_shift_scale(codes, scale, zeros, offset)

    def codes(self, path: str) -> Value:
        """Return the codes of a packed matrix, (N, K) in an unsigned type of the matrix' bits."""
        matrix = self._source.matrix(path)

        def read() -> np.ndarray:
            words = np.array(self._packed(path).codes)
            return words if matrix.order is None else words[matrix.order]

        assert matrix.rule is not None
        return self._constant(f"{path}.codes", matrix.shape, _CODE_TYPES[matrix.rule.bits], read)

    def scales(self, path: str) -> tuple[Value, Value] | None:
        """Return scales and offsets of a packed matrix, each (N or 1, groups or 1); None for a palette."""
        mapping = self._mapping(path)
        if "scale" not in mapping:
            return None
        scale, offset = mapping["scale"], mapping["offset"]
        return self.array(f"{path}.scale", scale), self.array(f"{path}.offset", offset)

    def _mapping(self, path: str) -> dict[str, np.ndarray]:
        """Return how codes become numbers: `table` (tables, 2**bits), or `scale` and `offset`."""
        if path not in self._mappings:
            matrix = self._source.matrix(path)
            rows = np.arange(matrix.shape[0]) if matrix.order is None else matrix.order
            found = _mapping(self._packed(path), rows)
            with np.errstate(over="ignore"):
                held = {name: array.astype(self._dtype) for name, array in found.items()}
            for array in held.values():
                check_held(array, path)
            self._mappings[path] = held
        return self._mappings[path]

    def _packed(self, path: str) -> PackedWeight:
        """Read a packed matrix; the last one is kept, because its codes and scales are read one by one."""
        if self._last is None or self._last[0] != path:
            self._last = path, self._source.matrix(path).packed()
        return self._last[1]


def _mapping(packed: PackedWeight, rows: np.ndarray) -> dict[str, np.ndarray]:
    if packed.table is not None:
        return {"table": shared_tables(np.array(packed.table), packed.out_dims, rows)}
    scale = per_row(packed.scales, rows)
    if packed.mode == "balanced":
        return {"scale": scale, "offset": scale * np.float32(-(2**packed.bits - 1) / 2)}
    return {"scale": scale, "offset": per_row(packed.biases, rows)}
