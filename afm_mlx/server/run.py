"""Running the server: its socket, its connections, and a shutdown that lets running answers finish."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

import h11
import msgspec
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from afm_mlx.errors import RequestError
from afm_mlx.server.guards import is_loopback
from afm_mlx.server.model_registry import ModelRegistry
from afm_mlx.server.replies import ApiError
from afm_mlx.server.server_options import ServerOptions

BACKLOG = 1024
_TICK = 0.1
"""Seconds between two checks for the end of the server."""

_LOG = logging.getLogger("afm_mlx.server")


def check_access(options: ServerOptions) -> None:
    """Raise `RequestError` if other machines can reach the address and the server has no key."""
    has_key = bool(options.api_keys or options.admin_keys)
    if options.unix_socket is None and not is_loopback(options.host) and not has_key:
        raise RequestError(
            f"The host {options.host} can be reached from other machines, and that needs a key: give "
            "--api-key, --api-key-file or the environment variable AFM_MLX_API_KEY; or listen on 127.0.0.1."
        )


def bind(options: ServerOptions) -> socket.socket:
    """Bind the socket of the options, so that a port in use is known before a model is loaded.

    Raises:
        RequestError: if the socket can't be bound, or would need a key.
    """
    check_access(options)
    path = options.unix_socket
    where = f"{options.host}, port {options.port}" if path is None else path
    other = "--host or --port; port 0 takes a free one" if path is None else "--unix-socket"
    with ExitStack() as opened:
        try:
            if path is None:
                found = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)
                family, kind, protocol, _, address = found[0]
                made = opened.enter_context(socket.socket(family, kind, protocol))
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                made.bind(address)
            else:
                made = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                if path.is_socket():
                    _remove_socket(path)
                made.bind(str(path))
                path.chmod(0o600)  # of this user alone
            made.listen(
                0
            )  # now, so that a second server finds the port in use, or the file no stale one
        except OSError as error:
            raise RequestError(
                f"The server can't listen on {where}: {error.strerror or error}. Choose another {other}."
            ) from None
        opened.pop_all()
    return made


def _remove_socket(path: Path) -> None:
    """Remove the file of a Unix socket that no process listens on; raise `OSError` if one does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.setblocking(False)  # a socket with a full queue would block
        found = other.connect_ex(str(path))
    if found == errno.EPROTOTYPE:
        raise OSError(found, "another program has a socket of another kind there")
    if found != errno.ECONNREFUSED:  # somebody listens, or it is another user's
        raise OSError(found, "another server listens there")
    path.unlink()


def address_of(listening: socket.socket) -> str:
    """Return the URL of a bound socket."""
    name = listening.getsockname()
    if listening.family == socket.AF_UNIX:
        return f"unix:{name}"
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"http://{host}:{name[1]}"


# -- connections

LINGER_SECONDS, LINGER_BYTES = 5.0, 32 << 20
"""Limits on reading and dropping the rest of a body whose request is answered."""


class GuardedProtocol(H11Protocol):
    """uvicorn's protocol with limits on the number and the idle time of connections."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.app_state = {**self.app_state, "connection": self}  # of each request's scope
        self._options: ServerOptions = self.config.app.state.options  # type: ignore[union-attr]
        self._idle_since = self.loop.time()
        self._idle_timer: asyncio.TimerHandle | None = None

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(_LingeringTransport(transport, self))  # type: ignore[arg-type]
        self._await_request()
        if len(self.connections) > self._options.max_connections:
            ours = (each for each in self.connections if isinstance(each, GuardedProtocol))
            idle = [each for each in ours if each._is_idle]
            # This connection is idle, too, and the youngest: it is closed if all others have requests.
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
        """Start the time in which the head of the next request must arrive."""
        self._idle_since = self.loop.time()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._idle_timer = self.loop.call_later(self._options.idle_timeout, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self._is_idle:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer malformed HTTP with an error in OpenAI's form."""
        error = ApiError(
            400, "This is no valid HTTP/1.1 request, or its headers are too large.", code="bad_http"
        )
        body = msgspec.json.encode(error.openai())
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        headers["connection"] = "close"
        try:
            for event in (
                h11.Response(status_code=400, headers=list(headers.items()), reason=b"Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:
            pass  # it follows a request that is being answered
        self.transport.close()


class _LingeringTransport:
    """A transport whose `close` waits for the client to stop sending the body of an answered request.

    Closing a socket with unread data resets the connection, and the client loses the answer, such as a 413. So
    the sending half is closed first, and data is dropped until the client closes its half.
    """

    def __init__(self, transport: asyncio.Transport, protocol: GuardedProtocol):
        self._transport, self._protocol = transport, protocol
        self._timer: asyncio.TimerHandle | None = None
        self._left = LINGER_BYTES

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """True once `close` was called."""
        return self._timer is not None or self._transport.is_closing()

    def close(self) -> None:
        """Close once the client has closed its half, or at the limits; a second call closes at once."""
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
        """Count dropped bytes, and close at the limit."""
        self._left -= count
        if self._left < 0:
            self._transport.close()


# -- serving


class _Uvicorn(uvicorn.Server):
    """uvicorn's server without its signal handlers."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


def run(app: Starlette, listening: socket.socket, stop: threading.Event) -> bool:
    """Serve until `stop` is set; then let running answers finish, and close the socket.

    Returns:
        True if all answers have finished within the grace period; others were ended with an error.
    """
    return asyncio.run(serve(app, listening, stop))


async def serve(app: Starlette, listening: socket.socket, stop: threading.Event) -> bool:
    """Serve as `run` does, in the event loop that is running; return what `run` returns."""
    options: ServerOptions = app.state.options
    # The engine compiles constraints in these threads; few, because the model needs the processor, too.
    compiling = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4), "engine-compiling")
    asyncio.get_running_loop().set_default_executor(compiling)
    # Connections that arrive together are all accepted before surplus ones are closed.
    wanted = options.max_connections + BACKLOG + 256
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    config = uvicorn.Config(
        app,
        http=GuardedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=_LOG.isEnabledFor(logging.INFO),
        backlog=BACKLOG,
        timeout_keep_alive=max(1, round(options.idle_timeout)),
        timeout_graceful_shutdown=1,
        server_header=False,
        proxy_headers=False,
    )
    config.load()
    server = _Uvicorn(config)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    sweeping = asyncio.create_task(app.state.models.sweep())
    has_finished = False
    try:
        while not stop.is_set() and not serving.done():
            await asyncio.sleep(_TICK)
        if not serving.done():
            has_finished = await _drain(app.state.models, options.grace)
    finally:
        sweeping.cancel()
        server.should_exit = True
        await serving
        if options.unix_socket is not None:
            with suppress(OSError):
                _remove_socket(options.unix_socket)
    return has_finished


async def _drain(models: ModelRegistry, seconds: float) -> bool:
    """Refuse new requests; end answers that still run after `seconds`. Return True if there are none."""
    admission = models.resources.admission
    admission.draining = True
    models.refuse_waiting()
    until = time.monotonic() + seconds
    if admission.active:
        _LOG.info("Waiting for %d answers, %g s at most.", admission.active, seconds)
    while admission.active and time.monotonic() < until:
        await asyncio.sleep(_TICK)
    if not admission.active:
        return True
    admission.end_all()
    await asyncio.sleep(_TICK)
    return False
