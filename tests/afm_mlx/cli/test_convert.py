"""`afm-mlx convert`."""

import dataclasses
import json

import mlx.core as mx
import pytest

from afm_mlx.loading.load import load
from tests.tools.cli import CONFIG, lines, write_folder


def test_a_folder_is_made_and_none_replaced(folder, done, fails, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = done("convert", "--hf-path", folder, "--dtype", "bfloat16")
    assert out.startswith("mlx_model: ")
    assert mx.load("mlx_model/model.safetensors")["model.embedding.weight"].dtype == mx.bfloat16
    for argv, says in {
        "": "--model is missing",
        f"--model {folder}": "exists already",
        f"--model {tmp_path} --mlx-path other": "is no checkpoint",
        "--model x --q-bits 4": "--q-bits without -q",
        "--model x -q --q-mode int4": "invalid choice",
        "--model afm-nano -q --mlx-path other": "quantized already",
        "--model no/such/folder --mlx-path other": "There is no folder",
        "--model x --upload-repo a/b": "nothing is uploaded",
    }.items():
        assert says in fails("convert", *argv.split())


def test_a_model_is_packed_and_unpacked(folder, done, tmp_path):
    packed, whole = tmp_path / "packed", tmp_path / "whole"
    flags = ("-q", "--q-bits", 4, "--q-mode", "balanced", "--q-embedding-bits", 8)
    done("convert", "--model", folder, "--mlx-path", packed, *flags)
    facts = json.loads(done("info", "--model", packed, "--json"))
    layers = facts["packed_layers"]
    assert set(layers) == {"4-bit balanced per row", "8-bit balanced per row"}
    assert layers["8-bit balanced per row"]["layers"] == 1
    assert facts["weights"]["parameters"] == facts["architecture"]["parameters"]
    done("generate", "--model", packed, "--prompt", "a", "-m", 2)
    done("convert", "--model", packed, "--mlx-path", whole, "-d")
    ours, theirs = (load(path)[0].layers[0].mlp.up_proj for path in (packed, whole))
    assert mx.array_equal(ours.dequantize(), theirs.weight)


def test_a_model_is_packed_to_a_size(done, fails, tmp_path, spm_bpe, rng):
    config = dataclasses.replace(CONFIG, hidden_dim=64, hidden_dim_scale_factor=2.0)
    folder = write_folder(tmp_path / "model", spm_bpe, rng, config)
    text = lines(tmp_path / "text.jsonl", {"text": "The fox said that it was night."})
    flags = "-q --q-mode palette --q-embedding-bits 8 --q-embedding-mode balanced".split()
    flags += ["--q-embedding-granularity", "row", "--data", text]
    argv = ("convert", "--model", folder, *flags)
    out = done(*argv, "--target-bpw", 6, "--mlx-path", tmp_path / "out")
    said = float(out.split(", ")[-1].removesuffix(" bits per weight\n"))
    assert 5.5 < said <= 6
    facts = json.loads(done("info", "--model", tmp_path / "out", "--json"))
    assert said == pytest.approx(facts["weights"]["bits_per_weight"], abs=1e-3)
    assert len(facts["packed_layers"]) == 3
    assert "can be met" in fails(*argv, "--target-bpw", 12, "--mlx-path", tmp_path / "no")
