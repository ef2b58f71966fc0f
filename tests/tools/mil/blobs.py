"""Blob storage, version 2: the weights of a package, which its program refers to by offset.

| bytes | what |
| --- | --- |
| 0-63 | number of blobs (u32), version 2 (u32), zeros |
| 64 of a record | 0xDEADBEEF (u32), type (u32); as u64: bytes, offset and unused bits of the data; zeros |
| the data | |

Numbers are little-endian; records and data lie at multiples of 64. An offset in a program is a record's.
Unused bits are those at the end of the data's last byte.

Source: `mlmodel/src/MILBlob/Blob/StorageFormat.hpp` of coremltools 9.0.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from tests.tools.mil.data_types import DataType, of_blob
from tests.tools.mil.errors import MILError

ALIGNMENT = 64

_SENTINEL = 0xDEADBEEF
_HEADER = struct.Struct("<II56x")
_RECORD = struct.Struct("<IIQQQ32x")


class BlobStorage:
    """A file of blobs, which is mapped and read when it is asked for.

    Args:
        path: of the file.

    Attributes:
        count: blobs that the header announces.

    Raises:
        MILError: when it is no blob storage of version 2.
    """

    def __init__(self, path: Path):
        self.path = path
        if not path.is_file() or path.stat().st_size < ALIGNMENT:
            raise MILError(f"{path} is missing, or too short for a blob storage")
        self._data = np.memmap(path, np.uint8, "r")
        self.count, version = _HEADER.unpack(self._data[:ALIGNMENT].tobytes())
        if version != 2:
            raise MILError(f"{path} is of version {version}, expected 2")

    def read(self, offset: int) -> tuple[DataType, np.ndarray]:
        """The type and the flat array of the blob whose record is at this offset.

        Raises:
            MILError: when there is none, or its data are not all there.
        """
        place = f"{self.path.name}, offset {offset}"
        if offset % ALIGNMENT or not ALIGNMENT <= offset <= len(self._data) - ALIGNMENT:
            raise MILError(f"{place}: no record can be there in {len(self._data)} bytes")
        record = self._data[offset : offset + ALIGNMENT].tobytes()
        sentinel, code, size, start, padding = _RECORD.unpack(record)
        if sentinel != _SENTINEL:
            raise MILError(f"{place}: no record; it starts with {sentinel:#x}")
        data_type = of_blob(code)
        if start % ALIGNMENT or start + size > len(self._data):
            raise MILError(f"{place}: {size} bytes at {start}, and the file has {len(self._data)}")
        count, rest = divmod(8 * size - padding, data_type.bits)
        if rest or padding >= 8 or (padding and data_type.bits >= 8):
            raise MILError(
                f"{place}: {size} bytes with {padding} unused bits are no {data_type.name}"
            )
        return data_type, data_type.unpack(self._data[start : start + size], count)

    def offsets(self) -> list[int]:
        """Offsets of the records, in the order of the file.

        Raises:
            MILError: when there are not as many as the header announces.
        """
        found, offset = [], ALIGNMENT
        for _ in range(self.count):
            self.read(offset)
            found.append(offset)
            _, _, size, start, _ = _RECORD.unpack(self._data[offset : offset + ALIGNMENT].tobytes())
            offset = -(-(start + size) // ALIGNMENT) * ALIGNMENT
        return found
