"""What follows from the peers' figures: targets, a table and a plot."""

from __future__ import annotations

from pathlib import Path

from bench.peer_models import EXACT, INT8, LLAMA, MLX_LM, Medians, PeerModel
from bench.targets import Target

_FIGURES = ("prefill", "decode", "batch", "deep")
_DERIVED = ("prefill GFLOP/s", "decode GB/s", "load s", "resident GB")


def best_of_llama(medians: Medians, figure: str) -> float | None:
    """Return llama.cpp's largest value of a figure over all formats; None if it has none."""
    found = [m[figure] for name, m in medians.items() if name.startswith(LLAMA) and figure in m]
    return max(found, default=None)


def _ratio(top: float | None, bottom: float | None) -> float | None:
    return None if top is None or not bottom else top / bottom


def zoo_targets(medians: Medians, limit: float) -> list[Target]:
    """Return the targets of a model that llama.cpp runs unchanged: no slower than its best format."""
    found = []
    for name in (EXACT, INT8):
        mine = medians.get(name, {})
        for figure in ("decode", "prefill", "batch"):
            ratio = _ratio(mine.get(figure), best_of_llama(medians, figure))
            found.append(Target(f"{name}: {figure} over llama.cpp's best", ratio, 1))
        ratio = _ratio(mine.get("decode"), medians.get(MLX_LM, {}).get("decode"))
        found.append(Target(f"{name}: decode over mlx-lm", ratio, 1))
    return found


def afm_targets(medians: Medians, limit: float) -> list[Target]:
    """Return the targets of an AFM model; the arguments are as in `zoo_targets`."""

    def of(name: str, figure: str) -> float | None:
        return medians.get(name, {}).get(figure)

    ratio = _ratio
    found = []
    for name, decode in ((EXACT, 1.2), (INT8, 1.8)):
        llama = {figure: best_of_llama(medians, figure) for figure in ("decode", "prefill")}
        mine = of(name, "decode")
        found += [
            Target(f"{name}: decode over llama.cpp's best", ratio(mine, llama["decode"]), decode),
            Target(
                f"{name}: prefill over llama.cpp's best",
                ratio(of(name, "prefill"), llama["prefill"]),
                2.5,
            ),
            Target(f"{name}: batch over one row", ratio(of(name, "batch"), mine), 4),
            Target(f"{name}: decode deep in the context", ratio(of(name, "deep"), mine), 0.75),
            Target(f"{name}: decode over mlx-lm", ratio(mine, of(MLX_LM, "decode")), 50),
        ]
    read = of(INT8, "decode_bytes_per_step")
    share = None if read is None else read * medians[INT8]["decode"] / limit
    found.append(Target(f"{INT8}: share of the measured bandwidth", share, 0.5))
    peak = of(EXACT, "memory_peak_memory_bytes")
    if peak is not None:
        needed = medians[EXACT]["memory_weight_bytes"] + medians[EXACT]["memory_cache_bytes"]
        resident = medians[EXACT]["memory_peak_resident_bytes"]
        found += [
            Target("peak memory over weights and cache", peak / needed, 1.15, True),
            Target("the whole process's, likewise", resident / needed, 1.15, True),
        ]
    loading = of(EXACT, "load_seconds")
    found.append(Target("loading from the page cache", loading, 1.5, True, unit="s"))
    return found


def table(medians: Medians, model: PeerModel) -> list[list[str]]:
    """Return the figures as a table's rows, the header first."""

    def cell(value: float | None, scale: float = 1, digits: int = 1) -> str:
        return "-" if value is None or value != value else f"{value * scale:.{digits}f}"

    rows = [["", *(f"{name} tok/s" for name in _FIGURES), *_DERIVED]]
    for name, m in medians.items():
        read = m.get("decode_bytes_per_step", m["weight_bytes"])
        prefill, decode = m.get("prefill"), m.get("decode")
        cells = [
            cell(None if prefill is None else prefill * 2 * model.prompt_weights(name), 1e-9),
            cell(None if decode is None else decode * read, 1e-9, 2),
            cell(m.get("load_seconds"), 1, 2),
            cell(m.get("memory_peak_resident_bytes"), 1e-9, 2),
        ]
        rows.append([name, *(cell(m.get(figure)) for figure in _FIGURES), *cells])
    return rows


def plot(path: Path, medians: Medians, limit: float, title: str) -> None:
    """Write a plot of prefill and decode to `path`, with a line at the speed that the bandwidth allows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 0.5 * len(medians) + 1.8), sharey=True)
    names = list(medians)
    colors = ["tab:blue" if name.startswith("afm") else "tab:gray" for name in names]
    for axis, kind in zip(axes, ("prefill", "decode"), strict=True):
        bars = axis.barh(names, [medians[n].get(kind, 0) for n in names], color=colors)
        axis.bar_label(bars, fmt="%.1f", padding=3)
        axis.margins(x=0.15)
        axis.set_xlabel(f"{kind}, tokens per second")
    if "decode_bytes_per_step" in medians.get(EXACT, {}):
        bound = limit / medians[EXACT]["decode_bytes_per_step"]
        axes[1].axvline(bound, color="tab:red", linestyle="--")
        axes[1].annotate(" memory limit", (bound, -0.45), color="tab:red", va="top")
    axes[0].invert_yaxis()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
