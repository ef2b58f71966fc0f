"""Splits an answer, while it is generated, into thoughts, text and calls of tools.

splitter = splitter_of(form)
for part in split(splitter, text, [token], is_last=False): ...
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from afm_mlx.guidance.call_forms import CallForm, Tools
from afm_mlx.guidance.thoughts import ThoughtForm


@dataclass(frozen=True)
class Text:
    """The next piece of an answer's text."""

    text: str


@dataclass(frozen=True)
class Thought:
    """The next piece of what a model writes before its answer, for itself."""

    text: str


@dataclass(frozen=True)
class CallBegins:
    """The beginning of a call of the tool `name`."""

    name: str


@dataclass(frozen=True)
class CallArguments:
    """The next piece of the JSON of the last call's arguments."""

    json: str


Part = Text | Thought | CallBegins | CallArguments


class AnswerSplitter:
    """Splits an answer into text, and the calls after it.

    Args:
        form: how the model writes calls.
        tools: definitions of the tools, which some parsers need.

    Attributes:
        calls: number of calls that have begun.
        in_calls: True once the mark of calls has come.
    """

    def __init__(self, form: CallForm, tools: Tools = ()) -> None:
        self._form, self._tools = form, tools
        self._names = {token: name for name, token in form.ids.items() if token >= 0}
        self._awaited: deque[str] = deque()  # names of control tokens whose text has not come yet
        self.calls = 0
        self.in_calls = False
        self._rest = ""  # text that may go on to a mark or a call's head
        self._arguments = _JsonEnd()
        self._head = form.head_pattern

    in_thought = False
    """True while a thought is written."""
    drops_line_breaks = False
    """True if line breaks that come now are no part of the answer: between a thought and its text."""

    @property
    def is_open(self) -> bool:
        """True if the calls are not complete."""
        if not self.in_calls:
            return False
        end = (self._form.tail + self._form.closing).strip()
        return self._arguments.is_open or not self.calls or end not in self._rest

    def closes(self, token: int) -> bool:
        """True for the control token at the end of calls."""
        name = self._names.get(token)
        return name is not None and self._form.closing.endswith(name)

    def is_hidden(self, token: int) -> bool:
        """True for a control token of calls, which is no part of the answer's text."""
        name = self._names.get(token)
        return name is not None and not any(name in mark for mark in self._form.thinking)

    def feed(self, text: str, token: int = -1) -> Iterator[Part]:
        """Yield the parts of the next text; `token` is its token, or -1 if it has none.

        A control token's name is a mark only if the token has come; other tokens can spell it, too.
        """
        if token in self._names:
            self._awaited.append(self._names[token])
        while self._awaited and self._awaited[0] in text:
            name = self._awaited.popleft()
            before, _, text = text.partition(name)
            if before:
                yield from self._take(before)
            yield from self._take_mark(name)
        if text:
            yield from self._take(text)

    def finish(self) -> Iterator[Part]:
        """Yield the parts that were held back at the end of an answer."""
        if not self.in_calls and self._rest:
            held, self._rest = self._rest, ""
            yield Text(held)

    def _take_mark(self, name: str) -> Iterator[Part]:
        if name == self._form.mark and not self.in_calls:
            self.in_calls = True
        else:
            yield from self._take(name)

    def _take(self, text: str) -> Iterator[Part]:
        if self.in_calls:
            yield from self._take_calls(text)
            return
        mark = self._form.mark
        if mark in self._form.ids:
            yield Text(text)
            return
        said, found, rest = self._partition(self._rest + text)
        self._rest = "" if found else rest
        if said:
            yield Text(said)
        if found:
            self.in_calls = True
            yield from self._take_calls(rest)

    def _partition(self, text: str) -> tuple[str, bool, str]:
        """Split text at a mark that is no control token; the third part may go on to a mark."""
        mark = self._form.mark
        if at := text.find(mark) + 1:
            return text[: at - 1], True, text[at - 1 + len(mark) :]
        held = next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)
        return text[: len(text) - held], False, text[len(text) - held :]

    def _take_calls(self, text: str) -> Iterator[Part]:
        while text or self._rest:
            if self._arguments.is_open:
                if not self._arguments.has_begun:  # the head's last space may come by itself
                    text = text.lstrip()
                end = self._arguments.read(text)
                if end:
                    yield CallArguments(text[:end])
                text = text[end:]
                if self._arguments.is_open:
                    return
            self._rest += text
            head = self._head.search(self._rest)
            if head is None:
                return
            name = head["name"]
            yield CallBegins(json.loads(name) if name[:1] == '"' else name)
            self.calls += 1
            text, self._rest = self._rest[head.end() :], ""
            self._arguments.begin()


class _JsonEnd:
    """Finds the end of a JSON value that comes in pieces: of one in brackets, or before a closing bracket."""

    def __init__(self) -> None:
        self.is_open = self.has_begun = False

    def begin(self) -> None:
        self.is_open, self.has_begun = True, False
        self._depth, self._in_string, self._is_escaped = 0, False, False

    def read(self, text: str) -> int:
        """Return the index in `text` at which the value ends; its length if it goes on."""
        self.has_begun = self.has_begun or bool(text)
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
                self._depth -= 1
                if self._depth <= 0:
                    self.is_open = False
                    return i + (self._depth == 0)
        return len(text)


class _WholeCallSplitter(AnswerSplitter):
    """For calls that are an answer's beginning, without a mark: Llama 3's."""

    _OPTIONAL = "<|python_tag|>"

    def __init__(self, form: CallForm, tools: Tools = ()) -> None:
        super().__init__(form, tools)
        self._is_text = False

    def _take_mark(self, name: str) -> Iterator[Part]:
        if self._is_text or name != self._OPTIONAL:
            yield from self._take(name)

    def _take(self, text: str) -> Iterator[Part]:
        if self.in_calls or self._is_text:
            yield from self._take_calls(text) if self.in_calls else iter([Text(text)])
            return
        self._rest += text
        start = '{"name": "'
        written = self._rest.lstrip()
        if written.startswith(start):
            self.in_calls = True
            yield from self._take_calls("")
        elif not start.startswith(written):
            self._is_text = True
            yield from self.finish()


class _BlockSplitter(AnswerSplitter):
    """For calls that are read by a parser when the mark after them has come."""

    def __init__(self, form: CallForm, tools: Tools = ()) -> None:
        super().__init__(form, tools)
        self._is_cut = False

    @property
    def is_open(self) -> bool:
        return self._is_cut or (self.in_calls and bool(self._rest))

    def _take_mark(self, name: str) -> Iterator[Part]:
        if self.in_calls and self._rest and self._form.closing.endswith(name):
            yield from self._read(self._rest + name)
        elif name == self._form.mark:
            self.in_calls, self._rest = True, self._rest + name
        else:
            yield from self._take(name)

    def _take_calls(self, text: str) -> Iterator[Part]:
        if self._rest or text.strip():  # white space between blocks is no text
            self._rest += text
        end = self._form.closing
        if end and not any(end.endswith(name) for name in self._form.ids) and end in self._rest:
            block, _, rest = self._rest.partition(end)
            yield from self._read(block + end)
            yield from self._take_calls(rest)

    def finish(self) -> Iterator[Part]:
        if self.in_calls and self._rest and not self._form.closing:
            yield from self._read(self._rest)
        elif self._rest:
            self._is_cut, held, self._rest = self.in_calls, self._rest, ""
            yield Text(held)

    def _read(self, block: str) -> Iterator[Part]:
        form, self._rest = self._form, ""
        assert form.parser is not None
        body = block.strip().removeprefix(form.opening).removesuffix(form.closing)
        try:
            calls = [
                (call["name"], json.dumps(call["arguments"], ensure_ascii=False, allow_nan=False))
                for call in form.parser(body, self._tools)
            ]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            yield Text(block)  # what can't be read, or is no JSON, is text
            return
        for name, arguments in calls:
            self.calls += 1
            yield CallBegins(name)
            yield CallArguments(arguments)


_RECIPIENT = "to=functions."


class _HarmonySplitter(AnswerSplitter):
    """For messages in channels: thoughts in `analysis`, calls by their recipient, and text in all others."""

    def __init__(self, form: CallForm, tools: Tools = ()) -> None:
        super().__init__(form, tools)
        self._body: type[Text] | type[Thought] | type[CallArguments] | None = None

    def begin_with(self, kind: type[Text] | type[Thought]) -> None:
        """Take the answer's beginning for text or a thought that the prompt has begun."""
        self._body = kind

    @property
    def in_thought(self) -> bool:  # type: ignore[override]
        return self._body is Thought

    @property
    def is_open(self) -> bool:
        return self._arguments.is_open or self._is_call_header

    @property
    def _is_call_header(self) -> bool:
        return self._body is None and _RECIPIENT in self._rest

    def is_hidden(self, token: int) -> bool:
        return self._body is not Text or token in self._names

    def _take_mark(self, name: str) -> Iterator[Part]:
        if name == "<|message|>" and self._body is None:
            yield from self._begin(self._rest)
            self._rest = ""
        elif name in ("<|start|>", "<|end|>"):
            self._body = None
        elif self._body is None:
            self._rest += name
        else:
            yield from self._take(name)

    def _begin(self, header: str) -> Iterator[Part]:
        recipient = header.partition(_RECIPIENT)[2]
        if recipient:
            self._body, self.in_calls = CallArguments, True
            self.calls += 1
            self._arguments.begin()
            yield CallBegins(recipient.split("<|")[0].split()[0])
        else:
            self._body = Thought if "<|channel|>analysis" in header else Text

    def _take(self, text: str) -> Iterator[Part]:
        if self._body is None:
            self._rest += text
        elif self._body is not CallArguments:
            yield self._body(text)
        elif self._arguments.is_open and (end := self._arguments.read(text)):
            yield CallArguments(text[:end])

    def finish(self) -> Iterator[Part]:
        if self._is_call_header:
            return
        is_header = "<|channel|>" in self._rest or self._rest.strip() in ("", "assistant")
        if self._body is None and not is_header:
            yield Text(self._rest)  # an answer that keeps to no form
        self._rest = ""


class ThoughtSplitter:
    """Splits thoughts in marks off an answer; the rest is text, or goes to the splitter of calls.

    Line breaks around a thought are part of neither. As in `AnswerSplitter`, names are marks if their tokens
    have come.

    Args:
        form: how the model writes thoughts.
        inner: the splitter of calls; pass None for answers without calls.
        is_begun: True if the prompt has begun a thought.
    """

    def __init__(self, form: ThoughtForm, inner: AnswerSplitter | None, is_begun: bool) -> None:
        self._names = {form.ids[name]: name for name in (form.start_name, form.end_name)}
        self._start, self._end = form.start_name, form.end_name
        self._label = form.start.removeprefix(form.start_name)
        self._inner = inner
        self._awaited: deque[str] = deque()
        self.in_thought = is_begun
        """True while a thought is written, as its tokens say: their text may come later."""
        self._in_text = not is_begun  # as the text says
        self._rest = ""  # line breaks that may end a thought, or its label
        self._is_begun = is_begun  # the thought has text, or its label was in the prompt
        self._trims = (
            is_begun  # line breaks at the beginning of a thought, or of the text after one
        )

    @property
    def drops_line_breaks(self) -> bool:
        """See `AnswerSplitter`."""
        return self._in_text and self._trims

    @property
    def in_calls(self) -> bool:
        """See `AnswerSplitter`."""
        return self._inner is not None and self._inner.in_calls

    @property
    def is_open(self) -> bool:
        """See `AnswerSplitter`."""
        return self._inner is not None and self._inner.is_open

    def closes(self, token: int) -> bool:
        """See `AnswerSplitter`."""
        return self._inner is not None and self._inner.closes(token)

    def is_hidden(self, token: int) -> bool:
        """True for tokens of thoughts, and control tokens of calls."""
        if self.in_thought or token in self._names:
            return True
        return self._inner is not None and self._inner.is_hidden(token)

    def feed(self, text: str, token: int = -1) -> Iterator[Part]:
        """Yield the parts of the next text; `token` is its token, or -1 if it has none."""
        if token in self._names:
            is_mark = (self._names[token] == self._end) == self.in_thought
            if is_mark and not self.in_calls:
                self.in_thought = not self.in_thought
                self._awaited.append(self._names[token])
        elif not self.in_thought and self._inner is not None:
            yield from self._inner.feed("", token)
        while self._awaited and self._awaited[0] in text:
            before, name, text = text.partition(self._awaited.popleft())
            yield from self._take(before)
            self._in_text = name == self._end
            self._rest, self._is_begun, self._trims = "", False, self._in_text
        yield from self._take(text)

    def _take(self, text: str) -> Iterator[Part]:
        if not text:
            return
        if self._in_text:
            text = text.lstrip("\n") if self._trims else text
            if text:
                self._trims = False
                yield from iter([Text(text)]) if self._inner is None else self._inner.feed(text)
            return
        text, self._rest = self._rest + text, ""
        if not self._is_begun:
            if len(text) < len(self._label):
                self._rest = text
                return
            text = text.removeprefix(self._label)
            self._is_begun = self._trims = True
        if self._trims:
            text = text.lstrip("\n")
            self._trims = not text
        said = text.rstrip("\n")
        self._rest = text[len(said) :]
        if said:
            yield Thought(said)

    def finish(self) -> Iterator[Part]:
        """Yield the parts that were held back at the end of an answer."""
        if self._inner is not None:
            yield from self._inner.finish()


AnySplitter = AnswerSplitter | ThoughtSplitter


def splitter_for(
    form: CallForm | None, tools: Tools, thoughts: ThoughtForm | None, prompt: Sequence[int]
) -> AnySplitter | None:
    """Make the splitter of one answer; return None if all of the answer is text.

    Args:
        form: how the model writes calls; pass None for an answer without calls.
        tools: definitions of the tools.
        thoughts: how the model writes thoughts; pass None for a model that writes none.
        prompt: the tokens before the answer, which may have begun a thought.
    """
    is_begun = thoughts is not None and thoughts.is_begun(prompt)
    if thoughts is not None and thoughts.is_harmony:
        made = _HarmonySplitter(form or CallForm("Harmony", ids=thoughts.ids), tools)
        if thoughts.is_in_message(prompt):
            made.begin_with(Thought if is_begun else Text)
        return made
    inner = None if form is None else splitter_of(form, tools)
    return inner if thoughts is None else ThoughtSplitter(thoughts, inner, is_begun)


def splitter_of(form: CallForm, tools: Tools = ()) -> AnswerSplitter:
    """Make the splitter of one answer to a chat with these tools."""
    kind: type[AnswerSplitter] = AnswerSplitter if form.opening else _WholeCallSplitter
    if form.is_harmony:
        kind = _HarmonySplitter
    elif form.parser is not None:
        kind = _BlockSplitter
    return kind(form, tools)


def split(splitter: AnySplitter, text: str, tokens: Iterable[int], is_last: bool) -> Iterator[Part]:
    """Yield the parts that an answer's next text and tokens complete; a token's text may come later.

    `is_last` yields what the splitter has held back, too.
    """
    for token in tokens:
        yield from splitter.feed("", token)
    yield from splitter.feed(text)
    if is_last:
        yield from splitter.finish()


def read_answer(form: CallForm, text: str, tools: Tools = ()) -> tuple[str, list[dict[str, Any]]]:
    """Return the text and the calls of a whole answer, in which every name of a control token is that token.

    Raises `ValueError` if a call is not complete, or has arguments that are not JSON.
    """
    splitter = splitter_of(form, tools)
    said: list[str] = []
    calls: list[tuple[str, list[str]]] = []
    by_place = sorted((at, i) for n, i in form.ids.items() for at in _places(text, n))
    ends = [at for at, _ in by_place[1:]] + [len(text)]
    pieces = [(text[: by_place[0][0]] if by_place else text, -1)]
    pieces += (
        [(text[at:end], token) for (at, token), end in zip(by_place, ends, strict=True)]
        if by_place
        else []
    )
    for part in [p for piece in pieces for p in splitter.feed(*piece)] + list(splitter.finish()):
        if isinstance(part, Text):
            said.append(part.text)
        elif isinstance(part, CallBegins):
            calls.append((part.name, []))
        elif isinstance(part, CallArguments):
            calls[-1][1].append(part.json)
    if splitter.is_open:
        raise ValueError("the last call is not complete")
    return "".join(said), [
        {"name": name, "arguments": json.loads("".join(pieces))} for name, pieces in calls
    ]


def _places(text: str, name: str) -> Iterator[int]:
    at = text.find(name)
    while at >= 0:
        yield at
        at = text.find(name, at + 1)
