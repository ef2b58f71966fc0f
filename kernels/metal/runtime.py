"""Metal kernels from `.metal` files: source, signature and launch in one place.

A kernel's file holds the body that `mx.fast.metal_kernel` wraps into a function; the functions that it calls
are in header files. A form of a kernel is its text for one set of template arguments, which `text.py` makes
short. The tests' emulator replaces `launch`.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import re
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx

from afm_mlx.kernels.metal import text

FOLDER = Path(__file__).parent
_CONSTANT = re.compile(r"^static constant constexpr const int (\w+) = (\d+);", re.MULTILINE)

Template = tuple[tuple[str, int | bool | mx.Dtype], ...]
"""Names and values (int, bool or Dtype) of a kernel's template arguments."""


@dataclass(frozen=True)
class Kernel:
    """A kernel in a `.metal` file of this folder.

    Args:
        name: name of the kernel, and of its file without suffix.
        inputs, outputs: names of the buffers, in the order in which `launch` takes them.
        headers: files of the functions that the body calls, without suffix, in order.
        macros: names and their meanings, for the body alone.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    headers: tuple[str, ...] = ("common",)
    macros: tuple[tuple[str, str], ...] = ()

    def function(self, template: Template = ()) -> str:
        """Return the form's name in MLX."""
        return f"afm_{self.name}__{zlib.crc32(repr((self.macros, template)).encode()):08x}"

    def decided(self, template: Template, file: str) -> str:
        """Return a file's text, the kernel's own or a header's, without what this form leaves out.

        Lines are where they are in the file. `#if` knows template arguments, macros, and headers' constants.
        """
        headers = "\n".join(map(_read, self.headers))
        known = {name: int(value) for name, value in _CONSTANT.findall(headers)}
        known |= {name: int(value) for name, value in template if not isinstance(value, mx.Dtype)}
        known |= {name: 1 for name, meaning in self.macros if meaning == "1"}
        words = dict(self.macros) if file == self.name else {}
        for name, meaning in words.items():
            while meaning in words:
                words[name] = meaning = words[meaning]
        words |= {name: _literal(value) for name, value in template}
        return text.with_words(text.resolved(_read(file), known), words)


def _literal(value: int | bool | mx.Dtype) -> str:
    if isinstance(value, mx.Dtype):
        name = str(value).removeprefix("mlx.core.")
        return "float" if value == mx.float32 else f"{name}_t"
    return str(value).lower()


@functools.cache
def _reduced(kernel: Kernel, stand_ins: tuple[tuple[str, str], ...]) -> Kernel:
    inputs = tuple(name for name in kernel.inputs if name not in dict(stand_ins))
    return replace(kernel, inputs=inputs, macros=kernel.macros + stand_ins)


def reduced(kernel: Kernel, inputs: Mapping[str, mx.array | str]) -> tuple[Kernel, list[mx.array]]:
    """Make a kernel that takes only the inputs that a call has: each input costs MLX time at every launch.

    `inputs` has an array for each input of the kernel, or, if its body never reads the input, the name of
    another input, which a macro makes an alias. Returns the kernel, and the arrays of its inputs.
    """
    stand_ins = tuple((name, x) for name, x in inputs.items() if isinstance(x, str))
    kernel = _reduced(kernel, stand_ins)
    return kernel, [x for name in kernel.inputs if not isinstance(x := inputs[name], str)]


@functools.cache
def _read(name: str) -> str:
    """Return a file's text without comments and indentation."""
    lines = (FOLDER / f"{name}.metal").read_text(encoding="utf-8").splitlines()
    return "\n".join(line.partition("//")[0].strip() for line in lines)


@functools.cache
def form(kernel: Kernel, template: Template) -> text.Form:
    """Return what MLX compiles for template arguments of a kernel; its buffers are inputs, then outputs."""
    headers = "".join(f"{kernel.decided(template, name)}\n" for name in kernel.headers)
    body = kernel.decided(template, kernel.name)
    return text.shortened(text.reached(headers, body), body, (*kernel.inputs, *kernel.outputs))


@functools.cache
def floats(*values: float) -> mx.array:
    return mx.array(values, dtype=mx.float32)


@functools.lru_cache(maxsize=64)  # positions are among them
def ints(*values: int) -> mx.array:
    return mx.array(values, dtype=mx.int32)


@functools.cache
def gpu_generation() -> int:
    """Return the generation of this machine's GPU, as MLX counts them: 13 for M1 to 17 for M5; 0 if unknown."""
    return _architecture()[0]


@functools.cache
def has_matrix_units() -> bool:
    """True if MLX multiplies matrices on this GPU's matrix units, which M5 is the first to have.

    Before macOS 26.2, whose kernel is Darwin 25.2, it does not. macOS reports another version of itself to a
    Python that was built for an older one, but not of its kernel. Source: MLX 0.32, `is_nax_available` in
    `mlx/backend/metal/device.cpp`.
    """
    generation, size = _architecture()
    kernel = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    return generation >= (18 if size == "p" else 17) and kernel >= (25, 2)


@functools.cache
def has_bfloat() -> bool:
    """True if the GPU has instructions for bfloat16; M1 and M2 take several for each number."""
    return gpu_generation() not in (13, 14)


def _architecture() -> tuple[int, str]:
    """Return the GPU's generation, and the letter of its size; 0 and "" if the name is not of Apple's form."""
    name = str(mx.device_info().get("architecture", ""))
    found = re.fullmatch(r"applegpu_g(\d+)([a-z])", name)
    return (int(found[1]), found[2]) if found else (0, "")


@functools.cache
def _compiled(kernel: Kernel, template: Template) -> Callable[..., list[mx.array]]:
    header, body, buffers = form(kernel, template)
    return mx.fast.metal_kernel(
        name=kernel.function(template),
        input_names=list(buffers[: len(kernel.inputs)]),
        output_names=list(buffers[len(kernel.inputs) :]),
        source=body,
        header=header,
    )


def launch(
    kernel: Kernel,
    inputs: Sequence[mx.array],
    *,
    template: Template = (),
    grid: tuple[int, int, int],
    threadgroup: tuple[int, int, int],
    output_shapes: Sequence[tuple[int, ...]],
    output_dtypes: Sequence[mx.Dtype],
) -> list[mx.array]:
    """Run a kernel; `grid` counts threads, and is a multiple of `threadgroup` on every axis."""
    outputs = _compiled(kernel, tuple(template))(
        inputs=list(inputs),
        grid=grid,
        threadgroup=threadgroup,
        output_shapes=list(output_shapes),
        output_dtypes=list(output_dtypes),
    )
    if (launches := getattr(_recorded, "launches", None)) is not None:
        launches.append((library(kernel, inputs, template, output_dtypes), outputs))
    return outputs


def library(
    kernel: Kernel,
    inputs: Sequence[mx.array],
    template: Template,
    output_dtypes: Sequence[mx.Dtype],
) -> str:
    """Return a name that is equal for launches that MLX compiles once.

    Besides the form, a text has the inputs' types, and passes single numbers and small arrays in other ways
    (`mlx/backend/common/metal_kernel.cpp`).
    """
    kinds = (f"{x.dtype}{'s' if x.ndim == 0 else 'c' if x.size < 8 else ''}" for x in inputs)
    types = (*kinds, *map(str, output_dtypes))
    return " ".join([kernel.function(template), *(t.removeprefix("mlx.core.") for t in types)])


Launched = list[tuple[str, list[mx.array]]]
"""The library and the outputs of each launch."""

_recorded = threading.local()


@contextlib.contextmanager
def recorded() -> Iterator[Launched]:
    """Collect the launches of this thread while the context is open; they are not evaluated yet."""
    launches: Launched = []
    _recorded.launches = launches
    try:
        yield launches
    finally:
        del _recorded.launches


# Cores of the largest chip of a kind, by the last letter of its architecture's name, as MLX distinguishes them:
# phones, base and Pro, Max, Ultra.
CORES = {"p": 6, "g": 20, "s": 40, "d": 80}


@functools.cache
def gpu_cores() -> int:
    """Return the maximum number of cores of this machine's kind of GPU; a Max's if the name is unknown."""
    return CORES.get(_architecture()[1], CORES["s"])
