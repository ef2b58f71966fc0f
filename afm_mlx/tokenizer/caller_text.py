"""Text of the caller, marked so that it can be told from a chat template's own after rendering.

A template joins its own text with that of messages, tools and variables. To know which part of the result is
whose, the chat is rendered with a mark behind every character of the caller's, a character that is nowhere in
the chat. A control token's name with a mark inside was not written by the template (`control_tokens.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Set
from itertools import chain
from typing import Any, SupportsIndex

from afm_mlx.errors import TokenizerError

_NONCHARACTERS = (*range(0xFDD0, 0xFDF0), *(p << 16 | 0xFFFE for p in range(17)))
_PRIVATE = range(0x100000, 0x10FFFE)


def free_mark(texts: list[str]) -> str:
    """A character that none of the texts has: a Unicode noncharacter, unless they have all of these.

    Raises:
        TokenizerError: when there is none.
    """
    used = {character for text in texts if not text.isascii() for character in text}
    for code in chain(_NONCHARACTERS, _PRIVATE):
        if chr(code) not in used:
            return chr(code)
    raise TokenizerError(
        "The messages have every private character of Unicode; one is needed to encode them. Leave some out."
    )


def strings_in(value: Any) -> list[str]:
    """Every string in nested lists and dicts, keys too."""
    found, stack, seen = [], [value], set[int]()
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            found.append(item)
        elif item is None or isinstance(item, int | float):
            continue
        elif isinstance(item, Mapping | list | tuple | Set) and id(item) not in seen:
            seen.add(id(item))
            if isinstance(item, Mapping):
                stack += item
                stack += item.values()
            else:
                stack += item
    return found


def marked(value: Any, mark: str) -> Any:
    """A copy of nested lists and dicts whose strings are `CallerText`.

    Raises:
        RecursionError: when they are nested too deeply.
    """
    if isinstance(value, str):
        return CallerText(str.__str__(value), mark)
    if isinstance(value, Mapping):
        return {marked(key, mark): marked(item, mark) for key, item in value.items()}
    if isinstance(value, list):
        return [marked(item, mark) for item in value]
    if isinstance(value, tuple):
        return tuple(marked(item, mark) for item in value)
    if isinstance(value, Set):
        return {marked(item, mark) for item in value}
    return value


class CallerText(str):
    """A string with a mark behind each character but whitespace, which templates trim.

    To a template it is the string without marks: it compares, is looked up and searched as that, and parts of
    it have marks again. What C makes of its characters, such as a joined text or JSON, has the marks.
    """

    plain: str
    mark: str

    def __new__(cls, plain: str, mark: str) -> CallerText:
        spread = mark.join(plain) + mark if plain else ""
        text = super().__new__(cls, re.sub(f"(\\s){mark}", r"\1", spread))
        text.plain, text.mark = plain, mark
        return text

    def __str__(self) -> str:
        return self  # so that str() in a filter keeps the class

    def __repr__(self) -> str:
        return CallerText(repr(self.plain), self.mark)

    def __iter__(self) -> Iterator[str]:
        return (CallerText(character, self.mark) for character in self.plain)

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        # What is put in may be the template's own text.
        return new.join(self.split(old, count)) if old else super().replace(old, new, count)


def _as_plain(name: str) -> Callable[..., Any]:
    """A method of str that reads the text without marks, and marks what it returns."""
    method = getattr(str, name)

    def run(self: CallerText, *args: Any, **kwargs: Any) -> Any:
        plain = [arg.plain if isinstance(arg, CallerText) else arg for arg in args]
        result = method(self.plain, *plain, **kwargs)
        return result if isinstance(result, int) else marked(result, self.mark)

    run.__name__ = name
    return run


_READING = """
    __contains__ __eq__ __ge__ __getitem__ __gt__ __hash__ __le__ __len__ __lt__ __ne__ capitalize casefold
    center count endswith expandtabs find index isalnum isalpha isascii isdecimal isdigit isidentifier islower
    isnumeric isprintable isspace istitle isupper ljust lower lstrip partition removeprefix removesuffix rfind
    rindex rjust rpartition rsplit rstrip split splitlines startswith strip swapcase title upper zfill
""".split()
for _name in _READING:
    setattr(CallerText, _name, _as_plain(_name))
