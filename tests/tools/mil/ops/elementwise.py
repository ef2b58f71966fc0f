"""Element by element, with NumPy's broadcasting, and casts. All are of iOS 15 but those that say otherwise."""

from __future__ import annotations

import numpy as np

_DTYPES = {
    "fp16": np.float16,
    "fp32": np.float32,
    "int8": np.int8,
    "uint8": np.uint8,
    "int16": np.int16,
    "uint16": np.uint16,
    "int32": np.int32,
    "bool": np.bool_,
}


def real_div(x, y):
    """x / y, of floats; what it is of integers is not described."""
    if x.dtype.kind != "f" or y.dtype.kind != "f":
        raise TypeError(f"real_div of {x.dtype} by {y.dtype}, expected floats")
    return x / y


def rsqrt(x, epsilon=1e-12):
    """iOS 17: 1 / sqrt(x + epsilon)."""
    return 1 / np.sqrt(x + np.asarray(epsilon, x.dtype))


def sigmoid(x):
    """1 / (1 + exp(-x)), here in the form that doesn't overflow."""
    return (1 + np.tanh(x / 2)) / 2


def cast(x, dtype):
    """iOS 17: floats become integers towards zero, and booleans where they are not 0.

    Floats that become floats stay as they are: the caller rounds them, or doesn't.
    """
    target = np.dtype(_DTYPES[dtype])
    if target.kind == "f":
        return x if x.dtype.kind == "f" else x.astype(np.float64)
    if "b" in (target.kind, x.dtype.kind):
        return x.astype(target)
    limits, whole = np.iinfo(target), np.trunc(x)
    if whole.size and not (whole.min() >= limits.min and whole.max() <= limits.max):
        raise ValueError(f"{whole.min()} to {whole.max()} don't fit into {target}")
    return whole.astype(target)


def _boolean(x):
    if x.dtype != bool:
        raise TypeError(f"{x.dtype} where a boolean is expected")
    return x


OPS = {
    "abs": lambda x: np.abs(x),
    "add": lambda x, y: x + y,
    "cast": cast,
    "clip": lambda x, alpha, beta: np.minimum(np.maximum(x, alpha), beta),
    "cos": lambda x: np.cos(x),
    "equal": lambda x, y: x == y,
    "exp": lambda x: np.exp(x),
    "floor_div": lambda x, y: x // y,
    "greater": lambda x, y: x > y,
    "greater_equal": lambda x, y: x >= y,
    "identity": lambda x: x,
    "less": lambda x, y: x < y,
    "less_equal": lambda x, y: x <= y,
    "logical_and": lambda x, y: _boolean(x) & _boolean(y),
    "logical_not": lambda x: ~_boolean(x),
    "logical_or": lambda x, y: _boolean(x) | _boolean(y),
    "maximum": lambda x, y: np.maximum(x, y),
    "minimum": lambda x, y: np.minimum(x, y),
    "mul": lambda x, y: x * y,
    "real_div": real_div,
    "round": lambda x: np.rint(x),  # halves to even
    "rsqrt": rsqrt,
    "select": lambda cond, a, b: np.where(_boolean(cond), a, b),
    "sigmoid": sigmoid,
    "silu": lambda x: x * sigmoid(x),
    "sin": lambda x: np.sin(x),
    "sqrt": lambda x: np.sqrt(x),
    "sub": lambda x, y: x - y,
    "tanh": lambda x: np.tanh(x),
}
