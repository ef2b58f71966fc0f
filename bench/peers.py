"""Speed beside llama.cpp and mlx-lm: the same matrix shapes, the same threads, the same run.

Every peer is a process of its own. They take turns (A B C, A B C, ...), so that a machine that slows down
slows all of them, and each figure is the median of its rounds. llama.cpp can't run AFM: `peer_gguf` says
what it runs instead. It needs a Python with llama-cpp-python; a peer that is not there is left out, and the
reason is printed.

    python -m bench.peers --llama-python /path/to/python --output results
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afm_mlx.config import PRESETS, ModelConfig
from afm_mlx.measure.bandwidth import Bandwidth, measure_bandwidth
from afm_mlx.measure.process import threads_in_use
from bench.peer_gguf import matrix_parameters, write_gguf
from bench.peer_protocol import Peer, PeerError

EXACT, INT8, MLX_LM = "afm-mlx exact", "afm-mlx int8", "mlx-lm"
LLAMA = "llama.cpp"
HERE = Path(__file__).parent

_FIGURES = ("prefill", "decode", "batch", "deep")
_DERIVED = ("prefill GFLOP/s", "decode GB/s", "load s", "resident GB")

Medians = dict[str, dict[str, float]]
"""Figures by peer and measurement; tokens per second unless the name says otherwise."""


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Args:
        prompt: tokens of the prompt.
        tokens: decode steps that are timed.
        rows: of the batch.
        depth: tokens in the cache while decoding.
        deep: the same, for decoding far into the context.
        rounds: how often everything is measured.
    """

    prompt: int = 512
    tokens: int = 32
    rows: int = 8
    depth: int = 128
    deep: int = 4096
    rounds: int = 3

    def measurements(self, peer: str) -> Iterator[tuple[str, str, dict[str, int]]]:
        """Name of the figure, what to ask the worker for, and its arguments."""
        one = {"tokens": self.tokens, "rows": 1, "depth": self.depth}
        yield "prefill", "prefill", {"tokens": self.prompt}
        yield "decode", "decode", one
        yield "batch", "decode", one | {"rows": self.rows}
        # llama.cpp would have to compute so many keys and values first: minutes for every round.
        if not peer.startswith(LLAMA):
            yield "deep", "decode", one | {"depth": self.deep}


# -- what the peers run


def shrunk(config: ModelConfig, layers: int) -> ModelConfig:
    """The same model with fewer blocks, as large a share of them reusing keys and values."""
    reuse = round(layers * config.num_kv_reuse_layers / config.num_layers)
    return dataclasses.replace(
        config, num_layers=layers, num_kv_reuse_layers=min(reuse, layers - 1)
    )


def write_folder(folder: Path, config: ModelConfig) -> None:
    """Write a model folder with random codes: 2-bit balanced rows, 4-bit embedding."""
    from mlx.utils import tree_flatten

    from afm_mlx.checkpoint.weights import save_weights
    from afm_mlx.measure.random_model import random_packed_model
    from afm_mlx.quantization.rule import AFM_EMBEDDING_RULE, AFM_RULE

    folder.mkdir(parents=True)
    model = random_packed_model(config)
    save_weights(folder, dict(tree_flatten(model.parameters())))
    quantization = AFM_RULE.to_dict() | {"model.embedding": AFM_EMBEDDING_RULE.to_dict()}
    values = config.to_dict() | {"quantization": quantization}
    (folder / "config.json").write_text(json.dumps(values, indent=4))


def commands(
    config: ModelConfig, folder: Path, plan: Plan, threads: int, llama_python: str | None
) -> dict[str, list[str]]:
    """How to start every peer; writes the model of each that is missing."""
    ours = folder / "afm-mlx"
    if not ours.exists():
        write_folder(ours, config)
    start = [sys.executable, "-m", "bench.peer_ours", "--folder", str(ours), "--activation-bits"]
    found = {EXACT: [*start, "16"], INT8: [*start, "8"]}
    if llama_python is not None:
        capacity = max(plan.prompt, plan.depth + plan.rows * plan.tokens) + 256
        for body, repack in (("TQ2_0", True), ("Q2_K", True), ("Q2_K", False)):
            path = folder / f"{body}.gguf"
            if not path.exists():
                write_gguf(path, config, body)
            name = f"{LLAMA} {body}" + ("" if repack else ", not repacked")
            options = ["--threads", str(threads), "--capacity", str(capacity)]
            options += [] if repack else ["--no-repack"]
            worker = str(HERE / "peer_llama.py")
            found[name] = [llama_python, worker, "--model", str(path), *options]
    sizes = config.to_dict()
    for ours_only in ("model_type", "kv_bits", "context_length"):
        del sizes[ours_only]
    found[MLX_LM] = [sys.executable, "-m", "bench.peer_mlx_lm", "--sizes", json.dumps(sizes)]
    return found


# -- running them


@contextmanager
def started(commands: Mapping[str, list[str]], threads: int) -> Iterator[dict[str, Peer]]:
    """Start every peer and warm it up; those that can't are left out."""
    peers: dict[str, Peer] = {}
    try:
        for name, command in commands.items():
            try:
                peers[name] = Peer(name, command, threads)
                peers[name].measure("warm_up")
            except PeerError as error:
                if name in peers:
                    peers.pop(name).close()
                _note(f"{name} is left out: {error}")
        yield peers
    finally:
        for peer in peers.values():
            peer.close()


def measure(peers: dict[str, Peer], plan: Plan) -> tuple[Medians, dict[str, Any]]:
    """Every figure of every peer.

    Returns:
        The medians, and all that was answered, by peer and measurement.
    """
    answers: dict[str, dict[str, list[Any]]] = {name: {} for name in peers}

    def ask(name: str, figure: str, what: str, **arguments: int) -> None:
        _note(f"{name}: {figure}")
        try:
            answer = peers[name].measure(what, **arguments)
        except PeerError as error:
            _note(f"{name}: no figure for {figure}: {error}")
            return
        answers[name].setdefault(figure, []).append(answer)

    for _ in range(plan.rounds):
        turns = {name: list(plan.measurements(name)) for name in peers if name != MLX_LM}
        for turn in range(max(map(len, turns.values()), default=0)):
            for name, own in turns.items():
                if turn < len(own):
                    figure, what, arguments = own[turn]
                    ask(name, figure, what, **arguments)
    if MLX_LM in peers:  # once and little: it takes seconds for a token
        ask(MLX_LM, "prefill", "prefill", tokens=2)
        ask(MLX_LM, "decode", "decode", tokens=2, rows=1, depth=2)
    for name in peers:
        ours = {"prompt": plan.prompt, "tokens": plan.tokens} if name in (EXACT, INT8) else {}
        ask(name, "memory", "memory", **ours)
    medians: Medians = {}
    for name, figures in answers.items():
        medians[name] = {"load_seconds": peers[name].hello.get("load_seconds", float("nan"))}
        medians[name]["weight_bytes"] = peers[name].hello["weight_bytes"]
        for figure, samples in figures.items():
            for key in samples[0]:
                label = figure if key == "tokens_per_second" else f"{figure}_{key}"
                medians[name][label] = statistics.median(sample[key] for sample in samples)
    return medians, answers


def _note(text: str) -> None:
    print(f"peers: {text}", file=sys.stderr, flush=True)


class Bystanders:
    """Processor time that others take meanwhile: on a busy machine nothing below means much.

    Counts what `/proc/stat` says is busy (stolen by other virtual machines too), less this process and those
    of its children that have ended. Linux only.
    """

    def __init__(self) -> None:
        self._start = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Seconds: of the clock, of all processors that were busy, and our own of those."""
        try:
            line = Path("/proc/stat").read_text().split("\n", 1)[0]
        except OSError:
            return None
        user, nice, system, _, _, irq, softirq, steal = map(int, line.split()[1:9])
        ticks = user + nice + system + irq + softirq + steal
        own = os.times()
        mine = own.user + own.system + own.children_user + own.children_system
        return time.perf_counter(), ticks / os.sysconf("SC_CLK_TCK"), mine

    def processors(self) -> float | None:
        """How many processors others kept busy on average since the start."""
        end = self._now()
        if self._start is None or end is None:
            return None
        clock, busy, mine = (b - a for a, b in zip(self._start, end, strict=True))
        return max(0.0, (busy - mine) / clock)


# -- what follows


@dataclass(frozen=True)
class Target:
    """A figure that was promised.

    Args:
        name: what is compared.
        value: as measured; None where a part of it is missing.
        bound: that it must reach, or stay below.
        at_most: which of the two.
        unit: of both.
    """

    name: str
    value: float | None
    bound: float
    at_most: bool = False
    unit: str = "x"

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value <= self.bound if self.at_most else self.value >= self.bound


def best_of_llama(medians: Medians, figure: str) -> float | None:
    """The largest figure of llama.cpp, whatever the format and arrangement it took."""
    found = [m[figure] for name, m in medians.items() if name.startswith(LLAMA) and figure in m]
    return max(found, default=None)


def targets(medians: Medians, limit: float) -> list[Target]:
    """Every target with what was measured.

    Args:
        medians: of all peers.
        limit: measured bandwidth in bytes per second.
    """

    def ratio(top: float | None, bottom: float | None) -> float | None:
        return None if top is None or not bottom else top / bottom

    def of(name: str, figure: str) -> float | None:
        return medians.get(name, {}).get(figure)

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


def matrix_flops(config: ModelConfig, peer: str) -> float:
    """Operations of the matrix products for one prompt token."""
    if peer.startswith(LLAMA):
        return 2 * matrix_parameters(config)
    d, kv = config.hidden_dim, config.num_kv_heads * config.head_dim
    writing = config.num_kv_layers * (2 * d * d + 2 * d * kv + 3 * d * config.ffn_dim)
    # mlx-lm runs all blocks on all prompt tokens but the last.
    reuse = config.num_kv_reuse_layers * (2 * d * d + 3 * d * config.ffn_dim)
    return 2 * (writing + (reuse if peer == MLX_LM else 0))


def table(medians: Medians, config: ModelConfig) -> list[list[str]]:
    """The figures in rows, the header first."""

    def cell(value: float | None, scale: float = 1, digits: int = 1) -> str:
        return "-" if value is None or value != value else f"{value * scale:.{digits}f}"

    rows = [["", *(f"{name} tok/s" for name in _FIGURES), *_DERIVED]]
    for name, m in medians.items():
        read = m.get("decode_bytes_per_step", m["weight_bytes"])
        prefill, decode = m.get("prefill"), m.get("decode")
        cells = [
            cell(None if prefill is None else prefill * matrix_flops(config, name), 1e-9),
            cell(None if decode is None else decode * read, 1e-9, 2),
            cell(m.get("load_seconds"), 1, 2),
            cell(m.get("memory_peak_resident_bytes"), 1e-9, 2),
        ]
        rows.append([name, *(cell(m.get(figure)) for figure in _FIGURES), *cells])
    return rows


def markdown(rows: list[list[str]]) -> str:
    """A table as Markdown, the first column to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(cells: list[str]) -> str:
        first = cells[0].ljust(widths[0])
        rest = [cell.rjust(w) for cell, w in zip(cells[1:], widths[1:], strict=True)]
        return f"| {' | '.join([first, *rest])} |"

    rule = "|".join(["-" * (widths[0] + 2), *("-" * (w + 1) + ":" for w in widths[1:])])
    return "\n".join([line(rows[0]), f"|{rule}|", *map(line, rows[1:])])


def target_rows(found: list[Target]) -> list[list[str]]:
    """The targets in rows, the header first."""
    words = {True: "met", False: "missed", None: "not measured"}
    rows = [["target", "measured", "wanted", ""]]
    for t in found:
        value = "-" if t.value is None else f"{t.value:.2f} {t.unit}"
        sign = "at most" if t.at_most else "at least"
        rows.append([t.name, value, f"{sign} {t.bound:g} {t.unit}", words[t.met]])
    return rows


def plot(path: Path, medians: Medians, limit: float, title: str) -> None:
    """Bars of prefill and decode; a line where reading the weights once per token meets the bandwidth."""
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


# -- command line


def run(options: argparse.Namespace, folder: Path) -> None:
    config = PRESETS[options.preset]
    if options.layers:
        config = shrunk(config, options.layers)
    plan = Plan(
        options.prompt, options.tokens, options.rows, options.depth, options.deep, options.rounds
    )
    threads = options.threads or threads_in_use()
    found = commands(config, folder, plan, threads, options.llama_python)
    if options.llama_python is None:
        _note("llama.cpp is left out: --llama-python is missing")
    for name in options.skip:
        found = {known: command for known, command in found.items() if not known.startswith(name)}
    bystanders = Bystanders()
    before = measure_bandwidth(threads)
    with started(found, threads) as peers:
        medians, answers = measure(peers, plan)
        hellos = {name: peer.hello for name, peer in peers.items()}
    limit = max(before, measure_bandwidth(threads))
    others = bystanders.processors()
    met = targets(medians, limit.bytes_per_second)
    report(options, config, plan, threads, limit, medians, met)
    if others is not None:
        print(f"\nother processes kept {others:.2f} processors busy meanwhile")
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        facts = {
            "preset": options.preset,
            "config": config.to_dict(),
            "plan": dataclasses.asdict(plan),
            "threads": threads,
            "bandwidth": limit._asdict(),
            "processors_busy_with_others": others,
            "peers": {n: {"hello": hellos[n], "answers": answers[n]} for n in hellos},
            "medians": medians,
            "targets": [dataclasses.asdict(t) | {"met": t.met} for t in met],
        }
        (options.output / "peers.json").write_text(json.dumps(facts, indent=2))
        title = f"{options.preset}, {config.num_layers} blocks, {threads} threads"
        try:
            plot(options.output / "peers.png", medians, limit.bytes_per_second, title)
        except ImportError:
            _note("no plot: matplotlib is not installed; the extra `bench` has it")


def report(
    options: argparse.Namespace,
    config: ModelConfig,
    plan: Plan,
    threads: int,
    limit: Bandwidth,
    medians: Medians,
    met: list[Target],
) -> None:
    print(f"{options.preset}, {config.num_layers} blocks, {threads} threads, {plan.rounds} rounds")
    print(f"prompt {plan.prompt}, batch {plan.rows}, depth {plan.depth} and {plan.deep}")
    print(f"memory limit {limit.bytes_per_second / 1e9:.1f} GB/s ({limit.how})\n")
    print(markdown(table(medians, config)))
    print()
    print(markdown(target_rows(met)))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    plan = Plan()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=list(PRESETS), default="afm-3b")
    parser.add_argument("--layers", type=int, help="fewer blocks, for a quick look")
    parser.add_argument("--llama-python", help="a Python that has llama-cpp-python")
    parser.add_argument("--skip", nargs="*", default=[], help="peers, by how their names start")
    parser.add_argument("--threads", type=int, help="the cores of this process by default")
    for name, text in (
        ("prompt", "tokens of the prompt"),
        ("tokens", "decode steps that are timed"),
        ("rows", "of the batch"),
        ("depth", "tokens in the cache while decoding"),
        ("deep", "the same, far into the context"),
        ("rounds", "how often everything is measured"),
    ):
        parser.add_argument(f"--{name}", type=int, default=getattr(plan, name), help=text)
    parser.add_argument("--work", type=Path, help="keep the models there, and use those it has")
    parser.add_argument("--output", type=Path, help="folder for peers.json and peers.png")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    options = parse(argv)
    if options.work is not None:
        options.work.mkdir(parents=True, exist_ok=True)
        run(options, options.work)
        return
    with tempfile.TemporaryDirectory() as name:
        run(options, Path(name))


if __name__ == "__main__":
    main()
