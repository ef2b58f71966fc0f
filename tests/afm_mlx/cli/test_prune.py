"""`afm-mlx prune`: what it prints and saves, and what it refuses."""

import json

import pytest

from afm_mlx.adapters.adapter_folder import load_adapter
from afm_mlx.adapters.task_mask import read_mask

SHORT = ("--iters", 2, "--batch-size", 2, "--max-seq-length", 96)


@pytest.fixture
def base(trainable_folder, data, tmp_path):
    return ("prune", "--model", trainable_folder, "--data", data, "--save-path", tmp_path / "mask")


def test_a_mask_and_an_adapter_from_data(base, done, tmp_path):
    argv = ("--recover", "lora", "--rank", 3, "--criterion", "gradient", "--task", "echo", *SHORT)
    lines = done(*base, "--ffn", 0.5, *argv).splitlines()
    assert lines[-4] == "Kept 50.0% of 96 channels in each block, in groups of 16"
    assert lines[-3].startswith("A decode step reads 0.")
    assert lines[-3].endswith("x fewer")
    assert lines[-2].startswith("Best: Val loss ")
    assert lines[-1] == f"Saved to {tmp_path / 'mask'}"
    mask = read_mask(tmp_path / "mask")
    assert (mask.task, mask.criterion, mask.share) == ("echo", "gradient", 0.5)
    assert load_adapter(tmp_path / "mask")[1].rank == 3


def test_json_and_a_target(base, run, tmp_path):
    status, text, err = run(*base, "--target-bytes", "0.2MB", "--json", "--shares", "sensitivity")
    assert (status, err) == (0, "")
    facts = json.loads(text)
    assert facts["bytes_after"] <= 200_000 < facts["bytes_before"]
    assert 0 < facts["share"] < 1
    assert len(facts["block_shares"]) == 3
    assert facts["recovery_loss"] is None
    assert read_mask(tmp_path / "mask").share == facts["share"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--ffn", 0), "--ffn: 0 is out of range; allowed is more than 0"),
        (("--ffn", 1.5), "--ffn: 1.5 is out of range"),
        (("--ffn", 0.5, "--target-bytes", 9), "--ffn and --target-bytes both say the kept share"),
        (("--criterion", "size"), "--criterion"),
        (("--group", 7), "group is 7, which does not divide the 96 channels"),
        (("--rank", 4), "--rank without --recover lora would do nothing"),
        (("--score-iters", 4), "--score-iters would do nothing with --criterion activation"),
        (("--target-bytes", 10), "target_bytes is 10, and that is out of reach"),
        (("--resume",), "mask-run holds no run. Leave it out to start one"),
        (("--plot", "x.png"), "--plot is for lora and qat"),
    ],
)
def test_what_is_refused(base, fails, tmp_path, argv, message):
    assert message in fails(*base, *argv)
    assert not (tmp_path / "mask").exists()
    assert not (tmp_path / "mask-run").exists()


def test_a_run_that_exists_says_how_to_go_on(base, fails, tmp_path):
    (tmp_path / "mask-run").mkdir()
    (tmp_path / "mask-run" / "run.json").write_text("{}")
    error = fails(*base, "--recover", "lora", *SHORT)
    assert "mask-run holds a training run already. To go on with it: afm-mlx prune " in error
    assert "--resume. To start over, choose another folder (--save-path)." in error
