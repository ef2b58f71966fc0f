"""Where new tokens stand in their rows, and what they may look at."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import mlx.core as mx

Offset: TypeAlias = int | mx.array
"""Position of the first new token: one for all rows, or (B,); or (B, L), the position of every token."""


class Positions(NamedTuple):
    """Where the new tokens stand, and what they may look at; the same for every block.

    Args:
        offset: position of the first new token, or of every token in rows that hold several samples.
        mask: None, "causal" or an array, as `afm_mlx.kernels.attention` takes it.
        lengths: (B,) int32, columns that the first new token of each row looks at, its own included; set when
            there are few new tokens and keys and values are read straight from the cache's buffers.
        cached: whether keys and values go to a cache, so that nobody asks for gradients.
    """

    offset: Offset
    mask: mx.array | str | None
    lengths: mx.array | None = None
    cached: bool = False

    @property
    def packed(self) -> bool:
        """True if rows hold several samples, each with positions of its own."""
        return isinstance(self.offset, mx.array) and self.offset.ndim == 2


def causal_mask(length: int) -> str | None:
    """The mask of `length` tokens that see only themselves and what lies before."""
    return "causal" if length > 1 else None


def packed_positions(segments: mx.array) -> Positions:
    """Positions and mask of rows that hold several samples: each starts at 0 and sees only itself.

    Args:
        segments: (B, L) integers, the same number for the tokens of one sample, which lie together; padding
            has a number of its own, sees itself, and so leaves no query without a key.

    Returns:
        offsets (B, L) int32, one per token, and a boolean mask (B, 1, L, L), true where a query may look.
    """
    column = mx.arange(segments.shape[1], dtype=mx.int32)
    fresh = mx.concatenate(
        [mx.zeros_like(segments[:, :1]), segments[:, 1:] != segments[:, :-1]], axis=1
    )
    starts = mx.cummax(mx.where(fresh, column, 0), axis=1)
    same = segments[:, None, :, None] == segments[:, None, None, :]
    return Positions(column - starts, same & (column[:, None] >= column))
