"""Entries that are typed on a terminal: line editing, history, completion, and pasted lines as one entry."""

from __future__ import annotations

import sys
import termios
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output
from prompt_toolkit.output.vt100 import Vt100_Output

from afm_mlx.cli.chat.commands import COMMANDS
from afm_mlx.cli.chat.history import open_history
from afm_mlx.cli.chat.lines import CONTINUED

if TYPE_CHECKING:
    from afm_mlx.adapters.pool import AdapterPool


class Terminal:
    """A terminal that a person types on.

    Args:
        adapters: pool of the adapters whose names are completed.
        input, output: used in place of the process's terminal, in tests.
    """

    terminal = True

    def __init__(
        self, adapters: AdapterPool, input: Input | None = None, output: Output | None = None
    ):
        self._session: PromptSession[str] = PromptSession(
            multiline=True,
            prompt_continuation=_continued,
            key_bindings=_key_bindings(),
            completer=_Completer(adapters),
            complete_while_typing=False,
            enable_suspend=True,
            history=open_history(),
            input=input,
            output=output or _own_output(),
        )

    def read(self, prompt: str) -> str:
        """The next entry, of one or several lines.

        Raises:
            EOFError: for Ctrl-D on an empty line.
            KeyboardInterrupt: for Ctrl-C; what was typed is dropped.
        """
        return self._session.prompt(prompt)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While an answer is printed, keep what is typed for the next entry, and don't show it in between.

        What is pasted comes marked as such then, too, and Enter as the key that it is.
        """
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
        changed = list(before)
        changed[0] &= ~termios.ICRNL
        changed[3] &= ~(termios.ECHO | termios.ICANON)
        output = self._session.output
        termios.tcsetattr(descriptor, termios.TCSANOW, changed)
        output.enable_bracketed_paste()
        output.flush()
        try:
            yield
        finally:
            output.disable_bracketed_paste()
            output.flush()
            termios.tcsetattr(descriptor, termios.TCSANOW, before)


def _own_output() -> Output:
    output = Vt100_Output.from_pty(sys.stdout)
    # The answer to "where is the cursor?" may come late over a slow line, and would be taken for typed text.
    output.enable_cpr = False
    return output


def _continued(width: int, line: int, wrapped: int) -> str:
    return "" if wrapped else CONTINUED  # a line that is only too long for the screen is one line


def _key_bindings() -> KeyBindings:
    bindings = KeyBindings()
    in_entry = has_focus(DEFAULT_BUFFER)  # and not in the search of Ctrl-R

    @bindings.add("enter", filter=in_entry)
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter", filter=in_entry)  # Alt-Enter is the same
    def break_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    @bindings.add("tab", filter=in_entry)
    def complete(event: KeyPressEvent) -> None:
        # What is the only one comes at once, so that Enter may follow as fast as it is typed.
        buffer = event.current_buffer
        found = list(buffer.completer.get_completions(buffer.document, CompleteEvent()))
        if buffer.complete_state:
            buffer.complete_next()
        elif len(found) == 1:
            buffer.apply_completion(found[0])
        else:
            buffer.start_completion(insert_common_part=True)

    return bindings


class _Completer(Completer):
    """Completes names of commands, and the adapter or file that follows one."""

    def __init__(self, adapters: AdapterPool):
        self._adapters = adapters
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        typed = document.text_before_cursor
        command, space, argument = typed.partition(" ")
        if not space:
            for name in COMMANDS if typed.startswith("/") else ():
                if name.startswith(typed):
                    yield Completion(name, -len(typed), display_meta=COMMANDS[name].help)
        elif command == "/adapter":
            for name in self._adapters.registered:
                if name.startswith(argument):
                    yield Completion(name, -len(argument))
        elif command in ("/save", "/load"):
            yield from self._paths.get_completions(Document(argument), event)
