"""Safetensors files: damage is an error, and written files are read by every library."""

import json
import os
import struct

import mlx.core as mx
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from afm_mlx.checkpoint.safetensors_file import (
    TensorSpec,
    load_stored,
    read_header,
    save_file,
    write_file,
)
from afm_mlx.errors import CheckpointError
from tests.afm_mlx.checkpoint.conftest import random_arrays
from tests.tools.compare import assert_same_tensors


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def read(path):
    return load_stored(read_header(path))


def test_what_is_written_is_read_by_all_libraries(rng, path):
    arrays = random_arrays(rng)
    save_file(path, arrays)
    assert_same_tensors(read(path), arrays)
    assert_same_tensors(mx.load(str(path)), arrays)
    # The format's own library, strict about gaps, order and alignment.
    by_torch = load_file(path)
    assert by_torch["layer.0"].dtype == torch.bfloat16
    np.testing.assert_array_equal(
        by_torch["layer.0"].float().numpy(), np.array(arrays["layer.0"].astype(mx.float32))
    )
    with safe_open(path, framework="np") as file:
        assert file.metadata() == {"format": "mlx"}
    for tensor in read_header(path).values():
        assert tensor.offset % tensor.dtype.size == 0


def test_views_are_written_row_major(rng, path):
    values = mx.array(rng.normal(size=(6, 4)).astype(np.float32))
    arrays = {
        "transposed": values.T,
        "columns": values[:, 1:3],
        "broadcast": mx.broadcast_to(values[0], (3, 4)),
        "lazy": values + 1,
    }
    save_file(path, arrays)
    assert_same_tensors(read(path), arrays)


def test_the_writer_takes_the_data_in_chunks_and_counts_it(path):
    spec = TensorSpec("a", (4, 3), mx.float32)
    chunks = [np.arange(5, dtype=np.float32), b"\0" * 8, memoryview(np.ones(5, np.float32))]
    calls = []
    write_file(path, [spec], lambda s: chunks, calls.append)
    assert calls == [20, 28, 48]
    np.testing.assert_array_equal(
        np.array(read(path)["a"]).reshape(-1), [0, 1, 2, 3, 4, 0, 0, 1, 1, 1, 1, 1]
    )
    with pytest.raises(RuntimeError, match="a: 20 bytes came, 48 announced"):
        write_file(path, [spec], lambda s: chunks[:1])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_errors_of_the_disk_and_of_the_source_are_distinguished(tmp_path):
    spec = TensorSpec("a", (4,), mx.float32)
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(
        CheckpointError, match=r"full could not be written: No space left.*GB are free"
    ):
        write_file(tmp_path / "full", [spec], lambda s: [b"\0" * 16])

    def gone(spec):
        raise FileNotFoundError(2, "No such file", "source")

    with pytest.raises(FileNotFoundError, match="source"):
        write_file(tmp_path / "model.safetensors", [spec], gone)


def file_bytes(header, data=b"", length=None):
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded + data


def tensor(shape, end, dtype="F32", begin=0):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


OVERLAP = {"a": tensor([2], 8), "b": tensor([2], 12, begin=4)}
DAMAGED = {
    "zero bytes": b"",
    "three bytes": b"abc",
    "text": b"version https://git-lfs.github.com/spec/v1\noid sha256:1234",
    "a header of 2^60 bytes": struct.pack("<Q", 1 << 60) + b"{}",
    "a header longer than the file": file_bytes({}, length=1000),
    "no JSON": struct.pack("<Q", 4) + b"\xff\xfe{}",
    "cut off": file_bytes({"a": tensor([2], 8)}, b"\0" * 7),
    "more data than tensors": file_bytes({"a": tensor([2], 8)}, b"\0" * 9),
    "a shape larger than the data": file_bytes({"a": tensor([1 << 40], 8)}, b"\0" * 8),
    "a size that overflows": file_bytes({"a": tensor([1 << 62, 4], 8)}, b"\0" * 8),
    "overlapping tensors": file_bytes(OVERLAP, b"\0" * 12),
    "a type that MLX lacks": file_bytes({"a": tensor([1], 8, "F64")}, b"\0" * 8),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_damaged_files_are_refused_in_one_line(path, content):
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors") as caught:
        read_header(path)
    assert "\n" not in str(caught.value)


def test_any_cut_is_an_error(rng, path):
    save_file(path, random_arrays(rng))
    data = path.read_bytes()
    for keep in {0, 1, len(data) - 1, *rng.integers(0, len(data), 20).tolist()}:
        path.write_bytes(data[:keep])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            read_header(path)


def test_a_file_that_is_cut_off_after_its_header_was_read(rng, path):
    """A mapped file would end the process."""
    save_file(path, {"a": mx.zeros(1000)})
    stored = read_header(path)
    os.truncate(path, 2000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors ends within a: .* of 4,000"):
        stored["a"].read()
    with pytest.raises(CheckpointError, match=r"model\.safetensors can't be read"):
        load_stored(stored)


def test_a_file_that_was_replaced_after_its_header_was_read(path):
    save_file(path, {"a": mx.zeros(8)})
    stored = read_header(path)
    for other in ({"a": mx.zeros(9)}, {"a": mx.zeros(8, mx.int32)}, {"b": mx.zeros(8)}):
        save_file(path, other)
        with pytest.raises(CheckpointError, match="a is not what the header says"):
            load_stored(stored)


def test_a_chunk_is_on_the_disk_before_the_next_is_asked_for(path):
    """So memory holds one chunk of a file that may be larger than memory."""

    def read(spec):
        for number in range(3):
            yield bytes(1 << 20)
            assert path.stat().st_size > (number + 1) << 20

    write_file(path, [TensorSpec("a", (3 << 20,), mx.uint8)], read)
