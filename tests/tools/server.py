"""The real server in a thread of the test's process, at a free port."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import openai
from starlette.applications import Starlette

from afm_mlx.server.app import make_app
from afm_mlx.server.run import address_of, bind, run
from afm_mlx.server.served_model import ServedModel
from afm_mlx.server.server_options import ServerOptions
from tests.tools.cases import until as until


@dataclass
class RunningServer:
    url: str
    app: Starlette
    served: ServedModel
    stop: threading.Event
    thread: threading.Thread

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def openai(self, key: str = "none", **options: Any) -> openai.OpenAI:
        """OpenAI's client, without retries."""
        options = {"max_retries": 0, "timeout": 120, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **options)

    def http(self, **options: Any) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=120, **options)


@contextmanager
def running_server(
    served: ServedModel | None = None,
    *,
    source: Any = "afm-nano",
    send_buffer: int | None = None,
    **settings: Any,
) -> Iterator[RunningServer]:
    """Start a server with a loaded model, or one that it loads from `source`, and stop it at the end.

    `send_buffer` is the size of the socket's send buffer; `settings` are fields of `ServerOptions`.
    """
    options = ServerOptions(**{"port": 0, "grace": 1, **settings})
    mine = served is None
    served = served or ServedModel.load(source, options=options)
    listening = bind(options)
    if send_buffer is not None:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    stop = threading.Event()
    app = make_app(served, options)
    url = address_of(listening)
    thread = threading.Thread(target=run, args=(app, listening, stop), name="server", daemon=True)
    thread.start()
    try:
        yield RunningServer(url, app, served, stop, thread)
    finally:
        stop.set()
        thread.join(30)
        assert not thread.is_alive()
        if mine:
            served.close()
        else:
            served.admission.draining = False  # for the next server


def fail_after(monkeypatch: Any, server: RunningServer, count: int) -> None:
    """Make every answer fail after `count` tokens."""
    stream = server.served.engine.stream

    async def failing(request: Any) -> Any:
        sent = 0
        async for response in stream(request):
            yield response
            sent += 1
            if sent == count:
                raise RuntimeError("out of order")

    monkeypatch.setattr(server.served.engine, "stream", failing)
