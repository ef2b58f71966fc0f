"""Check that the processor has the instructions that NumPy needs, before its import ends the process.

NumPy's wheels for x86 are compiled for x86-64-v2 from 2.4 on: all processors since 2009, but not what virtual
machines show by default in places (`kvm64`, `qemu64`). There its import ends the process by SIGILL.
"""

from __future__ import annotations

import ctypes
import platform
import sys

from afm_mlx.errors import AFMError

# Bits of ecx in cpuid leaf 1.
_NEEDED = {"SSE3": 0, "SSSE3": 9, "SSE4.1": 19, "SSE4.2": 20, "POPCNT": 23}


class ProcessorError(AFMError):
    """The processor lacks instructions that a library is compiled for."""


def check() -> None:
    """Raise `ProcessorError` if the processor lacks instructions that the installed NumPy needs."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return
    missing = _missing()
    if not missing:
        return
    from importlib import metadata  # fifty modules, which other processors need not import

    version = metadata.version("numpy")
    if tuple(map(int, version.split(".")[:2])) >= (2, 4):
        raise ProcessorError(
            f"NumPy {version} would end this process: this processor lacks {', '.join(missing)}. "
            "In a virtual machine, give it the host's processor model (x86-64-v2 or better); elsewhere, "
            f"install an older NumPy: {sys.executable} -m pip install 'numpy<2.4'"
        )


def _missing() -> list[str]:
    """List the missing instructions of x86-64-v2; empty if the C library can't tell."""
    try:
        leaf = ctypes.CDLL(None)["__x86_get_cpuid_feature_leaf"]  # of glibc 2.33 and later
    except (OSError, AttributeError):
        return []
    leaf.argtypes, leaf.restype = [ctypes.c_uint], ctypes.POINTER(ctypes.c_uint32 * 8)
    ecx = leaf(0).contents[6]  # of the active registers: instructions that the system supports, too
    return [name for name, bit in _NEEDED.items() if not ecx >> bit & 1]
