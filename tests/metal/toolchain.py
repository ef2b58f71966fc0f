"""clang from PyPI (`ziglang`) as the emulator uses it: Metal text to a shared library of the host.

The text is compiled with address spaces, which clang checks; then they are dropped from the LLVM IR, so that
the instrumentation of memory accesses, which skips them, sees every access.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import functools
import hashlib
import os
import platform
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent
INCLUDE = FOLDER / "include"

TARGETS = {
    "x86_64": ("x86_64-unknown-linux-gnu", "x86-64-v3"),
    "aarch64": ("aarch64-unknown-linux-gnu", "generic"),
}

WARNINGS = (
    *("-Wno-unknown-attributes", "-Wno-duplicate-decl-specifier", "-Wno-user-defined-literals"),
    *("-Wno-reserved-user-defined-literal", "-Wno-c++17-extensions", "-Wno-unused-value"),
    *("-Wdouble-promotion", "-Wimplicit-float-conversion", "-Wreturn-type"),
    *("-Werror=uninitialized", "-Werror=return-type"),
)
LANGUAGE = (
    *("-nostdsysteminc", "-nobuiltininc", "-fno-rtti", "-fdeprecated-macro"),
    # A literal without suffix is a float in Metal; half and bfloat round after every operation.
    *("-cl-single-precision-constant", "-ffloat16-excess-precision=none"),
    *("-fbfloat16-excess-precision=none", "-ftrivial-auto-var-init=pattern", "-fno-finite-loops"),
)
UNDEFINED = (
    "array-bounds,shift-exponent,signed-integer-overflow,integer-divide-by-zero,float-cast-overflow"
)

# What Metal's compiler refuses and clang only warns of.
REFUSED = re.compile(
    r"implicit conversion .*(?: to 'double'| to '(?:bfloat|__bf16)[^']*'| to 'long double')|"
    r"implicit conversion .* to '[^']*' \(aka '__bf16"
)


class CompileError(RuntimeError):
    """Text that Metal's compiler would refuse, with clang's reasons."""


def why_unavailable() -> str | None:
    """Why kernels can't be compiled and run here, or None."""
    if platform.system() != "Linux" or platform.machine() not in TARGETS:
        return (
            f"the emulator runs on Linux, on {' or '.join(TARGETS)}; this is {platform.platform()}"
        )
    try:
        import ziglang  # noqa: F401
    except ImportError:
        return "clang comes from the package `ziglang`, which isn't installed"
    return None


@functools.cache
def zig() -> str:
    import ziglang

    return str(Path(ziglang.__file__).parent / "zig")


@functools.cache
def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "afm-mlx" / "emulator"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def _cached(name: str) -> Iterator[tuple[Path, Path | None]]:
    """A file of the cache, and where to write what it is to become: None if it is there already."""
    file = cache_folder() / name
    if file.exists():
        yield file, None
        return
    with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
        out = Path(folder) / name
        yield file, out
        os.replace(out, file)


@functools.cache
def _salt() -> str:
    """What a library depends on besides its text: this file, the shim, the compiler."""
    digest = hashlib.sha256(Path(zig()).stat().st_size.to_bytes(8, "little"))
    headers = sorted(path for path in INCLUDE.rglob("*") if path.is_file())
    own = (Path(__file__), *(FOLDER / name for name in ("runtime.h", "runtime.cpp", "functions.h")))
    for path in (*own, *headers):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _run(*command: str) -> str:
    """What a command says on its error stream; one that fails is a text's fault."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CompileError(done.stderr)
    return done.stderr


def _clang(*arguments: str) -> str:
    triple, cpu = TARGETS[platform.machine()]
    target = ("-triple", triple, "-target-cpu", cpu, "-mrelocation-model", "pic", "-pic-level", "2")
    options = ("-disable-free", "-fgnuc-version=4.2.1", "-ffp-contract=on")
    return _run(zig(), "clang", "-cc1", *target, *options, *arguments)


def _search(include: tuple[Path, ...]) -> list[str]:
    return [a for path in (INCLUDE, *include) for a in ("-isystem", str(path))]


@functools.cache
def _parser(*options: str) -> tuple[str, ...]:
    """Flags that read Metal text, with the shim's headers parsed once for all texts."""
    flags = (*LANGUAGE, *WARNINGS, *options)
    key = hashlib.sha256(f"{_salt()}{INCLUDE}{flags}".encode()).hexdigest()[:32]
    with _cached(f"{key}.pch") as (parsed, out):
        if out:
            header = ("-x", "c++-header", *flags, "-emit-pch", "-fno-pch-timestamp", "-o", str(out))
            _clang(*header, *_search(()), str(INCLUDE / "metal_stdlib"))
    return ("-x", "c++", *flags, "-include-pch", str(parsed))


def _without_address_spaces(ir: str) -> str:
    ir = re.sub(r" addrspace\(\d+\)", "", ir).replace("addrspacecast", "bitcast")
    named = r"@llvm\.mem(cpy|move|set)[.\w]*"
    ir = re.sub(named, lambda m: re.sub(r"\.p\d+", ".p0", m.group()), ir)
    # What differed in its address spaces only is declared several times now.
    declared = list(dict.fromkeys(re.findall(r"^declare .*\n", ir, re.MULTILINE)))
    return re.sub(r"^declare .*\n", "", ir, flags=re.MULTILINE) + "".join(declared)


def _refuse_bfloat_arithmetic(ir: str) -> None:
    operations = re.findall(r"= f(?:add|sub|mul|div|neg)\b[^\n]*\bbfloat\b[^\n]*!dbg !(\d+)", ir)
    if operations:
        lines = dict(re.findall(r"^!(\d+) = !DILocation\(line: (\d+)", ir, re.MULTILINE))
        where = sorted({lines.get(number, "?") for number in operations})
        raise CompileError(
            f"arithmetic on bfloat, which older GPUs lack, in lines {', '.join(where)}: convert to float first"
        )


def compile_library(
    text: str,
    *,
    include: tuple[Path, ...] = (),
    strict: bool = True,
    bfloat_arithmetic: bool = True,
) -> Path:
    """A shared library of a Metal text; the same one for the same text.

    Args:
        text: a translation unit, with the shim's headers included.
        include: folders of further headers.
        strict: refuse implicit conversions to bfloat and double, and require C++14 as well as C++17.
        bfloat_arithmetic: whether it is allowed.
    """
    what = f"{_salt()}{include}{strict}{bfloat_arithmetic}{text}"
    with _cached(f"{hashlib.sha256(what.encode()).hexdigest()[:32]}.so") as (library, out):
        if out is None:
            return library
        source, ir, obj = (out.with_name(f"kernel.{suffix}") for suffix in ("cpp", "ll", "o"))
        source.write_text(text, encoding="utf-8")
        paths = _search(include)
        if strict:
            _clang(*_parser("-std=c++14"), "-fsyntax-only", *paths, str(source))
        messages = _clang(
            *_parser("-std=c++17", "-O1", f"-fsanitize=thread,{UNDEFINED}"),
            *("-disable-llvm-passes", "-emit-llvm", "-debug-info-kind=line-tables-only"),
            *("-dwarf-version=4", "-o", str(ir), *paths, str(source)),
        )
        if strict and (refused := [m for m in messages.splitlines() if REFUSED.search(m)]):
            raise CompileError(
                "conversions that Metal doesn't make implicitly (to bfloat), or has no type for (double):\n"
                + "\n".join(refused)
            )
        intermediate = ir.read_text(encoding="utf-8")
        if not bfloat_arithmetic:
            _refuse_bfloat_arithmetic(intermediate)
        ir.write_text(_without_address_spaces(intermediate), encoding="utf-8")
        _clang("-O1", "-fsanitize=thread", "-x", "ir", "-emit-obj", "-o", str(obj), str(ir))
        _link(obj, out)
    return library


def check(text: str, *, include: tuple[Path, ...] = ()) -> None:
    """Compile a Metal text without making anything of it; raises `CompileError` with clang's messages."""
    with tempfile.TemporaryDirectory(dir=cache_folder()) as name:
        source = Path(name) / "kernel.cpp"
        source.write_text(text, encoding="utf-8")
        _clang(*_parser("-std=c++14"), "-fsyntax-only", *_search(include), str(source))


def _link(obj: Path, out: Path) -> None:
    _run(zig(), "ld.lld", "-shared", "-o", str(out), str(obj))


@functools.cache
def runtime() -> ctypes.CDLL:
    """The machine that kernels run on, loaded so that their libraries find it."""
    with _cached(f"runtime-{_salt()[:32]}.so") as (library, out):
        if out:
            obj = out.with_name("runtime.o")
            flags = ("-fPIC", "-fno-exceptions", "-fno-rtti", "-g0")
            source = ("-fno-sanitize=all", "-c", str(FOLDER / "runtime.cpp"), "-o", str(obj))
            _run(zig(), "c++", "-std=c++17", "-O2", *flags, *source)
            _link(obj, out)
    ctypes.CDLL(ctypes.util.find_library("m"), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
