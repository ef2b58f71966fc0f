"""The commands of a chat: entries that begin with a slash."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable
from difflib import get_close_matches
from typing import TYPE_CHECKING, NamedTuple

from afm_mlx.cli.chat.conversation_file import (
    ConversationFileError,
    read_conversation,
    typed_path,
    write_conversation,
)
from afm_mlx.cli.chat.lines import FENCE
from afm_mlx.cli.output import note, one_line
from afm_mlx.errors import AFMError, TokenizerError, shown

if TYPE_CHECKING:
    from afm_mlx.cli.chat.session import Session

_ENTRIES = (
    "Anything else is said to the model; a message that begins with a slash is typed with two: //",
    "Several lines: paste them, or press Alt-Enter (or Esc, Enter) for a line break; or type "
    f"{FENCE} on a line of its own before and after them. Ctrl-C stops an answer, or clears the line. "
    "Tab completes commands, adapters and files.",
)


class Command(NamedTuple):
    """What an entry that begins with a slash and a name does.

    Args:
        argument: name of its argument in the help; in brackets if it may be left out, and "" if there is none.
        help: what the command does, for the help.
        run: does it, for a session and the argument, or "".
    """

    argument: str
    help: str
    run: Callable[[Session, str], None]


def run_command(session: Session, entry: str) -> None:
    """Run a command, or say why that is not possible.

    Args:
        session: the chat to act on.
        entry: what was typed; it begins with a slash.

    Raises:
        EOFError: when the chat is to end.
    """
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
        note(f"{name} takes nothing behind it, and got {shown(argument)}.")
    elif not argument and command.argument and not command.argument.startswith("["):
        note(f"{name} needs something behind it: {name} {command.argument}")
    else:
        try:
            command.run(session, argument)
        except AFMError as error:
            note(one_line(error))


def _help(session: Session, argument: str) -> None:
    usages = {f"{name} {command.argument}": command.help for name, command in COMMANDS.items()}
    indent = " " * (max(map(len, usages)) + 2)
    columns = max(shutil.get_terminal_size().columns, len(indent) + 20)
    for usage, text in usages.items():
        first = usage.ljust(len(indent))
        note(textwrap.fill(text, columns, initial_indent=first, subsequent_indent=indent))
    for text in _ENTRIES:
        note(textwrap.fill(text, columns))


def _exit(session: Session, argument: str) -> None:
    raise EOFError


def _system(session: Session, text: str) -> None:
    if text:
        session.conversation.system = None if text == '""' else text
    now = session.conversation.system
    note("There are no instructions." if now is None else f"Instructions: {now}")


def _reset(session: Session, argument: str) -> None:
    session.reset()
    note("The conversation is forgotten.")


def _retry(session: Session, argument: str) -> None:
    session.retry()


def _save(session: Session, file: str) -> None:
    path, conversation = typed_path(file), session.conversation
    if not conversation.messages:
        note("There is no conversation yet that could be saved.")
        return
    replace = path in session.own_files
    write_conversation(path, conversation.messages, conversation.adapter, replace)
    session.own_files.add(path)
    note(f"Saved; /load {file} goes on with it.")


def _load(session: Session, file: str) -> None:
    path = typed_path(file)
    messages, adapter = read_conversation(path)
    try:
        session.conversation.restore(messages, adapter)
    except TokenizerError as error:
        raise ConversationFileError(f"{shown(str(path))}: {error}") from None
    session.own_files.add(path)
    turns = len(session.conversation.turns)
    with_adapter = "" if adapter is None else f", with the adapter {adapter}"
    note(f"The conversation goes on after {turns} messages{with_adapter}.")


def _adapter(session: Session, name: str) -> None:
    try:
        session.conversation.switch(name or None)
    except KeyboardInterrupt:  # while it was loaded
        note("Stopped; the adapter is the one before.")
        return
    others = ", ".join(session.adapters.registered) or "none"
    note(f"Adapter: {name}." if name else f"No adapter; there are: {others}.")


def _stats(session: Session, argument: str) -> None:
    import mlx.core as mx

    conversation = session.conversation
    last = conversation.last_response
    speed = "none yet"
    if last is not None:
        speed = (
            f"{last.generation_tokens} tokens, {last.generation_tps:.1f} per second; before it "
            f"{last.prompt_tokens} of the prompt, {last.prompt_tps:.1f} per second"
        )
    limit = "" if session.context is None else f" of {session.context:,}"
    forgets = "; older ones are forgotten" if session.sliding else ""
    active, peak = mx.get_active_memory() / 1e9, mx.get_peak_memory() / 1e9
    note(f"last answer  {speed}")
    note(f"context      {conversation.tokens:,} tokens{limit}{forgets}")
    note(f"memory       {active:.3f} GB, {peak:.3f} GB at most so far")
    note(f"adapter      {conversation.adapter or 'none'}")


COMMANDS = {
    "/help": Command("", "show this", _help),
    "/exit": Command("", "leave; Ctrl-D on an empty line does, too", _exit),
    "/system": Command(
        "[TEXT]",
        'give instructions for all answers from now on, "" for none; alone, show them',
        _system,
    ),
    "/reset": Command("", "forget the conversation, but for instructions and adapter", _reset),
    "/retry": Command("", "answer the last question again, with another seed", _retry),
    "/save": Command("FILE", "write the conversation to a file", _save),
    "/load": Command("FILE", "go on with a conversation that was saved", _load),
    "/adapter": Command("[NAME]", "answer with an adapter; alone, without one", _adapter),
    "/stats": Command("", "show speed, length of the context, memory and adapter", _stats),
}
