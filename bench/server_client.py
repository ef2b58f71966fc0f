"""HTTP as the load tests speak it: one connection for one request, events as they arrive, and their times."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import h11

_CHUNK = 65536


@dataclass(frozen=True)
class Address:
    """Where a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Exchange:
    """A connection, its one request and the response.

        async with Exchange(address) as exchange:
            await exchange.send("POST", "/v1/completions", {"prompt": "hello", "stream": True})
            async for data in exchange.events():
                ...

    Args:
        address: address of the server.

    Raises:
        OSError: by any method, when the connection breaks.
        h11.RemoteProtocolError: when what comes is no HTTP, or ends too early.
    """

    def __init__(self, address: Address):
        self._address = address
        self._http = h11.Connection(h11.CLIENT)
        self.status = 0
        self.headers: dict[str, str] = {}

    async def __aenter__(self) -> Exchange:
        self._reader, self.writer = await asyncio.open_connection(
            self._address.host, self._address.port, limit=_CHUNK
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Closing would wait until the server has taken what was sent, which it need not.
        self.writer.transport.abort()

    async def send(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> int:
        """Send the request, wait for the response's head, and return its status."""
        content = b"" if body is None else json.dumps(body).encode()
        fields = {"host": str(self._address), "content-length": str(len(content))}
        if body is not None:
            fields["content-type"] = "application/json"
        request = h11.Request(
            method=method, target=path, headers=list((fields | dict(headers or {})).items())
        )
        data = self._http.send(request) or b""
        self.writer.write(data + content)
        if content:
            self._http.send(h11.Data(data=content))
        self._http.send(h11.EndOfMessage())
        await self.writer.drain()
        return await self.head()

    async def send_raw(self, data: bytes) -> None:
        """Send any bytes in place of a request; what comes back is read as a response to one."""
        host = [("host", str(self._address))]
        self._http.send(h11.Request(method="POST", target="/", headers=host))
        self._http.send(h11.EndOfMessage())
        self.writer.write(data)
        # A server may refuse before it has read everything, and close.
        with contextlib.suppress(OSError):
            await self.writer.drain()

    async def head(self) -> int:
        """Wait for the response's head, and return its status."""
        while True:
            event = await self._next()
            if isinstance(event, h11.Response):
                self.status = event.status_code
                self.headers = {n.decode(): v.decode("latin-1") for n, v in event.headers}
                return self.status

    async def body(self) -> bytes:
        """Return the response's body."""
        return b"".join([part async for part in self._parts()])

    async def events(self) -> AsyncIterator[str]:
        """Yield the data of each event of a stream, as it comes."""
        rest = b""
        async for part in self._parts():
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    yield line[5:].strip().decode()

    async def _parts(self) -> AsyncIterator[bytes]:
        while True:
            event = await self._next()
            if isinstance(event, h11.Data):
                yield bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return

    async def _next(self) -> Any:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(_CHUNK))
        if isinstance(event, h11.ConnectionClosed):
            raise ConnectionResetError("the server has closed the connection")
        return event


async def get(address: Address, path: str) -> tuple[int, bytes]:
    """Send a GET request; return the status and the body of the response."""
    async with Exchange(address) as exchange:
        await exchange.send("GET", path)
        return exchange.status, await exchange.body()
