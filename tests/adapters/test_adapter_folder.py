"""Adapter folders: written whole, read back, and told apart when they can't be used."""

import json

import mlx.core as mx
import pytest

from afm_mlx.adapters.adapter_folder import AdapterConfig, load_adapter, save_adapter
from afm_mlx.errors import AFMError, CheckpointError, ConfigError
from tests.tools.cases import draw
from tests.tools.compare import assert_same, assert_same_tensors


@pytest.fixture
def adapter(rng):
    rank = 6
    tensors = {
        "model.layers.0.mlp.up_proj.lora_a": draw(rng, (8, rank)),
        "model.layers.0.mlp.up_proj.lora_b": draw(rng, (rank, 20)),
        **{f"model.layers.0.self_attn.qkv_proj.lora_a.{i}": draw(rng, (8, rank)) for i in range(3)},
        **{f"model.layers.0.self_attn.qkv_proj.lora_b.{i}": draw(rng, (rank, 4)) for i in range(3)},
    }
    config = AdapterConfig(
        rank=rank,
        scale=2 / 3,
        num_layers=1,
        keys=("mlp.up_proj", "self_attn.qkv_proj"),
        dropout=0.1,
        base_model_fingerprint="ab" * 32,
    )
    return tensors, config


def test_round_trip(adapter, tmp_path):
    tensors, config = adapter
    save_adapter(tmp_path / "a", tensors, config)
    found, found_config = load_adapter(tmp_path / "a")
    assert found_config == config
    assert_same_tensors(found, tensors)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == ["adapter_config.json", "adapters.safetensors"]


def test_mlx_lm_accepts_the_folder(tmp_path, rng):
    """Of a model without fused layers, since mlx-lm's loader rejects those."""
    from mlx_lm.models import llama
    from mlx_lm.tuner.utils import load_adapters

    values = {
        "model_type": "llama",
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "intermediate_size": 12,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 8,
    }
    model = llama.Model(llama.ModelArgs.from_dict(values))
    tensors = {
        "model.layers.1.mlp.up_proj.lora_a": draw(rng, (8, 3)),
        "model.layers.1.mlp.up_proj.lora_b": draw(rng, (3, 12)),
    }
    config = AdapterConfig(rank=3, scale=0.5, num_layers=1, keys=("mlp.up_proj",))
    save_adapter(tmp_path, tensors, config)
    load_adapters(model, str(tmp_path))
    layer = model.layers[1].mlp.up_proj
    assert layer.scale == 0.5
    assert_same(layer.lora_b, tensors["model.layers.1.mlp.up_proj.lora_b"])


def test_folders_of_mlx_lm_are_read(adapter, tmp_path):
    """Its config holds all options of the training run, and says nothing of the base model."""
    tensors, config = adapter
    save_adapter(tmp_path, tensors, config)
    path = tmp_path / "adapter_config.json"
    values = {
        "batch_size": 4,
        "iters": 1000,
        "model": "somewhere",
        "fine_tune_type": "lora",
        "num_layers": -1,
        "lora_parameters": {"rank": 6, "dropout": 0.0, "scale": 20},
    }
    path.write_text(json.dumps(values))
    assert load_adapter(tmp_path)[1] == AdapterConfig(rank=6, scale=20.0, num_layers=-1)


def test_a_failed_write_leaves_the_old_files(adapter, tmp_path, monkeypatch):
    tensors, config = adapter
    save_adapter(tmp_path, tensors, config)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(path, tensors):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("afm_mlx.adapters.adapter_folder.save_file", full)
    with pytest.raises(AFMError, match="No space left"):
        save_adapter(tmp_path, {n: t + 1 for n, t in tensors.items()}, config)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_tensors_that_are_no_pairs(adapter, tmp_path):
    whole, config = adapter
    up, qkv = "model.layers.0.mlp.up_proj", "model.layers.0.self_attn.qkv_proj"
    (tmp_path / "adapter_config.json").write_text(json.dumps(config.to_dict()))
    for change, words in (
        (lambda t: t.pop(f"{up}.lora_b"), "without .*up_proj.lora_b"),
        (lambda t: t.pop(f"{qkv}.lora_a.1"), r"without .*lora_a\.1"),
        (lambda t: t.update(weight=mx.zeros(3)), "weight is no LoRA tensor"),
        (
            lambda t: t.update({f"{up}.lora_a": mx.zeros((8, 5))}),
            r"is \[8, 5\], and rank 6 needs \[in, 6\]",
        ),
        (lambda t: t.update({f"{up}.lora_b": mx.zeros((6,))}), r"needs \[6, out\]"),
        (lambda t: t.clear(), "no LoRA tensors"),
    ):
        tensors = dict(whole)
        change(tensors)
        with pytest.raises(CheckpointError, match=words):
            save_adapter(tmp_path / "a", tensors, config)
        assert not (tmp_path / "a").exists()
        mx.save_safetensors(str(tmp_path / "adapters.safetensors"), tensors)
        with pytest.raises(CheckpointError, match=words):
            load_adapter(tmp_path)


def test_configs_that_can_not_be_used(adapter, tmp_path):
    tensors, config = adapter
    save_adapter(tmp_path, tensors, config)
    path = tmp_path / "adapter_config.json"
    for change, words in (
        ({"fine_tune_type": "dora"}, "fine_tune_type is 'dora'"),
        ({"lora_parameters": None}, "lora_parameters is missing"),
        ({"lora_parameters": {"scale": 1.0}}, "rank is None"),
        ({"lora_parameters": {"rank": 0, "scale": 1.0}}, "rank is 0"),
        ({"lora_parameters": {"rank": 10**400, "scale": 1.0}}, "a whole number of 1 to 65536"),
        ({"lora_parameters": {"rank": 6}}, "scale is None"),
        ({"lora_parameters": {"rank": 6, "scale": 10**400}}, "must be a finite number"),
        ({"lora_parameters": {"rank": 6, "scale": float("nan")}}, "scale is nan"),
        ({"lora_parameters": {"rank": 6, "scale": 1e39}}, "finite number of float32"),
        ({"lora_parameters": {"rank": 6, "scale": True}}, "scale is True"),
        ({"lora_parameters": {"rank": 6, "scale": 1, "dropout": 2}}, "dropout is 2"),
        ({"lora_parameters": {"rank": 6, "scale": 1, "keys": [1]}}, "keys is"),
        ({"lora_parameters": {"rank": 6, "scale": 1, "keys": 5}}, "keys is 5"),
        ({"num_layers": "all"}, "num_layers is 'all'"),
        ({"base_model_fingerprint": 5}, "base_model_fingerprint is 5"),
        ({"base_model_fingerprint": "\udc00"}, "must be a string of Unicode"),
    ):
        path.write_text(json.dumps(config.to_dict() | change))
        with pytest.raises(ConfigError, match=words) as caught:
            load_adapter(tmp_path)
        assert str(path) in str(caught.value)
    for text in ("[" * 200_000, '{"a": ' + "9" * 5000 + "}", '{"a": 1'):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"adapter_config\.json is not valid JSON"):
            load_adapter(tmp_path)


def test_folders_that_are_none(adapter, tmp_path):
    with pytest.raises(CheckpointError, match="is no folder"):
        load_adapter(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"adapter_config\.json is missing"):
        load_adapter(tmp_path)
    tensors, config = adapter
    save_adapter(tmp_path, tensors, config)
    data = (tmp_path / "adapters.safetensors").read_bytes()
    (tmp_path / "adapters.safetensors").write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=r"adapters\.safetensors"):
        load_adapter(tmp_path)
    (tmp_path / "adapters.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"adapters\.safetensors is missing"):
        load_adapter(tmp_path)
