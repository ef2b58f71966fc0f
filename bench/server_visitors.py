"""How clients of the soak test behave: patient, leaving, slow, broken off, malformed, and no HTTP at all."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import h11

from bench.server_client import Address, Exchange
from bench.server_traffic import Query, Reading, Traffic

PATIENCE = 300.0
"""Seconds until a request that is neither answered nor refused counts as lost."""

ANSWERED, FAILED, REFUSED, LEFT, LOST, WRONG = (
    "answered",
    "ended with its error",
    "refused",
    "left",
    "lost",
    "wrong",
)
"""What became of a request; of an accepted one, all but the last two are as they should be."""


@dataclass(frozen=True)
class Outcome:
    """What became of one request.

    Args:
        kind: how the client behaved, and what it asked.
        verdict: one of the above.
        detail: what is wrong, or the error.
    """

    kind: str
    verdict: str
    detail: str = ""


class Visitors:
    """Clients of one server.

    Args:
        address: address of the server.
        traffic: draws the clients' requests.
    """

    def __init__(self, address: Address, traffic: Traffic):
        self.address, self.traffic = address, traffic
        self._rng = traffic.rng
        self._behaviours: list[tuple[float, Callable[[], Awaitable[Outcome]]]] = [
            (0.53, self.patient),
            (0.12, self.leaving),
            (0.08, self.slow),
            (0.08, self.half_sent),
            (0.12, self.malformed),
            (0.05, self.nonsense),
            (0.02, self.adapters),
        ]

    async def visit(self) -> Outcome:
        """Behave as a random kind of client, and return the outcome of its request."""
        weights, behaviours = zip(*self._behaviours, strict=True)
        behaviour = behaviours[self._rng.choice(len(behaviours), p=weights)]
        try:
            async with asyncio.timeout(PATIENCE):
                return await behaviour()
        except TimeoutError:
            return Outcome(behaviour.__name__, LOST, f"nothing for {PATIENCE:g} seconds")
        except (OSError, h11.ProtocolError) as error:
            return Outcome(behaviour.__name__, LOST, f"{type(error).__name__}: {error}")

    async def patient(self) -> Outcome:
        """Read the whole answer."""
        return await self._read(self.traffic.query(), "")

    async def slow(self) -> Outcome:
        """Read a stream more slowly than it comes."""
        query = self.traffic.query()
        query.body["stream"] = True
        return await self._read(query, "slow, ", pause=float(self._rng.uniform(0.05, 0.3)))

    async def leaving(self) -> Outcome:
        """Leave before the first token, in the middle of a stream, or while an answer is made."""
        query = self.traffic.query()
        delay = float(self._rng.exponential(0.5))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay):
                outcome = await self._read(query, "leaving, ")
                if outcome.verdict in (LOST, WRONG):
                    return outcome
        return Outcome(f"leaving, {query.kind}", LEFT)

    async def _read(self, query: Query, manner: str, pause: float = 0) -> Outcome:
        kind = manner + query.kind
        reading = Reading(query)
        async with Exchange(self.address) as exchange:
            if pause:
                own: socket.socket = exchange.writer.get_extra_info("socket")
                own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            status = await exchange.send("POST", query.path, query.body)
            if status != 200:
                return refusal(kind, status, await exchange.body(), query.path)
            if query.streamed:
                async for data in exchange.events():
                    reading.event(data)
                    if pause and reading.events < 15:
                        await asyncio.sleep(pause)
            else:
                reading.body(await exchange.body())
        complaint = reading.complaint()
        if complaint is not None:
            return Outcome(kind, WRONG if reading.ended else LOST, complaint)
        return Outcome(kind, FAILED if reading.error else ANSWERED, reading.error or "")

    async def half_sent(self) -> Outcome:
        """Send a part of a body; then leave, or shut the sending side down and wait."""
        query = self.traffic.query()
        body = json.dumps(query.body).encode()
        part = body[: int(self._rng.integers(len(body)))]
        waits = self._rng.random() < 0.5
        async with Exchange(self.address) as exchange:
            await exchange.send_raw(_head("POST", query.path, self.address, len(body)) + part)
            await asyncio.sleep(float(self._rng.uniform(0, 1)))
            if waits:
                exchange.writer.write_eof()
                try:
                    status = await exchange.head()
                except (h11.RemoteProtocolError, OSError):
                    return Outcome("half-sent", LEFT)
                verdict = REFUSED if 400 <= status < 500 else WRONG
                return Outcome("half-sent", verdict, f"status {status}")
        return Outcome("half-sent", LEFT)

    async def malformed(self) -> Outcome:
        """Send a request that is wrong in one way, which the server must refuse."""
        name, path, content, headers = self._mistake()
        kind = f"malformed, {name}"
        async with Exchange(self.address) as exchange:
            head = _head("POST", path, self.address, len(content), headers)
            await exchange.send_raw(head + content)
            status = await exchange.head()
            outcome = refusal(kind, status, await exchange.body(), path)
            if outcome.verdict == REFUSED and status >= 500:
                return Outcome(kind, WRONG, f"status {status}")
            return outcome

    async def nonsense(self) -> Outcome:
        """Send bytes that are not HTTP, which the server must refuse or ignore."""
        async with Exchange(self.address) as exchange:
            noise = self._rng.bytes(int(self._rng.integers(1, 2000)))
            await exchange.send_raw(noise + b"\r\n\r\n")
            try:
                status = await exchange.head()
            except (h11.RemoteProtocolError, OSError):
                return Outcome("nonsense", REFUSED)
            good = 400 <= status < 500
            return Outcome("nonsense", REFUSED if good else WRONG, f"status {status}")

    async def adapters(self) -> Outcome:
        """Load, unload, pin or unpin an adapter, while others use it."""
        name = str(self._rng.choice(self.traffic.models)).partition(":")[2] or "no-such-adapter"
        action = str(self._rng.choice(["load", "unload", "pin", "unpin"]))
        async with Exchange(self.address) as exchange:
            status = await exchange.send("POST", f"/v1/adapters/{name}/{action}")
            if status == 200:
                return Outcome(f"adapters, {action}", ANSWERED)
            return refusal(f"adapters, {action}", status, await exchange.body(), "")

    def _mistake(self) -> tuple[str, str, bytes, dict[str, str]]:
        """Return name, path, body and headers of a request that is wrong in one way."""
        query = self.traffic.query()
        wrong: dict[str, dict[str, Any]] = {
            "unknown field": {"no_such_field": 1},
            "unknown model": {"model": "no-such-model"},
            "path as adapter": {"model": f"{self.traffic.models[0]}:../../etc"},
            "temperature": {"temperature": "hot"},
            "messages and prompt": {"messages": 7, "prompt": {}, "input": 7.5},
            "stop": {"stop": 7, "stop_sequences": 7, "text": 7},
            "a limit below 0": {"max_tokens": -3, "max_output_tokens": -3},
            "too long": {
                "messages": [{"role": "user", "content": "word " * 20_000}],
                "prompt": "word " * 20_000,
                "input": "word " * 20_000,
            },
        }
        whole = json.dumps(query.body).encode()
        raw: dict[str, tuple[bytes, dict[str, str]]] = {
            "not JSON": (whole[:-1], {}),
            "not UTF-8": (b'{"model": "\xff\xfe"}', {}),
            "brackets": (b"[" * 100_000, {}),
            "empty": (b"", {}),
            "a list": (b"[1, 2]", {}),
            "foreign Host": (whole, {"host": "evil.example"}),
            "foreign Origin": (whole, {"origin": "http://evil.example"}),
        }
        name = str(self._rng.choice([*wrong, *raw, "unknown path"]))
        if name == "unknown path":
            return name, "/v1/nothing", whole, {}
        if name in raw:
            return name, query.path, *raw[name]
        # Only the fields that this API knows are changed to what they can't be.
        fields = wrong[name]
        known = {key: value for key, value in fields.items() if key in query.body}
        changed = query.body | (known or dict([next(iter(fields.items()))]))
        return name, query.path, json.dumps(changed).encode(), {}


def refusal(kind: str, status: int, content: bytes, path: str) -> Outcome:
    """Return the outcome of an error response, which must have its API's form."""
    if status == 200:
        return Outcome(kind, WRONG, f"was answered: {content[:100]!r}")
    try:
        error = json.loads(content)["error"]
        fields = (
            {"type", "message"} if path == "/v1/messages" else {"message", "type", "param", "code"}
        )
        well_formed = fields <= set(error) and bool(error["message"])
    except (ValueError, TypeError, KeyError):
        well_formed = False
    if not well_formed:
        return Outcome(kind, WRONG, f"status {status} with the body {content[:100]!r}")
    return Outcome(kind, REFUSED, f"{status}: {error['message']}")


def _head(
    method: str, path: str, address: Address, length: int, headers: dict[str, str] | None = None
) -> bytes:
    fields = {"host": str(address), "content-type": "application/json"}
    fields |= {"content-length": str(length)} | (headers or {})
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()
