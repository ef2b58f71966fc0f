"""Headers of every response: the request's id, as both APIs' clients look for it, and what had no effect."""

from __future__ import annotations

import uuid
from contextvars import ContextVar

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID: ContextVar[str] = ContextVar("REQUEST_ID", default="")
"""The id of the request that is being answered."""
HEADERS = ("x-request-id", "request-id")
"""The headers' names: OpenAI's, and Anthropic's."""
IGNORED = "x-afm-ignored"
"""The header that lists a request's fields that were accepted and ignored, see `field_rules.py`."""


class RequestIds:
    """ASGI middleware that gives every request an id, and its response the headers.

    Args:
        app: what comes behind.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = f"req_{uuid.uuid4().hex}"
        REQUEST_ID.set(request_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name in HEADERS:
                    headers[name] = request_id
                if ignored := scope.get("state", {}).get("ignored"):
                    headers[IGNORED] = ignored
            await send(message)

        await self._app(scope, receive, send_with_id)
