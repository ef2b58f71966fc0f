"""The application: routes, and what every request goes through."""

from __future__ import annotations

import logging

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from afm_mlx.errors import AFMError
from afm_mlx.server import adapters, health, models, openai_chat, openai_completions, tokenize
from afm_mlx.server.anthropic_messages import routes as anthropic_messages
from afm_mlx.server.errors import ApiError
from afm_mlx.server.guards import Guards
from afm_mlx.server.openai_responses import routes as openai_responses
from afm_mlx.server.openai_responses.kept_responses import KeptResponses
from afm_mlx.server.options import ServerOptions
from afm_mlx.server.page import page_routes
from afm_mlx.server.request_ids import HEADERS, IGNORED, REQUEST_ID, RequestIds
from afm_mlx.server.served_model import ServedModel
from afm_mlx.server.sse import ClientLeft, error_response

_LOG = logging.getLogger("afm_mlx.server")


def routes() -> list[BaseRoute]:
    """All routes."""
    return [
        *page_routes(),
        Route("/health", health.health),
        Route("/ready", health.ready),
        Route("/metrics", health.metrics),
        Route("/v1/models", models.list_models),
        Route("/v1/models/{model_id:path}", models.retrieve_model),
        Route("/v1/adapters", adapters.list_adapters),
        Route("/v1/adapters", adapters.load_adapter, methods=["POST"]),
        Route("/v1/adapters/{name}", adapters.delete_adapter, methods=["DELETE"]),
        Route(
            "/v1/adapters/{name}/{action}",
            adapters.change_adapter,
            methods=["POST"],
        ),
        Route("/tokenize", tokenize.tokenize, methods=["POST"]),
        Route("/detokenize", tokenize.detokenize, methods=["POST"]),
        Route("/v1/completions", openai_completions.completions, methods=["POST"]),
        Route("/v1/chat/completions", openai_chat.chat_completions, methods=["POST"]),
        *openai_responses.ROUTES,
        *anthropic_messages.ROUTES,
    ]


def make_app(served: ServedModel, options: ServerOptions | None = None) -> Starlette:
    """The application of a model.

    Args:
        served: the model.
        options: settings of keys, hosts and bodies; the model's by default.
    """
    options = options or served.options
    middleware = [Middleware(RequestIds), Middleware(Guards, options=options)]
    if options.cors_origins:  # before the guards: a browser's preflight request has no key
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(options.cors_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[*HEADERS, IGNORED, "Retry-After"],
        )
        middleware.insert(0, cors)
    app = Starlette(
        routes=routes(),
        middleware=middleware,
        exception_handlers={
            ApiError: _refused,
            AFMError: _refused,
            HTTPException: _not_routed,
            ClientLeft: _left,
            ClientDisconnect: _left,
            Exception: _failed,
        },
    )
    app.state.served = served
    app.state.options = options
    app.state.kept_responses = KeptResponses(options.kept_responses, options.kept_bytes)
    return app


async def _refused(request: Request, error: Exception) -> Response:
    served: ServedModel = request.app.state.served
    told = served.told(error)
    served.metrics.failed(told.status)
    return error_response(told, request.url.path)


async def _not_routed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {
        404: f"There is no {request.method} {request.url.path}; docs/server.md lists the routes.",
        405: f"{request.url.path} does not take {request.method}.",
    }
    told = ApiError(
        error.status_code,
        messages.get(error.status_code, error.detail),
        code={404: "not_found", 405: "method_not_allowed"}.get(error.status_code),
        type="invalid_request_error",
        headers=error.headers,
    )
    return error_response(told, request.url.path)


async def _left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _failed(request: Request, error: Exception) -> Response:
    """Of a fault of ours, which Starlette raises once more for the log."""
    _LOG.error("The request %s has failed.", REQUEST_ID.get())
    return await _refused(request, error)
