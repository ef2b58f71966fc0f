"""Transcripts: a session's history, as entries in the JSON of Apple's framework."""

from __future__ import annotations

import itertools
import json
import threading
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from afm_mlx.fm.errors import DecodingFailureError
from afm_mlx.fm.generable import GeneratedContent

Entry = dict[str, Any]
Message = dict[str, Any]


class Transcript:
    """What was said in a session, in order: instructions, prompts, answers, calls of tools and their results.

    Entries are the framework's JSON, kept as they were read. A request makes a `copy`, adds to it while it is
    answered, and hands it to `merge` when the answer is complete: until then nothing of it is seen. Sessions
    may share a transcript: each adds its turns behind those that are there.
    """

    _KIND: ClassVar[str] = "FoundationModels.Transcript"

    def __init__(self) -> None:
        self._document: dict[str, Any] = {
            "type": self._KIND,
            "version": 1,
            "transcript": {"entries": []},
        }
        self._copied: list[Entry] = []  # the entries of the transcript that this one is a copy of
        self._merging = threading.Lock()

    @property
    def _entries(self) -> list[Entry]:
        entries: list[Entry] = self._document["transcript"]["entries"]
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
        with self._merging:
            copied, kept = ({id(e) for e in t} for t in (draft._copied, draft._entries))
            *older, own = _parts(draft._entries)
            here = [e for e in self._entries if id(e) not in copied or id(e) in kept]
            before, *turns = _parts(here)
            added = [e for e in joined(older) if id(e) not in copied]
            self._entries[:] = [*before, *added, *joined(turns), *own]

    def turns(self) -> tuple[list[Entry], list[list[Entry]]]:
        """What comes before the first prompt, and the turns: each a prompt and all that follows it."""
        before, *turns = _parts(self._entries)
        return before, turns

    def with_entries(self, entries: Sequence[Entry]) -> Transcript:
        """A transcript with these entries in place of its own."""
        other = self.copy()
        other._entries[:], other._copied = entries, self._copied
        return other

    def add_instructions(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Add the session's instructions.

        Args:
            text: what the model is told before all else; may be empty.
            tools: definitions of the tools that it may call, see `Tool.tool_definition`.
        """
        entry = self._add("instructions", contents=[_text(text)] if text else [])
        if tools:
            entry["tools"] = json_copy(list(tools))

    def add_prompt(self, text: str, response_format: Mapping[str, Any] | None = None) -> None:
        """Add what the user asks.

        Args:
            text: the prompt.
            response_format: `{"type": "json_schema", "json_schema": {"name", "schema"}}`, see
                `GenerationSchema.response_format`; none asks for text.
        """
        entry = self._add("user", contents=[_text(text)], options={})
        if response_format is not None:
            schema = json_copy(dict(response_format["json_schema"]))
            entry["responseFormat"] = {"type": "jsonSchema", "jsonSchema": schema}

    def add_response(
        self, content: str | GeneratedContent, assets: Sequence[str] = (), source: str = ""
    ) -> None:
        """Add the answer.

        Args:
            content: its text, or what was generated.
            assets: ids of the models and adapters that answered.
            source: the name of the schema that generated content follows.
        """
        if isinstance(content, str):
            part: dict[str, Any] = {"type": "text", "text": content, "id": "0"}
        else:
            structure = {"source": source, "content": json_copy(content.value())}
            part = {"type": "structure", "structure": structure, "id": "0"}
        self._add("response", contents=[part], assets=list(assets))

    def add_tool_calls(self, calls: Sequence[Mapping[str, Any]], text: str = "") -> list[str]:
        """Add calls of tools that the model wants made.

        Args:
            calls: `name` and `arguments` (JSON: a dict, or text) of each.
            text: what the model said before them.

        Returns:
            The calls' ids, for `add_tool_output`.
        """
        made = [
            {"id": _new_id(), "name": c["name"], "arguments": _json_text(c["arguments"])}
            for c in calls
        ]
        said = {"contents": [{"type": "text", "text": text, "id": "0"}]} if text else {}
        self._add("response", **said, toolCalls=made)
        return [call["id"] for call in made]

    def add_tool_output(self, call_id: str, name: str, text: str) -> None:
        """Add what a call gave.

        Args:
            call_id: what `add_tool_calls` returned for it.
            name: the tool.
            text: its result.
        """
        entry = self._add("tool", toolCallID=call_id, toolName=name, contents=[_text(text)])
        entry["id"] = call_id

    def messages(self) -> tuple[list[Message], list[dict[str, Any]]]:
        """The history as `Tokenizer.apply_chat_template` takes it.

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

    def _add(self, role: str, **fields: Any) -> Entry:
        entry = {"role": role, "id": _new_id(), **fields}
        self._entries.append(entry)
        return entry


def _parts(entries: Sequence[Entry]) -> list[list[Entry]]:
    """The entries before the first prompt, then those of each turn."""
    starts = [i for i, entry in enumerate(entries) if entry["role"] == "user"]
    ends = [0, *starts, len(entries)]
    return [list(entries[i:j]) for i, j in itertools.pairwise(ends)]


def joined(parts: Sequence[list[Entry]]) -> list[Entry]:
    """Returns the entries of several lists as one list."""
    return [entry for part in parts for entry in part]


_ROLES = {"instructions": "system", "user": "user", "response": "assistant", "tool": "tool"}


def _message(entry: Entry, where: str) -> Message:
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
        return _json_text(part["structure"]["content"])
    raise DecodingFailureError(
        f"{where} has a part of the type {part['type']!r}; this model reads text and generated objects."
    )


def json_copy(value: Any) -> Any:
    """A copy of a JSON value, which is faster than `deepcopy` and takes values of more levels.

    Raises:
        TypeError, ValueError, RecursionError: for what JSON can't hold.
    """
    return json.loads(json.dumps(value, allow_nan=False))


def _json_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text, "id": _new_id()}


def _new_id() -> str:
    return str(uuid.uuid4()).upper()
