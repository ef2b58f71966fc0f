"""Small files with facts about this machine, in the user's cache folder or in `AFM_MLX_CACHE`."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

from afm_mlx.kernels import settings

FOLDER = settings.CACHE
TEMPORARY = ".tmp"
"""End of the names of files that are being written."""


def path() -> Path:
    """Where the system keeps what can be made again."""
    if given := os.environ.get(FOLDER):
        return Path(given)
    # A user without a home has no such folder, and nothing can be written there.
    home = Path(os.devnull if (known := os.path.expanduser("~")) == "~" else known)
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "afm-mlx"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "afm-mlx"


def write(file: Path, values: dict[str, object]) -> None:
    """Write JSON, whole or not at all: in a folder that can't be written, nothing is kept."""
    written = file.with_name(f"{file.stem}-{os.getpid()}{TEMPORARY}")
    with contextlib.suppress(OSError):
        written.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(json.dumps(values, indent=1), encoding="utf-8")
        os.replace(written, file)
