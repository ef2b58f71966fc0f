"""Entries of a transcript: the framework's JSON, with attributes to read it and arguments to make it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from afm_mlx.fm.errors import DecodingFailureError
from afm_mlx.fm.generable import GeneratedContent
from afm_mlx.fm.generation_options import GenerationOptions, SamplingMode, SamplingModeType
from afm_mlx.fm.prompt import Attachment, ImageAttachment, prompt_parts
from afm_mlx.fm.prompt import Prompt as PromptParts
from afm_mlx.vision_config import MODE_CHOICES

JSON: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class TextSegment:
    """A part of an entry that is text."""

    content: str

    def __str__(self) -> str:
        return self.content


@dataclass(frozen=True)
class StructuredSegment:
    """A part of an entry that was generated under the schema named `source`."""

    source: str
    content: GeneratedContent

    def __str__(self) -> str:
        return self.content.to_json()


@dataclass(frozen=True)
class ImageSegment:
    """A part of an entry that is an image.

    Args:
        url: the image's file as a data URI.
        label: the image's name in the text; None without one.
        mode: see `ImageAttachment`.
    """

    url: str
    label: str | None
    mode: str

    def __str__(self) -> str:
        return self.label or ""

    @classmethod
    def of(cls, part: JSON) -> ImageSegment | None:
        """Return the image of a part of an entry; None if there is none, or only one of an app."""
        image = part.get("image")
        if part.get("type") != "image" or not isinstance(image, dict):
            return None
        url, label, mode = image.get("url"), image.get("label"), image.get("mode", "auto")
        is_known = isinstance(label, str | None) and mode in MODE_CHOICES
        if not is_known or not isinstance(url, str) or not url.startswith("data:"):
            return None
        return cls(url, label, mode)


@dataclass(frozen=True)
class OtherSegment:
    """A part of an entry of another type, such as audio, with the fields of its JSON."""

    type: str
    fields: JSON

    def __str__(self) -> str:
        return ""


Segment: TypeAlias = TextSegment | StructuredSegment | ImageSegment | OtherSegment


@dataclass(frozen=True)
class ToolDefinition:
    """The definition of a tool as the instructions show it to the model."""

    name: str
    description: str
    parameters: JSON


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool that the model requested."""

    id: str
    name: str
    arguments: GeneratedContent


class Entry:
    """An entry of a transcript: the framework's JSON, with attributes to read it.

    Entries with equal JSON are equal. `fields` are the JSON's keys besides `role` and `id`; subclasses take
    arguments in their place. `Entry.of` wraps JSON that exists already.
    """

    role: ClassVar[str]

    def __init__(self, **fields: object) -> None:
        self._json: JSON = {"role": self.role, "id": _new_id(), **fields}

    @classmethod
    def of(cls, entry: JSON) -> Entry:
        """Wrap an entry's JSON, without copying it."""
        kind = ToolCalls if entry.get("toolCalls") else _KINDS[entry["role"]]
        made = kind.__new__(kind)
        made._json = entry
        return made

    @property
    def id(self) -> str:
        return str(self._json["id"])

    @property
    def segments(self) -> list[Segment]:
        """The parts of the entry's contents."""
        found: list[Segment] = []
        for part in self._json.get("contents") or ():
            if part["type"] == "text":
                found.append(TextSegment(str(part["text"])))
            elif part["type"] == "structure":
                source = part["structure"].get("source", "")
                content = GeneratedContent.of(part["structure"]["content"])
                found.append(StructuredSegment(source, content))
            elif (image := ImageSegment.of(part)) is not None:
                found.append(image)
            else:
                found.append(OtherSegment(part["type"], part))
        return found

    @property
    def text(self) -> str:
        """The entry's contents: texts as they are and objects as JSON, joined by newlines."""
        return "\n".join(map(str, self.segments))

    def to_dict(self) -> JSON:
        """Return a copy of the entry's JSON."""
        copied: JSON = json_copy(self._json)
        return copied

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Entry) and self._json == other._json

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.text!r})"


class Instructions(Entry):
    """The instructions, a transcript's first entry, and the tools that they define.

    Args:
        text: the instructions; may be empty.
        tools: definitions of the tools that the model may call, see `Tool.tool_definition`.
    """

    role = "instructions"

    def __init__(self, text: str = "", tools: Sequence[JSON] = ()) -> None:
        super().__init__(contents=[_text_part(text)] if text else [])
        if tools:
            self._json["tools"] = json_copy(list(tools))

    @property
    def tool_definitions(self) -> list[ToolDefinition]:
        """The tools that the model may call."""
        functions = [tool.get("function", tool) for tool in self._json.get("tools") or ()]
        return [
            ToolDefinition(f.get("name", ""), f.get("description", ""), f.get("parameters", {}))
            for f in functions
        ]


class Prompt(Entry):
    """A user's prompt.

    Args:
        prompt: text, an image, or a list of them.
        options: how tokens are chosen.
        response_format: see `GenerationSchema.response_format`; pass None for text.
        tool_choice: which tools the model may call, see `LanguageModelSession.stream_response`.
    """

    role = "user"

    def __init__(
        self,
        prompt: PromptParts,
        options: GenerationOptions | None = None,
        response_format: JSON | None = None,
        tool_choice: str = "auto",
    ) -> None:
        options = options or GenerationOptions()
        mode = options.sampling
        found: JSON = {
            "maximumResponseTokens": options.maximum_response_tokens,
            "temperature": options.temperature,
        }
        # As the framework writes it: greedy sampling is sampling from the 1 most likely token.
        if mode is not None and mode.mode_type is SamplingModeType.GREEDY:
            found["topK"] = 1
        elif mode is not None:
            is_all = (mode.top, mode.probability_threshold, mode.seed) == (None, None, None)
            threshold = 1.0 if is_all else mode.probability_threshold
            found |= {"topK": mode.top, "topP": threshold, "randomSeed": mode.seed}
        if tool_choice != "auto":
            found["toolCallingMode"] = "disallowed" if tool_choice == "none" else "required"
        given = {key: value for key, value in found.items() if value is not None}
        contents = [_part(part) for part in prompt_parts(prompt)]
        super().__init__(contents=contents, options=given)
        if response_format is not None:
            schema = json_copy(dict(response_format["json_schema"]))
            self._json["responseFormat"] = {"type": "jsonSchema", "jsonSchema": schema}

    @property
    def options(self) -> GenerationOptions:
        """How tokens are chosen. Raises `DecodingFailureError` for values that options can't have."""
        given = self._json.get("options") or {}
        top, threshold, seed = (given.get(key) for key in ("topK", "topP", "randomSeed"))
        try:
            sampling = None
            if top == 1:
                sampling = SamplingMode.greedy()
            elif (top, threshold, seed) != (None, None, None):
                sampling = SamplingMode.random(top, threshold, seed)
            limit = given.get("maximumResponseTokens")
            return GenerationOptions(sampling, given.get("temperature"), limit)
        except ValueError as error:
            raise DecodingFailureError(f"The options of the prompt {self.id}: {error}") from None

    @property
    def response_schema(self) -> JSON | None:
        """The schema for the answer; None if it is text."""
        response_format = self._json.get("responseFormat")
        return response_format and json_copy(response_format["jsonSchema"]["schema"])


class Response(Entry):
    """An answer.

    Args:
        content: the answer's text, or the content that was generated under a schema.
        assets: ids of the models and adapters that answered.
        source: the schema's name.
    """

    role = "response"

    def __init__(
        self, content: str | GeneratedContent, assets: Sequence[str] = (), source: str = ""
    ) -> None:
        part: JSON = {"type": "text", "text": content, "id": "0"}
        if not isinstance(content, str):
            structure = {"source": source, "content": json_copy(content.value())}
            part = {"type": "structure", "structure": structure, "id": "0"}
        super().__init__(contents=[part], assets=list(assets))

    @property
    def assets(self) -> list[str]:
        """Ids of the models and adapters that answered."""
        return list(self._json.get("assets") or ())


class ToolCalls(Entry):
    """The model's tool calls, and its text before them.

    Args:
        calls: `name` and `arguments` (JSON: a dict, or text) of each call.
        text: the text before the calls.
    """

    role = "response"

    def __init__(self, calls: Sequence[JSON], text: str = "") -> None:
        made = [
            {"id": _new_id(), "name": c["name"], "arguments": json_text(c["arguments"])}
            for c in calls
        ]
        contents = {"contents": [{"type": "text", "text": text, "id": "0"}]} if text else {}
        super().__init__(**contents, toolCalls=made)

    @property
    def calls(self) -> list[ToolCall]:
        """The calls. Raises `DecodingFailureError` for arguments that are not JSON."""
        try:
            return [
                ToolCall(
                    c.get("id", ""), c["name"], GeneratedContent.from_json(c["arguments"] or "{}")
                )
                for c in self._json["toolCalls"]
            ]
        except ValueError as error:
            raise DecodingFailureError(f"The calls of the entry {self.id}: {error}") from None


class ToolOutput(Entry):
    """The output `text` of the call with the id `call_id` of the tool `tool_name`."""

    role = "tool"

    def __init__(self, call_id: str, tool_name: str, text: str) -> None:
        contents = [_text_part(text)]
        super().__init__(id=call_id, toolCallID=call_id, toolName=tool_name, contents=contents)

    @property
    def tool_name(self) -> str:
        """The tool that was called."""
        return str(self._json.get("toolName", ""))

    @property
    def call_id(self) -> str:
        """The id of the call."""
        return str(self._json.get("toolCallID", self.id))


_KINDS: dict[str, type[Entry]] = {k.role: k for k in (Instructions, Prompt, Response, ToolOutput)}


def json_copy(value: object) -> Any:
    """Copy a JSON value, faster and deeper than `deepcopy`; raise what `json.dumps` raises for other values."""
    return json.loads(json.dumps(value, allow_nan=False))


def json_text(value: object) -> str:
    """Write a JSON value as text; a string is such text already."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _part(part: str | Attachment) -> JSON:
    if isinstance(part, str):
        return _text_part(part)
    assert isinstance(part, ImageAttachment)
    image: JSON = {"url": part.data_uri()}
    if part.label is not None:
        image["label"] = part.label
    if part.mode != "auto":
        image["mode"] = part.mode
    return {"type": "image", "image": image, "id": _new_id()}


def _text_part(text: str) -> JSON:
    return {"type": "text", "text": text, "id": _new_id()}


def _new_id() -> str:
    return str(uuid.uuid4()).upper()
