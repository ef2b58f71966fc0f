"""Let three adapters answer as a committee, and train one adapter on the committee's best answers (iTeC).

    python examples/preferences/committee.py --out OUT --seed 0

Each member of the committee has seen one way to write about events (`event_task.py`). Prompts in all ways,
without right answers, then go to all three; a reward ranks the answers to each prompt; and a new adapter learns
from the winners. All figures are exact matches on held-out prompts, whose values occur nowhere else. Run it
again to go on where it was interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from event_task import WAYS, prompts

from afm_mlx import cli
from afm_mlx.files import atomic_folder, atomic_write
from afm_mlx.measure.evaluation import is_right

CHATS, STEPS = 120, 40  # of a member
PROMPTS, DISTILLATION_STEPS = 100, 120  # prompts of each way, for the committee
TEST = 60  # held-out prompts of each way
_REWARD = f"{Path(__file__).with_name('event_task.py')}:grounded"
_TRAINING = (
    "--keys self_attn.qkv_proj self_attn.q_proj self_attn.out_proj mlp.down_proj --rank 16 --alpha 16 "
    "--learning-rate 5e-3 --batch-size 8 --no-packing --max-seq-length 512"
).split()


def main(argv: Sequence[str] | None = None) -> int:
    """Train the members, ask them, train on the winners, and print what each can do."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for all that is made")
    parser.add_argument("--seed", type=int, default=0, help="of data, training and answers")
    args = parser.parse_args(argv)
    out, seed, begun = args.out, args.seed, time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    test = [each for way in WAYS for each in islice(prompts(way, "test", seed), TEST)]
    write_lines(out / "test.jsonl", test)
    asked = [each for way in WAYS for each in islice(prompts(way, "train", seed + 1), PROMPTS)]
    unlabeled = [{key: each[key] for key in ("task", "messages")} for each in asked]
    write_lines(out / "prompts.jsonl", unlabeled)
    for way in WAYS:
        chats = [chat(each) for each in islice(prompts(way, "train", seed), CHATS)]
        train(out, way, chats, STEPS, seed)
    print(f"members: {time.perf_counter() - begun:.0f} s", flush=True)

    members = [str(out / "runs" / way) for way in WAYS]
    figures = {way: answered(out, f"member-{way}", [str(out / "runs" / way)], test) for way in WAYS}
    figures["committee"] = answered(out, "committee", members, test)
    best = max(WAYS, key=lambda way: figures[way])
    three = ["--samples", "3", "--temp", "1", "--seed", str(seed)]
    alone = [str(out / "runs" / best)]
    figures[f"{best}, best of 3"] = answered(out, "best-of-3", alone, test, three)

    winners = out / "winners.jsonl"
    if not winners.exists():
        run("sample", "--data", out / "prompts.jsonl", "--committee", *members, *three[2:],
            "--samples", "2", "--verify", _REWARD, "--winners-to", winners, "--max-tokens", "96")  # fmt: skip
    chats = [json.loads(line) for line in winners.read_text().splitlines()]
    train(out, "distilled", chats, DISTILLATION_STEPS, seed)
    figures["distilled"] = answered(out, "distilled", [str(out / "runs" / "distilled")], test)
    print(
        f"{len(chats)} winners of {len(asked)} prompts; {time.perf_counter() - begun:.0f} s in all"
    )
    width = max(map(len, figures))
    for name, share in figures.items():
        print(f"{name:<{width}}  {share:6.1%}")
    return 0


def answered(
    out: Path,
    name: str,
    adapters: Sequence[str],
    test: Sequence[dict[str, Any]],
    sampling: Sequence[str] = ("--samples", "1", "--temp", "0"),
) -> float:
    """Return the share of held-out prompts whose best answer, as the reward ranks them, is right."""
    answers = out / f"answers-to-test-{name}.jsonl"
    if not answers.exists():
        run("sample", "--data", out / "test.jsonl", "--committee", *adapters, *sampling,
            "--rewards", _REWARD, "--answers-to", answers, "--max-tokens", "96")  # fmt: skip
    right = 0
    for line, example in zip(answers.read_text().splitlines(), test, strict=True):
        best = max(json.loads(line)["answers"], key=lambda each: each["reward"])
        right += is_right(best["answer"], example["answer"], "json")
    return right / len(test)


def chat(example: dict[str, Any]) -> dict[str, Any]:
    answer = {"role": "assistant", "content": example["answer"]}
    return {"messages": [*example["messages"], answer]}


def train(out: Path, name: str, chats: Sequence[dict[str, Any]], steps: int, seed: int) -> None:
    """Train an adapter on chats, unless it is there."""
    adapter, data = out / "runs" / name, out / "data" / name
    if (adapter / "adapters.safetensors").exists():
        return
    if not data.exists():
        with atomic_folder(data) as made:
            write_lines(made / "train.jsonl", chats)
    resume = ["--resume"] if (adapter / "run" / "run.json").exists() else []
    run("lora", "--data", data, "--adapter-path", adapter, "--iters", str(steps), "--seed", str(seed),
        *_TRAINING, *resume)  # fmt: skip


def run(*argv: object) -> None:
    """Run a command of afm-mlx; exit if it fails."""
    words = list(map(str, argv))
    print(f"\n$ afm-mlx {' '.join(words)}", flush=True)
    if status := cli.main(words):
        sys.exit(status)


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text("".join(f"{json.dumps(record)}\n" for record in records))


if __name__ == "__main__":
    sys.exit(main())
