"""The shortest text that brings an unfinished answer to an end that its constraint allows.

A search from byte to byte. Of all texts with as many bytes, those that allow the same next bytes, and have as
many bytes that the grammar forced, count as one: they are at the same place. Places with more forced bytes come
first, because they are further on. Of the next bytes, the first few in the order of `_PREFERRED` are tried.

Where too much is open for that, it is closed directly, one string or bracket after the other. Such a text need
not be the shortest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from llguidance import LLTokenizer

from afm_mlx.guidance.matcher import Matcher, fill_masks
from afm_mlx.guidance.vocabulary import byte_tokens

MAX_BYTES = 4096
_MAX_BRANCHES = 30_000  # in all: a second, for which other rows wait
_PLACES = 32  # that are followed from texts of one length
_BRANCHES = 6
_PREFERRED = b'"}]),:. \n01etrufalsn-{[(aA'


@dataclass(frozen=True)
class _Text:
    """A text that may become the completion: tokens, bytes, how many of these were forced, and the state."""

    tokens: tuple[int, ...]
    length: int
    forced: int
    state: Matcher

    def then(self, tokens: Sequence[int], forced: bool = False) -> _Text:
        """This text and these tokens, whose state is this one's from now on."""
        more = len(self.state.tokenizer.decode_bytes(list(tokens)))
        for token in tokens:
            self.state.accept(token)
        whole = (*self.tokens, *tokens)
        return _Text(whole, self.length + more, self.forced + forced * more, self.state)


def shortest_completion(matcher: Matcher) -> list[int] | None:
    """The tokens of the text that is missing: the shortest one, unless many things are open.

    None when none was found: it would be longer than `MAX_BYTES`, or the grammar asks for what is hard to come
    upon, such as a word in the middle of a string.

    Args:
        matcher: the state of the answer so far; it stays as it is.
    """
    tokens = _tokens_of_one_byte(matcher.tokenizer)
    direct = _direct_completion(matcher, tokens)
    found = _searched_completion(matcher, tokens, _MAX_BRANCHES // (1 if direct is None else 20))
    return direct if found is None else found


def _direct_completion(matcher: Matcher, tokens: dict[bytes, int]) -> list[int] | None:
    """The tokens of a text that closes what is open, one thing after the other; None when that finds no end."""
    text = _Text((), 0, 0, matcher.copy())
    while text.length < MAX_BYTES and not text.state.is_complete:
        forced = text.state.forced()
        if not forced:
            mask = fill_masks([text.state])
            allowed = np.unpackbits(mask[0].view(np.uint8), bitorder="little")
            choices = [byte for byte, token in tokens.items() if allowed[token]]
            if not choices:
                return None
            # A bracket closes; where two kinds are allowed, they are letters of a string.
            closing = [byte for byte in (b"}", b"]") if byte in choices]
            forced = [tokens[closing[0] if len(closing) == 1 else choices[0]]]
        text = text.then(forced)
    return list(text.tokens) if text.state.is_complete else None


def _searched_completion(
    matcher: Matcher, tokens: dict[bytes, int], max_branches: int
) -> list[int] | None:
    waiting: dict[int, list[_Text]] = defaultdict(list)
    waiting[0] = [_Text((), 0, 0, matcher.copy())]
    n_branches = 0
    for length in range(MAX_BYTES):
        places: set[tuple[bytes, int]] = set()
        for known in sorted(waiting.pop(length, ()), key=lambda known: -known.forced):
            if known.state.is_complete:
                return list(known.tokens)
            if forced := known.state.forced():
                longer = known.then(forced, forced=True)
                waiting[longer.length].append(longer)
                continue
            mask = fill_masks([known.state])
            place = mask.tobytes(), known.forced
            if place in places or len(places) == _PLACES:
                continue
            places.add(place)
            allowed = np.unpackbits(mask[0].view(np.uint8), bitorder="little")
            for token in [token for token in tokens.values() if allowed[token]][:_BRANCHES]:
                n_branches += 1
                branch = replace(known, state=known.state.copy())
                waiting[length + 1].append(branch.then([token]))
        if not waiting or n_branches > max_branches:
            return None
    return None


@lru_cache(maxsize=4)
def _tokens_of_one_byte(tokenizer: LLTokenizer) -> dict[bytes, int]:
    """Tokens of one byte by that byte, the preferred ones first."""
    found = byte_tokens(tokenizer)
    order = {byte: i for i, byte in enumerate(_PREFERRED)}
    by_preference = sorted(found, key=lambda byte: (order.get(byte[0], 256), byte))
    return {byte: found[byte] for byte in by_preference}
