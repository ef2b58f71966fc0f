"""The models of a server: loaded when a request needs one, evicted to make room, and when they are idle.

    lease = models.lease(request, body.model)  # a 404 if there is no such model
    async with lease:  # waits until the model is loaded
        prompt = lease.served.encode_chat(...)
        async for event in answer_events(lease, ...): ...

A model has its own engine, tokenizer and adapters; what they share is in `server_resources.py`. A model is
evicted only while no lease holds it. Requests for a model that is not loaded wait in the order in which they
came. While the first of them waits for room, up to `PATIENCE` requests for the models that must go may overtake
it; then these models take no more, finish, and go. So requests for one model are answered together, and each
model has its turn.

Everything here runs in the server's event loop, except loading and closing, which run in one thread.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from starlette.requests import Request

from afm_mlx.errors import did_you_mean, shown
from afm_mlx.server.admission import in_thread
from afm_mlx.server.replies import ApiError, api_error
from afm_mlx.server.served_model import ModelSource, ServedModel, without_folders
from afm_mlx.server.server_options import ServerOptions
from afm_mlx.server.server_resources import ServerResources

PATIENCE = 32
"""Number of requests for loaded models that may overtake one which waits until such a model is evicted."""
LATEST = ":latest"
"""The tag of a model without another, in Ollama's API."""

Result = TypeVar("Result")
_LOG = logging.getLogger("afm_mlx.server")


class HostedModel:
    """A model that a server has, loaded or not.

    Attributes:
        name: its id in the APIs.
        source: how to load it; None for a model that was loaded before the server, and stays.
        served: the model once it is loaded, else None.
        state: "unloaded", "loading", "loaded" or "unloading".
        created: time at which it was loaded or listed first, in seconds since 1970.
        users: number of leases that hold it.
        used: time of the last lease's begin or end, by `time.monotonic`.
        loads: number of times that it was loaded.
    """

    def __init__(self, source: ModelSource | None, served: ServedModel | None = None):
        assert source or served
        self.name = served.name if served else source.name if source else ""
        self.source, self.served = source, served
        self.state = "loaded" if served else "unloaded"
        self.created = served.created if served else int(time.time())
        self.users = 0
        self.used = time.monotonic()
        self.loads = 0

    @property
    def ids(self) -> list[str]:
        """The model's id and its adapters' ids."""
        if self.served is not None:
            return self.served.model_ids
        assert self.source is not None
        return [self.name, *(f"{self.name}:{adapter}" for adapter in self.source.adapters)]

    @property
    def default_adapter(self) -> str | None:
        """The adapter of requests for the model's own id."""
        known = self.served or self.source
        return known.default_adapter if known else None

    @property
    def context_size(self) -> int:
        """Number of tokens that prompt and answer may have together."""
        known = self.served or self.source
        return known.context_size if known else 0

    @property
    def folder(self) -> Path | None:
        """The model's folder, or None if unknown."""
        known = self.source or self.served
        return known.folder if known else None


class ModelRegistry:
    """The models of a server.

    Args:
        models: the models, the default first.
        options: the server's settings.
        resources: what the models share.
    """

    def __init__(
        self, models: Sequence[HostedModel], options: ServerOptions, resources: ServerResources
    ):
        self.models, self.options, self.resources = list(models), options, resources

    @classmethod
    def of(cls, served: ServedModel) -> ModelRegistry:
        """Make the registry of one model, which stays loaded."""
        return cls([HostedModel(None, served)], served.options, served.resources)

    # -- ids

    @property
    def default(self) -> HostedModel:
        """The model of requests that name none."""
        return self.models[0]

    @property
    def ids(self) -> list[str]:
        """The ids of all models and adapters."""
        return [each for model in self.models for each in model.ids]

    def find(self, model_id: str | None) -> tuple[HostedModel, str | None]:
        """Return the model and the adapter that an id names; None names the default model.

        An id may have the tag `:latest` at its end, which Ollama's clients add.

        Raises:
            ApiError: 404 for an id that is not in `ids`.
        """
        if model_id is None:
            return self.default, self.default.default_adapter
        for known in (model_id, model_id.removesuffix(LATEST)):
            for model in self.models:
                if known in model.ids:
                    return model, known[len(model.name) + 1 :] or model.default_adapter
        ids = self.ids
        listed = ", ".join(ids[:20]) + (", ..." if len(ids) > 20 else "")
        raise ApiError(
            404,
            f"There is no model {shown(model_id)}{did_you_mean(model_id, ids)}. Known are {listed}.",
            param="model",
            code="model_not_found",
            type="invalid_request_error",
        )

    def may_think(self, model_id: object) -> bool:
        """True if a model thinks, or is not loaded, so that it is unknown; of an unknown id, the default's."""
        model = self.default
        with contextlib.suppress(ApiError):
            model, _ = self.find(model_id if isinstance(model_id, str) else None)
        return model.served is None or model.served.thoughts is not None

    # -- leases

    def lease(self, request: Request, model_id: str | None) -> ModelLease:
        """Make a request's lease of the model that an id names (None: the default model); it is not entered.

        Raises:
            ApiError: 404 for an unknown id.
        """
        model, adapter = self.find(model_id)
        request.state.model = model.name  # for the metrics of errors
        return ModelLease(self, model, adapter, request.state.client)

    async def acquire(self, model: HostedModel, client: str) -> ServedModel:
        """Wait until a model is loaded and may be used; it stays loaded until `release`.

        Raises:
            ApiError: if it can't be loaded.
        """
        assert model.served is not None
        self.hold(model)
        return model.served

    def hold(self, model: HostedModel) -> None:
        """Count one more user of a loaded model."""
        model.users += 1
        model.used = time.monotonic()

    def release(self, model: HostedModel) -> None:
        """Count one user less."""
        model.users -= 1
        model.used = time.monotonic()

    def refuse_waiting(self) -> None:
        """End the requests that wait for a model, because the server stops."""

    # -- errors

    def failed(self, request: Request, error: Exception) -> ApiError:
        """Count a request that failed, and convert its exception for the client, without names of folders."""
        reported = api_error(error)
        reported.message = self.without_folders(reported.message)
        name = getattr(request.state, "model", self.default.name)
        self.resources.metrics.models[name].failed(reported.status)
        return reported

    def without_folders(self, text: str) -> str:
        """Shorten the paths of the server's folders in a text to the folders' names."""
        for model in self.models:
            if model.served is not None:
                text = model.served.without_folders(text)
            if model.source is not None:
                text = without_folders(text, model.source.folder, *model.source.adapters.values())
        return text

    def close(self) -> None:
        """Close all models, and end the threads."""
        for model in self.models:
            if model.served is not None:
                model.served.close()
        self.resources.close()


class ModelLease:
    """A request's hold on a model: an async context, which begins once the model is loaded.

    Contexts of one lease may be nested. The model may be evicted once the outermost context has ended, or all
    answers of `answering` are generated.

    Attributes:
        adapter: the adapter that the request's model id names, or None.
        client: the request's client.
        served: the loaded model, within the context.
    """

    served: ServedModel

    def __init__(self, models: ModelRegistry, model: HostedModel, adapter: str | None, client: str):
        self.adapter, self.client = adapter, client
        self._models, self._model = models, model
        self._depth = self._answers = 0
        self._is_held = False

    async def __aenter__(self) -> ModelLease:
        if not self._depth:
            self.served = await self._models.acquire(self._model, self.client)
            self._is_held = True
        self._depth += 1
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._release()

    async def run(self, function: Callable[[], Result], *, compiles: bool = False) -> Result:
        """Call a function of the model in a thread, as `in_thread` does, once the model is loaded."""
        async with self:
            return await in_thread(function, compiles=compiles)

    @contextlib.asynccontextmanager
    async def answering(self) -> AsyncIterator[Callable[[object], None]]:
        """Enter the lease for an answer; yield a callback for its end, after which it needs no model."""
        async with self:
            with self._answering() as generated:
                yield generated

    @contextlib.contextmanager
    def _answering(self) -> Iterator[Callable[[object], None]]:
        if not self._is_held:  # another answer of this request has ended early
            self._models.hold(self._model)
            self._is_held = True
        self._answers += 1
        is_running = True

        def generated(_: object = None) -> None:
            nonlocal is_running
            if is_running:
                is_running = False
                self._answers -= 1
                if not self._answers:
                    self._release()

        try:
            yield generated
        finally:
            generated()

    def _release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._models.release(self._model)
