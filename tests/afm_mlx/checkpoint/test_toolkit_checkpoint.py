"""Toolkit checkpoints: files are read without running code, or refused; configs; names of tensors."""

import json
import os
import pickle
import sys
import zipfile

import mlx.core as mx
import numpy as np
import pytest
import torch
from tamm.adapters import LoRAModelAdapter
from tamm.models.afm_text import AFMTextV7

from afm_mlx.checkpoint.toolkit_checkpoint import (
    LoRASpec,
    equal,
    map_keys,
    mlx_dtype,
    open_state_dict,
    read_toolkit_config,
    tensor_chunks,
)
from afm_mlx.config import PRESETS, parameter_shapes
from afm_mlx.errors import AFMError, CheckpointError, ConfigError
from tests.tools.cases import each
from tests.tools.models import tamm_3b_state


class Runs:
    def __reduce__(self):
        return os.system, ("echo this ran >&2",)


@pytest.fixture
def path(tmp_path):
    torch.save({"a": torch.arange(300.0), "b": torch.ones(2, 3)}, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def compress(path):
    with zipfile.ZipFile(path) as archive:
        content = {entry: archive.read(entry) for entry in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            archive.writestr(name, data)


def other_zip(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")


def old_format(path):
    torch.save({"a": torch.zeros(2)}, path, _use_new_zipfile_serialization=False)


def junk_in_the_pickle(path):
    data = bytearray(path.read_bytes())
    start = data.index(b"data.pkl") + 60
    data[start : start + 60] = bytes(range(60))
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: torch.save({"a": torch.zeros(2), "x": Runs()}, p), "could run code"),
        (lambda p: p.write_bytes(pickle.dumps(Runs())), "a bare pickle"),
        (old_format, "only the zip format"),
        (lambda p: p.write_text("version https://git-lfs"), "no PyTorch checkpoint: .*b'vers'"),
        (other_zip, r"it has no data\.pkl"),
        (compress, "packed again with compression"),
        (junk_in_the_pickle, "can't be read as a PyTorch checkpoint|more than tensors"),
        (lambda p: torch.save([torch.zeros(2)], p), "holds a list; a state dict"),
        (lambda p: torch.save({}, p), "holds a dict; a state dict"),
        (lambda p: torch.save({"model": {"a": torch.zeros(2)}}, p), "other things than tensors"),
        (lambda p: torch.save({"epoch": 3}, p), "other things than tensors .*: epoch"),
        (lambda p: p.unlink(), "is missing or no file"),
    ],
)
def test_files_that_hold_something_else_are_refused(path, capfd, change, words):
    change(path)
    with pytest.raises(CheckpointError, match=rf"model\.pt.*({words})") as caught:
        open_state_dict(path)
    assert "\n" not in str(caught.value)
    assert "this ran" not in capfd.readouterr().err


def test_a_file_that_was_cut_off_is_refused(path, rng):
    data = path.read_bytes()
    for keep in {0, len(data) - 1, *rng.integers(0, len(data), 20).tolist()}:
        path.write_bytes(data[:keep])
        with pytest.raises(CheckpointError, match=r"model\.pt"):
            open_state_dict(path)


def test_without_torch_the_error_says_how_to_install_it(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(AFMError, match=r"pip install .*\[convert\]"):
        open_state_dict(path)


def test_chunks_are_the_numbers_row_by_row(rng, monkeypatch):
    monkeypatch.setattr("afm_mlx.checkpoint.toolkit_checkpoint._CHUNK_ELEMENTS", 13)
    tensor = torch.tensor(rng.normal(size=(6, 5)).astype(np.float32)).T
    chunks = [bytes(chunk) for chunk in tensor_chunks(tensor, mx.float32, "x")]
    assert [len(chunk) for chunk in chunks] == [48, 48, 24]  # of two rows at most
    numbers = np.frombuffer(b"".join(chunks), np.float32)
    np.testing.assert_array_equal(numbers.reshape(5, 6), tensor.numpy())
    assert mlx_dtype(tensor.double()) == mx.float32
    assert mlx_dtype(tensor.int()) is None


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_number_of_a_type_fits_and_the_next_does_not(sign):
    fits = torch.tensor([sign * 65504.0])
    assert len(list(tensor_chunks(fits, mx.float16, "x"))) == 1
    with pytest.raises(CheckpointError, match=r"x holds 6.554e\+04, and torch.float16 ends at"):
        list(tensor_chunks(fits * 1.0005, mx.float16, "x"))
    for bad in (float("nan"), sign * float("inf")):
        with pytest.raises(CheckpointError, match="x holds NaN or infinity"):
            list(tensor_chunks(torch.tensor([0.0, bad]), mx.float32, "x"))


def test_equal_tensors_may_lie_elsewhere(rng):
    one = torch.tensor(rng.normal(size=(3, 4)))
    assert equal(one, one)
    assert equal(one, one.clone())
    other = one.clone()
    other[2, 3] += 1
    assert not equal(one, other)


# -- configs

KV = {"__tamm_type__": "ao:KVQuantArchOptimizer"}
LORA = {"__tamm_type__": "adapters:LoRAModelAdapter"}
MODEL = {"__tamm_type__": "models:AFMTextV7Config"}


@pytest.fixture
def read(tmp_path):
    def read(values):
        path = tmp_path / "base-model-config.json"
        path.write_text(json.dumps(MODEL | values))
        return read_toolkit_config(path)

    return read


@pytest.mark.parametrize("start", ["models", "module_configs", "tamm:models"])
def test_defaults_are_tamms(read, start):
    adapters = {"a": LORA | {"alpha": 16}, "b": LORA | {"rank": 4, "dropout_p": 0.5}}
    adapters["c"] = {"__tamm_type__": "adapters:Other"}
    kind = {"__tamm_type__": f"{start}:AFMTextV7Config"}
    config = read({**kind, "arch_optimizers": {"kv": KV}, "adapters": adapters})
    assert config.model == PRESETS["afm-3b"]
    rank = LoRAModelAdapter().rank
    assert config.adapters == {
        "a": LoRASpec(rank, 16.0, 0.0),
        "b": LoRASpec(4, 4.0, 0.5),
        "c": "adapters:Other",
    }
    assert config.adapters["a"].scale == 16 / rank
    defaults = AFMTextV7.Config()
    for field in ("vocab_size", "hidden_dim", "num_layers", "num_heads", "rope_theta"):
        assert getattr(config.model, field) == getattr(defaults, field)
    assert read({}).model.kv_bits is None


@each(
    ("values", "words"),
    [
        ({"__tamm_type__": "models:AFMParallelTrackMoEConfig"}, "AFMTextV7Config is the"),
        ({"attention_window": 3}, "unknown keys attention_window"),
        ({"num_heads": 5}, "hidden_dim is 2048 with 5 heads"),
        ({"hidden_dim": "64"}, "hidden_dim"),
        ({"adapters": ["a"]}, "adapters must be"),
        ({"adapters": {"a": 5}}, "adapters must be"),
        ({"adapters": {"a": LORA | {"rank": 0}}}, "adapter 'a': rank is 0"),
        ({"adapters": {"a": LORA | {"alpha": "2"}}}, "adapter 'a': alpha is '2'"),
        ({"adapters": {"a": LORA | {"dropout_p": -1}}}, "adapter 'a': dropout_p is -1"),
        ({"arch_optimizers": {"s": {"__tamm_type__": "ao:SVD"}}}, "'s' is 'ao:SVD'"),
        (
            {"arch_optimizers": {"kv": KV | {"skip_quantize_for_first_token": True}}},
            "'kv' sets skip_quantize_for_first_token",
        ),
    ],
)
def test_what_cannot_be_honoured_is_named(read, values, words):
    with pytest.raises(ConfigError, match=rf"base-model-config\.json.*{words}"):
        read(values)


# -- names


def test_every_key_of_the_3b_model_is_used_once():
    state = tamm_3b_state()
    assert len(state) == 1326
    keys = map_keys(state, "the 3B model")
    ranges = [key for pair in keys.kv_ranges.values() for key in pair.values()]
    adapter = list(keys.adapters["base_adapter"].values())
    used = [*keys.weights.values(), *ranges, *adapter, keys.tied_head]
    assert sorted(used) == sorted(state)
    assert len(adapter) == 700

    shapes = parameter_shapes(PRESETS["afm-3b"])
    assert sorted([*keys.weights, *keys.kv_ranges]) == sorted(shapes)
    for name, key in keys.weights.items():
        assert tuple(state[key].shape) == shapes[name]
    total = sum(np.prod(s, dtype=int) for n, s in shapes.items() if not n.endswith("_scale"))
    assert total == PRESETS["afm-3b"].num_parameters == 3_111_368_064


LAYER = "layers.segment_0.layer_0"
LORA_KEY = "adapters.a.lora_0.a_transpose"


@each(
    ("keys", "words"),
    [
        ([f"{LAYER}.attention.bias"], f"1 unknown tensors: {LAYER}.attention.bias. They"),
        ([f"x{i}" for i in range(8)], "8 unknown tensors: x0, x1, x2, x3, x4 and 3 more"),
        # The fused layer's pairs are numbered, and no other's.
        ([f"{LAYER}.attention.output_transform.{LORA_KEY}"], "unknown"),
        ([f"{LAYER}.attention.qkv_transform.{LORA_KEY.replace('lora_0.', '')}"], "unknown"),
        (["embedding.weight", "model.embedding.weight"], "both mean model.embedding.weight"),
    ],
)
def test_keys_that_are_unknown_or_mean_the_same_are_named(keys, words):
    with pytest.raises(CheckpointError, match=f"here: .*{words}"):
        map_keys(keys, "here")
