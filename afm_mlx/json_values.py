"""Check that JSON values are ranks, numbers in range, or encodable text."""

from __future__ import annotations

from typing import Any, TypeGuard

import numpy as np

# No matrix of a model has more rows; a config with more is damaged or hostile.
MAX_RANK = 1 << 16
# Largest number in a running adapter, whatever dtype its file has.
FLOAT16_MAX = float(np.finfo(np.float16).max)
# Largest scale: kernels take scales in float32.
FLOAT32_MAX = float(np.finfo(np.float32).max)


def is_rank(value: Any) -> TypeGuard[int]:
    """True if a JSON value is an integer from 1 to `MAX_RANK`."""
    return type(value) is int and 1 <= value <= MAX_RANK


def is_number(value: Any) -> TypeGuard[int | float]:
    """True if a JSON value is a number within float32's range."""
    return type(value) in (int, float) and abs(value) <= FLOAT32_MAX


def is_text(value: Any) -> TypeGuard[str]:
    """True if a JSON value is text without lone surrogates, so that it can be encoded as UTF-8."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)
