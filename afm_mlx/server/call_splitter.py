"""Splits an answer, while it is generated, into text and the tool calls after it.

Calls have the form of `guidance.tool_calls`:

    text <executable_start> ```function
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
    """Text of an answer outside of tool calls."""

    text: str


@dataclass(frozen=True)
class CallHead:
    """The beginning of a call: its number, and the tool's name."""

    call: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the JSON of a call's arguments."""

    call: int
    text: str


class CallSplitter:
    """Splits one growing answer into text and tool calls.

    Attributes:
        calls: number of calls that have begun.
        in_calls: True once the mark of calls has come; no text follows it.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._marked = False  # the mark's token has come; its text may come later
        self._rest = ""  # of a call's head
        self.in_calls = False
        self._depth = 0  # of brackets; 0 outside of arguments
        self._in_arguments = self._in_string = self._is_escaped = False

    def feed(self, text: str, is_mark: bool = False) -> Iterator[Said | CallHead | CallArguments]:
        """Yield the parts of the answer's next text.

        Args:
            text: the text since the last call.
            is_mark: True if the token is the mark that calls begin with; text can spell the mark, too.
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
        """Return the index in `text` at which the JSON of the arguments ends; its length if they go on."""
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
