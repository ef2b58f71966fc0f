"""Measure steps of training by one process and by several ranks on this machine, and the share of exchanges.

Both train an adapter of the embedded model by the same batches. Each process has one thread, and the runs take
turns over the rounds; figures are medians of all steps after the first.

    python -m bench.ranks --ranks 2 --rounds 3
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

PROCESS = [sys.executable, "-m", "afm_mlx"]


def write_data(folder: Path, samples: int) -> Path:
    """Write samples of about 100 tokens, and return the file."""
    path = folder / "train.jsonl"
    texts = ({"text": f"{i}: " + "all work and no play " * 20} for i in range(samples))
    path.write_text("".join(f"{json.dumps(text)}\n" for text in texts))
    return path


def measure(folder: Path, data: Path, ranks: int, steps: int, rows: int) -> list[dict[str, float]]:
    """Train for some steps, and return the lines of metrics.jsonl, each of one step."""
    adapter = folder / "adapter"
    command = [*PROCESS, "lora", "--data", str(data), "--iters", str(steps), "--adapter-path"]
    command += [str(adapter), "--batch-size", str(rows), "--no-packing", "--steps-per-report", "1"]
    if ranks > 1:
        launcher = str(Path(sys.executable).with_name("mlx.launch"))
        command = [launcher, "--backend", "ring", "-n", str(ranks), *command]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode or not adapter.exists():
        sys.exit(f"{' '.join(command)} failed: {done.stderr}")
    lines = (adapter / "run/metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rows", type=int, default=8)
    args = parser.parse_args()
    seconds: dict[int, list[float]] = {1: [], args.ranks: []}
    shares: list[float] = []
    for _ in range(args.rounds):
        for ranks, found in seconds.items():
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder)
                data = write_data(path, args.rows * args.steps)
                for before, line in pairwise(measure(path, data, ranks, args.steps, args.rows)):
                    tokens = line["tokens"] - before["tokens"]
                    found.append(tokens / line["tokens_per_second"])
                    shares += [line["exchanges"]] if ranks > 1 else []
    alone, together = (statistics.median(each) for each in seconds.values())
    print(f"one process: {alone:.3f} s a step")
    share = statistics.median(shares)
    print(f"{args.ranks} ranks: {together:.3f} s a step, {share:.1%} of it in exchanges")
    print(f"ratio: {together / alone:.2f}")


if __name__ == "__main__":
    main()
