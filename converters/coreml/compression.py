"""Matrices as constants of a Core ML program; packed matrices stay packed.

| the folder's matrix | operations |
| --- | --- |
| float | a constant |
| balanced or affine, one scale; palette | `constexpr_lut_to_dense`: codes, and a table of the numbers |
| balanced, a scale per row | the same with a table of levels; products are multiplied by the scales |
| 4 or 8 bits, a scale per group or an affine row | `constexpr_blockwise_shift_scale` of codes |
| 2 bits, the same | a table of levels, then `constexpr_blockwise_shift_scale`; not for the Neural Engine |

A level is `code - (2**bits - 1) / 2`, which float16 holds exactly.

Scales of rows are multiplied outside of the constant, because a program in which
`constexpr_blockwise_shift_scale` takes the result of a table aborts when the Neural Engine of macOS 26 loads it
(https://github.com/apple/coremltools/pull/2688).

The data of a constant is read when the program is written. Until then, large constants are arrays of one
repeated number, which take no memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import Var
from coremltools.converters.mil.mil.types.type_int import np_uint2_dtype, np_uint4_dtype

from afm_mlx.converters.graph_source import (
    Float,
    StoredMatrix,
    check_held,
    per_row,
    shared_tables,
)
from afm_mlx.kernels import PackedWeight, unpack_codes

_CODE_TYPES: dict[int, np.dtype[Any]] = {
    2: np_uint2_dtype,
    4: np_uint4_dtype,
    8: np.dtype(np.uint8),
}
"""NumPy types of codes by their bits: coremltools has a byte for each code, and notes the bits in the type."""

_SMALL = 1 << 10


@dataclass(frozen=True)
class Constant:
    """An array of a program, read when the program is written.

    Args:
        key: its name, the same in all functions that use it.
        shape: its shape.
        dtype: its type, one of `_CODE_TYPES` for codes.
        read: returns the array, in `shape` or another shape of as many elements.
    """

    key: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Bytes in the file of weights."""
        bits = next((b for b, dtype in _CODE_TYPES.items() if dtype is self.dtype), None)
        return math.prod(self.shape) * (bits or 8 * self.dtype.itemsize) // 8


class Constants:
    """The constants of all functions of a program, by their keys."""

    def __init__(self) -> None:
        self.by_key: dict[str, Constant] = {}

    @property
    def nbytes(self) -> int:
        return sum(constant.nbytes for constant in self.by_key.values())

    def add(self, constant: Constant) -> Var:
        """Return the constant's variable in the function that is being built."""
        self.by_key.setdefault(constant.key, constant)
        if math.prod(constant.shape) < _SMALL:
            value = constant.read().reshape(constant.shape).astype(constant.dtype, copy=False)
        else:
            value = np.broadcast_to(np.zeros((), constant.dtype), constant.shape)
        variable = mb.const(val=value)
        variable.op.weight_id = constant.key
        return variable

    def array(self, key: str, array: np.ndarray) -> Var:
        return self.add(Constant(key, array.shape, array.dtype, lambda: array))


@dataclass(frozen=True)
class Weight:
    """A matrix in the function that is being built; row i is `row_scales[i] * numbers[i]`.

    `numbers` is (rows, K, *axes); `row_scales` is (rows,), or None for ones.
    """

    key: str
    numbers: Var
    row_scales: np.ndarray | None = None


@dataclass(frozen=True)
class CodeMapping:
    """How codes of some rows become numbers: `(table[code] - offset) * scale * row_scales`.

    Factors that are None are left out; without a table, the code is its own entry. Shapes are
    (tables, 2**bits), (rows, 1) or (rows, groups) for scale and offset, and (rows,).
    """

    table: np.ndarray | None = None
    scale: np.ndarray | None = None
    offset: np.ndarray | None = None
    row_scales: np.ndarray | None = None


class MatrixConstants:
    """The matrices of a program that computes in `dtype`."""

    def __init__(self, constants: Constants, dtype: Float) -> None:
        self._constants, self._dtype = constants, dtype
        self._mappings: dict[str, CodeMapping] = {}

    def matrix(
        self, matrix: StoredMatrix, rows: slice | None = None, axes: tuple[int, ...] = ()
    ) -> Weight:
        """Add a matrix, or a range of its rows in the program's order, to the function that is being built.

        `axes` are further axes of length 1, for the weight of a convolution.

        Raises:
            AFMError: for scales that `dtype` can't hold.
        """
        height, width = matrix.shape
        rows = rows or slice(0, height)
        shape = (rows.stop - rows.start, width, *axes)
        key = f"{matrix.path}.{rows.start}-{rows.stop}"
        if matrix.rule is None:
            read = functools.partial(matrix.floats, rows, self._dtype)
            return Weight(key, self._constants.add(Constant(key, shape, self._dtype, read)))
        read = functools.partial(_read_codes, matrix, rows)
        numbers = self._constants.add(Constant(key, shape, _CODE_TYPES[matrix.rule.bits], read))
        if key not in self._mappings:  # functions with adapters use the same matrices
            order = np.arange(height) if matrix.order is None else matrix.order
            self._mappings[key] = _code_mapping(matrix.packed(), order[rows], self._dtype)
            for part in vars(self._mappings[key]).values():
                if part is not None:
                    check_held(part, matrix.path)
        mapping = self._mappings[key]
        if (table := mapping.table) is not None:
            table = table.reshape(table.shape[0], 1, *axes, table.shape[1], 1)
            numbers = mb.constexpr_lut_to_dense(
                indices=numbers, lut=self._constants.array(f"{key}.table", table)
            )
        if mapping.scale is not None:
            scale, offset = (
                None
                if part is None
                else self._constants.array(f"{key}.{name}", part.reshape(*part.shape, *axes))
                for name, part in (("scale", mapping.scale), ("offset", mapping.offset))
            )
            numbers = mb.constexpr_blockwise_shift_scale(data=numbers, scale=scale, offset=offset)
        return Weight(key, numbers, mapping.row_scales)


def _read_codes(matrix: StoredMatrix, rows: slice) -> np.ndarray:
    """Read the codes of some rows in the program's order, one byte each."""
    packed = matrix.packed()
    words = np.array(packed.codes)
    words = words[rows] if matrix.order is None else words[matrix.order[rows]]
    found = np.empty((words.shape[0], packed.in_dims), np.uint8)
    step = max(1, (8 << 20) // packed.in_dims)
    for start in range(0, words.shape[0], step):
        few = mx.array(words[start : start + step])
        found[start : start + step] = np.array(unpack_codes(few, packed.bits))
    return found


def _code_mapping(packed: PackedWeight, rows: np.ndarray, dtype: Float) -> CodeMapping:
    """Return how codes become numbers of `dtype`; `rows` are rows of the matrix in the program's order."""
    codes = np.arange(2**packed.bits, dtype=np.float32)
    if packed.table is not None:
        tables = shared_tables(np.array(packed.table), packed.out_dims, rows)
        return CodeMapping(tables.astype(dtype))
    scale, middle = per_row(packed.scales, rows), codes[-1] / 2
    levels = (codes - middle)[None]
    two_bits = packed.bits == 2  # blockwise_shift_scale has no type of 2 bits
    if packed.mode == "balanced":
        if packed.granularity == "tensor":
            return CodeMapping((scale * levels).astype(dtype))
        if packed.granularity == "row":
            # The table takes the scales' size, so that products are as large as the model's own.
            size = np.exp2(np.round(np.log2(np.median(scale))))
            row_scales = (scale[:, 0] / size).astype(dtype)
            return CodeMapping((size * levels).astype(dtype), row_scales=row_scales)
        if two_bits:
            return CodeMapping(levels.astype(dtype), scale.astype(dtype))
        return CodeMapping(None, scale.astype(dtype), np.full(scale.shape, middle, dtype))
    bias = per_row(packed.biases, rows)
    if packed.granularity == "tensor":
        return CodeMapping((scale * codes + bias).astype(dtype))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        offset = np.where(bias == 0, 0, -bias / scale).astype(dtype)
    return CodeMapping(codes[None].astype(dtype) if two_bits else None, scale.astype(dtype), offset)
