"""Memory over time: waves of requests of every kind against one engine, for minutes or hours.

A wave is a batch of requests of random lengths, samplers, stop strings, logits processors, adapters and prompt
caches, some of which are cancelled on their way. Between waves an adapter is registered, asked for and
forgotten, and a prompt goes through `stream_generate`, which makes an engine of its own and is abandoned
half-way now and then.

Every minute prints what the process holds. At the end, the slope of its memory over the last half says
whether it has levelled off; the exit status is 1 when it has not.

    python -m bench.soak --minutes 60 --rows 64
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import itertools
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import afm_mlx  # before mlx.core, for the faster matrix product

# isort: split
import mlx.core as mx
import numpy as np

from afm_mlx import make_logits_processors, make_sampler
from afm_mlx.adapters.active import random_adapter
from afm_mlx.adapters.adapter_folder import AdapterConfig, save_adapter
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.request import Request
from bench.server_process import resident_bytes

LEVEL = 0.01
"""Growth of resident memory an hour, over its mean, that counts as none."""
NOISE = 4.0
"""MB that the last half may grow all the same: what the allocator's pages make of a level."""

_RANKS = (4, 8, 16)
_CONVERSATIONS = 8
_LONGEST_PROMPT = 300


@dataclass(frozen=True)
class Sample:
    """What the process holds at one moment; memory in MB.

    Args:
        minutes: minutes since the first wave.
        requests: number of requests that have ended, cancelled ones included.
        tokens: number of new tokens.
        resident: memory of the process, as the system counts it.
        active: memory in MLX's arrays.
        cached: memory that MLX's allocator keeps for reuse.
        objects: number of objects that Python's garbage collector tracks.
        threads: number of native threads, MLX's and the kernels' included; -1 where the system doesn't say.
        loads: number of adapter loads.
    """

    minutes: float
    requests: int
    tokens: int
    resident: float
    active: float
    cached: float
    objects: int
    threads: int
    loads: int


class Load:
    """The model, an engine, adapters, and the requests so far.

    Args:
        model_path: folder of the model; pass None for the embedded one.
        rows: number of requests in a wave.
        adapters: number of adapters that stay registered; the pool has memory for half of them.
        folder: folder for adapters' files.
        seed: seed of everything that is random.
    """

    def __init__(self, model_path: str | None, rows: int, adapters: int, folder: Path, seed: int):
        self.model, self.tokenizer = afm_mlx.load(*filter(None, [model_path]))
        self.rows, self.rng = rows, np.random.default_rng(seed)
        self._folders = [self._saved(folder / f"adapter-{i}", i) for i in range(adapters + 1)]
        self.pool = AdapterPool(self.model, budget=self._budget(folder))
        self.names = [path.name for path in self._folders[:-1]]
        for name, path in zip(self.names, self._folders, strict=False):
            self.pool.register(name, path)
        self.engine = Engine(self.model, self.tokenizer, adapters=self.pool)
        self._idle: list[list[Any]] = []  # prompt caches of conversations
        self._lent: list[list[Any]] = []
        self.requests = self.tokens = 0

    def _saved(self, path: Path, seed: int) -> Path:
        rank = _RANKS[seed % len(_RANKS)]
        tensors = {n: mx.array(t) for n, t in random_adapter(self.model, rank, seed).items()}
        save_adapter(path, tensors, AdapterConfig(rank, 1.0, len(self.model.layers)))
        return path

    def _budget(self, folder: Path) -> int:
        """Return the pool's budget in bytes: half of all adapters' files, or twice the largest one's."""
        sizes = [sum(f.stat().st_size for f in path.iterdir()) for path in self._folders]
        return max(sum(sizes) // 2, 2 * max(sizes))

    def wave(self) -> None:
        """Submit requests, cancel some, and run to the end."""
        rng = self.rng
        rows = [self.engine.submit(self._request()) for _ in range(self.rows)]
        cancelled = [row for row in rows if rng.random() < 0.15]
        while self.engine.busy:
            self.tokens += sum(response.token >= 0 for response in self.engine.step())
            if cancelled and rng.random() < 0.05:
                self.engine.cancel(cancelled.pop())
        self.requests += len(rows)
        self._take_caches_back()

    def between_waves(self) -> None:
        """Register, use and unregister an adapter, and run a prompt through `stream_generate`."""
        extra = self._folders[-1]
        self.pool.register(extra.name, extra)
        self.pool.load(extra.name)
        self.pool.load({extra.name: 0.5, self.names[0]: float(self.rng.random())})
        self.pool.unregister(extra.name)
        stream = afm_mlx.stream_generate(
            self.model, self.tokenizer, self._prompt(), max_tokens=int(self.rng.integers(2, 40))
        )
        self.tokens += sum(1 for _ in itertools.islice(stream, int(self.rng.integers(1, 30))))
        self.requests += 1

    def _prompt(self) -> list[int]:
        # Short ones are the most.
        length = int(np.exp(self.rng.uniform(0, np.log(_LONGEST_PROMPT))))
        return self.rng.integers(0, self.model.args.vocab_size, length + 1).tolist()

    def _request(self) -> Request:
        rng = self.rng
        sampler = processors = adapter = cache = None
        if rng.random() < 0.5:
            sampler = make_sampler(temp=float(rng.uniform(0.1, 1.5)), top_p=0.9, top_k=40)
        if rng.random() < 0.2:
            processors = make_logits_processors(repetition_penalty=1.1)
        if rng.random() < 0.6:
            adapter = str(rng.choice(self.names))
        elif rng.random() < 0.3:
            cache = self._cache()
        return Request(
            self._prompt(),
            max_tokens=int(rng.integers(1, 120)),
            sampler=sampler,
            seed=int(rng.integers(2**32)),
            logits_processors=processors or (),
            stop=("\n\n", "the end") if rng.random() < 0.5 else (),
            cache=cache,
            logprobs=bool(rng.random() < 0.3),
            adapter=adapter,
        )

    def _cache(self) -> list[Any]:
        """Lend the cache of an earlier conversation, to one request in a wave, or a new cache."""
        going_on = self._idle and self.rng.random() < 0.5
        self._lent.append(self._idle.pop(0) if going_on else self.engine.make_cache())
        return self._lent[-1]

    def _take_caches_back(self) -> None:
        """Keep the latest conversations whose context has space for any prompt and a token of its answer."""
        most = self.model.args.context_length - _LONGEST_PROMPT - 2
        self._idle = [c for c in self._idle + self._lent if c[0].size() < most][-_CONVERSATIONS:]
        self._lent = []

    def sample(self, minutes: float) -> Sample:
        gc.collect()
        megabyte = 1e6
        return Sample(
            minutes=minutes,
            requests=self.requests,
            tokens=self.tokens,
            resident=resident_bytes(os.getpid()) / megabyte,
            active=mx.get_active_memory() / megabyte,
            cached=mx.get_cache_memory() / megabyte,
            objects=len(gc.get_objects()),
            threads=system_threads(),
            loads=self.pool.describe()["loads"],
        )


def trim() -> None:
    """Have the C library give freed memory back to the system, where it can; what is left is in use."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def system_threads() -> int:
    """Return the number of native threads of the process; -1 where the system doesn't say."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return -1


def slope(samples: Sequence[Sample], name: str) -> float:
    """Return what the figure `name` gains per minute in the last half of the samples, by least squares."""
    last = samples[len(samples) // 2 :]
    if len(last) < 2:
        return 0.0
    return float(np.polyfit([s.minutes for s in last], [getattr(s, name) for s in last], 1)[0])


def levelled_off(samples: Sequence[Sample]) -> bool:
    """True if resident memory has stopped growing by the last half."""
    last = samples[len(samples) // 2 :]
    mean = sum(s.resident for s in last) / len(last)
    gained = slope(samples, "resident")
    return gained * 60 <= LEVEL * mean or gained * (last[-1].minutes - last[0].minutes) <= NOISE


def soak(load: Load, minutes: float, every: float, trimmed: bool) -> list[Sample]:
    """Run waves for a duration, and print samples at an interval, both in seconds."""
    columns = [field.name for field in fields(Sample)]
    print("  ".join(f"{name:>9}" for name in columns), flush=True)
    start, samples = time.monotonic(), []
    while not samples or samples[-1].minutes < minutes:
        load.wave()
        load.between_waves()
        passed = time.monotonic() - start
        if passed >= every * len(samples):
            if trimmed:
                trim()
            samples.append(load.sample(passed / 60))
            row = asdict(samples[-1])
            print(
                *(f"{v:>9.1f}" if isinstance(v, float) else f"{v:>9}" for v in row.values()),
                sep="  ",
                flush=True,
            )
    return samples


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="how long to go on")
    parser.add_argument("--rows", type=int, default=64, help="requests of a wave")
    parser.add_argument("--adapters", type=int, default=6, help="that requests name")
    parser.add_argument("--every", type=float, default=60, help="seconds between samples")
    parser.add_argument(
        "--trim",
        action="store_true",
        help="give freed memory back before each sample: what grows all the same is held by somebody",
    )
    parser.add_argument("--seed", type=int, default=0, help="of everything that is random")
    parser.add_argument("--model", help="folder or hub id; the embedded model without it")
    parser.add_argument("--output", type=Path, help="file for all samples, as JSON")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        load = Load(options.model, options.rows, options.adapters, Path(folder), options.seed)
        samples = soak(load, options.minutes, options.every, options.trim)
        load.pool.close()
    level = levelled_off(samples)
    gained = slope(samples, "resident")
    print(
        f"\nover the last half, resident memory gains {gained:.3f} MB a minute, MLX's arrays "
        f"{slope(samples, 'active'):.3f}, its allocator's store {slope(samples, 'cached'):.3f}, and Python "
        f"{slope(samples, 'objects'):.0f} objects; threads of Python: {threading.active_count()}.\n"
        f"It has {'levelled off' if level else 'NOT levelled off'}."
    )
    if options.output is not None:
        options.output.write_text(json.dumps([asdict(s) for s in samples], indent=2))
    return 0 if level else 1


if __name__ == "__main__":
    sys.exit(main())
