"""`/health`, `/ready` and `/metrics`, for what watches the server."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from afm_mlx.server.guards import check_admin
from afm_mlx.server.metrics import CONTENT_TYPE
from afm_mlx.server.served_model import ServedModel
from afm_mlx.server.sse import json_response


async def health(request: Request) -> Response:
    """True if the server is alive."""
    return json_response({"status": "ok"})


async def ready(request: Request) -> Response:
    """True if requests are taken: the model is loaded, and the server is not stopping."""
    served: ServedModel = request.app.state.served
    if served.admission.draining:
        return json_response({"status": "stopping"}, 503)
    return json_response({"status": "ready", "model": served.name})


async def metrics(request: Request) -> Response:
    """What was counted and measured, of all clients."""
    check_admin(request)
    served: ServedModel = request.app.state.served
    return Response(served.metrics.text(), headers={"Content-Type": CONTENT_TYPE})
