"""The weight files of a folder: shards, their index, and which of them are missing or too many."""

import json

import mlx.core as mx
import pytest

from afm_mlx.checkpoint.safetensors_file import save_file
from afm_mlx.checkpoint.weights import (
    INDEX_NAME,
    check_weights,
    load_weights,
    save_weights,
    stored_tensors,
)
from afm_mlx.errors import CheckpointError
from tests.afm_mlx.checkpoint.conftest import random_arrays
from tests.tools.cases import each
from tests.tools.compare import assert_same_tensors


@pytest.mark.parametrize("limit", [1, 40, 100, 10**9])
def test_shards_and_their_index(rng, tmp_path, limit):
    arrays = random_arrays(rng)
    total = sum(array.nbytes for array in arrays.values())
    calls = []
    paths = save_weights(
        tmp_path, arrays, max_shard_bytes=limit, progress=lambda *done: calls.append(done)
    )
    if limit == 1:
        assert len(paths) == sum(array.size > 0 for array in arrays.values())
    names = [f"model-{i + 1:05d}-of-{len(paths):05d}.safetensors" for i in range(len(paths))]
    whole = limit == 10**9
    assert [path.name for path in paths] == (["model.safetensors"] if whole else names)
    assert_same_tensors(load_weights(tmp_path), arrays)
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    parameters = sum(array.size for array in arrays.values())
    assert index["metadata"] == {"total_size": total, "total_parameters": parameters}
    assert list(index["weight_map"]) == sorted(arrays)
    assert calls == sorted(calls)
    assert calls[-1] == (total, total)


def test_shards_without_an_index(rng, tmp_path):
    """mlx-lm does not read the index either."""
    arrays = random_arrays(rng)
    paths = save_weights(tmp_path, arrays, max_shard_bytes=40)
    (tmp_path / INDEX_NAME).unlink()
    assert_same_tensors(load_weights(tmp_path), arrays)
    paths[1].unlink()
    with pytest.raises(CheckpointError, match=f"lacks {paths[1].name}"):
        stored_tensors(tmp_path)


def test_missing_files(tmp_path, rng):
    with pytest.raises(CheckpointError, match=r"holds no model\*\.safetensors"):
        stored_tensors(tmp_path)
    paths = save_weights(tmp_path, random_arrays(rng), max_shard_bytes=40)
    paths[2].unlink()
    with pytest.raises(CheckpointError, match=f"{paths[2].name} is missing"):
        stored_tensors(tmp_path)


OUTSIDE = ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "x.bin", "", 7, None]


@each(
    ("index", "words"),
    [
        *(({"weight_map": {"a": name}}, "names the file") for name in OUTSIDE),
        *(({"weight_map": content}, "has no weight_map") for content in ([], {}, None)),
        ([], r"index\.json"),
        ({"weight_map": {"a": "model.safetensors"}}, "the files that it names: b"),
        (
            {"weight_map": dict.fromkeys("abc", "model.safetensors")},
            "does not fit the files that it names: c",
        ),
    ],
)
def test_an_index_that_is_none_leaves_the_folder_or_disagrees(tmp_path, index, words):
    save_weights(tmp_path, {"a": mx.zeros(2), "b": mx.zeros(3)})
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=words):
        stored_tensors(tmp_path)


def test_one_tensor_in_two_files(tmp_path):
    save_file(tmp_path / "model-one.safetensors", {"a": mx.zeros(2)})
    save_file(tmp_path / "model-two.safetensors", {"a": mx.zeros(2)})
    with pytest.raises(CheckpointError, match=r"both .*one.* and .*two"):
        stored_tensors(tmp_path)


def test_check_weights_lists_everything_at_once():
    expected = {"a": (2, 3), "b": (4,), "c": (), **{f"x{i}": (1,) for i in range(9)}}
    check_weights(expected, {name: mx.zeros(shape) for name, shape in expected.items()}, "m")
    with pytest.raises(CheckpointError) as caught:
        check_weights(expected, {"a": mx.zeros((3, 2)), "c": mx.zeros(()), "d": mx.zeros(1)}, "m")
    message = str(caught.value)
    assert "10 tensors missing: b, x0, x1, x2, x3 and 5 more" in message
    assert "1 tensors unexpected: d" in message
    assert "a is [3, 2] and must be [2, 3]" in message
    with pytest.raises(CheckpointError, match=r"missing: a{90}, b{90}, c{90} and 2 more\. Check"):
        check_weights({letter * 90: () for letter in "abcde"}, {}, "m")
