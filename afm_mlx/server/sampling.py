"""The sampler and the logits processors of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from afm_mlx.engine.logits_processors import make_logits_processors
from afm_mlx.engine.request import LogitsProcessor, Sampler
from afm_mlx.engine.samplers import make_sampler

if TYPE_CHECKING:
    from afm_mlx.server.generation import Ask
    from afm_mlx.server.served_model import ServedModel


def sampler(ask: Ask, served: ServedModel) -> Sampler | None:
    """The sampler that a request asks for, or the server's options; None for the most likely token.

    Raises:
        RequestError: for a value that can't be used.
    """
    options = served.options
    temperature = options.temperature if ask.temperature is None else ask.temperature
    if temperature == 0 or ask.top_p == 0:  # the APIs' 0 keeps one token, the samplers' all
        return None
    top_k = options.top_k if ask.top_k is None else ask.top_k
    return make_sampler(
        temperature,
        options.top_p if ask.top_p is None else ask.top_p,
        options.min_p if ask.min_p is None else ask.min_p,
        top_k=0 if top_k >= served.vocab_size else top_k,  # keeps all either way
    )


def logits_processors(ask: Ask, prompt: Sequence[int]) -> list[LogitsProcessor]:
    """The processors of one choice, which count its tokens.

    Frequency and presence are those in the answer, as OpenAI's API has them; repetition looks at the prompt,
    too.

    Raises:
        RequestError: for a value that can't be used.
    """
    whole = make_logits_processors(
        ask.logit_bias or None,
        repetition_penalty=ask.repetition_penalty or None,
        repetition_context_size=None,
    )
    of_answer = make_logits_processors(
        presence_penalty=ask.presence_penalty or None,
        presence_context_size=None,
        frequency_penalty=ask.frequency_penalty or None,
        frequency_context_size=None,
    )
    return [*whole, _OfAnswer(len(prompt), of_answer)] if of_answer else whole


class _OfAnswer:
    """Hands processors the tokens of the answer alone.

    Args:
        start: number of the prompt's tokens.
        processors: they count the tokens that they are given.
    """

    def __init__(self, start: int, processors: Sequence[LogitsProcessor]):
        self._start, self._processors = start, processors

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        answer = tokens[self._start :]
        if answer.shape[0]:
            for processor in self._processors:
                logits = processor(answer, logits)
        return logits
