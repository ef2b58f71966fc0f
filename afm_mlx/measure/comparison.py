"""True if an answer is the expected one: as text, as a JSON value, or as calls of tools."""

from __future__ import annotations

import json
from typing import Any

from afm_mlx.errors import TokenizerError
from afm_mlx.tokenizer.chat_messages import parse_tool_calls
from afm_mlx.tokenizer.vocabulary import EXECUTABLE_END, EXECUTABLE_START

TEXT, JSON, CALLS = "text", "json", "calls"
COMPARISONS = (TEXT, JSON, CALLS)


def natural_comparison(expected: str, has_format: bool) -> str:
    """How answers are compared with an expected one.

    Args:
        expected: the expected answer.
        has_format: whether the chat has a `response_format`.
    """
    if EXECUTABLE_START in expected and _read(expected, CALLS) is not None:
        return CALLS
    return JSON if has_format and _read(expected, JSON) is not None else TEXT


def can_be_compared(expected: str, comparison: str) -> bool:
    """True if an expected answer has the form that a comparison needs."""
    return _read(expected, comparison) is not None


def is_right(answer: str, expected: str, comparison: str) -> bool:
    """True if an answer is the expected one.

    Args:
        answer, expected: texts.
        comparison: "text" compares word for word, leading and trailing white space aside; "json" compares JSON
            values, in which keys have no order; "calls" compares names and arguments of calls of tools, and the
            text before them.
    """
    got, wanted = _read(answer, comparison), _read(expected, comparison)
    return got is not None and wanted is not None and _same(got[0], wanted[0])


def _read(text: str, comparison: str) -> tuple[Any] | None:
    """What is compared of a text, as the only item; None when the text does not have that form."""
    text = text.strip()
    try:
        if comparison == JSON:
            return (json.loads(text),)
        if comparison == CALLS:
            before, _, calls = text.partition(EXECUTABLE_START)
            if not calls.endswith(EXECUTABLE_END):
                return None
            calls = calls.removesuffix(EXECUTABLE_END)
            return ([before.strip(), parse_tool_calls(calls)],)
    except (ValueError, RecursionError, TokenizerError):
        return None
    return (text,)


def _same(one: Any, other: Any) -> bool:
    """True if two JSON values are equal; unlike Python's True and 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and one == other
