"""Threads for what requests need besides the model: bodies decoded, prompts encoded, constraints compiled.

The event loop does nothing that takes longer with a larger body. What a small request needs never waits behind
the work of large ones, and there are so few threads that the model keeps its share of the processor.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from afm_mlx.server.limits import Admission

LARGE = 1 << 16
"""Bytes above which a request body counts as large; large bodies have threads of their own, see `_THREADS`."""

Result = TypeVar("Result")
_CPUS = os.cpu_count() or 1
_SMALL, _LARGE, _COMPILING, _ADAPTERS = "small", "large", "compiling", "adapters"
_THREADS = {
    _SMALL: 4,  # each takes a millisecond or few
    _LARGE: max(1, _CPUS // 4),
    _COMPILING: max(1, _CPUS // 4),
    _ADAPTERS: 2,  # they wait for the loader
}


class Workers:
    """The threads of a server.

    Args:
        admission: counts the work that waits and runs, and refuses what is too much.
    """

    def __init__(self, admission: Admission):
        self.admission = admission
        self._threads = {
            kind: ThreadPoolExecutor(count, f"server-{kind}") for kind, count in _THREADS.items()
        }

    def begin(self, client: str, size: int) -> None:
        """Tell `in_thread` of the request that the current task answers.

        Args:
            client: who asks.
            size: bytes of the body.
        """
        _REQUEST.set(_Request(self, client, size > LARGE))

    async def change_adapters(self, function: Callable[[], Result]) -> Result:
        """Run a change of the adapters, which may wait for files to be read."""
        return await self.run(_ADAPTERS, function)

    async def run(self, kind: str, function: Callable[[], Result]) -> Result:
        """Run a function in one of the threads of a kind."""
        context = contextvars.copy_context()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads[kind], context.run, function)

    def close(self) -> None:
        """End the threads; what they have begun goes on for a while."""
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True)
class _Request:
    """The request that a task answers."""

    workers: Workers
    client: str
    is_large: bool


_REQUEST: ContextVar[_Request | None] = ContextVar("_REQUEST", default=None)


async def in_thread(
    function: Callable[[], Result], *, compiles: bool = False, is_admitted: bool = False
) -> Result:
    """Run a part of a request's work in a thread; nothing else waits for it.

    Args:
        function: the work.
        compiles: whether it may take long however small the body is, as grammars may.
        is_admitted: whether the request has its place already.

    Raises:
        ApiError: 429 when too much waits already, 503 when the server ends.
    """
    request = _REQUEST.get()
    if request is None:  # no request's body was read: a program calls what routes do
        return await asyncio.to_thread(function)
    workers, client = request.workers, request.client
    with (
        nullcontext() if is_admitted else workers.admission.working(client),
        workers.admission.working_on_large(client) if request.is_large else nullcontext(),
    ):
        kind = _LARGE if request.is_large else _COMPILING if compiles else _SMALL
        return await workers.run(kind, function)
