"""Core ML's blob storage, version 2: a sequence of unnamed arrays.

| bytes | what |
| --- | --- |
| 0-63 | number of blobs (u32), version 2 (u32), zeros |
| 64, at a multiple of 64 | 0xDEADBEEF (u32), type (u32), bytes (u64) and offset (u64) of the data, zeros |
| the data | next; then zeros to the next multiple of 64, unless it is the last |

Numbers are little-endian. coremltools has the reference implementation, an extension module with wheels for few
platforms; this file has the part that adapters need, tested against it.

Source: `coremltools` 8.3.0, `mlmodel/src/MILBlob/Blob/StorageFormat.hpp`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from afm_mlx.errors import CheckpointError

ALIGNMENT = 64
VERSION = 2
FLOAT16 = 1

_SENTINEL = 0xDEADBEEF
_HEADER = struct.Struct("<II56x")
_RECORD = struct.Struct("<IIQQ40x")


def write_blobs(path: Path, blobs: Iterable[np.ndarray], count: int) -> None:
    """Write `count` float16 arrays of any shape, row-major, as a blob storage; one is in memory at a time."""
    written = 0
    with path.open("wb") as file:
        file.write(_HEADER.pack(count, VERSION))
        for blob in blobs:
            data = np.ascontiguousarray(blob, "<f2").reshape(-1).view(np.uint8)
            start = file.tell()
            file.write(bytes(_aligned(start) - start))
            file.write(_RECORD.pack(_SENTINEL, FLOAT16, data.nbytes, file.tell() + ALIGNMENT))
            file.write(data.data)
            written += 1
    if written != count:
        raise RuntimeError(f"{path}: {written} blobs came, {count} announced")


def read_blobs(path: Path) -> list[np.ndarray]:
    """Map a blob storage into memory; return its blobs as flat float16 arrays.

    Raises:
        CheckpointError: when the file is missing, cut off or damaged, or holds other numbers than float16.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing or no file.")
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(ALIGNMENT)
    if len(head) < ALIGNMENT:
        raise CheckpointError(
            f"{path} has {size} bytes, and a blob storage starts with {ALIGNMENT}."
        )
    found, version = _HEADER.unpack(head)
    if version != VERSION:
        raise CheckpointError(
            f"{path} is no blob storage of version {VERSION}: its header says {version}. Copy it again."
        )
    if found > size // ALIGNMENT:
        raise CheckpointError(
            f"{path} announces {found} blobs, which its {size:,} bytes can't hold. It is cut off or damaged."
        )
    data = np.memmap(path, np.uint8, "r")
    blobs, end = [], ALIGNMENT
    for index in range(found):
        start = _aligned(end)
        where = f"{path}: blob {index} at byte {start:,}"
        if start + ALIGNMENT > size:
            raise CheckpointError(f"{where} is beyond the file's {size:,} bytes. It is cut off.")
        sentinel, kind, length, offset = _RECORD.unpack(data[start : start + ALIGNMENT].tobytes())
        if sentinel != _SENTINEL or offset != start + ALIGNMENT:
            raise CheckpointError(
                f"{where} has no record ({sentinel:#x}, data at {offset:,}); {_SENTINEL:#x} and "
                f"{start + ALIGNMENT:,} are needed. The file is damaged."
            )
        if kind != FLOAT16 or length % 2:
            raise CheckpointError(
                f"{where} is of type {kind} with {length:,} bytes; adapters hold float16, type {FLOAT16}."
            )
        if length > size - offset:
            raise CheckpointError(
                f"{where} announces {length:,} bytes, and the file ends after {size - offset:,} of them. "
                "It is cut off: copy or download it again."
            )
        end = offset + length
        blobs.append(data[offset:end].view("<f2"))
    if size > _aligned(end):  # some writers fill up the last blob too
        raise CheckpointError(
            f"{path} has {size - end:,} bytes after its last blob. It is damaged."
        )
    return blobs


def check_blob(path: Path, start: int) -> None:
    """Raise `CheckpointError` unless a file has a whole blob, of any type, with its record at byte `start`."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing or no file.")
    where, size = f"{path}: the blob at byte {start:,}", path.stat().st_size
    if start + _RECORD.size > size:
        raise CheckpointError(f"{where} is beyond the file's {size:,} bytes. It is cut off.")
    with path.open("rb") as file:
        file.seek(start)
        head = file.read(_RECORD.size)
    sentinel, _, nbytes, offset = _RECORD.unpack(head)
    if sentinel != _SENTINEL or offset < start + ALIGNMENT:
        raise CheckpointError(
            f"{where} has no record ({sentinel:#x}, data at {offset:,}). The file is damaged."
        )
    if nbytes > size - offset:
        raise CheckpointError(
            f"{where} announces {nbytes:,} bytes, and the file ends after {max(0, size - offset):,} of them. "
            "It is cut off: copy it again."
        )


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
