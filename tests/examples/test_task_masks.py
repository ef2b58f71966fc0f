"""The script that makes and measures task masks: its data, its random masks, and a whole run."""

from __future__ import annotations

import argparse
import json
import sys

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.adapter_folder import TENSORS_NAME
from afm_mlx.adapters.task_mask import TaskMask, read_mask
from afm_mlx.training.pruning.mask_training import RecoveryTraining
from afm_mlx.training.pruning.prune import Pruning, prune
from tests.examples.conftest import EXAMPLES

sys.path.insert(0, str(EXAMPLES / "masks"))
import task_masks


def test_data_is_seeded_and_of_training_values(tmp_path, seed, drawn):
    for name in ("a", "b"):
        task_masks.write_data(tmp_path / name, "tag_topics", seed, 5)
    first, second = ((tmp_path / name / "train.jsonl").read_text() for name in ("a", "b"))
    assert first == second
    assert len(first.splitlines()) == 5
    assert drawn["train"]
    assert not drawn["test"]
    record = json.loads(first.splitlines()[0])
    assert record["messages"][-1]["role"] == "assistant"


def test_a_random_mask_has_the_same_size(rng):
    kept = rng.random((4, 50)) < 0.5
    kept[:, 0] = True
    mask = TaskMask(kept, 16)
    drawn = task_masks.random_mask(mask, 0)
    assert drawn.widths == mask.widths
    assert not np.array_equal(drawn.kept, mask.kept)
    assert np.array_equal(drawn.kept, task_masks.random_mask(mask, 0).kept)


@pytest.mark.slow
def test_half_of_the_channels_with_recovery_are_as_good_on_their_own_task_only(tmp_path):
    task, options = "tag_topics", {"examples": 300, "steps": 20, "questions": 20}
    argv = ["--out", str(tmp_path), "--only", task, "--compared", task]
    argv += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    task_masks.main(argv)
    found = json.loads((tmp_path / "report.json").read_text())
    own, drawn = (
        {step: found[task_masks.name_of(task, kind, step)][task] for step in (0, 5, 10, 20)}
        for kind in (task_masks.OF_TASK, task_masks.RANDOM)
    )
    whole = found[task_masks.WHOLE]
    assert own[20] >= whole[task] - 0.05  # one answer of twenty
    assert own[0] > drawn[0] + 0.3
    assert drawn[0] < whole[task] - 0.3
    others = found[f"{task_masks.ELSEWHERE} {task}"]
    assert len(others) == 6
    assert sum(others.values()) / 6 < 0.3
    made = task_masks.folder_of(tmp_path, task, task_masks.OF_TASK)
    mask = read_mask(made / "step-20")
    assert mask.share == 0.5
    assert mask.fingerprint == read_mask(made / "step-0").fingerprint
    for name in ("accuracy.png", "steps.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert f"| {task} |" in (tmp_path / "tables.md").read_text()
    before = (tmp_path / "report.json").stat().st_mtime_ns
    task_masks.main(argv)
    assert (tmp_path / "report.json").stat().st_mtime_ns == before


@pytest.mark.slow
def test_the_recovery_is_what_prune_trains(tmp_path):
    """The same mask and the same numbers as `prune`, which makes both from the same recipe."""
    task = "tag_topics"
    task_masks.write_data(tmp_path / "data" / task, task, 0, 12)
    args = argparse.Namespace(out=tmp_path, seed=0, examples=12, steps=2, compared=[])
    report = task_masks.Report(tmp_path, 1)
    task_masks.run(report, args, task, task_masks.OF_TASK)
    recipe = task_masks.recipe_of(tmp_path / "data" / task, 0, 2, packing=None)
    pruning = Pruning(criterion="gradient", score_batches=task_masks.SCORE_BATCHES)
    prune(recipe, tmp_path / "pruned", pruning, RecoveryTraining(rank=task_masks.RANK))
    made = task_masks.folder_of(tmp_path, task, task_masks.OF_TASK) / "step-2"
    assert read_mask(made).fingerprint == read_mask(tmp_path / "pruned").fingerprint
    first, second = (mx.load(str(each / TENSORS_NAME)) for each in (made, tmp_path / "pruned"))
    assert first.keys() == second.keys()
    assert all(mx.array_equal(first[name], second[name]).item() for name in first)
