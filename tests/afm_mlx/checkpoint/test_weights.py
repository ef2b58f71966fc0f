"""Weight files: damaged ones are told apart, written ones are read by everybody, memory stays small."""

import json
import struct
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from afm_mlx.checkpoint.safetensors_file import save_file
from afm_mlx.checkpoint.stored_tensor import TensorSpec
from afm_mlx.checkpoint.weights import (
    INDEX_NAME,
    check_weights,
    load_weights,
    save_weights,
    stored_tensors,
    write_weights,
)
from afm_mlx.errors import CheckpointError
from tests.tools.compare import assert_same_tensors

TYPES = [getattr(mx, t) for t in "bfloat16 float16 float32 uint32 int8 uint8 int64 bool_".split()]


def random_arrays(rng):
    """One array of each type and of odd shapes, with a scalar and an empty one."""
    shapes = [(3, 5), (7,), (2, 3, 4), (1,), (), (0, 4), (9, 2), (5,)]
    arrays = {}
    for i, (dtype, shape) in enumerate(zip(TYPES, shapes, strict=True)):
        values = mx.array(
            rng.integers(0, 100, shape) if dtype != mx.bool_ else rng.random(shape) > 0.5
        )
        arrays[f"layer.{i}"] = values.astype(dtype)
    return arrays


def file_bytes(header, data, length=None):
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded + data


def test_round_trip(rng, tmp_path):
    arrays = random_arrays(rng)
    (path,) = save_weights(tmp_path, arrays)
    assert path.name == "model.safetensors"
    assert_same_tensors(load_weights(tmp_path), arrays)
    assert_same_tensors(mx.load(str(path)), arrays)
    # The format's own library, strict about gaps, order and alignment.
    by_torch = load_file(path)
    assert by_torch["layer.0"].dtype == torch.bfloat16
    np.testing.assert_array_equal(
        by_torch["layer.0"].float().numpy(), np.array(arrays["layer.0"].astype(mx.float32))
    )
    with safe_open(path, framework="np") as file:
        assert file.metadata() == {"format": "mlx"}


def test_every_tensor_is_aligned_to_its_type(rng, tmp_path):
    save_weights(tmp_path, random_arrays(rng))
    for tensor in stored_tensors(tmp_path).values():
        assert tensor.offset % tensor.dtype.size == 0


@pytest.mark.parametrize("limit", [1, 40, 100, 10**9])
def test_shards(rng, tmp_path, limit):
    arrays = random_arrays(rng)
    paths = save_weights(tmp_path, arrays, max_shard_bytes=limit)
    if limit == 1:
        assert len(paths) == sum(array.size > 0 for array in arrays.values())
    if len(paths) > 1:
        assert [path.name for path in paths] == [
            f"model-{i + 1:05d}-of-{len(paths):05d}.safetensors" for i in range(len(paths))
        ]
    assert_same_tensors(load_weights(tmp_path), arrays)
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    assert index["metadata"] == {
        "total_size": sum(a.nbytes for a in arrays.values()),
        "total_parameters": sum(a.size for a in arrays.values()),
    }
    assert list(index["weight_map"]) == sorted(arrays)


def test_shards_without_an_index(rng, tmp_path):
    """mlx-lm does not read the index either."""
    arrays = random_arrays(rng)
    paths = save_weights(tmp_path, arrays, max_shard_bytes=40)
    (tmp_path / INDEX_NAME).unlink()
    assert_same_tensors(load_weights(tmp_path), arrays)
    paths[1].unlink()
    with pytest.raises(CheckpointError, match=f"lacks {paths[1].name}"):
        load_weights(tmp_path)


def test_views_are_written_as_they_look(rng, tmp_path):
    values = mx.array(rng.normal(size=(6, 4)).astype(np.float32))
    arrays = {
        "transposed": values.T,
        "rows": values[2:5],
        "columns": values[:, 1:3],
        "broadcast": mx.broadcast_to(values[0], (3, 4)),
        "lazy": values + 1,
    }
    save_file(tmp_path / "model.safetensors", arrays)
    assert_same_tensors(load_weights(tmp_path), arrays)


def test_the_writer_takes_the_data_in_chunks_and_counts_it(tmp_path):
    spec = TensorSpec("a", (4, 3), mx.float32)
    chunks = [np.arange(5, dtype=np.float32), b"\0" * 8, memoryview(np.ones(5, np.float32))]
    calls = []
    write_weights(tmp_path, [spec], lambda s: chunks, progress=lambda *c: calls.append(c))
    assert calls == [(20, 48), (28, 48), (48, 48)]
    found = np.array(load_weights(tmp_path)["a"]).reshape(-1)
    np.testing.assert_array_equal(found, [0, 1, 2, 3, 4, 0, 0, 1, 1, 1, 1, 1])
    with pytest.raises(RuntimeError, match="a: 20 bytes came, 48 announced"):
        write_weights(tmp_path, [spec], lambda s: chunks[:1])


DAMAGED = {
    "zero bytes": b"",
    "three bytes": b"abc",
    "text": b"version https://git-lfs.github.com/spec/v1\noid sha256:1234",
    "a header of 2^60 bytes": struct.pack("<Q", 1 << 60) + b"{}",
    "a header longer than the file": file_bytes({}, b"", length=1000),
    "no JSON": struct.pack("<Q", 4) + b"\xff\xfe{}",
    "cut off": file_bytes({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"\0" * 7),
    "more data than tensors": file_bytes(
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"\0" * 9
    ),
    "a shape that lies": file_bytes(
        {"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 8]}}, b"\0" * 8
    ),
    "a size that overflows": file_bytes(
        {"a": {"dtype": "F32", "shape": [1 << 62, 4], "data_offsets": [0, 8]}}, b"\0" * 8
    ),
    "overlapping tensors": file_bytes(
        {
            "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        },
        b"\0" * 12,
    ),
    "a type that MLX lacks": file_bytes(
        {"a": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}, b"\0" * 8
    ),
}


def test_damaged_files(tmp_path):
    for name in DAMAGED:
        (tmp_path / "model.safetensors").write_bytes(DAMAGED[name])
        with pytest.raises(CheckpointError, match=r"model\.safetensors") as caught:
            load_weights(tmp_path)
        assert "\n" not in str(caught.value)


def test_any_cut_is_seen(rng, tmp_path):
    (path,) = save_weights(tmp_path, random_arrays(rng))
    data = path.read_bytes()
    for keep in {0, 1, len(data) - 1, *rng.integers(0, len(data), 20).tolist()}:
        path.write_bytes(data[:keep])
        with pytest.raises(CheckpointError):
            load_weights(tmp_path)


def test_missing_files(tmp_path, rng):
    with pytest.raises(CheckpointError, match=r"holds no model\*\.safetensors"):
        load_weights(tmp_path)
    paths = save_weights(tmp_path, random_arrays(rng), max_shard_bytes=40)
    paths[2].unlink()
    with pytest.raises(CheckpointError, match=f"{paths[2].name} is missing"):
        load_weights(tmp_path)


def test_an_index_that_leaves_the_folder(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(tmp_path / "x.safetensors", {"a": mx.zeros(2)})
    outside = ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "x.bin", ""]
    for name in [*outside, 7, None]:
        (folder / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": name}}))
        with pytest.raises(CheckpointError, match="names the file"):
            load_weights(folder)


def test_an_index_that_is_none(tmp_path):
    for content in ["", "{", "[]", "{}", '{"weight_map": []}', "\x00"]:
        save_file(tmp_path / "model.safetensors", {"a": mx.zeros(2)})
        (tmp_path / INDEX_NAME).write_text(content)
        with pytest.raises(CheckpointError, match=r"index\.json"):
            load_weights(tmp_path)


def test_an_index_that_disagrees_with_the_files(tmp_path):
    save_weights(tmp_path, {"a": mx.zeros(2), "b": mx.zeros(3)})
    index = tmp_path / INDEX_NAME
    for weight_map in ({"a": 1, "b": 1, "c": 1}, {"a": 1}):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(weight_map, "model.safetensors")}))
        with pytest.raises(CheckpointError, match=r"does not fit the files that it names: [bc]"):
            load_weights(tmp_path)


def test_one_tensor_in_two_files(tmp_path):
    save_file(tmp_path / "model-one.safetensors", {"a": mx.zeros(2)})
    save_file(tmp_path / "model-two.safetensors", {"a": mx.zeros(2)})
    with pytest.raises(CheckpointError, match=r"both .*one.* and .*two"):
        load_weights(tmp_path)


def test_check_weights_lists_everything_at_once():
    expected = {"a": (2, 3), "b": (4,), "c": (), **{f"x{i}": (1,) for i in range(9)}}
    check_weights(expected, {name: mx.zeros(shape) for name, shape in expected.items()}, "m")
    with pytest.raises(CheckpointError) as caught:
        check_weights(expected, {"a": mx.zeros((3, 2)), "c": mx.zeros(()), "d": mx.zeros(1)}, "m")
    message = str(caught.value)
    assert "10 tensors missing: b, x0, x1, x2, x3 and 5 more" in message
    assert "1 tensors unexpected: d" in message
    assert "a is [3, 2] and must be [2, 3]" in message


# 600 MB of data through a writer whose process holds little more than Python and MLX.
STREAM = """
import resource, sys
import numpy as np
import mlx.core as mx
from afm_mlx.checkpoint.stored_tensor import TensorSpec
from afm_mlx.checkpoint.weights import (write_weights)
specs = [TensorSpec(f"t{i}", (25_000_000,), mx.float32) for i in range(6)]
chunk = np.zeros(1_000_000, np.float32)
unit = 1 if sys.platform == "darwin" else 1024
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
write_weights(sys.argv[1], specs, lambda spec: (chunk for _ in range(25)))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - before)
"""


def test_writing_needs_little_memory(tmp_path):
    from pathlib import Path

    result = subprocess.run(
        [sys.executable, "-c", STREAM, tmp_path],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(result.stdout) < 50e6
