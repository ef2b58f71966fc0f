"""Reading the body of a request, and making a checked value of it; an error names the field."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from afm_mlx.errors import named, shown
from afm_mlx.server.errors import ApiError, bad_request
from afm_mlx.server.field_rules import Reader
from afm_mlx.server.limits import Admission
from afm_mlx.server.request_fields import REQUESTS, known_elsewhere
from afm_mlx.server.served_model import ServedModel
from afm_mlx.server.sse import while_connected
from afm_mlx.server.workers import LARGE, in_thread

Body = TypeVar("Body")

_LOG = logging.getLogger("afm_mlx.server")


def _number(text: str) -> float:
    """A number with a point or an exponent; msgspec itself would take 12 us for one such as 1.5e300."""
    value = float(text)
    if math.isinf(value):
        raise msgspec.DecodeError(f"the number {shown(text)} is too large")
    return value


_DECODER = msgspec.json.Decoder(float_hook=_number)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ELEMENTS = msgspec.json.Decoder(list[msgspec.Raw])
_INTEGERS = b"0123456789-, \t\r\n"
"""What lists of token ids consist of, which are read fast as a whole."""
_LEVELS = 4
"""Levels of large values that are read element by element; each is looked through once more."""


async def read_body(request: Request, kind: type[Body]) -> Body:
    """The body of a request as a value of a type.

    What of it has no effect is named in the log, and in a header of the response (`request_ids.py`).

    Args:
        request: the request; `guards.py` bounds the size of its body.
        kind: a struct of `request_fields.py`, or a msgspec struct of a route's own.

    Raises:
        ApiError: 400 for a body that is no such value, with the field as its `param`; 408 for one that does not
            come in time; 429 and 503 when the server has enough to do, or ends.
    """
    served: ServedModel = request.app.state.served
    with ExitStack() as held:
        content = await _content(request, served.admission, held)
        made, ignored = await _made(request, served, content, kind)
    if ignored:
        request.state.ignored = ", ".join(ignored)
        _LOG.info("%s: of no effect here: %s", request.url.path, request.state.ignored)
    return made


async def _content(request: Request, admission: Admission, held: ExitStack) -> bytes:
    """All of a body; its memory is reserved until `held` is closed."""
    seconds, parts = request.app.state.options.body_timeout, []
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                held.enter_context(admission.reading(request.state.client, len(part)))
                parts.append(part)
    except TimeoutError:
        raise ApiError(
            408, f"The body did not come within {seconds:g} s.", headers={"Connection": "close"}
        ) from None
    return b"".join(parts)


async def _made(
    request: Request, served: ServedModel, content: bytes, kind: type[Body]
) -> tuple[Body, Iterable[str]]:
    """What a body is read as, and the names of what it ignores."""
    options = request.app.state.options
    served.workers.begin(request.state.client, len(content))
    reader = Reader(options.strict, known_elsewhere() if kind in REQUESTS else None)
    if len(content) > LARGE:
        made = await while_connected(
            request, in_thread(lambda: reader.read(decoded(content), kind))
        )
    else:
        made = reader.read(decoded(content), kind)
    return made, reader.ignored


def decoded(content: bytes) -> Any:
    """Decode the JSON of a body.

    Raises:
        ApiError: 400 for what is no JSON.
    """
    try:
        if len(content) <= LARGE:
            return _DECODER.decode(content)
        with _without_gc():
            return _parts_decoded(content, _LEVELS)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        if len(content) <= LARGE and (place := _place_of_no_number(content)):
            raise bad_request(
                f"{place} is NaN or infinite, which JSON has no number for; a finite number is needed.",
                place,
            ) from None
        why = str(error)
        if isinstance(error, RecursionError):
            why = "it is nested too deeply"
        elif isinstance(error, UnicodeDecodeError):  # whose text counts from the string's beginning
            why = "it has a string that is no UTF-8"
        raise bad_request(
            f"The body can't be read as JSON: {why}. A JSON object in UTF-8 is needed."
        ) from None


def _parts_decoded(content: bytes | msgspec.Raw, levels: int) -> Any:
    """What a large JSON says, read element by element: a decoder lets no other thread run until it is done."""
    if len(content) > LARGE and levels:
        first = bytes(memoryview(content)[:100]).lstrip()[:1]
        if first == b"{":
            fields = _FIELDS.decode(content)
            return {name: _parts_decoded(part, levels - 1) for name, part in fields.items()}
        if first == b"[" and bytes(content).strip(b"[] \t\r\n").translate(None, _INTEGERS):
            return [_parts_decoded(part, levels - 1) for part in _ELEMENTS.decode(content)]
    return _DECODER.decode(content)


@contextmanager
def _without_gc() -> Iterator[None]:
    """Without the search for cycles, which takes longer than the decoder where lists are many."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _place_of_no_number(content: bytes) -> str | None:
    """Where a body that Python's JSON takes has NaN or infinity, which are no JSON."""
    found: list[str] = []

    def look(value: Any, place: str) -> None:
        if isinstance(value, float) and not math.isfinite(value):
            found.append(place)
        elif isinstance(value, dict):
            for name, item in value.items():
                look(item, f"{place}.{name}" if place else name)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                look(item, f"{place}[{index}]")

    try:
        look(json.loads(content), "")
    except (ValueError, RecursionError):
        return None
    return named(found[0]) if found else None
