"""Attention's parts made whole by a dispatch of their own, where no product merges them."""

from __future__ import annotations

import mlx.core as mx

from afm_mlx.kernels.formats import AttentionParts
from afm_mlx.kernels.metal import runtime
from afm_mlx.kernels.metal.runtime import Kernel

_MERGE = Kernel(
    "attention_merge", ("partial", "value_scale"), ("out",), ("common", "rope", "attention")
)


def merged(parts: AttentionParts) -> mx.array:
    """See `reference.merge_parts`. One dispatch."""
    batch, n_heads, _, width = parts.numbers.shape
    threads = -(-(width - 2) // 32) * 32
    (out,) = runtime.launch(
        _MERGE,
        [parts.numbers, parts.value_scale],
        template=(("O", parts.dtype), ("head_dim", width - 2)),
        grid=(threads, n_heads, batch),
        threadgroup=(threads, 1, 1),
        output_shapes=[parts.shape],
        output_dtypes=[parts.dtype],
    )
    return out
