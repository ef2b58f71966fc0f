"""Answers that models of random weights are made to give, by our engine and by mlx-lm's server alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx


class FollowsText:
    """A logits processor that prefers the tokens of a text, where a constraint allows them, and then the end.

    Args:
        tokenizer: of transformers, or a wrapper of one.
        text: the answer, in which names of control tokens are these.
        prompt_size: number of the prompt's tokens.
        end: a token of the text that a budget may cause to come early; the text goes on behind it.
    """

    def __init__(self, tokenizer: Any, text: str, prompt_size: int, end: int | None = None) -> None:
        self._tokenizer, self._text, self._start, self._end = tokenizer, text, prompt_size, end
        self._ids = self._encoded(text)

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        token = self._next(tokens[self._start :].tolist())
        return mx.where(mx.arange(logits.shape[-1]) == token, logits + 1000.0, logits)

    def _next(self, answer: list[int]) -> int:
        rest = self._ids[len(answer) :]
        if self._end in answer and self._end in self._ids:
            behind = len(answer) - answer.index(self._end)
            rest = self._ids[self._ids.index(self._end) + behind :]
        elif answer != self._ids[: len(answer)]:  # a constraint has forced other tokens
            said = self._tokenizer.decode(answer)
            if self._text.startswith(said):
                rest = self._encoded(self._text[len(said) :])
        return int(rest[0] if rest else self._tokenizer.eos_token_id)

    def _encoded(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


MARKER = re.compile(r"script (\d+)\.")
"""In a prompt, the last one says which script is followed."""


class FollowsMarker:
    """A logits processor that follows the script that the prompt names; without one it changes nothing.

    Args:
        tokenizer: as of `FollowsText`.
        scripts: the texts.
        prompt: the prompt's tokens; pass None for the tokens of the first call.
    """

    def __init__(
        self, tokenizer: Any, scripts: Sequence[str], prompt: Sequence[int] | None = None
    ) -> None:
        self._tokenizer, self._scripts, self._prompt = tokenizer, scripts, prompt
        self._follow: Callable[[mx.array, mx.array], mx.array] | None = None
        self._has_begun = False

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        if not self._has_begun:
            self._has_begun = True
            prompt = tokens.tolist() if self._prompt is None else list(self._prompt)
            if named := MARKER.findall(self._tokenizer.decode(prompt)):
                text = self._scripts[int(named[-1])]
                self._follow = FollowsText(self._tokenizer, text, len(prompt))
        return logits if self._follow is None else self._follow(tokens, logits)
