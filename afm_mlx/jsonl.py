"""Read data files: JSONL with a text, a chat or a completion in each line.

    {"text": ...}
    {"prompt": ..., "completion": ..., "tools"?: [...]}
    {"messages": [...], "tools"?: [...]}
    [{"role": ..., "content": ...}, ...], or an object whose first value is such a list
    {"conversations": [{"from": "human", "value": ...}, ...], "system"?: ..., "tools"?: ...}
    {"instruction": ..., "input"?: ..., "output": ..., "system"?: ...}

The first three are mlx-lm's, the fourth is from Apple's adapter training toolkit, the last two from ShareGPT
and Alpaca. Records may also be the items of one JSON array, or the rows of a CSV file. Files may be
gzipped.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from afm_mlx.errors import AFMError, DataError, shown
from afm_mlx.files import read_file
from afm_mlx.progress import Progress

T = TypeVar("T")

MAX_BYTES = 4 << 30
"""Maximum bytes of a data file, which is read whole."""

_FAULTS_SHOWN = 5

KINDS = (
    '{"text": ...}, {"messages": [...]}, {"prompt": ..., "completion": ...}, a list of messages, '
    '{"conversations": [{"from", "value"}, ...]} or {"instruction": ..., "output": ...}'
)


@dataclass(frozen=True)
class TextRecord:
    """A record that is one text."""

    text: str


@dataclass(frozen=True)
class ChatRecord:
    """A record that is a conversation; messages and tools are unchecked."""

    messages: Sequence[Any]
    tools: Any = None


# -- files


def is_data_file(path: Path) -> bool:
    return path.name.removesuffix(".gz").endswith(_SUFFIXES)


def data_file(folder: Path, stem: str) -> Path | None:
    """Return the file of a data set's split `stem` in a folder, of any usual name and format, or None.

    Raises:
        DataError: if there are several, and none is `stem.jsonl`.
    """
    stems = (stem, *_OTHER_STEMS.get(stem, ()))
    names = [f"{one}{suffix}{gz}" for one in stems for suffix in _SUFFIXES for gz in ("", ".gz")]
    found = [folder / name for name in names if (folder / name).is_file()]
    if len(found) > 1 and found[0].name != f"{stem}.jsonl":
        listed = ", ".join(file.name for file in found)
        raise DataError(
            f"{folder} has {listed}; which one is meant? Name the file, or leave only one."
        )
    return found[0] if found else None


def data_files(folder: Path) -> str:
    """Describe a folder's data files, or else its subfolders' data files, for error messages."""
    for pattern in ("*", "*/*"):
        found = sorted(str(p.relative_to(folder)) for p in folder.glob(pattern) if is_data_file(p))
        if found:
            more = f" and {len(found) - 10} more" if len(found) > 10 else ""
            inside = " (in a subfolder: name that)" if pattern == "*/*" else ""
            return f"{', '.join(found[:10])}{more}{inside}"
    others = sorted(p.name for p in folder.iterdir())[:10]
    return f"none; it holds {', '.join(others) or 'nothing'}"


def read_text(path: Path) -> str:
    """Read a text file in UTF-8, UTF-16 or UTF-32, which may be gzipped; raise `DataError` for other data."""
    text = _text(path)
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            _check_text(line)
        except DataError as error:
            raise DataError(f"{path}:{number}: {error}") from None
    return text


def read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield "file:line" and the JSON text of each record of a data file; raise `DataError` if it can't be read.

    A record is a line that is not blank, an item of a JSON array, an object over several lines, or a row of a
    CSV file, as an object with the names of the first row.
    """
    text = _text(path)
    name = path.name.removesuffix(".gz")
    if name.endswith((".csv", ".tsv")):
        records = _rows(path, text)
    elif _is_array(text):
        records = _values(path, text, text.index("[") + 1, "]")
    elif text.lstrip().startswith(("{\n", "{\r\n")):
        records = _values(path, text, 0, "")
    else:
        lines = enumerate(text.split("\n"), start=1)
        records = ((number, line) for number, line in lines if line.strip())
    for number, record in records:
        yield f"{path}:{number}", record


def _is_array(text: str) -> bool:
    """True if a text is one JSON array of records, and not lines, which may be arrays of messages."""
    begin = text.lstrip()
    if not begin.startswith("["):
        return False
    first_line, _, rest = begin.partition("\n")
    try:
        found = json.loads(first_line)
    except (ValueError, RecursionError):
        # An array over several lines, or a wrong line with messages, like the lines after it.
        is_open = not first_line.rstrip().endswith("]") and begin.rstrip().endswith("]")
        return first_line.strip() == "[" or (bool(rest.strip()) and is_open)
    is_chat = all(isinstance(m, dict) and ("role" in m or "from" in m) for m in found)
    return not rest.strip() and not is_chat


def _values(path: Path, text: str, at: int, end_mark: str) -> Iterator[tuple[int, str]]:
    """Yield line number and text of each JSON value from position `at` up to `end_mark`."""
    decoder, space = json.JSONDecoder(), re.compile(r"[\s,]*")
    number, counted = 1, 0
    while True:
        at = space.match(text, at).end()  # type: ignore[union-attr]  # it also matches the empty text
        number += text.count("\n", counted, at)
        counted = at
        if text[at : at + 1] in ("]", ""):
            break
        try:
            _, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: this is not JSON: {error}.") from None
        yield number, text[at:end]
        at = end
    if text[at:].strip() != end_mark:
        raise DataError(
            f"{path}:{number}: this is not JSON: the array has no end, or more follows it."
        )


def _rows(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yield each row of a CSV file: the number of its last line, and the row as JSON, by columns' names."""
    header = text.partition("\n")[0]
    delimiter = max(",;\t", key=header.count)
    csv.field_size_limit(MAX_BYTES)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    names = reader.fieldnames or ()
    if len(set(names)) < len(names):
        raise DataError(f"{path}:1: two columns have one name: {', '.join(names)}.")
    try:
        for row in reader:
            if None in row or None in row.values():
                raise csv.Error(f"the row doesn't have the {len(names)} fields of the first row")
            yield reader.line_num, json.dumps(row, ensure_ascii=False)
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: {error}.") from None


def parse_line(line: str) -> Any:
    """Parse a line of JSON; raise `DataError` if it is not UTF-8 or not JSON, or an object has a key twice."""
    _check_text(line)
    try:
        return json.loads(line, object_pairs_hook=_object)
    except DataError:
        raise
    except (ValueError, RecursionError) as error:
        raise DataError(f"this is not JSON: {error}.") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, n in Counter(key for key, _ in pairs).items() if n > 1)
        raise DataError(f"an object has the key {shown(twice)} twice; which one is meant?")
    return found


def read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield "file:line" and the value of each record; `DataError` names a line that is not JSON."""
    for where, line in read_lines(path):
        try:
            record = parse_line(line)
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        yield where, record


def parse_records(
    path: Path,
    parse: Callable[[Any, str], list[T]],
    form: str,
    limit: int | None = None,
    progress: Progress | None = None,
) -> list[T]:
    """Return what a function makes of each record of a data file and its "file:line".

    Args:
        path: file that `read_lines` can read.
        parse: raises an `AFMError` for a record that can't be used.
        form: forms of a record, for errors.
        limit: number of first records; pass None for all.
        progress: called after each record.

    Raises:
        DataError: names the first records that can't be used, with reasons, and the number of others.
    """
    found: list[T] = []
    faults: list[str] = []
    lines = list(itertools.islice(read_lines(path), limit))
    for done, (where, line) in enumerate(lines, start=1):
        try:
            found += parse(parse_line(line), where)
        except AFMError as error:
            faults.append(f"{where}: {error}")
        if progress is not None:
            progress(done, len(lines))
    if faults:
        more = len(faults) - _FAULTS_SHOWN
        rest = [f"... and {more} more."] if more > 0 else []
        raise DataError("\n".join(faults[:_FAULTS_SHOWN] + rest))
    if not found:
        raise DataError(f"{path} holds no samples; each line must be one of {form}.")
    return found


class AppendedLines:
    """A file of JSON values, a line each, to which a run appends, so that another run can continue.

    Attributes:
        path: the file, which need not exist.
        values: the values in it. A line that a killed process has left unfinished is removed.

    Raises:
        DataError: if the file is damaged.
    """

    def __init__(self, path: Path):
        self.path = path
        self.values: list[Any] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            return
        with path.open("rb+") as file:
            content = file.read()
            whole = content.rfind(b"\n") + 1
            file.truncate(whole)
        try:
            self.values = [json.loads(line) for line in content[:whole].splitlines()]
        except ValueError:
            raise DataError(
                f"{path} is damaged. Remove it; all requests are then answered again."
            ) from None

    def append(self, value: Any) -> None:
        """Append a value to the file, which is closed again."""
        with self.path.open("a") as file:
            file.write(f"{json.dumps(value)}\n")


def _text(path: Path) -> str:
    """Read and decode a text file; bytes that are not UTF-8 become surrogates."""
    try:
        content = read_file(path, MAX_BYTES, pipes=True)
    except OSError as error:
        raise DataError(
            f"{path} can't be read: {error.strerror}. Data sets are local files; none is fetched."
        ) from None
    if content.startswith(b"\x1f\x8b"):
        try:
            with gzip.open(io.BytesIO(content)) as file:
                content = file.read(MAX_BYTES + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path} can't be unpacked ({error}).") from None
        if len(content) > MAX_BYTES:
            raise DataError(f"{path} has more than {MAX_BYTES:,} bytes when it is unpacked.")
    for start, kind in _OTHERS.items():
        if content.startswith(start):
            raise DataError(f"{path} is {kind}, not text. {_CONVERSION}")
    encoding = next((name for mark, name in _MARKS.items() if content.startswith(mark)), "utf-8")
    if encoding == "utf-8" and content[1:2] == b"\0" != content[:1]:
        encoding = "utf-16-le"
    elif encoding == "utf-8" and content[:1] == b"\0" != content[1:2]:
        encoding = "utf-16-be"
    try:
        return content.decode(encoding, "surrogateescape" if "8" in encoding else "strict")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not {encoding.upper()} text ({error.reason}).") from None


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(
            "this is not UTF-8 text. Convert it: iconv -f LATIN1 -t UTF-8 FILE > NEW, for example."
        ) from None


_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
_OTHER_STEMS = {"valid": ("validation", "val", "dev", "eval")}
_MARKS = {
    b"\xef\xbb\xbf": "utf-8-sig",
    b"\xff\xfe\x00\x00": "utf-32",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
}
_OTHERS = {
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"PK\x03\x04": "a zip archive or a spreadsheet",
    b"\x28\xb5\x2f\xfd": "packed by zstd",
    b"BZh": "packed by bzip2",
    b"\xfd7zXZ": "packed by xz",
    b"SQLite format 3": "an SQLite database",
}
_CONVERSION = (
    "Unpack it, or convert it with pandas: "
    "pandas.read_parquet(FILE).to_json('train.jsonl', orient='records', lines=True)."
)


# -- records


def document_of(record: Any) -> TextRecord | ChatRecord:
    """Convert a record to a text or a chat; a prompt with its completion is a chat of two turns.

    Raises:
        DataError: if the record has none of the known forms, or two.
    """
    if isinstance(record, list):
        return ChatRecord(_messages(record))
    if not isinstance(record, Mapping):
        raise DataError(f"a JSON {type(record).__name__} is not a document; allowed are {KINDS}.")
    kinds = [keys for keys in _KEYS if all(key in record for key in keys)]
    if len(kinds) > 1:
        found = " and ".join(repr(key) for keys in kinds for key in keys)
        raise DataError(
            f"a document has {found}; which one is meant? Leave only one kind, or name the keys "
            "(--prompt-feature and --completion-feature, --chat-feature, or --text-feature)."
        )
    if not kinds:
        for key, value in record.items():
            inner = value[0] if isinstance(value, list) and value else None
            if not isinstance(inner, Mapping) or not any(set(keys) <= set(inner) for keys in _KEYS):
                continue
            raise DataError(
                f"the records are inside {key!r}; a file is the list itself, or has a record in each line. "
                f"Take them out: jq '.[\"{key}\"]' FILE > NEW.json, for example."
            )
        first = next(iter(record.values()), None)
        if isinstance(first, list):
            tools = record.get("tools")
            return ChatRecord(_messages(first), None if first is tools else tools)
        one = " This is one message: the list of a chat's messages is needed."
        hint = one if "role" in record else ""
        raise DataError(
            f"a document with the keys {', '.join(map(str, record)) or 'none'}; allowed are {KINDS}.{hint}"
        )
    if kinds == [("text",)]:
        return TextRecord(_string(record, "text"))
    (keys,) = kinds
    if len(keys) == 1:
        messages = _messages(record[keys[0]])
    elif keys[0] == "prompt":
        messages = _turns(_string(record, "prompt"), _string(record, "completion"))
    else:
        # Alpaca: the input follows the instruction.
        given = [key for key in ("instruction", "input") if key == "instruction" or record.get(key)]
        asked = "\n".join(filter(None, (_string(record, key) for key in given)))
        history = record.get("history") or []
        is_list = isinstance(history, list)
        if not is_list or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
            raise DataError(
                f"'history' is {shown(history)}; a list of [instruction, output] is needed."
            )
        past = [turn for pair in history for turn in _turns(*pair)]
        messages = [*past, *_turns(asked, _string(record, "output"))]
    tools = record.get("tools")
    if keys in _OF_OTHERS:
        if record.get("system"):
            messages = [{"role": "system", "content": _string(record, "system")}, *messages]
        if isinstance(tools, str):
            tools = parse_line(tools) if tools.strip() else None
    return ChatRecord(messages, tools)


_OF_OTHERS = (("conversations",), ("instruction", "output"))
_KEYS = (("messages",), ("prompt", "completion"), ("text",), *_OF_OTHERS)
_SENDERS = {"system": "system"}
_SENDERS |= dict.fromkeys(("human", "user"), "user")
_SENDERS |= dict.fromkeys(("gpt", "chatgpt", "assistant", "model"), "assistant")
_SENDERS |= dict.fromkeys(("observation", "tool", "function_response"), "tool")


def _turns(prompt: Any, completion: Any) -> list[Any]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]


def _messages(messages: Any) -> Any:
    """Return a list in which ShareGPT's messages (`from`, `value`) have the chat form (`role`, `content`).

    What has a `role`, or is no list or no message, is returned unchanged, for the caller to check. A
    `function_call` becomes `tool_calls`; an unknown sender raises `DataError`.
    """
    if not isinstance(messages, list):
        return messages
    found = []
    for index, message in enumerate(messages):
        is_sharegpt = isinstance(message, Mapping) and {"from", "value"} <= set(message)
        if not is_sharegpt or "role" in message:
            found.append(message)
        elif (sender := message["from"]) == "function_call":
            value = parse_line(_string(message, "value"))
            calls = [{"function": call} for call in (value if isinstance(value, list) else [value])]
            found.append({"role": "assistant", "content": "", "tool_calls": calls})
        elif sender in _SENDERS:
            found.append({"role": _SENDERS[sender], "content": message["value"]})
        else:
            raise DataError(
                f"messages[{index}] is from {shown(sender)}; allowed are {', '.join(_SENDERS)} and "
                "function_call."
            )
    return found


def _string(record: Mapping[str, Any], key: str) -> str:
    if not isinstance(record[key], str):
        raise DataError(f"{key!r} is a {type(record[key]).__name__}; a string is needed.")
    return record[key]


def encode_text(text: str, tokenizer: Any) -> list[int]:
    """Encode a text between two separators, or as a tokenizer of mlx-lm begins and ends it."""
    tokens = list(tokenizer.encode(text, add_special_tokens=True))
    end = getattr(tokenizer, "separator_id", tokenizer.eos_token_id)
    return tokens if end is None or tokens[-1:] == [end] else [*tokens, end]
