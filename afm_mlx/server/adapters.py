"""`/v1/adapters`: lists adapters, and loads, pins, unloads and removes them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

from msgspec import Meta
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from afm_mlx import threads
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.engine.lockstep import register_adapter, unregister_adapter
from afm_mlx.errors import AFMError, RequestError, shown
from afm_mlx.server.bodies import read_body
from afm_mlx.server.field_rules import Fields, Honoured
from afm_mlx.server.guards import check_admin
from afm_mlx.server.model_registry import ModelLease, ModelRegistry
from afm_mlx.server.replies import ApiError, JsonObject, bad_request, json_response
from afm_mlx.server.served_model import ServedModel

_PUBLIC_FIELDS = ("id", "object", "name", "state", "bytes", "rank", "pinned")
"""The fields that clients without an admin key see, none of them about files or other clients."""


class LoadRequest(Fields, forbid_unknown_fields=True):
    """An adapter to load. A relative path is below one of the folders that the server allows.

    It is for the model with the id `model`, by default the first one of the server.
    """

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
    path: str
    pinned: bool = False
    model: str | None = None
    rules: ClassVar = {
        "name": Honoured(
            hint="A name has letters, digits, dots, dashes and underscores, 64 at most."
        )
    }


async def list_adapters(request: Request) -> Response:
    """List the adapters of the loaded models; with an admin key, also their memory and users."""
    models: ModelRegistry = request.app.state.models
    loaded = [model.served for model in models.models if model.served is not None]
    listed: list[JsonObject] = []
    figures: JsonObject = {}
    for served in loaded:
        pool = served.pool if len(models.models) > 1 else _pool(served)
        if pool is not None:
            figures[served.name] = known = await served.workers.run("adapters", pool.describe)
            listed += [_described(served, entry) for entry in known.pop("adapters")]
    if not request.state.is_admin:
        figures = {}
        listed = [{name: entry[name] for name in _PUBLIC_FIELDS} for entry in listed]
    elif len(models.models) == 1:
        figures = figures.get(models.default.name, {})
    return json_response({"object": "list", **figures, "data": listed})


async def load_adapter(request: Request) -> Response:
    """Register an adapter and load it."""
    check_admin(request)
    models: ModelRegistry = request.app.state.models
    body = await read_body(request, LoadRequest)
    async with models.lease(request, body.model) as lease:
        served = lease.served
        pool = _pool(served)
        path = _allowed_path(body.path, request.app.state.options.adapter_folders)
        if body.name in pool.registered:
            raise ApiError(
                409,
                f"The adapter name {body.name} is taken. Choose another, or delete that one first.",
                param="name",
                code="name_taken",
            )
        try:
            await _on_all_ranks(register_adapter, served, body.name, path)
            load = pool.pin if body.pinned else pool.load
            try:
                await served.workers.run("adapters", lambda: load(body.name))
            except AFMError:
                await _on_all_ranks(unregister_adapter, served, body.name)
                raise
        except AFMError as error:
            raise bad_request(str(error), "path") from error
        return json_response(await _one(served, body.name), 201)


async def change_adapter(request: Request) -> Response:
    """Load, unload, pin or unpin a registered adapter."""
    check_admin(request)
    lease, name = _lease(request)
    async with lease:
        served = lease.served
        pool = _pool(served)
        actions: dict[str, Callable[[str], Any]] = {
            "load": pool.load,
            "unload": pool.unload,
            "pin": pool.pin,
            "unpin": pool.unpin,
        }
        action = request.path_params["action"]
        if action not in actions:
            raise HTTPException(404)
        if action == "unload":
            _refuse_own(served, name)
        run = partial(served.workers.run, "adapters", lambda: actions[action](name))
        await _done(served, name, run)
        return json_response(await _one(served, name))


async def delete_adapter(request: Request) -> Response:
    """Unregister an adapter; its files stay."""
    check_admin(request)
    lease, name = _lease(request)
    async with lease:
        served = lease.served
        _refuse_own(served, name)
        await _done(served, name, lambda: _on_all_ranks(unregister_adapter, served, name))
        deleted = {"id": f"{served.name}:{name}", "object": "adapter", "deleted": True}
        return json_response(deleted)


async def _on_all_ranks(change: Callable[..., None], served: ServedModel, *args: Any) -> None:
    """Call `register_adapter` or `unregister_adapter` in the thread of the engine."""
    await asyncio.wrap_future(threads.submit(change, served.model, _pool(served), *args))


def _lease(request: Request) -> tuple[ModelLease, str]:
    """Return a lease of the path's model (`model:adapter`), by default the first, and the adapter's name."""
    models: ModelRegistry = request.app.state.models
    model, colon, name = request.path_params["name"].rpartition(":")
    return models.lease(request, model if colon else None), name


async def _done(served: ServedModel, name: str, action: Callable[[], Awaitable[Any]]) -> None:
    pool = _pool(served)
    if name not in pool.registered:
        raise ApiError(
            404,
            f"There is no adapter {shown(name)}; registered are {', '.join(pool.registered) or 'none'}.",
            param="name",
            code="adapter_not_found",
        )
    try:
        await action()
    except RequestError as error:  # rows use it, or others leave it no memory
        raise ApiError(409, str(error), code="adapter_in_use") from error
    except AFMError as error:
        raise ApiError(500, str(error), code="adapter_failed") from error


def _refuse_own(served: ServedModel, name: str) -> None:
    if name in served.own_adapters:
        raise ApiError(
            409,
            f"The adapter {name} is one that the server was started with, and stays. Requests can remove "
            "only adapters that requests have loaded.",
            param="name",
            code="adapter_stays",
        )


def _pool(served: ServedModel) -> AdapterPool:
    if served.pool is None:
        raise ApiError(400, f"The model {served.name} can't have adapters.", code="no_adapters")
    return served.pool


def _allowed_path(text: str, folders: Sequence[Path]) -> Path:
    """Return the resolved path of an adapter below one of the allowed folders.

    Raises:
        ApiError: 403 for any other path, whether it exists or not.
    """
    if "\0" not in text:
        for folder in folders:
            root = folder.resolve()
            with suppress(OSError):  # a name too long, a loop of links
                path = (root / text).resolve(strict=True)
                if path != root and path.is_relative_to(root):
                    return path
    raise ApiError(
        403,
        f"There is no adapter {shown(text)} in the folders that this server allows"
        f"{' (--adapter-folder)' if folders else ': it allows none. Start it with --adapter-folder'}.",
        param="path",
        code="path_not_allowed",
    )


async def _one(served: ServedModel, name: str) -> JsonObject:
    known = await served.workers.run("adapters", _pool(served).describe)
    return _described(served, next(each for each in known["adapters"] if each["name"] == name))


def _described(served: ServedModel, entry: JsonObject) -> JsonObject:
    described = {"id": f"{served.name}:{entry['name']}", "object": "adapter", **entry}
    for field in ("source", "error"):
        if isinstance(described[field], str):
            described[field] = served.without_folders(described[field])
    return described
