"""MLX's own Metal sources, from its macOS wheel on PyPI: kernels that this project didn't write."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import mlx.core as mx

from . import toolchain, translation
from .machine import Program, Unit
from .translation import closing, translate

KERNELS = "mlx/backend/metal/kernels"
# Headers that the shim has its own version of; see their comments.
REPLACED = ("complex.h", "bf16_math.h", "logging.h")
MAX_FUNCTION_CONSTANTS = 512

_FUNCTION_CONSTANT = re.compile(r"constant\s+(\w+)\s+(\w+)\s*\[\[function_constant\((\d+)\)\]\];")


class Unavailable(RuntimeError):
    """Why the wheel can't be had here."""


@functools.cache
def headers(version: str = mx.__version__) -> Path:
    """Folder with MLX's kernel headers, translated for clang; downloaded once, or raises `Unavailable`."""
    wheel = _wheel(version)
    digest = hashlib.sha256(Path(translation.__file__).read_bytes() + Path(__file__).read_bytes())
    include = wheel.parent / f"include-{digest.hexdigest()[:16]}"
    if not include.exists():
        with tempfile.TemporaryDirectory(dir=wheel.parent) as name:
            _unpack(wheel, Path(name) / "include")
            # Another process may have been faster, with the same files.
            with contextlib.suppress(OSError):
                os.rename(Path(name) / "include", include)
    return include


def _wheel(version: str) -> Path:
    folder = toolchain.cache_folder() / f"mlx-metal-{version}"
    folder.mkdir(parents=True, exist_ok=True)
    present = list(folder.glob("*.whl"))
    if present:
        return present[0]
    with tempfile.TemporaryDirectory(dir=folder) as name:
        download = ("download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", name)
        wanted = ("--platform", "macosx_15_0_arm64", f"mlx-metal=={version}")
        command = [sys.executable, "-m", "pip", *download, *wanted]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        wheels = list(Path(name).glob("*.whl"))
        if not wheels:
            raise Unavailable(
                f"mlx-metal {version} can't be downloaded: {done.stderr.strip()[-300:]}"
            )
        target = folder / wheels[0].name
        os.replace(wheels[0], target)
    return target


def _unpack(wheel: Path, include: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            _, found, path = name.partition(f"mlx/include/{KERNELS}/")
            if not found or not path.endswith(".h") or path in REPLACED:
                continue
            # Loggers have no address space, since C++ has constructors for none.
            text = archive.read(name).decode()
            text = text.replace("constant mlx::os_log", "static const mlx::os_log")
            # Function constants, set when a pipeline is made, become macros.
            text = _FUNCTION_CONSTANT.sub(r"constant \1 \2 = \1(FUNCTION_CONSTANT_\3);", text)
            target = include / KERNELS / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(translate(text), encoding="utf-8")


def program(header: str, function: str, template: str, **options) -> Program:
    """A kernel of MLX, instantiated and compiled; see `source`."""
    return Program(function, source(header, function, template, **options), strict=False)


def source(
    header: str,
    function: str,
    template: str,
    *,
    before: tuple[str, ...] = ("utils.h",),
    without_barriers: bool = False,
) -> Unit:
    """A kernel of MLX, instantiated; all its function constants are 0.

    Args:
        header: its file, below MLX's folder of kernels.
        function: its name.
        template: its template arguments, as text.
        before: headers that MLX puts in front of it.
        without_barriers: break it, to see that this is noticed.
    """
    include = headers()
    text = "".join(f"#define FUNCTION_CONSTANT_{i} 0\n" for i in range(MAX_FUNCTION_CONSTANTS))
    if without_barriers:
        text += "#include <metal_stdlib>\n#define threadgroup_barrier(flags)\n"
    text += "".join(f'#include "{KERNELS}/{name}"\n' for name in (*before, header))
    kernels = (include / KERNELS / header).read_text(encoding="utf-8")
    found = re.search(rf"\[\[kernel[^\]]*\]\]\s*void\s+{function}\s*\(", kernels)
    if found is None:
        raise ValueError(f"no kernel `{function}` in {header}")
    parameters = kernels[found.end() : closing(kernels, found.end() - 1)]
    return Unit(text, f"{function}<{template}>", parameters, include=(include,))
