"""An answer's text taken apart while it is generated: what is said, and the calls of tools behind it.

Calls are in the form of `guidance.tool_calls`:

    said <executable_start> ```function
    [{"name": NAME, "arguments": {...}}, ...]```<executable_end>
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from afm_mlx.tokenizer.vocabulary import EXECUTABLE_START

_HEAD = re.compile(r'\{"name": ("(?:[^"\\]|\\.)*"), "arguments": ')


@dataclass(frozen=True)
class Said:
    """Text that is no part of a call."""

    text: str


@dataclass(frozen=True)
class CallHead:
    """A call begins: its number, and the name of the tool."""

    call: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the JSON of a call's arguments."""

    call: int
    text: str


class CallSplitter:
    """Takes one answer apart.

    Attributes:
        calls: number of calls that have begun.
        in_calls: whether the mark has come, so that no more is said.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._marked = False  # the token of the mark has come; its text may come later
        self._rest = ""  # of a call's head
        self.in_calls = False
        self._depth = 0  # of brackets; 0 outside of arguments
        self._in_arguments = self._in_string = self._is_escaped = False

    def feed(self, text: str, is_mark: bool = False) -> Iterator[Said | CallHead | CallArguments]:
        """Yield what more of the answer's text holds.

        Args:
            text: what can be shown since the last call.
            is_mark: whether the token is the mark that calls begin with. Text may spell it, and is text then.
        """
        self._marked = self._marked or is_mark
        if not self.in_calls:
            said, mark, text = text.partition(EXECUTABLE_START) if self._marked else (text, "", "")
            self.in_calls = bool(mark)
            if said:
                yield Said(said)
        while text or self._rest:
            if self._in_arguments:
                end = self._end_of_arguments(text)
                if end:
                    yield CallArguments(self.calls - 1, text[:end])
                text = text[end:]
                if self._in_arguments:
                    return
            self._rest += text
            text = ""
            head = _HEAD.search(self._rest)
            if head is None:
                return
            self.calls += 1
            yield CallHead(self.calls - 1, json.loads(head[1]))
            text, self._rest = self._rest[head.end() :], ""
            self._in_arguments, self._depth = True, 0
            if not text:
                return

    def _end_of_arguments(self, text: str) -> int:
        """Where the arguments end: at the bracket that closes the call, or not within the text."""
        for i, character in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_string:
                self._is_escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                if self._depth == 0:
                    self._in_arguments = False
                    return i
                self._depth -= 1
        return len(text)
