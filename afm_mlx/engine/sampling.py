"""From logits to the next token of every row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

import mlx.core as mx
import numpy as np

from afm_mlx.engine.request import Request
from afm_mlx.engine.row import Row
from afm_mlx.errors import LogitsError
from afm_mlx.guidance.matcher import fill_masks


def sample(
    rows: Sequence[Row],
    logits: mx.array,
    inputs: mx.array,
    known: Mapping[int, int] = MappingProxyType({}),
) -> tuple[mx.array, mx.array, mx.array]:
    """Draw one token per row, each by its own processors, sampler and random stream.

    Whatever a row's own callables raise is kept in `Row.error`, so that the other rows go on.

    Args:
        rows: the B rows.
        logits: (B, vocab_size) logits.
        inputs: (B,) tokens that the logits follow.
        known: the token of each row, by its index, that a constraint has forced; nothing is drawn for it.

    Returns:
        Tokens (B,) int32; each row's largest logit, (B,), NaN or infinity where any logit is NaN or +infinity;
        and log-probabilities (B, vocab_size) float32. Nothing is evaluated yet. The most likely token needs no
        log-probabilities, so they cost nothing until a sampler or a caller looks.
    """
    logits = logits.astype(mx.float32)
    if any(row.request.logits_processors for row in rows):
        logits = mx.concatenate(
            [_process(row, logits[i : i + 1], inputs[i : i + 1]) for i, row in enumerate(rows)]
        )
    logits = _constrained(rows, logits, known)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    tokens = mx.argmax(logits, axis=-1)
    if any(row.request.sampler for row in rows):
        with _global_stream_kept():
            drawn = [
                _draw(row, logprobs[i : i + 1], tokens[i : i + 1]) for i, row in enumerate(rows)
            ]
        tokens = mx.concatenate(drawn)
    if known:
        forced = mx.array([known.get(i, -1) for i in range(len(rows))], mx.int32)
        tokens = mx.where(forced < 0, tokens.astype(mx.int32), forced)
    return tokens.astype(mx.int32), mx.max(logits, axis=-1), logprobs


def _constrained(rows: Sequence[Row], logits: mx.array, known: Mapping[int, int]) -> mx.array:
    """The logits (B, vocab_size) without those of tokens that a row's constraint forbids."""
    held = {i: r.matcher for i, r in enumerate(rows) if r.matcher is not None and i not in known}
    if not held:
        return logits
    bits = np.unpackbits(fill_masks(list(held.values())).view(np.uint8), axis=1, bitorder="little")
    width = min(
        bits.shape[1], logits.shape[1]
    )  # embeddings may have more rows than there are tokens
    allowed = np.ones(logits.shape, np.bool_)
    for bits_of_row, i in zip(bits, held, strict=True):
        allowed[i] = False
        allowed[i, :width] = bits_of_row[:width]
    return mx.where(mx.array(allowed), logits, -math.inf)


def no_token(peak: float, request: Request) -> LogitsError:
    """The error that says why no token can be chosen from logits whose largest is NaN or infinite."""
    if peak == -math.inf and request.constraint is not None:
        return LogitsError(
            f"The {request.constraint.what} allows no token here whose logit is above -infinity. Leave out "
            "logits processors that ban tokens."
        )
    if peak == -math.inf:
        return LogitsError(
            "Every token is banned: all logits are -infinity. The logits processors of a request have to leave "
            "one token at least."
        )
    source = "The model's logits"
    if request.logits_processors:
        source += ", or what the logits processors made of them,"
    return LogitsError(
        f"{source} hold {peak}: no token can be chosen. Weights, adapters or scales that hold NaN or overflow "
        "lead to that; load them in another type (bfloat16, float32), or take other ones."
    )


def _process(row: Row, logits: mx.array, token: mx.array) -> mx.array:
    if not row.request.logits_processors or row.error is not None:
        return logits
    try:
        context = row.context(token)
        processed = logits
        for processor in row.request.logits_processors:
            processed = processor(context, processed)
        return processed.reshape(logits.shape)
    except Exception as error:
        row.error = error
        return logits


def _draw(row: Row, logprobs: mx.array, likeliest: mx.array) -> mx.array:
    if row.request.sampler is None or row.error is not None:
        return likeliest
    try:
        mx.random.seed(row.step_seed)
        return row.request.sampler(logprobs).reshape(1).astype(likeliest.dtype)
    except Exception as error:
        row.error = error
        return likeliest


@contextmanager
def _global_stream_kept() -> Iterator[None]:
    """Leave the caller's `mx.random` stream where it was.

    mlx-lm's samplers draw from the global stream; it is re-seeded for each row's draw and put back.
    """
    high, low = mx.random.state[0].tolist()
    try:
        yield
    finally:
        mx.random.seed((high << 32) | low)
