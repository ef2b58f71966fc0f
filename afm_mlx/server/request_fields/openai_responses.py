"""Fields of responses, OpenAI's newer API."""

# ruff: noqa: RUF012  (the rules of a class are never changed)

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from afm_mlx.server.field_rules import EMPTY, Fields, Honoured, Ignored, Kinds, Refused
from afm_mlx.server.request_fields.openai_chats import (
    CHOICES,
    OTHERS_TOOLS,
    PART,
    Effort,
    JsonObjectFormat,
    RefusalPart,
    TextFormat,
    ThinkingFields,
)
from afm_mlx.server.request_fields.shared import (
    ALIKE,
    ALL_SHOWN,
    CACHE,
    CACHE_MARK,
    CALLERS,
    DETAIL,
    ECHO,
    EFFORT,
    KEPT_TO,
    LENGTH,
    MESSAGES,
    MODEL,
    NEVER_SHORTENED,
    NOT_PADDED,
    OF_USE_TO_CLIENTS,
    PARALLEL,
    PARTS,
    SAMPLING,
    STREAM,
    TEXT_ONLY,
    TOOLS,
    WHO_ELSE,
    Detail,
    FormatName,
    Limit,
    Share,
    Temperature,
    ToolName,
    TopLogprobs,
)


class InputTextPart(Fields, tag_field="type", tag="input_text"):
    text: str
    rules = {"prompt_cache_breakpoint": CACHE_MARK, "cache_control": CACHE}


class OutputTextPart(Fields, tag_field="type", tag="output_text"):
    text: str
    rules = {"annotations": ECHO, "logprobs": OF_USE_TO_CLIENTS}


class InputImagePart(Fields, tag_field="type", tag="input_image"):
    image_url: str | None = None
    detail: Detail | None = None
    rules = {
        "detail": DETAIL,
        "file_id": Refused("no files are kept here; send the image in image_url"),
        "prompt_cache_breakpoint": CACHE_MARK,
    }
    is_image = True


ItemParts = (
    str
    | Annotated[
        list[Annotated[InputTextPart | OutputTextPart | RefusalPart | InputImagePart, PART]], PARTS
    ]
)


class MessageItem(Fields, tag_field="type", tag="message"):
    """A message; `type` may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: ItemParts | None
    rules = {"id status": OF_USE_TO_CLIENTS, "phase": ECHO}


class CallItem(Fields, tag_field="type", tag="function_call"):
    call_id: str
    name: str
    arguments: str | None
    rules = {"id status": OF_USE_TO_CLIENTS, "caller namespace": ECHO}


class ResultItem(Fields, tag_field="type", tag="function_call_output"):
    call_id: str
    output: ItemParts | None = None
    rules = {"id name status": OF_USE_TO_CLIENTS, "caller namespace": ECHO}


class ReasoningText(Fields, tag_field="type", tag="reasoning_text"):
    text: str


class ReasoningItem(Fields, tag_field="type", tag="reasoning"):
    """The thought of an earlier answer."""

    content: Annotated[list[ReasoningText], PARTS] | None = None
    # Strict servers accept their own items, and these are not used.
    id: str | None = None
    status: str | None = None
    summary: Annotated[list[Any], PARTS] | None = None
    encrypted_content: str | None = None


class ReferenceItem(Fields, tag_field="type", tag="item_reference"):
    id: str


InputItem = Annotated[
    MessageItem | CallItem | ResultItem | ReferenceItem | ReasoningItem,
    Kinds(
        "the model reads text only, calls of functions and their results",
        default="message",
        ignored=frozenset({"reasoning", "web_search_call", "file_search_call"}),
        why="repeated from an earlier answer; of use to models that think: `reasoning`",
    ),
]


class ResponseFunctionTool(Fields, tag_field="type", tag="function"):
    name: ToolName
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: None = None  # the response repeats the tool with all its fields
    defer_loading: None = None
    allowed_callers: None = None
    cache_control: None = None
    rules = {
        "strict": KEPT_TO,
        "defer_loading": ALL_SHOWN,
        "allowed_callers": CALLERS,
        "cache_control": CACHE,
    }


ResponseTool = Annotated[ResponseFunctionTool, OTHERS_TOOLS]


class ChosenTool(Fields, tag_field="type", tag="function"):
    """`tool_choice`: exactly one call of this tool. Also an element of `allowed_tools`."""

    name: str


class ResponseAllowedTools(Fields, tag_field="type", tag="allowed_tools"):
    """`tool_choice`: only these tools can be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[Annotated[ChosenTool, OTHERS_TOOLS]], TOOLS]


ResponseToolChoice = (
    Literal["auto", "none", "required"]
    | Annotated[ChosenTool | ResponseAllowedTools, Kinds("the only tools are functions")]
)


class Reasoning(Fields):
    effort: Effort | None = None
    rules = {
        "effort": EFFORT,
        "summary generate_summary": Ignored("thoughts are given whole"),
    }


class ResponseStreamOptions(Fields):
    rules = {"include_obfuscation": NOT_PADDED}


class ResponseSchemaFormat(Fields, tag_field="type", tag="json_schema"):
    """`text.format`: JSON under a schema."""

    name: FormatName
    schema: dict[str, Any]
    description: str | None = None
    strict: None = None  # the response repeats the format with all its fields
    rules = {"strict": KEPT_TO}


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | ResponseSchemaFormat, Kinds("answers have no other formats")
]


class TextOptions(Fields):
    format: ResponseFormat | None = None
    rules = {"verbosity": LENGTH}


class InputRequest(ThinkingFields, kw_only=True):
    """The fields that make a prompt, also the body of `/v1/responses/input_tokens`."""

    model: str
    input: str | Annotated[list[InputItem], MESSAGES] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    text: TextOptions | None = None
    tools: Annotated[list[ResponseTool], TOOLS] | None = None
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    rules = {
        "model": MODEL,
        "input": "a text, or items: messages (`input_text`, `output_text`, `refusal`; the user's also "
        "`input_image`, if the model [sees](images.md)), `function_call`, `function_call_output`, "
        "`item_reference` to an item of a kept response. Messages of the roles "
        "`system` and `developer` that come first are instructions; later ones become a part of the user's "
        "turn there",
        "instructions": Honoured("come before all other instructions", off=("",)),
        "previous_response_id": Honoured(
            "continues a kept response; its `instructions` are not carried over", off=("",)
        ),
        "text": "`format`: `text`, `json_object`, `json_schema`; answers always follow it",
        "tools": "functions; arguments always follow their schema",
        "tool_choice": Honoured(
            "`auto`, `none`, `required`, one by its name, `allowed_tools`", CHOICES, ("", {})
        ),
        "parallel_tool_calls": PARALLEL,
        "reasoning": Honoured(shapes_answers=False),
        "conversation": Refused("conversations are continued by previous_response_id"),
        "truncation": NEVER_SHORTENED,
    }


Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]
GIVEN_BACK = Honoured("returned in the response; no other effect", shapes_answers=False)


class ResponseRequest(InputRequest, kw_only=True):
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    max_output_tokens: Limit | None = None
    include: Annotated[list[str], PARTS] | None = None
    top_logprobs: TopLogprobs | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    stream_options: ResponseStreamOptions | None = None
    rules = {
        "stream": STREAM,
        "temperature top_p": SAMPLING,
        "max_output_tokens": "maximum number of new tokens; -1 for as many as the context holds. An answer "
        "that is cut off is `incomplete`",
        "include": Honoured(
            "`message.output_text.logprobs` requests log-probabilities, of up to 20 most likely tokens. Other "
            "names are accepted, for items that no answer here has",
            shapes_answers=False,
        ),
        "top_logprobs": "number of most likely tokens in the log-probabilities that `include` requests, up to "
        "20",
        "store": Honoured(
            "keeps the response; true by default. Kept responses are in memory until the server stops, and "
            "only the client (key) that made one can read it",
            shapes_answers=False,
        ),
        "metadata user safety_identifier prompt_cache_key": GIVEN_BACK,
        "stream_options": Honoured(shapes_answers=False),
        "background background_options": Refused("an answer is made while its client waits"),
        "access_programs": Refused("this server has no such programs"),
        "image": Refused(TEXT_ONLY),
        "moderation": Refused("there is no moderation"),
        "prompt": Refused("there are no stored prompts; send the text as input"),
        "client_metadata": WHO_ELSE,
        "context_management": NEVER_SHORTENED,
        "max_tool_calls": Ignored("it counts calls of built-in tools, of which there are none"),
        "prompt_cache_options": CACHE,
        "prompt_cache_retention": Ignored(CACHE.text, ("in_memory", *EMPTY)),
        "service_tier": ALIKE,
    }
