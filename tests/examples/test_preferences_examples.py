"""The examples of a judge and a reward model: their data, and, slowly, what they show."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from afm_mlx.measure.judge_tools import check_sums
from afm_mlx.measure.pairwise import load_answer_pairs

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "preferences"))
import judge_sums
import reward_order


def records(path):
    return [json.loads(line) for line in path.open()]


def test_the_judges_pairs_have_one_wrong_sum_each_which_training_lacks(tmp_path, seed):
    judge_sums.write_data(tmp_path, seed)
    pairs, unmatched = load_answer_pairs(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert (len(pairs), unmatched) == (judge_sums.PAIRS, (0, 0))
    for pair in pairs:
        assert check_sums(pair.a.text).startswith("right: ")
        assert check_sums(pair.b.text).startswith("wrong: ")
    chats = records(tmp_path / "data" / "train.jsonl")
    asked = [chat["messages"][0]["content"] for chat in chats]
    kinds = {"assess": 0, "with reports": 0, "without": 0}
    for text in asked:
        kind = "assess" if text.startswith("An answer will") else "without"
        kinds["with reports" if "Checks of the" in text else kind] += 1
    assert min(kinds.values()) > 200
    held_out = {pair.a.messages[0]["content"].rstrip("?.").split(" ", 1)[1] for pair in pairs}
    assert not any(f" {each}" in text for each in held_out for text in asked)
    said = [chat["messages"][1]["content"] for chat in chats]
    firsts = said.count('{"better": "first"}') / sum("better" in each for each in said)
    assert 0.4 < firsts < 0.6


def test_strengths_follow_the_scores_and_some_weak_pairs_are_turned_around(tmp_path, seed):
    texts = reward_order.write_data(tmp_path, seed, 2000)
    soft, hard = (records(tmp_path / f"data-{kind}" / "train.jsonl") for kind in ("soft", "hard"))
    assert [{k: v for k, v in line.items() if k != "strength"} for line in soft] == hard
    known = {line[side] for line in soft for side in ("chosen", "rejected")}
    assert len(texts) == 200
    assert not known & set(texts)
    # Values of words, found again from the pairs that are sure.
    words = reward_order.WORDS
    sure = [line for line in soft if line["strength"] == "significantly better"]
    counts = np.array(
        [
            [line["chosen"].count(word) - line["rejected"].count(word) for word in words]
            for line in sure
        ]
    )
    values = np.linalg.lstsq(counts, np.ones(len(sure)), rcond=None)[0]
    scores = [sum(values[words.index(w)] for w in text.split()) for text in texts]
    assert reward_order.spearman(np.array(scores), np.array(list(texts.values()))) > 0.9
    weak = [line for line in soft if line["strength"] in reward_order.WEAK]
    assert 200 < len(weak) < 1900


@pytest.mark.parametrize(
    ("first", "second", "rank"), [([1, 2, 9], [3, 4, 5], 1), ([1, 2, 3], [3, 2, 1], -1)]
)
def test_rank_correlation(first, second, rank):
    assert reward_order.spearman(np.array(first), np.array(second)) == pytest.approx(rank)


@pytest.mark.slow
def test_tools_make_a_judge_of_a_model_that_cannot_add(tmp_path, capsys):
    assert judge_sums.main(["--out", str(tmp_path)]) == 0
    rates = [
        float(line.partition("ties: ")[2].partition("%")[0])
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("A's win rate")
    ]
    without, with_tools = rates
    assert 35 < without < 65
    assert with_tools >= 95


@pytest.mark.slow
def test_a_reward_model_finds_the_order_and_soft_labels_beat_hard_ones(tmp_path):
    assert reward_order.main(["--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["soft"]["spearman"] >= 0.95
    assert found["soft"]["spearman"] > found["hard"]["spearman"]
    assert found["soft"]["right_order"] > found["hard"]["right_order"]
