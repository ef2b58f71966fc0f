"""From logits to the next token of every row, or to several tokens of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from afm_mlx.engine.request import Request
from afm_mlx.engine.row import Row
from afm_mlx.errors import LogitsError, RequestError, shown
from afm_mlx.guidance.matcher import Matcher, fill_masks


class Place(NamedTuple):
    """Where a token is drawn.

    Args:
        row: the row that it belongs to.
        mask: the tokens that the row's constraint allows there, as `fill_masks` returns them; None for all.
        assumed: tokens that are taken to follow the answer so far, all of which was read back; None where the
            answer's last token may not be read back yet.
    """

    row: Row
    mask: np.ndarray | None = None
    assumed: Sequence[int] | None = None

    @property
    def seed(self) -> int:
        return self.row.seed_at(self.row.sampled + len(self.assumed or ()))

    def context(self, token: mx.array | None) -> mx.array:
        """Prompt and answer up to here, for logits processors; `token` (1,) is the answer's last."""
        if self.assumed is None:
            return self.row.context(token)
        tokens = [*self.row.request.prompt, *self.row.tokens, *self.assumed]
        return mx.array(tokens, dtype=mx.int32)


def sample(
    rows: Sequence[Row],
    logits: mx.array,
    inputs: mx.array,
    known: Mapping[int, int] = MappingProxyType({}),
) -> tuple[mx.array, mx.array, mx.array]:
    """Draw the next token of each row; arguments and results as in `draw`.

    Args:
        known: the token of each row, by its index, that a constraint has forced; nothing is drawn for it.
    """
    held = {i: r.matcher for i, r in enumerate(rows) if r.matcher is not None and i not in known}
    masks = _masks(rows, held) if held else {}
    places = [Place(row, masks.get(i)) for i, row in enumerate(rows)]
    tokens, peaks, logprobs = draw(places, logits, inputs)
    if known:
        forced = mx.array([known.get(i, -1) for i in range(len(rows))], mx.int32)
        tokens = mx.where(forced < 0, tokens, forced)
    return tokens, peaks, logprobs


def _masks(rows: Sequence[Row], held: Mapping[int, Matcher]) -> dict[int, np.ndarray]:
    """The tokens that matchers allow, by the rows' indices; a matcher that fails is its row's error."""
    try:
        return dict(zip(held, fill_masks(list(held.values())), strict=True))
    except Exception:
        masks = {}
        for index, matcher in held.items():
            try:
                (masks[index],) = fill_masks([matcher])
            except Exception as error:
                rows[index].error = rows[index].error or error
        return masks


def draw(
    places: Sequence[Place], logits: mx.array, inputs: mx.array | None = None
) -> tuple[mx.array, mx.array, mx.array]:
    """Draw one token at each place, by its row's own processors, sampler and random stream.

    Whatever a row's own callables raise is kept in `Row.error`, so that the other rows go on.

    Args:
        places: the B places.
        logits: (B, vocab_size) logits.
        inputs: (B,) tokens that the logits follow; not needed where all places have assumed tokens.

    Returns:
        Tokens (B,) int32, which a row's sampler may have made none of the vocabulary (`Row.vocab_size`); the
        largest logit of each place, (B,), NaN or infinity where any is NaN or +infinity; and log-probabilities
        (B, vocab_size) float32. Nothing is evaluated yet. The most likely token needs no log-probabilities, so
        they cost nothing until a sampler or a caller looks.
    """
    logits = logits.astype(mx.float32)
    if any(place.row.request.logits_processors for place in places):
        each = [
            _process(place, logits[i : i + 1], None if inputs is None else inputs[i : i + 1])
            for i, place in enumerate(places)
        ]
        logits = mx.concatenate(each)
    logits = _constrained(places, logits)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    tokens = mx.argmax(logits, axis=-1)
    if any(place.row.request.sampler for place in places):
        with _global_stream_kept():
            drawn = [
                _draw(place, logprobs[i : i + 1], tokens[i : i + 1])
                for i, place in enumerate(places)
            ]
        tokens = mx.concatenate(drawn)
    return tokens.astype(mx.int32), mx.max(logits, axis=-1), logprobs


def _constrained(places: Sequence[Place], logits: mx.array) -> mx.array:
    """The logits (B, vocab_size) without those of tokens that a row's constraint forbids."""
    masks = {i: place.mask for i, place in enumerate(places) if place.mask is not None}
    if not masks:
        return logits
    stacked = np.stack(list(masks.values()))
    bits = np.unpackbits(stacked.view(np.uint8), axis=1, bitorder="little")
    width = min(
        bits.shape[1], logits.shape[1]
    )  # embeddings may have more rows than there are tokens
    allowed = np.ones(logits.shape, np.bool_)
    for bits_of_place, i in zip(bits, masks, strict=True):
        allowed[i] = False
        allowed[i, :width] = bits_of_place[:width]
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


def _process(place: Place, logits: mx.array, token: mx.array | None) -> mx.array:
    row = place.row
    if not row.request.logits_processors or row.error is not None:
        return logits
    try:
        context = place.context(token)
        processed = logits
        for processor in row.request.logits_processors:
            processed = _checked_logits(processor(context, processed), logits.size)
        return processed.reshape(logits.shape).astype(logits.dtype)
    except Exception as error:
        row.error = error
        return logits


def _checked_logits(processed: Any, vocab_size: int) -> mx.array:
    is_right = isinstance(processed, mx.array) and processed.size == vocab_size
    if is_right and processed.dtype not in (mx.bool_, mx.complex64):
        return processed
    raise RequestError(
        f"A logits processor returned {_described(processed)}; needed are logits, an mx.array of floats and "
        f"shape (1, {vocab_size})."
    )


def _draw(place: Place, logprobs: mx.array, likeliest: mx.array) -> mx.array:
    row = place.row
    if row.request.sampler is None or row.error is not None:
        return likeliest
    try:
        mx.random.seed(place.seed)
        token = row.request.sampler(logprobs)
        row.vocab_size = logprobs.shape[-1]
        return _checked_token(token, row.vocab_size)
    except Exception as error:
        row.error = error
        return likeliest


def _checked_token(token: Any, vocab_size: int) -> mx.array:
    """A sampler's token as (1,) int32. Its number isn't known yet: ids that int32 can't hold become -1."""
    is_array = isinstance(token, mx.array) and token.size == 1
    if not is_array or not mx.issubdtype(token.dtype, mx.integer):
        raise RequestError(
            f"The sampler returned {_described(token)}; needed: the id of a token, one integer in an mx.array."
        )
    token = token.reshape(1)
    if token.dtype.size < 4 or token.dtype == mx.int32:
        return token.astype(mx.int32)
    is_small = (token >= 0) & (token < mx.array(2**31, token.dtype))
    return mx.where(is_small, token.astype(mx.int32), mx.array([-1], mx.int32))


def _described(value: Any) -> str:
    if isinstance(value, mx.array | np.ndarray):
        return f"an array of {value.dtype} and shape {tuple(value.shape)}"
    return shown(value)


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
