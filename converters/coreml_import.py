"""Imports `afm_mlx.converters.coreml` where a Core ML program is written: it needs an extra, and seconds."""

from __future__ import annotations

import importlib
import logging
from typing import Any

from afm_mlx.errors import AFMError


def coreml_module(name: str) -> Any:
    """A module of `afm_mlx.converters.coreml`.

    Raises:
        AFMError: when coremltools can't be imported here.
    """
    # It warns of libraries that only its conversions from PyTorch need, and of what only a Mac has.
    logging.getLogger("coremltools").setLevel(logging.ERROR)
    try:
        return importlib.import_module(f"afm_mlx.converters.coreml.{name}")
    except ImportError as error:
        raise AFMError(
            f"Core ML programs are written by coremltools, which can't be imported here ({error}). Install it: "
            "pip install 'afm-mlx[coreml]'. It has no library for Linux on ARM, nor for Python 3.14."
        ) from None
