"""Which values of JSON may be a rank, a number or a text: not all that Python reads as an int or a str."""

from __future__ import annotations

from typing import Any, TypeGuard

import numpy as np

# More than any matrix of a model has rows; a config that claims more is damaged or hostile.
MAX_RANK = 1 << 16
# The largest number of an adapter that runs, whatever dtype its file has.
FLOAT16_MAX = float(np.finfo(np.float16).max)
# The largest scale: kernels take scales in float32.
FLOAT32_MAX = float(np.finfo(np.float32).max)


def is_rank(value: Any) -> TypeGuard[int]:
    """True if a value of JSON can be a rank."""
    return type(value) is int and 1 <= value <= MAX_RANK


def is_number(value: Any) -> TypeGuard[int | float]:
    """True if a JSON value is a number within float32's range; Python's integers are unbounded."""
    return type(value) in (int, float) and abs(value) <= FLOAT32_MAX


def is_text(value: Any) -> TypeGuard[str]:
    """True if a JSON value is text without lone surrogates, so that it can be encoded as UTF-8."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)
