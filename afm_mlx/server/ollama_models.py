"""`/api/tags`, `/api/show`, `/api/ps` and `/api/version`: the models, as Ollama's API describes them."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from datetime import UTC, datetime

import mlx.core as mx
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from afm_mlx import threads
from afm_mlx.errors import AFMError
from afm_mlx.guidance.call_forms import call_form
from afm_mlx.server.bodies import read_body
from afm_mlx.server.field_rules import Fields
from afm_mlx.server.replies import ApiError, JsonObject, bad_request, json_response
from afm_mlx.server.served_model import ServedModel

VERSION = "0.32.15"
"""The version of Ollama whose API this is; programs read which fields they can send from it."""
LATEST = ":latest"
"""The tag of a model without another; an adapter is a model with the adapter's name as its tag."""
_NEVER = "9999-12-31T23:59:59Z"


def adapter_of(served: ServedModel, name: str) -> str | None:
    """Return the adapter of a model by its name, with or without `:latest`; raise a 404 for unknown names."""
    is_id = name in served.model_ids
    return served.adapter_of(name if is_id else name.removesuffix(LATEST))


def timestamp(seconds: float) -> str:
    """Return a time, in seconds since 1970, as Ollama's API writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


async def tags(request: Request) -> Response:
    """List the model and its adapters."""
    served: ServedModel = request.app.state.served
    return json_response({"models": [await _entry(served, name) for name in served.model_ids]})


async def running(request: Request) -> Response:
    """List the models in memory."""
    served: ServedModel = request.app.state.served
    entry = await _entry(served, served.name)
    on_gpu = mx.default_device() == mx.Device(mx.gpu)
    entry |= {"expires_at": _NEVER, "size_vram": entry["size"] if on_gpu else 0}
    return json_response({"models": [entry | {"context_length": served.context_size}]})


class ShowRequest(Fields):
    """A model by its name; `name` is the older field."""

    model: str | None = None
    name: str | None = None


async def show(request: Request) -> Response:
    """Describe a model: its size, its template, the server's defaults, and what it can do."""
    served: ServedModel = request.app.state.served
    body = await read_body(request, ShowRequest)
    name = body.model or body.name
    if not name:
        raise bad_request("model is missing; the name of a model is needed.", "model")
    adapter_of(served, name)
    facts, entry = await _facts(served), await _entry(served, name)
    family, options = entry["details"]["family"], served.options
    info = {
        "general.architecture": family,
        "general.parameter_count": facts["parameters"],
        f"{family}.vocab_size": served.vocab_size,
    }
    if served.context_size < sys.maxsize:
        info[f"{family}.context_length"] = served.context_size
    defaults = {
        **{each: getattr(options, each) for each in ("temperature", "top_p", "top_k", "min_p")},
        "num_predict": options.max_tokens,
    }
    return json_response(
        {
            "modelfile": f"FROM {name}\n",
            "parameters": "\n".join(f"{each:30} {value}" for each, value in defaults.items()),
            "template": getattr(served.tokenizer, "template_source", ""),
            "details": entry["details"],
            "model_info": info,
            "capabilities": _capabilities(served),
            "modified_at": entry["modified_at"],
        }
    )


def _capabilities(served: ServedModel) -> list[str]:
    found = ["completion"]
    try:
        call_form(served.tokenizer)
        found.append("tools")
    except AFMError:
        pass
    return [*found, "thinking"] if served.thoughts else found


async def _facts(served: ServedModel) -> JsonObject:
    return await asyncio.wrap_future(threads.submit(lambda: served.facts))


async def _entry(served: ServedModel, name: str) -> JsonObject:
    """Describe a model, or one of its adapters, as lists do."""
    facts, adapter = await _facts(served), adapter_of(served, name)
    is_adapter = name.removesuffix(LATEST) != served.name
    digest = facts["fingerprint"]
    if is_adapter:
        digest = hashlib.sha256(f"{digest}:{adapter}".encode()).hexdigest()
    name = name if ":" in name else name + LATEST
    family = str(getattr(served.model, "model_type", "unknown"))
    details = {
        "parent_model": served.name + LATEST if is_adapter else "",
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": _shortened(facts["parameters"]),
        "quantization_level": facts["stored_as"],
    }
    return {
        "name": name,
        "model": name,
        "modified_at": timestamp(served.created),
        "size": facts["bytes"],
        "digest": digest,
        "details": details,
    }


def _shortened(count: int) -> str:
    """Write a number of parameters as Ollama does, such as 3.2B or 7.5M."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return str(count)


async def version(request: Request) -> Response:
    """Return the version of Ollama's API."""
    return json_response({"version": VERSION})


# -- what this server doesn't do

_STARTED_WITH = "The server has the models that it was started with"
_NOT_OFFERED = {
    "pull": f"{_STARTED_WITH}. Start it with --model ID: a hub id is fetched then.",
    "push": "Models are not published from here. Upload the model's folder with the hub's own tools.",
    "create": f"{_STARTED_WITH}. Make a folder with afm-mlx convert, and start the server with --model FOLDER.",
    "copy": f"{_STARTED_WITH}. Start it with --served-model-name NAME for another name.",
    "delete": f"{_STARTED_WITH}. Delete a model's folder yourself.",
    "embed": "The models here write text, and give no embeddings. Use a server with an embedding model.",
    "embeddings": "The models here write text, and give no embeddings. Use a server with an embedding model.",
}
"""Routes of Ollama's API that this server doesn't have, and what to do instead."""


async def not_offered(request: Request) -> Response:
    """Answer 501, with what to do instead."""
    raise ApiError(501, _NOT_OFFERED[request.url.path.rpartition("/")[2]], code="not_offered")


ROUTES = [
    Route("/api/tags", tags),
    Route("/api/ps", running),
    Route("/api/show", show, methods=["POST"]),
    Route("/api/version", version),
    *(Route(f"/api/{name}", not_offered, methods=["POST", "DELETE"]) for name in _NOT_OFFERED),
]
