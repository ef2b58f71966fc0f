"""`/v1/models`: the model, and each of its adapters as a model, with the fields of both APIs."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from afm_mlx.server.served_model import ServedModel
from afm_mlx.server.sse import json_response


async def list_models(request: Request) -> Response:
    """All model ids."""
    served: ServedModel = request.app.state.served
    models = [_described(served, model_id) for model_id in served.model_ids]
    ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"], "has_more": False}
    return json_response({"object": "list", "data": models, **ends})


async def retrieve_model(request: Request) -> Response:
    """One model id."""
    served: ServedModel = request.app.state.served
    model_id = request.path_params["model_id"]
    served.adapter_of(model_id)  # raises for an unknown one
    return json_response(_described(served, model_id))


def _described(served: ServedModel, model_id: str) -> dict[str, Any]:
    is_adapter = model_id != served.name
    return {
        "id": model_id,
        "object": "model",
        "created": served.created,
        "owned_by": "afm-mlx",
        "type": "model",
        "display_name": model_id,
        "created_at": datetime.fromtimestamp(served.created, UTC).isoformat(),
        "max_model_len": served.context_size,
        "parent": served.name if is_adapter else None,
    }
