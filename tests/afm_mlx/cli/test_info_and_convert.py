"""`afm-mlx info` and `afm-mlx convert`."""

import dataclasses
import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

import afm_mlx
from afm_mlx.config import PRESETS
from afm_mlx.loading.load import load
from afm_mlx.tokenizer.tokenizer import load_tokenizer
from tests.tools.cli import CONFIG, lines, write_folder


def test_convert(folder, run, fails, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = run("convert", "--hf-path", folder, "--dtype", "bfloat16")
    assert (status, err) == (0, "")
    assert out.startswith("mlx_model: ")
    assert mx.load("mlx_model/model.safetensors")["model.embedding.weight"].dtype == mx.bfloat16
    assert "exists already" in fails("convert", "--model", folder)
    assert "is no checkpoint" in fails("convert", "--model", tmp_path, "--mlx-path", "other")


def test_convert_packs_and_unpacks(folder, run, tmp_path):
    packed, whole = tmp_path / "packed", tmp_path / "whole"
    flags = ("-q", "--q-bits", 4, "--q-mode", "balanced", "--q-embedding-bits", 8)
    status, _, err = run("convert", "--model", folder, "--mlx-path", packed, *flags)
    assert (status, err) == (0, "")
    facts = json.loads(run("info", "--model", packed, "--json")[1])
    layers = facts["packed_layers"]
    assert set(layers) == {"4-bit balanced per row", "8-bit balanced per row"}
    assert layers["8-bit balanced per row"]["layers"] == 1
    assert facts["weights"]["parameters"] == facts["architecture"]["parameters"]
    status, _, _ = run("generate", "--model", packed, "--prompt", "a", "-m", 2, "--json")
    assert status == 0
    assert run("convert", "--model", packed, "--mlx-path", whole, "-d")[0] == 0
    ours, theirs = (load(path)[0].layers[0].mlp.up_proj for path in (packed, whole))
    assert mx.array_equal(ours.dequantize(), theirs.weight)


def test_convert_to_a_size(run, fails, tmp_path, spm_bpe, rng):
    config = dataclasses.replace(CONFIG, hidden_dim=64, hidden_dim_scale_factor=2.0)
    folder = write_folder(tmp_path / "model", spm_bpe, rng, config)
    text = lines(tmp_path / "text.jsonl", {"text": "The fox said that it was night."})
    flags = ("convert", "--model", folder, "-q", "--q-mode", "palette", "--q-embedding-bits", 8)
    flags += ("--q-embedding-mode", "balanced", "--q-embedding-granularity", "row", "--data", text)
    status, out, err = run(*flags, "--target-bpw", 6, "--mlx-path", tmp_path / "out")
    assert (status, err) == (0, "")
    said = float(out.split(", ")[-1].removesuffix(" bits per weight\n"))
    assert 5.5 < said <= 6
    facts = json.loads(run("info", "--model", tmp_path / "out", "--json")[1])
    assert said == pytest.approx(facts["weights"]["bits_per_weight"], abs=1e-3)
    assert len(facts["packed_layers"]) == 3
    assert "can be met" in fails(*flags, "--target-bpw", 12, "--mlx-path", tmp_path / "no")


def test_info_json(folder, run):
    status, out, err = run("info", "--model", folder, "--json")
    facts = json.loads(out)
    assert (status, err) == (0, "")
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


def test_info_says_the_same_in_words(folder, run):
    _, out, _ = run("info", "--model", folder)
    for words in ("layers that write kv", "fingerprint", "bits per weight", "blas", "metal"):
        assert words in out


def test_info_of_presets(run):
    for preset in list(PRESETS):
        facts = json.loads(run("info", "--preset", preset, "--json")[1])
        assert facts["architecture"]["parameters"] == PRESETS[preset].num_parameters
        if preset == "afm-3b":
            assert facts["architecture"]["parameters"] == 3_111_368_064
            assert facts["kv_cache"]["bytes_per_token"]["int8"] == 17_920
        assert ("int8" in facts["kv_cache"]["bytes_per_token"]) == (PRESETS[preset].kv_bits == 8)
        assert "weights" not in facts


def test_info_of_other_architectures(tmp_path, run, fails):
    from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_model

    model = zoo_model("llama", 50, seed=1)
    write_zoo_folder(tmp_path / "llama", "llama", model, word_tokenizer_json(50))
    facts = json.loads(run("info", "--model", tmp_path / "llama", "--json")[1])
    assert facts["model_type"] == "llama"
    count = sum(array.size for _, array in tree_flatten(model.parameters()))
    assert facts["weights"]["parameters"] == count
    assert "config.json is missing" in fails("info", "--model", tmp_path)


def test_packed_weights_are_counted_unpacked(rng):
    import mlx.nn as nn

    from afm_mlx.checkpoint.weights import StoredTensor
    from afm_mlx.measure.describe import _count_parameters

    layers = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(64, 96, bias=False))
    layers.layers[0] = layers.layers[0].to_quantized(32, 4)
    layers.layers[1] = layers.layers[1].to_quantized(64, 2)
    arrays = dict(tree_flatten(layers.parameters()))
    tensors = {n: StoredTensor(n, a.shape, a.dtype, Path("x"), 0) for n, a in arrays.items()}
    values = {"quantization": {"group_size": 32, "bits": 4, "layers.1": {"bits": 2}}}
    assert _count_parameters(tensors, values) == 64 * (32 + 96)
