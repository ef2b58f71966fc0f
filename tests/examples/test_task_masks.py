"""The script that makes and measures task masks: its data, its random masks, and a whole run."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from afm_mlx.adapters.task_mask import TaskMask, read_mask
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
    task = "tag_topics"
    argv = [
        "--out",
        tmp_path,
        "--only",
        task,
        "--examples",
        "300",
        "--iters",
        "40",
        "--limit",
        "20",
    ]
    assert task_masks.main([str(word) for word in argv]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    mask = read_mask(task_masks.folder_of(tmp_path, task, 0.5))
    assert mask.share == 0.5
    again = task_masks.masks_of(tmp_path / "data" / task, [0.5], 0)[0]
    assert np.array_equal(again.kept, mask.kept)
    whole, own = report[task_masks.WHOLE], report[f"{task_masks.RECOVERED} {task} 0.5"]
    assert own[task] >= whole[task] - 0.05  # one answer of twenty
    others = [whole[name] - own[name] for name in whole if name != task]
    assert sum(others) / len(others) > 0.3
    assert report[f"{task_masks.RANDOM} {task} 0.5"][task] < whole[task] - 0.3
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert f"| `{task}` |" in (tmp_path / "table.md").read_text()
