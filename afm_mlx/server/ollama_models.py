"""`/api/tags`, `/api/show`, `/api/ps` and `/api/version`: the models, as Ollama's API describes them."""

from __future__ import annotations

import hashlib
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

import mlx.core as mx
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from afm_mlx.config import is_afm_config, read_config_json
from afm_mlx.errors import AFMError
from afm_mlx.guidance.call_forms import call_form
from afm_mlx.guidance.thoughts import thought_form
from afm_mlx.loading.mlx_lm_models import load_mlx_lm_tokenizer
from afm_mlx.measure.describe import Facts, describe_stored_weights
from afm_mlx.server.admission import in_thread
from afm_mlx.server.bodies import read_body
from afm_mlx.server.field_rules import Fields
from afm_mlx.server.hosted_model import HostedModel
from afm_mlx.server.model_registry import LATEST, ModelRegistry
from afm_mlx.server.replies import ApiError, JsonObject, bad_request, json_response
from afm_mlx.tokenizer.protocol import Tokenizer
from afm_mlx.tokenizer.tokenizer import load_tokenizer

VERSION = "0.32.15"
"""The version of Ollama whose API this is; programs know from it which fields they can send."""
_NEVER, _LATEST_TIME = "9999-12-31T23:59:59Z", 253402300799  # the same, in seconds since 1970


def timestamp(seconds: float) -> str:
    """Return a time, in seconds since 1970, as Ollama's API writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


async def tags(request: Request) -> Response:
    """List the models and their adapters."""
    models: ModelRegistry = request.app.state.models

    def listed() -> list[JsonObject]:
        return [_entry(model, name) for model in models.models for name in model.ids]

    return json_response({"models": await in_thread(listed)})


async def running(request: Request) -> Response:
    """List the models in memory, and when idle ones are evicted."""
    models: ModelRegistry = request.app.state.models
    on_gpu = mx.default_device() == mx.Device(mx.gpu)
    keep_alive = models.options.keep_alive

    def expiry(model: HostedModel) -> str:
        if keep_alive is None:
            return _NEVER
        idle = 0 if model.users else time.monotonic() - model.used
        expires = time.time() + keep_alive - idle
        return timestamp(expires) if expires < _LATEST_TIME else _NEVER

    def described() -> list[JsonObject]:
        found = []
        for model in models.models:
            if model.state == "loaded":
                sizes = {"size": model.nbytes, "size_vram": model.nbytes if on_gpu else 0}
                more = {"expires_at": expiry(model), "context_length": models.context_size(model)}
                found.append({**_entry(model, model.name), **sizes, **more})
        return found

    return json_response({"models": await in_thread(described)})


class ShowRequest(Fields):
    """A model by its name; `name` is the older field."""

    model: str | None = None
    name: str | None = None


async def show(request: Request) -> Response:
    """Describe a model: its size, its template, the server's defaults, and what it can do."""
    models: ModelRegistry = request.app.state.models
    body = await read_body(request, ShowRequest)
    name = body.model or body.name
    if not name:
        raise bad_request("model is missing; the name of a model is needed.", "model")
    model, _ = models.find(name)
    options = models.options
    defaults = {
        **{each: getattr(options, each) for each in ("temperature", "top_p", "top_k", "min_p")},
        "num_predict": options.max_tokens,
    }

    def described() -> JsonObject:
        facts, entry = _facts(model), _entry(model, name)
        template, capabilities = _abilities(model)
        if model.vision_config is not None:
            capabilities = [*capabilities, "vision"]
        info = {"general.architecture": facts["family"]}
        if "parameters" in facts:
            info["general.parameter_count"] = facts["parameters"]
        if (size := models.context_size(model)) < sys.maxsize:
            info[f"{facts['family']}.context_length"] = size
        return {
            "modelfile": f"FROM {name}\n",
            "parameters": "\n".join(f"{each:30} {value}" for each, value in defaults.items()),
            "template": template,
            "details": entry["details"],
            "model_info": info,
            "capabilities": capabilities,
            "modified_at": entry["modified_at"],
        }

    return json_response(await in_thread(described))


def _entry(model: HostedModel, name: str) -> JsonObject:
    """Describe a model, or its adapter of this name, as lists do."""
    facts = _facts(model)
    name = name if ":" in name else name + LATEST
    own = model.name if ":" in model.name else model.name + LATEST
    parameters = facts.get("parameters")
    details = {
        "parent_model": "" if name == own else own,
        "format": "safetensors",
        "family": facts["family"],
        "families": [facts["family"]],
        "parameter_size": "" if parameters is None else _shortened(parameters),
        "quantization_level": facts.get("kind", ""),
    }
    digest = facts["digest"]
    if name != own:
        digest = hashlib.sha256(f"{digest} {name}".encode()).hexdigest()
    return {
        "name": name,
        "model": name,
        "modified_at": timestamp(facts["modified"]),
        "size": facts["bytes"],
        "digest": digest,
        "details": details,
    }


def _facts(model: HostedModel) -> Facts:
    with suppress(AFMError, OSError):  # loading says what is wrong
        if model.folder is not None:
            return _folder_facts(model.folder)
    return {
        "family": "unknown",
        "bytes": model.nbytes,
        "digest": hashlib.sha256(model.name.encode()).hexdigest(),
        "modified": model.created,
    }


@lru_cache(maxsize=256)
def _folder_facts(folder: Path) -> Facts:
    """Describe a model folder; the digest changes with config.json, and with its weights' sizes and times."""
    source = folder / "config.json"
    weights = describe_stored_weights(folder)
    digest = hashlib.sha256(source.read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}".encode())
    return {
        "family": str(read_config_json(source).get("model_type", "unknown")),
        "parameters": weights["parameters"],
        "bytes": weights["bytes"],
        "kind": f"{weights['bits_per_weight']:.1f}-bit",
        "digest": digest.hexdigest(),
        "modified": source.stat().st_mtime,
    }


def _shortened(count: int) -> str:
    """Write a number of parameters as Ollama does, such as 3.2B or 7.5M."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return str(count)


def _abilities(model: HostedModel) -> tuple[str, list[str]]:
    """Return a model's chat template, "" if it is not a text, and Ollama's words for what the model can do."""
    if (served := model.served) is not None:
        return _abilities_of(served.tokenizer)
    assert model.folder is not None
    return _folder_abilities(model.folder)


@lru_cache(maxsize=256)
def _folder_abilities(folder: Path) -> tuple[str, list[str]]:
    config = read_config_json(folder / "config.json")
    is_afm = is_afm_config(config)
    return _abilities_of(
        load_tokenizer(folder) if is_afm else load_mlx_lm_tokenizer(folder, config)
    )


def _abilities_of(tokenizer: Tokenizer) -> tuple[str, list[str]]:
    found = ["completion"]
    if getattr(tokenizer, "has_chat_template", False):
        with suppress(AFMError):
            call_form(tokenizer)
            found.append("tools")
        if thought_form(tokenizer) is not None:
            found.append("thinking")
    return getattr(tokenizer, "template_source", ""), found


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
