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
from afm_mlx.kernels import dispatch, reads_tails, replay
from afm_mlx.model.attention import Positions
from afm_mlx.model.fused_layers import adapters_layout
from afm_mlx.model.kv_cache import (
    Cache,
    KVCache,
    OpenTail,
    TailWriter,
    open_tails,
    take_tails,
)
from afm_mlx.model.zoo_kv_cache import ZooKVCache

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
    kv_heads: int
    training: bool
    state: Any  # every array that `forward` uses, in nested dicts and lists

    def forward(
        self, inputs: mx.array, positions: Positions, cache: Sequence[TailWriter | None]
    ) -> mx.array: ...


class _TracedCache:
    """A block's cache while a step is traced; its arrays are arguments of the trace."""

    def __init__(self, opened: OpenTail):
        self._opened, self.tail = opened, opened.tail

    @classmethod
    def of_blocks(cls, opened: Sequence[OpenTail], lengths: mx.array) -> list[Any]:
        return [cls(each) for each in opened]

    def open_tail(self, heads: int, head_dim: int, count: int = 1) -> OpenTail:
        return self._opened

    def take_tail(self, tail: mx.array, count: int = 1) -> None:
        self.tail = tail


class _TracedZooCache(_TracedCache, ZooKVCache):
    """The same for a block of a zoo model, which sees one new token of every row."""

    def __init__(self, opened: OpenTail, lengths: mx.array, offset: mx.array, ends: mx.array):
        super().__init__(opened)
        self.buffer = opened.buffer
        self._seen, self._offset, self._ends = lengths, offset, ends

    @classmethod
    def of_blocks(cls, opened: Sequence[OpenTail], lengths: mx.array) -> list[Any]:
        offset, ends = lengths - 1, lengths - opened[0].starts  # computed once for all blocks
        return [cls(each, lengths, offset, ends) for each in opened]

    @property
    def offset(self) -> mx.array:
        return self._offset

    def make_mask(self, *args: object, **options: object) -> None:
        return None

    def decode_lengths(self, count: int = 1) -> mx.array:
        return self._seen

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, mask: object) -> mx.array:
        kv = mx.concatenate([keys, values], axis=1)
        y, self.tail = self._opened.attend(queries, kv, self._seen, self._ends)
        return y


class DecodeStep(threading.local):
    """Replayed graphs of a model's step, for the next tokens of every row over caches with a tail.

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

        def compute(tokens: mx.array, ends: mx.array, traced: Sequence[TailWriter]) -> T:
            return head(model, model.forward(tokens, Positions(ends - 1, None, ends), traced))

        sizes = 2 * model.kv_heads, model.args.head_dim
        opened = open_tails(cache, *sizes, inputs.shape[1])
        return self._run(model, inputs, lengths, cache, opened, head, _TracedCache, compute)

    def zoo_logits(self, model: Any, inputs: mx.array, cache: Cache) -> mx.array:
        """Return the logits (B, vocab_size) of a zoo model behind the last tokens (B, 1) of every row.

        The step is replayed over the caches of `ZooKVCache` that hold tokens, and run as it is over others.
        The caches grow by a token.
        """
        if not _takes_zoo_step(model, cache):
            logits: mx.array = model(inputs, cache=cache)[:, -1]
            return logits

        def compute(tokens: mx.array, ends: mx.array, traced: Sequence[ZooKVCache]) -> mx.array:
            logits: mx.array = model(tokens, cache=traced)[:, -1]
            return logits

        lengths, (_, heads, _, head_dim) = cache[0].decode_lengths(), cache[0].buffer.shape
        opened = open_tails(cache, heads, head_dim, 1)
        return self._run(model, inputs, lengths, cache, opened, None, _TracedZooCache, compute)

    def _run(
        self,
        model: Any,
        inputs: mx.array,
        lengths: mx.array,
        cache: Sequence[KVCache],
        opened: tuple[list[mx.array], list[mx.array], mx.array],
        head: object,
        caches: type[_TracedCache | _TracedZooCache],
        compute: Callable[[mx.array, mx.array, list[Any]], T],
    ) -> T:
        """Replay `compute(inputs, lengths, traced caches)`, after tracing it if no trace fits."""
        buffers, tails, starts = opened
        # Another choice of kernels needs another trace, and so do adapters with another layout.
        choices = (dispatch.device(), dispatch.generation(), adapters_layout(model))
        key = (head, *inputs.shape, *buffers[0].shape, buffers[0].dtype, *choices)
        if key not in self.keys and len(self.keys) >= MAX_TRACES:
            self.replays.clear()
            self.keys.clear()
        self.keys.add(key)
        if head not in self.replays:

            def step(
                inputs: mx.array,
                lengths: mx.array,
                starts: mx.array,
                buffers: list[mx.array],
                tails: list[mx.array],
                *choices: object,
            ) -> tuple[T, list[mx.array]]:
                pairs = zip(buffers, tails, strict=True)
                traced = caches.of_blocks([OpenTail(*pair, starts) for pair in pairs], lengths)
                return compute(inputs, lengths, traced), [entry.tail for entry in traced]

            self.replays[head] = replay.Replay(step, model.state)
        arrays = (inputs, lengths, starts, buffers, tails)
        result, tails = self.replays[head](*arrays, constants=choices)
        take_tails(cache, tails, inputs.shape[1])
        return result


def _takes_zoo_step(model: Any, cache: Cache) -> bool:
    """True if a zoo model's next step can be replayed: in eval mode, over equal caches that hold tokens."""
    if model.training or not all(isinstance(entry, ZooKVCache) for entry in cache):
        return False
    if any(entry.empty() for entry in cache) or not replay.is_available():
        return False
    forms = {(*entry.buffer.shape, entry.buffer.dtype) for entry in cache}
    return len(forms) == 1 and reads_tails(cache[0].buffer.dtype, cache[0].buffer.shape[3])
