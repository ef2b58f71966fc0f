"""Blob storage, version 2: the weights of a package, which programs refer to by offset; and types of numbers.

| bytes | content |
| --- | --- |
| 0-63 | number of blobs (u32), version 2 (u32), zeros |
| 64 of a record | 0xDEADBEEF (u32), type (u32); as u64: bytes, offset and unused bits of the data; zeros |
| the data | |

Numbers are little-endian; records and data start at multiples of 64. An offset in a program is a record's.
Types of fewer than 8 bits are arrays of uint8 here. In files they are packed without gaps, lowest bits first.

Source: `mlmodel/src/MILBlob/Blob/StorageFormat.hpp` of coremltools 9.0.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from coremltools.proto import MIL_pb2

_ALIGNMENT = 64
_SENTINEL = 0xDEADBEEF
_HEADER = struct.Struct("<II56x")
_RECORD = struct.Struct("<IIQQQ32x")


class MILError(ValueError):
    """A package that can't be read or run, or inputs that it doesn't take."""


@dataclass(frozen=True)
class DataType:
    """A type of numbers: its name in programs, dtype of arrays, bits in files, and code in records."""

    name: str
    dtype: np.dtype
    bits: int
    blob_code: int | None = None

    def unpack(self, data: np.ndarray, count: int) -> np.ndarray:
        """Return stored bytes, uint8, as an array of `count` elements."""
        needed = -(-count * self.bits // 8)
        if data.nbytes != needed:
            raise MILError(
                f"{count} elements of {self.name} take {needed} bytes, got {data.nbytes}"
            )
        if self.bits >= 8:
            return data.view(self.dtype)
        bits = np.unpackbits(data, count=count * self.bits, bitorder="little")
        return (bits.reshape(count, self.bits) @ (1 << np.arange(self.bits))).astype(self.dtype)


_TYPES = [
    DataType("BOOL", np.dtype(np.bool_), 8),
    DataType("FLOAT16", np.dtype("<f2"), 16, 1),
    DataType("FLOAT32", np.dtype("<f4"), 32, 2),
    DataType("UINT8", np.dtype(np.uint8), 8, 3),
    DataType("UINT2", np.dtype(np.uint8), 2, 10),
    DataType("UINT4", np.dtype(np.uint8), 4, 11),
    DataType("INT32", np.dtype("<i4"), 32, 14),
]
_BY_NAME = {t.name: t for t in _TYPES}
_BY_BLOB_CODE = {t.blob_code: t for t in _TYPES if t.blob_code is not None}


def of_program(code: int) -> DataType:
    name = MIL_pb2.DataType.Name(code)
    if name not in _BY_NAME:
        raise MILError(f"numbers of the type {name}; known are {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


class BlobStorage:
    """A file of blobs, which is mapped, and read blob by blob."""

    def __init__(self, path: Path):
        self.path = path
        if not path.is_file() or path.stat().st_size < _ALIGNMENT:
            raise MILError(f"{path} is missing, or too short for a blob storage")
        self._data = np.memmap(path, np.uint8, "r")
        self.count, version = _HEADER.unpack(self._data[:_ALIGNMENT].tobytes())
        if version != 2:
            raise MILError(f"{path} is of version {version}, expected 2")

    def read(self, offset: int) -> tuple[DataType, np.ndarray]:
        """Return the type and the flat array of the blob whose record is at this offset."""
        place = f"{self.path.name}, offset {offset}"
        if offset % _ALIGNMENT or not _ALIGNMENT <= offset <= len(self._data) - _ALIGNMENT:
            raise MILError(f"{place}: no record can be there in {len(self._data)} bytes")
        record = self._data[offset : offset + _ALIGNMENT].tobytes()
        sentinel, code, size, start, padding = _RECORD.unpack(record)
        if sentinel != _SENTINEL or code not in _BY_BLOB_CODE:
            raise MILError(f"{place}: no record of a known type: {sentinel:#x}, {code}")
        if start % _ALIGNMENT or start + size > len(self._data):
            raise MILError(f"{place}: {size} bytes at {start}, and the file has {len(self._data)}")
        data_type = _BY_BLOB_CODE[code]
        count = (8 * size - padding) // data_type.bits
        return data_type, data_type.unpack(self._data[start : start + size], count)
