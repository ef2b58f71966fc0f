"""Processors that this machine isn't: qemu's user-mode emulator."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys

import pytest


def emulator(machine: str) -> str:
    """Path of the emulator. Without one the test is skipped, or fails if AFM_MLX_REQUIRE_EMULATOR is 1."""
    names = (f"qemu-{machine}", f"qemu-{machine}-static")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        required = os.environ.get("AFM_MLX_REQUIRE_EMULATOR") == "1"
        (pytest.fail if required else pytest.skip)(f"needs {names[0]}: apt install qemu-user")
    return found


def python_on(cpu: str, *arguments: str, **options) -> subprocess.CompletedProcess[str]:
    """Run a Python on another x86 processor. Its child processes run on this machine's own."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip("emulates Linux on x86, and needs its libraries")
    # The emulator tells on stderr which of a processor's features it lacks.
    python = options.pop("python", sys.executable)
    command = [emulator("x86_64"), "-cpu", cpu, python, *arguments]
    kept = {k: v for k, v in os.environ.items() if k not in ("AFM_MLX_ISA", "OPENBLAS_CORETYPE")}
    return subprocess.run(command, capture_output=True, text=True, env=kept, check=False, **options)
