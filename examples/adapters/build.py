"""Train, measure and package the three adapters of the embedded model.

    python examples/adapters/build.py --out OUT --seed 0

For each task of `inbox.py`: data as JSONL, one `afm-mlx lora`, a folder with a card in `OUT/adapters`;
then one table of what every adapter does on every task. Run it again to go on where it was interrupted; to make
an adapter again, remove its folders in `OUT/runs` and `OUT/adapters`.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import inbox
from card import write_card
from measure import markdown, measure, write_lines

from afm_mlx import cli
from afm_mlx.adapters.adapter_folder import CONFIG_NAME, TENSORS_NAME
from afm_mlx.files import atomic_folder, atomic_write

EXAMPLES = 1000
STEPS = {"redact": 300, "todo": 350, "triage": 300}
_VALID, _TEST = 64, 200
_SHIPPED = 24  # held-out examples in an adapter's folder

# Attention, and the layer behind it that writes: half the numbers of all linear layers. A run on attention
# alone, a third of them, with 800 examples and 250 steps, got every sixth message of `triage` wrong.
_TRAINING = (
    "lora --model afm-nano --data {data} --adapter-path {run} --seed {seed} "
    "--keys self_attn.qkv_proj self_attn.q_proj self_attn.out_proj mlp.down_proj "
    "--rank 16 --alpha 16 --iters {iters} --learning-rate 5e-3 --batch-size 16 --no-packing "
    "--max-seq-length 512 --steps-per-eval 50 --save-every 50 --val-batches -1"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Make what is missing, print the table, and return the exit status of the first command that fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for all that is made")
    parser.add_argument("--seed", type=int, default=0, help="of data and training")
    parser.add_argument("--only", nargs="+", choices=list(inbox.TASKS), help="some of the tasks")
    parser.add_argument("--examples", type=int, default=EXAMPLES, help="training chats of a task")
    parser.add_argument("--iters", type=int, help="training steps of 16 chats, 300 to 350")
    args = parser.parse_args(argv)

    tasks = args.only or list(inbox.TASKS)
    for task in tasks:
        write_data(args.out / "data" / task, task, args.seed, args.examples)
        status = train(args.out, task, args.seed, args.iters or STEPS[task])
        if status:
            return status
    write_test_sets(args.out, args.seed)
    folders = {task: package(args.out, task) for task in tasks}
    figures = measure(args.out, folders)
    for task, folder in folders.items():
        write_card(folder, task, args.examples, _TEST, figures)
    with atomic_write(args.out / "table.md") as path:
        path.write_text(markdown(figures))
    print(f"\n{markdown(figures)}")
    return 0


def write_data(folder: Path, task: str, seed: int, count: int) -> None:
    """Write a task's data folder, unless it is there: `count` training chats, and a few for validation."""
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(folder) as made:
        for split, chats in (("train", count), ("valid", _VALID)):
            drawn = islice(inbox.training_chats(task, seed, split), chats)
            write_lines(made / f"{split}.jsonl", ({"messages": messages} for messages in drawn))


def write_test_sets(out: Path, seed: int) -> None:
    """Write held-out chats: single questions, and chats in which adapters take turns."""
    examples = [each for task in inbox.TASKS for each in inbox.test_examples(task, seed, _TEST)]
    write_lines(out / "evaluation.jsonl", examples)
    chats = inbox.switching_examples(seed, _TEST)
    for task in inbox.TASKS:
        own = [example for chat in chats for example in chat if example["task"] == task]
        write_lines(out / f"switching-{task}.jsonl", own)


def train(out: Path, task: str, seed: int, iters: int) -> int:
    """Train a task's adapter unless that is done; return the exit status of `afm-mlx lora`."""
    run = out / "runs" / task
    if (run / TENSORS_NAME).is_file():
        print(f"{run} exists", flush=True)
        return 0
    argv = command(out, task, seed, iters)
    if (run / "run" / "run.json").is_file():
        argv.append("--resume")
    print(f"\n$ afm-mlx {shlex.join(argv)}", flush=True)
    return cli.main(argv)


def command(out: Path, task: str, seed: int, iters: int) -> list[str]:
    """Return the arguments of `afm-mlx` that train a task's adapter."""
    values = {"data": out / "data" / task, "run": out / "runs" / task, "seed": seed, "iters": iters}
    return [word.format(**values) for word in shlex.split(_TRAINING)]


def package(out: Path, task: str) -> Path:
    """Make the folder that ships, unless it is there: the adapter and a few held-out examples; return it."""
    folder = out / "adapters" / task
    if not folder.is_dir():
        folder.parent.mkdir(exist_ok=True)
        with atomic_folder(folder) as made:
            for name in (TENSORS_NAME, CONFIG_NAME):
                shutil.copy(out / "runs" / task / name, made)
            lines = (out / "evaluation.jsonl").read_text().splitlines(keepends=True)
            own = [line for line in lines if line.startswith(f'{{"task":"{task}"')]
            (made / "evaluation.jsonl").write_text("".join(own[:_SHIPPED]))
    return folder


if __name__ == "__main__":
    sys.exit(main())
