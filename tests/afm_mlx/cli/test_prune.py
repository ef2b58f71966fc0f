"""`afm-mlx prune`: what it prints and saves, and what it refuses."""

import json

import pytest

from afm_mlx.adapters.adapter_folder import load_adapter
from afm_mlx.adapters.task_mask import read_mask
from afm_mlx.cli.prune import ARGUMENTS
from afm_mlx.training.pruning import expert_scores, prune
from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_model

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
        (("--rounds", 2), "need --experts SHARE. Add it"),
        (("--criterion", "reap"), "need --experts SHARE. Add it"),
        (("--recover", "full"), "need --experts SHARE. Add it"),
        (("--experts", 0.5), "has no layers with several experts"),
        (("--experts", 0.5, "--ffn", 0.5), "--ffn and --experts both say what is cut"),
        (
            ("--experts", 0.5, "--group", 8, "--resume"),
            "--group, --resume can't be used with --experts",
        ),
        (
            ("--experts", 0.5, "--criterion", "gradient"),
            "--criterion gradient can't be used with --experts",
        ),
        (
            ("--experts", 0.5, "--criterion", "learned", "--recover", "lora"),
            "--criterion learned, --recover lora can't be used with --experts",
        ),
        (("--experts", 0.5, "--iters", 2), "--iters without --recover full would do nothing"),
    ],
)
def test_what_is_refused(base, fails, tmp_path, argv, message):
    assert message in fails(*base, *argv)
    assert not (tmp_path / "mask").exists()
    assert not (tmp_path / "mask-run").exists()


def test_the_criteria_are_the_ones_of_masks_and_experts():
    (row,) = (row for row in ARGUMENTS["mask"] if row.name == "criterion")
    assert list(row.options["choices"]) == [
        *prune.CRITERIA,
        "predictor",
        *expert_scores.CRITERIA,
    ]


def test_a_run_that_exists_says_how_to_go_on(base, fails, tmp_path):
    (tmp_path / "mask-run").mkdir()
    (tmp_path / "mask-run" / "run.json").write_text("{}")
    error = fails(*base, "--recover", "lora", *SHORT)
    assert "mask-run holds a training run already. To go on with it: afm-mlx prune " in error
    assert "--resume. To start over, choose another folder (--save-path)." in error


def test_a_model_with_fewer_experts(done, run, rng, tmp_path):
    model = zoo_model("qwen3_moe", 64, int(rng.integers(2**31)))
    write_zoo_folder(tmp_path / "moe", "qwen3_moe", model, word_tokenizer_json(64))
    lines = [" ".join(f"w{i}" for i in rng.integers(2, 64, 30)) for _ in range(4)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    base = ("prune", "--model", tmp_path / "moe", "--data", data, "--experts", 0.5)
    lines = done(*base, "--save-path", tmp_path / "small").splitlines()
    assert lines[0] == "Round 1 of 1: 8 to 4 experts"
    assert lines[1] == "Kept 4 of 8 experts (50.0%) in each of 2 layers"
    assert lines[2].startswith("Weights: 0.")
    assert lines[3].startswith("Perplexity: ")
    assert lines[4] == f"Saved to {tmp_path / 'small'}"
    more = ("--criterion", "ean", "--rounds", 2, "--recover", "full", *SHORT, "--json")
    status, text, _ = run(*base, "--save-path", tmp_path / "trained", *more)
    facts = json.loads(text)
    assert (status, facts["criterion"], facts["experts_after"]) == (0, "ean", 4)
    assert [len(ids[0]) for ids in facts["kept"].values()] == [4, 4]
    assert facts["perplexity_after"] != facts["perplexity_before"]
    config = json.loads((tmp_path / "trained" / "config.json").read_text())
    assert config["num_experts"] == 4
