"""Blob storage is coremltools', byte for byte; damage is an error."""

import numpy as np
import pytest

from afm_mlx.adapters.formats.mil_blob import read_blobs, write_blobs
from afm_mlx.errors import CheckpointError
from tests.adapters.formats.conftest import core_ml_bytes
from tests.tools.cases import each
from tests.tools.compare import assert_same


@pytest.fixture
def arrays(rng):
    return [rng.normal(size=n).astype(np.float16) for n in (60, *rng.integers(1, 300, 20))]


def test_blobs_are_those_of_coremltools(core_ml, arrays, tmp_path):
    wanted, offsets = core_ml_bytes(core_ml, tmp_path / "theirs.bin", arrays)
    write_blobs(tmp_path / "ours.bin", iter(arrays), len(arrays))
    assert (tmp_path / "ours.bin").read_bytes() == wanted
    reader = core_ml._BlobStorageReader(str(tmp_path / "ours.bin"))
    found = read_blobs(tmp_path / "theirs.bin")
    for array, blob, offset in zip(arrays, found, offsets, strict=True):
        assert_same(blob, array)
        assert_same(np.array(reader.read_fp16_data(offset)).view(np.float16), array)


@each(
    ("change", "words"),
    [
        (lambda d: d[:-2], "It is cut off"),
        (lambda d: d[:63], "has 63 bytes"),
        (lambda d: d[:200], "announces 21 blobs"),
        (lambda d: d[:2000], "cut off"),
        (lambda d: d + bytes(100), "after its last blob"),
        (lambda d: b"\1" + d[1:], "after its last blob"),
        (lambda d: b"\xff\xff\xff\xff" + d[4:], "announces 4294967295 blobs"),
        (lambda d: d[:4] + b"\1" + d[5:], "its header says 1"),
        (lambda d: d[:64] + b"\0" + d[65:], "has no record"),
        (lambda d: d[:68] + b"\2" + d[69:], "is of type 2"),
        (lambda d: d[:72] + b"\x77" + d[73:], "of type 1 with 119 bytes"),
        (lambda d: d[:72] + b"\xfe" * 7 + b"\x7f" + d[80:], "announces .* bytes"),
        (lambda d: d[:80] + b"\xff" * 8 + d[88:], "has no record"),
    ],
)
def test_damaged_storage(arrays, tmp_path, change, words):
    path = tmp_path / "blobs.bin"
    write_blobs(path, arrays, len(arrays))
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(CheckpointError, match=words):
        read_blobs(path)


def test_a_storage_that_is_filled_up_or_missing(arrays, tmp_path):
    path = tmp_path / "blobs.bin"
    write_blobs(path, arrays[:1], 1)
    assert path.stat().st_size == 248
    path.write_bytes(path.read_bytes() + bytes(8))
    assert_same(read_blobs(path)[0], arrays[0])
    path.unlink()
    with pytest.raises(CheckpointError, match="is missing or no file"):
        read_blobs(path)
