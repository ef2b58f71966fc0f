"""Entries typed on a terminal: line editing, history, completion, and pasted lines as one entry."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
import termios
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output
from prompt_toolkit.output.vt100 import Vt100_Output

from afm_mlx.cli.chat.loop import COMMANDS, CONTINUED
from afm_mlx.kernels import settings

if TYPE_CHECKING:
    from afm_mlx.adapters.pool import AdapterPool


class TerminalEntries:
    """Entries that a person types on a terminal, or in tests `input` and `output`."""

    terminal = True

    def __init__(
        self, adapters: AdapterPool, input: Input | None = None, output: Output | None = None
    ):
        if output is None:
            output = Vt100_Output.from_pty(sys.stdout)
            # A reply about the cursor may come late over a slow line, and would be taken for typed text.
            output.enable_cpr = False
        self._session: PromptSession[str] = PromptSession(
            multiline=True,
            # A line that is only too long for the screen is one line.
            prompt_continuation=lambda width, line, wrapped: "" if wrapped else CONTINUED,
            key_bindings=_key_bindings(),
            completer=_Completer(adapters),
            complete_while_typing=False,
            enable_suspend=True,
            history=open_history(),
            input=input,
            output=output,
        )

    def read(self, prompt: str) -> str:
        """Return the next entry; raise EOFError for Ctrl-D on an empty line, KeyboardInterrupt for Ctrl-C."""
        return self._session.prompt(prompt)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Keep keys that are typed during an answer for the next entry, without echoing them.

        Pasted text stays marked as such, and Enter stays a key.
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
        # A single completion is inserted at once, so that Enter may follow immediately.
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
    """Complete names of commands, and the adapter or file that follows one."""

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
        elif command in ("/save", "/load", "/image"):
            yield from self._paths.get_completions(Document(argument), event)


# -- history

SWITCH = settings.HISTORY
"""The environment variable that, set to 0, keeps no history between chats."""
MAX_HISTORY_BYTES = 1 << 20
"""Maximum bytes of the history file; a chat that finds a larger one drops the older half."""


def open_history() -> History:
    """Open the private history file in the user's state folder; keep the history in memory if that fails."""
    if not settings.is_on(SWITCH):
        return InMemoryHistory()
    try:
        path = _state_folder() / "chat-history"
        _make_ready(path)
    except (OSError, RuntimeError):  # RuntimeError without a home folder
        return InMemoryHistory()
    return _PrivateHistory(path)


class _PrivateHistory(FileHistory):
    def load_history_strings(self) -> Iterable[str]:
        try:
            return super().load_history_strings()
        except OSError:
            return []

    def store_string(self, string: str) -> None:
        with suppress(OSError):  # the disk may be full, the folder gone
            super().store_string(string)


def _state_folder() -> Path:
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    if given.is_absolute():  # XDG: relative paths are ignored
        return given / "afm-mlx"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "afm-mlx"
    return Path.home() / ".local" / "state" / "afm-mlx"


def _make_ready(path: Path) -> None:
    """Create the file if needed, make it private, and shorten it beyond `MAX_HISTORY_BYTES`."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Opening a pipe would wait for its other end.
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK
    with open(os.open(path, flags, 0o600), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is not a file")
        os.fchmod(file.fileno(), 0o600)
        if os.fstat(file.fileno()).st_size <= MAX_HISTORY_BYTES:
            return
        file.seek(-MAX_HISTORY_BYTES // 2, os.SEEK_END)
        newest = file.read().partition(b"\n\n")[2]  # from the first whole entry on
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(newest)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
