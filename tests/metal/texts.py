"""The Metal kernels' texts as MLX compiles them, in files, and Apple's compiler run over them.

    python -m tests.metal.texts FOLDER              writes them: on any system
    python -m tests.metal.texts FOLDER --compile    and compiles each with `xcrun metal`: on a Mac

Each is compiled for every version of Metal's language that MLX takes and the compiler knows.

A kernel's text depends on its template arguments, on the types and sizes of a call's inputs, and on macros. So
the calls are recorded that the self-test's problems and a decode step of each preset make.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np

from afm_mlx.config import PRESETS
from afm_mlx.kernels import dispatch
from afm_mlx.kernels.ops import case_of
from afm_mlx.kernels.selftest import problems, specs
from afm_mlx.quantization.rule import AFM_EMBEDDING_RULE, AFM_RULE, PRESET_RULES

from .emulator import project_kernel
from .launches import Recorded, cache_of, record, shapes_only

# Part of every text that MLX compiles; it is in MLX's wheel for macOS.
PRELUDE = '#include "mlx/backend/metal/kernels/utils.h"\n'
# MLX switches fast math off.
COMPILER = "xcrun -sdk macosx metal -fno-fast-math -Wall -Werror=return-type"
# What MLX compiles for on macOS 14, 15, 26, and 27: `get_metal_version` in its backend/metal/device.cpp.
VERSIONS = ("3.1", "3.2", "4.0", "4.1")


def calls() -> Iterator[Recorded]:
    """The launches of every variant on every problem of the self-test, and of a token of each preset."""
    rng = np.random.default_rng(0)
    for spec in (*specs.full_specs(), *specs.model_specs(mx.bfloat16)):
        args = problems._DRAWS[spec.op](spec, rng)
        with dispatch.force("metal"):
            explained = dispatch.explain(spec.op, case_of(spec.op, *args))
        for variant, obstacle in explained:
            if obstacle is None and variant.backend == "metal":
                yield from record(partial(variant.run, *args))
    for name, config in PRESETS.items():
        rules = PRESET_RULES.get(name, (AFM_RULE, AFM_EMBEDDING_RULE))
        model, token = shapes_only(config, *rules), mx.zeros((1, 1), mx.int32)
        for length in (100, 4000):
            yield from record(partial(model.greedy, token, cache_of(model, length, 4096)))


def texts(recorded: Iterable[Recorded]) -> dict[str, str]:
    """What MLX compiles for launches, each text once, by a name that begins with the kernel's."""
    found, seen = {}, set()
    for kernel, inputs, options in recorded:
        dtypes, template = options["output_dtypes"], options["template"]
        kinds = tuple((x.dtype, x.ndim > 0, x.size < 8) for x in inputs)
        key = (kernel, kinds, tuple(dtypes), tuple(template))
        if key in seen:
            continue
        seen.add(key)
        text = PRELUDE + project_kernel(kernel, tuple(template)).generated(inputs, dtypes, ())
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        found[f"{kernel.name}-{digest}"] = text
    return found


def write(folder: Path, recorded: Iterable[Recorded]) -> list[Path]:
    """Write the texts of launches into a folder, which is made; returns their files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, text in sorted(texts(recorded).items()):
        files.append(folder / f"{name}.metal")
        files[-1].write_text(text, encoding="utf-8")
    return files


def compiled(file: Path, compiler: Sequence[str], version: str) -> subprocess.CompletedProcess[str]:
    """Compile a text for a version of Metal's language."""
    spec = importlib.util.find_spec("mlx.core")
    assert spec is not None
    assert spec.origin is not None
    include = Path(spec.origin).parent / "include"
    command = [*compiler, f"-std=metal{version}", "-I", str(include), "-c", str(file)]
    command += ["-o", str(file.with_suffix(f".{version}.air"))]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def refused(files: Sequence[Path], compiler: Sequence[str], version: str) -> int | None:
    """Compile texts for a version, and print what the compiler says.

    Returns the number of texts that it refuses; None if it doesn't know the version.
    """
    if f"invalid value 'metal{version}'" in compiled(files[0], compiler, version).stderr:
        print(f"\nMetal {version} is unknown to this compiler")
        return None
    failed = 0
    with ThreadPoolExecutor() as pool:
        results = pool.map(lambda file: compiled(file, compiler, version), files)
        for file, done in zip(files, results, strict=True):
            failed += done.returncode != 0
            if done.returncode:
                print(f"\n{file} is refused in Metal {version}:\n{done.stderr}")
            elif done.stderr:
                print(f"\n{file} in Metal {version}:\n{done.stderr}")
    print(f"\nMetal {version}: {len(files) - failed} compile, {failed} don't")
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the texts go")
    parser.add_argument("--compile", action="store_true", help="compile each of them")
    parser.add_argument("--compiler", default=COMPILER, help="the compiler and its options")
    args = parser.parse_args(argv)
    files = write(args.folder, calls())
    kernels = {file.name.rpartition("-")[0] for file in files}
    print(f"{len(files)} texts of {len(kernels)} kernels in {args.folder}")
    if not args.compile:
        return 0
    counts = [refused(files, shlex.split(args.compiler), version) for version in VERSIONS]
    # A compiler that knows no version has compiled nothing.
    return 1 if any(counts) or set(counts) == {None} else 0


if __name__ == "__main__":
    sys.exit(main())
