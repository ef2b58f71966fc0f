"""The figures of `ifp.py`: exact answers in all ways, and the overlap of masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib.figure import Figure


def plot_accuracy(accuracy: dict[str, dict[str, float]], path: Path) -> None:
    """Draw the mean share of exact answers of each way as a bar, and its tasks as ticks."""
    figure = Figure(figsize=(8.0, 1.2 + 0.45 * len(accuracy)), layout="constrained")
    axes = figure.subplots()
    for y, (way, shares) in enumerate(accuracy.items()):
        axes.barh(y, 100 * shares["mean"], color="#56B4E9" if "ifp" in way else "#999999")
        points = [100 * share for task, share in shares.items() if task not in ("mean", "loss")]
        axes.scatter(points, [y] * len(points), marker="|", s=90, color="#444444")
        axes.text(103, y, f"{100 * shares['mean']:.1f}", va="center", fontsize=8)
    axes.set_yticks(range(len(accuracy)), list(accuracy))
    axes.invert_yaxis()
    axes.set_xlim(0, 112)
    axes.set_xlabel("exact answers, % (ticks: tasks)")
    figure.savefig(path, dpi=150, format="png")


def plot_overlap(overlap: dict[str, Any], of_blocks: list[dict[str, float]], path: Path) -> None:
    """Draw the overlap of masks for each pair of tasks, and by block within and across tasks."""
    figure = Figure(figsize=(11.0, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    names, matrix = overlap["tasks"], overlap["matrix"]
    image = left.imshow(matrix, cmap="viridis")
    left.set_xticks(range(len(names)), names, rotation=40, ha="right")
    left.set_yticks(range(len(names)), names)
    for y, row in enumerate(matrix):
        for x, value in enumerate(row):
            left.text(x, y, f"{value:.2f}", ha="center", va="center", color="white", fontsize=7)
    figure.colorbar(image, ax=left, label="common channels of two prompts' masks")
    for name, color in (("within", "#0072B2"), ("across", "#E69F00")):
        right.plot([block[name] for block in of_blocks], "o-", color=color, label=f"{name} tasks")
    right.set_xlabel("block")
    right.set_ylabel("common channels of two prompts' masks")
    right.set_xticks(range(len(of_blocks)))
    right.legend(frameon=False)
    figure.savefig(path, dpi=150, format="png")
