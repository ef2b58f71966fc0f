"""Checks of every request before a route sees it: its Host, its Origin, its key, the size of its body.

They read headers only, so refusing a request costs nothing, however large its body is.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from afm_mlx.errors import named
from afm_mlx.server.replies import ApiError, error_response
from afm_mlx.server.server_options import ServerOptions

OPEN_PATHS = ("/", "/health", "/ready")
"""Paths that need no key: the page, which asks for the key, and the health checks."""
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")

_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\[\]:/@\s]+)(:\d{1,5})?")


def is_loopback(host: str) -> bool:
    """True if an address to listen on can be reached from this machine only."""
    address = _address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


class Guards:
    """ASGI middleware that refuses requests which must not reach a route."""

    def __init__(self, app: ASGIApp, options: ServerOptions):
        self._app, self._options = app, options
        self._keys = _by_digest((*options.api_keys, *options.admin_keys))
        self._admins = frozenset(_by_digest(options.admin_keys).values())
        self._is_local = is_loopback(options.host)
        is_private = self._is_local or options.unix_socket is not None
        self._asks_everybody = bool(options.api_keys) or (bool(self._keys) and not is_private)
        names = {*LOOPBACK_NAMES, *options.allowed_hosts}
        if not self._is_local:
            own = socket.gethostname()
            names |= {options.host, own, f"{own}.local"}
        self._hosts = frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check_length(headers)
            self._check_host(headers)
            self._check_origin(headers)
            client = self._client(scope, headers)
            is_admin = client in self._admins or not self._keys
            scope.setdefault("state", {}).update(client=client, is_admin=is_admin)
        except ApiError as error:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        await self._app(scope, _Bounded(receive, self._options.max_body), send)

    def _check_host(self, headers: Headers) -> None:
        """Refuse foreign Hosts, such as a web page's whose name resolves to this machine (DNS rebinding)."""
        hosts = headers.getlist("host")
        if self._options.unix_socket is not None or not hosts:
            return  # browsers can't reach Unix sockets, and always send a Host
        found = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        name = None if found is None else found[1].strip("[]").lower().removesuffix(".")
        if name is None or not (
            name in self._hosts or (not self._is_local and _address(name) is not None)
        ):
            raise ApiError(
                403,
                f"The Host {named(', '.join(hosts))} is not a name of this server. --allowed-host adds one.",
                code="host_not_allowed",
            )

    def _check_origin(self, headers: Headers) -> None:
        """Refuse requests of web pages, except the server's own page and allowed origins."""
        origin = headers.get("origin")
        if (
            origin is None
            or origin in self._options.cors_origins
            or "*" in self._options.cors_origins
        ):
            return
        host = headers.get("host")
        if host is None or origin not in (f"http://{host}", f"https://{host}"):
            raise ApiError(
                403,
                f"Pages of {named(origin)} may not use this server. --cors-origin allows one.",
                code="origin_not_allowed",
            )

    def _client(self, scope: Scope, headers: Headers) -> str:
        """Return the client's id, a digest of its API key; "" if the server needs no key.

        Raises:
            ApiError: 401 for a missing or unknown key.
        """
        path = scope["path"]
        if path in OPEN_PATHS or path.startswith("/page/"):
            return ""
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = hashlib.sha256(given.encode("utf-8", "surrogateescape")).hexdigest()
        found = ""
        for known, client in self._keys.items():  # all of them, so that the time reveals nothing
            if hmac.compare_digest(digest, known):
                found = client
        if not found and self._asks_everybody:
            raise ApiError(
                401,
                "The API key is missing or wrong; give it as Authorization: Bearer KEY, or x-api-key.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return found

    def _check_length(self, headers: Headers) -> None:
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy may use the other one, and read a part of the body as a request (request smuggling).
            raise ApiError(
                400,
                "The request has both Content-Length and Transfer-Encoding; one of them is needed.",
                code="bad_http",
                headers={"Connection": "close"},
            )
        length = headers.get("content-length", "0")
        if length.isascii() and length.isdigit() and int(length) > self._options.max_body:
            raise too_large(self._options.max_body)


def check_admin(request: Request) -> None:
    """Raise a 403 unless the request has an admin key; handlers that touch other clients' data call it."""
    if request.state.is_admin:
        return
    has_key = bool(request.app.state.options.admin_keys)
    raise ApiError(
        403,
        f"{request.method} {request.url.path} needs an admin key, as it concerns all clients of this server. "
        + ("Give it in place of yours." if has_key else "Start the server with --admin-key-file."),
        code="admin_key_needed",
    )


class _Bounded:
    """Wraps the ASGI `receive` of a request, and raises a 413 once its body has more than `most` bytes."""

    def __init__(self, receive: Receive, most: int):
        self._receive, self._left, self._most = receive, most, most

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            if self._left < 0:
                raise too_large(self._most)
        return message


def too_large(most: int) -> ApiError:
    """Make the 413 error of a body with more than `most` bytes."""
    return ApiError(
        413,
        f"The body has more than {most} bytes. Send less, or start the server with another --max-body.",
        code="body_too_large",
        headers={"Connection": "close"},
    )


def _by_digest(keys: Iterable[str]) -> Mapping[str, str]:
    """Map digests of keys to client ids; digests have equal lengths, so comparing reveals no length."""
    digests = [hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest() for key in keys]
    return {digest: f"key-{digest[:12]}" for digest in digests}


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
