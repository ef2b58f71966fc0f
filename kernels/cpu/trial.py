"""Try the extension in a child process, so that a crash is reported and ends no other process.

    python trial.py LIBRARY

prints nothing and exits with 0, or prints in one line why the library can't be used. The build tries the
library that it has compiled (`extension.cmake`), and `extension.py` a library that is new on a machine. This
file imports nothing of ours.

A module shares MLX's types only if its nanobind has the same internal version as MLX's: with another version
it builds, imports, and then refuses every array.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import resource
import signal
import subprocess
import sys
from typing import Any

SECONDS = 60
"""Limit of a trial, which takes a fraction of a second on an idle machine."""

FAULTS = ("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP")
"""Signals that a defect raises, every time; others come from outside, once."""


def tried(library: str) -> tuple[str, str]:
    """Try a library in a child process; return what killed it ("killed by SIGILL"), and the problem that it
    found.

    Each is empty if there was none.

    Raises:
        OSError: no child process can be started.
    """
    # The child finds MLX where this process does.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        child = subprocess.run(
            [sys.executable, "-P", __file__, "--here", library],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"stopped after {SECONDS} s", ""
    if child.returncode < 0:
        return f"killed by {_signal_name(-child.returncode)}", ""
    said = child.stdout if child.returncode == 1 and child.stdout else child.stderr
    return "", " ".join(said.split()) if child.returncode else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def problem(library: str) -> str | None:
    """Return why this process can't use the extension in the file `library`, or None if it can."""
    import mlx.core as mx

    wanted = set(_nanobind_internals())
    spec = importlib.util.spec_from_file_location("_afm_cpu", library)
    assert spec is not None
    assert spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        works = module.probe(mx.zeros(3)) == 3
    except ImportError as error:
        return f"it was built, but can't be loaded: {error}"
    except TypeError:
        works = False
    if works:
        _exercise(module)
        return None
    found = ", ".join(sorted(set(_nanobind_internals()) - wanted)) or "no types of MLX"
    return (
        f"nanobind {module.nanobind_version} has other internals ({found}) than the one that MLX "
        f"{mx.__version__} was built with ({', '.join(sorted(wanted)) or 'unknown'}); build with the "
        "nanobind that afm-mlx's pyproject.toml names under [build-system]"
    )


def _exercise(module: Any) -> None:
    """Run kernels of every instruction set that the extension finds on this machine."""
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    plain = (None, 0.0, None, (), 16)  # ProductOptions
    queries, lengths, scale = mx.ones((1, 4, 1, 64)), mx.array([40]), mx.array(0.1)
    codes, floats = mx.ones((1, 4, 64, 64), mx.int8), mx.ones((1, 4, 64, 64))
    for name in module.instruction_sets():
        module.use_instruction_set(name)
        for bits in (2, 4, 8):
            words = mx.full((32, 512 * bits // 32), 0x1B1B1B1B, mx.uint32)
            table = mx.ones((1, 2**bits))
            weights = [
                (words, bits, "balanced", mx.ones(32), None, None),
                (words, bits, "affine", mx.ones((32, 8)), mx.ones((32, 8)), None),
                (words, bits, "palette", None, None, table),
            ]
            for weight in weights:
                for vectors in (1, 5):
                    mx.eval(module.packed_matmul(mx.ones((vectors, 512)), weight, plain))
        mx.eval(module.decode_attention(queries, codes, scale, scale, lengths))
        mx.eval(module.decode_attention(queries, floats, None, None, lengths))


def _nanobind_internals() -> list[str]:
    """Return the versions of nanobind's internals that this process's modules registered for MLX's types."""
    api = ctypes.pythonapi
    api.PyInterpreterState_Get.restype = ctypes.c_void_p
    api.PyInterpreterState_GetDict.argtypes = [ctypes.c_void_p]
    api.PyInterpreterState_GetDict.restype = ctypes.c_void_p
    # A borrowed reference; `py_object` as the result's type would release it.
    address = ctypes.c_void_p(api.PyInterpreterState_GetDict(api.PyInterpreterState_Get()))
    keys = ctypes.cast(address, ctypes.py_object).value
    return [k for k in map(str, keys) if k.startswith("__nb_internals_") and k.endswith("mlx__")]


def main() -> int:
    found: str | None
    if sys.argv[1] == "--here":
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a death here leaves no file
        found = problem(sys.argv[2])
    else:
        try:
            died, found = tried(sys.argv[1])
        except OSError:  # Python in an emulator, whose children would run on the host's processor
            died, found = "", problem(sys.argv[1])
        found = f"{died} while it was tried" if died else found
    if found:
        print(found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
