"""Which of a model's operations run without this package's kernels on this machine, and why."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.kernels import dispatch
from afm_mlx.kernels.dispatch import Case
from afm_mlx.model.model import is_afm
from afm_mlx.quantization.packed_layers import (
    PackedEmbedding,
    PackedExperts,
    PackedLinear,
    activation_dtype,
)
from afm_mlx.quantization.rule import AFM_RULE

_HEAD_DIM = 128
_OPS: dict[type, str] = {
    PackedLinear: "packed_matmul",
    PackedEmbedding: "packed_embedding",
    PackedExperts: "packed_gather",
}
_ATTENTION = ("rope_norm_quantize", "write_and_attend", "decode_attention", "causal_attention")


class SlowWarning(RuntimeWarning):
    """Warning: a model runs without this package's kernels. Its answers are right, but far slower."""


def missing_kernels(model: nn.Module | None = None) -> str:
    """Return why a model runs without this package's kernels, as a clause; empty if it runs with or needs none.

    Without a model: why an AFM model in 2 bits would, on this machine.
    """
    return _clause(_lacking(model))


def warn_if_slow(model: nn.Module, what: str = "the model") -> None:
    """Issue a `SlowWarning` if a model, called `what`, runs without its kernels; Python shows each once."""
    reported = dispatch.disabled().values()  # by `ensure_checked`
    if reason := _clause({why: ops for why, ops in _lacking(model).items() if why not in reported}):
        message = f"{what} is right, but slow: it runs on plain MLX, without this package's kernels"
        warnings.warn(f"{message} ({reason})", SlowWarning, stacklevel=3)


def _lacking(model: nn.Module | None) -> dict[str, list[str]]:
    """Return a mapping from each reason to the operations that run without our kernels because of it."""
    own = "cpu" if dispatch.device() == "cpu" else "metal"
    lacking: dict[str, list[str]] = {}
    for op, case in dict.fromkeys(_calls(model)):
        variants = dispatch.explain(op, case)
        runs = next(variant for variant, obstacle in variants if obstacle is None)
        obstacle = next((why for variant, why in variants if variant.backend == own), None)
        if runs.backend != own and obstacle is not None:
            lacking.setdefault(obstacle, []).append(op)
    if lacking and (wanted := dispatch.forced()):
        return {f"{dispatch.SWITCH} asks for {wanted}; unset it": []}
    return lacking


def _clause(lacking: dict[str, list[str]]) -> str:
    if len(lacking) == 1:  # for example, a missing library: the reason holds for all operations
        return next(iter(lacking))
    return "; ".join(f"{', '.join(dict.fromkeys(ops))}: {why}" for why, ops in lacking.items())


def _calls(model: nn.Module | None) -> Iterator[tuple[str, Case]]:
    """Yield one call of each operation and format that a decode step of the model has."""
    base = Case(dispatch.device(), activation_dtype(), 1)
    if model is None:
        per = AFM_RULE.granularity or ""
        yield "packed_matmul", base._replace(mode=AFM_RULE.mode, granularity=per)
        yield from ((op, base._replace(head_dim=_HEAD_DIM)) for op in _ATTENTION)
        return
    for module in model.modules():
        if (op := _OPS.get(type(module))) is not None:
            yield op, Case(*base[:3], *module.packed.format)
    if is_afm(model):
        stored = mx.int8 if model.args.kv_bits else base.dtype
        case = base._replace(head_dim=model.args.head_dim, stored=stored)
        yield from ((op, case) for op in _ATTENTION)
