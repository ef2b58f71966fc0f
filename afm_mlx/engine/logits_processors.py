"""Biases and penalties on logits: `make_logits_processors`, with mlx-lm's arguments and meaning.

A processor maps the tokens so far, prompt and answer, and logits (rows, vocab_size) to other logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from afm_mlx.engine.request import LogitsProcessor
from afm_mlx.engine.samplers import INTEGER, REAL
from afm_mlx.errors import RequestError, shown

CONTEXT_SIZE = 20
"""mlx-lm's default: the newest tokens that a penalty looks at."""
LIMIT = 1e30
"""Largest bias and penalty: beyond it, logits would leave float32."""


def make_logits_processors(
    logit_bias: Mapping[int, float] | None = None,
    repetition_penalty: float | None = None,
    repetition_context_size: int | None = CONTEXT_SIZE,
    presence_penalty: float | None = None,
    presence_context_size: int | None = CONTEXT_SIZE,
    frequency_penalty: float | None = None,
    frequency_context_size: int | None = CONTEXT_SIZE,
) -> list[LogitsProcessor]:
    """Return the processors that the arguments ask for; no processor for None, and for a penalty of 0.

    Args:
        logit_bias: what is added to the logits of tokens, by their ids; -inf forbids one.
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
    for name, make, penalty, size in (
        ("repetition", _repetition, repetition_penalty, repetition_context_size),
        ("presence", _presence, presence_penalty, presence_context_size),
        ("frequency", _frequency, frequency_penalty, frequency_context_size),
    ):
        _check(name, penalty, size)
        if penalty:
            processors.append(make(float(penalty), int(size or 0)))
    return processors


def _check(name: str, penalty: Any, size: Any) -> None:
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


def _repetition(penalty: float, size: int) -> LogitsProcessor:
    def weaken(tokens: mx.array, logits: mx.array) -> mx.array:
        recent = tokens[-size:]
        found = logits[:, recent]
        return _with(logits, recent, mx.where(found < 0, found * penalty, found / penalty))

    return weaken


def _presence(penalty: float, size: int) -> LogitsProcessor:
    def weaken(tokens: mx.array, logits: mx.array) -> mx.array:
        recent = tokens[-size:]
        return _with(logits, recent, logits[:, recent] - penalty)

    return weaken


def _frequency(penalty: float, size: int) -> LogitsProcessor:
    def weaken(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits.at[:, tokens[-size:]].subtract(penalty)

    return weaken


def _with(logits: mx.array, tokens: mx.array, values: mx.array) -> mx.array:
    """Logits with new values of some tokens; where a token is there twice, so is its value."""
    changed = mx.array(logits)
    changed[:, tokens] = values
    return changed
