"""Models of other architectures, which mlx-lm converts.

`afm-mlx convert` takes the place of `mlx_lm.convert` for whoever types it, and mlx-lm is installed anyway.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from pathlib import Path

from afm_mlx.errors import AFMError


def write_zoo(source: Path, folder: Path, kind: str, dtype: str | None) -> None:
    """Let mlx-lm convert a model of architecture `kind` into an empty folder.

    Raises:
        AFMError: when mlx-lm can't.
    """
    from mlx_lm.convert import convert

    inner = folder / "converted"
    try:
        # mlx-lm reports on stdout, which belongs to the caller.
        with contextlib.redirect_stdout(sys.stderr):
            convert(str(source), str(inner), dtype=dtype)
    except (ValueError, KeyError, TypeError, ImportError, RuntimeError, FileNotFoundError) as error:
        raise AFMError(
            f"{source} is a model of the architecture {kind!r}, which mlx-lm can't convert: {error}"
        ) from None
    for path in list(inner.iterdir()):
        shutil.move(path, folder / path.name)
    inner.rmdir()
