"""All variables of the environment that afm-mlx reads, and its folder of facts about this machine.

`check` runs before a model or a kernel is loaded, so that a misspelt name or value is an error. An empty
variable counts as unset.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import sys
from pathlib import Path

NATIVE, THREADS, ISA = "AFM_MLX_NATIVE", "AFM_MLX_THREADS", "AFM_MLX_ISA"
KERNELS, SELFTEST, HUGE_PAGES = "AFM_MLX_KERNELS", "AFM_MLX_SELFTEST", "AFM_MLX_HUGE_PAGES"
CACHE, BLAS, HISTORY = "AFM_MLX_CACHE", "AFM_MLX_BLAS", "AFM_MLX_HISTORY"
MAX_THREADS = 1024
INSTRUCTION_SETS = ("avx512", "avx2", "neon", "portable")

_PREFIX = "AFM_MLX_"
# 0 is off, 1 is the default. The last three are for builds and tests.
_SWITCHES = (
    NATIVE,
    SELFTEST,
    HUGE_PAGES,
    BLAS,
    HISTORY,
    "AFM_MLX_REQUIRE_NATIVE",
    "AFM_MLX_REQUIRE_BROWSER",
    "AFM_MLX_REQUIRE_EMULATOR",
)
_TEXTS = (KERNELS, "AFM_MLX_MODEL", "AFM_MLX_API_KEY", "AFM_MLX_ADMIN_KEY")
# The system's variables for the folder of temporary files, in the C++ library's order.
_TEMPORARY = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")
VARIABLES = (*_SWITCHES, *_TEXTS, THREADS, ISA, CACHE)

TEMPORARY = ".tmp"
"""Suffix of files that are being written."""


class SettingError(ValueError):
    """A variable of the environment has a value that can't be used."""


def is_on(switch: str) -> bool:
    """True unless the variable `switch` is 0.

    Raises:
        SettingError: if it is set to neither 0 nor 1.
    """
    value = os.environ.get(switch, "")
    if value not in ("", "0", "1"):
        raise SettingError(f"{switch} is {value!r}; allowed are 0 and 1, or no variable for 1.")
    return value != "0"


def threads() -> int | None:
    """Return the number that `AFM_MLX_THREADS` sets; None without it.

    Raises:
        SettingError: if it is no number from 1 to `MAX_THREADS`.
    """
    value = os.environ.get(THREADS, "")
    if not value:
        return None
    if not (value.isascii() and value.isdecimal() and 1 <= int(value[:9]) <= MAX_THREADS):
        raise SettingError(
            f"{THREADS} is {value!r}: it must be a whole number from 1 to {MAX_THREADS}, or unset for one "
            "per core that this process may run on."
        )
    return int(value)


def check() -> None:
    """Check every variable except `AFM_MLX_KERNELS`, which `dispatch.forced` checks, and the temporary folder.

    Raises:
        SettingError: for an unknown name or a value that can't be used; says what is allowed.
    """
    for name in os.environ:
        if name.startswith(_PREFIX) and name not in VARIABLES:
            close = difflib.get_close_matches(name, VARIABLES, n=1)
            meant = f" (did you mean {close[0]}?)" if close else ""
            raise SettingError(
                f"{name} is no variable of afm-mlx{meant}; known are {', '.join(VARIABLES)}. Unset it."
            )
    for switch in _SWITCHES:
        is_on(switch)
    threads()
    if (isa := os.environ.get(ISA, "")) not in ("", *INSTRUCTION_SETS):
        raise SettingError(
            f"{ISA} is {isa!r}; allowed are {', '.join(INSTRUCTION_SETS)}, as far as the processor runs them; "
            "this processor runs those that `afm-mlx info` shows, down to portable."
        )
    for name in _TEMPORARY:
        if (value := os.environ.get(name)) is not None:
            if not Path(value or "/dev/null").is_dir():
                raise SettingError(
                    f"{name} is {value!r}, which is no folder, and MLX needs it; make it, or unset {name}."
                )
            break
    folder = os.environ.get(CACHE, "")
    if folder and os.path.lexists(folder) and not Path(folder).is_dir():
        raise SettingError(f"{CACHE} is {folder!r}, which is no folder; name one, or unset it.")


# -- small files with facts about this machine


def cache_folder() -> Path:
    """Return the folder for files that can be made again: `AFM_MLX_CACHE`, or one in the user's caches."""
    if given := os.environ.get(CACHE):
        return Path(given)
    # Without a home there is no such folder, and writing below this path fails.
    home = Path(os.devnull if (known := os.path.expanduser("~")) == "~" else known)
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "afm-mlx"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "afm-mlx"


def write_json(file: Path, values: dict[str, object]) -> None:
    """Write JSON atomically; do nothing if the folder can't be written."""
    written = file.with_name(f"{file.stem}-{os.getpid()}{TEMPORARY}")
    with contextlib.suppress(OSError):
        written.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(json.dumps(values, indent=1), encoding="utf-8")
        os.replace(written, file)
