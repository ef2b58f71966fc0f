"""The ranks of a run: processes that work together, and what they exchange, by `mx.distributed`.

    mlx.launch -n 2 afm-mlx lora ...
    mlx.launch -n 2 afm-mlx evaluate ...
    mlx.launch -n 2 afm-mlx generate ...

In training, each rank computes the gradients of its share of each batch, divided by the weights of all ranks'
targets. The sum over ranks is what one process computes of the whole batch, and every rank takes the same step.
In evaluations, rank r of n computes items r, r + n, r + 2n, ..., and all get all results. To generate, all
ranks run one model together. Rank 0 alone prints and writes files.

A rank that ends closes its connections, and the exchanges of all others fail at once (MLX's ring). An exchange
after a failed one may never return, so there is none. A machine that vanishes closes nothing: the system probes
idle connections, and lets them fail after `SILENCE` seconds.
MLX's ring waits for absent ranks without an end, where no handler of Python runs: another process ends this
one after `JOIN_SECONDS`. Exchanges inside of a model's graph never return when they fail: `Ranks.watch` has a
thread look at the connections, and end this process.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from select import select
from typing import Any, NoReturn, Protocol, TypeAlias, TypeVar, runtime_checkable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map

from afm_mlx.errors import AFMError, ConfigError, shown

JOIN_SECONDS = 10.0
"""Seconds in which all ranks must start."""

T = TypeVar("T")
Batches = TypeVar("Batches")
Tree: TypeAlias = Any
"""Arrays in dicts and lists."""

SILENCE = 8
"""Seconds after which a machine that answers no probe counts as gone."""

LOOK_SECONDS = 1.0
"""Seconds between two looks at the connections, by `Ranks.watch` and `Ranks.raising_when_lost`."""

_INLINE = 1024
"""Bytes of a JSON value that rank 0 sends in one exchange; a longer value takes a second one."""


class RankLostError(AFMError):
    """Another rank has ended, or its machine can't be reached."""


@runtime_checkable
class Divisible(Protocol):
    """Batches that ranks can split."""

    def share(self, rank: int, size: int) -> Any:
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
        connections: descriptors of the sockets to other ranks.
    """

    group: mx.distributed.Group | None = None
    seconds: float = 0.0
    connections: frozenset[int] = frozenset()
    _watch: threading.Thread | None = field(default=None, repr=False)
    _ended: threading.Event = field(default_factory=threading.Event, repr=False)
    _problem: str = ""

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

    def share(self, batches: Batches) -> Batches:
        """Return this rank's share of batches.

        Raises `ConfigError` when they can't be split.
        """
        if self.size == 1:
            return batches
        if not isinstance(batches, Divisible):
            unit = getattr(batches, "unit", "data")
            raise ConfigError(
                f"Batches of {unit} are not split over ranks in this kind of training. This run has "
                f"{self.size} ranks; start it without mlx.launch, on one machine."
            )
        return batches.share(self.rank, self.size)

    # -- items

    def each(self, items: Sequence[T], work: Callable[[list[T]], Sequence[Any]]) -> list[Any]:
        """Return a JSON value for each item, of which each rank computes its own.

            texts = join_ranks().each(prompts, lambda own: batch_generate(model, tokenizer, own).texts)

        Args:
            items: the items, the same on all ranks.
            work: takes this rank's items, and returns a value for each; not called on a rank without items,
                but called in a run of one process.

        Raises:
            RankLostError: within a few seconds of another rank's end.
        """
        return self._in_order(self.gather(self._own(items, work)))

    def each_row(self, items: Sequence[T], work: Callable[[list[T]], np.ndarray]) -> np.ndarray:
        """Return a row of float32 for each item, (items, width), as `each` does."""
        own = np.array(self._own(items, work), np.float32)
        if self.size == 1 or not items:
            return own
        width, most = (int(n) for n in self.numbers(own.shape[-1], len(own)).max(axis=0))
        padded = np.zeros((most, width), np.float32)
        if len(own):
            padded[: len(own)] = own
        rows = self._gather(padded.tobytes()).view(np.float32).reshape(self.size, most, width)
        counts = [len(items[rank :: self.size]) for rank in range(self.size)]
        found = self._in_order([part[:n] for part, n in zip(rows, counts, strict=True)])
        return np.array(found, np.float32).reshape(len(items), width)

    def _own(self, items: Sequence[T], work: Callable[[list[T]], Any]) -> Any:
        own = list(items[self.rank :: self.size])
        if not own and self.size > 1:
            return []
        with self.raising_when_lost():
            return work(own)

    def _in_order(self, parts: Sequence[Any]) -> list[Any]:
        return [parts[i % self.size][i // self.size] for i in range(sum(map(len, parts)))]

    @contextmanager
    def raising_when_lost(self) -> Iterator[None]:
        """Raise `RankLostError` in the context, about a second after another rank has ended.

        For long work in Python without exchanges, where no rank ends unless it fails. `watch` is for exchanges
        inside of a model's graph, which no error ends.
        """
        if not self.connections:
            yield
            return
        ended, lost, worker = threading.Event(), threading.Event(), threading.get_ident()

        def interrupt(error: object) -> None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(worker), error)

        def watch() -> None:
            if self._is_lost(ended):
                lost.set()
                # Not a signal: programs in the background may ignore it.
                interrupt(ctypes.py_object(_RankEnded))

        watcher = threading.Thread(target=watch, name="ranks", daemon=True)
        watcher.start()
        try:
            try:
                yield
            finally:
                ended.set()
                watcher.join()
            if lost.is_set():
                interrupt(None)
                raise _RankEnded
        except _RankEnded:
            raise self._lost("its connection is closed") from None

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

    def first(self, value: Any) -> Any:
        """Return rank 0's JSON value; the values of other ranks are ignored."""
        if self.size == 1:
            return value
        data = json.dumps(value).encode() if self.is_first else b""
        head = len(data).to_bytes(8, "little") + data[: _INLINE - 8]
        found = self._of_first(head, _INLINE)
        length = int.from_bytes(found[:8], "little")
        text = found[8 : 8 + length]
        if length > len(text):
            text += self._of_first(data[_INLINE - 8 :], length - len(text))
        return json.loads(text)

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

    # -- waiting and watching

    def wait_for_first(self) -> None:
        """Sleep until rank 0 begins an exchange, where MLX's own wait would keep a core busy.

        Returns at once without sockets (JACCL), and when a connection was closed.
        """
        if self.connections:
            select(self.connections, [], [])

    def watch(self, lost: Callable[[str], object]) -> None:
        """Have a thread call `lost(message)` soon after a connection was closed, and end the process.

        `end_watch` ends it, before a rank ends in good order.
        """
        if not self.connections or self._watch is not None:
            return
        ended = self._ended = threading.Event()

        def look() -> None:
            # The other threads have a second to end by themselves.
            if self._is_lost(ended) and not ended.wait(LOOK_SECONDS):
                lost(self._problem or str(self._lost("a connection was closed")))
                _end(1)

        self._watch = threading.Thread(target=look, name="afm-mlx ranks", daemon=True)
        self._watch.start()

    def fail(self, problem: str) -> None:
        """Have all further exchanges raise `RankLostError`, and a process with `watch` end."""
        self._problem = self._problem or problem

    def end_watch(self) -> None:
        """End the thread of `watch`, because this rank or others are about to end in good order."""
        if self._watch is not None:
            self._ended.set()
            self._watch.join()
            self._watch = None

    def _is_lost(self, ended: threading.Event) -> bool:
        """Wait; return True once another rank has ended or an exchange failed, False once `ended` is set."""
        while not ended.wait(LOOK_SECONDS):
            if self._problem or any(map(_is_closed, self.connections)):
                return True
        return False

    # -- bytes

    def _of_first(self, data: bytes, length: int) -> bytes:
        """Return rank 0's bytes, `length` of them; shorter data is filled up."""
        own = np.zeros(length, np.uint8)
        own[: len(data)] = np.frombuffer(data, np.uint8)
        sent = mx.array(own)
        found = self._exchanged(sent, lambda: mx.distributed.all_sum(sent, group=self.group))
        return np.array(found).tobytes()

    def _gather(self, data: bytes) -> np.ndarray:
        """Return all ranks' bytes, (size, length) uint8; the lengths are equal."""
        own = mx.array(np.frombuffer(data, np.uint8))
        found = self._exchanged(own, lambda: mx.distributed.all_gather(own, group=self.group))
        return np.array(found).reshape(self.size, -1)

    def _exchanged(self, own: Any, exchange: Callable[[], Any]) -> Any:
        if self._problem:  # an exchange after one that has failed may never return
            raise RankLostError(self._problem)
        mx.eval(own)  # before: its errors and its time are no exchange's
        start = time.perf_counter()
        try:
            found = exchange()
            mx.eval(found)
        except RuntimeError as error:
            lost = self._lost(error)
            self.fail(str(lost))
            raise lost from None
        finally:
            self.seconds += time.perf_counter() - start
        return found

    def _lost(self, reason: object) -> RankLostError:
        return RankLostError(
            f"Rank {self.rank} of {self.size} has lost another rank, whose own message says why ({reason})."
        )


class _RankEnded(BaseException):
    """Raised in a thread that is computing, when another rank has ended."""


def _is_closed(descriptor: int) -> bool:
    """True if the other end of a connection is closed and all of its data received, or its machine gone."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        try:
            return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True
    return False  # this process has closed it


ALONE = Ranks()
"""A run of one process."""


def ranks_of(model: nn.Module) -> Ranks | None:
    """Return the ranks that hold a model's parts; None if this process holds it whole."""
    return getattr(model, "ranks", None)


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
    connections = {each for each in sockets() - before if _is_connected(each)}
    probe_connections(connections)
    ranks = Ranks(group, connections=frozenset(connections))
    version = sys.modules["afm_mlx"].__version__  # an import would be of all rooms above
    ranks.check_alike({"afm-mlx": version, "mlx": mx.__version__})
    return ranks


def refuse_ranks(what: str) -> None:
    """Raise `ConfigError` if this process is one of several ranks; `what` needs a single process."""
    if (size := join_ranks().size) > 1:
        raise ConfigError(
            f"{what} needs a single process, and this run has {size} ranks; start it without mlx.launch."
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


def _is_connected(descriptor: int) -> bool:
    """True for a socket with another end; MLX's ring leaves sockets open that only listened."""
    with socket.socket(fileno=os.dup(descriptor)) as found:
        try:
            found.getpeername()
        except OSError:
            return False
    return True


def _end(status: int) -> NoReturn:
    """End the process at once: the thread that waits for an exchange can't be woken."""
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(status)


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
