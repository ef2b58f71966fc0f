"""From logits to the next token of every row, or to several tokens of a row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from afm_mlx.engine.row import Row
from afm_mlx.errors import RequestError, shown


class Draw(NamedTuple):
    """One token to draw."""

    row: Row
    mask: np.ndarray | None = None  # the allowed tokens, of `fill_masks`; None for all
    # Tokens that are assumed to follow the answer so far, all of which was read back; None if the answer's last
    # token may not be read back yet.
    assumed: Sequence[int] | None = None


def sample(
    rows: Sequence[Row], logits: mx.array, inputs: mx.array, forced: Mapping[int, int]
) -> tuple[mx.array, mx.array, mx.array]:
    """Draw the next token of each of B rows from logits (B, vocab_size); for the results, see `draw`.

    `inputs` (B,) are the tokens that the logits follow. `forced` maps a row's index to the token that its
    constraint forces, in place of a drawn one.
    """
    matched = {
        i: r.matcher for i, r in enumerate(rows) if r.matcher is not None and i not in forced
    }
    masks: dict[int, np.ndarray] = {}
    if matched:
        from afm_mlx.guidance.matcher import fill_masks

        try:
            masks = dict(zip(matched, fill_masks(list(matched.values())), strict=True))
        except Exception:  # one of them has failed: find out which, and end its row
            for index, matcher in matched.items():
                try:
                    (masks[index],) = fill_masks([matcher])
                except Exception as error:
                    rows[index].error = rows[index].error or error
    draws = [Draw(row, masks.get(i)) for i, row in enumerate(rows)]
    tokens, max_logits, logprobs = draw(draws, logits, inputs)
    if forced:
        known = mx.array([forced.get(i, -1) for i in range(len(rows))], mx.int32)
        tokens = mx.where(known < 0, tokens, known)
    return tokens, max_logits, logprobs


def draw(
    draws: Sequence[Draw], logits: mx.array, inputs: mx.array | None = None
) -> tuple[mx.array, mx.array, mx.array]:
    """Draw B tokens from logits (B, vocab_size), each by its row's own processors, sampler and random stream.

    `inputs` (B,) are the tokens that the logits follow; not needed if all draws have assumed tokens. Whatever a
    row's own callables raise is kept in `Row.error`, so that the other rows go on.

    Returns:
        Tokens (B,) int32, which a row's sampler may have drawn from outside the vocabulary
        (`Row.sampler_vocab_size`); the largest logit of each, (B,), NaN or infinity where any is NaN or
        +infinity; and log-probabilities (B, vocab_size) float32. Nothing is evaluated yet. The most likely
        token needs no log-probabilities, so they cost nothing until a sampler or a caller looks.
    """
    logits = logits.astype(mx.float32)
    if any(each.row.request.logits_processors for each in draws):
        processed = [
            _process(each, logits[i : i + 1], None if inputs is None else inputs[i : i + 1])
            for i, each in enumerate(draws)
        ]
        logits = mx.concatenate(processed)
    masks = {i: each.mask for i, each in enumerate(draws) if each.mask is not None}
    if masks:
        logits = mx.where(mx.array(_allowed(masks, logits.shape)), logits, -math.inf)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    tokens = mx.argmax(logits, axis=-1)
    if any(each.row.request.sampler for each in draws):
        # mlx-lm's samplers draw from the caller's global stream: each draw seeds it, and then it is put back.
        high, low = mx.random.state[0].tolist()
        try:
            drawn = [
                _call_sampler(each, logprobs[i : i + 1], tokens[i : i + 1])
                for i, each in enumerate(draws)
            ]
        finally:
            mx.random.seed((high << 32) | low)
        tokens = mx.concatenate(drawn)
    return tokens.astype(mx.int32), mx.max(logits, axis=-1), logprobs


def _allowed(masks: Mapping[int, np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Return booleans (B, vocab_size) = `shape`, True for each logit that its row's mask allows.

    Rows without a mask, one bit per token by their index in `masks`, allow all.
    """
    bits = np.unpackbits(np.stack(list(masks.values())).view(np.uint8), axis=1, bitorder="little")
    width = min(bits.shape[1], shape[1])  # embeddings may have more rows than there are tokens
    allowed = np.ones(shape, np.bool_)
    for own_bits, i in zip(bits, masks, strict=True):
        allowed[i] = False
        allowed[i, :width] = own_bits[:width]
    return allowed


def _process(each: Draw, logits: mx.array, token: mx.array | None) -> mx.array:
    """Return logits (1, vocab_size) after the row's logits processors; `token` (1,) is the answer's last."""
    row = each.row
    if not row.request.logits_processors or row.error is not None:
        return logits
    try:
        if each.assumed is None:
            context = row.context(token)
        else:
            context = mx.array([*row.request.prompt, *row.tokens, *each.assumed], dtype=mx.int32)
        processed = logits
        for processor in row.request.logits_processors:
            processed = processor(context, processed)
            is_array = isinstance(processed, mx.array) and processed.size == logits.size
            if not is_array or processed.dtype in (mx.bool_, mx.complex64):
                raise RequestError(
                    f"A logits processor returned {_described(processed)}; needed are logits, an mx.array of "
                    f"floats and shape (1, {logits.size})."
                )
        return processed.reshape(logits.shape).astype(logits.dtype)
    except Exception as error:
        row.error = error
        return logits


def _call_sampler(each: Draw, logprobs: mx.array, likeliest: mx.array) -> mx.array:
    """Return the token (1,) that the row's sampler draws; the likeliest one without a sampler."""
    row = each.row
    if row.request.sampler is None or row.error is not None:
        return likeliest
    try:
        mx.random.seed(row.seed_at(row.sampled + len(each.assumed or ())))
        token = row.request.sampler(logprobs)
        row.sampler_vocab_size = logprobs.shape[-1]
        is_one = isinstance(token, mx.array) and token.size == 1
        if not is_one or not mx.issubdtype(token.dtype, mx.integer):
            raise RequestError(
                f"The sampler returned {_described(token)}; needed: the id of a token, one integer in an "
                "mx.array."
            )
        token = token.reshape(1)  # not yet computed: ids that int32 can't hold become -1
        if token.dtype.size < 4 or token.dtype == mx.int32:
            return token.astype(mx.int32)
        is_small = (token >= 0) & (token < mx.array(2**31, token.dtype))
        return mx.where(is_small, token.astype(mx.int32), mx.array([-1], mx.int32))
    except Exception as error:
        row.error = error
        return likeliest


def _described(value: object) -> str:
    if isinstance(value, mx.array | np.ndarray):
        return f"an array of {value.dtype} and shape {tuple(value.shape)}"
    return shown(value)
