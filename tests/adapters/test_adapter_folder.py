"""Adapter folders: written whole, read back, and refused with the reason when they can't be used."""

import json
from dataclasses import replace

import mlx.core as mx
import pytest

from afm_mlx.adapters.adapter_folder import (
    AdapterConfig,
    EmbeddingUse,
    load_adapter,
    save_adapter,
)
from afm_mlx.errors import AFMError, CheckpointError, ConfigError
from tests.tools.cases import draw, each
from tests.tools.compare import assert_same_tensors

UP, QKV = "model.layers.0.mlp.up_proj", "model.layers.0.self_attn.qkv_proj"


@pytest.fixture
def adapter(rng):
    tensors = {f"{UP}.lora_a": draw(rng, (8, 6)), f"{UP}.lora_b": draw(rng, (6, 20))}
    for i in range(3):
        tensors[f"{QKV}.lora_a.{i}"] = draw(rng, (8, 6))
        tensors[f"{QKV}.lora_b.{i}"] = draw(rng, (6, 4))
    keys = ("mlp.up_proj", "self_attn.qkv_proj")
    return tensors, AdapterConfig(6, 2 / 3, 1, keys, 0.1, base_model_fingerprint="ab" * 32)


@pytest.fixture
def folder(adapter, tmp_path):
    save_adapter(tmp_path / "a", *adapter)
    return tmp_path / "a"


def test_round_trip(adapter, folder):
    found, config = load_adapter(folder)
    assert config == adapter[1]
    assert_same_tensors(found, adapter[0])
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["adapter_config.json", "adapters.safetensors"]


@pytest.mark.parametrize(
    "use", [EmbeddingUse(), EmbeddingUse("mean"), EmbeddingUse("last", "Find the answer")]
)
def test_an_embedding_adapter_says_how_it_is_used(adapter, tmp_path, use):
    tensors, config = adapter
    save_adapter(tmp_path / "a", tensors, replace(config, embedding=use))
    assert load_adapter(tmp_path / "a")[1].embedding == use


@each(
    "value",
    [3, {}, {"pooling": "max"}, {"pooling": ["last"]}, {"pooling": "last", "instruction": 3}],
)
def test_other_uses_of_an_embedding_adapter_are_refused(folder, value):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"embedding": value}))
    with pytest.raises(ConfigError, match=r"embedding is .*must have a pooling, last or mean"):
        load_adapter(folder)


def test_folders_of_mlx_lm_are_read(folder):
    """Its config holds all options of the training run, and says nothing of the base model."""
    values = {
        "batch_size": 4,
        "model": "somewhere",
        "fine_tune_type": "lora",
        "num_layers": -1,
        "lora_parameters": {"rank": 6, "dropout": 0.0, "scale": 20},
    }
    (folder / "adapter_config.json").write_text(json.dumps(values))
    assert load_adapter(folder)[1] == AdapterConfig(rank=6, scale=20.0, num_layers=-1)


def test_a_failed_write_leaves_the_old_files(adapter, folder, monkeypatch):
    tensors, config = adapter
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(path, tensors):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("afm_mlx.adapters.adapter_folder.save_file", full)
    with pytest.raises(AFMError, match="No space left"):
        save_adapter(folder, {n: t + 1 for n, t in tensors.items()}, config)
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}


@each(
    ("change", "words"),
    [
        (lambda t: t.pop(f"{UP}.lora_b"), "has no .*up_proj.lora_b"),
        (lambda t: t.pop(f"{QKV}.lora_a.1"), r"has no .*lora_a\.1"),
        (lambda t: t.update(weight=mx.zeros(3)), "weight is no LoRA tensor"),
        (lambda t: t.update({f"{UP}.lora_a": mx.zeros((8, 5))}), r"is \[8, 5\], and rank 6 needs \[in, 6\]"),
        (lambda t: t.update({f"{UP}.lora_b": mx.zeros(6)}), r"needs \[6, out\]"),
        (
            lambda t: t.update({f"{UP}.lora_b": mx.ones((6, 20), mx.int32)}),
            "is int32; an adapter's tensors are",
        ),
        (lambda t: t.update({f"{UP}.lora_b": mx.ones((6, 20), mx.bool_)}), "lora_b is bool"),
        (lambda t: t.clear(), "no LoRA tensors"),
    ],
)  # fmt: skip
def test_tensors_that_are_no_pairs(adapter, folder, tmp_path, change, words):
    tensors, config = dict(adapter[0]), adapter[1]
    change(tensors)
    with pytest.raises(CheckpointError, match=words):
        save_adapter(tmp_path / "new", tensors, config)
    assert not (tmp_path / "new").exists()
    mx.save_safetensors(str(folder / "adapters.safetensors"), tensors)
    with pytest.raises(CheckpointError, match=words):
        load_adapter(folder)


@each(
    ("change", "words"),
    [
        ({"fine_tune_type": "dora"}, "fine_tune_type is 'dora'"),
        ({"peft_type": "LORA"}, "is of PEFT. Convert the folder"),
        ({"lora_parameters": None}, "lora_parameters is missing"),
        ({"rank": None}, "rank is None"),
        ({"rank": 0}, "rank is 0"),
        ({"rank": 10**400}, "a whole number of 1 to 65536"),
        ({"scale": None}, "scale is None"),
        ({"scale": 10**400}, "must be a finite number"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"scale": 1e39}, "finite number of float32"),
        ({"scale": True}, "scale is True"),
        ({"dropout": 1}, "dropout is 1"),
        ({"dropout": -0.1}, r"dropout is -0\.1"),
        ({"keys": [1]}, "keys is"),
        ({"keys": 5}, "keys is 5"),
        ({"num_layers": "all"}, "num_layers is 'all'"),
        ({"base_model_fingerprint": 5}, "base_model_fingerprint is 5"),
        ({"base_model_fingerprint": "\udc00"}, "must be a string of Unicode"),
    ],
)
def test_configs_that_can_not_be_used(adapter, folder, change, words):
    save_adapter(folder, *adapter)
    path = folder / "adapter_config.json"
    values = json.loads(path.read_text())
    of_lora = change.keys() <= values["lora_parameters"].keys()
    (values["lora_parameters"] if of_lora else values).update(change)
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=words) as caught:
        load_adapter(folder)
    assert str(path) in str(caught.value)


def test_folders_that_are_none(folder):
    with pytest.raises(CheckpointError, match="is no folder"):
        load_adapter(folder / "nothing")
    for name, kind in (
        ("adapters.safetensors", CheckpointError),
        ("adapter_config.json", ConfigError),
    ):
        (folder / name).write_bytes((folder / name).read_bytes()[:-1])
        with pytest.raises(kind, match=f"{name}.* is (no whole|not valid)"):
            load_adapter(folder)
        (folder / name).unlink()
        with pytest.raises(kind, match=f"{name} is missing"):
            load_adapter(folder)
