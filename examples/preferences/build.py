"""Teach the embedded model to answer briefly, by 300 preferences, and measure what that changes.

    python examples/preferences/build.py --out OUT --seed 0 [--objective dpo]
    python examples/preferences/build.py --out OUT --seed 0 --choose 12 16 20 24 28

Data of `short_answers.py` as JSONL, one `afm-mlx lora`, its test on held-out pairs, and a table: tokens of the
greedy answers to the held-out prompts, and right answers to 200 held-out chats of each of the seven tasks that
the model knew before. A finished adapter is kept from an earlier run. It needs tamm (pip install '.[tamm]').

`--choose` compares numbers of steps by data that the table is not made of: the prompts of valid.jsonl, and
other chats of the seven tasks.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import afm_mlx  # isort: skip

from short_answers import pairs
from tasks import test_samples

from afm_mlx import cli
from afm_mlx.adapters.adapter_folder import CONFIG_NAME
from afm_mlx.files import atomic_write
from afm_mlx.measure.evaluation import evaluate, load_examples

SIZES = {"train": 300, "valid": 40, "test": 100}
_TRAINING = (
    "lora --model afm-nano --objective {objective} --data {data} --adapter-path {adapter} --seed {seed} "
    "--rank 8 --iters {iters} --learning-rate 1e-3 --batch-size 8 --steps-per-eval 20 --val-batches -1"
)
_CHATS = 200  # of each task


def main(argv: Sequence[str] | None = None) -> int:
    """Make what is missing, print the table, and return the exit status of the training."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for all that is made")
    parser.add_argument("--seed", type=int, default=0, help="of data and training")
    parser.add_argument("--objective", default="dpo", help="see afm-mlx lora --help")
    parser.add_argument("--iters", type=int, default=28, help="training steps of 8 pairs")
    parser.add_argument("--choose", type=int, nargs="+", help="numbers of steps to compare")
    parser.add_argument("--limit", type=int, help="held-out prompts, and examples of each task")
    args = parser.parse_args(argv)

    data = args.out / "data"
    data.mkdir(parents=True, exist_ok=True)
    for split, count in SIZES.items():
        _write_lines(data / f"{split}.jsonl", pairs(args.seed, split, count))
    split, draw = ("test", 0) if args.choose is None else ("valid", args.seed + 1)
    examples = args.out / f"tasks-{split}.jsonl"
    _write_lines(examples, test_samples(draw, _CHATS))
    columns = {"no adapter": measure(data / f"{split}.jsonl", examples, None, args.limit)}
    for iters in args.choose or [args.iters]:
        adapter = args.out / f"{args.objective}-{iters}"
        if status := _train(args, data, adapter, iters):
            return status
        found = measure(data / f"{split}.jsonl", examples, adapter, args.limit)
        columns[f"{iters} steps"] = found
    print(f"| | {' | '.join(columns)} |\n| --- |{' ---: |' * len(columns)}")
    for name in columns["no adapter"]:
        print(f"| {name} | {' | '.join(f'{found[name]:.1f}' for found in columns.values())} |")
    return 0


def _train(args: argparse.Namespace, data: Path, adapter: Path, iters: int) -> int:
    """Train an adapter that is missing, test it on held-out pairs, and return the exit status.

    With `--choose` it is not tested, because the held-out pairs must not choose the steps.
    """
    if not (adapter / CONFIG_NAME).is_file():
        given = {"data": data, "adapter": adapter, "seed": args.seed}
        given |= {"objective": args.objective, "iters": iters}
        argv = [part.format(**given) for part in shlex.split(_TRAINING)]
        if (adapter / "run" / "run.json").exists():
            argv.append("--resume")
        start = time.perf_counter(), time.process_time()
        status = cli.main(argv)
        if status:
            return status
        wall, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
        print(f"Trained in {wall:.0f} s, {cpu:.0f} s of processor time")
    if args.choose is not None:
        return 0
    test = ["lora", "--objective", args.objective, "--test", "--data", str(data)]
    return cli.main([*test, "--adapter-path", str(adapter)])


def _write_lines(path: Path, records: Iterable[Any]) -> None:
    with atomic_write(path) as temporary:
        temporary.write_text("".join(json.dumps(record) + "\n" for record in records))


def measure(
    prompts: Path, examples: Path, adapter: Path | None, limit: int | None
) -> dict[str, float]:
    """Return the mean tokens of greedy answers to prompts, and right answers by task, in percent."""
    model, tokenizer = afm_mlx.load("afm-nano", adapter_path=adapter and str(adapter))
    records = [json.loads(line) for line in prompts.open()][:limit]
    chats = [[{"role": "user", "content": record["prompt"]}] for record in records]
    asked = [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in chats]
    answers = afm_mlx.batch_generate(model, tokenizer, asked, max_tokens=100).texts
    lengths = [len(tokenizer.encode(answer)) for answer in answers]
    tasks = evaluate(model, tokenizer, load_examples(examples, limit)).tasks
    right = {task: 100 * score.accuracy for task, score in tasks.items()}
    total = {"seven tasks, % right": mean(right.values())}
    return {"tokens of an answer": mean(lengths), **right, **total}


if __name__ == "__main__":
    sys.exit(main())
