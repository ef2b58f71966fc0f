"""Teach the embedded model to answer briefly, by 300 preferences, and measure what that changes.

    python examples/preferences/build.py --out OUT --seed 0 [--objective dpo]

Data of `short_answers.py` as JSONL, one `afm-mlx lora`, its test on held-out pairs, and a table: tokens of the
greedy answers to the held-out prompts, and right answers in the seven tasks that the model knew before. A
finished adapter is kept from an earlier run.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import afm_mlx  # isort: skip

from short_answers import pairs

from afm_mlx import cli
from afm_mlx.adapters.adapter_folder import CONFIG_NAME
from afm_mlx.files import atomic_write
from afm_mlx.loading.resolve import resolve_model
from afm_mlx.measure.evaluation import evaluate, load_examples

SIZES = {"train": 300, "valid": 40, "test": 100}
_TRAINING = (
    "lora --model afm-nano --objective {objective} --data {data} --adapter-path {adapter} --seed {seed} "
    "--rank 8 --iters {iters} --learning-rate 1e-3 --batch-size 8 --steps-per-eval 20 --val-batches -1"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Make what is missing, print the table, and return the exit status of the training."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for all that is made")
    parser.add_argument("--seed", type=int, default=0, help="of data and training")
    parser.add_argument("--objective", default="dpo", help="see afm-mlx lora --help")
    parser.add_argument("--iters", type=int, default=28, help="training steps of 8 pairs")
    parser.add_argument("--limit", type=int, help="held-out prompts, and examples of each task")
    args = parser.parse_args(argv)

    data, adapter = args.out / "data", args.out / args.objective
    data.mkdir(parents=True, exist_ok=True)
    for split, count in SIZES.items():
        records = [json.dumps(pair) + "\n" for pair in pairs(args.seed, split, count)]
        with atomic_write(data / f"{split}.jsonl") as path:
            path.write_text("".join(records))
    if not (adapter / CONFIG_NAME).is_file():
        given = {"data": data, "adapter": adapter, "seed": args.seed}
        given |= {"objective": args.objective, "iters": args.iters}
        argv = [part.format(**given) for part in shlex.split(_TRAINING)]
        if (adapter / "run" / "run.json").exists():
            argv.append("--resume")
        start = time.perf_counter(), time.process_time()
        status = cli.main(argv)
        if status:
            return status
        wall, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
        print(f"Trained in {wall:.0f} s, {cpu:.0f} s of processor time")
    cli.main(
        [
            *shlex.split(f"lora --objective {args.objective} --test --data {data}"),
            "--adapter-path",
            str(adapter),
        ]
    )
    before, after = (measure(data, path, args.limit) for path in (None, adapter))
    print("| | no adapter | adapter |\n| --- | ---: | ---: |")
    for name in before:
        print(f"| {name} | {before[name]:.1f} | {after[name]:.1f} |")
    return 0


def measure(data: Path, adapter: Path | None, limit: int | None) -> dict[str, float]:
    """Return the mean tokens of greedy answers to held-out prompts, and right answers by task, in percent."""
    model, tokenizer = afm_mlx.load("afm-nano", adapter_path=adapter and str(adapter))
    records = [json.loads(line) for line in (data / "test.jsonl").open()][:limit]
    chats = [[{"role": "user", "content": record["prompt"]}] for record in records]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in chats]
    answers = afm_mlx.batch_generate(model, tokenizer, prompts, max_tokens=100).texts
    lengths = [len(tokenizer.encode(answer)) for answer in answers]
    tasks = evaluate(
        model, tokenizer, load_examples(resolve_model("afm-nano") / "evaluation.jsonl", limit)
    ).tasks
    right = {task: 100 * score.accuracy for task, score in tasks.items()}
    total = {"seven tasks, % right": mean(right.values())}
    return {"tokens of an answer": mean(lengths), **right, **total}


if __name__ == "__main__":
    sys.exit(main())
