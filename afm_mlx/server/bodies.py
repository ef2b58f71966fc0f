"""Reading the body of a request, and making a checked value of it; an error names the field."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from afm_mlx.errors import named, shown
from afm_mlx.server.errors import ApiError, bad_request

Body = TypeVar("Body")
NO_HINTS: Mapping[str, str] = MappingProxyType({})

_PLACE = re.compile(r" - at `(key in )?\$\.?(.*)`$", re.S)
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*?)`", re.S)
_MISSING = re.compile(r"^Object missing required field `(.*?)`", re.S)


Hints = Mapping[str, str]
"""What to add to the error of a field, by a regular expression that its place matches as a whole."""


async def read_body(request: Request, kind: type[Body], hints: Hints = NO_HINTS) -> Body:
    """The body of a request as a value of a type.

    Args:
        request: the request; `guards.py` bounds the size of its body.
        kind: a msgspec struct. Fields that it does not have are refused if it says so (forbid_unknown_fields).
        hints: what to add to the errors of some fields.

    Raises:
        ApiError: 400 for a body that is no such value, with the field as its `param`; 408 for one that does not
            come in time.
    """
    seconds = request.app.state.options.body_timeout
    try:
        async with asyncio.timeout(seconds):
            content = await request.body()
    except TimeoutError:
        raise ApiError(
            408, f"The body did not come within {seconds:g} s.", headers={"Connection": "close"}
        ) from None
    return decoded(content, kind, hints)


def decoded(content: bytes, kind: type[Body], hints: Hints = NO_HINTS) -> Body:
    """A value of a type from JSON; see `read_body`."""
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        raise _refused(str(error), hints=hints) from None
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


def converted(value: Any, kind: type[Body], place: str) -> Body:
    """A value of a type from what JSON was decoded to.

    Args:
        value: lists, dicts, texts and numbers.
        kind: see `read_body`.
        place: where the value stands in the body.

    Raises:
        ApiError: as `read_body`.
    """
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise _refused(str(error), place) from None


def _refused(message: str, below: str = "", hints: Hints = NO_HINTS) -> ApiError:
    """The error of a validation, which msgspec writes as `what - at `$.place``."""
    found = _PLACE.search(message)
    what = message[: found.start()] if found else message
    place = "" if found is None else found[2]
    if below:
        place = below + ("" if place.startswith("[") or not place else ".") + place
    for pattern in (_UNKNOWN, _MISSING):
        if field := pattern.match(what):
            place = f"{place}.{field[1]}" if place else field[1]
            if pattern is _UNKNOWN:
                return bad_request(
                    f"{named(place)} is no field that this server honours. Leave it out.",
                    named(place),
                    "unknown_parameter",
                )
            return bad_request(
                f"{place} is missing; it is needed.", place, "missing_required_parameter"
            )
    if not place:
        return bad_request(f"The body can't be used: {what}.")
    hint = next((f" {hint}" for p, hint in hints.items() if re.fullmatch(p, place)), "")
    return bad_request(
        f"{named(place)} can't be used: {what}.{hint}", named(place), "invalid_value"
    )


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


def refuse(value: Any, name: str, why: str, *allowed: Any) -> None:
    """Raise for a field that can't be honoured, unless it is null or has one of the values that change nothing.

    Raises:
        ApiError: 400 that names the field.
    """
    if value is None or any(type(value) is type(each) and value == each for each in allowed):
        return
    words = ", ".join(json.dumps(each) for each in (*allowed, None))
    raise bad_request(
        f"{name} is {shown(value)}; {why}. Allowed here: {words}, or leave it out.",
        name,
        "unsupported_parameter",
    )
