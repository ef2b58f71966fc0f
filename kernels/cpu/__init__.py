"""The operations as C++ primitives for MLX's CPU backend.

`native.py` has the functions, `extension.py` finds and loads the library. In C++, `matmul.h` and `attention.h`
are the kernels on plain pointers, with one source file per instruction set; `pool.h` is their threads;
`primitives.h` makes nodes of MLX's graph of them, and `bindings.cpp` the Python module.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from afm_mlx.kernels.cpu import extension, native
from afm_mlx.kernels.dispatch import Case, Variant

_FLOATS = (mx.float32, mx.bfloat16, mx.float16)


def _obstacle(case: Case) -> str | None:
    if reason := extension.unavailable():
        return f"the C++ extension isn't there: {reason}"
    if case.dtype not in _FLOATS:
        return f"computes float32, bfloat16 and float16, not {str(case.dtype).removeprefix('mlx.core.')}"
    return None


def _attention_obstacle(case: Case) -> str | None:
    if reason := _obstacle(case):
        return reason
    limit = extension.module().max_head_dim  # type: ignore[union-attr]
    return f"head_dim is at most {limit}" if case.head_dim > limit else None


def _write_obstacle(case: Case) -> str | None:
    reason = extension.unavailable()
    return f"the C++ extension isn't there: {reason}" if reason else None


def _rope_obstacle(case: Case) -> str | None:
    return _obstacle(case) or ("head_dim must be even" if case.head_dim % 2 else None)


def _variant(run: Callable[..., Any], obstacle: Callable[[Case], str | None]) -> Variant:
    return Variant(run.__name__, f"cpu/{run.__name__}", run, obstacle)


VARIANTS: tuple[Variant, ...] = (
    _variant(native.packed_matmul, _obstacle),
    _variant(native.packed_swiglu, _obstacle),
    _variant(native.packed_embedding, _obstacle),
    _variant(native.packed_argmax, _obstacle),
    _variant(native.decode_attention, _attention_obstacle),
    _variant(native.causal_attention, _attention_obstacle),
    _variant(native.write_tokens, _write_obstacle),
    _variant(native.rope_norm_quantize, _rope_obstacle),
)
