"""The ASGI application: its routes, and the middleware that every request passes."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from importlib import resources

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from afm_mlx.errors import AFMError
from afm_mlx.server import (
    adapters,
    anthropic_api,
    embeddings,
    ollama_api,
    ollama_models,
    openai_chat,
    openai_completions,
    reranking,
    responses_api,
    tokenization,
)
from afm_mlx.server.guards import Guards, check_admin
from afm_mlx.server.metrics import CONTENT_TYPE
from afm_mlx.server.model_registry import LATEST, ModelRegistry
from afm_mlx.server.replies import (
    ID_HEADERS,
    IGNORED_HEADER,
    REQUEST_ID,
    ApiError,
    ClientLeft,
    JsonObject,
    RequestIds,
    error_response,
    json_response,
)
from afm_mlx.server.responses_api import KeptResponses
from afm_mlx.server.served_model import ServedModel
from afm_mlx.server.server_options import ServerOptions

_LOG = logging.getLogger("afm_mlx.server")
VERSIONS = ("/v1", "")
"""Beginnings of routes that mlx-lm's and llama.cpp's servers have without a version, too."""


def make_app(
    models: ServedModel | ModelRegistry, options: ServerOptions | None = None
) -> Starlette:
    """Make the application of a loaded model or of several models.

    `options` decide on keys, hosts and bodies; by default, the models' own.
    """
    if isinstance(models, ServedModel):
        models = ModelRegistry.of(models)
    options = options or models.options
    middleware = [Middleware(RequestIds), Middleware(Guards, options=options)]
    if options.cors_origins:  # before the guards, because a browser's preflight request has no key
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(options.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[*ID_HEADERS, IGNORED_HEADER, "Retry-After"],
        )
        middleware.insert(0, cors)
    files = [name for name in sorted(page_files()) if name != "index.html"]
    routes = [
        Route("/", _page_route("index.html")),
        *(Route(f"/page/{name}", _page_route(name)) for name in files),
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", metrics),
        *(Route(f"{version}/models", list_models) for version in VERSIONS),
        Route("/v1/models/{model_id:path}", retrieve_model),
        Route("/v1/adapters", adapters.list_adapters),
        Route("/v1/adapters", adapters.load_adapter, methods=["POST"]),
        Route("/v1/adapters/{name}", adapters.delete_adapter, methods=["DELETE"]),
        Route("/v1/adapters/{name}/{action}", adapters.change_adapter, methods=["POST"]),
        Route("/tokenize", tokenization.tokenize, methods=["POST"]),
        Route("/detokenize", tokenization.detokenize, methods=["POST"]),
        Route("/v1/completions", openai_completions.completions, methods=["POST"]),
        *(
            Route(f"{version}{path}", answer, methods=["POST"])
            for version in VERSIONS
            for path, answer in (
                ("/chat/completions", openai_chat.chat_completions),
                ("/embeddings", embeddings.embeddings),
            )
        ),
        *(
            Route(f"{version}/rerank", reranking.rerank, methods=["POST"])
            for version in ("", "/v1", "/v2")  # vLLM's, Jina's and Cohere's
        ),
        *responses_api.ROUTES,
        *anthropic_api.ROUTES,
        *ollama_api.ROUTES,
        *ollama_models.ROUTES,
    ]
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={
            ApiError: _refused,
            AFMError: _refused,
            HTTPException: _not_routed,
            ClientLeft: _left,
            ClientDisconnect: _left,
            Exception: _refused,
        },
    )
    app.state.models = models
    app.state.options = options
    app.state.kept_responses = KeptResponses(options.kept_responses, options.kept_bytes)
    return app


# -- errors


async def _refused(request: Request, error: Exception) -> Response:
    """Return the response for a request that raised `error`; Starlette raises unexpected ones again, to log."""
    models: ModelRegistry = request.app.state.models
    response = error_response(models.failed(request, error), request.url.path)
    if not isinstance(error, ApiError | AFMError):
        _LOG.error("The request %s has failed.", REQUEST_ID.get())
        response.headers["Connection"] = (
            "close"  # uvicorn closes it: Starlette raises the error again
        )
    return response


async def _not_routed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {
        404: f"There is no {request.method} {request.url.path}; docs/server.md lists the routes.",
        405: f"{request.url.path} does not take {request.method}.",
    }
    reported = ApiError(
        error.status_code,
        messages.get(error.status_code, error.detail),
        code={404: "not_found", 405: "method_not_allowed"}.get(error.status_code),
        type="invalid_request_error",
        headers=error.headers,
    )
    return error_response(reported, request.url.path)


async def _left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


# -- health, metrics and models


async def health(request: Request) -> Response:
    """Answer 200 while the server runs, with the number of models in each state if there are several."""
    models: ModelRegistry = request.app.state.models
    several = {} if len(models.models) == 1 else {"models": models.states()}
    return json_response({"status": "ok", **several})


async def ready(request: Request) -> Response:
    """Answer 200 while the server takes requests, 503 once it is stopping."""
    models: ModelRegistry = request.app.state.models
    if models.resources.admission.draining:
        return json_response({"status": "stopping"}, 503)
    several = {} if len(models.models) == 1 else {"models": models.states()}
    return json_response({"status": "ready", "model": models.default.name, **several})


async def metrics(request: Request) -> Response:
    """Return the metrics of all clients in Prometheus's format."""
    check_admin(request)
    models: ModelRegistry = request.app.state.models
    return Response(models.resources.metrics.text(), headers={"Content-Type": CONTENT_TYPE})


async def list_models(request: Request) -> Response:
    """List the models and their adapters, each as a model, with the fields of several APIs."""
    models: ModelRegistry = request.app.state.models
    listed = [_described(models, model_id) for model_id in models.ids]
    ends = {"first_id": listed[0]["id"], "last_id": listed[-1]["id"], "has_more": False}
    # llama.cpp's clients look here for "multimodal".
    llama_cpp = [
        {
            "name": each["id"],
            "model": each["id"],
            "capabilities": ["completion"] + ["multimodal"] * each["capabilities"]["vision"],
        }
        for each in listed
    ]
    return json_response({"object": "list", "data": listed, "models": llama_cpp, **ends})


async def retrieve_model(request: Request) -> Response:
    """Describe one model id."""
    models: ModelRegistry = request.app.state.models
    return json_response(_described(models, request.path_params["model_id"]))


def _described(models: ModelRegistry, model_id: str) -> JsonObject:
    model, _ = models.find(model_id)  # raises for an unknown id
    is_adapter = model_id not in (model.name, model.name + LATEST)
    sees = model.vision_config is not None
    return {
        "id": model_id,
        "object": "model",
        "created": model.created,
        "owned_by": "afm-mlx",
        "type": "model",
        "display_name": model_id,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat(),
        "max_model_len": models.context_size(model),
        # OpenRouter's clients read `architecture`, Mistral's `vision`, Anthropic's `image_input`.
        "architecture": {
            "input_modalities": ["text", "image"] if sees else ["text"],
            "output_modalities": ["text"],
        },
        "capabilities": {"vision": sees, "image_input": {"supported": sees}},
        "parent": model.name if is_adapter else None,
        **({"state": model.state} if is_adapter else model.describe()),
    }


# -- the chat page

PAGE_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
"""Media types of the page's files, by file name extension."""

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
"""Allows the page's own scripts and styles, a chat's images, and requests to this server; no inline code."""

_PAGE_HEADERS = {
    "Cache-Control": "no-cache",  # browsers ask again each time, because a newer server has newer files
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@functools.cache
def page_files() -> dict[str, bytes]:
    """Read the page's files once, by their paths, so that no request's path reaches the file system."""
    folder = resources.files("afm_mlx.server") / "page"
    files = {file.name: file for file in folder.iterdir() if file.is_file()}
    files |= {f"vendor/{file.name}": file for file in (folder / "vendor").iterdir()}
    typed = (name for name in files if name.rpartition(".")[2] in PAGE_TYPES)
    return {name: files[name].read_bytes() for name in typed}


def _page_route(name: str) -> Callable[[Request], Awaitable[Response]]:
    content = page_files()[name]
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**_PAGE_HEADERS, "ETag": etag, "Content-Type": PAGE_TYPES[name.rpartition(".")[2]]}

    async def page_file(request: Request) -> Response:
        known = request.headers.get("if-none-match", "")
        if etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers)

    return page_file
