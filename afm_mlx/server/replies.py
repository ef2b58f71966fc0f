"""Replies over HTTP: request ids, errors in each API's form, JSON, and streams of events.

Starlette does not report that a client has left. `while_connected` watches the connection once the body
is read, so that work for a client that has gone is cancelled, streamed or not.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from contextvars import ContextVar
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from afm_mlx.errors import (
    MESSAGE,
    AFMError,
    ContextLengthError,
    EmbeddingError,
    ImageError,
    LogitsError,
)

_LOG = logging.getLogger("afm_mlx.server")
Result = TypeVar("Result")
JsonObject = dict[str, Any]

# -- request ids

REQUEST_ID: ContextVar[str] = ContextVar("REQUEST_ID", default="")
"""The id of the request that the current task answers."""
ID_HEADERS = ("x-request-id", "request-id")
"""The header names under which OpenAI's and Anthropic's clients look for the id."""
IGNORED_HEADER = "x-afm-ignored"
"""The header that lists a request's fields that were accepted and ignored, see `field_rules.py`."""


class RequestIds:
    """ASGI middleware that adds `ID_HEADERS` and `IGNORED_HEADER` to every response."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = f"req_{uuid.uuid4().hex}"
        REQUEST_ID.set(request_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name in ID_HEADERS:
                    headers[name] = request_id
                if ignored := scope.get("state", {}).get("ignored"):
                    headers[IGNORED_HEADER] = ignored
            await send(message)

        await self._app(scope, receive, send_with_id)


# -- errors

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "server_error",
}
_ANTHROPIC_TYPES = {
    **_TYPES,
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An error response in OpenAI's, Anthropic's or Ollama's form.

    Args:
        status: HTTP status.
        message: what is wrong, what was got, what is allowed and what to do next; a long message is cut.
        param: the field that the error is about, such as `messages[0].content`.
        code: a word for programs, such as `model_not_found`.
        type: OpenAI's error type; by default the one for `status`.
        retry_after: seconds, for the Retry-After header; pass None for none.
        headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        type: str | None = None,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        cut = message if len(message) <= MESSAGE else message[: MESSAGE - 3] + "..."
        super().__init__(cut)
        self.status, self.message = status, cut
        self.param, self.code = param, code
        default = "server_error" if status >= 500 else "invalid_request_error"
        self.type = type or _TYPES.get(status, default)
        self.retry_after = retry_after
        self._headers = dict(headers or {})

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response besides its type and length."""
        found = dict(self._headers)
        if request_id := REQUEST_ID.get():
            found |= dict.fromkeys(ID_HEADERS, request_id)
        if self.retry_after is not None:
            found["Retry-After"] = str(max(1, math.ceil(self.retry_after)))
        return found

    def openai(self) -> dict[str, object]:
        """Return the body in OpenAI's form."""
        fields = {"message": self.message, "type": self.type, "param": self.param}
        return {"error": {**fields, "code": self.code}}

    def anthropic(self) -> dict[str, object]:
        """Return the body in Anthropic's form."""
        default = "api_error" if self.status >= 500 else "invalid_request_error"
        kind = _ANTHROPIC_TYPES.get(self.status, default)
        error = {"type": kind, "message": self._message_with_field}
        return {"type": "error", "error": error, "request_id": REQUEST_ID.get() or None}

    def ollama(self) -> dict[str, object]:
        """Return the body in Ollama's form."""
        return {"error": self._message_with_field}

    @property
    def _message_with_field(self) -> str:
        """The message, which begins with the field, for forms that have no key for it."""
        field = self.param or ""
        return self.message if field in self.message else f"{field}: {self.message}"


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Make the 400 error of a request that can't be honoured."""
    return ApiError(400, message, param=param, code=code)


def api_error(error: Exception, param: str | None = None) -> ApiError:
    """Convert an exception raised while a request was answered.

    Args:
        error: an `ApiError` is returned as it is, and errors that a user can fix become a 400. Any other
            exception becomes a 500 without its text, which could name the server's files; the log has it.
        param: the field that a 400 is about.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextLengthError):
        return ApiError(400, str(error), param=param, code="context_length_exceeded")
    if isinstance(error, LogitsError):
        # A request's own biases are checked before, so this is the model's fault.
        return ApiError(500, str(error), code="no_token")
    if isinstance(error, EmbeddingError):
        return ApiError(500, str(error), code="no_embedding")
    if isinstance(error, ImageError):
        # Images that can't be read are refused before, so these are the model's features.
        return ApiError(500, str(error), code="no_features")
    if isinstance(error, AFMError):
        return ApiError(400, str(error), param=param)
    return ApiError(
        500,
        "The server has failed at this request; its log says why, under the id in the header x-request-id.",
        code="internal_error",
    )


# -- responses


def json_response(
    body: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Make a response with a JSON body."""
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def error_response(error: ApiError, path: str) -> Response:
    """Make the response for an error, in the form of the API that a path belongs to."""
    is_anthropic = path == "/v1/messages" or path.startswith("/v1/messages/")
    body = error.anthropic() if is_anthropic else error.openai()
    if path.startswith("/api/"):
        body = error.ollama()
    return json_response(body, error.status, error.headers)


def event(data: object, name: str | None = None) -> bytes:
    """Encode one server-sent event of type `name`; a `data` that is a text is written as it is, not as JSON."""
    body = data.encode() if isinstance(data, str) else msgspec.json.encode(data)
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + body + b"\n\n"


def named_event(data: JsonObject) -> bytes:
    """Encode a server-sent event that has its own type as its name, too."""
    return event(data, data["type"])


def json_line(data: object) -> bytes:
    """Encode one line of a stream of JSON objects."""
    return msgspec.json.encode(data) + b"\n"


async def drain(events: AsyncGenerator[bytes, None]) -> None:
    """Take all events of a stream, and drop them."""
    async with aclosing(events):
        async for _ in events:
            pass


class ClientLeft(Exception):
    """Raised when the client has closed its connection before its answer was complete."""


async def while_connected(request: Request, answer: Coroutine[None, None, Result]) -> Result:
    """Return the result of `answer`; if the client leaves before, cancel it and raise `ClientLeft`.

    The body of `request` must have been read: what the connection receives after it is dropped.
    """

    async def client_left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(answer)
    watching = asyncio.ensure_future(client_left())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


EVENTS, JSON_LINES = b"text/event-stream; charset=utf-8", b"application/x-ndjson"
"""Media types of streams."""
_STREAM_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # otherwise proxies such as nginx hold events back
]


class EventStream(Response):
    """A response of server-sent events, or of JSON lines.

    The status is sent with the first event, so an exception before that becomes an ordinary error response. An
    exception after that becomes the last event. After `ping_interval` seconds without an event a ping is sent,
    because clients and proxies close idle connections.

    Args:
        events: the encoded events.
        request: a request whose body was read.
        error_event: encodes the event of an error.
        ping: what is sent as a ping; clients skip it.
        media_type: the value of the header content-type.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        request: Request,
        error_event: Callable[[ApiError], bytes] = lambda error: event(error.openai()),
        ping: bytes = b": ping\n\n",
        media_type: bytes = EVENTS,
    ):
        super().__init__()
        self._events, self._request = events, request
        self._stream_headers = [(b"content-type", media_type), *_STREAM_HEADERS]
        self._error_event, self._ping = error_event, ping
        self._sent_at: float | None = None  # time of the last event or ping

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
            if not isinstance(error, ApiError):
                _LOG.error("The request %s has failed.", REQUEST_ID.get(), exc_info=error)
            reported: ApiError = self._request.app.state.models.failed(self._request, error)
            if self._sent_at is None:
                await error_response(reported, scope["path"])(scope, receive, send)
                return
            await self._send(send, self._error_event(reported))
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

    async def _send(self, send: Send, data: bytes) -> None:
        """Send an event, before the first one the status; raise `ClientLeft` if it isn't read in time."""
        if self._sent_at is None:
            self._sent_at = time.monotonic()
            start = {"type": "http.response.start", "status": 200}
            await send({**start, "headers": self._stream_headers})
        self._sent_at = time.monotonic()
        try:
            async with asyncio.timeout(self._request.app.state.options.send_timeout):
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except TimeoutError:
            self._request.state.connection.close()
            await asyncio.sleep(0)  # the event loop calls connection_lost
            raise ClientLeft from None
