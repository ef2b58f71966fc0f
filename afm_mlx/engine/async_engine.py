"""One engine for all tasks of asyncio: their requests run as rows of one batch, in MLX's thread.

    engine = AsyncEngine(model, tokenizer)
    async for response in engine.stream(Request(prompt)):
        print(response.text, end="")

The event loop hands requests over and is woken with responses; it never waits for a computation. Each step of
the engine is a job of its own in MLX's thread, so that rows join and leave between any two, and other work in
that thread has its turn. There are no jobs while there are no rows.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Iterable
from typing import Any

import mlx.nn as nn

from afm_mlx import threads
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.request import Request, Response
from afm_mlx.engine.row import Prepared
from afm_mlx.errors import RequestError
from afm_mlx.model.wired_memory import wired_memory


class StepError(RuntimeError):
    """A step of the engine failed, and the rows that took part in it with it; the cause says why."""


class AsyncEngine:
    """An `Engine` for asyncio: tasks of any event loop, in any thread, share its batch.

    Samplers, logits processors and callbacks of requests run in MLX's thread.

    Args:
        model, tokenizer: what `load` returns.
        options: those of `Engine`. What it can't honour is raised by the first request.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, **options: Any):
        self._model, self._tokenizer, self._options = model, tokenizer, options
        # All below is MLX's thread's own.
        self._engine: Engine | None = None
        self._streams: dict[int, _Stream] = {}  # by row
        self._turn_is_queued = False

    @property
    def rows(self) -> int:
        """Number of requests that wait or run."""
        return len(self._streams)

    @property
    def engine(self) -> Engine | None:
        """The engine, for its figures; None before the first request. It is stepped by none but this object."""
        return self._engine

    async def stream(self, request: Request) -> AsyncGenerator[Response, None]:
        """Yield the responses of one request, as they come.

        The row is cancelled when the iterator is closed, or the task that runs it is cancelled: it is gone
        before the next step. An iterator that was left by `break` is closed once nobody holds it;
        `contextlib.aclosing` closes it at once.

        Args:
            request: the request.

        Raises:
            AFMError: when the request can't be honoured, or the row can't go on; that comes after the response
                that has the text so far.
            StepError: when a whole step failed.
        """
        engine = self._engine
        if engine is None:
            engine = await asyncio.wrap_future(threads.submit(self._made))
        # A constraint takes a while to be compiled, and neither the loop nor the other rows wait for that.
        is_slow = isinstance(request, Request) and (request.constraint is not None or request.heal)
        prepared = (
            await asyncio.to_thread(engine.prepare, request) if is_slow else engine.prepare(request)
        )
        stream = _Stream()
        threads.submit(self._begin, stream, prepared)
        try:
            while not stream.ended:
                await stream.arrived.wait()
                stream.arrived.clear()
                for response in stream.taken():
                    yield response
                    del response  # it may hold an error, whose traceback holds this frame
        finally:
            # Once Python has begun to end, there is nothing left to free.
            with contextlib.suppress(RequestError):
                threads.submit(self._cancel, stream)

    # -- in MLX's thread

    def _made(self) -> Engine:
        """The engine, which belongs to the thread that makes it."""
        if self._engine is None:
            with wired_memory(self._model):
                self._engine = Engine(self._model, self._tokenizer, **self._options)
        return self._engine

    def _begin(self, stream: _Stream, prepared: Prepared) -> None:
        try:
            stream.row = self._made().submit_prepared(prepared)
            self._streams[stream.row] = stream
            self._queue_turn()
        except BaseException as error:  # whatever it is, its caller waits for it
            self._streams.pop(stream.row, None)
            stream.fail(error)

    def _cancel(self, stream: _Stream) -> None:
        if self._streams.pop(stream.row, None) is not None:
            try:
                self._made().cancel(stream.row)
            except BaseException as error:
                self._fail_started(error)

    def _queue_turn(self) -> None:
        if not self._turn_is_queued:
            self._turn_is_queued = True
            threads.submit(self._turn)

    def _turn(self) -> None:
        """Take one step, hand out what came of it, and queue the next one behind whatever waits."""
        self._turn_is_queued = False
        engine = self._made()
        try:
            self._hand_out(engine.step())
        except BaseException as error:  # whatever it is, rows wait for it
            self._fail_started(error)
        if self._engine is engine and engine.busy:
            self._queue_turn()

    def _hand_out(self, responses: Iterable[Response]) -> None:
        for response in responses:
            stream = self._streams.get(response.row)
            if (
                stream is None
            ):  # its loop was closed while responses before this one were handed over
                continue
            if response.finish_reason is not None:
                del self._streams[response.row]
                stream.put(response)
            elif not stream.put(response):
                self._cancel(stream)

    def _fail_started(self, cause: BaseException) -> None:
        """Fail the rows that took part in a step, or all rows and the engine where they can't be told apart."""
        waiting: list[int] = []
        try:
            waiting = self._made().drop_started()
        except BaseException:
            self._engine = None  # the next request makes another one
        self._fail(self._streams.keys() - waiting, cause)

    def _fail(self, rows: Iterable[int], cause: BaseException) -> None:
        for row in rows:
            error = StepError(f"A step of the engine failed ({type(cause).__name__}: {cause}).")
            error.__cause__ = cause
            self._streams.pop(row).fail(error)


class _Stream:
    """One request on its way: what MLX's thread puts in, an event loop takes out.

    Attributes:
        row: id of the row; -1 until there is one.
        arrived: set when there is something to take.
        ended: whether all was taken.
    """

    def __init__(self) -> None:
        self.row = -1
        self.arrived = asyncio.Event()
        self.ended = False
        self._loop = asyncio.get_running_loop()
        self._items: deque[Response] = deque()

    # -- in MLX's thread

    def put(self, response: Response) -> bool:
        """Hand a response over; returns whether there is still a loop to take it."""
        self._items.append(response)
        try:
            self._loop.call_soon_threadsafe(self.arrived.set)
        except RuntimeError:  # it was closed
            return False
        return True

    def fail(self, error: BaseException) -> None:
        """End with an error that no response of the engine's carries."""
        if not isinstance(error, Exception):  # a caller's loop is not to end with SystemExit
            cause, error = (
                error,
                StepError(f"The request failed ({type(error).__name__}: {error})."),
            )
            error.__cause__ = cause
        self.put(Response(self.row, -1, "", None, "error", error))

    # -- in the event loop

    def taken(self) -> Iterable[Response]:
        """What has arrived since.

        Raises:
            Exception: the row's error, behind its last response.
        """
        while self._items:
            response = self._items.popleft()
            error, self.ended = response.error, response.finish_reason is not None
            try:
                if error is None or response.text or response.token >= 0:
                    yield response
                if error is not None:
                    raise error
            finally:
                del response, error  # an error's traceback holds this frame
