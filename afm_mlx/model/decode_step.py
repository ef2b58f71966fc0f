"""A decode step that is traced once for each shape, and then replayed.

It feeds every row its next token, or a few of them: those that speculative decoding checks.

`kernels.replay` keeps the graph: what changes from token to token (the token, lengths, buffers and tails of the
cache, every parameter, and the adapters' numbers) goes in as an argument.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from afm_mlx.kernels import dispatch, replay
from afm_mlx.model.adapted_layers import adapters_layout
from afm_mlx.model.kv_cache import KVCache
from afm_mlx.model.positions_and_masks import Positions

if TYPE_CHECKING:
    from afm_mlx.model.model import Model

MAX_TRACES = 64
"""Traces that are kept; one takes some 0.4 MB for the embedded model, and 0.9 MB for the 3B.

Rows, columns of the cache and mixtures of adapters have no end: with 256 traces, a process gained 100 MB in
minutes. A new trace takes less time than the steps that one batch of rows runs for.
"""


class _TracedCache:
    """A block's cache while a step is traced; its arrays are arguments of the trace."""

    def __init__(self, buffer: mx.array, tail: mx.array, starts: mx.array):
        self._buffer, self.tail, self._starts = buffer, tail, starts

    def open_tail(
        self, heads: int, head_dim: int, count: int = 1
    ) -> tuple[mx.array, mx.array, mx.array]:
        return self._buffer, self.tail, self._starts

    def take_tail(self, tail: mx.array, count: int = 1) -> None:
        self.tail = tail


class _Traces(threading.local):
    """The traces of one thread."""

    def __init__(self) -> None:
        self.drop()

    def drop(self) -> None:
        self.replay: replay.Replay | None = None
        self.made_for: set[tuple[Any, ...]] = set()


class DecodeStep:
    """The next tokens of every row over caches with a tail: `Model.forward` as a replayed graph."""

    def __init__(self) -> None:
        self._traces = _Traces()

    def applies(self, model: Model, cache: Sequence[KVCache]) -> bool:
        """True if steps can be replayed here, and the caches are ready for it."""
        is_one_kind = len({entry.int8 for entry in cache}) == 1
        return not model.training and is_one_kind and replay.is_available()

    def __reduce__(self) -> tuple[type[DecodeStep], tuple[()]]:
        return DecodeStep, ()  # a copied or pickled model traces anew

    def __call__(
        self,
        model: Model,
        inputs: mx.array,
        lengths: mx.array,
        cache: Sequence[KVCache],
        head: str,
    ) -> Any:
        """Return what `Model.forward` returns; the caches grow by L tokens.

        Args:
            model: the model whose step this is.
            inputs: (B, L) integers.
            lengths: (B,) int32, of `KVCache.decode_lengths`.
            cache: caches of the writing blocks.
            head: see `Model.forward`.
        """
        if len({entry.in_tail for entry in cache}) > 1:  # someone looked at one of them, say
            for entry in cache:
                entry.settle()
        config = model.args
        sizes = (2 * config.num_kv_heads, config.head_dim, inputs.shape[1])
        opened = [entry.open_tail(*sizes) for entry in cache]
        buffers, tails, (starts, *_) = map(list, zip(*opened, strict=True))
        chosen = (dispatch.device(), dispatch.generation(), adapters_layout(model))
        trace = (*inputs.shape, *buffers[0].shape, buffers[0].dtype, head, *chosen)
        mine = self._traces
        if trace not in mine.made_for and len(mine.made_for) >= MAX_TRACES:
            mine.drop()
        mine.made_for.add(trace)
        if mine.replay is None:
            mine.replay = _replay(model)
        given = (inputs, lengths, starts, buffers, tails)
        result, tails = mine.replay(*given, constants=(head, *chosen))
        for entry, tail in zip(cache, tails, strict=True):
            entry.take_tail(tail, inputs.shape[1])
        return result


def _replay(model: Model) -> replay.Replay:
    def step(
        inputs: mx.array,
        lengths: mx.array,
        starts: mx.array,
        buffers: list[mx.array],
        tails: list[mx.array],
        head: str,
        device: str,
        generation: int,
        layout: str,
    ) -> tuple[Any, list[mx.array]]:
        # The last three are there because another choice of kernels needs another trace, and so do adapters
        # whose numbers lie elsewhere.
        cache = [_TracedCache(*of, starts) for of in zip(buffers, tails, strict=True)]
        result = model.forward(inputs, Positions(lengths - 1, None, lengths), cache, head)
        return result, [entry.tail for entry in cache]

    return replay.Replay(step, model.state)
