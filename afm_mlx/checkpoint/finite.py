"""Checks that arrays from files hold usable numbers, before anything is computed with them.

NaN and infinity are not usable, nor are numbers whose squares overflow float32: the norm of a vector with such
a number overflows. Checking a model reads its float tensors once, at memory speed; packed codes need no check.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from afm_mlx.checkpoint.safetensors_file import reading
from afm_mlx.config import KV_SCALES
from afm_mlx.errors import CheckpointError, named
from afm_mlx.threads import give_way, in_main_thread

LARGEST = float(np.sqrt(np.finfo(np.float32).max))  # just below 2^64

# The largest bit pattern of a usable number of a half type, without the sign.
_LARGEST_HALF = {mx.float16: 0x7BFF, mx.bfloat16: 0x5F7F}
_PORTION = 1 << 26  # bytes of tensors that are read before other work of the thread has its turn
_SMALL = 1 << 13  # a tensor with at most this many numbers is checked together with others
_IN_CACHE = 1 << 17
"""Numbers of a half type per pass: the second comparison finds them in the processor's cache."""


def read_parameters(model: nn.Module, source: str | Path) -> dict[str, mx.array]:
    """Read a model's lazy parameters and check their numbers; return them by name.

    Raises:
        CheckpointError: if a file can't be read; and for NaN, infinity, and scales of keys and values that are
            not above 0, with the name of the tensor.
    """
    parameters = dict(tree_flatten(model.parameters()))
    with reading(source):
        for part in _portions(parameters.values()):
            mx.eval(part)
            give_way()  # other models may be running in this thread
    check_finite(parameters, source)
    for name, array in parameters.items():
        if name.endswith(KV_SCALES) and not array.item() > 0:
            raise CheckpointError(
                f"{source}: {name} is {array.item():g}; a scale of int8 keys and values is above 0. Calibrate "
                "the model again, or copy it again."
            )
    return parameters


def _portions(arrays: Iterable[mx.array]) -> Iterator[list[mx.array]]:
    """Yield arrays in lists of about `_PORTION` bytes; all at once in the main thread."""
    part: list[mx.array] = []
    nbytes = 0
    for array in arrays:
        part.append(array)
        nbytes += array.nbytes
        if nbytes >= _PORTION and not in_main_thread():
            yield part
            part, nbytes = [], 0
    yield part


def check_finite(tensors: Mapping[str, mx.array], source: str | Path) -> None:
    """Raise `CheckpointError` for NaN, infinity and numbers over `LARGEST`, naming a tensor that has one."""
    with reading(source):
        bad = not_finite(tensors)
    if bad:
        more = f" and {len(bad) - 1} more tensors" if len(bad) > 1 else ""
        raise CheckpointError(
            f"{source}: {named(bad[0])}{more} holds NaN or infinity, or a number over {LARGEST:.3g}, whose "
            "square is infinite: the training diverged, the file is damaged, or the numbers are too large for "
            "their type."
        )


def not_finite(tensors: Mapping[str, mx.array]) -> list[str]:
    """Return the names of tensors that hold NaN, infinity or numbers over `LARGEST`; integers pass."""
    floats = {name: t for name, t in tensors.items() if mx.issubdtype(t.dtype, mx.floating)}
    small = {name: t for name, t in floats.items() if t.size <= _SMALL}
    large = {name: t for name, t in floats.items() if t.size > _SMALL}
    # Small tensors are many: norms, and scales of packed layers. One by one, they would take longer.
    bad = []
    if small:
        flat = mx.concatenate([t.reshape(-1).astype(mx.float32) for t in small.values()])
        if not _is_finite(flat):
            bad = [name for name, tensor in small.items() if not _are_usable(tensor)]
    return bad + [name for name, tensor in large.items() if not _is_finite(tensor)]


def _is_finite(tensor: mx.array) -> bool:
    if mx.default_device() != mx.Device(mx.cpu):
        # Two reads, and no array of bools. Comparisons may miss NaN; the sum does not.
        ends = mx.stack([mx.max(tensor), -mx.min(tensor)]).astype(mx.float32)
        if mx.isfinite(mx.sum(tensor)).item() and mx.all(ends <= LARGEST).item():
            return True
        return _are_usable(tensor)
    # By NumPy: on a CPU, MLX's sums take 3 to 30 times as long.
    if tensor.dtype not in _LARGEST_HALF:
        values = np.array(tensor.reshape(-1), copy=False)
        with np.errstate(all="ignore"):
            # BLAS reads at memory speed. The sum of squares may overflow even if no square does.
            return bool(np.isfinite(np.dot(values, values)) or (np.abs(values) <= LARGEST).all())
    largest = _LARGEST_HALF[tensor.dtype]
    bits = np.array(tensor.reshape(-1).view(mx.uint16), copy=False)
    for start in range(0, bits.size, _IN_CACHE):
        part = bits[start : start + _IN_CACHE]
        # Signed comparison finds large positive numbers, unsigned comparison large negative ones.
        if part.view(np.int16).max() > largest or part.max() > largest | 0x8000:
            return False
    return True


def _are_usable(tensor: mx.array) -> bool:
    # Not by the sum alone, which is one read: it may overflow even if all numbers are small.
    return bool(mx.all(mx.abs(tensor.astype(mx.float32)) <= LARGEST).item())
