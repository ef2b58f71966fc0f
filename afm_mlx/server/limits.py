"""Limits on the answers and requests that may wait and run, in all and per client."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from afm_mlx.server.errors import ApiError
from afm_mlx.server.options import ServerOptions

_BODIES = 16
"""Bodies of the largest size that are in memory at a time."""


class Admission:
    """Counts the answers under way, and the work that requests make besides, and refuses what is too much.

    Args:
        options: the server's settings.

    Attributes:
        draining: whether the server ends: nothing new begins.
    """

    def __init__(self, options: ServerOptions):
        self._options = options
        self.draining = False
        self._places = _Places(options.max_batch + options.max_queue, options.max_share)
        self._large = _Places(options.max_batch, options.max_share)
        self._bytes = _Places(_BODIES * options.max_body, max(1 / _BODIES, options.max_share))
        self._told: list[Callable[[ApiError], None]] = []
        self._seconds = 1.0  # that an answer takes, a moving mean

    @property
    def active(self) -> int:
        """Answers that wait or run, and requests that are being prepared."""
        return self._places.taken

    @contextmanager
    def admitted(
        self, client: str, answers: int, tell: Callable[[ApiError], None]
    ) -> Iterator[None]:
        """Reserve places for the answers of a client while the context is open.

        Args:
            client: who asks; only clients with keys have a share of their own.
            answers: number of rows.
            tell: what ends them from outside, with an error.

        Raises:
            ApiError: 503 when the server ends, 429 when the queue is full or the client has its share.
        """
        self._refuse_late()
        with self._reserved(self._places, client, answers, "answers"):
            began = time.monotonic()
            self._told.append(tell)
            try:
                yield
            finally:
                self._told.remove(tell)
                self._seconds += 0.1 * (time.monotonic() - began - self._seconds)

    def working(self, client: str) -> AbstractContextManager[None]:
        """Reserve a place for a request that is being prepared, before it has one for its answers.

        Raises:
            ApiError: as `admitted`.
        """
        self._refuse_late()
        return self._reserved(self._places, client, 1, "requests")

    def working_on_large(self, client: str) -> AbstractContextManager[None]:
        """Reserve one of the limited places for requests with a large body.

        Raises:
            ApiError: 429 when there is none.
        """
        return self._reserved(self._large, client, 1, "large requests")

    def reading(self, client: str, count: int) -> AbstractContextManager[None]:
        """Reserve memory for a number of bytes of a request body.

        Raises:
            ApiError: as `admitted`.
        """
        self._refuse_late()
        return self._reserved(self._bytes, client, count, "bytes of bodies")

    def _refuse_late(self) -> None:
        if self.draining:
            raise ApiError(
                503,
                "The server is stopping and takes no new requests. Try again when it is back.",
                code="server_stopping",
                retry_after=self._options.grace,
            )

    @contextmanager
    def _reserved(self, places: _Places, client: str, count: int, what: str) -> Iterator[None]:
        if refused := places.refusal(client, count, what):
            raise ApiError(429, refused, code="queue_full", retry_after=self._retry_after)
        places.take(client, count)
        try:
            yield
        finally:
            places.take(client, -count)

    def end_all(self) -> None:
        """End all answers under way: the server stops, and has waited for long enough."""
        for tell in list(self._told):
            tell(ApiError(503, "The server has stopped.", code="server_stopping"))

    @property
    def _retry_after(self) -> float:
        """Seconds until some of what waits has ended, as far as the last answers tell."""
        return min(60.0, self._seconds * max(1.0, self.active / self._options.max_batch / 2))


class _Places:
    """Places of which each client takes a share at most.

    Args:
        count: number of places.
        share: the share of a client with a key; others have no shares.
    """

    def __init__(self, count: int, share: float):
        self._count, self._share = count, max(1, int(count * share))
        self.taken = 0
        self._by_client: Counter[str] = Counter()

    def refusal(self, client: str, count: int, what: str) -> str | None:
        """Why a client can't have so many places; None when it can."""
        own = self._by_client[client]
        is_full = self.taken + count > self._count
        if not is_full and (not client or own + count <= self._share):
            return None
        told = f"{self.taken} {what}" if is_full else f"{own} {what} of this key"
        return (
            f"{told} wait or run already, and {count} more would be too many. Try again later, or send fewer "
            "at a time."
        )

    def take(self, client: str, count: int) -> None:
        """Take places, or give them back where the number is negative."""
        self.taken += count
        self._by_client[client] += count
        if not self._by_client[client]:
            del self._by_client[client]
