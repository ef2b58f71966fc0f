"""One engine for all tasks of asyncio: their requests run as rows of one batch, in MLX's thread.

    engine = AsyncEngine(model, tokenizer)
    async for response in engine.stream(Request(prompt)):
        print(response.text, end="")

The event loop submits requests and is woken with responses; it never waits for a computation. Each step of the
engine is its own job in MLX's thread, so that rows join and leave between any two, and other work in that
thread has its turn. While there are no rows, a warm-up may compile kernels; after it there are no jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import mlx.nn as nn

from afm_mlx import threads
from afm_mlx.engine.engine import Engine, Prepared
from afm_mlx.engine.request import Request, TokenResponse
from afm_mlx.engine.warm_up import warm_up
from afm_mlx.errors import RequestError
from afm_mlx.kernels import dispatch
from afm_mlx.model.model import is_afm
from afm_mlx.model.wired_memory import wired_memory
from afm_mlx.tokenizer.protocol import Tokenizer

_LOG = logging.getLogger("afm_mlx.engine")


class StepError(RuntimeError):
    """A step of the engine failed, and with it the rows that took part in it; `__cause__` says why."""


class AsyncEngine:
    """An `Engine` for asyncio: tasks of any event loop, in any thread, share its batch.

    Samplers, logits processors and callbacks of requests run in MLX's thread.

    Args:
        model, tokenizer: what `load` returns.
        options: the keyword arguments of `Engine`. If it can't honour one, the first request raises.
    """

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, **options: Any):
        self._model, self._tokenizer, self._options = model, tokenizer, options
        # The following is used in MLX's thread only.
        self._engine: Engine | None = None
        self._streams: dict[int, _Stream] = {}  # by row
        self._turn_is_queued = False
        self._warming_up: Iterator[object] | None = None  # while rows run
        self._closed = False

    @property
    def rows(self) -> int:
        """Number of requests that wait or run."""
        return len(self._streams)

    @property
    def engine(self) -> Engine | None:
        """The engine, for its figures; None before the first request. Only this object may step it."""
        return self._engine

    async def stream(self, request: Request) -> AsyncGenerator[TokenResponse, None]:
        """Yield the responses of one request, as they come.

        The row is cancelled, before the next step, if the iterator is closed or the task that runs it is
        cancelled. After a `break`, the iterator is closed once nothing refers to it; `contextlib.aclosing`
        closes it at once.

        Raises:
            AFMError: if the request can't be honoured; and if the row can't go on, after the response that has
                the text so far.
            StepError: if a whole step failed.
        """
        engine = self._engine
        if engine is None:
            engine = await asyncio.wrap_future(threads.submit(self._made))
        # Compiling a constraint takes a while, and neither the loop nor the other rows wait for that.
        is_slow = isinstance(request, Request) and (request.constraint is not None or request.heal)
        prepared = (
            await asyncio.to_thread(engine.prepare, request) if is_slow else engine.prepare(request)
        )
        stream = _Stream()
        threads.submit(self._begin, stream, prepared)
        try:
            ended = False
            while not ended:
                response = await stream.responses.get()
                error, ended = response.error, response.finish_reason is not None
                try:
                    if error is None or response.text or response.token >= 0:
                        yield response
                    if error is not None:
                        raise error
                finally:
                    del response, error  # an error's traceback holds this frame
        finally:
            # Once Python has begun to end, there is nothing left to free.
            with contextlib.suppress(RequestError):
                threads.submit(self._cancel, stream)

    async def embedding_dim(self) -> int:
        """Return the number of dimensions of the model's embeddings; `RequestError` if it can't have any."""
        return await asyncio.wrap_future(threads.submit(lambda: self._made().embedding_dim))

    def warm_up(self) -> None:
        """Have the model's Metal kernels compiled while no rows run, see `afm_mlx.engine.warm_up`.

        A request waits for one kernel at most. What goes wrong is logged.
        """
        if dispatch.device() == "gpu" and is_afm(self._model):
            options = self._options
            steps = warm_up(
                self._model,
                options.get("max_batch", 8),
                drafts=options.get("speculation") is not None,
                adapters=options.get("adapters") is not None,
                kv=options.get("kv", "int8"),
            )
            threads.submit(self._continue, steps)

    def close(self) -> None:
        """Fail the requests that wait or run, and let go of the model; later requests raise `RequestError`."""
        threads.call(self._close)

    # -- in MLX's thread

    def _close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for stream in self._streams.values():
            stream.fail(RequestError("The engine was closed."))
        self._streams.clear()
        self._abandon()
        self._warming_up = None
        self._options.clear()
        del self._model

    def _abandon(self) -> None:
        if self._engine is not None:
            self._engine.abandon()
            self._engine = None

    def _continue(self, warming_up: Iterator[object]) -> None:
        """Take a step of the warm-up and queue the next one; while rows run, keep it until they have ended."""
        if self._closed:
            return
        if self._streams:
            self._warming_up = warming_up
            return
        try:
            next(warming_up)
        except StopIteration:
            pass
        except Exception as error:
            _LOG.warning(
                "Kernels could not be compiled in advance (%s: %s).", type(error).__name__, error
            )
        else:
            threads.submit(self._continue, warming_up)

    def _made(self) -> Engine:
        """Return the engine, which the first call makes: it belongs to this thread."""
        if self._closed:
            raise RequestError("The engine is closed.")
        if self._engine is None:
            with wired_memory(self._model):
                self._engine = Engine(self._model, self._tokenizer, **self._options)
        return self._engine

    def _begin(self, stream: _Stream, prepared: Prepared) -> None:
        try:
            stream.row = self._made().submit_prepared(prepared)
            self._streams[stream.row] = stream
            self._queue_turn()
        except BaseException as error:  # of any kind, because the caller waits for it
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
        """Take one step, deliver its responses, and queue the next step after the jobs that wait."""
        self._turn_is_queued = False
        if self._closed:
            return
        engine = self._made()
        try:
            for response in engine.step():
                stream = self._streams.get(response.row)
                if stream is None:  # its loop was closed during this delivery
                    continue
                if response.finish_reason is not None:
                    del self._streams[response.row]
                    stream.put(response)
                elif not stream.put(response):
                    self._cancel(stream)
        except BaseException as error:  # of any kind, because rows wait for it
            self._fail_started(error)
        if self._engine is engine and engine.busy:
            self._queue_turn()
        elif self._warming_up is not None and not self._streams:
            warming_up, self._warming_up = self._warming_up, None
            threads.submit(self._continue, warming_up)

    def _fail_started(self, cause: BaseException) -> None:
        """Fail the rows that took part in a step; or all rows, if the engine can't say which ones did."""
        waiting: list[int] = []
        try:
            waiting = self._made().drop_started()
        except BaseException:
            self._abandon()  # the next request makes another one
        for row in self._streams.keys() - waiting:
            error = StepError(f"A step of the engine failed ({type(cause).__name__}: {cause}).")
            error.__cause__ = cause
            self._streams.pop(row).fail(error)


class _Stream:
    """A queue of one request's responses, from MLX's thread to an event loop."""

    def __init__(self) -> None:
        self.row = -1  # its id, once there is one
        self.responses: asyncio.Queue[TokenResponse] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def put(self, response: TokenResponse) -> bool:
        """Append a response; return False if the event loop was closed."""
        try:
            self._loop.call_soon_threadsafe(self.responses.put_nowait, response)
        except RuntimeError:  # it was closed
            return False
        return True

    def fail(self, error: BaseException) -> None:
        if not isinstance(error, Exception):  # SystemExit must not end the caller's loop
            cause = error
            error = StepError(f"The request failed ({type(cause).__name__}: {cause}).")
            error.__cause__ = cause
        self.put(TokenResponse(self.row, -1, "", None, "error", error))
