"""Fewer experts in the mixture that `train.py` has trained: how they are chosen, and what training brings back.

    python examples/pt_moe/prune.py --out DIR --seed 0

Measures the perplexity of held-out chats with half of the experts, removed in four ways: at random; at once, by
the mean length of their weighted outputs (`reap`); in rounds, with the rest scored again before each; and in
rounds with training after each, which is a lottery subnetwork. Then removes a quarter, trains, and compares
exact answers and the load of the experts with the whole model's. `prune.json` in DIR holds the results.
Run it again to go on: what is finished is kept.

Needs `pip install ".[tamm,train]"` in the repository.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import train  # makes the other examples' modules importable

# isort: split
from ifp import print_event

from afm_mlx.training import ExpertPruning, Recipe, TrainingOptions, prune_experts
from afm_mlx.training.loop.trainer import Validation

HALF = {
    "random": ExpertPruning(0.5, "random"),
    "one-shot": ExpertPruning(0.5),
    "iterative": ExpertPruning(0.5, rounds=4),
    "lottery": ExpertPruning(0.5, rounds=4, train=True),
}
QUARTER_GONE = ExpertPruning(0.75, train=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of `train.py`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--steps", type=int, default=100, help="of training, in all rounds together"
    )
    parser.add_argument("--rows", type=int, default=16, help="chats in a step")
    parser.add_argument("--texts", type=int, default=100, help="chats that experts are scored on")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--limit", type=int, default=50, help="measured chats of each task")
    args = parser.parse_args()
    report: dict[str, Any] = {"arguments": {key: str(value) for key, value in vars(args).items()}}
    found = {name: prune(name, pruning, args) for name, pruning in HALF.items()}
    report |= {"half": found, "load_entropy of the whole": train.last_load_entropy(args.out)}
    report["quarter gone"] = prune("quarter-gone", QUARTER_GONE, args)
    report |= train.measure_folders(
        {name: args.out / name for name in ("pt-moe", "quarter-gone")}, args.limit
    )
    (args.out / "prune.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


def prune(name: str, pruning: ExpertPruning, args: argparse.Namespace) -> dict[str, Any]:
    """Remove experts, unless it was done before; return perplexity before and after, and the load's entropy."""
    path, results = args.out / name, args.out / f"{name}.json"
    if results.exists():
        return json.loads(results.read_text())
    print(name, flush=True)
    loads: list[float] = []

    def on_event(event: Any) -> None:
        print_event(event)
        if isinstance(event, Validation):
            loads.append(float(event.metrics["load_entropy"]))

    # Chats that training has not seen; perplexity is measured on others than the best weights are chosen by.
    data = args.out / "fresh"
    train.write_data(data, args.steps * args.rows, args.seed + 1)
    shutil.copy(args.out / "data" / "valid.jsonl", data / "test.jsonl")
    steps = max(args.steps // pruning.rounds, 1)
    options = TrainingOptions(
        iters=steps,
        learning_rate=args.learning_rate,
        warmup_iters=steps // 10,
        optimizer="muon",
        betas=(0.9, 0.98),
        steps_per_eval=steps,
        val_batches=4,
        seed=args.seed,
    )
    recipe = Recipe(
        data,
        options,
        args.out / "pt-moe",
        batch_size=args.rows,
        max_seq_length=512,
        packing=False,
        prompt_weight=0.1,
    )
    pruning = dataclasses.replace(pruning, score_texts=args.texts, seed=args.seed)
    found = prune_experts(recipe, path, pruning, on_event=on_event, on_stage=print)
    result = {
        "experts": [found.experts_before, found.experts_after],
        "perplexity": [found.perplexity_before, found.perplexity_after],
        "load_entropy": loads,
    }
    results.write_text(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
