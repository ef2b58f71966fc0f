"""The bytes of tokens, as log-probabilities name them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from afm_mlx.tokenizer.detokenizer import NEWLINE, SPACE, PieceKind
from afm_mlx.tokenizer.tokenizer import AFMTokenizer

LEAST_LOGPROB = -9999.0
"""Of a token that could not come: JSON has no -infinity, and OpenAI's API writes this number."""


@dataclass(frozen=True)
class TokenLogprob:
    """A token of an answer, and how likely it was.

    Args:
        token: its id.
        bytes: what it adds to the text; a part of a character's UTF-8, maybe.
        logprob: logarithm of its probability, `LEAST_LOGPROB` at least; 0 where a constraint allowed no other.
        top: the most likely tokens at its place, the likeliest first.
    """

    token: int
    bytes: bytes
    logprob: float
    top: Sequence[TokenLogprob] = ()

    @property
    def text(self) -> str:
        """The token as text; bytes that are no UTF-8 are replaced."""
        return self.bytes.decode("utf-8", "replace")


class TokenTexts:
    """Looks tokens up.

    Args:
        tokenizer: ours, or one of mlx-lm's.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._is_ours = type(tokenizer) is AFMTokenizer
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token: int) -> bytes:
        """What a token adds to a text; nothing for ids that no text has."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._bytes_of(token)
        return found

    def _bytes_of(self, token: int) -> bytes:
        if not self._is_ours:
            return self._tokenizer.decode([token]).encode()
        if token >= len(self._tokenizer):  # embeddings may have more rows than there are tokens
            return b""
        piece = self._tokenizer.piece(token)
        if piece.kind is PieceKind.BYTE:
            return bytes([piece.byte])
        return piece.text.replace(SPACE, " ").replace(NEWLINE, "\n").encode()

    def drops_space(self, token: int, is_constrained: bool) -> bool:
        """True if an answer that begins with a token loses the space that the token begins with."""
        if not self._is_ours or is_constrained or not self._tokenizer.spacing.dummy_prefix:
            return False
        return self.bytes_of(token)[:1] == b" "

    def logprob(self, token: int, logprobs: Any, top: int) -> TokenLogprob:
        """A token with its log-probability and the most likely ones beside it.

        Args:
            token: its id.
            logprobs: (vocab_size,) float32, evaluated; None where there was no other.
            top: number of most likely tokens.
        """
        if logprobs is None:
            return TokenLogprob(token, self.bytes_of(token), 0.0)
        values = np.maximum(np.array(logprobs), LEAST_LOGPROB)
        likeliest: Any = ()
        if top:
            likeliest = np.argpartition(-values, min(top, values.size - 1))[:top]
            likeliest = likeliest[np.argsort(-values[likeliest], kind="stable")]
        others = [TokenLogprob(int(t), self.bytes_of(int(t)), float(values[t])) for t in likeliest]
        return TokenLogprob(token, self.bytes_of(token), float(values[token]), others)
