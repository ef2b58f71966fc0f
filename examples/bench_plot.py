"""Measures this machine for several numbers of rows, and draws tokens per second.

    python examples/bench_plot.py speed.png                      the embedded model
    python examples/bench_plot.py speed.png --preset afm-3b      the 3B's shape, random weights

Besides the measurements it draws what memory would allow if each step read its bytes at the measured bandwidth:
where the two part, decoding is bound by something else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def measure(preset: str | None, rows: str, tokens: int) -> dict[str, Any]:
    """Return what `afm-mlx bench` measures, in a process of its own."""
    model = ["--preset", preset, "--random-weights"] if preset else []
    sizes = ["-p", "128", "-g", str(tokens), "-b", rows, "-n", "3", "-o", "json"]
    command = [sys.executable, "-m", "afm_mlx", "bench", *model, *sizes]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def draw(measured: dict[str, Any], path: Path) -> None:
    """Draw tokens per second over rows, with the deviation of the runs."""
    results = measured["results"]
    rows = [result["batch"] for result in results]
    decode = [result["decode_tokens_per_second"] for result in results]
    deviations = [result["decode_deviation"] or 0 for result in results]
    bandwidth = measured["bandwidth_bytes_per_second"]
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    axes.errorbar(rows, decode, deviations, marker="o", capsize=3, label="measured")
    if all(result["bytes_per_token"] for result in results):
        limit = [bandwidth / result["bytes_per_token"] for result in results]
        axes.plot(rows, limit, "--", color="#888888", label=f"memory, {bandwidth / 1e9:.0f} GB/s")
    axes.set_xticks(rows)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rows side by side")
    axes.set_ylabel("tokens per second, all rows")
    axes.set_title(f"{measured['model']} on {measured['runtime']['device_name']}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("plot", type=Path, help="PNG or SVG to write")
    parser.add_argument("--preset", help="such as afm-3b, with random weights")
    parser.add_argument("--rows", default="1,2,4,8")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    given = parser.parse_args()
    measured = measure(given.preset, given.rows, given.tokens)
    draw(measured, given.plot)
    for result in measured["results"]:
        print(f"{result['batch']} rows: {result['decode_tokens_per_second']:.1f} tokens/s")
    print(given.plot)


if __name__ == "__main__":
    main()
