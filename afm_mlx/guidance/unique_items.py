"""Enforces `uniqueItems`: tokens that would finish an item that a list already has are forbidden.

A grammar forgets the items that it has seen, so this module follows them byte by byte. The grammar marks such
a list by an alternative behind its bracket that no answer has: a control character. The items of a marked
list are kept as values: 1 and 1.0 are equal, and the order of keys does not matter.

Forbidding the last byte of an item must not leave its text without an end. So each list has *dead texts*:
beginnings of an item that only items of the list could complete. They are found from an item's end backwards.
A finished item's text is dead; a beginning is dead if nothing but dead texts may follow. Once the empty text
is dead, there is no other item, so no comma may follow.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, permutations, product
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from afm_mlx.guidance.token_bytes import byte_tokens, token_texts

ALIKE = "\x01"
"""Marks a list whose items must differ, after its bracket; no answer has it."""
VARIED = "\x02"
"""The same for a list whose positions have different schemas."""
UTF8_BYTES = {bytes([i]) for i in range(0xF5) if i not in (0xC0, 0xC1)}
_UNMARKED = b"\x03"  # allowed behind a bracket in free text, where the marks are, too
_SEPARATOR = b", "
_FRACTION = re.compile(rb"\.(?:\d*[1-9])?(0*)$")
_NUMBER = re.compile(rb'"(?:[^"\\]|\\.)*"|(-?\d+(?:\.\d+)?)')  # or a string
_ORDERS = 24  # orders of an inner value's keys
_SPELT = 1_000  # bytes of further texts of an item
_ZEROED = 4  # numbers of an item, the last ones, at whose ends zeros are looked at
_ZEROS = b"000"  # as many as an item's value may get behind it, so that another digit has room


def identity(value: Any) -> Any:
    """A hashable that equal JSON values share: 1 and 1.0 are equal, 1 and true are not, keys have no order."""
    if isinstance(value, dict):
        return "object", frozenset((key, identity(inner)) for key, inner in value.items())
    if isinstance(value, list):
        return "list", tuple(map(identity, value))
    return type(value) if isinstance(value, bool) else None, value


def has_marks(grammar: str) -> bool:
    """True if a grammar may have lists whose items must differ."""
    return any(f"u{ord(mark):04x}" in grammar for mark in (ALIKE, VARIED))


@dataclass(frozen=True)
class OpenList:
    """An open list.

    Attributes:
        is_varied: True if its places have different schemas.
        items: the values of its finished items, as `identity` gives them.
        texts: the same as text.
        dead: beginnings of items that may not be reached; none begins with another.
        begin: the state where its last item begins.
        item: the text of an item so far, whole numbers in it without zeros at their end; None between items.
        due: what has to stand before the next item; between items.
        depth: open brackets in the item.
        is_text: True inside a string of the item.
        is_escaped: True behind a backslash in that string.
    """

    is_varied: bool
    items: frozenset[Any] = frozenset()
    texts: tuple[bytes, ...] = ()
    dead: frozenset[bytes] = frozenset()
    begin: State | None = None
    item: bytes | None = None
    due: bytes = b""
    depth: int = 0
    is_text: bool = False
    is_escaped: bool = False

    @property
    def is_bare(self) -> bool:
        """True if the item is a number or a word, which ends before a comma or bracket."""
        return self.item is not None and self.item[:1] not in (b'"', b"[", b"{")

    def then(self, byte: bytes) -> OpenList:
        """The list behind a byte of an item that this byte does not finish, or that it closes."""
        item = self.item or b""
        if self.is_text:
            is_escape = byte == b"\\" and not self.is_escaped
            is_text = self.is_escaped or byte != b'"'
            return replace(self, item=item + byte, is_text=is_text, is_escaped=is_escape)
        item = (_shortest(item) if byte in b",]}" else item) + byte
        depth = self.depth + (byte in b"[{") - (byte in b"]}")
        return replace(self, item=item, is_text=byte == b'"', depth=depth)

    @property
    def is_closed(self) -> bool:
        """True if the last byte closed the item: a string, a list or an object."""
        is_inside = self.item is None or self.is_bare or self.is_text or self.depth
        return not is_inside and (self.item or b"")[-1:] in (b'"', b"]", b"}")


@dataclass(frozen=True)
class State:
    """The open lists of an answer, the innermost last, and llguidance's state. Never changed."""

    matcher: LLMatcher
    tokenizer: LLTokenizer
    lists: tuple[OpenList, ...] = ()

    def then(self, text: bytes) -> State:
        """The state behind further bytes, which have to be allowed."""
        state = self
        for i in range(len(text)):
            state = state._behind(text[i : i + 1])
        return state

    def along(self, text: bytes) -> list[State]:
        """The states before a text, and behind each of its bytes, as far as the grammar allows it."""
        tokens = byte_tokens(self.tokenizer)
        allowed = self.matcher.validate_tokens([tokens[bytes([byte])] for byte in text])
        states = [self]
        for i in range(allowed):
            states.append(states[-1]._behind(text[i : i + 1]))
        return states

    def _behind(self, byte: bytes) -> State:
        matcher = self.matcher.deep_copy()
        matcher.consume_token(byte_tokens(self.tokenizer)[byte])
        opened = byte == b"[" and not any(one.is_text for one in self.lists)
        lists = []
        for one in self.lists:
            if one.item is None and byte in b", ":
                lists.append(replace(one, due=one.due[1:]))
            elif one.item is None and byte != b"]":
                begin = replace(self, lists=())  # lists around it look at its items themselves
                one = replace(one, begin=begin, depth=0, is_text=False, is_escaped=False)
                lists.append((_renewed(one) if one.is_varied else one).then(byte))
            elif one.is_bare and byte in b",]":
                one = _finished(one, _shortest(one.item or b""))
                lists += [replace(one, due=b" ")] if byte == b"," else []
            elif one.item is not None:
                one = one.then(byte)
                lists.append(_finished(one, one.item or b"") if one.is_closed else one)
        mark = _mark(matcher, self.tokenizer) if opened else None
        if mark is not None:
            lists.append(OpenList(is_varied=mark == VARIED.encode()))
        return State(matcher, self.tokenizer, tuple(lists))

    def is_alive(self) -> bool:
        """True if anything may follow but zeros that leave a number as it is."""
        vocabulary = _vocabulary(self.tokenizer)
        mask = np.zeros(-(-self.tokenizer.vocab_size // 32), np.uint32)
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self.restrict(mask, is_further=False)
        if self.lists[0].item is None:
            _clear(mask, vocabulary.starting_with(b"]"))  # the list without any item
        item = self.lists[0].item or b""
        if self.lists[0].is_text or not item[-1:].isdigit():
            return bool(mask.any())
        further = b"0" if _FRACTION.search(item) or b"." in item.rpartition(b" ")[2] else b"."
        has_further = mask[vocabulary.zeros >> 5] >> (vocabulary.zeros & 31) & 1
        _clear(mask, vocabulary.zeros)
        if mask.any() or not has_further.any():
            return bool(mask.any())
        state = self.then(further)
        return state.then(b"0").is_alive() if further == b"." else state.is_alive()

    def restrict(self, mask: np.ndarray, is_further: bool = True) -> None:
        """Forbid the tokens that lead to an item that a list has already.

        Args:
            mask: the tokens that the grammar allows, as `fill_masks` gives them.
            is_further: True to follow tokens that go on behind an item to their end.
        """
        vocabulary = _vocabulary(self.tokenizer)
        _clear(mask, vocabulary.hidden)
        for one in self.lists:
            if one.is_varied and one.item is None and one.texts:
                if one.due:  # what is dead in the next place is known only there
                    following = vocabulary.starting_with(one.due)
                    _clear(
                        mask,
                        np.array(
                            [t for t in following if vocabulary.texts[t] != one.due], np.int64
                        ),
                    )
                else:
                    one = _renewed(replace(one, begin=replace(self, lists=())))
            for text in _forbidden(one):
                _clear(mask, vocabulary.starting_with(text))
            tokens = vocabulary.with_quote if one.is_text else vocabulary.with_end
            tokens = tokens[(mask[tokens >> 5] >> (tokens & 31)) & 1 > 0]
            ends = {int(t): end for t in tokens if (end := _end(one, vocabulary.texts[t]))}
            others = mask.copy()
            _clear(others, np.array(list(ends), np.int64))
            has_others = bool(others.any()) or not is_further
            wrong = [t for t, end in ends.items() if not _may_end(one, *end, has_others)]
            _clear(mask, np.array(wrong, np.int64))


def _may_end(one: OpenList, item: bytes | None, rest: bytes, has_others: bool) -> bool:
    """True if a token may finish an item, as `_end` gives it.

    Args:
        one: the item's list.
        item: its text.
        rest: what the token has behind it.
        has_others: True if the item's text so far may end in another way, so that nothing else dies with it.
    """
    if item is None or _value(item) in one.items:
        return False
    if rest[:1] != b",":
        return True
    following = rest[len(_SEPARATOR) :]
    if one.item is None:
        return False  # it is begun by the same token: another one does so in two steps
    if one.is_varied or following.count(b'"') > 1 or any(end in following for end in b",]}"):
        return not following
    dead = one.dead | _leaves(item) if has_others else _dead(one, item)
    return b"" not in dead and not any(following.startswith(text) for text in dead)


def _end(one: OpenList, text: bytes) -> tuple[bytes | None, bytes] | None:
    """Return the item that a token finishes and the token's bytes behind it; None if it finishes none.

    The item is None where the token leads to a dead text.
    """
    if one.item is None:
        if not text.startswith(one.due) or text[len(one.due) :][:1] in (b"", b"]"):
            return None
        text, one = text[len(one.due) :], replace(one, depth=0, is_text=False, is_escaped=False)
    for i in range(len(text)):
        byte = text[i : i + 1]
        if one.is_bare and byte in b",]":
            item = _shortest(one.item or b"")
            return None if item + byte in one.dead else item, text[i:]
        one = one.then(byte)
        if one.item in one.dead:
            return None, b""
        if one.is_closed:
            return one.item, text[i + 1 :]
    return None


def _forbidden(one: OpenList) -> Iterator[bytes]:
    """What may not follow, as the beginnings of texts."""
    if one.item is None:
        yield from (one.due + text if text else one.due[:1] for text in one.dead)
        return
    yield from (text[len(one.item) :] for text in one.dead if text.startswith(one.item))
    if not one.is_text and (found := _FRACTION.search(one.item)) and len(found[1]) >= len(_ZEROS):
        yield b"0"


def _finished(one: OpenList, item: bytes) -> OpenList:
    """A list with another item.

    Raises:
        ValueError: when it has an equal one already.
    """
    if _value(item) in one.items:
        raise ValueError("an item of a list comes twice")
    return replace(
        one,
        items=one.items | {_value(item)},
        texts=(*one.texts, item),
        dead=one.dead if one.is_varied else _dead(one, item),
        item=None,
        due=_SEPARATOR,
    )


def _renewed(one: OpenList) -> OpenList:
    """A list of varied places, with the dead texts of the place where an item begins now."""
    one = replace(one, dead=frozenset())
    for text in one.texts:
        one = replace(one, dead=_dead(one, text))
    return one


def _dead(one: OpenList, item: bytes) -> frozenset[bytes]:
    """The dead texts of a list once it has a further item."""
    assert one.begin is not None
    dead = _minimal(one.dead | _leaves(item))
    at = OpenList(is_varied=False, items=one.items | {_value(item)})
    begin = replace(one.begin, lists=(at,))
    paths = [begin.along(text) for text in _spellings(item)]
    found: frozenset[bytes] | None = None
    while dead != found:  # what only one spelling kept alive dies with it
        found = dead
        for states in paths:
            dead = _with_beginnings(dead, states, 1 if one.is_varied else 0)
    return dead


def _with_beginnings(
    dead: frozenset[bytes], states: list[State], shortest: int
) -> frozenset[bytes]:
    """Dead texts and the beginnings of another text, of `shortest` bytes at least, that die with them."""
    for state in states[: shortest - 1 if shortest else None : -1]:
        own, *inner = state.lists
        text = own.item or b""
        if any(text.startswith(known) for known in dead):
            continue
        if replace(state, lists=(replace(own, dead=dead), *inner)).is_alive():
            break
        dead = _minimal(dead | {text})
    return dead


def _spellings(item: bytes) -> list[bytes]:
    """An item's texts up to where they may end: zeros behind its numbers, its keys in any order."""
    found: list[bytes] = []
    left = _SPELT
    for text in _orders(json.loads(item, parse_int=_Number, parse_float=_Number)):
        left -= len(text)
        if found and left < 0:
            break
        found.append(text[:-1] if text[:1] in b'"[{' else text)
        numbers = [match for match in _NUMBER.finditer(text) if match[1]]
        for match in numbers[-_ZEROED:]:
            left -= match.end()
            if left > 0:
                zeros = _ZEROS if b"." in match[1] else b"." + _ZEROS
                found.append(text[: match.end()] + zeros)
    return found


class _Number(str):
    """A number as it is written."""


def _orders(value: Any) -> Iterator[bytes]:
    """The texts of a value, in each order of its objects' keys."""
    if isinstance(value, _Number):
        yield value.encode()
    elif isinstance(value, dict):
        for pairs in permutations(value.items()):
            keys = [json.dumps(key, ensure_ascii=False).encode() for key, _ in pairs]
            for inner in product(*(islice(_orders(one), _ORDERS) for _, one in pairs)):
                yield (
                    b"{"
                    + b", ".join(b"%b: %b" % pair for pair in zip(keys, inner, strict=True))
                    + b"}"
                )
    elif isinstance(value, list):
        for inner in product(*(islice(_orders(one), _ORDERS) for one in value)):
            yield b"[" + b", ".join(inner) + b"]"
    else:
        yield json.dumps(value, ensure_ascii=False).encode()


def _leaves(item: bytes) -> frozenset[bytes]:
    """The texts that finish an item."""
    is_bare = item[:1] not in (b'"', b"[", b"{")
    return frozenset(item + end for end in (b",", b"]")) if is_bare else frozenset({item})


def _shortest(item: bytes) -> bytes:
    """An item whose last number, if it ends in one, has no zeros at its end."""
    found = _FRACTION.search(item)
    shorter = item if found is None else item[: found.start(1)]
    return shorter.removesuffix(b".")


def _minimal(texts: frozenset[bytes]) -> frozenset[bytes]:
    """Texts without those that begin with another."""
    kept: list[bytes] = []
    for text in sorted(texts):
        if not kept or not text.startswith(kept[-1]):
            kept.append(text)
    return frozenset(kept)


def _value(text: bytes) -> Any:
    return identity(json.loads(text))


def _mark(matcher: LLMatcher, tokenizer: LLTokenizer) -> bytes | None:
    """The mark of the list that has just been opened; None when it has none."""
    tokens = byte_tokens(tokenizer)
    if matcher.validate_tokens([tokens[_UNMARKED]]):
        return None
    marks = (ALIKE.encode(), VARIED.encode())
    return next((mark for mark in marks[::-1] if matcher.validate_tokens([tokens[mark]])), None)


class _Vocabulary:
    """The tokens of a tokenizer by what is in them.

    Attributes:
        texts: their bytes.
        hidden: those that have marks.
        with_quote: those that may end a string.
        with_end: those that may end any item.
        zeros: tokens made of zeros and points alone.
    """

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self.texts = token_texts(tokenizer)
        self.hidden = self._having(ALIKE.encode(), VARIED.encode())
        self.with_quote = self._having(b'"')
        self.with_end = self._having(b'"', b"]", b"}", b",")
        zeros = [i for i, text in enumerate(self.texts) if text and not text.strip(b".0")]
        self.zeros = np.array(zeros, np.int64)
        self._order = sorted(range(len(self.texts)), key=self.texts.__getitem__)
        self._sorted = [self.texts[token] for token in self._order]

    def _having(self, *parts: bytes) -> np.ndarray:
        found = [i for i, text in enumerate(self.texts) if any(part in text for part in parts)]
        return np.array(found, np.int64)

    def starting_with(self, text: bytes) -> np.ndarray:
        """The tokens that begin with a text."""
        first = bisect_left(self._sorted, text)
        end = first
        while end < len(self._sorted) and self._sorted[end].startswith(text):
            end += 1
        return np.array(self._order[first:end], np.int64)


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: LLTokenizer) -> _Vocabulary:
    return _Vocabulary(tokenizer)


def _clear(mask: np.ndarray, tokens: np.ndarray) -> None:
    np.bitwise_and.at(mask, tokens >> 5, ~(np.uint32(1) << (tokens & 31).astype(np.uint32)))
