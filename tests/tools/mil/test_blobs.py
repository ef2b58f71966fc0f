"""Blobs are what coremltools' reader reads; damage is an error."""

import numpy as np
import pytest

from tests.tools.cases import each
from tests.tools.mil.blobs import BlobStorage
from tests.tools.mil.errors import MILError

# Type of a blob, and what coremltools' reader and writer call it.
NAMES = {
    "FLOAT16": "fp16",
    "FLOAT32": "float",
    "UINT8": "uint8",
    "INT8": "int8",
    "INT16": "int16",
    "UINT16": "uint16",
    "INT32": "int32",
    "UINT32": "uint32",
    "INT4": "int4",
    "UINT1": "uint1",
    "UINT2": "uint2",
    "UINT3": "uint3",
    "UINT4": "uint4",
    "UINT6": "uint6",
}


@pytest.fixture
def stored(rng, tmp_path):
    """A file of coremltools' writer: arrays of each type, by type and offset."""
    from coremltools.libmilstoragepython import _BlobStorageWriter

    path, arrays = tmp_path / "weight.bin", {}
    writer = _BlobStorageWriter(str(path))
    for name, theirs in NAMES.items():
        for count in (1, *rng.integers(2, 200, 3)):
            array = draw(rng, name, count)
            # Its interface takes the 16 bits of a float16 as an integer.
            given = array.view(np.uint16) if name == "FLOAT16" else array
            arrays[name, getattr(writer, f"write_{theirs}_data")(given)] = array
    del writer
    return path, arrays


def draw(rng, name, count):
    if name.startswith("FLOAT"):
        return rng.standard_normal(count).astype(name.lower())
    bits = int(name.lstrip("UINT"))
    low, high = (0, 2**bits) if name.startswith("U") else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    return rng.integers(low, high, count).astype(f"{'u' * (low == 0)}int{max(bits, 8)}")


def test_every_type_is_read_as_coremltools_reads_it(stored):
    from coremltools.libmilstoragepython import _BlobStorageReader

    path, arrays = stored
    reader, ours = _BlobStorageReader(str(path)), BlobStorage(path)
    for (name, offset), array in arrays.items():
        data_type, found = ours.read(offset)
        theirs = np.array(getattr(reader, f"read_{NAMES[name]}_data")(offset))
        assert data_type.name == name
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)
        np.testing.assert_array_equal(found, theirs.view(found.dtype), err_msg=name)
    assert ours.offsets() == [offset for _, offset in arrays]


@each(
    ("change", "words"),
    [
        (lambda d: d[:60], "too short"),
        (lambda d: d[:4] + b"\1" + d[5:], "is of version 1"),
        (lambda d: d[:64] + b"\0" + d[65:], "no record; it starts with 0xdeadbe00"),
        (lambda d: d[:68] + b"\5" + d[69:], "a blob of the type 5"),
        (lambda d: d[:72] + b"\xff\xff" + d[74:], "65535 bytes at 128"),
        (lambda d: d[:72] + b"\3" + d[73:], "3 bytes with 0 unused bits are no FLOAT16"),
        (lambda d: d[:80] + b"\x81" + d[81:], "2 bytes at 129"),
        (lambda d: d[:88] + b"\1" + d[89:], "2 bytes with 1 unused bits are no FLOAT16"),
    ],
)
def test_damaged_storage(stored, change, words):
    damaged = stored[0].with_name("damaged.bin")
    damaged.write_bytes(change(stored[0].read_bytes()))
    with pytest.raises(MILError, match=words):
        BlobStorage(damaged).read(64)
