"""`afm-mlx lora`: adapters, full training, and mlx-lm's way of asking for them."""

import json

import mlx.core as mx
import pytest

from afm_mlx.adapters.files import load_adapter
from afm_mlx.loading import load

SHORT = ("--iters", 3, "--batch-size", 2, "--max-seq-length", 96)


pytestmark = pytest.mark.usefixtures("uncompiled")


@pytest.fixture
def folder(trainable_folder):
    return trainable_folder


def test_an_adapter_in_mlx_lms_words(folder, data, run, tmp_path):
    out = tmp_path / "adapters"
    config = tmp_path / "lora.yaml"
    config.write_text(
        "train: true\nfine_tune_type: lora\noptimizer: adamw\nnum_layers: 2\n"
        'lora_parameters:\n  rank: 4\n  scale: 10.0\n  dropout: 0.1\n  keys: ["mlp.up_proj"]\n'
    )
    base = ("lora", "--model", folder, "--data", data, *SHORT)
    status, text, err = run(*base, "-c", config, "--adapter-path", out, "--test")
    assert (status, err) == (0, "")
    assert f"Saved to {out}\n" in text
    assert "Test loss " in text
    tensors, adapter = load_adapter(out)
    assert (adapter.rank, adapter.scale, adapter.dropout) == (4, 10.0, pytest.approx(0.1))
    assert {name.rpartition(".")[0] for name in tensors} == {
        "model.layers.1.mlp.up_proj",
        "model.kv_reuse_layers.0.mlp.up_proj",
    }
    assert (out / "run" / "metrics.jsonl").is_file()
    assert run("generate", "--model", folder, "--adapter-path", out, "-p", "say x", "-m", 2)[0] == 0
    # The next one starts from it.
    later = ("--initial-adapter", out, "--adapter-path", tmp_path / "later")
    assert run(*base, *later)[0] == 0
    assert load_adapter(tmp_path / "later")[0].keys() == tensors.keys()


def test_a_recovery_adapter(folder, data, run, tmp_path):
    packed, out = tmp_path / "packed", tmp_path / "recovery"
    assert run("convert", "--model", folder, "--mlx-path", packed, "-q")[0] == 0
    arguments = ("--teacher", folder, "--rank", 8, "--alpha", 16, "--adapter-path", out, "--json")
    status, text, err = run("lora", "--model", packed, "--data", data, *SHORT, *arguments)
    assert status == 0
    losses = [float(line.split("Val loss ")[1]) for line in err.splitlines() if "Val loss" in line]
    assert losses[-1] < losses[0]
    assert json.loads(text)["best_step"] == 3
    assert load_adapter(out)[1].scale == 2.0


def test_full_training(folder, data, run, tmp_path):
    out = tmp_path / "full"
    arguments = ("--fine-tune-type", "full", "--save-path", out, "--num-layers", 1)
    assert run("lora", "--model", folder, "--data", data, *SHORT, *arguments)[0] == 0
    before, after = (load(path)[0].model.kv_reuse_layers[0] for path in (folder, out))
    assert not mx.array_equal(before.mlp.up_proj.weight, after.mlp.up_proj.weight)
    assert (tmp_path / "full-run" / "run.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--fine-tune-type", "dora"), "allowed are lora and full"),
        (("--fine-tune-type", "full"), "--save-path is missing"),
        (("--fine-tune-type", "full", "--save-path", "x", "--rank", 4), "--rank would do nothing"),
        (
            ("--fine-tune-type", "full", "--save-path", "x", "--adapter-path", "y"),
            "--adapter-path would do nothing",
        ),
        (("--save-path", "x"), "is for --fine-tune-type full"),
        (("--alpha", 4, "--scale", 2), "choose one"),
        (("--keys", "mlp.nothing"), "There is no layer mlp.nothing"),
        (("--num-layers", 9), "num_layers of LoRA is 9"),
        (("--lora-parameters", '{"r": 4}'), "known are rank, scale, dropout, keys"),
        (("--lora-parameters", '{"rank": 0}'), "rank of LoRA is 0"),
        (("--lora-parameters", '{"rank": "4"}'), "rank is '4'; int is needed"),
        (("--initial-adapter", "nowhere"), "nowhere is no folder"),
        (("--resume-adapter-file", "x"), "use --initial-adapter"),
        (("--rank", 0), "allowed is 1 or more"),
        (("--lr-schedule", "x"), "use --learning-rate"),
    ],
)
def test_wrong_arguments(folder, data, fails, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in fails("lora", "--model", folder, "--data", data, *SHORT, *arguments)
    assert not (tmp_path / "adapters").exists()
