"""Admission of requests: limits on what waits and runs, in total and per client, and threads for side work.

The event loop does nothing that takes longer for a larger body. Side work (decoding bodies, encoding prompts,
compiling constraints) runs in threads; small requests never wait behind large ones, and the threads are so few
that the model keeps its share of the processor.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from afm_mlx.server.replies import ApiError
from afm_mlx.server.server_options import ServerOptions

LARGE = 1 << 16
"""Bytes above which a request body counts as large."""
_BODIES = 16
"""Number of bodies of the largest allowed size that may be in memory at a time."""

Result = TypeVar("Result")
_CPUS = os.cpu_count() or 1
_THREADS = {
    "small": 4,  # each task takes a few milliseconds
    "large": max(1, _CPUS // 4),
    "compiling": max(1, _CPUS // 4),
    "images": 8,  # they may wait for the web; `images.ImageMemory` bounds the decoding
    "adapters": 2,  # they wait for files
}
"""Number of threads for each kind of work."""


class Admission:
    """Counts the answers and requests that wait and run, and refuses what exceeds the limits."""

    def __init__(self, options: ServerOptions):
        self._options = options
        self.draining = False  # True once the server is stopping: nothing new begins
        self._slots = _Slots(options.max_batch + options.max_queue, options.max_share)
        self._large = _Slots(options.max_batch, options.max_share)
        self._bytes = _Slots(_BODIES * options.max_body, max(1 / _BODIES, options.max_share))
        self._running: list[Callable[[ApiError], None]] = []
        self._seconds = 1.0  # moving mean of an answer's duration

    @property
    def active(self) -> int:
        """Number of answers that wait or run, and of requests that are being prepared."""
        return self._slots.taken

    @contextmanager
    def admitted(
        self, client: str, answers: int, end: Callable[[ApiError], None]
    ) -> Iterator[None]:
        """Reserve slots for a client's answers while the context is open.

        `end_all` calls `end` with an error when the server stops.

        Raises:
            ApiError: 503 if the server is stopping, 429 if the queue is full or the client's share is used up.
                Only clients with keys have a share of their own.
        """
        self._refuse_if_draining()
        with self._reserved(self._slots, client, answers, "answers"):
            began = time.monotonic()
            self._running.append(end)
            try:
                yield
            finally:
                self._running.remove(end)
                self._seconds += 0.1 * (time.monotonic() - began - self._seconds)

    def preparing(self, client: str) -> AbstractContextManager[None]:
        """Reserve a slot for a request that is read or prepared; raise `ApiError` as `admitted` does."""
        self._refuse_if_draining()
        return self._reserved(self._slots, client, 1, "requests")

    def preparing_large(self, client: str) -> AbstractContextManager[None]:
        """Reserve one of the few slots for requests with large bodies; raise a 429 if there is none."""
        return self._reserved(self._large, client, 1, "large requests")

    def reading(self, client: str, count: int) -> AbstractContextManager[None]:
        """Reserve memory for `count` bytes of a request's body; raise `ApiError` as `admitted` does."""
        self._refuse_if_draining()
        return self._reserved(self._bytes, client, count, "bytes of bodies")

    def _refuse_if_draining(self) -> None:
        if self.draining:
            raise ApiError(
                503,
                "The server is stopping and takes no new requests. Try again when it is back.",
                code="server_stopping",
                retry_after=self._options.grace,
            )

    @contextmanager
    def _reserved(self, slots: _Slots, client: str, count: int, what: str) -> Iterator[None]:
        if refused := slots.refusal(client, count, what):
            # An estimate of the time in which half of the batch has ended.
            wait = self._seconds * max(1.0, self.active / self._options.max_batch / 2)
            raise ApiError(429, refused, code="queue_full", retry_after=min(60.0, wait))
        slots.take(client, count)
        try:
            yield
        finally:
            slots.take(client, -count)

    def end_all(self) -> None:
        """End all running answers with an error."""
        for end in list(self._running):
            end(ApiError(503, "The server has stopped.", code="server_stopping"))


class _Slots:
    """A limited number of slots, of which a client with a key gets at most a share."""

    def __init__(self, count: int, share: float):
        self._count, self._share = count, max(1, int(count * share))
        self.taken = 0
        self._by_client: Counter[str] = Counter()

    def refusal(self, client: str, count: int, what: str) -> str | None:
        """Return why a client can't have `count` more slots, named `what`; None if it can."""
        own = self._by_client[client]
        is_full = self.taken + count > self._count
        if not is_full and (not client or own + count <= self._share):
            return None
        active = f"{self.taken} {what}" if is_full else f"{own} {what} of this key"
        return (
            f"{active} wait or run already, and {count} more would be too many. Try again later, or send fewer "
            "at a time."
        )

    def take(self, client: str, count: int) -> None:
        """Reserve `count` slots for a client, or free them if `count` is negative."""
        self.taken += count
        self._by_client[client] += count
        if not self._by_client[client]:
            del self._by_client[client]


class Workers:
    """The threads that run requests' work outside of the model, such as encoding prompts."""

    def __init__(self, admission: Admission):
        self.admission = admission
        self._threads = {
            kind: ThreadPoolExecutor(count, f"server-{kind}") for kind, count in _THREADS.items()
        }

    def begin(self, client: str, size: int, has_images: bool = False) -> None:
        """Set the client and the body, its size in bytes, that `in_thread` in the current task accounts for."""
        _CURRENT.set(_CurrentRequest(self, client, size > LARGE, has_images))

    async def run(self, kind: str, function: Callable[[], Result]) -> Result:
        """Run a function in one of the threads for `kind`, a key of `_THREADS`; return its result."""
        context = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads[kind], context.run, function)

    def close(self) -> None:
        """End the threads: drop work that has not begun, and don't wait for work that has."""
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True)
class _CurrentRequest:
    workers: Workers
    client: str
    is_large: bool
    has_images: bool


_CURRENT: ContextVar[_CurrentRequest | None] = ContextVar("_CURRENT", default=None)


async def in_thread(
    function: Callable[[], Result], *, compiles: bool = False, is_admitted: bool = False
) -> Result:
    """Run a part of the current request's work in a thread.

    Args:
        function: the work, called without arguments; its result is returned.
        compiles: True for work that can take long however small the body is, such as compiling a grammar.
        is_admitted: True if the caller has reserved slots with `Admission.admitted`.

    Raises:
        ApiError: 429 if too much work waits, 503 if the server is stopping.
    """
    request = _CURRENT.get()
    if request is None:  # outside of a request
        return await asyncio.to_thread(function)
    workers, client = request.workers, request.client
    with (
        nullcontext() if is_admitted else workers.admission.preparing(client),
        workers.admission.preparing_large(client) if request.is_large else nullcontext(),
    ):
        kind = "large" if request.is_large else "compiling" if compiles else "small"
        return await workers.run("images" if request.has_images else kind, function)
