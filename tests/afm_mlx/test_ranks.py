"""Ranks split items and commands, and end soon after one of them."""

import json
import signal
import time

import numpy as np
import pytest

from afm_mlx.cli import main
from afm_mlx.ranks import ALONE
from tests.tools.cli import lines, write_folder
from tests.tools.rank_worker import start_ranks

SPLIT = """
import json, os, signal, sys, time
import numpy as np
from afm_mlx.errors import ConfigError
from afm_mlx.ranks import RankLostError, join_ranks

ranks, found = join_ranks(), {}
for count in (7, 1, 0):
    seen = []
    values = ranks.each(range(count), lambda own: seen.extend(own) or [{"x": i / 3} for i in own])
    assert seen == list(range(ranks.rank, count, ranks.size)), seen
    rows = ranks.each_row(range(count), lambda own: np.outer(own, [1, 1 / 3, 1e-9]))
    assert rows.dtype == np.float32
    found[count] = [values, rows.tolist()]
with ranks.raising_when_lost():
    time.sleep(1.2)  # nobody has ended
try:
    ranks.check_alike({"rank": ranks.rank})
except ConfigError as error:
    found["differing"] = str(error)
print(json.dumps(found), flush=True)

def work(own):
    if ranks.rank == ranks.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        time.sleep(0.01)

try:
    ranks.each(range(4), work)
except RankLostError as error:
    print(error)
"""


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_items_are_split_and_ranks_end_together(tmp_path, size):
    running = start_ranks(tmp_path, size, ["-c", SPLIT])
    running[-1].wait(60)
    start = time.monotonic()
    texts = [process.communicate(timeout=60) for process in running]
    assert time.monotonic() - start < 10
    assert [process.returncode for process in running] == [0] * (size - 1) + [-signal.SIGKILL]
    for rank, (out, err) in enumerate(texts):
        found, *error = out.splitlines()
        found = json.loads(found)
        for count in (7, 1, 0):
            values, rows = found[str(count)]
            assert values == ALONE.each(range(count), lambda own: [{"x": i / 3} for i in own]), err
            wanted = np.outer(range(count), [1, 1 / 3, 1e-9]).astype(np.float32)
            assert rows == wanted.tolist()
        assert "rank is 1 on rank 1 and 0 on rank 0" in found["differing"]
        if rank < size - 1:
            assert error[0].startswith(f"Rank {rank} of {size} has lost another rank, whose own")


def test_one_process_has_all_items():
    assert ALONE.each([1, 2], lambda own: [i + 1 for i in own]) == [2, 3]
    assert ALONE.each_row([1, 2], lambda own: np.ones((2, 3))).shape == (2, 3)
    with ALONE.raising_when_lost():
        pass


COMMANDS = """
import json, os, sys
from afm_mlx.cli import main

for argv in json.loads(sys.argv[1]):
    if os.environ["MLX_RANK"] == "1":
        argv = [text.replace("--seed=1", "--seed=2") for text in argv]
    print("status", main(argv), flush=True)
    print("status", file=sys.stderr, flush=True)
"""


def test_commands_split_their_work(tmp_path, spm_bpe, rng, capsys):
    folder = write_folder(tmp_path / "model", spm_bpe, rng)
    lines(folder / "heldout.jsonl", *({"text": f"Document {i} of the fox."} for i in range(5)))
    data = [
        {"task": "t", "messages": [{"role": "user", "content": f"q {i}"}], "answer": "aaa"}
        for i in range(5)
    ]
    lines(tmp_path / "examples.jsonl", *data)
    (tmp_path / "texts.txt").write_text("a cat\nthe sea\ntax law\n")
    model = ["--model", str(folder)]
    evaluate = ["evaluate", *model, "--data", str(tmp_path / "examples.jsonl"), "--json"]
    lines(tmp_path / "prompts.jsonl", *({"prompt": f"q {i}"} for i in range(3)))
    reward = "def length(prompt, answer, sample):\n    return -len(answer)\n"
    (tmp_path / "mine.py").write_text(reward)
    sample = ["sample", *model, "--data", str(tmp_path / "prompts.jsonl"), "--samples", "2"]
    sample += ["-m", "9", "--rewards", f"{tmp_path / 'mine.py'}:length", "--json", "--answers-to"]
    measured = [
        [*sample, str(tmp_path / "answers.jsonl")],
        ["perplexity", *model, "--json"],
        [*evaluate, "--show-errors", "9"],
        ["embed", *model, str(tmp_path / "texts.txt")],
        ["embed", *model, str(tmp_path / "texts.txt"), "--center", "--dimensions", "5"],
    ]
    refused = [
        ["perplexity", *model, "--seed=1"],
        ["embed", *model, "-"],
        ["evaluate", *model, "--reward", "x"],
        ["sample", "--pairs-from", "x", "--verify", "x", "--json"],
    ]
    running = start_ranks(tmp_path, 2, ["-c", COMMANDS, json.dumps(measured + refused)])
    (out, err), (other_out, other_err) = (p.communicate(timeout=120) for p in running)
    statuses = [0] * len(measured) + [2] * len(refused)
    assert [int(line.split()[1]) for line in other_out.splitlines()] == statuses, other_err
    for text in (err, other_err):
        *_, first, second, third, fourth, rest = text.split("status\n")
        assert "The ranks differ: the command is " in first
        assert "standard input can't be split over 2 ranks" in second
        assert "--reward needs a single process, and this run has 2 ranks" in third
        assert "--pairs-from needs a single process, and this run has 2 ranks" in fourth
        assert not rest
    answers = (tmp_path / "answers.jsonl").read_text()
    assert len(answers.splitlines()) == 3
    (tmp_path / "answers.jsonl").unlink()
    for argv, got in zip(measured, out.split("status 0\n"), strict=False):
        assert main(argv) == 0
        assert_alike(values_of(got), values_of(capsys.readouterr().out))
    assert (tmp_path / "answers.jsonl").read_text() == answers


def values_of(output):
    """The JSON values of an output: one over several lines, or one in each line."""
    texts = [output] if output.startswith("{\n") else output.splitlines()
    return [json.loads(text) for text in texts]


def assert_alike(got, wanted):
    """Raise unless values are equal, except times and the rounding of other batches."""
    if isinstance(wanted, dict):
        assert got.keys() == wanted.keys()
        for name in wanted.keys() - {"seconds", "tokens_per_second"}:
            assert_alike(got[name], wanted[name])
    elif isinstance(wanted, list):
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            assert_alike(one, other)
    elif isinstance(wanted, float):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)
    else:
        assert got == wanted
