"""Train an adapter of the embedded model that judges, and measure what the calculator adds to it.

    python examples/preferences/judge_sums.py --out OUT --seed 0

The embedded model can't add. Its adapter learns to assess which tools are useful for an answer and to decide
between two answers, half of the time with the tools' reports and half of the time without. Then it judges 200
pairs of sums, one of each wrong, whose numbers do not occur in training, without tools and with them.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from afm_mlx import cli
from afm_mlx.measure.judge_tools import TOOLS
from afm_mlx.measure.pairwise import (
    FIRST,
    SECOND,
    Answer,
    Question,
    assessment,
    decision,
)

PAIRS = 200
TOPICS = ("the harbour", "a garden", "old maps", "the night train", "winter", "a kitchen")
_USED = {name: TOOLS[name] for name in ("math", "count")}
_TRAINING = (
    "lora --model afm-nano --data {data} --adapter-path {run} --seed {seed} --rank 16 --alpha 16 "
    "--iters {iters} --batch-size 2 --learning-rate 2e-3 --warmup-iters 20 --steps-per-eval 60 "
    "--val-batches -1 --save-every 60"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the data, train the adapter, and print both judgements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for all that is made")
    parser.add_argument("--seed", type=int, default=0, help="of data and training")
    parser.add_argument("--iters", type=int, default=240, help="training steps of 2 packed rows")
    args = parser.parse_args(argv)
    write_data(args.out, args.seed)
    run = args.out / "judge"
    values = {"data": args.out / "data", "run": run, "seed": args.seed, "iters": args.iters}
    commands = [_TRAINING.format(**{k: shlex.quote(str(v)) for k, v in values.items()})]
    for tools in ("", "--tools math count"):
        files = " ".join(shlex.quote(str(args.out / f"{name}.jsonl")) for name in "ab")
        judge = f"--judge afm-nano --judge-adapter {shlex.quote(str(run))}"
        commands.append(f"evaluate --pairwise {files} {judge} {tools}")
    for command in commands:
        print(f"$ afm-mlx {command}", flush=True)
        if status := cli.main(shlex.split(command)):
            return status
    return 0


def write_data(out: Path, seed: int) -> None:
    """Write the training questions, and the answers a.jsonl (right sums) and b.jsonl (wrong ones)."""
    (out / "data").mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    numbers = [(x, y) for x in range(11, 100) for y in range(11, 100)]
    rng.shuffle(numbers)
    held_out, known = numbers[:PAIRS], numbers[PAIRS:]
    for name, is_right in (("a", True), ("b", False)):
        answers = (sum_answer(*pair, is_right, random.Random(f"{seed}{pair}")) for pair in held_out)
        _write(out / f"{name}.jsonl", answers)
    for split, count in (("train", 1500), ("valid", 60)):
        chats = (_chat(rng, known) for _ in range(count))
        _write(out / "data" / f"{split}.jsonl", chats)


def sum_answer(x: int, y: int, is_right: bool, rng: random.Random) -> dict[str, Any]:
    """Return a line with a question for a sum or difference, and a right or wrong answer."""
    sign, value = rng.choice((("+", x + y), ("-", x - y)))
    off = rng.choice((-10, -2, -1, 1, 2, 10))
    claim = f"{x} {sign} {y} = {value if is_right else value + off}"
    text = rng.choice(("{}", "The result: {}.", "We compute {}", "So {}, I think."))
    asked = rng.choice(("What is {}?", "Compute {}.", "How much is {}?"))
    return {"prompt": asked.format(f"{x} {sign} {y}"), "answer": text.format(claim)}


def length_answer(words: int, most: int, topic: str, rng: random.Random) -> dict[str, Any]:
    """Return a line with a request for a short text, and an answer of a number of words."""
    text = " ".join(
        rng.choice(("grey", "quiet", "door", "light", "we", "see")) for _ in range(words)
    )
    return {"prompt": f"Write about {topic} in at most {most} words.", "answer": text}


def _answer(line: dict[str, Any]) -> Answer:
    return Answer([{"role": "user", "content": line["prompt"]}], line["answer"], None, "")


def _chat(rng: random.Random, numbers: list[tuple[int, int]]) -> dict[str, Any]:
    """Return a question for a judge, with the answer that it learns."""
    if is_sum := rng.random() < 0.75:
        drawn = rng.choice(numbers)
        key = rng.random()
        good, bad = (
            _answer(sum_answer(*drawn, right, random.Random(key))) for right in (True, False)
        )
    else:
        most, topic = rng.randint(5, 12), rng.choice(TOPICS)
        lengths = rng.randint(1, most), most + rng.randint(1, 8)
        good, bad = (_answer(length_answer(words, most, topic, rng)) for words in lengths)
    useful = "math" if is_sum else "count"
    if rng.random() < 0.3:
        said: dict[str, Any] = {name: name == useful for name in _USED}
        return _taught(assessment(rng.choice((good, bad)), _USED), said)
    sides = []
    has_reports = rng.random() < 0.6
    for answer in (good, bad):
        report = _USED[useful].report(answer.text, None) if has_reports else None
        sides.append((answer, {useful: report} if report else {}))
    is_first = rng.random() < 0.5
    first, second = sides if is_first else reversed(sides)
    return _taught(decision(first, second), {"better": FIRST if is_first else SECOND})


def _taught(question: Question, said: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [*question.messages, {"role": "assistant", "content": json.dumps(said)}]}


def _write(path: Path, lines: Any) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
