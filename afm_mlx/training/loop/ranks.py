"""The ranks of a run: processes that train one model together, and what they exchange, by `mx.distributed`.

    mlx.launch -n 2 afm-mlx lora ...

Each rank computes the gradients of its share of each batch, divided by the weights of all ranks' targets. The
sum over ranks is what one process computes of the whole batch, and every rank takes the same step. Rank 0 alone
reads and writes the run's folder.

A rank that ends closes its connections, and the exchanges of all others fail at once (MLX's ring). A machine
that vanishes closes nothing: the system probes idle connections, and lets them fail after `SILENCE` seconds.
MLX's ring waits for absent ranks without an end, where no handler of Python runs: another process ends this
one after `JOIN_SECONDS`.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map

from afm_mlx.errors import AFMError, ConfigError, shown
from afm_mlx.training.data.batches import AnyBatches
from afm_mlx.training.loop.gradient_checkpointing import Tree

JOIN_SECONDS = 10.0
"""Seconds in which all ranks must start."""

SILENCE = 8
"""Seconds after which a machine that answers no probe counts as gone."""


class RankLostError(AFMError):
    """Another rank has ended, or its machine can't be reached."""


@runtime_checkable
class Divisible(Protocol):
    """Batches that ranks can split."""

    def share(self, rank: int, size: int) -> AnyBatches:
        """Return the batches with the rank's rows alone; all ranks' rows are the whole batch.

        Raises `ConfigError` when there are fewer rows than ranks, or the rows depend on each other.
        """


@dataclass
class Ranks:
    """This process among the processes of a run.

    Every method that exchanges something must be called by all ranks, in the same order. Each raises
    `RankLostError` when another rank is gone.

    Attributes:
        rank, size: number of this process, from 0, and of all.
        seconds: spent in exchanges, with the time that this rank waited for others.
    """

    group: mx.distributed.Group | None = None
    seconds: float = 0.0

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def is_first(self) -> bool:
        """True for the rank that writes, prints and saves."""
        return self.rank == 0

    def share(self, batches: AnyBatches) -> AnyBatches:
        """Return this rank's share of batches.

        Raises `ConfigError` when they can't be split.
        """
        if self.size == 1:
            return batches
        if not isinstance(batches, Divisible):
            raise ConfigError(
                f"Batches of {batches.unit} are not split over ranks in this kind of training. This run has "
                f"{self.size} ranks; start it without mlx.launch, on one machine."
            )
        return batches.share(self.rank, self.size)

    # -- exchanges

    def numbers(self, *values: float) -> np.ndarray:
        """Return all ranks' numbers, (size, values) float64."""
        own = np.array(values, np.float64)
        if self.size == 1:
            return own[None]
        return self._gather(own.tobytes()).view(np.float64)

    def any(self, flag: bool) -> bool:
        """Return True if the flag of any rank is set."""
        return bool(self.numbers(flag).any())

    def gather(self, value: Any) -> list[Any]:
        """Return all ranks' JSON values, by rank."""
        if self.size == 1:
            return [value]
        own = json.dumps(value).encode()
        lengths = self.numbers(len(own))[:, 0].astype(int)
        rows = self._gather(own.ljust(max(lengths)))
        return [
            json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)
        ]

    def average(self, tree: Tree) -> Tree:
        """Return the mean over ranks of each array of a tree, whose shapes are equal on all ranks."""
        if self.size == 1:
            return tree
        # A list: the function drops what is empty in trees.
        arrays = [array for _, array in tree_flatten(tree)]
        means = iter(self._exchanged(arrays, lambda: nn.average_gradients(arrays, self.group)))
        return tree_map(lambda _: next(means), tree)

    def from_first(self, tree: Tree) -> Tree:
        """Return rank 0's arrays, of a tree whose shapes and types are equal on all ranks."""
        if self.size == 1:
            return tree

        def sent(array: mx.array) -> mx.array:
            # A sum of bits: -0.0 + 0.0 would be 0.0.
            bits = array.view(getattr(mx, f"uint{8 * array.dtype.size}"))
            bits = bits if self.is_first else mx.zeros_like(bits)
            return mx.distributed.all_sum(bits, group=self.group).view(array.dtype)

        return self._exchanged(tree, lambda: tree_map(sent, tree))

    def check_alike(self, facts: Mapping[str, object]) -> None:
        """Raise `ConfigError` on every rank if facts, JSON values by name, differ between the ranks."""
        values = self.gather(dict(facts))
        for rank, others in enumerate(values):
            differing = [
                f"{name} is {shown(others.get(name))} on rank {rank} and {shown(values[0].get(name))} on rank 0"
                for name in values[0] | others
                if others.get(name) != values[0].get(name)
            ]
            if differing:
                raise ConfigError(
                    f"The ranks differ: {'; '.join(differing)}. Give all ranks the same version, model, data "
                    "and options."
                )

    def _gather(self, data: bytes) -> np.ndarray:
        """Return all ranks' bytes, (size, length) uint8; the lengths are equal."""
        own = mx.array(np.frombuffer(data, np.uint8))
        found = self._exchanged(own, lambda: mx.distributed.all_gather(own, group=self.group))
        return np.array(found).reshape(self.size, -1)

    def _exchanged(self, own: Any, exchange: Callable[[], Any]) -> Any:
        mx.eval(own)  # before: its errors and its time are no exchange's
        start = time.perf_counter()
        try:
            found = exchange()
            mx.eval(found)
        except RuntimeError as error:
            raise RankLostError(
                f"Rank {self.rank} of {self.size} has lost another rank, whose own message says why ({error})."
            ) from None
        finally:
            self.seconds += time.perf_counter() - start
        return found


ALONE = Ranks()
"""A run of one process."""


@functools.cache
def join_ranks() -> Ranks:
    """Return this process's place among the ranks that `mlx.launch` started, or `ALONE`.

    Raises:
        ConfigError: when the ranks run different versions, or the launcher's settings can't be used.
        RankLostError: when another rank has ended.
    """
    before = sockets()
    try:
        with _ended_if_late():
            group = mx.distributed.init()
    except RuntimeError as error:
        raise ConfigError(
            f"The ranks can't be connected: {error}. Start all of them at once, with mlx.launch, and check the "
            "addresses of its hostfile."
        ) from None
    if group.size() == 1:
        return ALONE
    probe_connections(sockets() - before)
    ranks = Ranks(group)
    from afm_mlx import __version__

    ranks.check_alike({"afm-mlx": __version__, "mlx": mx.__version__})
    return ranks


def refuse_ranks(what: str) -> None:
    """Raise `ConfigError` if this process is one of several ranks; `what` is what one process makes."""
    if (size := join_ranks().size) > 1:
        raise ConfigError(
            f"{what} is made by one process, and this run has {size} ranks; start it without mlx.launch."
        )


_GUARD = """
import os, select, signal, sys
if not select.select([0], [], [], float(sys.argv[2]))[0]:
    sys.stderr.write(sys.argv[3])
    sys.stderr.flush()
    os.kill(int(sys.argv[1]), signal.SIGKILL)
"""
"""Ends process `argv[1]` after `argv[2]` seconds, unless the pipe on its standard input is closed before."""


@contextmanager
def _ended_if_late() -> Iterator[None]:
    """End this process if the context takes longer than `JOIN_SECONDS`, and say why.

    A thread could not: MLX holds Python's lock while it waits for the other ranks.
    """
    path = os.environ.get("MLX_HOSTFILE")
    if not path or not os.path.isfile(path) or not os.path.getsize(path) > 1:
        yield  # other launchers start all ranks, or none
        return
    rank = os.environ.get("MLX_RANK")
    text = (
        f"afm-mlx: error: rank {rank} has waited {JOIN_SECONDS:g} s, and not all ranks are there. Start all of "
        "them at once, with mlx.launch; check the addresses of its hostfile and the other ranks' messages.\n"
    )
    arguments: Sequence[str] = (str(os.getpid()), str(JOIN_SECONDS), text)
    guard = subprocess.Popen([sys.executable, "-ISc", _GUARD, *arguments], stdin=subprocess.PIPE)
    try:
        yield
    finally:
        guard.communicate()  # closes the pipe


def sockets() -> set[int]:
    """Return the descriptors of this process that are sockets; none where there is no /dev/fd."""
    found = set[int]()
    with suppress(FileNotFoundError):
        for descriptor in map(int, os.listdir("/dev/fd")):
            with suppress(OSError):  # the listing's own is closed
                if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    found.add(descriptor)
    return found


def probe_connections(descriptors: set[int]) -> None:
    """Let the system probe idle connections, so that they fail when the other machine is gone."""
    idle = getattr(socket, "TCP_KEEPIDLE", None) or getattr(socket, "TCP_KEEPALIVE", None)
    for descriptor in descriptors:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (
                (idle, SILENCE // 2),
                (getattr(socket, "TCP_KEEPINTVL", None), 1),
                (getattr(socket, "TCP_KEEPCNT", None), SILENCE - SILENCE // 2),
            ):
                if option is not None:
                    connection.setsockopt(socket.IPPROTO_TCP, option, value)
