"""The chat page at `/`: static files, read once, so that no request's path ever reaches the file system."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Awaitable, Callable
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
"""Media types of the page's files, by the ends of their names."""

CONTENT_SECURITY_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    ]
)
"""No code and no style but the page's own, which lies in files, and requests to this server only."""

_HEADERS = {
    "Cache-Control": "no-cache",  # kept, and asked for again: a newer server has newer files
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_routes() -> list[Route]:
    """`/`, and one route for each of the page's other files below `/page/`."""
    names = sorted(page_files())
    files = [Route(f"/page/{name}", _endpoint(name)) for name in names if name != "index.html"]
    return [Route("/", _endpoint("index.html")), *files]


@functools.cache
def page_files() -> dict[str, bytes]:
    """The page's files by name."""
    folder = resources.files("afm_mlx.server") / "page"
    return {
        file.name: file.read_bytes()
        for file in folder.iterdir()
        if file.name.rpartition(".")[2] in TYPES
    }


def _endpoint(name: str) -> Callable[[Request], Awaitable[Response]]:
    content = page_files()[name]
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**_HEADERS, "ETag": etag, "Content-Type": TYPES[name.rpartition(".")[2]]}

    async def answer(request: Request) -> Response:
        known = request.headers.get("if-none-match", "")
        if etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers)

    return answer
