"""The C++ extension `_afm_cpu`: its file, why it can't be used, and its settings.

It is built when afm-mlx is installed, against the installed MLX. Without it, everything runs on plain MLX, and
`status` says why. Variables of the environment, read when the extension is first used:

- `AFM_MLX_NATIVE=0` disables it,
- `AFM_MLX_THREADS` is the number of its threads, by default one per core that the process may run on; dense
  products, whose BLAS is `afm_mlx.blas`, run on the same threads,
- `AFM_MLX_ISA` is the instruction set, by default the best of the processor.

A library that is new on this machine is first tried in a child process (`trial.py`), which takes a fraction of
a second. The result is kept in the user's cache folder, so later starts cost nothing.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import platform
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import mlx.core as mx

from afm_mlx.installation import install_command
from afm_mlx.kernels import settings
from afm_mlx.kernels.cpu import trial
from afm_mlx.kernels.settings import SettingError

SWITCH, THREADS, ISA = settings.NATIVE, settings.THREADS, settings.ISA

_NAME = "_afm_cpu"


class Status(NamedTuple):
    """State of the extension in this process.

    Args:
        reason: why it isn't used, as a clause; empty if it is used.
        path: path of the library, used or not; None if there is none.
        mlx, nanobind, compiler: versions that it was built with.
        instruction_set: the one in use, of `instruction_sets`, which this processor runs, best first.
        threads: number of threads that share an operation.
    """

    reason: str = ""
    path: Path | None = None
    mlx: str = ""
    nanobind: str = ""
    compiler: str = ""
    instruction_set: str = ""
    instruction_sets: tuple[str, ...] = ()
    threads: int = 0

    @property
    def available(self) -> bool:
        return not self.reason


def module() -> ModuleType | None:
    """Return the extension, or None where it can't be used.

    Raises:
        SettingError: for a setting in the environment that the extension can't follow.
    """
    return _loaded()[0]


def unavailable() -> str:
    """Return why `module()` is None, as a clause; empty if it isn't None."""
    return _loaded()[1]


def status() -> Status:
    native, reason = _loaded()
    if native is None:
        return Status(reason, _find(_file_name()))
    return Status(
        "",
        Path(native.__file__ or ""),
        native.mlx_version,
        native.nanobind_version,
        native.compiler,
        native.instruction_set(),
        tuple(native.instruction_sets()),
        native.threads(),
    )


@functools.cache
def _loaded() -> tuple[ModuleType | None, str]:
    settings.check()
    if not settings.is_on(SWITCH):
        return None, f"switched off by {SWITCH}=0; unset it to use the extension"
    path = _find(_file_name())
    if path is None:
        note = _find("native_reason.txt")
        if reason := note.read_text(encoding="utf-8").strip() if note is not None else "":
            return None, f"{reason}; {_rebuild()} once that is fixed"
        return None, f"{_file_name()} is missing; {_rebuild()}"
    if died := _death_in_trial(path):
        return None, f"{path.name} was {died} while it was tried on this machine; {_rebuild()}"
    spec = importlib.util.spec_from_file_location(f"{__package__}.{_NAME}", path)
    assert spec is not None
    assert spec.loader is not None
    try:
        native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native)
    except ImportError as error:
        return None, f"{path.name} can't be loaded ({error}); {_rebuild()}"
    if native.mlx_version != mx.__version__.split(".dev")[0].split("+")[0]:
        built = f"built against MLX {native.mlx_version}, and this is MLX {mx.__version__}"
        install = f"install that version (`pip install mlx=={native.mlx_version}`)"
        return None, f"{built}; {install}, or {_rebuild()}"
    try:
        native.probe(mx.array(0.0))
    except TypeError:
        other = f"nanobind {native.nanobind_version}, which MLX {mx.__version__} does not share types with"
        return None, f"built with {other}; {_rebuild()}"
    _configure(native)
    sys.modules[spec.name] = native
    return native, ""


def _rebuild() -> str:
    return f"reinstall afm-mlx (`{install_command(rebuild=True)}`) to build it again"


def _death_in_trial(path: Path) -> str:
    """Return what killed the process that tried this library on this machine, now or before; empty if none."""
    key = _trial_key(path)
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    file = settings.cache_folder() / f"extension-{digest}.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        if values["key"] == key:
            return str(values["died"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass  # not tried yet, or a damaged file
    # In a program that embeds Python, `sys.executable` is that program.
    if not Path(sys.executable or "").name.lower().startswith("python"):
        return ""
    try:
        died, _ = trial.tried(str(path))
    except OSError:
        return ""
    # Other deaths have other causes: the machine was busy, or short of memory.
    if not died or died.endswith(trial.FAULTS):
        settings.write_json(file, {"key": key, "died": died})
    return died


def _trial_key(path: Path) -> dict[str, str]:
    """Return the properties on which a trial's result depends; several machines can share a home folder."""
    file = path.stat()
    processor = platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as info:
            first = info.read(16384).partition("\n\n")[0].splitlines()
        processor += "".join(
            x for x in first if x.startswith(("model name", "flags", "Features", "CPU "))
        )
    except OSError:
        processor += platform.release()
    return {
        "library": f"{path} {file.st_size} {file.st_mtime_ns}",
        "mlx": mx.__version__,
        "processor": hashlib.sha256(processor.encode()).hexdigest(),
    }


def _file_name() -> str:
    return f"{_NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"


def _find(name: str) -> Path | None:
    """Find a built file in this folder, or, from a source checkout, in the installed package."""
    installed = Path(sysconfig.get_path("platlib")) / "afm_mlx" / "kernels" / "cpu"
    for folder in (Path(__file__).parent, installed):
        if (path := folder / name).is_file():
            return path
    return None


def _configure(native: ModuleType) -> None:
    if (threads := settings.threads()) is not None:
        native.set_threads(threads)
    isa = os.environ.get(ISA, "")
    if isa and not native.use_instruction_set(isa):
        known = ", ".join(native.instruction_sets())
        raise SettingError(
            f"{ISA} is {isa!r}: this processor runs {known}; unset it for the first of these"
        )
