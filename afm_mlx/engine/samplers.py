"""`make_sampler` and `make_logits_processors`, with mlx-lm's arguments and meaning.

mlx-lm's own are defined next to its models, and importing those takes seconds. Tokens are filtered in mlx-lm's
order: top-p, min-p, XTC, top-k.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np

from afm_mlx.engine.request import LogitsProcessor, Sampler
from afm_mlx.errors import RequestError, shown

REAL = (int, float, np.integer, np.floating)
INTEGER = (int, np.integer)
# The inverse of other temperatures would leave float32; colder ones than this act like it.
COLDEST, HOTTEST = 1e-6, 1e30


def make_sampler(
    temp: float = 0.0,
    top_p: float = 0.0,
    min_p: float = 0.0,
    min_tokens_to_keep: int = 1,
    top_k: int = 0,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.1,
    xtc_special_tokens: Sequence[int] | None = None,
) -> Sampler:
    """Make a function that draws tokens (...) from log-probabilities (..., vocab_size), by `mx.random`.

    Args:
        temp: temperature; 0 takes the most likely token, whatever the other arguments are.
        top_p: keep the most likely tokens until their probabilities sum to this; 0 and 1 keep all.
        min_p: drop tokens below this share of the highest probability.
        min_tokens_to_keep: most likely tokens that `min_p` never drops.
        top_k: keep this many tokens; 0 keeps all.
        xtc_probability: how often XTC drops the tokens above its threshold, except the least likely of them.
        xtc_threshold: probability above which XTC drops tokens, up to 0.5.
        xtc_special_tokens: ids that XTC never drops.

    Raises:
        RequestError: for a value that is not allowed.
    """
    sampler = FilteredSampler(
        temp=_number("temp", temp),
        top_p=_number("top_p", top_p, 1),
        min_p=_number("min_p", min_p, 1),
        min_tokens_to_keep=_integer("min_tokens_to_keep", min_tokens_to_keep, 1),
        top_k=_integer("top_k", top_k),
        xtc_probability=_number("xtc_probability", xtc_probability, 1),
        xtc_threshold=_number("xtc_threshold", xtc_threshold, 0.5),
        xtc_special_tokens=[
            _integer("xtc_special_tokens: a token", token) for token in xtc_special_tokens or ()
        ],
    )
    return sampler if sampler.temp else greedy


def _number(name: str, value: object, high: float = HOTTEST) -> float:
    if not isinstance(value, REAL) or not 0 <= value <= high:
        raise RequestError(f"{name} is {shown(value)}; allowed is a number of 0 to {high:g}.")
    return float(value)


def _integer(name: str, value: object, low: int = 0) -> int:
    if not isinstance(value, INTEGER) or value < low:
        raise RequestError(f"{name} is {shown(value)}; allowed is an integer of {low} or more.")
    return int(value)


def greedy(logprobs: mx.array) -> mx.array:
    return mx.argmax(logprobs, axis=-1)


@dataclass(frozen=True)
class FilteredSampler:
    """A sampler with a temperature; its fields are `make_sampler`'s arguments."""

    temp: float
    top_p: float
    min_p: float
    min_tokens_to_keep: int
    top_k: int
    xtc_probability: float
    xtc_threshold: float
    xtc_special_tokens: Sequence[int]

    def __call__(self, logprobs: mx.array) -> mx.array:
        logits, tokens = self.candidates(logprobs)
        drawn = mx.random.categorical(logits)
        if tokens is None:
            return drawn
        return mx.take_along_axis(tokens, drawn[..., None], axis=-1)[..., 0]

    def candidates(self, logprobs: mx.array) -> tuple[mx.array, mx.array | None]:
        """Return the logits over the temperature of the tokens that filters leave, and these tokens.

        Both are (..., top_k), with -inf for filtered tokens; without top-k, (..., vocab_size) and None.
        """
        tokens, total = None, None
        if self.top_k and not self.xtc_probability:
            # Top-p and min-p look at more likely tokens only: they find the same ones among the k most likely,
            # which a partition gives, while top-p of all tokens has to sort them.
            if 0 < self.top_p < 1:
                total = mx.exp(mx.logsumexp(logprobs, axis=-1, keepdims=True))
            logprobs, tokens = most_likely(logprobs, self.top_k)
        if 0 < self.top_p < 1:
            logprobs = keep_top_p(logprobs, self.top_p, total)
        if self.min_p:
            logprobs = keep_min_p(logprobs, self.min_p, self.min_tokens_to_keep)
        if self.xtc_probability:
            dropped = drop_top_choices(logprobs, self.xtc_threshold, self.xtc_special_tokens)
            logprobs = mx.where(mx.random.uniform() > self.xtc_probability, logprobs, dropped)
            if self.top_k:
                logprobs, tokens = most_likely(logprobs, self.top_k)
        return logprobs * (1 / max(self.temp, COLDEST)), tokens


def most_likely(logprobs: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """Return the `count` highest of `logprobs` (..., vocab_size), and their rising tokens, both (..., count).

    The order does not depend on the last bit of a log-probability. So a seed draws the same token in a batch,
    where products are rounded differently, as alone.
    """
    count = min(count, logprobs.shape[-1])
    tokens = mx.sort(mx.argpartition(logprobs, kth=-count, axis=-1)[..., -count:], axis=-1)
    return mx.take_along_axis(logprobs, tokens, axis=-1), tokens


def keep_top_p(logprobs: mx.array, top_p: float, total: mx.array | None) -> mx.array:
    """Drop each token (to -inf) whose more likely tokens have a probability of `top_p` together.

    `total` (..., 1) is the probability of all tokens, if there are others than the candidates; else None.
    """
    rising = mx.sort(logprobs, axis=-1)
    probabilities = mx.exp(rising.astype(mx.float32))
    above = mx.cumsum(probabilities, axis=-1, reverse=True, inclusive=False)
    if total is None:
        total = above[..., :1] + probabilities[..., :1]
    dropped = (above >= top_p * total).sum(axis=-1, keepdims=True)
    # If rounding drops all, the most likely token stays.
    first = mx.minimum(dropped, logprobs.shape[-1] - 1)
    return mx.where(logprobs < mx.take_along_axis(rising, first, axis=-1), -mx.inf, logprobs)


def keep_min_p(logprobs: mx.array, min_p: float, min_tokens_to_keep: int) -> mx.array:
    """Drop tokens (to -inf) below `min_p` times the highest probability, except the most likely ones."""
    lowest = logprobs.max(axis=-1, keepdims=True) + math.log(min_p)
    if min_tokens_to_keep > 1:
        at = max(logprobs.shape[-1] - min_tokens_to_keep, 0)
        lowest = mx.minimum(lowest, mx.partition(logprobs, kth=at, axis=-1)[..., at : at + 1])
    return mx.where(logprobs < lowest, -mx.inf, logprobs)


def drop_top_choices(
    logprobs: mx.array, threshold: float, special_tokens: Sequence[int]
) -> mx.array:
    """Drop all tokens (to -inf) above the threshold except the least likely of them (XTC)."""
    vocab_size = logprobs.shape[-1]
    if special_tokens and max(special_tokens) >= vocab_size:
        raise RequestError(
            f"xtc_special_tokens has {shown(max(special_tokens))}; this model's tokens go from 0 to "
            f"{vocab_size - 1}."
        )
    probabilities = mx.softmax(logprobs, axis=-1)
    above = mx.where(probabilities > threshold, probabilities, mx.inf)
    dropped = probabilities > above.min(axis=-1, keepdims=True)
    if special_tokens:
        dropped[..., mx.array(special_tokens)] = False
    return mx.where(dropped, -mx.inf, logprobs)


# -- logits processors

CONTEXT_SIZE = 20  # mlx-lm's default: the newest tokens that a penalty looks at
LIMIT = 1e30  # largest bias and penalty: with more, logits would leave float32


def make_logits_processors(
    logit_bias: Mapping[int, float] | None = None,
    repetition_penalty: float | None = None,
    repetition_context_size: int | None = CONTEXT_SIZE,
    presence_penalty: float | None = None,
    presence_context_size: int | None = CONTEXT_SIZE,
    frequency_penalty: float | None = None,
    frequency_context_size: int | None = CONTEXT_SIZE,
) -> list[LogitsProcessor]:
    """Return the processors that the arguments ask for; none for None, and for a penalty of 0.

    A processor maps the tokens so far, prompt and answer, and logits (rows, vocab_size) to other logits.

    Args:
        logit_bias: numbers that are added to the logits of tokens, by their ids; -inf forbids a token.
        repetition_penalty: logits of tokens in the context are divided by it where they are positive, else
            multiplied (arXiv 1909.05858); above 1 makes them less likely.
        presence_penalty: number that is subtracted from the logits of tokens in the context.
        frequency_penalty: number that is subtracted for each time that a token is in the context.
        repetition_context_size, presence_context_size, frequency_context_size: newest tokens that are the
            context; None or 0 for all.

    Raises:
        RequestError: for a value that can't be used.
    """
    processors: list[LogitsProcessor] = []
    if logit_bias:
        processors.append(_bias(logit_bias))
    for name, weaken, penalty, size in (
        ("repetition", _repetition, repetition_penalty, repetition_context_size),
        ("presence", _presence, presence_penalty, presence_context_size),
        ("frequency", _frequency, frequency_penalty, frequency_context_size),
    ):
        if not (penalty is None or (isinstance(penalty, REAL) and -LIMIT <= penalty <= LIMIT)):
            raise RequestError(
                f"{name}_penalty is {shown(penalty)}; allowed is a number of {-LIMIT:g} to {LIMIT:g}."
            )
        if name == "repetition" and penalty and penalty < 1 / LIMIT:
            raise RequestError(
                f"repetition_penalty is {shown(penalty)}; allowed are {1 / LIMIT:g} and more, and 0 for none."
            )
        if not (size is None or (isinstance(size, INTEGER) and size >= 0)):
            raise RequestError(
                f"{name}_context_size is {shown(size)}; allowed is an integer of 0 or more."
            )
        if penalty:
            processors.append(partial(weaken, float(penalty), int(size or 0)))
    return processors


def _bias(logit_bias: Mapping[int, float]) -> LogitsProcessor:
    for token, bias in logit_bias.items():
        is_bias = isinstance(bias, REAL) and (bias == -math.inf or -LIMIT <= bias <= LIMIT)
        if not (isinstance(token, INTEGER) and token >= 0 and is_bias):
            raise RequestError(
                f"logit_bias has {shown(bias)} for the token {shown(token)}; needed are ids of tokens, and "
                f"numbers of {-LIMIT:g} to {LIMIT:g} or -inf."
            )
    highest = max(logit_bias)
    values = mx.array([float(bias) for bias in logit_bias.values()])

    def add(_: mx.array, logits: mx.array) -> mx.array:
        if highest >= logits.shape[-1]:
            raise RequestError(
                f"logit_bias has the token {shown(highest)}; this model's go from 0 to "
                f"{logits.shape[-1] - 1}."
            )
        return logits.at[:, mx.array(list(logit_bias))].add(values)

    return add


def _repetition(penalty: float, size: int, tokens: mx.array, logits: mx.array) -> mx.array:
    recent = tokens[-size:]
    found = logits[:, recent]
    return _with(logits, recent, mx.where(found < 0, found * penalty, found / penalty))


def _presence(penalty: float, size: int, tokens: mx.array, logits: mx.array) -> mx.array:
    recent = tokens[-size:]
    return _with(logits, recent, logits[:, recent] - penalty)


def _frequency(penalty: float, size: int, tokens: mx.array, logits: mx.array) -> mx.array:
    return logits.at[:, tokens[-size:]].subtract(penalty)


def _with(logits: mx.array, tokens: mx.array, values: mx.array) -> mx.array:
    """Return logits with new values for some tokens; a token that occurs twice has its value twice."""
    changed = mx.array(logits)
    changed[:, tokens] = values
    return changed
