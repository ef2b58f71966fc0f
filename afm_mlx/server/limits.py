"""How many answers may wait and run: all of them, and those of one client."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from afm_mlx.server.errors import ApiError
from afm_mlx.server.options import ServerOptions


class Admission:
    """Counts the answers under way, and refuses what is too much.

    Args:
        options: the server's settings.

    Attributes:
        draining: whether the server ends: nothing new begins.
        active: answers that wait or run.
    """

    def __init__(self, options: ServerOptions):
        self._options = options
        self.draining = False
        self.active = 0
        self._by_client: Counter[str] = Counter()
        self._told: list[Callable[[ApiError], None]] = []
        self._seconds = 1.0  # that an answer takes, a moving mean

    @property
    def limit(self) -> int:
        """Answers that may wait and run together."""
        return self._options.max_batch + self._options.max_queue

    @contextmanager
    def admitted(
        self, client: str, answers: int, tell: Callable[[ApiError], None]
    ) -> Iterator[None]:
        """Within it, so many answers of a client are under way.

        Args:
            client: who asks; only clients with keys have a share of their own.
            answers: number of rows.
            tell: what ends them from outside, with an error.

        Raises:
            ApiError: 503 when the server ends, 429 when the queue is full or the client has its share.
        """
        if self.draining:
            raise ApiError(
                503,
                "The server is stopping and takes no new requests. Try again when it is back.",
                code="server_stopping",
                retry_after=self._options.grace,
            )
        share = int(self.limit * self._options.max_share) if client else self.limit
        own = self._by_client[client]
        if self.active + answers > self.limit or own + answers > max(1, share):
            whose = "" if self.active + answers > self.limit else " of this key"
            count = self.active if not whose else own
            raise ApiError(
                429,
                f"{count} answers{whose} wait or run already, and {answers} more would be too many. Try again "
                "later, or send fewer at a time.",
                code="queue_full",
                retry_after=self._retry_after,
            )
        began = time.monotonic()
        self.active += answers
        self._by_client[client] += answers
        self._told.append(tell)
        try:
            yield
        finally:
            self._told.remove(tell)
            self.active -= answers
            self._by_client[client] -= answers
            if not self._by_client[client]:
                del self._by_client[client]
            self._seconds += 0.1 * (time.monotonic() - began - self._seconds)

    def end_all(self) -> None:
        """End all answers under way: the server stops, and has waited for long enough."""
        for tell in list(self._told):
            tell(ApiError(503, "The server has stopped.", code="server_stopping"))

    @property
    def _retry_after(self) -> float:
        """Seconds until some of what waits has ended, as far as the last answers tell."""
        return min(60.0, self._seconds * max(1.0, self.active / self._options.max_batch / 2))
