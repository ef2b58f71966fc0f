"""A server on this machine that speaks the hub's protocol, as far as fetching a model needs it."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = 1000  # bytes from which files are in LFS


@dataclass
class Hub:
    """A hub with one model, owner/name.

    Args:
        files: content of each of the model's files.
        errors: status and X-Error-Code of an answer, by a part of the path; the first that fits is sent.
        drops: bytes after which the next answers' connections break off, one of each answer with a large file.
        is_short: True if an answer that breaks off has the length that it names.
        ranges: False to send whole files whatever range is asked for.
        cdn: the hub that requests for large files are redirected to; pass None to send them.
        delay: seconds before each KB.
        got: (file, Range header) of every large file that was asked for.
        tokens: the Authorization header of each of these requests.
    """

    files: dict[str, bytes]
    errors: dict[str, tuple[int, str]] = field(default_factory=dict)
    drops: list[int] = field(default_factory=list)
    is_short: bool = False
    ranges: bool = True
    cdn: Hub | None = None
    delay: float = 0.0
    got: list[tuple[str, str | None]] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)

    def __enter__(self) -> Hub:
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        for part, (status, code) in self.hub.errors.items():
            if part in path:
                return self._send(status, b"{}", {"X-Error-Code": code})
        api = "/api/models/owner/name"
        if path.startswith(f"{api}/tree/"):
            entries = [
                {"type": "file", "path": n, "size": len(c), "oid": _sha1(c), **_lfs(c, "oid")}
                for n, c in self.hub.files.items()
            ]
            return self._send(200, json.dumps(entries).encode(), {})
        if path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
            siblings = [
                {"rfilename": n, "size": len(c), "blobId": _sha1(c), **_lfs(c, "sha256")}
                for n, c in self.hub.files.items()
            ]
            info = {"id": "owner/name", "sha": COMMIT, "siblings": siblings}
            return self._send(200, json.dumps(info).encode(), {})
        name = path.removeprefix(f"/owner/name/resolve/{COMMIT}/")
        if name in self.hub.files:
            return self._file(name, self.hub.files[name])
        code = "RevisionNotFound" if "/revision/" in path else "RepoNotFound"
        return self._send(404, b"{}", {"X-Error-Code": code})

    do_HEAD = do_GET

    def _file(self, name: str, content: bytes) -> None:
        large = len(content) >= LARGE
        headers = {"ETag": f'"{_sha256(content) if large else _sha1(content)}"'}
        headers |= {"X-Repo-Commit": COMMIT}
        asked = self.headers.get("Range")
        if not large or self.command == "HEAD":
            return self._send(200, content, headers)
        self.hub.got.append((name, asked))
        self.hub.tokens.append(self.headers.get("Authorization"))
        if self.hub.cdn is not None:
            return self._send(302, b"", {"Location": self.hub.cdn.url + self.path})
        status, start = 200, 0
        if asked and self.hub.ranges:
            status, start = 206, int(asked.removeprefix("bytes=").removesuffix("-"))
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        limit = self.hub.drops.pop(0) if self.hub.drops else None
        if self.hub.is_short and limit is not None:
            return self._send(status, content[start : start + limit], headers)
        return self._send(status, content[start:], headers, limit)

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], limit: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        limit = len(body) if limit is None else limit
        for start in range(0, limit, 1024):
            time.sleep(self.hub.delay)
            self.wfile.write(body[start : min(start + 1024, limit)])
        self.close_connection = limit < len(body)

    def log_message(self, *arguments: object) -> None:
        pass


def _lfs(content: bytes, digest: str) -> dict[str, object]:
    if len(content) < LARGE:
        return {}
    return {"lfs": {digest: _sha256(content), "size": len(content), "pointerSize": 134}}


def _sha1(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
