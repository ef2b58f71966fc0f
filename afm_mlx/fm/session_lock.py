"""One request at a time: others wait in the order in which they came."""

from __future__ import annotations

import asyncio
import contextvars
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from afm_mlx.fm.errors import ConcurrentRequestsError

_PATIENCE = 10
"""Rounds of the event loop in which it closes a stream that was left by `break`."""


class Hold:
    """A request that holds a session's lock."""

    def __init__(self) -> None:
        self._is_active = True

    def mark(self) -> None:
        """Mark the current context, and all tasks started in it, as inside this request.

        Called before code of the caller runs that the request waits for: its tools, and the loop over its
        stream. The mark of a request that has ended has no effect.
        """
        marks = _marks.get()
        if self not in marks:
            _marks.set(frozenset(hold for hold in marks if hold._is_active) | {self})


_marks: contextvars.ContextVar[frozenset[Hold]] = contextvars.ContextVar(
    "requests that this context is inside of", default=frozenset()
)


class SessionLock:
    """A lock for the tasks of one event loop; of any other loop, while nobody has it.

    It refuses those who would wait for themselves: a request out of the loop over the session's own stream, or
    out of one of its tools, also from a task that was started there (`gather`, `wait_for`, a `TaskGroup`).
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._loop: weakref.ref[asyncio.AbstractEventLoop] | None = None
        self._hold: Hold | None = None

    @property
    def is_held(self) -> bool:
        loop = self._loop() if self._loop else None
        # What held it in a loop that is closed can't end any more.
        return self._lock.locked() and loop is not None and not loop.is_closed()

    @asynccontextmanager
    async def held(self) -> AsyncIterator[Hold]:
        """Hold the lock.

        Raises:
            ConcurrentRequestsError: when the request that has it waits for this one, or runs in another event
                loop.
        """
        loop = asyncio.get_running_loop()
        if self._loop is None or self._loop() is not loop:
            if self.is_held:
                raise ConcurrentRequestsError(
                    "The session answers a request in another event loop. Use it in one loop at a time."
                )
            self._lock, self._loop, self._hold = asyncio.Lock(), weakref.ref(loop), None
        for _ in range(_PATIENCE):
            if self._hold not in _marks.get():
                break
            await asyncio.sleep(0)
        else:
            raise ConcurrentRequestsError(
                "The session answers a request that waits for this one: the loop over its stream or a tool of "
                "its own asks it, or a task that was started there. Ask another session, or afterwards."
            )
        async with self._lock:
            hold = self._hold = Hold()
            try:
                yield hold
            finally:
                hold._is_active = False
                if self._hold is hold:
                    self._hold = None
