"""Log-probabilities of a prompt's tokens, computed chunk by chunk while the prompt is prefilled.

    Request.prompt_logprobs -> Prefill.scored_from -> score_chunk -> Row.take_scores -> TokenResponse

Where a row asks for them, a chunk runs through all blocks and the head. Before that, only the writing blocks
run, and the prefix cache may serve the tokens. The head runs for a few positions at a time, and so no more than
`MOST_LOGITS` logits are in memory, however long the prompt is: 4,096 positions of the 3B would take 2.5 GB.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from afm_mlx.engine.request import PromptScores
from afm_mlx.model.kv_cache import Cache
from afm_mlx.model.model import is_afm

MOST_LOGITS = 1 << 22  # 16 MB of float32: 27 positions of the 3B


class Target(NamedTuple):
    """A token of a prompt whose log-probability is wanted."""

    row: int  # index in the batch
    column: int  # of the chunk: where the token before it is
    token: int


def columns_at_once(model: nn.Module, rows: int, vocab_size: int | None) -> int:
    """Return how many columns of a chunk can be scored at once.

    A model of mlx-lm has no head of its own to slice, so it is fed fewer tokens at a time.
    """
    if is_afm(model):
        return sys.maxsize
    return max(1, MOST_LOGITS // ((vocab_size or 1 << 18) * rows))


def score_chunk(
    model: nn.Module,
    inputs: mx.array,
    cache: Cache,
    targets: Sequence[Target],
    top: int,
    others: Sequence[int] = (),
) -> tuple[PromptScores, np.ndarray]:
    """Feed a chunk (B, L) of prompts to a batch's cache, and score the targets, in their order.

    `top` and `others` are as in `PromptLogprobs`, the same for all targets.

    Returns:
        Scores, with `start` 0; and the logarithm of each position's softmax denominator, (n,) float32: NaN or
        infinite where the logits are.
    """
    parts: list[list[np.ndarray]] = []
    start = 0
    for logits in _logits(model, inputs, cache, targets):
        tokens = [target.token for target in targets[start : start + logits.shape[0]]]
        logits = logits.astype(mx.float32)
        scored = _scores(logits, mx.array(tokens), min(top, logits.shape[1]), others)
        mx.eval(scored)  # one slice after the other
        parts.append([np.array(array) for array in scored])
        start += len(tokens)
    *arrays, normalizers = map(np.concatenate, zip(*parts, strict=True))
    return PromptScores(0, *arrays), normalizers


def _logits(
    model: nn.Module, inputs: mx.array, cache: Cache, targets: Sequence[Target]
) -> Iterator[mx.array]:
    """Yield the logits (n, vocab_size) that predict the targets, some targets at a time."""
    width = inputs.shape[1]
    places = mx.array([target.row * width + target.column for target in targets])
    if not is_afm(model):
        logits = model(inputs, cache=cache)
        yield logits.reshape(-1, logits.shape[-1])[places]
        return
    hidden = model.hidden(inputs, cache)
    hidden = hidden.reshape(-1, hidden.shape[-1])[places]
    step = max(1, MOST_LOGITS // model.args.vocab_size)
    for start in range(0, len(targets), step):
        yield model.head(hidden[start : start + step])


def _scores(
    logits: mx.array, tokens: mx.array, top: int, others: Sequence[int] = ()
) -> tuple[mx.array, ...]:
    """Return the arrays of `score_chunk` for logits (n, vocab_size) float32 and tokens (n,)."""
    normalizers = mx.logsumexp(logits, axis=-1, keepdims=True)
    own = mx.take_along_axis(logits, tokens[:, None], axis=-1)
    comes_first = mx.arange(logits.shape[-1]) < tokens[:, None]
    ahead = (logits > own) | ((logits == own) & comes_first)
    ranks = (1 + mx.sum(ahead, axis=-1)).astype(mx.int32)
    likeliest = mx.zeros((logits.shape[0], 0), mx.int32)
    values = mx.zeros((logits.shape[0], 0), mx.float32)
    if top:
        if top == 1:
            likeliest = mx.argmax(logits, axis=-1, keepdims=True)
        else:
            likeliest = mx.argpartition(-logits, top - 1, axis=-1)[:, :top]
        values = mx.take_along_axis(logits, likeliest, axis=-1)
        order = mx.argsort(-values, axis=-1)
        likeliest = mx.take_along_axis(likeliest, order, axis=-1).astype(mx.int32)
        values = mx.take_along_axis(values, order, axis=-1) - normalizers
    of_others = logits[:, mx.array(others, mx.int32)] - normalizers
    own, normalizers = (own - normalizers)[:, 0], normalizers[:, 0]
    return own, ranks, likeliest, values, of_others, normalizers
