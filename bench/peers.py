"""Compare speed with llama.cpp, ONNX Runtime and mlx-lm: the same shapes, the same threads, the same run.

Every peer is a process of its own. They take turns (A B C, A B C, ...), so that a machine that slows down
slows all of them, and each figure is the median of its rounds. It needs a Python with llama-cpp-python, and one
with onnx and onnxruntime; a peer that is not there is left out, and the reason is printed. llama.cpp can't run
AFM: `peer_afm` says what it runs instead. A model of mlx-lm's zoo, `peer_zoo`, it runs as it is. ONNX Runtime
runs AFM's products, without attention (`peer_onnx`).

    python -m bench.peers --llama-python /path/to/python --onnx-python /path/to/python --output results
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from afm_mlx.cli.arguments import integer
from afm_mlx.config import PRESETS
from afm_mlx.measure.machine import Bandwidth, measure_bandwidth, threads_in_use
from bench.bystanders import Bystanders
from bench.peer_afm import afm_model
from bench.peer_figures import plot, table
from bench.peer_models import EXACT, INT8, LLAMA, MLX_LM, ONNX, Medians, PeerModel, commands
from bench.peer_protocol import Peer, PeerError
from bench.peer_zoo import CONFIGS, zoo_model
from bench.targets import Target, markdown, target_rows

MODELS: dict[str, Callable[[int | None], PeerModel]] = {
    **{name: partial(afm_model, name) for name in PRESETS},
    **{name: partial(zoo_model, name) for name in CONFIGS},
}
"""The models by name, each made with as many blocks as asked for, or all of them."""


@dataclass(frozen=True)
class Plan:
    """The sizes of a comparison of programs.

    Args:
        prompt: tokens of the prompt.
        tokens: decode steps that are timed.
        rows: number of sequences in the batch.
        depth: tokens in the cache while decoding.
        deep: tokens in the cache while the figure "deep" is measured, far into the context.
        rounds: number of times that every figure is measured.
    """

    prompt: int = 512
    tokens: int = 32
    rows: int = 8
    depth: int = 128
    deep: int = 4096
    rounds: int = 3

    def measurements(self, peer: str) -> Iterator[tuple[str, str, dict[str, int]]]:
        """Yield, for each figure of a peer: its name, the measurement to ask for, and its arguments."""
        one = {"tokens": self.tokens, "rows": 1, "depth": self.depth}
        yield "prefill", "prefill", {"tokens": self.prompt}
        yield "decode", "decode", one
        yield "batch", "decode", one | {"rows": self.rows}
        # llama.cpp would have to compute these keys and values first: minutes for every round. ONNX Runtime
        # has no attention.
        if not peer.startswith((LLAMA, ONNX)):
            yield "deep", "decode", one | {"depth": self.deep}


# -- running them


@contextmanager
def started(commands: Mapping[str, list[str]], threads: int) -> Iterator[dict[str, Peer]]:
    """Start every peer, and warm it up; leave out peers that can't start."""
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
    """Measure every figure of every peer.

    Returns:
        The medians, and the workers' answers, both by peer and figure.
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


# -- command line


def run(options: argparse.Namespace, folder: Path) -> None:
    """Measure every model that was asked for, one after the other."""
    plan = Plan(
        options.prompt, options.tokens, options.rows, options.depth, options.deep, options.rounds
    )
    threads = options.threads or threads_in_use()
    if options.llama_python is None:
        _note("llama.cpp is left out: --llama-python is missing")
    if options.onnx_python is None:
        _note("onnxruntime is left out: --onnx-python is missing")
    found = {}
    for name in options.model:
        model = MODELS[name](options.layers)
        files = folder / f"{name}-{model.shapes.num_layers}"
        found[name] = compare(model, plan, threads, options, files)
    if options.output is not None:
        facts = {"plan": dataclasses.asdict(plan), "threads": threads, "models": found}
        (options.output / "peers.json").write_text(json.dumps(facts, indent=2))


def compare(
    model: PeerModel, plan: Plan, threads: int, options: argparse.Namespace, folder: Path
) -> dict[str, Any]:
    """Measure one model, print and plot what came out, and return all of it."""
    capacity = max(plan.prompt, plan.depth + plan.rows * plan.tokens) + 256
    pythons = options.llama_python, options.onnx_python
    found = commands(model, folder, threads, capacity, *pythons)
    for name in options.skip:
        found = {known: command for known, command in found.items() if not known.startswith(name)}
    bystanders = Bystanders()
    before = measure_bandwidth(threads)
    with started(found, threads) as peers:
        medians, answers = measure(peers, plan)
        hellos = {name: peer.hello for name, peer in peers.items()}
    limit = max(before, measure_bandwidth(threads))
    others = bystanders.processors()
    met = model.targets(medians, limit.bytes_per_second)
    title = f"{model.title}, {threads} threads"
    report(title, plan, limit, table(medians, model), met)
    if others is not None:
        print(f"\nother processes kept {others:.2f} processors busy meanwhile\n")
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        try:
            path = options.output / f"peers-{model.name}.png"
            plot(path, medians, limit.bytes_per_second, title)
        except ImportError:
            _note("no plot: matplotlib is not installed; the extra `bench` has it")
    return {
        "config": model.config,
        "bandwidth": limit._asdict(),
        "processors_busy_with_others": others,
        "peers": {n: {"hello": hellos[n], "answers": answers[n]} for n in hellos},
        "medians": medians,
        "targets": [dataclasses.asdict(t) | {"met": t.met} for t in met],
    }


def report(
    title: str, plan: Plan, limit: Bandwidth, figures: list[list[str]], met: list[Target]
) -> None:
    print(f"{title}, {plan.rounds} rounds")
    print(f"prompt {plan.prompt}, batch {plan.rows}, depth {plan.depth} and {plan.deep}")
    print(f"memory limit {limit.bytes_per_second / 1e9:.1f} GB/s ({limit.how})\n")
    print(markdown(figures))
    print()
    print(markdown(target_rows(met)))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    plan = Plan()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = list(MODELS)
    models = ["afm-3b", "qwen3-4b"]
    parser.add_argument(
        "--model",
        nargs="+",
        choices=known,
        default=models,
        help="the 3B and the zoo model by default",
    )
    parser.add_argument("--layers", type=integer(1), help="fewer blocks, for a quick look")
    parser.add_argument("--llama-python", help="a Python that has llama-cpp-python")
    parser.add_argument("--onnx-python", help="a Python that has onnx and onnxruntime")
    parser.add_argument("--skip", nargs="*", default=[], help="peers, by how their names start")
    parser.add_argument("--threads", type=integer(1), help="the cores of this process by default")
    for name, text in (
        ("prompt", "tokens of the prompt"),
        ("tokens", "decode steps that are timed"),
        ("rows", "of the batch"),
        ("depth", "tokens in the cache while decoding"),
        ("deep", "the same, far into the context"),
        ("rounds", "how often everything is measured"),
    ):
        parser.add_argument(f"--{name}", type=integer(1), default=getattr(plan, name), help=text)
    parser.add_argument("--work", type=Path, help="keep the models there, and use those it has")
    parser.add_argument("--output", type=Path, help="folder for peers.json and the plots")
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
