"""Lines of data files: JSONL with a text, a chat or a completion in each.

    {"text": ...}
    {"prompt": ..., "completion": ..., "tools"?: [...]}
    {"messages": [...], "tools"?: [...]}
    [{"role": ..., "content": ...}, ...], or an object whose first value is such a list

The first three are mlx-lm's, the last is that of Apple's adapter training toolkit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afm_mlx.errors import DataError
from afm_mlx.files import read_file

MAX_BYTES = 4 << 30
"""Bytes of a data file, which is read whole."""

KINDS = (
    '{"text": ...}, {"messages": [...]}, {"prompt": ..., "completion": ...} or a list of messages'
)


@dataclass(frozen=True)
class TextRecord:
    """A record that is one text."""

    text: str


@dataclass(frozen=True)
class ChatRecord:
    """A record that is a conversation; messages and tools are as they were found, unchecked."""

    messages: Sequence[Any]
    tools: Any = None


# -- files


def read_text(path: Path) -> str:
    """The content of a UTF-8 file.

    Raises:
        DataError: when it is missing or is no text.
    """
    content = _read(path)
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: {_not_text(error)}") from None


def read_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield "file:line" and the bytes of every line that is not blank.

    Raises:
        DataError: when the file can't be read.
    """
    for number, line in enumerate(_read(path).split(b"\n"), start=1):
        if line.strip():
            yield f"{path}:{number}", line


def parse_line(line: bytes) -> Any:
    """The JSON of a line.

    Raises:
        DataError: when it is no UTF-8, or no JSON.
    """
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(_not_text(error)) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"this is not JSON: {error}.") from None


def read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield "file:line" and the JSON of every line that is not blank.

    Raises:
        DataError: names the line that is no JSON.
    """
    for where, line in read_lines(path):
        try:
            record = parse_line(line)
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        yield where, record


def _read(path: Path) -> bytes:
    try:
        return read_file(path, MAX_BYTES, pipes=True)
    except OSError as error:
        raise DataError(
            f"{path} can't be read: {error.strerror}. Data sets are local files; none is fetched."
        ) from None


def _not_text(error: UnicodeDecodeError) -> str:
    return f"this is not UTF-8 text ({error.reason})."


# -- records


def document_of(record: Any) -> TextRecord | ChatRecord:
    """The text or the chat that a record holds; a prompt with its completion is a chat of two turns.

    Raises:
        DataError: when it is none of the kinds, or could be two of them.
    """
    if isinstance(record, list):
        return ChatRecord(record)
    if not isinstance(record, Mapping):
        raise DataError(f"a JSON {type(record).__name__} is no document; allowed are {KINDS}.")
    kinds = [keys for keys in _KEYS if all(key in record for key in keys)]
    if len(kinds) > 1:
        found = " and ".join(repr(key) for keys in kinds for key in keys)
        raise DataError(f"a document has {found}; which one is meant? Leave only one kind.")
    tools = record.get("tools")
    if kinds == [("messages",)]:
        return ChatRecord(record["messages"], tools)
    if kinds == [("prompt", "completion")]:
        roles = {"user": "prompt", "assistant": "completion"}
        return ChatRecord(
            [{"role": r, "content": _string(record, key)} for r, key in roles.items()], tools
        )
    if kinds == [("text",)]:
        return TextRecord(_string(record, "text"))
    first = next(iter(record.values()), None)
    if isinstance(first, list):
        return ChatRecord(first, tools if first is not tools else None)
    raise DataError(
        f"a document with the keys {', '.join(map(str, record)) or 'none'}; allowed are {KINDS}."
    )


_KEYS = (("messages",), ("prompt", "completion"), ("text",))


def _string(record: Mapping[str, Any], key: str) -> str:
    if not isinstance(record[key], str):
        raise DataError(f"{key!r} is a {type(record[key]).__name__}; a string is needed.")
    return record[key]


def encode_text(text: str, tokenizer: Any) -> list[int]:
    """The ids of a text: between two separators, or as a tokenizer of mlx-lm's zoo begins and ends it."""
    tokens = list(tokenizer.encode(text, add_special_tokens=True))
    end = getattr(tokenizer, "separator_id", tokenizer.eos_token_id)
    return tokens if end is None or tokens[-1:] == [end] else [*tokens, end]
