"""Server-sent events, and answers that end when their client goes away.

Starlette does not tell a handler that its client has left: here somebody always listens, from the first moment
on and whether an answer is streamed or not.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from afm_mlx.server.errors import ApiError
from afm_mlx.server.request_ids import REQUEST_ID

_LOG = logging.getLogger("afm_mlx.server")
Result = TypeVar("Result")

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies such as nginx hold events back otherwise
]


class ClientLeft(Exception):
    """The client has closed its connection before the answer was there."""


def event(data: Any, name: str | None = None) -> bytes:
    """One event.

    Args:
        data: what is written as JSON, or a text as it is.
        name: the event's type, for APIs that have such.
    """
    body = data.encode() if isinstance(data, str) else msgspec.json.encode(data)
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + body + b"\n\n"


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response with a JSON body."""
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def error_response(error: ApiError, path: str) -> Response:
    """An error in the form of the API that a path belongs to."""
    return json_response(error.body_for(path), error.status, error.headers)


async def _left(receive: Receive) -> None:
    """Return when the client has gone; its body is read already."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, answer: Coroutine[Any, Any, Result]) -> Result:
    """Await an answer; when the client goes away, cancel it.

    Args:
        request: whose body was read.
        answer: what to wait for.

    Raises:
        ClientLeft: there is nobody to answer.
    """
    working = asyncio.ensure_future(answer)
    watching = asyncio.ensure_future(_left(request.receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


class EventStream(Response):
    """A response of events, as they come.

    The status is sent with the first event, so that what fails before is an error response like any other. An
    error behind it is an event, and ends the stream. While none comes, a ping is sent each
    `ping_interval` seconds: clients and proxies give up connections in which nothing happens.

    Args:
        events: the events, as `event` writes them.
        request: whose body was read.
        error_event: what an error behind the first event is told with.
        ping: what is sent while there is no event; clients skip it.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        request: Request,
        error_event: Callable[[ApiError], bytes] = lambda error: event(error.openai()),
        ping: bytes = b": ping\n\n",
    ):
        super().__init__()
        self._events, self._request = events, request
        self._error_event, self._ping = error_event, ping
        self._sent_at: float | None = None  # when the last event or ping was

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientLeft):
            await while_connected(self._request, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        pinging = asyncio.create_task(self._ping_while_idle(send))
        try:
            async with aclosing(self._events) as events:
                async for data in events:
                    await self._send(send, data)
        except ClientLeft:
            raise
        except Exception as error:
            pinging.cancel()
            told = self._told(error)
            if self._sent_at is None:
                await error_response(told, scope["path"])(scope, receive, send)
                return
            await self._send(send, self._error_event(told))
        finally:
            pinging.cancel()
            await asyncio.gather(pinging, return_exceptions=True)
        await send({"type": "http.response.body", "body": b""})

    async def _ping_while_idle(self, send: Send) -> None:
        seconds = self._request.app.state.options.ping_interval
        begun = time.monotonic()
        while True:
            idle = time.monotonic() - (begun if self._sent_at is None else self._sent_at)
            if idle >= seconds:
                await self._send(send, self._ping)
                idle = 0
            await asyncio.sleep(seconds - idle)

    def _told(self, error: Exception) -> ApiError:
        if not isinstance(error, ApiError):
            _LOG.error("The request %s has failed.", REQUEST_ID.get(), exc_info=error)
        served = self._request.app.state.served
        told: ApiError = served.told(error)
        served.metrics.failed(told.status)
        return told

    async def _send(self, send: Send, data: bytes) -> None:
        """Send an event, and before the first one the status.

        Raises:
            ClientLeft: when it stays unread for long: the client counts as gone.
        """
        if self._sent_at is None:
            self._sent_at = time.monotonic()
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        self._sent_at = time.monotonic()
        seconds = self._request.app.state.options.send_timeout
        try:
            async with asyncio.timeout(seconds):
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except TimeoutError:
            self._request.state.connection.close()
            await asyncio.sleep(0)  # the connection is told so in the event loop
            raise ClientLeft from None
