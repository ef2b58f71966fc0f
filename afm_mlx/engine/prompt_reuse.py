"""Caches that already hold the beginning of the next prompt.

A prompt is compared with the tokens that a cache holds, token by token. What both begin with stays in the
cache; the rest is taken back and computed anew. So a run that reuses a cache is fed the very tokens that a run
from scratch is fed, even where an answer is not tokenized as it was generated.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from afm_mlx.model.kv_cache import NoKVCache


@dataclass
class Continuation:
    """A prompt that a cache holds the beginning of.

    Args:
        cache: keys and values of that beginning, for `stream_generate` or a `Request` to go on with.
        rest: tokens of the prompt that are still to be fed, at least one.
        answer: tokens that were generated after the prompt; whoever generates them appends them.
    """

    cache: list[Any]
    rest: list[int]
    answer: list[int] = field(default_factory=list)


class PromptCaches:
    """The cache of the last prompt of each adapter, for the next prompt to go on with.

    Each adapter has a cache of its own: keys and values that one has computed are wrong for another.

    Args:
        new_cache: makes an empty cache of one row.
    """

    def __init__(self, new_cache: Callable[[], list[Any]]):
        self._new_cache = new_cache
        self._kept: dict[Hashable, tuple[list[Any], list[int]]] = {}  # caches, and tokens in them

    def keep(self, cache: list[Any], tokens: Sequence[int], adapter: Hashable = None) -> None:
        """Keep a cache for the adapter's next prompt, if it is known to hold these tokens and no others."""
        if tokens_in(cache) == len(tokens):
            self._kept[adapter] = cache, list(tokens)

    @contextmanager
    def continuing(self, prompt: Sequence[int], adapter: Hashable = None) -> Iterator[Continuation]:
        """Lend the cache that holds most of a prompt, and keep it with what was fed to it.

        It is an empty cache where the adapter has none, or has one that can't be trimmed: a sliding window that
        has forgotten tokens.

        While a cache is lent, nobody else gets it. After an error it is kept with as many tokens as it came to
        hold. After Ctrl-C, which may have come while it was written, it is kept only if it holds what it held.

        Args:
            prompt: all tokens, those that the cache may hold included; at least one.
            adapter: name of the adapter that the prompt is run with, or whatever tells it from others; None for
                none.
        """
        cache, reused = self._take(prompt, adapter)
        run = Continuation(cache, list(prompt[reused:]))
        try:
            yield run
        except BaseException as error:
            if isinstance(error, Exception) or tokens_in(cache) == reused:
                self._keep_fed(prompt, run, adapter)
            raise
        self._keep_fed(prompt, run, adapter)

    def _take(self, prompt: Sequence[int], adapter: Hashable) -> tuple[list[Any], int]:
        """Return a cache, and how many tokens of the prompt it holds; the last one always remains to be fed."""
        cache, held = self._kept.pop(adapter, ([], []))
        pairs = zip(held, prompt[:-1], strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        surplus = len(held) - common
        if not cache or (surplus and not all(entry.is_trimmable() for entry in cache)):
            return self._new_cache(), 0
        for entry in cache if surplus else ():
            entry.trim(surplus)
        return cache, common

    def _keep_fed(self, prompt: Sequence[int], run: Continuation, adapter: Hashable) -> None:
        # The last token of an answer was not fed, as a rule.
        self.keep(run.cache, [*prompt, *run.answer][: tokens_in(run.cache)], adapter)


def tokens_in(cache: Sequence[Any]) -> int | None:
    """Tokens that a cache of one row has seen; None where its entries don't say, or say different things.

    Recurrent layers of mlx-lm's zoo don't say, and can't take tokens back.
    """
    counts = {_tokens_in(entry) for entry in cache if not isinstance(entry, NoKVCache)}
    return counts.pop() if len(counts) == 1 else None


def _tokens_in(entry: Any) -> int | None:
    lengths = getattr(entry, "lengths", None)
    return lengths[0] if isinstance(lengths, list) else getattr(entry, "offset", None)
