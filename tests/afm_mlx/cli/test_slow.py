"""Commands on a machine without the kernels: each says so in one line, with what to do."""

import json

import pytest

from afm_mlx.kernels import dispatch

pytestmark = [
    pytest.mark.skipif(dispatch.device() == "gpu", reason="takes the CPU's kernels away"),
    pytest.mark.usefixtures("no_extension"),
]
WHY = "the C++ extension isn't there: nobody built it; build it"


@pytest.mark.usefixtures("quick")
def test_each_command_that_runs_a_model_says_that_it_is_slow(trainable_folder, data, tmp_path, run):
    words = tmp_path / "words.txt"
    words.write_text("some words to be measured, and some more of them")
    training = ("--data", data, "--adapter-path", tmp_path / "adapter")
    commands = {
        ("generate", "--prompt", "hey", "--max-tokens", 1): "the model",
        ("perplexity", "--data-path", words, "--sequence-length", 8): "the model",
        ("bench", "-p", 4, "-g", 3, "-n", 1): "the model",
        ("lora", "--train", "--iters", 1, *training): "validation",
    }
    for argv, what in commands.items():
        status, _, err = run(*argv, "--model", trainable_folder)
        assert status == 0, err
        warned = [line for line in err.splitlines() if "warning" in line]
        slow = "is right, but slow: it runs on plain MLX, without this package's kernels"
        assert warned == [f"afm-mlx: warning: {what} {slow} ({WHY})"], argv


def test_doctor_and_info_say_it(tmp_path, monkeypatch, run):
    monkeypatch.setenv("AFM_MLX_CACHE", str(tmp_path))
    report = tmp_path / "report.json"
    status, out, _ = run("doctor", "--quick", "--report", report)
    ending = (
        f"Right, but slow: models run without this package's kernels ({WHY}). Report: {report}\n"
    )
    assert (status, out[-len(ending) :]) == (0, ending)
    assert json.loads(report.read_text())["slow"] == WHY
    _, out, _ = run("info", "--preset", "afm-3b", "--json")
    assert json.loads(out)["runtime"]["kernels"] == f"missing: {WHY}"
