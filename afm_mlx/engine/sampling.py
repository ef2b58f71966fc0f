"""From logits to the next token of every row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx

from afm_mlx.engine.request import Request, Row
from afm_mlx.errors import LogitsError


def sample(
    rows: Sequence[Row], logits: mx.array, inputs: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """Draw one token per row, each by its own processors, sampler and random stream.

    Whatever a row's own callables raise is kept in `Row.error`, so that the other rows go on.

    Args:
        rows: the B rows.
        logits: (B, vocab_size) logits.
        inputs: (B,) tokens that the logits follow.

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
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    tokens = mx.argmax(logits, axis=-1)
    if any(row.request.sampler for row in rows):
        with _global_stream_kept():
            drawn = [
                _draw(row, logprobs[i : i + 1], tokens[i : i + 1]) for i, row in enumerate(rows)
            ]
        tokens = mx.concatenate(drawn)
    return tokens.astype(mx.int32), mx.max(logits, axis=-1), logprobs


def no_token(peak: float, request: Request) -> LogitsError:
    """The error that says why no token can be chosen from logits whose largest is NaN or infinite."""
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
