"""Decode steps as graphs: traced once for each shape, then replayed.

A step feeds every row its next token, or the few tokens that speculative decoding verifies. `kernels.replay`
keeps the graph; everything that changes from token to token (the tokens, lengths, buffers and tails of the
cache, every parameter, and the adapters' numbers) is an argument.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import mlx.core as mx

from afm_mlx.config import ModelConfig
from afm_mlx.kernels import dispatch, replay
from afm_mlx.model.attention import Positions
from afm_mlx.model.fused_layers import adapters_layout
from afm_mlx.model.kv_cache import KVCache, OpenTail, TailWriter, open_tails, take_tails

MAX_TRACES = 64
"""Traces that are kept; one takes some 0.4 MB for the embedded model, and 0.9 MB for the 3B.

Rows, columns of the cache and mixtures of adapters are unlimited: with 256 traces, a process gained 100 MB in
minutes. A new trace takes less time than the steps that one batch of rows runs for.
"""

M = TypeVar("M", bound="Traceable")
T = TypeVar("T")


class Traceable(Protocol):
    """A model whose `forward` can be traced."""

    args: ModelConfig
    training: bool
    state: Any  # every array that `forward` uses, in nested dicts and lists

    def forward(
        self, inputs: mx.array, positions: Positions, cache: Sequence[TailWriter | None]
    ) -> mx.array: ...


class _TracedCache:
    """A block's cache while a step is traced; its arrays are arguments of the trace."""

    def __init__(self, *opened: mx.array):
        self._opened = OpenTail(*opened)
        self.tail = self._opened.tail

    def open_tail(self, heads: int, head_dim: int, count: int = 1) -> OpenTail:
        return self._opened

    def take_tail(self, tail: mx.array, count: int = 1) -> None:
        self.tail = tail


class DecodeStep(threading.local):
    """A replayed graph of `forward` and a head, for the next tokens of every row over caches with a tail.

    Each thread has its own traces: `replays`, one for each head, with the graphs of all `keys`.
    """

    def __init__(self) -> None:
        self.replays: dict[object, replay.Replay] = {}
        self.keys: set[tuple[object, ...]] = set()

    def __reduce__(self) -> tuple[type[DecodeStep], tuple[()]]:
        return DecodeStep, ()  # a copied or pickled model makes its own traces

    def applies(self, model: Traceable, cache: Sequence[KVCache]) -> bool:
        """True if a step can be replayed here: in eval mode, over caches that all store codes or all floats."""
        is_one_kind = len({entry.int8 for entry in cache}) == 1
        return not model.training and is_one_kind and replay.is_available()

    def __call__(
        self,
        model: M,
        inputs: mx.array,
        lengths: mx.array,
        cache: Sequence[KVCache],
        head: Callable[[M, mx.array], T],
    ) -> T:
        """Return `head(model, model.forward(...))`, not evaluated; the caches grow by L tokens.

        `inputs` are (B, L) tokens; `lengths` (B,) is what `KVCache.decode_lengths` returns; `cache` holds the
        caches of the writing blocks. `head` maps the model and its hidden states to a tree of arrays. Traces
        are kept by function object, so every call has to pass the same one.
        """
        heads, head_dim, count = 2 * model.args.num_kv_heads, model.args.head_dim, inputs.shape[1]
        buffers, tails, starts = open_tails(cache, heads, head_dim, count)
        # Another choice of kernels needs another trace, and so do adapters with another layout.
        choices = (dispatch.device(), dispatch.generation(), adapters_layout(model))
        key = (head, *inputs.shape, *buffers[0].shape, buffers[0].dtype, *choices)
        if key not in self.keys and len(self.keys) >= MAX_TRACES:
            self.replays.clear()
            self.keys.clear()
        self.keys.add(key)
        if head not in self.replays:
            self.replays[head] = _replay(model, head)
        arrays = (inputs, lengths, starts, buffers, tails)
        result, tails = self.replays[head](*arrays, constants=choices)
        take_tails(cache, tails, count)
        return result


def _replay(model: M, head: Callable[[M, mx.array], T]) -> replay.Replay:
    def step(
        inputs: mx.array,
        lengths: mx.array,
        starts: mx.array,
        buffers: list[mx.array],
        tails: list[mx.array],
        *choices: object,
    ) -> tuple[T, list[mx.array]]:
        pairs = zip(buffers, tails, strict=True)
        cache = [_TracedCache(buffer, tail, starts) for buffer, tail in pairs]
        h = model.forward(inputs, Positions(lengths - 1, None, lengths), cache)
        return head(model, h), [entry.tail for entry in cache]

    return replay.Replay(step, model.state)
