"""The text that a grammar forces next, as tokens: `MAX_BYTES` of it at a time at most.

llguidance finds forced text, too, but it goes on until there is a choice: `a{1000}{1000}{1000}` takes seconds,
and a long word that is repeated a million times takes gigabytes, while every other row waits. So its own search
is switched off (`without_forcing`), and what is forced is read off the masks here: while all allowed tokens
begin with the shortest of them, that one is certain. The text so found is then encoded as a whole, because its
tokens are mostly single bytes. Tokens at its end that a longer one could replace are left to the model.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from afm_mlx.guidance.vocabulary import token_texts

MAX_BYTES = 256
"""Bytes of forced text that are looked for at once, each with a mask of its own."""
_NO_FORCING = '%llguidance {"no_forcing": true}\n'


@dataclass(frozen=True)
class _Step:
    """A token that is certain.

    Args:
        token: its id.
        text: its bytes; none of a control token.
        reach: bytes of the longest token that is allowed in its place.
    """

    token: int
    text: bytes
    reach: int


def without_forcing(grammar: str) -> str:
    """The same grammar, for a matcher that looks for no forced text of its own."""
    if grammar[:1] != "{":
        return _NO_FORCING + grammar
    parts = json.loads(grammar)
    first = parts["grammars"][0]
    first["lark_grammar"] = _NO_FORCING + first["lark_grammar"]
    return json.dumps(parts)


def forced_tokens(matcher: LLMatcher, tokenizer: LLTokenizer, last: int | None) -> list[int]:
    """The tokens that a grammar forces next; often none.

    Args:
        matcher: the state of the answer, of a grammar `without_forcing`; it stays as it is.
        tokenizer: the matcher's.
        last: the answer's last token; None at its beginning.
    """
    texts = token_texts(tokenizer)
    steps = _certain(matcher, texts)
    tokens: list[int] = []
    run: list[_Step] = []
    for step in steps:
        if step.text:
            run.append(step)
            continue
        tokens += _encoded(run, tokenizer, texts, last)
        tokens.append(step.token)
        run, last = [], step.token
    return tokens + _encoded(run, tokenizer, texts, last)


def _certain(matcher: LLMatcher, texts: list[bytes]) -> list[_Step]:
    """The shortest tokens, each of which is certain behind those before it."""
    mask = np.zeros(-(-len(texts) // 32), np.uint32)
    address, size = mask.ctypes.data, mask.nbytes
    steps: list[_Step] = []
    length = 0
    while length < MAX_BYTES and not (matcher.is_stopped() or matcher.is_accepting()):
        matcher.unsafe_compute_mask_ptr(address, size)
        step = None if matcher.is_error() else _certain_step(mask, texts)
        if step is None or not matcher.consume_token(step.token):
            break
        steps.append(step)
        length += max(1, len(step.text))
    if steps:
        matcher.rollback(len(steps))
    return steps


def _certain_step(mask: np.ndarray, texts: list[bytes]) -> _Step | None:
    """The shortest of the allowed tokens, if all begin with it; a control token, if it is the only one."""
    shortest, reach = -1, 0
    for word in np.flatnonzero(mask):  # lazily: most often, the second token ends it
        bits = int(mask[word])
        while bits:
            token = 32 * int(word) + (bits & -bits).bit_length() - 1
            bits &= bits - 1
            text, known = texts[token], texts[shortest]
            if shortest < 0 or (text and known.startswith(text)):
                shortest = token
            elif not (known and text.startswith(known)):
                return None
            reach = max(reach, len(text))
    return None if shortest < 0 else _Step(shortest, texts[shortest], reach)


def _encoded(
    run: Sequence[_Step], tokenizer: LLTokenizer, texts: list[bytes], last: int | None
) -> list[int]:
    """The tokens of a text, but for those at its end that a longer token could replace."""
    text = b"".join(step.text for step in run)
    at = sure = 0
    for step in run:
        if at + step.reach > len(text):
            break
        at += len(step.text)
        sure = at
    tokens = _tokens(text, tokenizer)
    if last is not None and (before := texts[last]):
        joined = _tokens(before + text, tokenizer)
        tokens = joined[1:] if joined[:1] == [last] else tokens
    ends = list(accumulate(len(texts[token]) for token in tokens))
    return tokens[: bisect_right(ends, sure)]


def _tokens(text: bytes, tokenizer: LLTokenizer) -> list[int]:
    """The tokens of a text, which may end within a character; then only that is encoded as bytes."""
    try:
        text.decode()
        end = len(text)
    except UnicodeDecodeError as error:
        end = error.start
    return tokenizer.tokenize_bytes(text[:end]) + tokenizer.tokenize_bytes(text[end:])
