"""A conversation as a file: JSON with `messages`, as everybody writes them, and `adapter`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from afm_mlx.errors import AFMError, reason_of, shown
from afm_mlx.files import atomic_write, read_file
from afm_mlx.tokenizer.chat_messages import Message

MAX_BYTES = 4 << 20
"""The largest file that is read: a million tokens, more than any context."""
_KEYS = ("messages", "adapter")


class ConversationFileError(AFMError):
    """A conversation that can't be written to a file, or read from one."""


def write_conversation(
    path: Path, messages: Sequence[Message], adapter: str | None, replace: bool
) -> None:
    """Write a conversation, whole or not at all.

    Args:
        path: the file to write.
        messages: instructions first, if there are any.
        adapter: name of the adapter that answers, or None.
        replace: whether the file may be there already.

    Raises:
        ConversationFileError: when the file can't be written.
    """
    record = {"adapter": adapter, "messages": list(messages)}
    where = shown(str(path))
    try:
        if path.exists() and not replace:
            raise ConversationFileError(
                f"{where} exists, and is not of this chat. Choose another name, or remove it first."
            )
        with atomic_write(path) as temporary:
            text = json.dumps(record, ensure_ascii=False, indent=1)
            temporary.write_text(text + "\n", encoding="utf-8")
    except (
        OSError,
        RecursionError,
    ) as error:  # the latter for a tool's result that is nested deeply
        raise ConversationFileError(
            f"{where} can't be written: {reason_of(error)}. Give the path of a file."
        ) from None


def read_conversation(path: Path) -> tuple[list[Any], str | None]:
    """The messages in a file, not checked yet, and the name of its adapter, or None.

    Raises:
        ConversationFileError: when it holds no conversation.
    """
    where = shown(str(path))
    try:
        data = read_file(path, MAX_BYTES)
    except OSError as error:
        raise ConversationFileError(
            f"{where} can't be read: {reason_of(error)}. Give a file that /save has written."
        ) from None
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConversationFileError(f"{where} is not JSON: {reason_of(error)}.") from None
    return _messages_and_adapter(where, record)


def _messages_and_adapter(where: str, record: Any) -> tuple[list[Any], str | None]:
    if not isinstance(record, dict) or not isinstance(record.get("messages"), list):
        raise ConversationFileError(
            f'{where} holds no conversation; {{"messages": [{{"role", "content"}}, ...]}} is needed.'
        )
    if unknown := [key for key in record if key not in _KEYS]:
        raise ConversationFileError(
            f"{where} has the key {shown(unknown[0])}; a conversation has {' and '.join(_KEYS)}."
        )
    adapter = record.get("adapter")
    if not isinstance(adapter, str | None):
        raise ConversationFileError(
            f"{where}: adapter is {shown(adapter)}; a name, or null for none, is needed."
        )
    return record["messages"], adapter


def typed_path(text: str) -> Path:
    """A path as a user types it, `~` for the home folder included.

    Raises:
        ConversationFileError: when it is no path.
    """
    if not text.isprintable():
        raise ConversationFileError(f"{shown(text)} is no name of a file.")
    return Path(os.path.expanduser(text)).absolute()
