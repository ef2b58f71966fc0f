"""Train a reward model on pairs of texts whose scores are known, and compare its rewards with the scores.

    python examples/preferences/reward_order.py --out OUT --seed 0

A text's score is the sum of its words' values. A pair's strength follows from Bradley and Terry's model: the
probability that the better text is preferred is sigmoid(difference of scores). A quarter of the weak pairs
("slightly" and "negligibly better") are turned around, as people do who can hardly see a difference. Two reward
models are trained on the same pairs: with the soft labels of the strengths, and with hard labels. On texts that
no pair has, rewards are compared with scores: Spearman's rank correlation, and the share of all pairs of
texts whose order is right.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from afm_mlx import cli
from afm_mlx.measure.reward_model import RewardModel
from afm_mlx.measure.rewards import Answered
from afm_mlx.training.data.preferences import STRENGTHS

PROMPT = "Write some words."
WORDS = "door light paper garden winter harbour stone music river window bread horse".split()
WEAK = ("slightly better", "negligibly better")
FLIPPED = 0.25
_TRAINING = (
    "lora --model afm-nano --objective reward --data {data} --adapter-path {run} --seed {seed} --rank 8 "
    "--alpha 8 --iters {iters} --batch-size {batch} --learning-rate 3e-3 --warmup-iters 10 --steps-per-eval 50 "
    "--val-batches -1 --save-every 50"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the data, train both reward models, and print how well they order unknown texts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for all that is made")
    parser.add_argument("--seed", type=int, default=0, help="of data and training")
    parser.add_argument("--pairs", type=int, default=600, help="training pairs")
    parser.add_argument("--batch", type=int, default=16, help="pairs of a training step")
    parser.add_argument("--iters", type=int, default=150, help="training steps")
    args = parser.parse_args(argv)
    texts = write_data(args.out, args.seed, args.pairs)
    found = {}
    for labels in ("soft", "hard"):
        run = args.out / labels
        values = {"data": args.out / f"data-{labels}", "run": run, "seed": args.seed}
        values |= {"iters": args.iters, "batch": args.batch}
        command = _TRAINING.format(**{k: shlex.quote(str(v)) for k, v in values.items()})
        print(f"$ afm-mlx {command}", flush=True)
        if status := cli.main(shlex.split(command)):
            return status
        found[labels] = measure(run, texts)
        print(f"{labels} labels: {json.dumps(found[labels])}")
    (args.out / "results.json").write_text(json.dumps(found))
    return 0


def write_data(out: Path, seed: int, pairs: int) -> dict[str, float]:
    """Write pairs with and without strengths into data-soft and data-hard; return held-out texts' scores."""
    rng = random.Random(seed)
    values = {word: rng.gauss(0, 1) for word in WORDS}
    texts: dict[tuple[str, ...], tuple[str, float]] = {}  # one for each choice of words
    while len(texts) < 600:
        words = [rng.choice(WORDS) for _ in range(6)]
        texts.setdefault(tuple(sorted(words)), (" ".join(words), sum(values[w] for w in words)))
    known, held_out = list(texts.values())[:400], list(texts.values())[400:]
    for split, count in (("train", pairs), ("valid", 60)):
        lines = [_pair(rng, known) for _ in range(count)]
        for labels in ("soft", "hard"):
            folder = out / f"data-{labels}"
            folder.mkdir(parents=True, exist_ok=True)
            kept = [
                {k: v for k, v in line.items() if labels == "soft" or k != "strength"}
                for line in lines
            ]
            text = "".join(json.dumps(line) + "\n" for line in kept)
            (folder / f"{split}.jsonl").write_text(text)
    return dict(held_out)


def _pair(rng: random.Random, texts: Sequence[tuple[str, float]]) -> dict[str, Any]:
    """Return a preference between two texts; a weak one may be wrong."""
    (better, high), (worse, low) = sorted(rng.sample(texts, 2), key=lambda t: -t[1])
    sure = 1 / (1 + math.exp(low - high))
    strength = min(STRENGTHS, key=lambda name: abs(STRENGTHS[name] - sure))
    if strength in WEAK and rng.random() < FLIPPED:
        better, worse = worse, better
    return {"prompt": PROMPT, "chosen": better, "rejected": worse, "strength": strength}


def measure(folder: Path, texts: dict[str, float]) -> dict[str, float]:
    """Return how well a reward model's rewards agree with texts' scores."""
    model = RewardModel.load("afm-nano", folder)
    rewards = np.array(model.of_all([Answered(PROMPT, text) for text in texts]))
    scores = np.array(list(texts.values()))
    above = np.triu_indices(len(scores), 1)
    is_right = np.sign(np.subtract.outer(scores, scores)) == np.sign(
        np.subtract.outer(rewards, rewards)
    )
    return {"spearman": spearman(rewards, scores), "right_order": float(is_right[above].mean())}


def spearman(first: np.ndarray, second: np.ndarray) -> float:
    """Return Spearman's rank correlation of numbers without ties."""
    ranks = [np.argsort(np.argsort(values)) for values in (first, second)]
    return float(np.corrcoef(*ranks)[0, 1])


if __name__ == "__main__":
    sys.exit(main())
