"""Choice of the variant of an operation that runs, by device and shape.

Every backend lists its variants (`VARIANTS` of `kernels/metal`, `kernels/cpu` and `kernels/mlx.py`), each with
a function of the reference's signature and a rule that returns why it can't run a case, or None. The first
variant whose rule returns None runs: our kernels for one device come before MLX's own operations (the backend
"mlx", on any device), and these before the reference. A variant that failed the self-test on this machine is
disabled, and the next one runs; `afm-mlx doctor` and `explain` show the choice, and why other variants were
not chosen.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import mlx.core as mx

from afm_mlx.kernels import settings
from afm_mlx.kernels.settings import SettingError

OPS = (
    "packed_matmul",
    "packed_swiglu",
    "packed_argmax",
    "packed_embedding",
    "packed_gather",
    "rope_norm_quantize",
    "norm_rope",
    "norm_rope_attend",
    "write_tokens",
    "decode_attention",
    "write_and_attend",
    "causal_attention",
    "gelu",
)
BACKENDS = ("metal", "cpu", "mlx", "reference")
FLOATS = (mx.float32, mx.float16, mx.bfloat16)
SWITCH = settings.KERNELS


class Case(NamedTuple):
    """The properties of a call on which the choice of a variant depends.

    Args:
        device: "gpu" or "cpu".
        dtype: type of the activations; of the buffer in `write_tokens`.
        rows: vectors that are multiplied, B * L; tokens that are looked up, attend or are written.
        mode, granularity, group_size: format of the matrix (gate's in `packed_swiglu`), see `PackedWeight`.
        head_dim: width of a head, in attention and RoPE.
        stored: dtype of keys and values in attention; int8 codes have scales, floats have none.
    """

    device: str
    dtype: mx.Dtype
    rows: int
    mode: str = ""
    granularity: str = ""
    group_size: int = 0
    head_dim: int = 0
    stored: mx.Dtype = mx.int8


Obstacle = Callable[[Case], str | None]
"""Returns why a variant can't run a case, as a clause for `doctor`; None if it can."""


class Variant(NamedTuple):
    """One implementation of one operation, which `run` computes with the arguments of `kernels.reference`.

    Args:
        name: "backend/variant", unique.
        obstacle: the rule that says why it can't run a case.
        merges_partials: True if it accepts `AttentionPartials` for its vectors.
        run_each: computes `ops.packed_matmul_each` in one operation; None where it can't.
    """

    op: str
    name: str
    run: Callable[..., Any]
    obstacle: Obstacle
    merges_partials: bool = False
    run_each: Callable[..., Any] | None = None

    @property
    def backend(self) -> str:
        return self.name.split("/")[0]


def dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def other_than_floats(case: Case) -> str | None:
    """Return why a variant for float activations can't run a case, or None if it can."""
    if case.dtype in FLOATS:
        return None
    return f"takes float32, float16 or bfloat16, not {dtype_name(case.dtype)}"


_disabled: dict[str, str] = {}
_forced: list[str] = []
_generation = 0


@functools.cache
def variants(op: str) -> tuple[Variant, ...]:
    """Return an operation's variants, in order of preference; the reference is the last."""
    modules = [
        importlib.import_module(f"afm_mlx.kernels.{name}") for name in ("metal", "cpu", "mlx")
    ]
    listed = [v for module in modules for v in module.VARIANTS if v.op == op]
    reference = importlib.import_module("afm_mlx.kernels.reference")
    return (*listed, Variant(op, "reference", getattr(reference, op), lambda case: None))


@functools.lru_cache(maxsize=4096)  # every number of prompt tokens is another case
def select(op: str, case: Case) -> Variant:
    return next(v for v, obstacle in explain(op, case) if obstacle is None)


def explain(op: str, case: Case) -> list[tuple[Variant, str | None]]:
    """Return every variant in order of preference, with the reason why it can't run; None if it can."""
    return [(v, _obstacle(v, case)) for v in variants(op)]


def _obstacle(variant: Variant, case: Case) -> str | None:
    if variant.backend == "reference":
        return None
    if variant.name in _disabled:
        return _disabled[variant.name]
    wanted = forced()
    if wanted:
        if wanted not in (variant.backend, variant.name):
            return f"{wanted} is selected"
    elif variant.backend not in ("mlx", {"gpu": "metal", "cpu": "cpu"}[case.device]):
        return f"runs on {variant.backend} only"
    elif variant.backend == "metal" and not mx.metal.is_available():
        return "MLX has no Metal here"
    return variant.obstacle(case)


def invalidate() -> None:
    """Forget every choice of a variant; call it when something on which choices depend has changed."""
    global _generation
    _generation += 1
    select.cache_clear()


def generation() -> int:
    """Return a number that changes with each `invalidate`."""
    return _generation


def disable(name: str, reason: str) -> None:
    """Stop choosing this variant in this process."""
    _disabled[name] = reason
    invalidate()


def enable(name: str) -> None:
    """Undo `disable`."""
    _disabled.pop(name, None)
    invalidate()


def disabled() -> dict[str, str]:
    """Return every disabled variant with the reason."""
    return dict(_disabled)


@contextlib.contextmanager
def force(name: str) -> Iterator[None]:
    """Choose only this backend or variant while the context is open, and the reference where it can't run.

    For tests and `doctor`. The variable `AFM_MLX_KERNELS` does the same for a whole process.
    """
    _forced.append(name)
    invalidate()
    try:
        yield
    finally:
        _forced.pop()
        invalidate()


def forced() -> str:
    """Return the backend or variant that `force` or `AFM_MLX_KERNELS` selects; empty if neither does.

    Raises:
        SettingError: if the variable's backend or variant doesn't exist, or can't run on this machine.
    """
    if _forced:
        return _forced[-1]
    wanted = os.environ.get(SWITCH, "")
    if wanted and (problem := _problem(wanted)):
        raise SettingError(f"{SWITCH} is {wanted!r}{problem}")
    return wanted


@functools.cache
def _problem(wanted: str) -> str:
    """Return why a backend or variant can't be selected on this machine; empty if it can."""
    extension = importlib.import_module("afm_mlx.kernels.cpu.extension")  # as variants are found
    backend, _, variant = wanted.partition("/")
    names = {v.name for op in OPS for v in variants(op)}
    if backend not in BACKENDS or (variant and wanted not in names):
        return f"; allowed are {', '.join(BACKENDS)}, and names of variants (`afm-mlx doctor` lists them)."
    obstacles = {
        "metal": "" if mx.metal.is_available() else "MLX has no Metal here",
        "cpu": extension.unavailable(),
    }
    if reason := obstacles.get(backend):
        return (
            f", and it can't run: {reason}. Unset it, or name another one of {', '.join(BACKENDS)}."
        )
    return ""


def device() -> str:
    """Return "gpu" or "cpu": where MLX runs by default."""
    return "cpu" if mx.default_device() == mx.Device(mx.cpu) else "gpu"
