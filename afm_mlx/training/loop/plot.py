"""A picture of a training run: losses above, the learning rate below."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from afm_mlx.errors import AFMError, DataError
from afm_mlx.files import atomic_write
from afm_mlx.installation import package_problem
from afm_mlx.jsonl import read_jsonl


def plot_metrics(metrics_path: str | Path, png_path: str | Path) -> None:
    """Draw metrics.jsonl of a training run.

    Args:
        metrics_path: path of a run's metrics.jsonl.
        png_path: path of the picture, which replaces a file that is there.

    Raises:
        AFMError: when matplotlib is not installed.
        DataError: when the file is missing, or no line of it can be drawn.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except (ImportError, OSError) as error:
        raise AFMError(f"Plots need matplotlib. {package_problem(error) or error}") from error

    records = [record for _, record in read_jsonl(Path(metrics_path))]
    if not any("loss" in record or "valid_loss" in record for record in records):
        raise DataError(f"{metrics_path} has no line with a loss yet. Train for some steps first.")
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    losses, rates = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    losses.plot(*_series(records, "loss"), linewidth=1, label="training")
    losses.plot(*_series(records, "valid_loss"), marker="o", markersize=3, label="validation")
    losses.set_ylabel("loss per target (nats)")
    losses.legend()
    rates.plot(*_series(records, "learning_rate"), linewidth=1)
    rates.set(xlabel="step", ylabel="learning rate")
    for axes in (losses, rates):
        axes.grid(alpha=0.3)
    with atomic_write(png_path) as path:
        figure.savefig(path, dpi=150, format="png")


def _series(records: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    pairs = [(r["step"], r[key]) for r in records if r.get(key) is not None]
    return [step for step, _ in pairs], [value for _, value in pairs]
