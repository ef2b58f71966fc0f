"""`afm-mlx info`."""

import json

import mlx.core as mx
from mlx.utils import tree_flatten

import afm_mlx
from afm_mlx.config import PRESETS
from afm_mlx.loading.load import load
from afm_mlx.tokenizer.tokenizer import load_tokenizer
from afm_mlx.track_config import TrackConfig
from tests.tools.tracks import SMALL, random_tracks, write_tracks_folder
from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_model


def test_info_of_a_folder(folder, done):
    facts = json.loads(done("info", "--model", folder, "--json"))
    stored = mx.load(str(folder / "model.safetensors"))
    assert facts["weights"]["bytes"] == sum(array.nbytes for array in stored.values())
    assert facts["weights"]["parameters"] == sum(array.size for array in stored.values())
    assert facts["weights"]["bits_per_weight"] == 32
    assert facts["architecture"]["layers_that_write_kv"] == 2
    assert facts["architecture"]["head_dim"] == 8
    assert facts["tokenizer"]["vocab_size"] == load_tokenizer(folder).vocab_size
    model, _ = load(folder)
    cache = model.make_cache()
    model.prefill(mx.zeros((1, 256), mx.int32), cache)
    assert facts["kv_cache"]["bytes_at_full_context"]["float32"] == sum(c.nbytes for c in cache)
    assert len(facts["fingerprint"]) == 64
    assert facts["runtime"]["cpu_gflops_float32"] > 0
    assert facts["runtime"]["versions"]["afm-mlx"] == afm_mlx.__version__
    text = done("info", "--model", folder)
    for words in ("layers that write kv", facts["fingerprint"], "bits per weight", "blas", "metal"):
        assert words in text


def test_info_of_presets(done, fails):
    for name, config in PRESETS.items():
        facts = json.loads(done("info", "--preset", name, "--json"))
        assert facts["architecture"]["parameters"] == config.num_parameters
        assert ("int8" in facts["kv_cache"]["bytes_per_token"]) == (config.kv_bits == 8)
        assert "weights" not in facts
        if name == "afm-3b":
            assert facts["architecture"]["parameters"] == 3_111_368_064
            assert facts["kv_cache"]["bytes_per_token"]["int8"] == 17_920
    assert "can't both be given" in fails("info", "--preset", "afm-3b", "--model", "x")


def test_info_of_other_architectures(tmp_path, done, fails):
    model = zoo_model("llama", 50, seed=1)
    write_zoo_folder(tmp_path / "llama", "llama", model, word_tokenizer_json(50))
    facts = json.loads(done("info", "--model", tmp_path / "llama", "--json"))
    assert facts["model_type"] == "llama"
    count = sum(array.size for _, array in tree_flatten(model.parameters()))
    assert facts["weights"]["parameters"] == count
    assert "config.json is missing" in fails("info", "--model", tmp_path)


def test_info_of_parallel_tracks(tmp_path, done):
    facts = json.loads(done("info", "--preset", "tamm-default", "--json"))
    assert facts["architecture"]["parameters"] == 147_803_703_296
    assert facts["architecture"]["active_parameters"] == 15_834_122_240
    assert facts["architecture"]["exchanges_between_tracks"] == 12
    model = random_tracks(TrackConfig(**SMALL), 1)
    folder = write_tracks_folder(tmp_path / "model", model)
    facts = json.loads(done("info", "--model", folder, "--json"))
    assert facts["architecture"]["parameters"] == facts["weights"]["parameters"]
    cache = model.make_cache()
    model(mx.zeros((1, 1), mx.int32), cache)
    assert facts["kv_cache"]["bytes_per_token_within_the_window"]["float32"] == sum(
        2 * entry.keys[:, :, :1].nbytes for entry in cache
    )
