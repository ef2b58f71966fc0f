"""What the self-test found on this machine, in a file, so that it runs once and not at every start.

There is one file per combination of package version, MLX version, device, operating system and text of the
kernels, in the user's cache folder (`AFM_MLX_CACHE` names another). It also says which variant is being
tested, so that one that ends the process is known, and left alone, the next time.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import mlx.core as mx

from afm_mlx.kernels import cache_folder, dispatch
from afm_mlx.kernels.cpu import extension

ENDED = "ended the process in the self-test"
TESTING_SECONDS = 600
"""More than the test of a variant takes, or the writing of a verdict."""

_SOURCES = (".py", ".metal", ".h", ".cpp")


class Verdict:
    """The failures known on this machine, by variant.

    Attributes:
        done: whether a self-test ended.
        failures: reason by name of the variant.
    """

    def __init__(self) -> None:
        self.done = False
        self.failures: dict[str, str] = {}
        self._key = machine_key()
        digest = hashlib.sha256(json.dumps(self._key).encode()).hexdigest()[:16]
        self._path = cache_folder.path() / f"selftest-{digest}.json"
        self._read()

    def _read(self) -> None:
        try:
            values = json.loads(self._path.read_text(encoding="utf-8"))
            failures, running, pid = values["failures"], values["running"], int(values["pid"])
            if values["key"] != self._key:
                return
            self.failures = {str(name): str(reason) for name, reason in failures.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return  # none yet, or a damaged one: the test runs again
        self.done = running is None
        # Another process may be testing at this moment; but after a restart its number may be anyone's.
        if running is not None and (_age(self._path) > TESTING_SECONDS or not _is_alive(pid)):
            self.failures[running] = ENDED

    def begin(self, variant: str) -> None:
        """Note that a variant is about to be tested."""
        self._write(variant)

    def end(self, failures: dict[str, str]) -> None:
        """Note that the test is over."""
        self.failures, self.done = dict(failures), True
        self._write(None)
        self._remove_leftovers()

    def forget(self, *, keep_ended: bool = False) -> None:
        """Start from nothing, or from the variants alone that ended a process."""
        kept = self.failures.items() if keep_ended else ()
        self.failures = {name: reason for name, reason in kept if reason == ENDED}
        self.done = False
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _write(self, running: str | None) -> None:
        values: dict[str, object] = {"key": self._key, "failures": self.failures}
        values |= {"running": running, "pid": os.getpid()}
        cache_folder.write(self._path, values)

    def _remove_leftovers(self) -> None:
        """Remove files of processes that were killed while they wrote, which takes a moment."""
        for path in self._path.parent.glob(f"selftest-*{cache_folder.TEMPORARY}"):
            if _age(path) > TESTING_SECONDS:
                with contextlib.suppress(OSError):
                    path.unlink()


def machine_key() -> dict[str, str]:
    """What a verdict depends on."""
    return {
        "afm-mlx": _version("afm-mlx"),
        "mlx": _version("mlx"),
        "device": str(mx.default_device()),
        "name": str(mx.device_info().get("device_name", "")),
        "system": f"{platform.system()} {platform.mac_ver()[0] or platform.release()}",
        "kernels": _sources_digest(),
        "extension": _extension(),
        "variants": " ".join(v.name for op in dispatch.OPS for v in dispatch.variants(op)),
    }


def _extension() -> str:
    status = extension.status()
    if status.path is None or not status.available:
        return "none"
    file = status.path.stat()
    return f"{file.st_size} {file.st_mtime_ns} {status.instruction_set}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


@functools.cache
def _sources_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.parent.rglob("*")):
        if path.suffix in _SOURCES:
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _age(path: Path) -> float:
    """Seconds since a file was written; 0 for one that is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass  # somebody else's, or a number that no process has here
    return True
