"""A message of `/v1/messages`, its blocks and the events of its stream, as clients read them."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field


class TextBlock(Struct, tag_field="type", tag="text"):
    """Text."""

    text: str = ""
    citations: None = None


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    """A tool that the model wants to be called."""

    id: str
    name: str
    input: dict[str, Any] = field(default_factory=dict)


Block = TextBlock | ToolUseBlock


class Usage(Struct):
    """Tokens of a request. The prompt's are those that were computed, and those that were known already."""

    input_tokens: int
    output_tokens: int = 0
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class Message(Struct, kw_only=True, tag_field="type", tag="message"):
    """One answer."""

    id: str
    role: str = "assistant"
    model: str
    content: list[Block] = field(default_factory=list)
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: Usage


class StreamEvent(Struct, tag_field="type"):
    """An event of a stream."""


class MessageStart(StreamEvent, tag="message_start"):
    """The answer begins."""

    message: Message


class Ping(StreamEvent, tag="ping"):
    """The connection is alive."""


class BlockStart(StreamEvent, tag="content_block_start"):
    """A block begins."""

    index: int
    content_block: Block


class TextDelta(Struct, tag_field="type", tag="text_delta"):
    """More of a text."""

    text: str


class JsonDelta(Struct, tag_field="type", tag="input_json_delta"):
    """More of the JSON of a call's input."""

    partial_json: str


class BlockDelta(StreamEvent, tag="content_block_delta"):
    """More of a block."""

    index: int
    delta: TextDelta | JsonDelta


class BlockStop(StreamEvent, tag="content_block_stop"):
    """A block is there as a whole."""

    index: int


class StopDelta(Struct):
    """Why the answer has ended."""

    stop_reason: str
    stop_sequence: str | None


class MessageDelta(StreamEvent, tag="message_delta"):
    """The answer has ended."""

    delta: StopDelta
    usage: Usage


class MessageStop(StreamEvent, tag="message_stop"):
    """The last event."""
