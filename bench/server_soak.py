"""Our server under every kind of client for minutes: whole answers, flat memory, and nothing left behind.

Clients send chats, completions, schemas, tools and requests for several choices, to the model and its adapters.
Some leave at a random moment, read slowly, send half a body, or something malformed. At the end, every accepted
request has to be answered or ended with its error, resident memory has to be no larger than in the second
minute, and the server has to be alive with nothing running, nothing waiting and no connection open. Exit status
1 says that something was not so.

    python -m bench.server_soak --minutes 10 --clients 64
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from afm_mlx.measure.machine import threads_in_use
from bench.server_client import Address, get
from bench.server_load import Memory
from bench.server_process import ServerError, ServerProcess, with_threads
from bench.server_traffic import Traffic
from bench.server_visitors import LOST, WRONG, Outcome, Visitors
from bench.targets import markdown

GROWTH = 0.03
"""Share that resident memory may grow from the second minute to the last."""
QUIET_SECONDS = 20.0
"""That the server has to come to rest in."""
_EXAMPLES = 3


@dataclass
class Report:
    """The result of a soak test.

    Args:
        outcomes: outcomes of all requests.
        seconds: seconds for which clients sent requests.
        samples: (seconds, bytes of resident memory).
        alive: True if the server was still ready at the end.
        left_over: gauges of running and waiting answers, connections and threads that are too many.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    samples: list[tuple[float, int]] = field(default_factory=list)
    alive: bool = False
    left_over: dict[str, float] = field(default_factory=dict)

    @property
    def faults(self) -> list[str]:
        """Faults of the server, a sentence each; empty if there is none."""
        found = [
            f"{o.kind}: {o.verdict}: {o.detail}"
            for o in self.outcomes
            if o.verdict in (LOST, WRONG)
        ]
        if not self.alive:
            found.append("the server is not there any more")
        if self.left_over:
            found.append(f"left over: {self.left_over}")
        growth = memory_growth(self.samples)
        if growth is not None and growth > GROWTH:
            found.append(f"resident memory has grown by {growth:.1%} since the second minute")
        return found


def memory_growth(samples: Sequence[tuple[float, int]]) -> float | None:
    """Return the last minute's median relative to the second minute's; None before three minutes."""
    last = samples[-1][0] if samples else 0.0
    if last < 180:
        return None
    second = np.median([size for moment, size in samples if 60 <= moment < 120])
    end = np.median([size for moment, size in samples if moment >= last - 60])
    return float(end / second - 1)


async def soak(server: ServerProcess, minutes: float, clients: int, seed: int) -> Report:
    """Let clients send requests for `minutes`, wait for those that run, and report what is left over."""
    report = Report()
    _, listed = await get(server.address, "/v1/models")
    models = [model["id"] for model in json.loads(listed)["data"]]
    apis = [path for path in ("/v1/responses", "/v1/messages") if await _exists(server, path)]
    before = _open_files(server.pid)
    memory = Memory(server)
    start = time.perf_counter()

    async def client(number: int) -> None:
        rng = np.random.default_rng([seed, number])
        visitors = Visitors(server.address, Traffic(rng, models, apis=apis))
        while time.perf_counter() < start + 60 * minutes and server.alive:
            report.outcomes.append(await visitors.visit())

    async with memory.watched():
        await asyncio.gather(*(client(number) for number in range(clients)))
    report.seconds = time.perf_counter() - start
    report.samples = memory.samples
    if server.alive:
        report.left_over = await _left_over(server, before)
        report.alive = (await get(server.address, "/ready"))[0] == 200
    return report


async def _exists(server: ServerProcess, path: str) -> bool:
    """True if the server has a POST route at a path, where it refuses GET with 405 and not with 404."""
    return (await get(server.address, path))[0] == 405


async def _left_over(server: ServerProcess, open_before: int) -> dict[str, float]:
    """Return the gauges, and the number of open files, that are still too high after `QUIET_SECONDS`."""
    end = time.monotonic() + QUIET_SECONDS
    while True:
        found = await gauges(server.address)
        # The connection that asks is one.
        found["open files"] = max(0, _open_files(server.pid) - open_before - 1)
        left = {name: value for name, value in found.items() if value}
        if not left or time.monotonic() > end:
            return left
        await asyncio.sleep(0.5)


async def gauges(address: Address) -> dict[str, float]:
    """Return the server's gauges of answers that run and that wait, by name."""
    _, text = await get(address, "/metrics")
    pattern = r"^afm_mlx:(num_requests_\w+)\{[^}]*\} (\S+)$"
    return {name: float(value) for name, value in re.findall(pattern, text.decode(), re.MULTILINE)}


def _open_files(pid: int) -> int:
    """Return the number of a process's files and sockets; 0 where the system doesn't say."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def table(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Return a table's rows, the header first: the verdicts on each kind of request."""
    counts = Counter((outcome.kind, outcome.verdict) for outcome in outcomes)
    verdicts = sorted({verdict for _, verdict in counts})
    rows = [["", *verdicts]]
    for kind in sorted({kind for kind, _ in counts}):
        rows.append([kind, *(str(counts[kind, verdict]) for verdict in verdicts)])
    return rows


def show(report: Report) -> None:
    """Print a report."""
    print(markdown(table(report.outcomes)) + "\n")
    details = Counter(f"{o.verdict}: {o.detail}" for o in report.outcomes if o.detail)
    for text, count in details.most_common(12):
        print(f"{count} times {text[:180]}")
    sizes = [size / 1e6 for _, size in report.samples]
    marks = [
        f"{moment / 60:.0f} min {size / 1e6:.0f} MB"
        for moment, size in report.samples[:: max(1, len(sizes) // 12)]
    ]
    print(
        f"\n{len(report.outcomes)} requests in {report.seconds:.0f} s; resident: {', '.join(marks)}; "
        f"peak {max(sizes, default=0):.0f} MB"
    )
    faults = Counter(report.faults)
    for fault, count in faults.most_common(30):
        print(f"FAULT ({count}): {fault[:300]}")
    print("All is well." if not faults else f"{sum(faults.values())} faults.")


def command(model: str | None, options: Sequence[str], port: int) -> list[str]:
    """Return the command line that starts our server on a port; by default with the embedded model."""
    given = ["--model", model] if model else []
    start = [sys.executable, "-m", "afm_mlx", "server", "--port", str(port)]
    # Few enough prompts are kept that there is no room for another after the first minute.
    return [*start, "--prompt-cache-bytes", "16MB", *given, *options]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.server_soak", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--minutes", type=float, default=10, help="how long clients come")
    parser.add_argument("--clients", type=int, default=64, help="at the same time")
    parser.add_argument("--seed", type=int, default=0, help="of what they do")
    parser.add_argument("--model", help="folder or hub id; the embedded model without it")
    parser.add_argument("--log", type=Path, help="file for what the server writes")
    parser.add_argument("--output", type=Path, help="file for all that was seen, as JSON")
    parser.add_argument("server", nargs="*", help="options of the server, behind --")
    return parser.parse_args(argv)


async def _run(options: argparse.Namespace, log: Path) -> Report:
    def start(port: int) -> list[str]:
        return command(options.model, options.server, port)

    async with ServerProcess(start, "/ready", log, with_threads(threads_in_use())) as server:
        return await soak(server, options.minutes, options.clients, options.seed)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        try:
            report = asyncio.run(_run(options, options.log or Path(folder, "server.log")))
        except ServerError as error:
            print(f"The server does not start: {error}", file=sys.stderr)
            return 1
    show(report)
    if options.output is not None:
        facts: dict[str, Any] = {
            "outcomes": [[o.kind, o.verdict, o.detail] for o in report.outcomes],
            "seconds": report.seconds,
            "resident": report.samples,
            "left_over": report.left_over,
            "faults": report.faults,
        }
        options.output.write_text(json.dumps(facts, indent=1))
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
