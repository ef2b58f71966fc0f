"""The fields of a body for `/v1/responses`: their names and types. What they mean is `ask.py`'s concern.

Unknown fields are refused. Those that are known but can't be honoured are `Any` here; clients send some of them
with a value that asks for nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from afm_mlx.server.openai_fields import Count, Share, Temperature

ToolId = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]

NOT_HONOURED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "access_programs": ("there are none here", ()),
    "background": ("an answer is made while its client waits", (False,)),
    "background_options": ("an answer is made while its client waits", ()),
    "context_management": ("a conversation is never shortened", ([],)),
    "conversation": ("conversations are continued by previous_response_id", ()),
    "image": ("the model reads text only", ()),
    "max_tool_calls": ("it counts calls of built-in tools, of which there are none", ()),
    "moderation": ("nothing moderates here", ()),
    "prompt": ("there are no stored prompts; send the text as input", ()),
    "prompt_cache_options": ("the prefix cache has no options", ()),
    "prompt_cache_retention": ("prefixes are kept while there is room", ("in_memory",)),
    "service_tier": ("all requests are served alike", ("auto", "default")),
    "truncation": ("a conversation is never shortened", ("disabled",)),
}
"""Fields that can't be honoured: why, and the values besides null that ask for nothing."""


class Fields(Struct, kw_only=True, forbid_unknown_fields=True):
    """An object whose unknown fields are refused."""


class Reasoning(Fields):
    """`reasoning`: the model does not reason before it answers."""

    effort: Any = None
    summary: Any = None
    generate_summary: Any = None


class StreamOptions(Fields):
    """`stream_options`: padding of events is never sent."""

    include_obfuscation: bool | None = None


class TextFormat(Fields, tag_field="type", tag="text"):
    """`text.format`: any text."""


class JsonObjectFormat(Fields, tag_field="type", tag="json_object"):
    """`text.format`: any JSON object."""


class JsonSchemaFormat(Fields, tag_field="type", tag="json_schema"):
    """`text.format`: JSON under a schema. Every answer is held to it, `strict` or not."""

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


Format = TextFormat | JsonObjectFormat | JsonSchemaFormat


class TextOptions(Fields):
    """`text`."""

    format: Format | None = None
    verbosity: Any = None


class FunctionTool(Fields, tag_field="type", tag="function"):
    """A tool that the client runs. Its arguments are held to the schema, `strict` or not."""

    name: ToolId
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None
    defer_loading: bool | None = None


class ToolName(Fields, tag_field="type", tag="function"):
    """`tool_choice`: exactly one call of this tool; or one of the tools that `allowed_tools` names."""

    name: str


class AllowedTools(Fields, tag_field="type", tag="allowed_tools"):
    """`tool_choice`: only some of the tools, as if there were no others."""

    mode: Literal["auto", "required"]
    tools: list[ToolName]


class TextPart(Fields, tag_field="type", tag="input_text"):
    """Text of a message or of a tool's result; marks for the prefix cache are taken, which needs none."""

    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None


class AnswerPart(Fields, tag_field="type", tag="output_text"):
    """Text of an earlier answer, as it came; nothing but the text is of use."""

    text: str
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    logprobs: list[Any] | None = None


class RefusalPart(Fields, tag_field="type", tag="refusal"):
    """An earlier answer of another model, which did not want to."""

    refusal: str


Status = Literal["in_progress", "completed", "incomplete"]


class MessageItem(Fields, tag_field="type", tag="message"):
    """A message; `type` may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Any]
    id: str | None = None
    status: Status | None = None
    phase: None = None


class CallItem(Fields, tag_field="type", tag="function_call"):
    """A call that the model has made."""

    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None
    caller: None = None
    namespace: None = None


class ResultItem(Fields, tag_field="type", tag="function_call_output"):
    """What a call has returned."""

    call_id: str
    output: str | list[Any]
    id: str | None = None
    name: str | None = None
    status: Status | None = None
    caller: None = None
    namespace: None = None


class InputFields(Fields):
    """What a prompt is made of: fields of a response, and of a count of its prompt's tokens."""

    model: str
    input: str | list[Any] | None = None
    instructions: str | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    tools: list[Any] | None = None
    conversation: Any = None
    truncation: Any = None


class ResponseFields(InputFields, kw_only=True):
    """A body for `/v1/responses`."""

    include: list[str] | None = None
    max_output_tokens: Count | None = None
    metadata: Metadata | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    top_p: Share | None = None
    user: str | None = None
    access_programs: Any = None
    background: Any = None
    background_options: Any = None
    context_management: Any = None
    image: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    prompt: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    service_tier: Any = None
