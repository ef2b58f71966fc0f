"""The first prompt of a chat's tokens: all before the assistant's first answer, and the answer's start."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import numpy as np

from afm_mlx.tokenizer.protocol import Tokenizer

_MESSAGES = ({"role": "user", "content": "."},)


def first_prompt(tokens: Sequence[int] | np.ndarray, tokenizer: Tokenizer) -> int | None:
    """Return the number of tokens of a chat's first prompt; None if no answer starts in the tokens.

    A prompt for the first answer is a whole first prompt. Of a longer conversation it is the part that was the
    prompt when the conversation began, so that its mask stays.
    """
    start = _answer_start(cast(Any, tokenizer))
    ids = np.asarray(tokens)
    if not start or len(ids) < len(start):
        return None
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(start))
    found = np.flatnonzero((windows == np.array(start)).all(axis=1))
    return int(found[0]) + len(start) if found.size else None


@lru_cache(maxsize=8)
def _answer_start(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that the chat template adds as the start of an answer."""
    if not tokenizer.has_chat_template:
        return ()
    apply: Any = tokenizer.apply_chat_template
    messages = [dict(message) for message in _MESSAGES]
    before, with_start = (
        list(apply(messages, add_generation_prompt=added, tokenize=True)) for added in (False, True)
    )
    return tuple(with_start[len(before) :])
