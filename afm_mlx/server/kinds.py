"""Objects whose `type` says which fields they have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afm_mlx.errors import shown
from afm_mlx.server.bodies import converted
from afm_mlx.server.errors import bad_request


def of_kind(
    value: Any,
    place: str,
    kinds: Mapping[str, type[Any]],
    why: str,
    default: str | None = None,
) -> Any:
    """The struct that an object of a body is made of.

    Args:
        value: what JSON was decoded to.
        place: where it stands in the body.
        kinds: structs by the `type` of their objects.
        why: why other types can't be honoured, for messages.
        default: the type of objects that don't say theirs.

    Raises:
        ApiError: 400 that names the field.
    """
    if not isinstance(value, dict):
        raise bad_request(
            f"{place} is {shown(value)}; an object with a type is needed.", place, "invalid_value"
        )
    if default is not None and value.get("type") is None:
        value = {**value, "type": default}
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise bad_request(
            f"{place}.type is {shown(kind)}; {why}. Allowed are {', '.join(kinds)}.",
            f"{place}.type",
            "unsupported_value",
        )
    return converted(value, kinds[kind], place)
