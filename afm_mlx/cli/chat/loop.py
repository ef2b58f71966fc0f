"""The loop of a chat: entries are commands or messages, and messages are answered."""

from __future__ import annotations

import shutil
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.cli.arguments import UsageError, with_flags
from afm_mlx.cli.chat.dialogue import (
    ConversationFileError,
    Dialogue,
    read_conversation,
    typed_path,
    write_conversation,
)
from afm_mlx.cli.images import with_images
from afm_mlx.cli.model_options import MAX_SEED
from afm_mlx.cli.output import input_bytes, note, one_line, print_answer
from afm_mlx.engine.generation import GenerationResponse
from afm_mlx.errors import (
    AFMError,
    CheckpointError,
    ConfigError,
    ContextLengthError,
    TokenizerError,
    shown,
)

if TYPE_CHECKING:  # imports Pillow
    from afm_mlx.vision.prompt_image import PromptImage

PROMPT, CONTINUED = ">> ", ".. "
FENCE = '"""'
"""Begins and ends a message of several lines, alone on a line."""
MAX_BYTES = 16 << 20
"""Maximum bytes of a line, and of a message of several lines."""
_TOO_LONG = f"has more than {MAX_BYTES:,} bytes, which no context holds."


class Entries(Protocol):
    """A source of what the user types or pipes in."""

    terminal: bool
    """True if a person types: then Ctrl-C clears the line and doesn't end the chat."""

    def read(self, prompt: str) -> str:
        """Return the next entry; raise EOFError at the end."""

    def busy(self) -> AbstractContextManager[None]:
        """Return a context manager that keeps what is typed, without echoing it, for the next `read`.

        It is open while the chat answers.
        """


class Lines:
    """Lines of standard input; if it is a terminal, a prompt is shown."""

    def __init__(self, terminal: bool):
        self.terminal = terminal
        self._input = input_bytes()
        self._count = 0

    def read(self, prompt: str) -> str:
        """Return the next line without its line break; raise `UsageError` if a piped one is not UTF-8."""
        if self.terminal:
            print(prompt, end="", flush=True)
            try:
                if not (line := self._input.readline()):
                    raise EOFError
            except (EOFError, KeyboardInterrupt):
                print()  # neither key ends the line
                raise
            return line.decode(sys.stdin.encoding, errors="replace").rstrip("\r\n")
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

    def busy(self) -> AbstractContextManager[None]:
        return nullcontext()


def next_message(entries: Entries) -> str:
    """Return the next entry, or all lines between two fences; raise EOFError at the end of the input."""
    entry = entries.read(PROMPT)
    if entry.strip() != FENCE:
        return entry
    lines, size = list[str](), 0
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


class Interrupts:
    """Let Ctrl-C raise `KeyboardInterrupt` only inside `allowed`, and once in each.

    In between, such as while a message is printed, there is nothing to stop; and a second Ctrl-C must not
    interrupt the cleaning up after the first. Signals are left alone outside the main thread, and where
    Ctrl-C is ignored (`nohup`).
    """

    def __init__(self) -> None:
        self._allowed = False

    def __enter__(self) -> Interrupts:
        self._previous = None
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _handle(self, *signal_and_frame: Any) -> None:
        if self._allowed:
            self._allowed = False
            raise KeyboardInterrupt

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Let the first Ctrl-C raise `KeyboardInterrupt` while the context is open."""
        self._allowed = True
        try:
            yield
        finally:
            self._allowed = False


Answer = Callable[..., GenerationResponse | None]


class ChatLoop:
    """Read entries, run commands, and answer messages.

    Args:
        dialogue, adapters: the turns so far, and the pool of the adapters that may answer.
        arguments: options for `stream_generate`, except the seed.
        first_seed: seed of the first answer; each later answer has the next.
        context: maximum tokens of the dialogue; None if unknown.
        window_possible: True if the model has `--sliding-window`.
        image_mode: mode of the pictures that messages get, see `read_image`.
        figures: True to print a line about the speed after each answer.
    """

    def __init__(
        self,
        dialogue: Dialogue,
        adapters: AdapterPool,
        arguments: Mapping[str, Any],
        *,
        first_seed: int,
        context: int | None,
        window_possible: bool,
        figures: bool,
        image_mode: str = "auto",
    ):
        self.dialogue = dialogue
        self.adapters = adapters
        self.context = context
        self.sliding: bool = arguments["sliding_window"]
        self.greedy = arguments["sampler"] is None
        self.own_files: set[Path] = set()  # files that /save may overwrite
        self._arguments = arguments
        self._window_possible = window_possible
        self._figures = figures
        self._first_seed = self._seed = first_seed
        self._image_mode = image_mode
        self._pictures: list[Any] = []  # parts of the next message

    def run(self, entries: Entries) -> None:
        """Run commands and answer messages, until /exit or the end of input."""
        with Interrupts() as interrupts:
            while True:
                try:
                    with interrupts.allowed():
                        message = next_message(entries)
                except EOFError:
                    return
                except KeyboardInterrupt:
                    if not entries.terminal:
                        raise
                    continue
                try:
                    with entries.busy(), interrupts.allowed():
                        if message.startswith("/") and not message.startswith("//"):
                            self._run_command(message)
                        elif message.strip():
                            self.ask(message.removeprefix("/"))
                except EOFError:  # /exit
                    return
                except KeyboardInterrupt:
                    note("Stopped.")

    def _run_command(self, entry: str) -> None:
        """Run a command, or print why it can't run; raise EOFError for /exit."""
        name, *rest = entry.split(maxsplit=1)
        argument = rest[0].strip() if rest else ""
        if (command := COMMANDS.get(name)) is None:
            close = get_close_matches(name, COMMANDS, 1)
            meant = f"; did you mean {close[0]}?" if close else "."
            note(
                f"There is no command {shown(name)}{meant} /help lists them. Nothing was sent: a message that "
                "begins with a slash is typed with two."
            )
        elif argument and not command.argument:
            note(f"{name} takes no argument, and got {shown(argument)}.")
        elif not argument and command.argument and not command.argument.startswith("["):
            note(f"{name} needs an argument: {name} {command.argument}")
        else:
            try:
                command.run(self, argument)
            except AFMError as error:
                note(one_line(str(error)))

    def leave(self) -> None:
        """End the chat, as the end of the input does."""
        raise EOFError

    # -- answers

    def ask(self, question: str) -> None:
        """Answer a question with the pictures that were attached, and print the answer."""
        before = len(self.dialogue.turns)
        try:
            content = with_images(question, self._pictures, "/image")
        except AFMError as error:
            note(one_line(str(error)))
            return
        answer = partial(self.dialogue.ask, content)
        self._answer(answer, "The question is left out of the conversation.")
        if len(self.dialogue.turns) > before:
            self._pictures = []

    def attach(self, path: Path) -> PromptImage:
        """Attach a picture to the next message; raise an `AFMError` if that can't be."""
        part, picture = self.dialogue.picture(path, self._image_mode)
        self._pictures.append(part)
        return picture

    def retry(self) -> None:
        """Answer the last question again, with another seed."""
        before, last = self.dialogue.turns, self.dialogue.last_response
        self._answer(self.dialogue.retry, "The conversation stays as it was.")
        answered = self.dialogue.last_response is not last
        if self.greedy and answered and self.dialogue.turns == before:
            note(
                "The same again: without --temp, an answer is always the most likely one. "
                "Start the chat with --temp 0.7 for others."
            )

    def reset(self) -> None:
        """Remove all turns, and start with the first seed again."""
        self.dialogue.reset()
        self._seed, self._pictures = self._first_seed, []
        note("The conversation is forgotten.")

    def _answer(self, answer: Answer, consequence: str) -> None:
        written = False

        def show(text: str) -> None:
            nonlocal written
            written = written or bool(text)
            print_answer(text)

        try:
            seed = self._seed
            self._seed = (seed + 1) % MAX_SEED  # one seed would repeat the same draws
            response = answer(show, seed=seed, **self._arguments)
        except AFMError as error:
            if written:
                print(flush=True)
            # Without turns, the chat goes on only if this question caused the error.
            of_question = (CheckpointError, ConfigError, ContextLengthError, TokenizerError)
            if not self.dialogue.turns and not isinstance(error, of_question):
                raise
            note(f"{self._advice(error)} {consequence}")
            return
        if written or response is not None:
            print(flush=True)
        if response is None:
            note("Stopped." if written else f"Stopped before the answer began. {consequence}")
        elif self._figures:
            speed = f"{response.generation_tps:.1f} per second"
            note(f"[{response.generation_tokens} tokens, {speed}]")

    def _advice(self, error: AFMError) -> str:
        """Return an error's message, about a full context in terms of the chat."""
        if not isinstance(error, ContextLengthError) or self.context is None or self.sliding:
            return one_line(with_flags(error, self._arguments))
        needed = self.dialogue.prompt_tokens
        takes = f"the conversation with this question takes {needed:,}"
        if needed <= self.context:
            takes += ", and the answer needs more than the rest"
        window = ", or start afm-mlx chat with --sliding-window, which forgets the oldest tokens"
        return (
            f"The context of {self.context:,} tokens is full: {takes}. Ask for less, /save FILE and "
            f"/reset{window if self._window_possible else ''}."
        )


# -- commands

_ENTRY_HELP = (
    "Anything else is a message to the model; type a message that begins with a slash with two: //",
    "Several lines: paste them, or press Alt-Enter (or Esc, Enter) for a line break; or type "
    f"{FENCE} on a line of its own before and after them. Ctrl-C stops an answer, or clears the line. "
    "Tab completes commands, adapters and files.",
)


class ChatCommand(NamedTuple):
    """A command of a chat, such as /reset."""

    argument: str  # its name in the help, in brackets if it is optional; "" for none
    help: str
    run: Callable[[ChatLoop, str], None]  # takes the chat and the argument, "" for none


def _help(chat: ChatLoop, argument: str) -> None:
    usages = {f"{name} {command.argument}": command.help for name, command in COMMANDS.items()}
    indent = " " * (max(map(len, usages)) + 2)
    columns = max(shutil.get_terminal_size().columns, len(indent) + 20)
    for usage, text in usages.items():
        first = usage.ljust(len(indent))
        note(textwrap.fill(text, columns, initial_indent=first, subsequent_indent=indent))
    for text in _ENTRY_HELP:
        note(textwrap.fill(text, columns))


def _system(chat: ChatLoop, text: str) -> None:
    if text:
        chat.dialogue.system = None if text == '""' else text
    now = chat.dialogue.system
    note("There are no instructions." if now is None else f"Instructions: {now}")


def _save(chat: ChatLoop, file: str) -> None:
    path, dialogue = typed_path(file), chat.dialogue
    if not dialogue.messages:
        note("There is no conversation yet that could be saved.")
        return
    replace = path in chat.own_files
    write_conversation(path, dialogue.messages, dialogue.adapter, replace)
    chat.own_files.add(path)
    note(f"Saved; /load {file} goes on with it.")


def _load(chat: ChatLoop, file: str) -> None:
    path = typed_path(file)
    messages, adapter = read_conversation(path)
    try:
        chat.dialogue.restore(messages, adapter)
    except TokenizerError as error:
        raise ConversationFileError(f"{shown(str(path))}: {error}") from None
    chat.own_files.add(path)
    turns = len(chat.dialogue.turns)
    with_adapter = "" if adapter is None else f", with the adapter {adapter}"
    note(f"The conversation goes on after {turns} messages{with_adapter}.")


def _image(chat: ChatLoop, file: str) -> None:
    path = typed_path(file)
    picture = chat.attach(path)
    width, height = picture.size
    note(
        f"{path.name} ({width} x {height}, {picture.mode}: {picture.tokens} tokens) goes with the next message."
    )


def _adapter(chat: ChatLoop, name: str) -> None:
    try:
        chat.dialogue.switch(name or None)
    except KeyboardInterrupt:  # while it was loaded
        note("Stopped; the adapter is the one before.")
        return
    others = ", ".join(chat.adapters.registered) or "none"
    note(f"Adapter: {name}." if name else f"No adapter; there are: {others}.")


def _stats(chat: ChatLoop, argument: str) -> None:
    import mlx.core as mx

    dialogue = chat.dialogue
    last = dialogue.last_response
    speed = "none yet"
    if last is not None:
        speed = (
            f"{last.generation_tokens} tokens, {last.generation_tps:.1f} per second; before it "
            f"{last.prompt_tokens} of the prompt, {last.prompt_tps:.1f} per second"
        )
    limit = "" if chat.context is None else f" of {chat.context:,}"
    forgets = "; older ones are forgotten" if chat.sliding else ""
    active, peak = mx.get_active_memory() / 1e9, mx.get_peak_memory() / 1e9
    note(f"last answer  {speed}")
    note(f"context      {dialogue.tokens:,} tokens{limit}{forgets}")
    note(f"memory       {active:.3f} GB, {peak:.3f} GB at most so far")
    note(f"adapter      {dialogue.adapter or 'none'}")


COMMANDS = {
    "/help": ChatCommand("", "show this", _help),
    "/exit": ChatCommand(
        "", "leave; Ctrl-D on an empty line does so, too", lambda chat, _: chat.leave()
    ),
    "/system": ChatCommand(
        "[TEXT]",
        'set instructions for all answers from now on, "" for none; alone, show them',
        _system,
    ),
    "/reset": ChatCommand(
        "", "forget the conversation; keep instructions and adapter", lambda chat, _: chat.reset()
    ),
    "/retry": ChatCommand(
        "", "answer the last question again, with another seed", lambda chat, _: chat.retry()
    ),
    "/save": ChatCommand("FILE", "write the conversation to a file", _save),
    "/load": ChatCommand("FILE", "go on with a conversation that was saved", _load),
    "/image": ChatCommand(
        "FILE",
        "show a picture with the next message, before its text or where it has {image}",
        _image,
    ),
    "/adapter": ChatCommand("[NAME]", "answer with an adapter; alone, without one", _adapter),
    "/stats": ChatCommand("", "show speed, length of the context, memory and adapter", _stats),
}
