"""What rows tell when tokens are known: a drawn one, several that were guessed, those that are forced."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.engine.request import Response
from afm_mlx.engine.row import Row
from afm_mlx.engine.sampling import no_token
from afm_mlx.engine.speculation.draft import Draft
from afm_mlx.engine.speculation.drafting import Drafting
from afm_mlx.engine.speculation.verification import Drawn
from afm_mlx.errors import RequestError


class RowResponses:
    """Has rows take their next tokens, and makes the responses.

    Args:
        tokenizer: says which tokens end an answer.
        model: has as many logits as its config says.
        drafting: the guesses for the rows; None for none.
    """

    def __init__(self, tokenizer: Any, model: nn.Module, drafting: Drafting | None):
        self._tokenizer, self._model, self._drafting = tokenizer, model, drafting

    def to_token(
        self, row: Row, token: int, peak: float, logprobs: mx.array | None
    ) -> list[Response]:
        """The responses of a row's next token, and of those that its constraint forces behind it.

        Args:
            row: the row.
            token: id of the token that was drawn.
            peak: the largest logit that it was drawn from; no number where no token could be.
            logprobs: (vocab_size,), None where the row asked for none.
        """
        row.report(len(row.request.prompt))
        if row.error is None:
            row.error = _refusal(row, token, peak)
            if row.error is not None:
                return [Response(row.id, -1, row.rest(), None, "error", row.error)]
        text, reason = row.accept(token, self._tokenizer.eos_token_ids)
        error = row.error if reason == "error" else None
        responses = [Response(row.id, token, text, logprobs, reason, error)]
        if reason is None:
            responses += self.to_forced_tokens(row)
        if self._drafting is not None and responses[-1].finish_reason is not None:
            responses[-1].guesses = self._drafting.counts(row)
        return responses

    def to_draft(self, draft: Draft, drawn: Mapping[int, Drawn]) -> tuple[list[Response], int]:
        """Take a row's next tokens, up to the first that differs from what the row was fed.

        Args:
            draft: what the row was fed.
            drawn: the tokens that were drawn behind it, see `verified`.

        Returns:
            The responses; and how many of the fed tokens stand.
        """
        assert self._drafting is not None
        row, kept, right = draft.row, 1, 0
        responses: list[Response] = []
        while True:
            if row.known:
                following = row.known.pop(0)
            else:
                at = drawn[kept - 1]
                new = self.to_token(row, at.token, at.peak, at.logprobs)
                new[0].from_draft = kept in draft.proposed and draft.fed[kept] == new[0].token
                right += new[0].from_draft
                responses += new
                if new[-1].finish_reason is not None:
                    break
                following = at.token
            if kept == len(draft.fed) or draft.fed[kept] != following:
                break
            kept += 1
        row.settle(kept)
        self._drafting.count(draft, right)
        return responses, kept

    def to_forced_tokens(self, row: Row) -> list[Response]:
        """The responses of tokens that the row's constraint forces; the row is still to be fed them."""
        responses = []
        for token, text, reason in row.force(self._tokenizer.eos_token_ids):
            error = row.error if reason == "error" else None
            logprobs = None
            if row.request.logprobs:  # it had no alternative
                vocab_size = self._model.args.vocab_size
                logprobs = mx.where(mx.arange(vocab_size) == token, 0.0, -math.inf)
            responses.append(Response(row.id, token, text, logprobs, reason, error, is_forced=True))
        return responses


def _refusal(row: Row, token: int, peak: float) -> Exception | None:
    """The error of a row that got no token: none could be chosen, or its sampler's is none."""
    if not math.isfinite(peak):
        return no_token(peak, row.request)
    if row.vocab_size is not None and not 0 <= token < row.vocab_size:
        return RequestError(
            f"The sampler returned the token {token}; this model's tokens go from 0 to {row.vocab_size - 1}."
        )
    return None
