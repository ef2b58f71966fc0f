"""Transcripts: a session's history, as entries in the JSON of Apple's framework."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, overload

from afm_mlx.errors import shown
from afm_mlx.fm import transcript_entries as kinds
from afm_mlx.fm.errors import DecodingFailureError
from afm_mlx.fm.generable import GeneratedContent
from afm_mlx.fm.generation_options import GenerationOptions
from afm_mlx.fm.transcript_entries import JSON, json_copy, json_text

Message = dict[str, Any]

_merging = threading.Lock()


class Transcript(Sequence[kinds.Entry]):
    """What was said in a session, in order: instructions, prompts, answers, calls of tools and their results.

    A sequence of entries, of the classes `Transcript.Instructions`, `Prompt`, `Response`, `ToolCalls` and
    `ToolOutput`. They are the framework's JSON, kept as it was read. A request makes a `copy`, adds to it while
    it is answered, and hands it to `merge` when the answer is complete: until then nothing of it is seen.
    Sessions may share a transcript: each adds its turns behind those that are there.

    Args:
        entries: such entries, of another transcript or new ones.
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
    OtherSegment = kinds.OtherSegment

    def __init__(self, entries: Iterable[kinds.Entry] = ()) -> None:
        self._document: dict[str, Any] = {
            "type": self._KIND,
            "version": 1,
            "transcript": {"entries": [_json_of(entry) for entry in entries]},
        }
        self._copied: list[JSON] = []  # the entries of the transcript that this one is a copy of

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
    async def from_dict(cls, dict: Mapping[str, Any]) -> Transcript:
        """The transcript that `to_dict`, or an app, wrote.

        Raises:
            DecodingFailureError: with the place, for what has not the form of a transcript.
        """
        from afm_mlx.fm.transcript_format import checked_transcript

        transcript = cls()
        transcript._document = checked_transcript(dict)
        return transcript

    async def to_dict(self) -> dict[str, Any]:
        """The transcript as JSON: `type`, `version`, and `transcript` with its `entries`."""
        copied: dict[str, Any] = json_copy(self._document)
        return copied

    def copy(self) -> Transcript:
        """A transcript with the same entries, for a request to add to."""
        other = type(self)()
        document = self._document
        entries = list(self._entries)
        other._document = {**document, "transcript": {**document["transcript"], "entries": entries}}
        other._copied = list(entries)
        return other

    def merge(self, draft: Transcript) -> None:
        """Take over, in one step, what a request has changed in a copy.

        Those are its last turn, and older entries that it took out, or added behind the instructions.
        """
        with _merging:
            copied, kept = ({id(e) for e in t} for t in (draft._copied, draft._entries))
            *older, own = _parts(draft._entries)
            here = [e for e in self._entries if id(e) not in copied or id(e) in kept]
            before, *turns = _parts(here)
            added = [e for e in joined(older) if id(e) not in copied]
            self._entries[:] = [*before, *added, *joined(turns), *own]

    def turns(self) -> tuple[list[JSON], list[list[JSON]]]:
        """What comes before the first prompt, and the turns: each a prompt and all that follows it."""
        before, *turns = _parts(self._entries)
        return before, turns

    def last_turn(self) -> list[kinds.Entry]:
        """The last prompt and all that follows it."""
        return [kinds.Entry.of(entry) for entry in _parts(self._entries)[-1]]

    def with_entries(self, entries: Sequence[JSON]) -> Transcript:
        """A transcript with these entries in place of its own."""
        other = self.copy()
        other._entries[:], other._copied = entries, self._copied
        return other

    def add_instructions(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Add the session's instructions, see `Instructions`."""
        self._add(kinds.Instructions(text, tools))

    def add_prompt(
        self,
        text: str,
        response_format: Mapping[str, Any] | None = None,
        options: GenerationOptions | None = None,
        tool_choice: str = "auto",
    ) -> None:
        """Add what the user asks, see `Prompt`."""
        self._add(kinds.Prompt(text, options, response_format, tool_choice))

    def add_response(
        self, content: str | GeneratedContent, assets: Sequence[str] = (), source: str = ""
    ) -> None:
        """Add the answer, see `Response`."""
        self._add(kinds.Response(content, assets, source))

    def add_tool_calls(self, calls: Sequence[Mapping[str, Any]], text: str = "") -> list[str]:
        """Add the model's tool calls, see `ToolCalls`.

        Returns:
            The calls' ids, for `add_tool_output`.
        """
        made = self._add(kinds.ToolCalls(calls, text))
        return [call["id"] for call in made["toolCalls"]]

    def add_tool_output(self, call_id: str, name: str, text: str) -> None:
        """Add what a call gave, see `ToolOutput`."""
        self._add(kinds.ToolOutput(call_id, name, text))

    def messages(self) -> tuple[list[Message], list[dict[str, Any]]]:
        """The history as `AFMTokenizer.apply_chat_template` takes it.

        Returns:
            The messages, and the definitions of the tools that the instructions name.

        Raises:
            DecodingFailureError: for a part of a message that is neither text nor an object, such as an image.
        """
        messages = []
        tools: list[dict[str, Any]] = []
        for index, entry in enumerate(self._entries):
            tools += json_copy(entry.get("tools") or [])
            message = _message(entry, f"Entry {index} of the transcript")
            if message["role"] != "system" or message["content"]:
                messages.append(message)
        return messages, tools

    def _add(self, entry: kinds.Entry) -> JSON:
        self._entries.append(entry._json)
        return entry._json


def _json_of(entry: kinds.Entry) -> JSON:
    if not isinstance(entry, kinds.Entry):
        raise TypeError(
            f"An entry of a transcript is needed, such as Transcript.Prompt; got {shown(entry)}."
        )
    return entry._json


def _parts(entries: Sequence[JSON]) -> list[list[JSON]]:
    """Split entries into the ones before the first prompt, then one list per turn."""
    starts = [i for i, entry in enumerate(entries) if entry["role"] == "user"]
    ends = [0, *starts, len(entries)]
    return [list(entries[i:j]) for i, j in itertools.pairwise(ends)]


def joined(parts: Sequence[list[JSON]]) -> list[JSON]:
    """Returns the entries of several lists as one list."""
    return [entry for part in parts for entry in part]


_ROLES = {"instructions": "system", "user": "user", "response": "assistant", "tool": "tool"}


def _message(entry: JSON, where: str) -> Message:
    contents = entry.get("contents") or []
    message: Message = {
        "role": _ROLES[entry["role"]],
        "content": "\n".join(_content_text(part, where) for part in contents),
    }
    if entry.get("toolCalls"):
        message["tool_calls"] = [
            {"function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in entry["toolCalls"]
        ]
    if entry.get("responseFormat"):
        schema = json_copy(entry["responseFormat"]["jsonSchema"])
        message["response_format"] = {"type": "json_schema", "json_schema": schema}
    return message


def _content_text(part: Mapping[str, Any], where: str) -> str:
    if part["type"] == "text":
        return str(part["text"])
    if part["type"] == "structure":
        return json_text(part["structure"]["content"])
    raise DecodingFailureError(
        f"{where} has a part of the type {part['type']!r}; this model reads text and generated objects."
    )
