"""Types of numbers in programs and in blob storage, as NumPy's types.

Types of fewer than 8 bits are arrays of int8 or uint8 here. Stored, they are packed without gaps: the lowest
bits of a byte come first, an element may span two bytes, and the rest of the last byte is padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from coremltools.proto import MIL_pb2

from tests.tools.mil.errors import MILError


@dataclass(frozen=True)
class DataType:
    """A type of numbers.

    Args:
        name: in a program, such as `UINT4`.
        dtype: of its arrays.
        bits: of a stored element.
        blob_code: in a record of blob storage; None for types that it doesn't hold.
    """

    name: str
    dtype: np.dtype
    bits: int
    blob_code: int | None = None

    def unpack(self, data: np.ndarray, count: int) -> np.ndarray:
        """Stored bytes as an array of `count` elements.

        Args:
            data: uint8, exactly the bytes that so many elements take.
            count: of the elements.
        """
        if data.nbytes != self.nbytes(count):
            raise MILError(
                f"{count} elements of {self.name} take {self.nbytes(count)} bytes, got {data.nbytes}"
            )
        if self.bits >= 8:
            return data.view(self.dtype)
        bits = np.unpackbits(data, count=count * self.bits, bitorder="little")
        weights = 1 << np.arange(self.bits)
        if self.dtype.kind == "i":
            weights[-1] = -weights[-1]
        return (bits.reshape(count, self.bits) @ weights).astype(self.dtype)

    def nbytes(self, count: int) -> int:
        """Bytes of so many stored elements."""
        return -(-count * self.bits // 8)


_TYPES = [
    DataType("BOOL", np.dtype(np.bool_), 8),
    DataType("FLOAT16", np.dtype("<f2"), 16, 1),
    DataType("FLOAT32", np.dtype("<f4"), 32, 2),
    DataType("FLOAT64", np.dtype("<f8"), 64),
    DataType("UINT8", np.dtype(np.uint8), 8, 3),
    DataType("INT8", np.dtype(np.int8), 8, 4),
    DataType("INT16", np.dtype("<i2"), 16, 6),
    DataType("UINT16", np.dtype("<u2"), 16, 7),
    DataType("INT4", np.dtype(np.int8), 4, 8),
    DataType("UINT1", np.dtype(np.uint8), 1, 9),
    DataType("UINT2", np.dtype(np.uint8), 2, 10),
    DataType("UINT4", np.dtype(np.uint8), 4, 11),
    DataType("UINT3", np.dtype(np.uint8), 3, 12),
    DataType("UINT6", np.dtype(np.uint8), 6, 13),
    DataType("INT32", np.dtype("<i4"), 32, 14),
    DataType("UINT32", np.dtype("<u4"), 32, 15),
    DataType("INT64", np.dtype("<i8"), 64),
    DataType("UINT64", np.dtype("<u8"), 64),
]
_BY_NAME = {t.name: t for t in _TYPES}
_BY_BLOB_CODE = {t.blob_code: t for t in _TYPES if t.blob_code is not None}


def of_program(code: int) -> DataType:
    """The type of this number in `MIL.proto`."""
    name = MIL_pb2.DataType.Name(code)
    if name not in _BY_NAME:
        raise MILError(f"numbers of the type {name}; known are {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


def of_blob(code: int) -> DataType:
    """The type of this number in a record of blob storage."""
    if code not in _BY_BLOB_CODE:
        raise MILError(f"a blob of the type {code}; known are {sorted(_BY_BLOB_CODE)}")
    return _BY_BLOB_CODE[code]
