"""`afm-mlx qat`, and what it shares with `lora`: arguments, output, resuming."""

import json
import os
import shlex
import signal
import subprocess
import sys

import pytest

from afm_mlx.loading.load import load
from tests.tools.cli import ROOT

SHORT = ("--iters", 4, "--batch-size", 2, "--max-seq-length", 96, "--learning-rate", 5e-3)


pytestmark = pytest.mark.usefixtures("uncompiled")


@pytest.fixture
def folder(trainable_folder):
    return trainable_folder


def test_it_trains_reports_and_saves(folder, data, run, tmp_path):
    out = tmp_path / "qat"
    arguments = (*SHORT, "--steps-per-report", 2, "--steps-per-eval", 2, "--test")
    status, text, err = run(
        "qat", "--model", folder, "--data", data, *arguments, "--save-path", out
    )
    assert (status, err) == (0, "")
    lines = text.splitlines()
    assert lines[0].startswith("Trainable parameters: 99.99")
    assert lines[1].startswith("Train data: 9 samples, ")
    assert any(line.startswith("Batches: 2 packed rows of up to ") for line in lines)
    reports = [line for line in lines if "Train loss" in line]
    assert [line.split(":")[0] for line in reports] == ["Iter 2", "Iter 4"]
    names = "Train loss|Learning Rate|It/sec|Tokens/sec|Trained Tokens|Peak mem".split("|")
    assert all(name in line for line in reports for name in names)
    values = [
        float(line.split("Val loss ")[1].split(",")[0])
        for line in lines
        if "Iter" in line and "Val" in line
    ]
    assert len(values) == 3
    assert values[-1] < values[0]
    assert lines[-1] == f"Saved to {out}"
    assert lines[-3].startswith("Test loss ")
    assert lines[-2].startswith("On the same grid, before training: loss ")
    assert load(out)[0].model.layers[0].mlp.up_proj.bits == 2
    assert (tmp_path / "qat-run" / "metrics.jsonl").is_file()
    assert run("generate", "--model", out, "-p", "say x", "-m", 2)[0] == 0


def test_json_and_yaml(folder, data, run, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(
        f"model: {folder}\ndata: {data}\niters: 2\nbatch_size: 2\nmax_seq_length: 96\n"
        "learning_rate: 1e-3\nq_granularity: row\nembedding_bits: 8\nquant_predicate: mixed_2_4\n"
        f"teacher: self\nmask_prompt: false\npacking: false\nsave_path: {tmp_path / 'other'}\n"
    )
    arguments = ("-c", config, "--save-path", tmp_path / "qat", "--json", "--val-batches", -1)
    status, text, err = run("qat", *arguments)
    assert status == 0
    facts = json.loads(text)
    assert facts["path"] == str(tmp_path / "qat")
    assert (facts["steps"], facts["tokens"] > 0, facts["test_loss"]) == (2, True, None)
    assert "Iter 2: Train loss" in err
    assert "ppl" not in err
    assert "rows of one sample" in err
    model = load(tmp_path / "qat")[0]
    bits = {layer.mlp.down_proj.bits for layer in model.layers}
    assert bits == {2, 4}
    assert model.model.embedding.bits == 8
    manifest = json.loads((tmp_path / "qat-run" / "run.json").read_text())
    assert manifest["prompt_weight"] == 1
    assert manifest["q_rule"]["granularity"] == "row"


def test_an_interrupted_run_resumes(folder, data, run, fails, tmp_path):
    arguments = ["qat", "--model", folder, "--data", data, *SHORT, "--iters", 12, "--seed", 7]
    arguments = [str(argument) for argument in arguments]
    assert "holds no run" in fails(*arguments, "--save-path", tmp_path / "none", "--resume")
    run(*arguments, "--save-path", tmp_path / "unbroken")
    out = tmp_path / "broken"
    child = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "afm_mlx",
            *arguments,
            "--save-path",
            out,
            "--steps-per-report",
            "1",
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "MLX_DISABLE_COMPILE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in child.stdout:
        if line.startswith("Iter 2: Train"):
            child.send_signal(signal.SIGINT)
    assert child.wait() == 130
    how = f"To go on with it: afm-mlx {shlex.join([*arguments, '--save-path', str(out)])}"
    advice = child.stderr.read()
    assert advice.startswith(f"afm-mlx: interrupted. The run is kept in {out}-run. {how} ")
    assert advice.endswith(" --resume. To start anew, choose another folder (--save-path).\n")
    child.stderr.close()
    again = fails(*arguments, "--save-path", out)
    assert f"{out}-run holds a training run already. {how} --resume. To start anew" in again
    changed = (*arguments, "--save-path", out, "--resume", "--clip-grad-norm", 0.5)
    assert "clip_grad_norm was 1.0 and is now 0.5" in fails(*changed)
    status, text, _ = run(*arguments, "--save-path", out, "--resume")
    assert status == 0
    assert text.count("Resumed after step") == 1
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (out / name).read_bytes() == (tmp_path / "unbroken" / name).read_bytes()


def test_a_plot(folder, data, run, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "loss.png"
    arguments = ("--save-path", tmp_path / "qat", "--plot", picture)
    assert run("qat", "--model", folder, "--data", data, *SHORT, *arguments)[0] == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_can_not_be_drawn_is_known_before_training(data, fails, monkeypatch, tmp_path):
    monkeypatch.setattr("afm_mlx.cli.training_recipe.find_spec", lambda name: None)
    err = fails(
        "qat", "--data", data, "--save-path", tmp_path / "qat", "--plot", tmp_path / "x.png"
    )
    assert "--plot needs matplotlib" in err


def test_wrong_arguments(folder, data, fails, tmp_path, monkeypatch):
    for arguments, message in [
        (("--data", "nowhere"), "no file or folder nowhere"),
        (("--model", "nowhere"), "There is no folder nowhere"),
        (("--iters", 3, "--epochs", 2), "choose one"),
        (("--epochs", 0), "--epochs is 0"),
        (("--learning-rate", 0), "--learning-rate is 0"),
        (("--val-batches", 0), "--val-batches is 0"),
        (("--bits", 3), "2, 4, 8"),
        (("--bits", 2, "--quant-predicate", "mixed_2_4"), "choose one"),
        (("--quant-predicate", "mixed_3_6"), "takes 2, 4 and 8"),
        (("--q-group-size", 5), "groups of 5 do not divide"),
        (("--distillation-weight", 0.5), "without --teacher"),
        (("--no-mask-prompt", "--prompt-weight", 0.5), "contradict"),
        (("--plot", "loss.pdf"), "ends in .png"),
        (("--plot", "nowhere/loss.png"), "there is no folder nowhere"),
        (("--warmup-iters", 4), "warmup_iters is 4; allowed are 0 and more, less than iters"),
        (("--warmup-iters", 1000, "--epochs", 1), "allowed are fewer"),
        (("--max-seq-length", 8), "shorten it"),
        (("--report-to", "wandb"), "--plot draws them"),
        (("--optimizer", "sgd"), "adamw"),
        (("--resume",), "holds no run"),
        (("--save-path", "."), "exists already"),
    ]:
        monkeypatch.chdir(tmp_path)
        base = ("qat", "--model", folder, "--data", data, "--max-seq-length", 96)
        iters = () if "--epochs" in arguments else ("--iters", 4)
        assert message in fails(*base, *iters, *arguments)
        assert not (tmp_path / "qat_model").exists()
        assert not (tmp_path / "qat_model-run").exists()


def test_data_is_needed(fails):
    assert "--data is missing" in fails("qat")


def test_bad_data(folder, data, fails, tmp_path):
    with (data / "train.jsonl").open("a") as file:
        file.write('{"text": 7}\nnonsense\n')
    err = fails("qat", "--model", folder, "--data", data, "--save-path", tmp_path / "out")
    assert "train.jsonl:10: " in err
    assert "train.jsonl:11: " in err
