"""`afm-mlx qat`, and what it shares with `lora`: output, interrupted runs, plots."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys

import pytest

from afm_mlx.loading.load import load
from tests.tools.cli import ROOT

SHORT = ("--iters", 4, "--batch-size", 2, "--max-seq-length", 96, "--learning-rate", 5e-3)


@pytest.fixture
def base(trainable_folder, data):
    return ("qat", "--model", trainable_folder, "--data", data, *SHORT)


def test_it_trains_reports_and_saves(base, done, tmp_path):
    out = tmp_path / "qat"
    every = ("--steps-per-report", 2, "--steps-per-eval", 2, "--test")
    lines = done(*base, *every, "--save-path", out).splitlines()
    assert lines[0].startswith("Trainable parameters: 99.99")
    assert lines[1].startswith("Train data: 9 samples, ")
    assert any(line.startswith("Batches: 2 packed rows of up to ") for line in lines)
    reports = [line for line in lines if "Train loss" in line]
    assert [line.split(":")[0] for line in reports] == ["Iter 2", "Iter 4"]
    names = "Train loss|Learning Rate|It/sec|Tokens/sec|Trained Tokens|Peak mem".split("|")
    assert all(name in line for line in reports for name in names)
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in lines if "Val ppl" in line]
    assert losses[-1] < losses[0]
    assert lines[-4].startswith(f"Best: Val loss {min(losses):.3f} after step ")
    assert lines[-3].startswith("Test loss ")
    assert lines[-2].startswith("On the same grid, before training: loss ")
    assert lines[-1] == f"Saved to {out}"
    assert load(out)[0].model.layers[0].mlp.up_proj.bits == 2
    assert (tmp_path / "qat-run" / "metrics.jsonl").is_file()
    done("generate", "--model", out, "-p", "say x", "-m", 2)


def test_json_yaml_and_a_teacher(base, run, write_config, tmp_path):
    config = write_config(
        "q_granularity: row\nembedding_bits: 8\nquant_predicate: mixed_2_4\nteacher: self\n"
        f"mask_prompt: false\npacking: false\nsave_path: {tmp_path / 'other'}\n"
    )
    out = tmp_path / "qat"
    status, text, err = run(*base, "-c", config, "--iters", 2, "--save-path", out, "--json")
    facts = json.loads(text)
    assert (status, facts["path"], facts["steps"], facts["test_loss"]) == (0, str(out), 2, None)
    assert facts["tokens"] > 0
    assert "Iter 2: Train loss" in err
    assert "ppl" not in err  # of a distance
    assert "rows of one sample" in err
    model = load(out)[0]
    assert {layer.mlp.down_proj.bits for layer in model.layers} == {2, 4}
    assert model.model.embedding.bits == 8
    manifest = json.loads((tmp_path / "qat-run" / "run.json").read_text())
    assert (manifest["prompt_weight"], manifest["q_rule"]["granularity"]) == (1, "row")


def test_an_interrupted_run_resumes(base, done, fails, tmp_path):
    argv = [*map(str, base), "--iters", "12", "--seed", "7"]
    done(*argv, "--save-path", tmp_path / "unbroken")
    out = tmp_path / "broken"
    argv += ["--save-path", str(out)]
    child = subprocess.Popen(
        [sys.executable, "-m", "afm_mlx", *argv, "--steps-per-report", "1"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "MLX_DISABLE_COMPILE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with child:
        for line in child.stdout:
            if line.startswith("Iter 2: Train"):
                child.send_signal(signal.SIGINT)
        advice = child.stderr.read()
    assert child.returncode == 130
    how = f"To go on with it: afm-mlx {shlex.join(argv)}"
    assert advice.startswith(f"afm-mlx: interrupted. The run is kept in {out}-run. {how} ")
    assert advice.endswith(" --resume. To start over, choose another folder (--save-path).\n")
    again = fails(*argv)
    assert f"{out}-run holds a training run already. {how} --resume. To start over" in again
    changed = fails(*argv, "--resume", "--clip-grad-norm", 0.5)
    assert "clip_grad_norm was 1.0 and is now 0.5" in changed
    assert done(*argv, "--resume").count("Resumed after step") == 1
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (out / name).read_bytes() == (tmp_path / "unbroken" / name).read_bytes()
    finished = fails(*argv, "--resume")
    assert f"The run in {out}-run is finished: {out} is its result" in finished
    assert not re.search("remove|delete", finished)


def test_a_plot(base, done, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "loss.png"
    done(*base, "--save-path", tmp_path / "qat", "--plot", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
