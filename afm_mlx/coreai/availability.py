"""The requirement of Core AI bundles: coreai-core, Apple's package that writes and runs them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from afm_mlx.errors import AFMError
from afm_mlx.installation import install_command


def import_coreai(name: str) -> Any:
    """Import a module of coreai-core; `AFMError` if it is missing or can't be loaded here."""
    try:
        return import_module(name)
    except ImportError as error:
        if error.name == "coreai":
            raise AFMError(
                "coreai-core is not installed, which writes and runs Core AI bundles. Install it: "
                f"{install_command('coreai')}. It has wheels for macOS 26 on Apple silicon and for Linux on "
                "x86-64 with glibc 2.34, or later."
            ) from None
        raise AFMError(
            f"coreai-core can't be imported ({error}). Install it again: pip install --force-reinstall "
            "coreai-core==1.0.0b3"
        ) from error


def obstacle() -> str | None:
    """Return why no Core AI bundle can run here, and what to do about it; None if one can."""
    try:
        import_coreai("coreai.runtime")
    except AFMError as error:
        return str(error)
    return None
