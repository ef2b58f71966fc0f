"""`afm-mlx convert`."""

import dataclasses
import json

import mlx.core as mx
import pytest

from afm_mlx.loading.load import load
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
