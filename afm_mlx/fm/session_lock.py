"""One request at a time: others wait in the order in which they came."""

from __future__ import annotations

import asyncio
import contextvars
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from afm_mlx.fm.errors import ConcurrentRequestsError

_of_tools: contextvars.ContextVar[frozenset[int]] = contextvars.ContextVar(
    "locks", default=frozenset()
)
"""The locks, by their ids, that are held by requests which wait for a tool that runs in this context."""
_PATIENCE = 10
"""Rounds of the event loop in which it closes a stream that was left by `break`."""


class SessionLock:
    """A lock for the tasks of one event loop; of any other loop, while nobody has it.

    It refuses those who would wait for themselves.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._loop: weakref.ref[asyncio.AbstractEventLoop] | None = None
        self._owner: asyncio.Task[object] | None = None

    @property
    def is_held(self) -> bool:
        loop = self._loop() if self._loop else None
        # What held it in a loop that is closed can't end any more.
        return self._lock.locked() and loop is not None and not loop.is_closed()

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Hold the lock.

        Raises:
            ConcurrentRequestsError: when the request that has it waits for this one, or runs in another event
                loop.
        """
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        for _ in range(_PATIENCE):
            if id(self) not in _of_tools.get() and (task is None or task is not self._owner):
                break
            await asyncio.sleep(0)
        else:
            raise ConcurrentRequestsError(
                "The session answers a request that waits for this one: a tool of its own asks it, or the loop "
                "over its stream. Ask another session, or afterwards."
            )
        if self._loop is None or self._loop() is not loop:
            if self.is_held:
                raise ConcurrentRequestsError(
                    "The session answers a request in another event loop. Use it in one loop at a time."
                )
            self._lock, self._loop = asyncio.Lock(), weakref.ref(loop)
        async with self._lock:
            self._owner = task
            try:
                yield
            finally:
                if self._owner is task:
                    self._owner = None

    def tool_context(self) -> contextvars.Context:
        """A context for tools that run while the lock is held."""
        context = contextvars.copy_context()
        context.run(_of_tools.set, _of_tools.get() | {id(self)})
        return context
