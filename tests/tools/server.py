"""The real server in a thread of the test's process, at a free port."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import httpx2
import openai
from starlette.applications import Starlette

from afm_mlx.server.app import make_app
from afm_mlx.server.hosted_model import HostedModel
from afm_mlx.server.model_registry import ModelRegistry
from afm_mlx.server.run import address_of, bind, run
from afm_mlx.server.served_model import ModelSource, ServedModel
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
        return httpx2.Client(base_url=self.url, timeout=120, verify=False, **options)


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
    try:
        with _serving(make_app(served, options), send_buffer) as (url, app, stop, thread):
            yield RunningServer(url, app, served, stop, thread)
    finally:
        if mine:
            served.close()
        else:
            served.admission.draining = False  # for the next server


@dataclass
class SeveralModels(RunningServer):
    """A server of several models; `served` is the first one of the start."""

    models: ModelRegistry

    @cached_property
    def client(self) -> openai.OpenAI:
        return self.openai()

    def states(self) -> dict[str, str]:
        return {model.name: model.state for model in self.models.models}

    def count(self, name: str, model: str) -> float:
        """Return a counter or gauge of a model."""
        labels = {"model_name": model}
        found = [
            sample.value
            for family in self.models.resources.metrics.registry.collect()
            for sample in family.samples
            if sample.name == f"afm_mlx:{name}" and labels.items() <= sample.labels.items()
        ]
        return sum(found)


@contextmanager
def several_models(
    *sources: Any, send_buffer: int | None = None, loads_first: bool = False, **settings: Any
) -> Iterator[SeveralModels]:
    """Start a server of several models, none of which is loaded, or the first one; stop it at the end.

    Sources are folders or `ModelSource`s.
    """
    options = ServerOptions(**{"port": 0, "grace": 1, **settings})
    made = [each if isinstance(each, ModelSource) else ModelSource.of(each) for each in sources]
    models = ModelRegistry([HostedModel(each) for each in made], options)
    try:
        if loads_first:
            models.load_now(models.default)
        with _serving(make_app(models), send_buffer) as (url, app, stop, thread):
            yield SeveralModels(url, app, models.default.served, stop, thread, models)
    finally:
        models.close()


@contextmanager
def _serving(
    app: Starlette, send_buffer: int | None
) -> Iterator[tuple[str, Starlette, threading.Event, threading.Thread]]:
    listening = bind(app.state.options)
    if send_buffer is not None:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    stop = threading.Event()
    url = address_of(listening)
    thread = threading.Thread(target=run, args=(app, listening, stop), name="server", daemon=True)
    thread.start()
    try:
        yield url, app, stop, thread
    finally:
        stop.set()
        thread.join(30)
        assert not thread.is_alive()


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
