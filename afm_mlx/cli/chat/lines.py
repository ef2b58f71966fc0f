"""What the user says: entries, and messages of several lines made of them."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from afm_mlx.cli.output import input_bytes
from afm_mlx.cli.parser import UsageError

PROMPT, CONTINUED = ">> ", ".. "
FENCE = '"""'
"""Alone on a line, begins a message of several lines, and ends it."""
MAX_BYTES = 16 << 20
"""Bytes of a line, and of a message of several lines."""


_TOO_LONG = f"has more than {MAX_BYTES:,} bytes, which no context holds."


class Entries(Protocol):
    """A source of entries."""

    terminal: bool
    """True if a person types them, so that Ctrl-C in one is no reason to leave."""

    def read(self, prompt: str) -> str:
        """The next entry; EOFError at the end."""

    def busy(self) -> AbstractContextManager[None]:
        """A context for the time in which nothing is read, such as that of an answer."""


class Lines:
    """Lines of standard input.

    Args:
        terminal: whether standard input is a terminal, which then shows a prompt.
    """

    def __init__(self, terminal: bool):
        self.terminal = terminal
        self._input = input_bytes()
        self._count = 0

    def read(self, prompt: str) -> str:
        """The next line, without its end.

        Raises:
            EOFError: when there is none.
            UsageError: when it is not UTF-8 text; what a person types has question marks there instead.
        """
        if self.terminal:
            return self._typed(prompt)
        line = self._input.readline(MAX_BYTES + 1)
        self._count += 1
        if len(line) > MAX_BYTES:
            raise UsageError(f"line {self._count} of standard input {_TOO_LONG}")
        if not line:
            raise EOFError
        try:
            return line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise UsageError(f"line {self._count} of standard input is not UTF-8 text.") from None

    def _typed(self, prompt: str) -> str:
        print(prompt, end="", flush=True)
        try:
            if not (line := self._input.readline()):
                raise EOFError
        except (EOFError, KeyboardInterrupt):
            print()  # neither key has ended the line
            raise
        return line.decode(sys.stdin.encoding, errors="replace").rstrip("\r\n")

    def busy(self) -> AbstractContextManager[None]:
        return nullcontext()


def next_message(entries: Entries) -> str:
    """The next entry, or all entries between two fences.

    Raises:
        EOFError: when there is none.
        UsageError: when the end of a message is missing, or it is too long.
    """
    entry = entries.read(PROMPT)
    if entry.strip() != FENCE:
        return entry
    lines: list[str] = []
    size = 0
    try:
        while (entry := entries.read(CONTINUED)).strip() != FENCE:
            lines.append(entry)
            size += len(entry) + 1
            if size > MAX_BYTES:
                raise UsageError(f"a message of several lines {_TOO_LONG}")
    except EOFError:
        if entries.terminal:
            raise
        raise UsageError(
            f"standard input ends within a message of several lines; a line of {FENCE} ends one."
        ) from None
    return "\n".join(lines)
