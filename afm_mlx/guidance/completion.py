"""The shortest text that brings an unfinished answer to an end that its constraint allows.

A search from byte to byte. Of all texts with as many bytes, those that allow the same next bytes, and have as
many bytes that the grammar forced, count as one: they are at the same place. Places with more forced bytes come
first, because they are further on. Of the next bytes, the first few in the order of `_PREFERRED` are tried.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from llguidance import LLTokenizer

from afm_mlx.guidance.matcher import Matcher, fill_masks

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
    """The tokens of the text that is missing.

    None when none was found: it would be longer than `MAX_BYTES`, or the grammar asks for what is hard to come
    upon, such as a word in the middle of a string.

    Args:
        matcher: the state of the answer so far; it stays as it is.
    """
    tokens = _tokens_of_one_byte(matcher.tokenizer)
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
            for token in [token for token in tokens if allowed[token]][:_BRANCHES]:
                n_branches += 1
                branch = replace(known, state=known.state.copy())
                waiting[length + 1].append(branch.then([token]))
        if not waiting or n_branches > _MAX_BRANCHES:
            return None
    return None


@lru_cache(maxsize=4)
def _tokens_of_one_byte(tokenizer: LLTokenizer) -> list[int]:
    """Tokens of one byte, the preferred ones first."""
    found: dict[bytes, int] = {}
    for token in range(tokenizer.vocab_size):
        if not tokenizer.is_special_token(token):
            text = tokenizer.decode_bytes([token])
            if len(text) == 1:
                found.setdefault(text, token)
    order = {byte: i for i, byte in enumerate(_PREFERRED)}
    return [found[byte] for byte in sorted(found, key=lambda byte: (order.get(byte[0], 256), byte))]
