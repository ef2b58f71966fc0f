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

import asyncio
import contextlib
import itertools
import logging
import sys
import time
from collections import Counter as Counts
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from prometheus_client import Counter
from starlette.requests import Request

from afm_mlx.errors import AFMError, RequestError, did_you_mean, shown
from afm_mlx.server.admission import in_thread
from afm_mlx.server.hosted_model import HostedModel
from afm_mlx.server.images import RequestImages
from afm_mlx.server.replies import ApiError, api_error
from afm_mlx.server.served_model import ServedModel, without_folders
from afm_mlx.server.server_options import ServerOptions
from afm_mlx.server.server_resources import ServerResources

PATIENCE = 32
"""Number of requests for loaded models that may overtake one which waits until such a model is evicted."""
LATEST = ":latest"
"""The tag that Ollama's clients add to the name of a model that has none."""

Result = TypeVar("Result")
_LOG = logging.getLogger("afm_mlx.server")


@dataclass(eq=False)
class _Waiter:
    """A request that waits for a model; `overtaken` counts the later ones that went before it."""

    model: HostedModel
    future: asyncio.Future[None]
    overtaken: int = 0
    is_admitted: bool = False


class ModelRegistry:
    """The models of a server.

    Args:
        models: the models, the default first.
        options: the server's settings.
        resources: what the models share.

    Raises:
        RequestError: if two models have one id, or the memory of the options is too little for any model.
    """

    def __init__(
        self,
        models: Sequence[HostedModel],
        options: ServerOptions,
        resources: ServerResources | None = None,
    ):
        self.models, self.options = list(models), options
        self.resources = resources or ServerResources(options)
        self._waiting: list[_Waiter] = []  # in the order in which they came
        self._working: asyncio.Task[None] | None = None  # loads and closes models, one at a time
        self._loading: Future[ServedModel] | None = None
        self._thread = ThreadPoolExecutor(1, "server-models")
        self._is_stopping = False
        family = self.resources.metrics.family
        self._loads = family(Counter, "model_loads", "Times that the model was loaded.")
        failures = "model_load_failures"
        self._failures = family(Counter, failures, "Times that the model could not be loaded.")
        why = "Times that the model was evicted."
        self._evictions = family(Counter, "model_evictions", why, "reason")
        for model in self.models:
            self.resources.metrics.of(model.name).gauges = model.gauges
        repeated = [each for each, count in Counts(self.ids).items() if count > 1]
        if repeated:
            raise RequestError(
                f"Several models would have the id {repeated[0]}. Rename a folder, or give them other ids with "
                "--served-model-name."
            )
        if options.memory is not None and self._reserved >= options.memory:
            raise RequestError(
                f"memory is {options.memory} bytes, and prompt_cache_bytes and kv_memory are {self._reserved} "
                "together, which leaves none to models. Give more, or less to these."
            )

    @classmethod
    def of(cls, served: ServedModel) -> ModelRegistry:
        """Make the registry of one model, which stays loaded."""
        return cls([HostedModel(None, served)], served.options, served.resources)

    def load_now(self, model: HostedModel) -> None:
        """Load a model before the server runs; raise `AFMError` if that fails or there is no room."""
        assert model.source is not None
        if error := self._lack_of_room(model):
            raise RequestError(error)
        self._take(model, model.source.load(self.options, self.resources))

    # -- ids

    @property
    def default(self) -> HostedModel:
        """The model of requests that name none."""
        return self.models[0]

    @property
    def ids(self) -> list[str]:
        """The ids of all models and adapters."""
        return [each for model in self.models for each in model.ids]

    def states(self) -> dict[str, int]:
        """Return the number of models in each state."""
        return dict(Counts(model.state for model in self.models))

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

    def context_size(self, model: HostedModel) -> int:
        """Return how many tokens prompt and answer may have together; a very large number if unknown."""
        known, size = model.served or model.source, sys.maxsize
        with contextlib.suppress(AFMError):  # loading says what is wrong
            size = known.context_size if known else size
        return min(size, self.options.max_kv_size or size)

    def may_think(self, model_id: object) -> bool:
        """True if a model thinks, or is not loaded, so that it is unknown; of an unknown id, the default's."""
        served = self._found_or_default(model_id).served
        return served is None or served.thoughts is not None

    def sees(self, model_id: object) -> bool:
        """True if a model reads images; of an unknown id, the default's."""
        return self._found_or_default(model_id).vision_config is not None

    def _found_or_default(self, model_id: object) -> HostedModel:
        with contextlib.suppress(ApiError):
            return self.find(model_id if isinstance(model_id, str) else None)[0]
        return self.default

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
        """Wait until a model is loaded and it is the request's turn; the model stays loaded until `release`.

        Raises:
            ApiError: if it can't be loaded, or not in time; 429 and 503 as `Admission` raises them.
        """
        if self._admits(model, None):
            self.hold(model)
        else:
            with self.resources.admission.preparing(client):
                await self._wait(model)
        assert model.served is not None
        return model.served

    def hold(self, model: HostedModel) -> None:
        """Count one more user of a loaded model."""
        model.users += 1
        model.used = time.monotonic()

    def release(self, model: HostedModel) -> None:
        """Count one user less."""
        model.users -= 1
        model.used = time.monotonic()
        if self._waiting:
            self._advance()

    async def _wait(self, model: HostedModel) -> None:
        waiter = _Waiter(model, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._advance()
        seconds = self.options.timeout
        try:
            async with asyncio.timeout(seconds):
                await waiter.future
        except BaseException as error:
            if waiter.is_admitted:
                self.release(model)
            if not isinstance(error, TimeoutError):
                raise
            raise ApiError(
                504, f"The model {model.name} was not loaded after {seconds:g} s.", code="timeout"
            ) from None
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
                self._advance()

    def _admits(self, model: HostedModel, waiter: _Waiter | None) -> bool:
        """True if a request for a model, new or a `waiter`, can begin now; counts the one that it overtakes."""
        if model.state != "loaded":
            return False
        earlier = itertools.takewhile(lambda each: each is not waiter, self._waiting)
        first = next((each for each in earlier if each.model.state == "unloaded"), None)
        if first is None or model not in self._victims(first.model):
            return True
        first.overtaken += 1
        return first.overtaken <= PATIENCE

    # -- loading and eviction

    def _advance(self) -> None:
        """Admit waiting requests, then begin what the first of the others needs."""
        for waiter in list(self._waiting):
            if not waiter.future.done() and self._admits(waiter.model, waiter):
                self._waiting.remove(waiter)
                self.hold(waiter.model)
                waiter.is_admitted = True
                waiter.future.set_result(None)
        if self._working is not None or self._is_stopping:
            return
        model = next((w.model for w in self._waiting if w.model.state == "unloaded"), None)
        if model is None:
            return
        if error := self._lack_of_room(model):
            self._refuse(model, error)
            return self._advance()
        victims = self._victims(model)
        if not any(victim.users for victim in victims):
            self._begin(victims, "memory", model)

    @property
    def _reserved(self) -> int:
        """Bytes of the memory that are not for weights."""
        return self.options.prompt_cache_bytes + (self.options.kv_memory or 0)

    def _lack_of_room(self, model: HostedModel) -> str:
        """Return why a model can't be loaded, even if it is the only one; "" if it can."""
        most = self.options.memory
        if most is None or model.nbytes + self._reserved <= most:
            return ""
        return (
            f"The model {model.name} takes about {model.nbytes} bytes, and --memory leaves "
            f"{most - self._reserved} to models. Start the server with more, or with less for "
            "--prompt-cache-bytes and --kv-memory."
        )

    def _victims(self, model: HostedModel | None) -> list[HostedModel]:
        """Return the models to evict so that the memory holds `model`, too.

        Models without users come first, the least recently used one before others. Models in use follow in an
        order that their requests don't change: else each would go on because another has to go.
        """
        most = self.options.memory
        if most is None:
            return []
        kept = [each for each in self.models if each.state in ("loading", "loaded")]
        running = [each.served.engine.engine for each in kept if each.served]
        keys_and_values = sum(engine.kv_bytes for engine in running if engine is not None)
        missing = sum(each.nbytes for each in kept) + (model.nbytes if model else 0) - most
        missing += self.options.prompt_cache_bytes
        missing += max(keys_and_values, self.options.kv_memory or 0)
        victims: list[HostedModel] = []
        for each in sorted(kept, key=lambda each: (each.users > 0, 0 if each.users else each.used)):
            if missing > 0 and each.state == "loaded" and each.source is not None:
                victims.append(each)
                missing -= each.nbytes
        return victims

    def _begin(
        self, victims: Sequence[HostedModel], reason: str, model: HostedModel | None = None
    ) -> None:
        """Evict models without users, then load `model`."""
        for victim in victims:
            victim.state = "unloading"
        if model is not None:
            model.state = "loading"
        self._working = asyncio.create_task(self._work(victims, reason, model))

    async def _work(
        self, victims: Sequence[HostedModel], reason: str, model: HostedModel | None
    ) -> None:
        try:
            for victim in victims:
                await self._unload(victim, reason)
            if model is not None:
                await self._load(model)
        finally:
            self._working = None
        self._advance()

    async def _unload(self, model: HostedModel, reason: str) -> None:
        served, model.served = model.served, None
        assert served is not None
        assert model.source is not None
        _LOG.info("Evicting the model %s (%s).", model.name, reason)
        if served.pool is not None:
            model.source = model.source.with_adapters(served.pool.paths)
        try:
            await asyncio.wrap_future(self._thread.submit(served.close))
        except Exception as error:  # what is left of it is garbage
            _LOG.error("The model %s could not be closed.", model.name, exc_info=error)
        self._evictions.labels(model.name, reason).inc()
        model.state = "unloaded"

    async def _load(self, model: HostedModel) -> None:
        assert model.source is not None
        _LOG.info("Loading the model %s.", model.name)
        begun = time.monotonic()
        self._loading = self._thread.submit(model.source.load, self.options, self.resources)
        try:
            served = await asyncio.wrap_future(self._loading)
        except Exception as error:
            self._loading = None
            model.state = "unloaded"
            self._failures.labels(model.name).inc()
            _LOG.error(
                "The model %s could not be loaded: %s",
                model.name,
                error,
                exc_info=None if isinstance(error, AFMError) else error,
            )
            reason = str(error) if isinstance(error, AFMError) else "the server's log says why."
            self._refuse(
                model,
                f"The model {model.name} could not be loaded: {self.without_folders(reason)}",
            )
            return
        self._loading = None
        self._take(model, served)
        _LOG.info("The model %s is loaded after %.1f s.", model.name, time.monotonic() - begun)

    def _take(self, model: HostedModel, served: ServedModel) -> None:
        model.served, model.state, model.used = served, "loaded", time.monotonic()
        self._loads.labels(model.name).inc()

    def _refuse(self, model: HostedModel, message: str) -> None:
        """End the requests that wait for a model with an error."""
        for waiter in [each for each in self._waiting if each.model is model]:
            self._waiting.remove(waiter)
            if not waiter.future.done():
                waiter.future.set_exception(
                    ApiError(500, message, param="model", code="model_load_failed")
                )

    async def sweep(self) -> None:
        """Evict models that are idle, and models without users while memory is short, until cancelled."""
        keep_alive = self.options.keep_alive
        if keep_alive is None and self.options.memory is None:
            return
        while True:
            await asyncio.sleep(1 if keep_alive is None else min(1.0, max(0.05, keep_alive / 4)))
            if self._working is not None or self._is_stopping:
                continue
            now = time.monotonic()
            free = [m for m in self.models if m.state == "loaded" and not m.users and m.source]
            idle = [m for m in free if keep_alive is not None and now - m.used >= keep_alive]
            surplus = [m for m in self._victims(None) if not m.users]
            if idle or surplus:
                self._begin(*((idle, "idle") if idle else (surplus, "memory")))

    def refuse_waiting(self) -> None:
        """End the requests that wait for a model, because the server stops; nothing more is loaded."""
        self._is_stopping = True
        for waiter in self._waiting:
            if not waiter.future.done():
                waiter.future.set_exception(
                    ApiError(503, "The server has stopped.", code="server_stopping")
                )

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
        """Close all models, and end the threads. A model that is being loaded is closed once it is loaded."""
        if self._loading is not None:
            with contextlib.suppress(Exception, CancelledError):
                self._loading.result().close()
        for model in self.models:
            if model.served is not None:
                model.served.close()
        self._thread.shutdown()
        self.resources.close()


class ModelLease:
    """A request's hold on a model: an async context, which begins once the model is loaded.

    Contexts of one lease may be nested. The model may be evicted once the outermost context has ended, or all
    answers of `answering` are generated; no further one begins then.

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

    def images(self) -> RequestImages:
        """Make the images of a request, which may be read before the model is loaded."""
        models, model = self._models, self._model
        size = models.context_size(model)
        return RequestImages(model.vision_config, size, models.options, models.resources.images)

    async def run(self, function: Callable[[], Result], *, compiles: bool = False) -> Result:
        """Call a function of the model in a thread, as `in_thread` does, once the model is loaded."""
        async with self:
            return await in_thread(function, compiles=compiles)

    @contextlib.asynccontextmanager
    async def answering(self) -> AsyncIterator[Callable[[object], None]]:
        """Enter the lease for an answer; yield a callback for its end, to call once, or never if it fails."""
        async with self:
            self._answers += 1
            yield self._generated

    def _generated(self, _: object) -> None:
        self._answers -= 1
        if not self._answers:
            self._release()

    def _release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._models.release(self._model)
