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
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from . import toolchain, translation
from .machine import Program
from .translation import translate

KERNELS = "mlx/backend/metal/kernels"
# Headers that the shim has its own version of; see their comments.
REPLACED = ("complex.h", "bf16_math.h", "logging.h")
MAX_FUNCTION_CONSTANTS = 512

_FUNCTION_CONSTANT = re.compile(r"constant\s+(\w+)\s+(\w+)\s*\[\[function_constant\((\d+)\)\]\];")


class Unavailable(RuntimeError):
    """Why the wheel can't be had here."""


@functools.cache
def headers(version: str = mx.__version__) -> Path:
    """Folder with MLX's kernel headers, translated for clang; downloaded once.

    Raises:
        Unavailable: when the wheel can't be downloaded.
    """
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
            target = include / KERNELS / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(_translate(archive.read(name).decode()), encoding="utf-8")


def _translate(text: str) -> str:
    """As every text of the emulator, and what only MLX has.

    Function constants, set when a pipeline is made, become macros. Loggers have no address space, since C++
    has constructors for none.
    """
    text = text.replace("constant mlx::os_log", "static const mlx::os_log")
    return translate(_FUNCTION_CONSTANT.sub(r"constant \1 \2 = \1(FUNCTION_CONSTANT_\3);", text))


class Source(NamedTuple):
    """A kernel of MLX as a translation unit for clang.

    Args:
        text: the unit.
        instance: the kernel in it, with its template arguments.
        parameters: the text between the parentheses of its declaration.
        include: folders of the headers that it includes.
    """

    text: str
    instance: str
    parameters: str
    include: tuple[Path, ...]


def program(header: str, function: str, template: str, **options) -> Program:
    """A kernel of MLX, instantiated and compiled; see `source`."""
    found = source(header, function, template, **options)
    return Program(function, *found[:3], include=found.include, strict=False)


def source(
    header: str,
    function: str,
    template: str,
    *,
    constants: Mapping[int, str] | None = None,
    before: tuple[str, ...] = ("utils.h",),
    without_barriers: bool = False,
) -> Source:
    """A kernel of MLX, instantiated.

    Args:
        header: its file, below MLX's folder of kernels.
        function: its name.
        template: its template arguments, as text.
        constants: values of its function constants by index; 0 for others.
        before: headers that MLX puts in front of it.
        without_barriers: break it, to see that this is noticed.
    """
    include = headers()
    values = {**dict.fromkeys(range(MAX_FUNCTION_CONSTANTS), "0"), **(constants or {})}
    text = "".join(f"#define FUNCTION_CONSTANT_{i} {v}\n" for i, v in values.items())
    if without_barriers:
        text += "#include <metal_stdlib>\n#define threadgroup_barrier(flags)\n"
    text += "".join(f'#include "{KERNELS}/{name}"\n' for name in (*before, header))
    kernels = (include / KERNELS / header).read_text(encoding="utf-8")
    found = re.search(rf"\[\[kernel[^\]]*\]\]\s*void\s+{function}\s*\(", kernels)
    if found is None:
        raise ValueError(f"no kernel `{function}` in {header}")
    depth, end = 1, found.end()
    while depth:
        depth += {"(": 1, ")": -1}.get(kernels[end], 0)
        end += 1
    return Source(text, f"{function}<{template}>", kernels[found.end() : end - 1], (include,))
