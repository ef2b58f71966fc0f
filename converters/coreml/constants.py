"""Constants of a program, whose data is read when the program is written."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil.types.type_int import np_uint2_dtype, np_uint4_dtype

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
