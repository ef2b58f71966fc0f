"""A cache that already holds the beginning of a prompt.

A prompt is compared with the tokens that the cache holds, token by token. What both have in common stays
in the cache, the rest is taken back and computed anew. So a cached run is fed the very tokens that a run
from scratch is fed, even where an answer is not tokenized as it was generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any


def tokens_in(cache: Sequence[Any]) -> int:
    """Tokens that a cache of one row has seen; 0 when it doesn't say."""
    lengths = getattr(cache[0], "lengths", None)
    return lengths[0] if lengths else int(getattr(cache[0], "offset", 0))


def keep_common(cache: Sequence[Any], held: Sequence[int], prompt: Sequence[int]) -> int | None:
    """Trim a cache to what it shares with a prompt.

    Args:
        cache: of one row, trimmed in place.
        held: the tokens in it.
        prompt: all tokens of the next prompt. The last one always remains to be fed.

    Returns:
        How many tokens of the prompt the cache now holds; None when it can't be trimmed, and a new one
        is needed.
    """
    pairs = zip(held, prompt[:-1], strict=False)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    surplus = len(held) - common
    if surplus:
        if not all(layer.is_trimmable() for layer in cache):
            return None
        for layer in cache:
            layer.trim(surplus)
    return common
