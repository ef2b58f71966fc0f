"""Listening: a socket, uvicorn around the application, and an end that lets running answers finish."""

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
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from afm_mlx.errors import RequestError
from afm_mlx.server.connections import GuardedProtocol
from afm_mlx.server.guards import is_loopback
from afm_mlx.server.options import ServerOptions
from afm_mlx.server.served_model import ServedModel

BACKLOG = 1024
_TICK = 0.1
"""Seconds between two looks at whether the server is to end."""

_LOG = logging.getLogger("afm_mlx.server")


def check_access(options: ServerOptions) -> None:
    """Raise for settings that would let anybody in.

    Raises:
        RequestError: for an address that other machines reach, without a key.
    """
    has_key = bool(options.api_keys or options.admin_keys)
    if options.unix_socket is None and not is_loopback(options.host) and not has_key:
        raise RequestError(
            f"The host {options.host} can be reached from other machines, and that needs a key: give "
            "--api-key, --api-key-file or the environment variable AFM_MLX_API_KEY; or listen at 127.0.0.1."
        )


def bind(options: ServerOptions) -> socket.socket:
    """The socket that the options name, bound, so that a port in use is known before a model is loaded.

    Raises:
        RequestError: when it can't be bound.
    """
    check_access(options)
    if options.unix_socket is not None:
        return _bind_unix(options.unix_socket)
    try:
        found = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(0)  # a second server would else be told of a port in use only when it listens
    except OSError as error:
        raise RequestError(
            f"The server can't listen at {options.host}, port {options.port}: {error.strerror or error}. "
            "Choose another --host or --port; port 0 takes a free one."
        ) from None
    return made


def _bind_unix(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            _remove_socket(path)
        made.bind(str(path))
        path.chmod(0o600)  # of this user alone
        made.listen(0)  # a second server would else take it for one that was left behind
    except OSError as error:
        made.close()
        raise RequestError(
            f"The server can't listen at {path}: {error.strerror or error}. Choose another --unix-socket."
        ) from None
    return made


def _remove_socket(path: Path) -> None:
    """Remove the file of a socket that a server has left behind.

    Raises:
        OSError: for a socket that is in use, or that no server like this one has made.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.setblocking(False)  # one whose queue is full would keep us waiting
        found = other.connect_ex(str(path))
    if found == errno.EPROTOTYPE:
        raise OSError(found, "another program has a socket of another kind there")
    if found != errno.ECONNREFUSED:  # somebody listens, or it is another user's
        raise OSError(found, "another server listens there")
    path.unlink()


def address_of(listening: socket.socket) -> str:
    """Where a bound socket is reached."""
    name = listening.getsockname()
    if listening.family == socket.AF_UNIX:
        return f"unix:{name}"
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"http://{host}:{name[1]}"


class _Uvicorn(uvicorn.Server):
    """Leaves signals to its caller."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


def run(app: Starlette, listening: socket.socket, stop: threading.Event) -> bool:
    """Serve until an event is set; then let running answers finish.

    Args:
        app: from `make_app`.
        listening: from `bind`; it is closed.
        stop: ends the server.

    Returns:
        True if all answers have finished within the grace period; later ones were ended with an error.
    """
    return asyncio.run(serve(app, listening, stop))


async def serve(app: Starlette, listening: socket.socket, stop: threading.Event) -> bool:
    """`run`, in a running event loop."""
    options: ServerOptions = app.state.options
    # The engine compiles the constraint of each answer there; the model needs the processor, too.
    compiling = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4), "engine-compiling")
    asyncio.get_running_loop().set_default_executor(compiling)
    _allow_connections(options.max_connections)
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
    has_finished = False
    try:
        while not stop.is_set() and not serving.done():
            await asyncio.sleep(_TICK)
        if not serving.done():
            has_finished = await _drain(app.state.served, options.grace)
    finally:
        server.should_exit = True
        await serving
        if options.unix_socket is not None:
            with suppress(OSError):
                _remove_socket(options.unix_socket)
    return has_finished


async def _drain(served: ServedModel, seconds: float) -> bool:
    """Take nothing new, and wait for what runs; end it with an error after a while.

    Returns:
        True if all of it has finished within the time.
    """
    served.admission.draining = True
    until = time.monotonic() + seconds
    if served.admission.active:
        _LOG.info("Waiting for %d answers, %g s at most.", served.admission.active, seconds)
    while served.admission.active and time.monotonic() < until:
        await asyncio.sleep(_TICK)
    if not served.admission.active:
        return True
    served.admission.end_all()
    await asyncio.sleep(_TICK)
    return False


def _allow_connections(count: int) -> None:
    """Raise the process's soft limit of open files to what the connections need.

    Those that come at once are all accepted before the first of them is closed for another.
    """
    wanted = count + BACKLOG + 256
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
