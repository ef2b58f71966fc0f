"""What follows from the servers' figures: tables, and what was promised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from bench.peer_models import EXACT, INT8, LLAMA, MLX_LM
from bench.targets import Target

Measured: TypeAlias = Mapping[str, Mapping[int, Mapping[str, float]]]
"""Figures of `server_load.figures`, by program and number of clients."""

CLIENTS = 16
"""Of the promised throughput."""


def server_targets(measured: Measured) -> list[Target]:
    """Return throughput relative to the other servers, and the ratio of slow tokens to usual ones."""
    throughput = {
        name: by_clients[CLIENTS]["tokens_per_second"]
        for name, by_clients in measured.items()
        if CLIENTS in by_clients
    }
    llama = max((t for name, t in throughput.items() if name.startswith(LLAMA)), default=None)
    # As many clients as suit it best: 16 would wait for minutes.
    slow = [f["tokens_per_second"] for f in measured.get(MLX_LM, {}).values()]
    found = []
    for name in (EXACT, INT8):
        mine = throughput.get(name)
        for other, value, bound in (
            ("llama.cpp's best", llama, 2),
            ("mlx-lm's best", max(slow, default=None), 20),
        ):
            ratio = mine / value if mine is not None and value else None
            found.append(
                Target(f"{name}: tokens/s at {CLIENTS} clients over {other}", ratio, bound)
            )
    for name in (EXACT, INT8):
        for clients, figures in measured.get(name, {}).items():
            for key, what in (("per_token", "time per token"), ("gap", "gap between tokens")):
                title = f"{name}, {clients} clients: {what}, p99 over p50"
                found.append(Target(title, _spread(figures, key), 2, at_most=True))
    return found


def _spread(figures: Mapping[str, float], key: str) -> float | None:
    top, middle = figures[f"{key}_p99"], figures[f"{key}_p50"]
    return top / middle if middle > 0 else None  # no tokens: NaN


def table(measured: Measured) -> list[list[str]]:
    """Return a table's rows, the header first; times in milliseconds, of the first token in seconds."""
    rows = [
        [
            "",
            "clients",
            "tok/s",
            "TTFT p50 s",
            "p99",
            "token p50 ms",
            "p99",
            "gap p50 ms",
            "p99",
            "requests",
            "errors",
            "ended early",
            "prompt tok",
        ]
    ]
    for name, by_clients in measured.items():
        for clients, f in by_clients.items():
            firsts = [f"{f[f'first_p{q}']:.2f}" for q in (50, 99)]
            others = [f"{1e3 * f[f'{k}_p{q}']:.0f}" for k in ("per_token", "gap") for q in (50, 99)]
            counts = [f"{f[k]:.0f}" for k in ("requests", "errors", "ended_early", "prompt_tokens")]
            speed = f"{f['tokens_per_second']:.1f}"
            rows.append([name, str(clients), speed, *firsts, *others, *counts])
    return rows


def memory_rows(memory: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """Return a table's rows of resident memory, the header first."""
    rows = [["resident MB", "when ready", "after a minute under load", "at the end"]]
    for name, found in memory.items():
        cells = [f"{found[key] / 1e6:.0f}" for key in ("first", "after_a_minute", "last")]
        rows.append([name, *cells])
    return rows
