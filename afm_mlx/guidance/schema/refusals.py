"""Refusals, and the budget that bounds the work on one schema."""

from __future__ import annotations

import time
from typing import Any, NoReturn

from afm_mlx.errors import ConstraintError, shown

MAX_STEPS = 30_000
"""Intersections of two cases for one schema at most: a few seconds."""
MAX_SECONDS = 8.0
"""Seconds of work on one schema at most."""
MAX_CASES = 600
"""Alternatives of one schema at most."""


def refuse(place: str, got: Any, reason: str) -> NoReturn:
    """Refuse a schema.

    Args:
        place: JSON pointer of what can't be honoured.
        got: its value.
        reason: why it can't be honoured, and what to do.

    Raises:
        ConstraintError: always.
    """
    raise ConstraintError(f"The JSON schema can't be honoured: {place} is {shown(got)}; {reason}")


def refuse_at(place: str, reason: str) -> NoReturn:
    """Refuse a schema for something at a place that no single value shows.

    Args:
        place: JSON pointer.
        reason: what is wrong, what is allowed, and what to do.

    Raises:
        ConstraintError: always.
    """
    raise ConstraintError(f"The JSON schema can't be honoured: at {place}, {reason}")


def check_count(place: str, cases: int) -> None:
    """Raise when a schema has more than `MAX_CASES` alternatives."""
    if cases > MAX_CASES:
        refuse_at(
            place,
            f"{cases} alternatives come together, and {MAX_CASES} at most are followed. Use fewer of anyOf, "
            "oneOf, not, if and dependencies.",
        )


class Budget:
    """Counts steps and seconds of one schema, so that a hostile one ends in a refusal."""

    def __init__(self, steps: int = MAX_STEPS) -> None:
        self._left = steps
        self._start = time.monotonic()

    def spend(self, place: str, steps: int = 1) -> None:
        """Count steps.

        Raises:
            ConstraintError: when there were more than `MAX_STEPS`, or they take longer than `MAX_SECONDS`.
        """
        if time.monotonic() - self._start > MAX_SECONDS:
            refuse_at(
                place,
                f"compiling takes longer than {MAX_SECONDS:g} s. Give a smaller schema, or simpler patterns.",
            )
        self._left -= steps
        if self._left < 0:
            refuse_at(
                place,
                f"alternatives multiply beyond {MAX_STEPS} steps. Use fewer nested anyOf, oneOf, not, if and "
                "dependencies.",
            )


def pointer(place: str, *keys: str | int) -> str:
    """The JSON pointer of what lies below a place."""
    tokens = (str(key).replace("~", "~0").replace("/", "~1") for key in keys)
    return "/".join([place, *tokens])
