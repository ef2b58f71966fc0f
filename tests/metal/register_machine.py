"""A Metal text as optimized code for a GPU's lane: LLVM IR in which nothing of the emulator is left.

clang's AMD target stands for Apple's, which is not to be had: a machine with 32-bit registers and 32 lanes,
whose optimizer unrolls and keeps arrays in registers as a GPU's does. What lanes do together is an opaque
call that is known by its name.
"""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

from . import toolchain
from .toolchain import CompileError

TARGET = ("-triple", "amdgcn-amd-amdhsa", "-target-cpu", "gfx1100")
# All of a kernel in one function; arrays that the optimizer leaves in memory stay visible as such.
_PASSES = ("-inline-threshold=1000000", "-disable-promote-alloca-to-vector")


class CostError(RuntimeError):
    """What would make a kernel slow on every GPU, such as an array in memory."""


@functools.lru_cache(64)
def optimized(unit: str, include: tuple[Path, ...] = ()) -> str:
    """LLVM IR of a translation unit with an `emulator_entry`, at -O2.

    Raises:
        CompileError: with clang's messages.
        CostError: for a loop that the text asks to unroll, and that clang could not.
    """
    name = hashlib.sha256(f"{toolchain._salt()}{include}{unit}".encode()).hexdigest()[:32]
    with toolchain._cached(f"{name}.ll") as (file, out):
        if out is not None:
            source = out.with_name("kernel.cpp")
            source.write_text(unit, encoding="utf-8")
            _compile(source, out, include)
    return file.read_text(encoding="utf-8")


def _compile(source: Path, out: Path, include: tuple[Path, ...]) -> None:
    # Variables that the emulator fills with a pattern are left alone here.
    language = (flag for flag in toolchain.LANGUAGE if "auto-var-init" not in flag)
    flags = ("-O2", "-std=c++17", "-x", "c++", "-DMSL_OPAQUE", "-fgnuc-version=4.2.1")
    options = (
        "-ffp-contract=on",
        "-Werror=pass-failed",
        *(f for p in _PASSES for f in ("-mllvm", p)),
    )
    try:
        toolchain._run(
            *(toolchain.zig(), "clang", "-cc1", *TARGET, *flags, *options, *language),
            *(*toolchain.WARNINGS, *toolchain._search(include)),
            *("-emit-llvm", "-o", str(out), str(source)),
        )
    except CompileError as error:
        if "-Werror,-Wpass-failed" in str(error):
            raise CostError(
                f"a loop can't be unrolled:\n{_lines(str(error), 'pass-failed')}"
            ) from None
        raise


def _lines(messages: str, word: str) -> str:
    return "\n".join(re.findall(rf"^.*{word}.*$", messages, re.MULTILINE))
