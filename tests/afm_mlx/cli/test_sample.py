"""`afm-mlx sample`: files of pairs, winners and answers, figures, and runs that are interrupted."""

import json

import pytest

from afm_mlx.measure import committee
from afm_mlx.measure.reward_model import RewardModel
from afm_mlx.measure.rewards import Answered
from tests.tools.cli import answer, lines

PROMPTS = [{"prompt": "A list", "id": 1}, {"messages": [{"role": "user", "content": "A cat"}]}]


@pytest.fixture
def prompts(tmp_path):
    return lines(tmp_path / "prompts.jsonl", *PROMPTS)


@pytest.fixture
def length(tmp_path):
    """A reward, and the file of its function."""
    (tmp_path / "mine.py").write_text(
        "def length(prompt, answer, sample):\n    print('seen')\n    return -len(answer)\n"
    )
    return f"{tmp_path / 'mine.py'}:length"


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_pairs_winners_and_answers(folder, run, make_adapter, prompts, length, tmp_path):
    adapter = make_adapter("mine")
    outputs = [tmp_path / f"{name}.jsonl" for name in ("pairs", "winners", "answers")]
    argv = [
        "--committee",
        "base",
        adapter,
        "--samples",
        1,
        "--temp",
        0,
        "-m",
        12,
        "--rewards",
        length,
    ]
    argv += ["--pairs-to", outputs[0], "--winners-to", outputs[1], "--answers-to", outputs[2]]
    status, out, err = run("sample", "--model", folder, "--data", prompts, *argv)
    assert status == 0
    assert set(err.split()) == {"seen"}
    assert "4 answers were cut off, and can't win" in out
    pairs, winners, answers = map(records, outputs)
    assert [line["answers"][0]["answer"] for line in answers] == [
        answer(folder, "A list"),
        answer(folder, "A cat"),
    ]
    assert [a["adapter"] for a in answers[0]["answers"]] == ["base", str(adapter)]
    assert answers[0]["id"] == 1
    for line in answers:
        for each in line["answers"]:
            assert each["reward"] == -len(each["answer"])
            assert each["tokens"] == 12
    # All were cut off, and an answer without an end is no example.
    assert pairs == winners == []
    assert "2 prompts have no pair, 2 no winner" in out
    again = ["--pairs-from", outputs[2], "--rewards", length, "--winners-to", tmp_path / "again"]
    status, out, _ = run("sample", *again)
    assert status == 0
    assert "4 answers were cut off, and can't win" in out
    assert records(tmp_path / "again") == []


def test_pairs_from_answers(done, tmp_path):
    given = lines(
        tmp_path / "given.jsonl",
        {"prompt": "p", "answer": "4", "answers": ["four", "4", "vier"]},
        {"prompt": "q", "answer": "5", "answers": ["six", "seven"]},
        {"prompt": "r", "answer": "5", "answers": ["5", "5"]},
    )
    pairs, winners = tmp_path / "pairs.jsonl", tmp_path / "winners.jsonl"
    argv = ["--pairs-from", given, "--verify", "exact", "--winners-to", winners]
    figures = json.loads(done("sample", *argv, "--pairs-to", pairs, "--json"))
    assert records(pairs) == [{"prompt": "p", "chosen": "4", "rejected": "four"}]
    assert [line["completion"] for line in records(winners)] == ["4", "5"]
    assert (figures["without_a_pair"], figures["without_a_winner"]) == (2, 1)
    assert (figures["lines_pairs"], figures["lines_winners"]) == (1, 2)
    assert figures["best_of_all"] == pytest.approx(2 / 3)
    assert figures["adapters"]["all"]["reward"] == pytest.approx((1 / 3 + 0 + 1) / 3)


def test_a_reward_adapter_ranks_given_answers(folder, run, reward_adapter, tmp_path):
    given = [
        {"prompt": "A list", "answers": ["one", "two", "three"]},
        {"messages": [{"role": "user", "content": "A cat"}], "answers": ["four", "five"]},
    ]
    ranked = tmp_path / "ranked.jsonl"
    argv = ["--pairs-from", lines(tmp_path / "given.jsonl", *given), "--rewards", reward_adapter]
    status, _, err = run("sample", "--model", folder, *argv, "--answers-to", ranked)
    assert (status, err) == (0, "")
    scores = RewardModel.load(folder, reward_adapter)
    for line, sample in zip(records(ranked), given, strict=True):
        wanted = scores.of_all([Answered("", text, sample) for text in sample["answers"]])
        assert [each["reward"] for each in line["answers"]] == pytest.approx(wanted, rel=1e-4)


def test_an_interrupted_run_continues(folder, run, prompts, length, tmp_path, monkeypatch):
    argv = [
        "sample",
        "--model",
        folder,
        "--data",
        prompts,
        "--samples",
        2,
        "-m",
        5,
        "--rewards",
        length,
    ]
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    assert run(*argv, "--answers-to", whole)[0] == 0

    sample_answers, begun = committee.sample_answers, []

    def interrupted(*args, chosen, **options):
        begun.append(chosen)
        for answers in sample_answers(*args, chosen=chosen, **options):
            yield answers
            if len(begun) == 1:
                raise KeyboardInterrupt

    monkeypatch.setattr(committee, "sample_answers", interrupted)
    status, out, err = run(*argv, "--answers-to", part)
    assert (status, out) == (130, "")
    assert "the same command continues" in err
    assert not part.exists()
    status, out, err = run(*argv, "--answers-to", part)
    assert status == 0
    assert "has answers to 1 prompts" in err
    assert begun == [[0, 1], [1]]
    assert "seen" not in out
    assert part.read_text() == whole.read_text()
    assert not list(tmp_path.glob("answers-*"))


def test_what_is_refused(folder, fails, prompts, tmp_path):
    there = tmp_path / "there.jsonl"
    there.touch()
    model, exact = ("sample", "--model", folder), ("--rewards", "exact")
    data, pairs = ("--data", prompts), ("--pairs-to", tmp_path / "pairs.jsonl")
    for problem, argv in {
        "no prompts are given": (*exact, *pairs),
        "--rewards or --verify is needed": (*data, *pairs),
        "--reward-weights needs --rewards": (
            *data,
            *pairs,
            "--verify",
            "exact",
            "--reward-weights",
            1,
        ),
        "nothing is to be written": (*data, *exact),
        "exists already": (*data, *exact, "--pairs-to", there),
        "two outputs have one name": (*data, *exact, *pairs, "--winners-to", pairs[1]),
        "--data and --pairs-from both say": (*data, *exact, *pairs, "--pairs-from", prompts),
        "at --temp 0 all answers": (*data, *exact, *pairs, "--temp", 0),
        "names base more than once": (*data, *exact, *pairs, "--committee", "base", "base"),
        "There is no adapter 'none'": (*data, *exact, *pairs, "--committee", "none"),
        "There is no reward 'exactly'": (*data, *pairs, "--rewards", "exactly"),
        "2 weights for 1 rewards": (*data, *exact, *pairs, "--reward-weights", 1, 2),
        "--samples is for answers that are sampled": (
            *exact,
            *pairs,
            "--pairs-from",
            prompts,
            "--samples",
            2,
        ),
        "'answers' is None": (*exact, *pairs, "--pairs-from", prompts),
        "exact raised RewardError": (*data, *exact, *pairs, "-m", 2),
    }.items():
        assert problem in fails(*model, *argv)
    assert not pairs[1].exists()
