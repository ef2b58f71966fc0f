"""Enforces `uniqueItems`: forbids tokens that would finish an item that a list already has.

A grammar forgets the items that it has seen, so they are followed byte by byte here. The grammar marks such a
list by an alternative after its bracket that no answer has: a control character. Numbers and constants in such
grammars mostly have one text for each value; 0.5 and 0.50, or objects that differ in the order of their keys
only, are found equal at their end.

Forbidding the last byte of an item must not leave a text without an end. So each list has *dead texts*:
beginnings of an item that only items of the list could complete. They are found from an item's end backwards: a
finished item's text is dead; a beginning is dead if nothing but dead texts may follow. Once the empty text is
dead, there is no other item, so no comma may follow.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from afm_mlx.guidance.token_bytes import byte_tokens, token_texts

ALIKE = "\x01"  # marks a list whose items must differ, after its bracket; no answer has it
VARIED = "\x02"  # the same for a list whose positions have different schemas
UTF8_BYTES = {bytes([i]) for i in range(0xF5) if i not in (0xC0, 0xC1)}
_UNMARKED = b"\x03"  # allowed after a bracket in free text, as the marks are there
_SEPARATOR = b", "
_ZEROS = re.compile(rb"\.\d*000$")  # after which no more follow, so that another digit has room


def identity(value: object) -> Hashable:
    """Return a hashable that equal JSON values share: 1 and 1.0 do, 1 and true don't, keys have no order."""
    if isinstance(value, dict):
        return "object", frozenset((key, identity(inner)) for key, inner in value.items())
    if isinstance(value, list):
        return "list", tuple(map(identity, value))
    return type(value) if isinstance(value, bool) else None, value


def has_marks(grammar: str) -> bool:
    return any(f"u{ord(mark):04x}" in grammar for mark in (ALIKE, VARIED))


@dataclass(frozen=True)
class OpenList:
    """A list of unique items whose closing bracket has not come yet.

    Attributes:
        is_varied: True if its positions have different schemas.
        items, texts: the `identity` and the text of each finished item.
        dead: dead texts; none begins with another.
        begin: the state where the last item begins.
        item: the text of the current item so far; None between items.
        due: the text before the next item, between items.
        depth: number of open brackets in the item.
        is_text, is_escaped: True inside a string of the item, and after a backslash in that string.
    """

    is_varied: bool
    items: frozenset[Hashable] = frozenset()
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

    @property
    def is_closed(self) -> bool:
        """True if the last byte closed the item: a string, a list or an object."""
        is_inside = self.item is None or self.is_bare or self.is_text or self.depth
        return not is_inside and (self.item or b"")[-1:] in (b'"', b"]", b"}")

    def with_new_item(self, begin: State | None) -> OpenList:
        """Begin an empty item at a state."""
        return replace(self, begin=begin, item=b"", depth=0, is_text=False, is_escaped=False)

    def then(self, byte: bytes) -> OpenList:
        """Add a byte to the current item."""
        item = (self.item or b"") + byte
        if self.is_text:
            is_escape = byte == b"\\" and not self.is_escaped
            is_text = self.is_escaped or byte != b'"'
            return replace(self, item=item, is_text=is_text, is_escaped=is_escape)
        depth = self.depth + (byte in b"[{") - (byte in b"]}")
        return replace(self, item=item, is_text=byte == b'"', depth=depth)

    def finished(self) -> OpenList:
        """Complete the current item; raise `ValueError` if the list has an equal one already."""
        item = self.item or b""
        if _value(item) in self.items:
            raise ValueError("an item of a list comes twice")
        return replace(
            self,
            items=self.items | {_value(item)},
            texts=(*self.texts, item),
            dead=self.dead if self.is_varied else _dead(self, item),
            item=None,
            due=_SEPARATOR,
        )

    def renewed(self) -> OpenList:
        """Compute the dead texts of a varied list for the position where an item begins now."""
        one = replace(self, dead=frozenset())
        for text in one.texts:
            one = replace(one, dead=_dead(one, text))
        return one


@dataclass(frozen=True)
class State:
    """llguidance's state, and the open lists of an answer, the innermost last. Never changed."""

    matcher: LLMatcher
    tokenizer: LLTokenizer
    lists: tuple[OpenList, ...] = ()

    def then(self, text: bytes) -> State:
        """Advance by bytes that the grammar allows."""
        state = self
        for i in range(len(text)):
            state = state._after(text[i : i + 1])
        return state

    def along(self, text: bytes) -> list[State]:
        """Return the states before a text and after each of its bytes, as far as the grammar allows it."""
        tokens = byte_tokens(self.tokenizer)
        allowed = self.matcher.validate_tokens([tokens[bytes([byte])] for byte in text])
        states = [self]
        try:
            for i in range(allowed):
                states.append(states[-1]._after(text[i : i + 1]))
        except ValueError:  # a list inside has equal items, which the schema forbids here
            pass
        return states

    def _after(self, byte: bytes) -> State:
        matcher, tokens = self.matcher.deep_copy(), byte_tokens(self.tokenizer)
        matcher.consume_token(tokens[byte])
        opened = byte == b"[" and not any(one.is_text for one in self.lists)
        lists = []
        for one in self.lists:
            if one.item is None and byte in b", ":
                lists.append(replace(one, due=one.due[1:]))
            elif one.item is None and byte != b"]":
                # Lists around it check its items themselves.
                one = one.with_new_item(replace(self, lists=()))
                lists.append((one.renewed() if one.is_varied else one).then(byte))
            elif one.is_bare and byte in b",]":
                one = one.finished()
                lists += [replace(one, due=b" ")] if byte == b"," else []
            elif one.item is not None:
                one = one.then(byte)
                lists.append(one.finished() if one.is_closed else one)
        if opened and not matcher.validate_tokens([tokens[_UNMARKED]]):
            marks = [m for m in (VARIED, ALIKE) if matcher.validate_tokens([tokens[m.encode()]])]
            lists += [OpenList(is_varied=mark == VARIED) for mark in marks[:1]]
        return State(matcher, self.tokenizer, tuple(lists))

    def is_alive(self) -> bool:
        """True if an item of the outermost list may follow or go on."""
        mask = np.zeros(-(-self.tokenizer.vocab_size // 32), np.uint32)
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self.restrict(mask, is_further=False)
        if not self.lists[0].item:
            _clear(mask, _vocabulary(self.tokenizer).starting_with(b"]"))  # the empty list
        return bool(mask.any())

    def _may_continue(self) -> bool:
        """True if the innermost list may have another item after a comma."""
        try:
            after = self.then(_SEPARATOR)
        except ValueError:  # the item that the comma finishes comes twice
            return False
        return replace(after, lists=after.lists[-1:]).is_alive()

    def restrict(self, mask: np.ndarray, is_further: bool = True) -> None:
        """Clear the bits of tokens that lead to an item that a list has already.

        Args:
            mask: the tokens that the grammar allows, as `fill_masks` returns them.
            is_further: True to allow a comma only if another item can follow it.
        """
        vocabulary = _vocabulary(self.tokenizer)
        _clear(mask, vocabulary.hidden)
        for one in self.lists:
            if one.is_varied and one.item is None and one.texts:
                if one.due:  # the dead texts of the next position are known only there
                    following = vocabulary.starting_with(one.due)
                    others = [t for t in following if vocabulary.texts[t] != one.due]
                    _clear(mask, np.array(others, np.int64))
                else:
                    one = replace(one, begin=replace(self, lists=())).renewed()
            for text in _forbidden(one):
                _clear(mask, vocabulary.starting_with(text))
            tokens = vocabulary.with_quote if one.is_text else vocabulary.with_end
            tokens = tokens[(mask[tokens >> 5] >> (tokens & 31)) & 1 > 0]
            wrong = [t for t in tokens if not _may_take(one, vocabulary.texts[t])]
            _clear(mask, np.array(wrong, np.int64))
        last = self.lists[-1] if self.lists and is_further else None
        if last and (last.is_bare or (last.item is None and last.due == _SEPARATOR)):
            commas = vocabulary.starting_with(b",")
            is_allowed = ((mask[commas >> 5] >> (commas & 31)) & 1).any()
            further = mask.copy()
            _clear(further, commas)
            _clear(further, vocabulary.starting_with(b"]"))
            # Where a number may go on, the number that it then is can be the next item.
            is_sure = last.is_bare and not last.is_varied and further.any()
            if is_allowed and not is_sure and not self._may_continue():
                _clear(mask, commas)


def _may_take(one: OpenList, text: bytes) -> bool:
    """True if a token may come next in a list.

    The token must not finish an item that the list has already, nor also begin the next item. A comma after a
    string, list or object is a separate token, so that `State.restrict` can look beyond it.
    """
    is_begun = one.item is not None
    if one.item is None:
        if not text.startswith(one.due) or text[len(one.due) :][:1] in (b"", b"]"):
            return True
        text, one = text[len(one.due) :], one.with_new_item(None)
    for i in range(len(text)):
        byte = text[i : i + 1]
        is_bare = bool(one.item) and one.is_bare and byte in b",]"
        if not is_bare:
            one = one.then(byte)
        if one.item in one.dead or (is_bare and (one.item or b"") + byte in one.dead):
            return False
        if is_bare or one.is_closed:
            rest = text[i:] if is_bare else text[i + 1 :]
            is_comma = is_bare and is_begun and _SEPARATOR.startswith(rest)
            is_new = _value(one.item or b"") not in one.items
            return is_new and (rest[:1] != b"," or is_comma)
    return True


def _forbidden(one: OpenList) -> Iterator[bytes]:
    """Yield the texts that no next token may begin with."""
    if one.item is None:
        yield from (one.due + text if text else one.due[:1] for text in one.dead)
    else:
        yield from (text[len(one.item) :] for text in one.dead if text.startswith(one.item))
        if not one.is_text and _ZEROS.search(one.item):
            yield b"0"


def _dead(one: OpenList, item: bytes) -> frozenset[bytes]:
    """Return the dead texts of a list once it has a further item."""
    assert one.begin is not None
    is_bare = item[:1] not in (b'"', b"[", b"{")
    dead = one.dead | (frozenset({item + b",", item + b"]"}) if is_bare else {item})
    start = OpenList(is_varied=False, items=one.items | {_value(item)})
    path = item if is_bare else item[:-1]
    states = replace(one.begin, lists=(start,)).along(path)
    for state in states[: 0 if one.is_varied else None : -1]:
        own, *inner = state.lists
        text = own.item or b""
        if any(text.startswith(known) for known in dead):
            continue
        if replace(state, lists=(replace(own, dead=_minimal(dead)), *inner)).is_alive():
            break
        dead = dead | {text}
    return _minimal(dead)


def _minimal(texts: frozenset[bytes]) -> frozenset[bytes]:
    """Remove texts that begin with another."""
    kept: list[bytes] = []
    for text in sorted(texts):
        if not kept or not text.startswith(kept[-1]):
            kept.append(text)
    return frozenset(kept)


def _value(text: bytes) -> Hashable:
    return identity(json.loads(text))


class _Vocabulary:
    """The bytes of all tokens, the tokens with marks (`hidden`), and the tokens that may end an item."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self.texts = token_texts(tokenizer)
        self.hidden = self._having(ALIKE.encode(), VARIED.encode())
        self.with_quote = self._having(b'"')
        self.with_end = self._having(b'"', b"]", b"}", b",")
        self._order = sorted(range(len(self.texts)), key=self.texts.__getitem__)
        self._sorted = [self.texts[token] for token in self._order]

    def _having(self, *parts: bytes) -> np.ndarray:
        found = [i for i, text in enumerate(self.texts) if any(part in text for part in parts)]
        return np.array(found, np.int64)

    def starting_with(self, text: bytes) -> np.ndarray:
        first = bisect_left(self._sorted, text)
        end = first
        while end < len(self._sorted) and self._sorted[end].startswith(text):
            end += 1
        return np.array(self._order[first:end], np.int64)


_vocabulary = lru_cache(maxsize=4)(_Vocabulary)


def _clear(mask: np.ndarray, tokens: np.ndarray) -> None:
    np.bitwise_and.at(mask, tokens >> 5, ~(np.uint32(1) << (tokens & 31).astype(np.uint32)))
