"""Connections: how many may be open, and for how long without a request."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from afm_mlx.server.errors import ApiError
from afm_mlx.server.options import ServerOptions

LINGER_SECONDS, LINGER_BYTES = 5.0, 32 << 20
"""Limits of reading and dropping the rest of a body whose request is answered."""


class GuardedProtocol(H11Protocol):
    """uvicorn's protocol with a bound for connections without a request, however slowly they send one."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.app_state = {**self.app_state, "connection": self}  # of each request's scope
        self._options: ServerOptions = _options_of(self.config.app)
        self._idle_since = self.loop.time()
        self._idle_timer: asyncio.TimerHandle | None = None

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(_LingeringTransport(transport, self))  # type: ignore[arg-type]
        self._await_request()
        if len(self.connections) > self._options.max_connections:
            idle = [
                each
                for each in self.connections
                if isinstance(each, GuardedProtocol) and each._is_idle
            ]
            # This one is idle, too, and the youngest: it is closed when all others have requests.
            min(idle, key=lambda each: each._idle_since).close()

    def data_received(self, data: bytes) -> None:
        if isinstance(self.transport, _LingeringTransport) and self.transport.is_closing():
            self.transport.drop(len(data))
        else:
            super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        if not self.transport.is_closing():
            self._await_request()
        super().on_response_complete()

    def close(self) -> None:
        """Close the connection at once."""
        self.connections.discard(self)
        self.transport.abort()

    def _await_request(self) -> None:
        """The next request has to come whole, but for its body, in a while."""
        self._idle_since = self.loop.time()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._idle_timer = self.loop.call_later(self._options.idle_timeout, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self._is_idle:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, in the APIs' form."""
        error = ApiError(
            400, "This is no valid HTTP/1.1 request, or its headers are too large.", code="bad_http"
        )
        body = msgspec.json.encode(error.openai())
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        try:
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:
            pass  # it came behind a request that is being answered
        self.transport.close()


class _LingeringTransport:
    """A transport that doesn't close while its client still sends the body of a request that is answered.

    Closing a socket that has unread data resets the connection, and the client loses the answer, such as a 413.
    So the sending half is closed first, and what arrives is dropped until the client closes its half.

    Args:
        transport: what is wrapped; all else is its own.
        protocol: the connection's.
    """

    def __init__(self, transport: asyncio.Transport, protocol: GuardedProtocol):
        self._transport, self._protocol = transport, protocol
        self._timer: asyncio.TimerHandle | None = None
        self._left = LINGER_BYTES

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """True from `close` on."""
        return self._timer is not None or self._transport.is_closing()

    def close(self) -> None:
        """Close once the client has closed its half, or at a limit; a second call closes at once."""
        sends = self._protocol.conn.their_state is h11.SEND_BODY
        if sends and self._timer is None and not self._transport.is_closing():
            loop = self._protocol.loop
            self._timer = loop.call_later(LINGER_SECONDS, self._transport.close)
            with suppress(OSError):  # the client has gone already
                self._transport.write_eof()
            self._transport.resume_reading()
        else:
            if self._timer is not None:
                self._timer.cancel()
            self._transport.close()

    def drop(self, count: int) -> None:
        """Count bytes that came after `close`."""
        self._left -= count
        if self._left < 0:
            self._transport.close()


def _options_of(app: Any) -> ServerOptions:
    return app.state.options
