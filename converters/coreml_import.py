"""Imports `afm_mlx.converters.coreml` where a Core ML program is written: it needs an extra, and seconds."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from afm_mlx.coreml.availability import REINSTALL, import_coremltools
from afm_mlx.errors import AFMError


def coreml_module(name: str) -> Any:
    """A module of `afm_mlx.converters.coreml`.

    Raises:
        AFMError: when coremltools can't be imported here, or is too old.
    """
    import_coremltools()
    try:
        return import_module(f"afm_mlx.converters.coreml.{name}")
    except ImportError as error:
        raise AFMError(
            f"coremltools lacks a part that writes Core ML programs ({error}). Install it again, for a Python "
            f"that it has a wheel for: {REINSTALL}"
        ) from error
