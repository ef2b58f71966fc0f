"""Fields of messages, Anthropic's API."""

# ruff: noqa: RUF012  (the rules of a class are never changed)

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from afm_mlx.server.field_rules import EMPTY, Fields, Honoured, Ignored, Kinds, Refused
from afm_mlx.server.request_fields.openai_chats import (
    INSTRUCTION,
    OTHERS_TOOLS,
    PART,
    Effort,
    ThinkingFields,
)
from afm_mlx.server.request_fields.shared import (
    ALIKE,
    ALL_SHOWN,
    CACHE_MARK,
    CALLERS,
    ECHO,
    EFFORT,
    KEPT_TO,
    MAX_STOPS,
    MODEL,
    NEVER_SHORTENED,
    OF_USE_TO_CLIENTS,
    OTHERS_TOOL,
    PARTS,
    SOME_MESSAGES,
    STREAM,
    TOOLS,
    TOP_K,
    WHO,
    WHO_ELSE,
    ClaudeToolName,
    Count,
    Share,
    StopSequence,
    Whole,
)


class ClaudeText(Fields, tag_field="type", tag="text"):
    text: str
    rules = {"cache_control": CACHE_MARK, "citations": ECHO}


class ToolUseBlock(Fields, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    rules = {"cache_control": CACHE_MARK, "caller": OF_USE_TO_CLIENTS, "toolset_name": ECHO}


class Base64Source(Fields, tag_field="type", tag="base64"):
    data: str
    rules = {"media_type": Ignored("the image's content decides", is_named=False, if_strict=True)}


class UrlSource(Fields, tag_field="type", tag="url"):
    url: str


class ClaudeImage(Fields, tag_field="type", tag="image"):
    source: Annotated[Base64Source | UrlSource, Kinds("no files are kept here")]
    rules = {
        "cache_control": CACHE_MARK,
        "transformations": Ignored("images are always fitted in one way"),
    }
    is_image = True


RESULT_PART = Kinds(
    PART.text,
    ignored=frozenset({"tool_reference"}),
    why=ALL_SHOWN.text,
    if_seen=PART.if_seen,
)


class ToolResultBlock(Fields, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: (
        str | Annotated[list[Annotated[ClaudeText | ClaudeImage, RESULT_PART]], PARTS] | None
    ) = None
    is_error: bool | None = None
    rules = {"cache_control": CACHE_MARK, "toolset_name": ECHO}


READS_TEXT = "the model reads text only, calls of tools and their results"
SEES = "the model reads text and images only, calls of tools and their results"


class ThinkingBlock(Fields, tag_field="type", tag="thinking"):
    """The thought of an earlier answer."""

    thinking: str
    signature: str | None = None  # not used
    cache_control: dict[str, Any] | None = None  # not used


UserBlock = Annotated[ClaudeText | ToolResultBlock | ClaudeImage, Kinds(READS_TEXT, if_seen=SEES)]


class ClaudeUser(Fields, tag_field="role", tag="user"):
    content: str | Annotated[list[UserBlock], PARTS]


CLAUDE_ECHOES = frozenset(
    {
        *("thinking", "redacted_thinking", "server_tool_use", "mcp_tool_use", "mcp_tool_result"),
        *("web_search_tool_result", "web_fetch_tool_result", "tool_search_tool_result"),
        *("code_execution_tool_result", "bash_code_execution_tool_result"),
        *("text_editor_code_execution_tool_result", "advisor_tool_result"),
    }
)
"""Blocks of other models' answers: thoughts, calls of the provider's tools, and their results."""


AnswerBlock = Annotated[
    ClaudeText | ToolUseBlock | ThinkingBlock,
    Kinds(
        READS_TEXT,
        ignored=CLAUDE_ECHOES,
        why="repeated from an earlier answer; of use to models that think: `thinking`",
        if_seen="answers are text and calls of tools",
    ),
]


class ClaudeAssistant(Fields, tag_field="role", tag="assistant"):
    content: str | Annotated[list[AnswerBlock], PARTS]


ClaudeTexts = str | Annotated[list[Annotated[ClaudeText, INSTRUCTION]], PARTS]


class ClaudeSystem(Fields, tag_field="role", tag="system"):
    content: ClaudeTexts


ClaudeMessage = Annotated[
    ClaudeUser | ClaudeAssistant | ClaudeSystem, Kinds("no message has this role")
]


EAGER = Ignored("calls are always streamed as they come", is_named=False, if_strict=True)


class ClaudeTool(Fields, tag_field="type", tag="custom"):
    name: ClaudeToolName
    input_schema: dict[str, Any]
    description: str | None = None
    rules = {
        "strict": KEPT_TO,
        "cache_control": CACHE_MARK,
        "eager_input_streaming": EAGER,
        "defer_loading": ALL_SHOWN,
        "input_examples": Ignored("the model isn't shown any"),
        "allowed_callers": CALLERS,
    }


AnyClaudeTool = Annotated[
    ClaudeTool, Kinds(OTHERS_TOOLS.text, default="custom", ignored=None, why=OTHERS_TOOL)
]


class MayCall(Fields):
    disable_parallel_tool_use: bool | None = None


class AutoChoice(MayCall, tag_field="type", tag="auto"):
    """`tool_choice`: text, calls, or both."""


class AnyChoice(MayCall, tag_field="type", tag="any"):
    """`tool_choice`: calls only."""


class ToolChoice(MayCall, kw_only=True, tag_field="type", tag="tool"):
    """`tool_choice`: exactly one call of this tool."""

    name: str


class NoChoice(Fields, tag_field="type", tag="none"):
    """`tool_choice`: text only."""


ClaudeToolChoice = Annotated[
    AutoChoice | AnyChoice | ToolChoice | NoChoice, Kinds("there are no other choices")
]


class SchemaFormat(Fields, tag_field="type", tag="json_schema"):
    """`output_config.format`: JSON under a schema."""

    schema: dict[str, Any]


ClaudeFormat = Annotated[SchemaFormat, Kinds("answers have no other formats")]


class OutputConfig(Fields):
    format: ClaudeFormat | None = None
    effort: Effort | None = None
    rules = {"effort": EFFORT}


FORMAT = Honoured(
    "JSON under a schema; `output_format` is the older name of `output_config.format`"
)


class PromptRequest(ThinkingFields, kw_only=True):
    """The fields that make a prompt, also the body of `/v1/messages/count_tokens`."""

    model: str
    messages: Annotated[list[ClaudeMessage], SOME_MESSAGES]
    system: ClaudeTexts | None = None
    tools: Annotated[list[AnyClaudeTool], TOOLS] | None = None
    tool_choice: ClaudeToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: ClaudeFormat | None = None
    rules = {
        "model": MODEL,
        "messages": "texts, or blocks: `text`, `tool_use`, `tool_result`, and `image`, also in results, if the "
        "model [sees](images.md). Text blocks are paragraphs; texts and images "
        'next to results follow them. A failed tool\'s result (`is_error`) is shown as JSON, `{"error": ...}`. '
        "Messages of the role `system` that come first are instructions; later ones become a part of the "
        "user's turn there. An answer at the end is continued",
        "system": "instructions; blocks are paragraphs",
        "tools": "tools that the client runs; their input follows `input_schema`",
        "tool_choice": "`auto`, `any`, `none`, one by its name; `disable_parallel_tool_use`",
        "output_config output_format": FORMAT,
        "cache_control": CACHE_MARK,
        "context_management": NEVER_SHORTENED,
        "mcp_servers": Ignored(OTHERS_TOOL),
        "compaction": Refused("conversations are not summarized here"),
        "thread": Refused("conversations are not kept; send all messages"),
        "billing_policy fallback_credit_token user_profile_id workspace_id": WHO_ELSE,
        "fallbacks": Ignored("no other model answers in this one's place"),
        "speed": ALIKE,
    }


CLAUDE_SAMPLING = Honoured(
    "sampling, 0 to 1; also under the API's newer version, with `extra_body` in its client"
)


class MessageRequest(PromptRequest, kw_only=True):
    max_tokens: Count
    stream: bool | None = None
    stop_sequences: Annotated[list[StopSequence], Meta(max_length=MAX_STOPS)] | None = None
    temperature: Share | None = None
    top_p: Share | None = None
    top_k: Whole | None = None
    rules = {
        "max_tokens": "maximum number of new tokens; required",
        "stream": STREAM,
        "stop_sequences": "up to 16 texts",
        "temperature top_p": CLAUDE_SAMPLING,
        "top_k": TOP_K,
        "metadata": WHO,
        "container": Ignored(OTHERS_TOOL),
        "diagnostics": WHO_ELSE,
        "inference_geo": Ignored("answers are made on this machine"),
        "service_tier": Ignored(ALIKE.text, ("auto", "standard_only", *EMPTY)),
    }
