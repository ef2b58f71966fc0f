"""YAML files of arguments: scalars, lists and maps of bounded size and depth, and nothing else of YAML.

Aliases, which let a short file stand for gigabytes, and tags, which name types, are refused. What is no null,
boolean or number is text; so are dates.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml

from afm_mlx.cli.parser import UsageError, check_text
from afm_mlx.errors import shown
from afm_mlx.files import read_file

MAX_BYTES = 1 << 16
MAX_DEPTH = 20
MAX_DIGITS = 400
"""The most characters of a number. A float ends at 309 digits, and Python reads integers of 4,300."""

_NULL = ("", "~", "null")
_BOOLEANS = dict.fromkeys(("true", "yes", "on"), True) | dict.fromkeys(
    ("false", "no", "off"), False
)
_INTEGER = re.compile(
    r"[-+]?(0x[\da-f][\da-f_]*|0o[0-7][0-7_]*|0b[01][01_]*|\d[\d_]*)", re.IGNORECASE | re.ASCII
)
# YAML 1.1 wants a dot in a number with an exponent; people write 1e-5.
_FLOAT = re.compile(
    r"[-+]?(\d[\d_]*(\.\d*)?|\.\d+)(e[-+]?\d+)?|[-+]?\.inf|\.nan", re.IGNORECASE | re.ASCII
)
# libyaml, which is in PyYAML's wheels, reads thousands of brackets in milliseconds.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Setting(NamedTuple):
    """A value of a file, and the line where it begins."""

    value: Any
    line: int


def read_yaml(path: Path) -> dict[str, Setting]:
    """The `name: value` lines of a file.

    Raises:
        UsageError: names the file, the line, and what is wrong there.
    """
    text = _text_of(path)
    try:
        return _Reader(path, text).settings()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        _fail(path, mark.line + 1, error.problem or error.context)


def _fail(path: Path, line: int, what: str) -> NoReturn:
    raise UsageError(f"the config file {path} is not valid YAML, line {line}: {what}.")


def _text_of(path: Path) -> str:
    try:
        content = read_file(path, MAX_BYTES, pipes=True)
    except OSError as error:
        raise UsageError(f"the config file {path} can't be read: {error.strerror}.") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        _fail(path, line, f"byte 0x{content[error.start]:02x} is no UTF-8")
    if found := yaml.reader.Reader.NON_PRINTABLE.search(text):
        line = text.count("\n", 0, found.start()) + 1
        _fail(path, line, f"the character {shown(found[0])} is not allowed")
    return text


class _Reader:
    """Makes values from the events of PyYAML's parser, so that it makes nothing that is not allowed."""

    def __init__(self, path: Path, text: str):
        self._path = path
        self._loader = _LOADER(text)

    def settings(self) -> dict[str, Setting]:
        self._next()  # of the stream
        if self._at(yaml.StreamEndEvent):
            return {}
        self._next()  # of the document
        first = self._next()
        if isinstance(first, yaml.MappingStartEvent):
            self._check(first, 0)
            found = self._mapping(1)
        elif self._value(first, 0) is None:
            found = {}
        else:
            self._fail(first, "'name: value' lines are needed")
        self._next()
        if not self._at(yaml.StreamEndEvent):
            self._fail(self._next(), "a second document begins; one is allowed")
        return found

    def _at(self, kind: type[yaml.Event]) -> bool:
        """True if the next event is of a kind."""
        return isinstance(self._next(peek=True), kind)

    def _next(self, peek: bool = False) -> yaml.Event:
        try:
            return self._loader.peek_event() if peek else self._loader.get_event()
        except (ValueError, OverflowError):  # of `chr`, in the loader that is Python
            _fail(self._path, self._loader.line + 1, "an escape stands for no character")

    def _fail(self, event: yaml.Event, what: str) -> NoReturn:
        _fail(self._path, event.start_mark.line + 1, what)

    def _check(self, event: yaml.Event, depth: int) -> None:
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            self._fail(event, "anchors (&) and aliases (*) are not taken; write the value out")
        if event.tag is not None:
            self._fail(event, f"the tag {shown(event.tag)} is not taken; leave it out")
        if depth > MAX_DEPTH:
            self._fail(event, f"lists and maps lie deeper than {MAX_DEPTH} in each other")

    def _value(self, event: yaml.Event, depth: int) -> Any:
        self._check(event, depth)
        if isinstance(event, yaml.MappingStartEvent):
            return {name: setting.value for name, setting in self._mapping(depth + 1).items()}
        if isinstance(event, yaml.SequenceStartEvent):
            items = []
            while not self._at(yaml.SequenceEndEvent):
                items.append(self._value(self._next(), depth + 1))
            self._next()
            return items
        if not event.implicit[0]:  # in quotes, or a block of lines
            return self._text(event)
        return self._plain(event)

    def _mapping(self, depth: int) -> dict[str, Setting]:
        found: dict[str, Setting] = {}
        while not self._at(yaml.MappingEndEvent):
            event = self._next()
            self._check(event, depth)
            if not isinstance(event, yaml.ScalarEvent):
                self._fail(event, "a name is needed before a colon, and no list or map")
            name, line = self._text(event), event.start_mark.line + 1
            if name in found:
                self._fail(event, f"{shown(name)} is there already, in line {found[name].line}")
            found[name] = Setting(self._value(self._next(), depth), line)
        self._next()
        return found

    def _text(self, event: yaml.ScalarEvent) -> str:
        where = f"the config file {self._path}, line {event.start_mark.line + 1},"
        check_text(where, event.value)
        return event.value

    def _plain(self, event: yaml.ScalarEvent) -> Any:
        text = self._text(event)
        lowered = text.lower()
        if lowered in _NULL:
            return None
        if lowered in _BOOLEANS:
            return _BOOLEANS[lowered]
        kind = int if _INTEGER.fullmatch(text) else float if _FLOAT.fullmatch(text) else str
        if kind is str:
            return text
        if len(text) > MAX_DIGITS:
            self._fail(event, f"a number has {len(text):,} characters; allowed are {MAX_DIGITS}")
        digits = lowered.replace("_", "")
        if kind is float:
            return float(digits.replace(".inf", "inf").replace(".nan", "nan"))
        # A leading zero is nothing special since YAML 1.2.
        return int(digits, 0 if digits.lstrip("+-")[1:2] in ("x", "o", "b") else 10)
