"""Train, measure and package `search`, the adapter of the embedded model for embeddings.

    python examples/adapters/build_search.py --out OUT --seed 0

2,000 pairs of `questions.py` as JSONL, one `afm-mlx lora --objective contrastive`, and a folder with a card in
`OUT/adapters/search`. Run it again to go on where it was interrupted.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import questions

import afm_mlx
from afm_mlx import cli
from afm_mlx.adapters.adapter_folder import CONFIG_NAME, TENSORS_NAME, load_adapter
from afm_mlx.files import atomic_folder, atomic_write

SIZES = {"train": 2000, "valid": 100, "test": 200}
DIMENSIONS = (256, 128, 64)
STEPS = 160

_TEMPLATE = Path(__file__).with_name("search_card_template.md")
_TRAINING = (
    "lora --model afm-nano --objective contrastive --data {data} --adapter-path {run} --seed {seed} "
    "--keys self_attn.qkv_proj self_attn.q_proj self_attn.out_proj mlp.down_proj "
    "--rank 8 --alpha 8 --iters {iters} --learning-rate 3e-3 --batch-size 32 --steps-per-eval 20 "
    "--save-every 20 --val-batches -1"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Make what is missing, print the figures, and return the exit status of the training."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for all that is made")
    parser.add_argument("--seed", type=int, default=0, help="of data and training")
    parser.add_argument("--iters", type=int, default=STEPS, help="training steps of 32 pairs")
    args = parser.parse_args(argv)

    write_data(args.out / "data", args.seed)
    run = args.out / "run"
    if not (run / TENSORS_NAME).is_file():
        values = {"data": args.out / "data", "run": run, "seed": args.seed, "iters": args.iters}
        command = [word.format(**values) for word in shlex.split(_TRAINING)]
        if (run / "run" / "run.json").is_file():
            command.append("--resume")
        print(f"$ afm-mlx {shlex.join(command)}", flush=True)
        started = time.monotonic()
        if status := cli.main(command):
            return status
        print(f"Trained in {time.monotonic() - started:.0f} seconds")
    held_out = [json.loads(line) for line in (args.out / "data" / "test.jsonl").open()]
    before = {pooling: recalls(held_out, None, pooling) for pooling in ("last", "mean")}
    after = recalls(held_out, run)
    folder = args.out / "adapters" / "search"
    package(folder, run, before, after)
    print((folder / "README.md").read_text())
    return 0


def write_data(folder: Path, seed: int) -> None:
    """Write train.jsonl, valid.jsonl and test.jsonl into a folder, unless it is there."""
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(folder) as made:
        for split, count in SIZES.items():
            drawn = islice(questions.pairs(seed, split), count)
            text = "".join(json.dumps(pair) + "\n" for pair in drawn)
            (made / f"{split}.jsonl").write_text(text)


def recalls(
    held_out: Sequence[dict[str, Any]], adapter: Path | None, pooling: str | None = None
) -> list[float]:
    """Return for each of `DIMENSIONS` the share of queries whose positive is the most similar one."""
    model, tokenizer = afm_mlx.load("afm-nano")
    options = {"pooling": pooling}
    if adapter is not None:
        pool = afm_mlx.AdapterPool(model)
        pool.register("search", adapter)
        options |= {"adapters": pool, "adapter": "search"}
    queries = [pair["query"] for pair in held_out]
    texts = [pair["positive"] for pair in held_out]
    found = []
    for n in DIMENSIONS:
        asked = afm_mlx.embed(model, tokenizer, queries, queries=True, dimensions=n, **options)
        there = afm_mlx.embed(model, tokenizer, texts, dimensions=n, **options)
        best = (asked @ there.T).argmax(axis=1)
        found.append(float((best == range(len(texts))).mean()))
    return found


def package(
    folder: Path, run: Path, before: dict[str, list[float]], after: Sequence[float]
) -> None:
    """Write the folder that ships: the adapter, and a card with the figures."""
    _, config = load_adapter(run)
    rows = [(f"without it, `{pooling}`", figures) for pooling, figures in before.items()]
    rows.append(("with it", after))
    table = [f"| {name} | {' | '.join(f'{x:.1%}' for x in figures)} |" for name, figures in rows]
    pair, other = islice(questions.pairs(0, "test"), 2)
    values = {
        "QUERY": pair["query"],
        "POSITIVE": pair["positive"],
        "OTHER": other["positive"],
        "POOLING": config.embedding.pooling if config.embedding else "last",
        "HEAD": " | ".join(f"{n} numbers" for n in DIMENSIONS),
        "RULE": " | ".join("---:" for _ in DIMENSIONS),
        "TABLE": "\n".join(table),
        "TESTS": SIZES["test"],
        "EXAMPLES": f"{SIZES['train']:,}",
        "RANK": config.rank,
        "LAYERS": ", ".join(f"`{key}`" for key in config.keys),
        "KILOBYTES": round((run / TENSORS_NAME).stat().st_size / 1e3),
    }
    text = _TEMPLATE.read_text()
    for name, value in values.items():
        text = text.replace(f"@{name}@", str(value))
    folder.mkdir(parents=True, exist_ok=True)
    for name in (TENSORS_NAME, CONFIG_NAME):
        shutil.copy(run / name, folder)
    with atomic_write(folder / "README.md") as path:
        path.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
