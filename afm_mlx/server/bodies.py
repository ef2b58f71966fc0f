"""Reading the body of a request, and making a checked value of it; an error names the field."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from afm_mlx.errors import named
from afm_mlx.server.errors import ApiError, bad_request
from afm_mlx.server.field_rules import Reader
from afm_mlx.server.request_fields import REQUESTS, known_elsewhere

Body = TypeVar("Body")

_LOG = logging.getLogger("afm_mlx.server")


async def read_body(request: Request, kind: type[Body]) -> Body:
    """The body of a request as a value of a type.

    What of it has no effect is named in the log, and in a header of the response (`request_ids.py`).

    Args:
        request: the request; `guards.py` bounds the size of its body.
        kind: a struct of `request_fields.py`, or a msgspec struct of a route's own.

    Raises:
        ApiError: 400 for a body that is no such value, with the field as its `param`; 408 for one that does not
            come in time.
    """
    options = request.app.state.options
    try:
        async with asyncio.timeout(options.body_timeout):
            content = await request.body()
    except TimeoutError:
        raise ApiError(
            408,
            f"The body did not come within {options.body_timeout:g} s.",
            headers={"Connection": "close"},
        ) from None
    reader = Reader(options.strict, known_elsewhere() if kind in REQUESTS else None)
    made = reader.read(decoded(content), kind)
    if reader.ignored:
        request.state.ignored = ", ".join(reader.ignored)
        _LOG.info("%s: of no effect here: %s", request.url.path, request.state.ignored)
    return made


def decoded(content: bytes) -> Any:
    """What JSON says.

    Raises:
        ApiError: 400 for what is no JSON.
    """
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        if place := _place_of_no_number(content):
            raise bad_request(
                f"{place} is NaN or infinite, which JSON has no number for; a finite number is needed.",
                place,
            ) from None
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise bad_request(
            f"The body can't be read as JSON: {why}. A JSON object in UTF-8 is needed."
        ) from None


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
