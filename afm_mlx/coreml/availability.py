"""Requirements of Core ML packages: coremltools, and to run them macOS."""

from __future__ import annotations

import importlib.util
import logging
import platform
import re
from importlib import import_module
from typing import Any

from afm_mlx.errors import AFMError
from afm_mlx.installation import install_command

MACOS = 15
"""The first macOS whose models have states."""
COREMLTOOLS = 9
REINSTALL = f"pip install --force-reinstall 'coremltools>={COREMLTOOLS}'"


def import_coremltools() -> Any:
    """Import coremltools, without its warnings about other packages; `AFMError` if it is missing or too old."""
    logger = logging.getLogger("coremltools")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        coremltools: Any = import_module("coremltools")
    except ImportError as error:
        if error.name == "coremltools":
            raise AFMError(
                "coremltools is not installed, which writes, reads and runs Core ML packages. Install it: "
                f"{install_command('coreml')}. It has no wheels for Linux on ARM, nor for Python 3.14."
            ) from None
        raise AFMError(
            f"coremltools can't be imported ({error}). Install it again: {REINSTALL}"
        ) from error
    finally:
        logger.setLevel(level)
    found = re.match(r"\d+", coremltools.__version__)
    if found is None or int(found[0]) < COREMLTOOLS:
        raise AFMError(
            f"coremltools is {coremltools.__version__}; {COREMLTOOLS}.0 or later is needed. "
            f"Install it: {REINSTALL}"
        )
    return coremltools


def obstacle() -> str | None:
    """Return why no Core ML package can run here, and what to do about it; None if one can."""
    if platform.system() != "Darwin":
        return f"Core ML needs macOS {MACOS} or later, and this is {platform.system()}: use a Mac"
    version = platform.mac_ver()[0]
    if int(version.partition(".")[0] or 0) < MACOS:
        return f"packages with states need macOS {MACOS} or later, and this is macOS {version}: update it"
    try:
        import_coremltools()
    except AFMError as error:
        return str(error)
    if importlib.util.find_spec("coremltools.libcoremlpython") is None:
        return (
            f"coremltools has no binary part for Python {platform.python_version()}, which runs packages. "
            "Take a Python that coremltools has a wheel for, such as 3.12"
        )
    return None
