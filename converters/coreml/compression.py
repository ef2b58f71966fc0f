"""Constants of a program, whose data is read when the program is written."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil.types.type_int import np_uint2_dtype, np_uint4_dtype

from afm_mlx.converters.coreml.source import StoredMatrix, check_held
from afm_mlx.kernels import PackedWeight
from afm_mlx.kernels.operands import unpack_codes

CODE_TYPES: dict[int, np.dtype[Any]] = {
    2: np_uint2_dtype,
    4: np_uint4_dtype,
    8: np.dtype(np.uint8),
}
"""numpy's types of codes by their bits: coremltools has a byte for each code, with the bits beside the type."""

_SMALL = 1 << 10


@dataclass(frozen=True)
class Constant:
    """An array of a program.

    Args:
        key: its name, the same in all functions that use it.
        shape: its shape.
        dtype: its type, one of `CODE_TYPES` for codes.
        read: gives the array, in `shape` or another one with as many elements.
    """

    key: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[], np.ndarray]

    def reshaped(self, *shape: int) -> Constant:
        """The same data in another shape, written once."""
        return dataclasses.replace(self, shape=shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the data in the file of weights."""
        bits = next((b for b, dtype in CODE_TYPES.items() if dtype is self.dtype), None)
        return math.prod(self.shape) * (bits or 8 * self.dtype.itemsize) // 8


class Constants:
    """The constants of all functions of a program, by their keys."""

    def __init__(self) -> None:
        self.by_key: dict[str, Constant] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all constants' data."""
        return sum(constant.nbytes for constant in self.by_key.values())

    def add(self, constant: Constant) -> Any:
        """The constant's variable in the function that is being built."""
        self.by_key.setdefault(constant.key, constant)
        if math.prod(constant.shape) < _SMALL:
            value = constant.read().reshape(constant.shape).astype(constant.dtype, copy=False)
        else:
            value = np.broadcast_to(np.zeros((), constant.dtype), constant.shape)
        variable = mb.const(val=value)
        variable.op.weight_id = constant.key
        return variable

    def array(self, key: str, array: np.ndarray) -> Any:
        """The variable of an array that is in memory."""
        return self.add(Constant(key, array.shape, array.dtype, lambda: array))


# -- compression


@dataclass(frozen=True)
class Weight:
    """A matrix in the function that is being built; row i is `row_scales[i] * numbers[i]`.

    Args:
        key: name of its constants.
        numbers: the variable, (rows, K, *axes).
        row_scales: (rows,); None for ones.
    """

    key: str
    numbers: Any
    row_scales: np.ndarray | None = None


@dataclass(frozen=True)
class Decoding:
    """What turns codes of some rows into numbers: `(table[code] - offset) * scale * row_scales`.

    Each is None where there is none; without a table, a code stands for itself.

    Args:
        table: (tables, 2**bits), whose number divides that of the rows.
        scale: (rows, 1) or (rows, groups).
        offset: in the shape of `scale`.
        row_scales: (rows,).
    """

    table: np.ndarray | None = None
    scale: np.ndarray | None = None
    offset: np.ndarray | None = None
    row_scales: np.ndarray | None = None


class MatrixConstants:
    """The matrices of a program.

    Args:
        constants: takes the arrays.
        dtype: float16 or float32, the type that the program computes in.
    """

    def __init__(self, constants: Constants, dtype: np.dtype[Any]) -> None:
        self._constants, self._dtype = constants, dtype
        self._decodings: dict[str, Decoding] = {}

    def matrix(
        self, matrix: StoredMatrix, rows: slice | None = None, axes: tuple[int, ...] = ()
    ) -> Weight:
        """A matrix in the function that is being built.

        Args:
            matrix: the matrix.
            rows: those of its rows, in the program's order, that are wanted; None for all.
            axes: further axes of length 1, as a convolution's weight has them.

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
        read = functools.partial(_codes, matrix, rows)
        numbers = self._constants.add(Constant(key, shape, CODE_TYPES[matrix.rule.bits], read))
        decoding = self._decoding(matrix, rows, key)
        if (table := decoding.table) is not None:
            table = table.reshape(table.shape[0], 1, *axes, table.shape[1], 1)
            numbers = mb.constexpr_lut_to_dense(
                indices=numbers, lut=self._constants.array(f"{key}.table", table)
            )
        if decoding.scale is not None:
            scale, offset = (
                None
                if part is None
                else self._constants.array(f"{key}.{name}", part.reshape(*part.shape, *axes))
                for name, part in (("scale", decoding.scale), ("offset", decoding.offset))
            )
            numbers = mb.constexpr_blockwise_shift_scale(data=numbers, scale=scale, offset=offset)
        return Weight(key, numbers, decoding.row_scales)

    def _decoding(self, matrix: StoredMatrix, rows: slice, key: str) -> Decoding:
        if key in self._decodings:
            return self._decodings[key]
        packed = matrix.packed()
        assert packed is not None
        order = np.arange(matrix.shape[0]) if matrix.order is None else matrix.order
        found = _decoding(packed, order[rows], self._dtype)
        for part in vars(found).values():
            if part is not None:
                check_held(part, matrix.path)
        self._decodings[key] = found
        return found


def _codes(matrix: StoredMatrix, rows: slice) -> np.ndarray:
    """The codes of some rows in the program's order, one byte each."""
    packed = matrix.packed()
    assert packed is not None
    words = np.array(packed.codes)
    words = words[rows] if matrix.order is None else words[matrix.order[rows]]
    found = np.empty((words.shape[0], packed.in_dims), np.uint8)
    step = max(1, (8 << 20) // packed.in_dims)
    for start in range(0, words.shape[0], step):
        few = mx.array(words[start : start + step])
        found[start : start + step] = np.array(unpack_codes(few, packed.bits))
    return found


def _decoding(packed: PackedWeight, rows: np.ndarray, dtype: np.dtype[Any]) -> Decoding:
    """What turns codes of some rows into numbers.

    Args:
        packed: the matrix.
        rows: its rows in the program's order.
        dtype: type of the numbers.
    """
    codes = np.arange(2**packed.bits, dtype=np.float32)
    if packed.table is not None:
        return Decoding(_tables(np.array(packed.table), packed.out_dims, rows).astype(dtype))
    scale, middle = _per_row(packed.scales, rows), codes[-1] / 2
    levels = (codes - middle)[None]
    few = packed.bits == 2  # blockwise_shift_scale has no type of 2 bits
    if packed.mode == "balanced":
        if packed.granularity == "tensor":
            return Decoding((scale * levels).astype(dtype))
        if packed.granularity == "row":
            # The table takes the scales' size, so that products are as large as the model's own.
            size = np.exp2(np.round(np.log2(np.median(scale))))
            return Decoding(
                (size * levels).astype(dtype), row_scales=(scale[:, 0] / size).astype(dtype)
            )
        if few:
            return Decoding(levels.astype(dtype), scale.astype(dtype))
        return Decoding(None, scale.astype(dtype), np.full(scale.shape, middle, dtype))
    bias = _per_row(packed.biases, rows)
    if packed.granularity == "tensor":
        return Decoding((scale * codes + bias).astype(dtype))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        offset = np.where(bias == 0, 0, -bias / scale).astype(dtype)
    return Decoding(codes[None].astype(dtype) if few else None, scale.astype(dtype), offset)


def _per_row(array: mx.array | None, rows: np.ndarray) -> np.ndarray:
    assert array is not None
    values = np.array(array.astype(mx.float32))
    if values.ndim == 0:
        return values.reshape(1, 1)
    return values.reshape(values.shape[0], -1)[rows]


def _tables(tables: np.ndarray, height: int, rows: np.ndarray) -> np.ndarray:
    """As few tables as rows of equal number share, for rows in another order than the palette's."""
    of_row = rows * tables.shape[0] // height
    shared = height // tables.shape[0]
    while shared > 1 and (
        len(rows) % shared or (of_row.reshape(-1, shared) != of_row[::shared, None]).any()
    ):
        shared //= 2
    return tables[of_row[:: max(shared, 1)]]
