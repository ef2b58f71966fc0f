"""Layers that hold a part of their matrix: the other ranks hold the rest, and each computes its part.

A part of the outputs needs no exchange. With a part of the inputs, a product is a sum over ranks. A part of a
vocabulary gives zeros for other tokens' rows, which are added up, and a part of the logits, which are joined.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.errors import ConfigError
from afm_mlx.quantization.packed_layers import PackedLinear


class Cut(NamedTuple):
    """Which part of a layer's matrix a rank holds.

    Args:
        axis: 0 if the part is some of the outputs, 1 for some of the inputs.
        whole: number of outputs, or inputs, of the whole matrix.
        ranges: (start, end) of the outputs or inputs that the rank holds, in ascending order.
    """

    axis: int
    whole: int
    ranges: tuple[tuple[int, int], ...]

    @property
    def held(self) -> int:
        """Number of the outputs or inputs that the rank holds."""
        return sum(end - start for start, end in self.ranges)


class Vocabulary(NamedTuple):
    """Which rows of an embedding a rank holds: from `start` on, `share` of them at most, of `whole` rows."""

    group: mx.distributed.Group
    start: int
    share: int
    whole: int


def keep_outputs(layer: Any, ranges: Sequence[tuple[int, int]], name: str) -> None:
    """Leave only ranges of the outputs in a linear layer or embedding; no array is read.

    Raises:
        ConfigError: if a palette's tables can't be split like that; names the layer.
    """
    rows = layer["weight"].shape[0]
    for part in ("weight", "scales", "biases", "bias"):
        if part in layer and layer[part].ndim and layer[part].shape[0] == rows:
            layer[part] = _taken(layer[part], ranges, 0)
    if "table" in layer:
        per_table = rows // layer["table"].shape[0]
        if per_table < rows and any(end % per_table for each in ranges for end in each):
            raise ConfigError(
                f"{name} has a table for each {per_table} of its {rows} outputs, and the ranks' parts begin "
                "within a table. Use another number of ranks."
            )
        if per_table < rows:
            layer["table"] = _taken(
                layer["table"], [(start // per_table, end // per_table) for start, end in ranges], 0
            )
    layer.cut = Cut(0, rows, tuple(ranges))


def keep_inputs(layer: Any, group: mx.distributed.Group, name: str) -> None:
    """Leave only a rank's share of the inputs in a linear layer, whose products become sums over ranks.

    Raises:
        ConfigError: if the inputs can't be split; names the layer.
    """
    rank, size = group.rank(), group.size()
    inputs = _inputs(layer)
    for part in ("weight", "scales", "biases"):
        if part not in layer or layer[part].ndim < 2:
            continue
        units = layer[part].shape[1]
        if units % size:
            what = "words of codes" if part == "weight" and units != inputs else part
            raise ConfigError(
                f"{name} has {inputs} inputs, stored as {units} {what} for each output, which {size} ranks "
                f"can't share equally. Use a number of ranks that divides {units}."
            )
        share = units // size
        layer[part] = _taken(layer[part], [(rank * share, (rank + 1) * share)], 1)
    if "bias" in layer and rank and not isinstance(layer, PackedLinear):
        layer["bias"] = mx.zeros_like(layer["bias"])  # rank 0 adds it
    share = inputs // size
    layer.cut = Cut(1, inputs, ((rank * share, (rank + 1) * share),))
    layer.group = group
    if not isinstance(layer, PackedLinear):
        kind: Any = type(layer)
        layer.__class__ = _summing(kind)


def keep_vocabulary(embedding: Any, group: mx.distributed.Group) -> None:
    """Leave only a rank's share of the rows in an embedding, which is also the head."""
    whole = embedding["weight"].shape[0]
    share = math.ceil(whole / group.size())
    start = min(group.rank() * share, whole - 1)
    keep_outputs(embedding, [(start, min(start + share, whole))], "The embedding")
    embedding.vocabulary = Vocabulary(group, start, share, whole)
    kind: Any = type(embedding)
    embedding.__class__ = _partial_embedding(kind)


def _inputs(layer: Any) -> int:
    if isinstance(layer, PackedLinear):
        return layer.packed.in_dims
    inputs: int = layer["weight"].shape[1]
    return inputs * 32 // layer.bits if isinstance(layer, nn.QuantizedLinear) else inputs


def _taken(array: mx.array, ranges: Sequence[tuple[int, int]], axis: int) -> mx.array:
    """Return ranges of an array along an axis, in memory without the rest."""
    parts = [array[start:end] if axis == 0 else array[:, start:end] for start, end in ranges]
    return mx.contiguous(parts[0] if len(parts) == 1 else mx.concatenate(parts, axis))


@cache
def _summing(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class of linear layers whose products are added up over ranks; `partial` is a rank's part."""

    def call(self: Any, x: mx.array) -> mx.array:
        return mx.distributed.all_sum(kind.__call__(self, x), group=self.group)

    members = {"__call__": call, "partial": kind.__call__, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), members)


@cache
def _partial_embedding(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class of embeddings that hold a part of the vocabulary."""

    def call(self: Any, tokens: mx.array) -> mx.array:
        rows, vocabulary = self["weight"].shape[0], self.vocabulary
        own = tokens.astype(mx.int32) - vocabulary.start
        is_here = (own >= 0) & (own < rows)
        found = kind.__call__(self, mx.where(is_here, own, 0))
        found = mx.where(is_here[..., None], found, mx.zeros((), found.dtype))
        return mx.distributed.all_sum(found, group=vocabulary.group)

    def as_linear(self: Any, x: mx.array) -> mx.array:
        return joined_logits(self, kind.as_linear(self, x))

    members = {"__call__": call, "as_linear": as_linear, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), members)


def joined_logits(embedding: nn.Module, logits: mx.array) -> mx.array:
    """Return all ranks' logits (..., vocab_size), of this rank's (..., rows); others unchanged."""
    vocabulary: Vocabulary | None = getattr(embedding, "vocabulary", None)
    if vocabulary is None:
        return logits
    if missing := vocabulary.share - logits.shape[-1]:
        width = [(0, 0)] * (logits.ndim - 1) + [(0, missing)]
        logits = mx.pad(logits, width, constant_values=mx.array(-math.inf, logits.dtype))
    joined = mx.distributed.all_gather(logits[None], group=vocabulary.group)
    joined = mx.moveaxis(joined, 0, -2)
    return joined.reshape(*joined.shape[:-2], -1)[..., : vocabulary.whole]


def best_token(
    embedding: nn.Module, tokens: mx.array, logits: mx.array
) -> tuple[mx.array, mx.array]:
    """Return the most likely tokens (...) uint32 of all ranks, and their logits, of each rank's.

    Of equal logits, the smaller token is taken. NaN stays NaN.
    """
    vocabulary: Vocabulary | None = getattr(embedding, "vocabulary", None)
    if vocabulary is None:
        return tokens, logits
    own = mx.stack(
        [tokens.astype(mx.uint32) + vocabulary.start, logits.astype(mx.float32).view(mx.uint32)]
    )
    found = mx.distributed.all_gather(own[None], group=vocabulary.group)  # (ranks, 2, ...)
    every = found[:, 1].view(mx.float32)
    best = mx.argmax(mx.where(mx.isnan(every), math.inf, every), axis=0, keepdims=True)
    token = mx.take_along_axis(found[:, 0], best, axis=0)[0]
    return token, mx.take_along_axis(every, best, axis=0)[0].astype(logits.dtype)
