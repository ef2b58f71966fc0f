"""`afm-mlx convert`."""

import json

import mlx.core as mx

from afm_mlx.loading.load import load


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
        "--model x --data y": "--data",
        "--model x --upload-repo a/b": "nothing is uploaded",
    }.items():
        assert says in fails("convert", *argv.split())


def test_a_model_is_packed_and_unpacked(folder, done, tmp_path):
    packed, whole = tmp_path / "packed", tmp_path / "whole"
    flags = ("-q", "--q-bits", 4, "--q-mode", "balanced", "--q-embedding-bits", 8)
    text = done("convert", "--model", folder, "--mlx-path", packed, *flags)
    facts = json.loads(done("info", "--model", packed, "--json"))
    layers = facts["packed_layers"]
    assert set(layers) == {"4-bit balanced per row", "8-bit balanced per row"}
    assert layers["8-bit balanced per row"]["layers"] == 1
    assert f" {facts['weights']['bits_per_weight']:.3f} bits per weight" in text
    assert facts["weights"]["parameters"] == facts["architecture"]["parameters"]
    done("generate", "--model", packed, "--prompt", "a", "-m", 2)
    done("convert", "--model", packed, "--mlx-path", whole, "-d")
    ours, theirs = (load(path)[0].layers[0].mlp.up_proj for path in (packed, whole))
    assert mx.array_equal(ours.dequantize(), theirs.weight)


def test_a_packed_model_gets_an_adapter_for_its_errors(folder, done, tmp_path):
    flags = ("-q", "--q-bits", 4, "--svd-adapter", 4)
    text = done("convert", "--model", folder, "--mlx-path", tmp_path / "packed", *flags)
    assert text.endswith("Its adapter of rank 4: --adapter-path svd\n")
    flags = ("--adapter-path", "svd", "--prompt", "a", "-m", 2)
    done("generate", "--model", tmp_path / "packed", *flags)
