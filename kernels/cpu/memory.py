"""Huge pages under weights, which a decoded token reads from end to end.

Measured on a virtual machine with two cores: single products with 2-bit matrices gain 6 to 16 %, decoding the
3B 1 to 15 %, with noise of that size.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

import mlx.core as mx

from afm_mlx.kernels.cpu import extension

SWITCH = "AFM_MLX_HUGE_PAGES"
WORTH_IT = 64 << 20  # bytes; what is less lies in caches, or is read fast enough


def prefer_huge_pages(arrays: Iterable[mx.array]) -> threading.Thread | None:
    """Move evaluated arrays into huge pages, in the background: some 2 seconds for a gigabyte.

    The system moves the pages, and nobody who reads them notices. `AFM_MLX_HUGE_PAGES=0` leaves it out.

    Returns:
        The thread that does it; None when there is nothing to gain: on a GPU, for small models, and where
        the C++ extension isn't there.
    """
    arrays = list(arrays)
    native = extension.module()
    on_gpu = mx.default_device() != mx.Device(mx.cpu)
    small = sum(array.nbytes for array in arrays) < WORTH_IT
    if native is None or on_gpu or small or os.environ.get(SWITCH) == "0":
        return None
    thread = threading.Thread(target=native.use_huge_pages, args=(arrays,), daemon=True)
    thread.start()
    return thread
