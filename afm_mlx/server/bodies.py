"""Reading the body of a request into a checked struct."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import math
from contextlib import ExitStack
from typing import TypeVar

import msgspec
from starlette.requests import Request

from afm_mlx.errors import named, shown
from afm_mlx.server.admission import LARGE, in_thread
from afm_mlx.server.field_rules import Reader
from afm_mlx.server.model_registry import ModelRegistry
from afm_mlx.server.replies import ApiError, bad_request, while_connected
from afm_mlx.server.request_fields import REQUESTS, known_elsewhere

Body = TypeVar("Body")

_LOG = logging.getLogger("afm_mlx.server")


def _number(text: str) -> float:
    """Decode a number with a point or an exponent; msgspec takes 12 us for one such as 1.5e300."""
    value = float(text)
    if math.isinf(value):
        raise msgspec.DecodeError(f"the number {shown(text)} is too large")
    return value


_DECODER = msgspec.json.Decoder(float_hook=_number)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ELEMENTS = msgspec.json.Decoder(list[msgspec.Raw])
_INTEGERS = b"0123456789-, \t\r\n"
"""The characters of a list of token ids, which is decoded fast as a whole."""
_LEVELS = 4
"""Number of outer levels of a large body that are decoded element by element; each costs one more pass."""


async def read_body(request: Request, kind: type[Body]) -> Body:
    """Read the body of a request, and convert it to a struct.

    Fields without effect are named in the log and in the response's header `IGNORED_HEADER`. `guards.py` limits
    the size of the body.

    Raises:
        ApiError: 400 with the field for a body that can't be converted; 408 for a body that takes too long; 429
            and 503 as `Admission` raises them.
    """
    models: ModelRegistry = request.app.state.models
    options = request.app.state.options
    parts = []
    with ExitStack() as held:
        try:
            async with asyncio.timeout(options.body_timeout):
                async for part in request.stream():
                    held.enter_context(
                        models.resources.admission.reading(request.state.client, len(part))
                    )
                    parts.append(part)
        except TimeoutError:
            raise ApiError(
                408,
                f"The body did not come within {options.body_timeout:g} s.",
                headers={"Connection": "close"},
            ) from None
        content = b"".join(parts)
        models.resources.workers.begin(request.state.client, len(content))
        known = known_elsewhere() if kind in REQUESTS else None
        reader = Reader(options.strict, known, models.may_think, models.sees)
        if len(content) > LARGE:
            body = await while_connected(
                request, in_thread(lambda: reader.read(decoded(content), kind))
            )
        else:
            body = reader.read(decoded(content), kind)
        if reader.has_images:
            models.resources.workers.begin(request.state.client, len(content), has_images=True)
    if reader.ignored:
        request.state.ignored = ", ".join(reader.ignored)
        _LOG.info("%s: of no effect here: %s", request.url.path, request.state.ignored)
    return body


def decoded(content: bytes) -> object:
    """Decode the JSON of a body; raise a 400 if it is not JSON."""
    try:
        if len(content) <= LARGE:
            return _DECODER.decode(content)
        was_on = gc.isenabled()
        gc.disable()  # collecting takes longer than decoding if there are many lists
        try:
            return _parts_decoded(content, _LEVELS)
        finally:
            if was_on:
                gc.enable()
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        if len(content) <= LARGE and (place := _non_finite_place(content)):
            raise bad_request(
                f"{place} is NaN or infinite, which JSON has no number for; a finite number is needed.",
                place,
            ) from None
        why = str(error)
        if isinstance(error, RecursionError):
            why = "it is nested too deeply"
        elif isinstance(error, UnicodeDecodeError):  # its own text has a misleading position
            why = "it has a string that is no UTF-8"
        raise bad_request(
            f"The body can't be read as JSON: {why}. A JSON object in UTF-8 is needed."
        ) from None


def _parts_decoded(content: bytes | msgspec.Raw, levels: int) -> object:
    """Decode JSON, large JSON element by element, `levels` deep: the decoder lets no other thread run."""
    if len(content) > LARGE and levels:
        first = bytes(memoryview(content)[:100]).lstrip()[:1]
        if first == b"{":
            fields = _FIELDS.decode(content)
            return {name: _parts_decoded(part, levels - 1) for name, part in fields.items()}
        if first == b"[" and bytes(content).strip(b"[] \t\r\n").translate(None, _INTEGERS):
            return [_parts_decoded(part, levels - 1) for part in _ELEMENTS.decode(content)]
    return _DECODER.decode(content)


def _non_finite_place(content: bytes) -> str | None:
    """Return the place of the first NaN or infinity, which Python's decoder takes, or None."""
    found: list[str] = []

    def look(value: object, place: str) -> None:
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
