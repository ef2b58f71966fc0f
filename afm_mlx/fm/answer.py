"""What is known of an answer besides its text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from afm_mlx.engine.request import Response
from afm_mlx.errors import shown


@dataclass(frozen=True)
class TokenLogprob:
    """A token of an answer, and how likely it was.

    Args:
        token: its id.
        text: its piece of the vocabulary.
        logprob: logarithm of its probability; 0 where a schema allowed no other.
        top: the most likely tokens at its place, as (id, piece, log-probability), the likeliest first.
    """

    token: int
    text: str
    logprob: float
    top: list[tuple[int, str, float]] = field(default_factory=list)


@dataclass
class Answer:
    """What a model generated after one prompt.

    Args:
        text: all of it, calls of tools included.
        prompt_tokens: tokens of the whole conversation before it.
        computed_tokens: those of them that were computed anew; the others were known from turns before, or from
            other sessions.
        tokens: ids of its tokens.
        finish_reason: "stop" at its own end or a stop string, "length" at `maximum_response_tokens`.
        logprobs: of each token; empty when they were not asked for.
    """

    text: str = ""
    prompt_tokens: int = 0
    computed_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def take(self, response: Response, tokenizer: Any, top: int | None) -> None:
        """Add a response of the engine.

        Args:
            response: the next one.
            tokenizer: has the vocabulary's pieces.
            top: number of most likely tokens to keep for each; None for no log-probabilities at all.
        """
        self.text += response.text
        self.computed_tokens = self.prompt_tokens - response.cached_tokens
        self.finish_reason = response.finish_reason
        if response.token < 0:
            return
        self.tokens.append(response.token)
        if top is not None:
            self.logprobs.append(_logprob(response, tokenizer, top))


def check_logprobs(top: Any) -> None:
    """Raise `ValueError` for what is no number of most likely tokens, see `Answer.take`."""
    if top is not None and (type(top) is not int or top < 0):
        raise ValueError(f"logprobs is {shown(top)}; allowed are 0 and more, and None for none.")


def _logprob(response: Response, tokenizer: Any, top: int) -> TokenLogprob:
    piece = tokenizer.convert_ids_to_tokens
    token = response.token
    if response.logprobs is None:
        return TokenLogprob(token, piece(token), 0.0)
    values = np.array(response.logprobs)
    likeliest = np.argpartition(-values, min(top, values.size - 1))[:top]
    likeliest = likeliest[np.argsort(-values[likeliest], kind="stable")]
    found = [(int(t), piece(int(t)), float(values[t])) for t in likeliest]
    return TokenLogprob(token, piece(token), float(values[token]), found)
