"""Transcripts: a session's history, as entries in the JSON of Apple's framework."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, ClassVar, Literal, overload

import msgspec

from afm_mlx.errors import shown
from afm_mlx.fm import transcript_entries as kinds
from afm_mlx.fm.errors import DecodingFailureError
from afm_mlx.fm.generable import GeneratedContent
from afm_mlx.fm.generation_options import GenerationOptions
from afm_mlx.fm.prompt import Prompt as PromptParts
from afm_mlx.fm.transcript_entries import JSON, json_copy, json_text

_merging = threading.Lock()


class Transcript(Sequence[kinds.Entry]):
    """A session's history in order: instructions, prompts, answers, tool calls and their outputs.

    A sequence of entries, of the classes `Transcript.Instructions`, `Prompt`, `Response`, `ToolCalls` and
    `ToolOutput`. Their JSON is kept as it was read. A request adds to a `copy` while it is answered, and passes
    that to `merge` when the answer is complete; until then the transcript doesn't change. Sessions may share a
    transcript: each adds its turns after those that are there.

    Args:
        entries: new entries, or entries of another transcript.
    """

    _KIND: ClassVar[str] = "FoundationModels.Transcript"

    Entry = kinds.Entry
    Instructions = kinds.Instructions
    Prompt = kinds.Prompt
    Response = kinds.Response
    ToolCalls = kinds.ToolCalls
    ToolOutput = kinds.ToolOutput
    ToolCall = kinds.ToolCall
    ToolDefinition = kinds.ToolDefinition
    TextSegment = kinds.TextSegment
    StructuredSegment = kinds.StructuredSegment
    ImageSegment = kinds.ImageSegment
    OtherSegment = kinds.OtherSegment

    def __init__(self, entries: Iterable[kinds.Entry] = ()) -> None:
        given = list(entries)
        for entry in given:
            if not isinstance(entry, kinds.Entry):
                raise TypeError(
                    "An entry of a transcript is needed, such as Transcript.Prompt; got "
                    f"{shown(entry)}."
                )
        self._document: JSON = {
            "type": self._KIND,
            "version": 1,
            "transcript": {"entries": [entry._json for entry in given]},
        }
        self._copied: list[JSON] = []  # entries of the transcript that this is a copy of

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> kinds.Entry: ...
    @overload
    def __getitem__(self, index: slice) -> list[kinds.Entry]: ...
    def __getitem__(self, index: int | slice) -> kinds.Entry | list[kinds.Entry]:
        if isinstance(index, slice):
            return [kinds.Entry.of(entry) for entry in self._entries[index]]
        return kinds.Entry.of(self._entries[index])

    def __repr__(self) -> str:
        return f"Transcript({self[:]!r})"

    @property
    def _entries(self) -> list[JSON]:
        entries: list[JSON] = self._document["transcript"]["entries"]
        return entries

    @classmethod
    async def from_dict(cls, dict: Mapping[str, object]) -> Transcript:
        """Read what `to_dict`, or an app, wrote; raise `DecodingFailureError`, which names the faulty place."""
        transcript = cls()
        transcript._document = _checked_document(dict)
        return transcript

    async def to_dict(self) -> JSON:
        """Return the transcript as JSON: `type`, `version`, and `transcript` with its `entries`."""
        copied: JSON = json_copy(self._document)
        return copied

    def copy(self) -> Transcript:
        """Return a transcript with the same entries, for a request to add to."""
        return self.with_entries(self._entries, self._entries)

    def with_entries(
        self, entries: Sequence[JSON], copied: Sequence[JSON] | None = None
    ) -> Transcript:
        """Return a transcript with other entries; `copied` are those that `merge` counts as old ones."""
        other = type(self)()
        document = self._document
        inner = {**document["transcript"], "entries": list(entries)}
        other._document = {**document, "transcript": inner}
        other._copied = list(self._copied if copied is None else copied)
        return other

    def merge(self, draft: Transcript) -> None:
        """Apply to this transcript, in one step, what a request changed in its copy, `draft`.

        The changes are a new last turn, older entries removed, and entries added after the instructions.
        """
        with _merging:
            copied, kept = ({id(e) for e in t} for t in (draft._copied, draft._entries))
            *older, own = _parts(draft._entries)
            here = [e for e in self._entries if id(e) not in copied or id(e) in kept]
            before, *turns = _parts(here)
            added = [e for e in chain(*older) if id(e) not in copied]
            self._entries[:] = [*before, *added, *chain(*turns), *own]

    def turns(self) -> tuple[list[JSON], list[list[JSON]]]:
        """Return the entries before the first prompt, and the turns: each a prompt and all that follows it."""
        before, *turns = _parts(self._entries)
        return before, turns

    def last_turn(self) -> list[kinds.Entry]:
        """Return the last prompt and all entries after it."""
        return [kinds.Entry.of(entry) for entry in _parts(self._entries)[-1]]

    def add_instructions(self, text: str, tools: Sequence[JSON] = ()) -> None:
        """Add the session's instructions, and the definitions of its tools."""
        self._entries.append(kinds.Instructions(text, tools)._json)

    def add_prompt(
        self,
        prompt: PromptParts,
        response_format: JSON | None = None,
        options: GenerationOptions | None = None,
        tool_choice: str = "auto",
    ) -> None:
        """Add the user's prompt; for the arguments, see `Transcript.Prompt`.

        Images are read; raises `ImagePromptError` if a file can't be read.
        """
        self._entries.append(kinds.Prompt(prompt, options, response_format, tool_choice)._json)

    def add_response(
        self, content: str | GeneratedContent, assets: Sequence[str] = (), source: str = ""
    ) -> None:
        """Add the answer: its text, or the content that was generated under the schema named `source`.

        `assets` are the ids of the models and adapters that answered.
        """
        self._entries.append(kinds.Response(content, assets, source)._json)

    def add_tool_calls(self, calls: Sequence[JSON], text: str = "") -> list[str]:
        """Add calls with `name` and `arguments`, and the model's `text` before them; return the calls' ids."""
        entry = kinds.ToolCalls(calls, text)
        self._entries.append(entry._json)
        return [call["id"] for call in entry._json["toolCalls"]]

    def add_tool_output(self, call_id: str, name: str, text: str) -> None:
        """Add the output `text` of the call `call_id` of the tool `name`."""
        self._entries.append(kinds.ToolOutput(call_id, name, text)._json)

    @property
    def images(self) -> list[kinds.ImageSegment]:
        """The images of all entries."""
        parts = [part for entry in self._entries for part in entry.get("contents") or ()]
        return [image for part in parts if (image := kinds.ImageSegment.of(part)) is not None]

    def messages(
        self, mark: Callable[[kinds.ImageSegment], str] | None = None
    ) -> tuple[list[JSON], list[JSON]]:
        """Convert to what `AFMTokenizer.apply_chat_template` takes: messages, and tools of the instructions.

        `mark` maps an image to the text that stands for it (`ChatImages.mark`); pass None for a model that
        reads text only.

        Raises:
            DecodingFailureError: for a part of a message that the model can't read.
        """
        messages: list[JSON] = []
        tools: list[JSON] = []
        for index, entry in enumerate(self._entries):
            tools += json_copy(entry.get("tools") or [])
            content, separator = "", ""
            for part in entry.get("contents") or []:
                after = "\n"
                if part["type"] == "text":
                    text = str(part["text"])
                elif part["type"] == "structure":
                    text = json_text(part["structure"]["content"])
                elif mark is not None and (image := kinds.ImageSegment.of(part)) is not None:
                    text = mark(image)
                    if image.label is not None:
                        text = f"{image.label}: {text}"
                    else:  # it stands between texts like a letter, as in training
                        separator = after = ""
                else:
                    raise DecodingFailureError(
                        f"Entry {index} of the transcript has a part of the type {part['type']!r}; this model "
                        f"reads text{', images' if mark else ''} and generated objects."
                    )
                content, separator = content + separator + text, after
            message: JSON = {"role": _ROLES[entry["role"]], "content": content}
            if entry.get("toolCalls"):
                message["tool_calls"] = [
                    {"function": {"name": call["name"], "arguments": call["arguments"]}}
                    for call in entry["toolCalls"]
                ]
            if entry.get("responseFormat"):
                schema = json_copy(entry["responseFormat"]["jsonSchema"])
                message["response_format"] = {"type": "json_schema", "json_schema": schema}
            if message["role"] != "system" or message["content"]:
                messages.append(message)
        return messages, tools


def _parts(entries: Sequence[JSON]) -> list[list[JSON]]:
    """Split entries into the ones before the first prompt, then one list per turn."""
    starts = [i for i, entry in enumerate(entries) if entry["role"] == "user"]
    ends = [0, *starts, len(entries)]
    return [list(entries[i:j]) for i, j in pairwise(ends)]


_ROLES = {"instructions": "system", "user": "user", "response": "assistant", "tool": "tool"}


# The form of a transcript's JSON, as far as it is read; other fields are kept.


class _Structure(msgspec.Struct):
    content: Any
    source: str = ""


class _Content(msgspec.Struct):
    type: str
    text: str | None = None
    structure: _Structure | None = None


class _JSONSchema(msgspec.Struct):
    name: str
    schema: JSON


class _ResponseFormat(msgspec.Struct):
    jsonSchema: _JSONSchema


class _Call(msgspec.Struct):
    name: str
    arguments: str
    id: str = ""


class _Entry(msgspec.Struct):
    role: Literal["instructions", "user", "response", "tool"]
    id: str
    contents: list[_Content] | None = None
    tools: list[JSON] | None = None
    responseFormat: _ResponseFormat | None = None
    toolCalls: list[_Call] | None = None
    options: JSON | None = None
    assets: list[str] | None = None
    toolName: str | None = None
    toolCallID: str | None = None


class _Entries(msgspec.Struct):
    entries: list[_Entry]


class _Document(msgspec.Struct):
    transcript: _Entries


def _checked_document(document: Mapping[str, object]) -> JSON:
    """Check that a transcript's JSON has all that `Transcript` reads; return a copy."""
    try:
        found = msgspec.convert(document, _Document)
    except msgspec.ValidationError as error:
        raise DecodingFailureError(f"This is not a transcript: {error}.") from None
    for index, entry in enumerate(found.transcript.entries):
        where = f"$.transcript.entries[{index}]"
        if entry.contents is None and not entry.toolCalls:
            raise DecodingFailureError(f"This is not a transcript: {where} has no `contents`.")
        for content in entry.contents or []:
            if content.type in ("text", "structure") and getattr(content, content.type) is None:
                raise DecodingFailureError(
                    f"This is not a transcript: {where} has contents of the type {content.type!r} "
                    f"without `{content.type}`."
                )
    try:
        copied: JSON = json_copy(document)
    except (TypeError, ValueError, RecursionError) as error:
        raise DecodingFailureError(
            f"This is not a transcript: it holds values that JSON can't: {error}."
        ) from None
    return copied
