"""The fields of a body for `/v1/messages`: their names and types. What they mean is `ask.py`'s concern.

Unknown fields are refused. Those that are known but can't be honoured are `Any` here; clients send some of them
with a value that asks for nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from afm_mlx.server.openai_fields import MAX_STOP, MAX_STOPS, Count, Share, Whole

ToolId = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,128}$")]
StopText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP)]

NOT_HONOURED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "container": ("this server runs no tools of its own", ()),
    "context_management": ("a conversation is never shortened", ()),
    "diagnostics": ("there are none here", ()),
    "inference_geo": ("answers are made on this machine", ()),
    "mcp_servers": ("this server runs no tools of its own", ([],)),
    "service_tier": ("all requests are served alike", ("auto", "standard_only")),
    "speed": ("all requests are served alike", ("standard",)),
    "user_profile_id": ("there are no profiles here", ()),
    "workspace_id": ("there are no workspaces here", ()),
}
"""Fields that can't be honoured: why, and the values besides null that ask for nothing."""


class Fields(Struct, kw_only=True, forbid_unknown_fields=True):
    """An object whose unknown fields are refused."""


class CacheControl(Fields, tag_field="type", tag="ephemeral"):
    """A mark for the prefix cache, which finds prefixes without."""

    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Fields, tag_field="type", tag="text"):
    """Text."""

    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[Any], Meta(max_length=0)] | None = None


class Caller(Fields, tag_field="type", tag="direct"):
    """Who has called a tool: the model itself."""


class ToolUseBlock(Fields, tag_field="type", tag="tool_use"):
    """A call that the model has made."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: Caller | None = None
    toolset_name: None = None


class ToolResultBlock(Fields, tag_field="type", tag="tool_result"):
    """What a call has returned."""

    tool_use_id: str
    content: str | list[Any] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: None = None


class Message(Fields):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Any]


class Tool(Fields, tag_field="type", tag="custom"):
    """A tool that the client runs. The input of a call is held to its schema, `strict` or not."""

    name: ToolId
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Any = None
    allowed_callers: Any = None
    input_examples: Any = None


class AutoChoice(Fields, tag_field="type", tag="auto"):
    """`tool_choice`: text, calls, or both."""

    disable_parallel_tool_use: bool = False


class AnyChoice(Fields, tag_field="type", tag="any"):
    """`tool_choice`: calls only."""

    disable_parallel_tool_use: bool = False


class ToolChoice(Fields, tag_field="type", tag="tool"):
    """`tool_choice`: exactly one call of this tool."""

    name: str
    disable_parallel_tool_use: bool = False


class NoChoice(Fields, tag_field="type", tag="none"):
    """`tool_choice`: text only."""


class Metadata(Fields):
    """`metadata`: who the user is, which only the client needs to know."""

    user_id: str | None = None


class JsonFormat(Fields, tag_field="type", tag="json_schema"):
    """`output_config.format`: JSON under a schema."""

    schema: dict[str, Any]


class OutputConfig(Fields):
    """`output_config`."""

    format: JsonFormat | None = None
    effort: Any = None


class PromptFields(Fields):
    """What a prompt is made of: a body for `/v1/messages/count_tokens`."""

    model: str
    messages: Annotated[list[Message], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[Any] | None = None
    tool_choice: AutoChoice | AnyChoice | ToolChoice | NoChoice | None = None
    thinking: Any = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    cache_control: CacheControl | None = None
    context_management: Any = None
    mcp_servers: Any = None
    speed: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None


class MessageFields(PromptFields, kw_only=True):
    """A body for `/v1/messages`."""

    max_tokens: Count
    stop_sequences: Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: Share | None = None
    top_p: Share | None = None
    top_k: Whole | None = None
    metadata: Metadata | None = None
    container: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    service_tier: Any = None
