"""The figure of `quality.py`: what the variants know, and what they lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

# Okabe and Ito's colours, which differ in lightness too: they hold in print and for the colour-blind.
_COLORS = {"float": "#000000", "ptq": "#E69F00", "qat": "#56B4E9", "recover": "#0072B2"}
_NAMES = {
    "float": "float",
    "ptq": "quantized after training",
    "qat": "quantization-aware training",
    "recover": "and a recovery adapter",
}


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw both panels as a PNG.

    Args:
        rows: rows of `quality.py`, each with `stage` as in `variants.py`.
        path: path of the picture.
    """
    figure = Figure(figsize=(9.0, 1.4 + 0.42 * len(rows)), layout="constrained")
    accuracy, perplexity = figure.subplots(1, 2, sharey=True, width_ratios=(1.25, 1.0))
    kinds = ["float" if row["name"] == "float" else row["stage"] for row in rows]
    colors = [_COLORS[kind] for kind in kinds]
    accuracy.set_yticks(range(len(rows)), [_label(row) for row in rows])
    accuracy.invert_yaxis()
    _draw_accuracy(accuracy, rows, colors)
    _draw_perplexity(perplexity, rows, colors)
    shown = [kind for kind in _NAMES if kind in kinds]
    patches = [Patch(color=_COLORS[kind], label=_NAMES[kind]) for kind in shown]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
    figure.savefig(path, dpi=200, format="png")


def _label(row: dict[str, Any]) -> str:
    size = (row["weight_bytes"] + row["adapter_bytes"]) / 1e6
    return f"{row['label']}\n{size:.1f} MB, {row['bits_per_weight']:.2f} bits per weight"


def _draw_accuracy(axes: Axes, rows: list[dict[str, Any]], colors: list[str]) -> None:
    axes.barh(range(len(rows)), [100 * row["mean"] for row in rows], color=colors, height=0.6)
    for y, row in enumerate(rows):
        points = [100 * value for value in row["tasks"].values()]
        # White rims keep the ticks visible on the bars and next to them.
        axes.scatter(points, [y] * len(points), marker="|", s=90, color="white", linewidths=2.6)
        axes.scatter(points, [y] * len(points), marker="|", s=90, color="#444444", linewidths=1.0)
        axes.text(103, y, f"{100 * row['mean']:.1f}", va="center", fontsize=8)
    axes.set_xlim(0, 113)
    axes.set_xticks(range(0, 101, 20))
    axes.set_xlabel("right answers, % (bar: mean of the tasks, ticks: each)")
    _tidy(axes)


def _draw_perplexity(axes: Axes, rows: list[dict[str, Any]], colors: list[str]) -> None:
    values = [row["perplexity"] for row in rows]
    # No bars: a logarithmic axis has no zero for them to start at.
    axes.set_xscale("log")
    axes.hlines(range(len(rows)), min(values), values, color=colors, linewidth=1.2)
    axes.scatter(values, range(len(rows)), color=colors, s=42, zorder=3)
    for y, value in enumerate(values):
        text = f"{value:.1f}" if value < 1000 else f"{value:,.0f}"
        axes.annotate(text, (value, y), (7, 0), textcoords="offset points", va="center", fontsize=8)
    span = max(max(values) / min(values), 2.0)
    axes.set_xlim(min(values) / span**0.05, max(values) * span**0.25)
    # The ticks between powers of ten are labelled only when the range is short, as powers.
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}" if span < 10 else "")
    axes.set_xlabel("held-out perplexity (log scale, lower is better)")
    _tidy(axes)


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8, which="both")
    axes.tick_params(axis="y", length=0)
    axes.xaxis.label.set_size(9)
