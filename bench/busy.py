"""Measure speed next to busy processes, and its ratio to the speed of a quiet machine.

Neighbours are processes that compute all the time: none, one, and one per core. Workloads are products at the
3B's shapes, packed and dense, for one row and for many. They run in one process that has all the threads, and
in one that has a single thread; both take turns in all situations, and figures are medians over the rounds.
Neighbours end by themselves after a minute, whatever happens here.

    python -m bench.busy
    python -m bench.busy --own-sessions      Linux divides cores by session first, where autogroups are on
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import afm_mlx  # noqa: F401  before mlx.core: it installs a BLAS

# isort: split
import mlx.core as mx

from afm_mlx.cli.arguments import integer
from afm_mlx.kernels import PackedWeight, ProductOptions, packed_matmul, packed_swiglu
from afm_mlx.measure.machine import threads_in_use
from bench.bystanders import Bystanders
from bench.peer_protocol import Answer, Peer, serve
from bench.targets import Target, markdown, target_rows

HIDDEN, QKV, FFN = 2048, 2560, 6656
BLOCKS = 4
KEPT = 1 / 3
"""Promised share of the quiet speed next to one busy process per core."""

Speeds = dict[tuple[str, int, int], list[float]]
"""GFLOP/s of every round, by workload, threads, and neighbours."""

# -- the worker


def _packed(out_dims: int, in_dims: int) -> PackedWeight:
    codes = mx.random.randint(0, 2**31 - 1, (out_dims, in_dims * 2 // 32)).astype(mx.uint32)
    return PackedWeight(codes, 2, "balanced", mx.full((out_dims,), 1 / 64))


class _Block:
    """The packed products of a transformer block."""

    def __init__(self) -> None:
        self.qkv, self.out = _packed(QKV, HIDDEN), _packed(HIDDEN, HIDDEN)
        self.gate, self.up, self.down = (
            _packed(FFN, HIDDEN),
            _packed(FFN, HIDDEN),
            _packed(HIDDEN, FFN),
        )
        mx.eval([w.codes for w in (self.qkv, self.out, self.gate, self.up, self.down)])

    def __call__(self, x: mx.array, norm: mx.array) -> mx.array:
        normed = ProductOptions(norm)
        heads = packed_matmul(x, self.qkv, normed)[..., :HIDDEN]
        x = packed_matmul(heads, self.out, ProductOptions(residual=x))
        inner = packed_swiglu(x, self.gate, self.up, normed)
        return packed_matmul(inner, self.down, ProductOptions(residual=x))


BLOCK_FLOPS = 2 * (QKV * HIDDEN + HIDDEN * HIDDEN + 3 * HIDDEN * FFN)

Workload = tuple[Callable[[], mx.array], float]
"""What is evaluated, and its multiplications and additions."""


def workloads(blocks: int = BLOCKS) -> dict[str, Workload]:
    """Return the workloads by name; `blocks` is the number of transformer blocks that the packed ones run."""
    stack, norm = [_Block() for _ in range(blocks)], mx.ones((HIDDEN,))

    def packed(rows: int) -> Workload:
        x = mx.random.normal((rows, HIDDEN))

        def run() -> mx.array:
            y = x
            for block in stack:
                y = block(y, norm)
            return y

        return run, rows * blocks * BLOCK_FLOPS

    def dense(m: int, n: int, k: int) -> Workload:
        a, b = mx.random.normal((m, k)), mx.random.normal((k, n))
        return lambda: a @ b, 2 * m * n * k

    one_row, flops = packed(1)
    small, of_small = dense(256, 256, 256)
    return {
        "packed, 1 row": (one_row, flops),
        "packed, 64 rows": packed(64),
        "dense, 256 x 256 x 256": (small, of_small),
        "dense, 512 x 512 x 512": dense(512, 512, 512),
        "dense, 64 x 6656 x 2048": dense(64, FFN, HIDDEN),
        "packed, 1 row, and dense in turn": (
            lambda: one_row()[0, 0] + small()[0, 0],
            flops + of_small,
        ),
    }


def worker() -> None:
    """Serve the parent process: measure the GFLOP/s of each workload that it asks for."""
    mx.set_default_device(mx.cpu)
    found = workloads()

    def speed(workload: str, seconds: float) -> Answer:
        run, flops = found[workload]
        mx.eval(run())
        start, calls = time.perf_counter(), 0
        while (taken := time.perf_counter() - start) < seconds:
            mx.eval(run())
            calls += 1
        return {"gflops": calls * flops / taken / 1e9}

    serve({"workloads": list(found)}, {"speed": speed})


# -- who asks it

_NEIGHBOUR = """
import time
end = time.monotonic() + 60
while time.monotonic() < end:
    for _ in range(100000):
        pass
"""


@contextmanager
def neighbours(count: int, own_sessions: bool = False) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run `count` busy processes, each in a session of its own if `own_sessions`, while the context is open."""
    started = [
        subprocess.Popen([sys.executable, "-c", _NEIGHBOUR], start_new_session=own_sessions)
        for _ in range(count)
    ]
    try:
        if started:
            time.sleep(0.3)  # until they compute
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def start_worker(threads: int) -> Peer:
    """Start a process that measures with a given number of threads."""
    return Peer(f"{threads} threads", [sys.executable, "-m", "bench.busy", "--worker"], threads)


def measure(
    peers: Mapping[int, Peer],
    names: list[str],
    situations: list[int],
    rounds: int,
    seconds: float,
    own_sessions: bool = False,
) -> Speeds:
    """Measure the workloads `names` with each number of busy neighbours in `situations`, in turn, in each
    round.
    """
    speeds: Speeds = {}
    for _ in range(rounds):
        for count in situations:
            for name in names:
                with neighbours(count, own_sessions):
                    for threads, peer in peers.items():
                        answer = peer.measure("speed", workload=name, seconds=seconds)
                        speeds.setdefault((name, threads, count), []).append(answer["gflops"])
    return speeds


def table(speeds: Speeds) -> list[list[str]]:
    """Return a table's rows, the header first: medians, and their ratios to those without neighbours."""
    situations = sorted({count for _, _, count in speeds})
    heads = [f"{n} neighbour{'s' * (n > 1)}" if n else "quiet" for n in situations]
    rows = [["GFLOP/s", "threads", *heads]]
    for name, threads in dict.fromkeys((name, threads) for name, threads, _ in speeds):
        figures = {n: statistics.median(speeds[name, threads, n]) for n in situations}
        cells = [
            f"{figure:.1f} ({figure / figures[0]:.2f})" if n else f"{figure:.1f}"
            for n, figure in figures.items()
        ]
        rows.append([name, str(threads), *cells])
    return rows


def targets(speeds: Speeds, threads: int) -> list[Target]:
    """Return the targets: with a neighbour per core a third of the quiet speed, and at least one thread's."""
    most = max(count for _, _, count in speeds)
    found = []
    for name in dict.fromkeys(name for name, _, _ in speeds):
        busy, quiet = (statistics.median(speeds[name, threads, n]) for n in (most, 0))
        found.append(Target(f"{name}: with {most} busy processes over quiet", busy / quiet, KEPT))
        if (alone := speeds.get((name, 1, most))) and threads > 1:
            ratio = busy / statistics.median(alone)
            found.append(Target(f"{name}: the same over a single thread", ratio, 0.9))
    return found


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=integer(1), default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--threads", type=integer(1), default=threads_in_use())
    parser.add_argument("--only", default="", help="workloads whose name has this in it")
    parser.add_argument(
        "--own-sessions", action="store_true", help="every neighbour in a session of its own"
    )
    parser.add_argument("--output", type=Path, help="folder for busy.json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.worker:
        return worker()
    peers = {n: start_worker(n) for n in dict.fromkeys((args.threads, 1))}
    bystanders = Bystanders()
    try:
        names = [n for n in peers[args.threads].hello["workloads"] if args.only in n]
        situations = sorted({0, 1, args.threads})
        speeds = measure(peers, names, situations, args.rounds, args.seconds, args.own_sessions)
    finally:
        for peer in peers.values():
            peer.close()
    print(markdown(table(speeds)), end="\n\n")
    print(markdown(target_rows(targets(speeds, args.threads))))
    if (others := bystanders.processors()) is not None:
        print(f"\nProcessors that others kept busy meanwhile: {others:.2f}")
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
        listed = [[*key, *values] for key, values in speeds.items()]
        (args.output / "busy.json").write_text(json.dumps(listed, indent=1))


if __name__ == "__main__":
    main()
