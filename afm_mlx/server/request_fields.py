"""Every field of every request of the four APIs: its type and its rule (`field_rules.py`).

The tables of docs/server.md are generated from it. A field is `Honoured`, `Refused` if it would change the
answer and can't be honoured, or `Ignored` if it is a hint or for another program. Fields that a struct doesn't
have are accepted; at the top of a request they are named, or refused if `known_elsewhere`.

| structs | request |
| --- | --- |
| `ChatRequest` | `/v1/chat/completions` |
| `CompletionRequest` | `/v1/completions` |
| `ResponseRequest`, `InputRequest` | `/v1/responses`, and `/v1/responses/input_tokens` |
| `MessageRequest`, `PromptRequest` | `/v1/messages`, and `/v1/messages/count_tokens` |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from afm_mlx.server.field_rules import EMPTY, Honoured, Ignored, Kinds, Refused, Rule, rules_of

MAX_STOPS, MAX_STOP = 16, 1000
"""Limits on the number of stop strings, and on the characters of one."""
MESSAGES, SOME_MESSAGES = Meta(max_length=1 << 14), Meta(min_length=1, max_length=1 << 14)
PARTS, TOOLS = Meta(max_length=1 << 12), Meta(max_length=1 << 10)
"""Limits on the messages or items of a request, on a message's parts, blocks or calls, and on tools."""
MAX_CHOICES, MAX_BIASES, MAX_TOKENS = 1 << 12, 1 << 14, 1 << 20
"""Limits on choices of an answer, on biased tokens, and on prompts or the token ids of one."""

Temperature = Annotated[float, Meta(ge=0, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=10)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Limit = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Whole = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
FormatName = Annotated[str, Meta(min_length=1, max_length=64)]
ToolName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}\\Z")]
ClaudeToolName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,128}\\Z")]
Stop = str | Annotated[list[str], Meta(max_length=MAX_STOPS)] | None

MODEL = Honoured("one of `/v1/models`; any other is a 404, `model_not_found`")
STREAM = Honoured("the answer comes as events while it is generated")
LIMIT = Honoured(
    "maximum number of new tokens; -1 for as many as the context holds. A full context always ends an answer"
)
SAMPLING = Honoured("sampling; the defaults are the server's (`--temp` and so on)")
TOP_K = Honoured("samples from this many most likely tokens; 0 and -1 mean all", off=(-1,))
SEED = Honoured("the same seed repeats an answer; -1 is a random seed", off=(-1,))
PARALLEL = Honoured("allows several calls in one answer", shapes_answers=False)
WHO = Ignored("identifies the user to the provider", if_strict=True)
WHO_ELSE = Ignored("for the provider")
CACHE = Ignored("the prefix cache finds shared prefixes by itself")
CACHE_MARK = Ignored(CACHE.text, if_strict=True)
NO_THOUGHTS = Ignored("the model answers without reasoning first", ("none", *EMPTY))
LENGTH = Ignored("answers are as long as the prompt asks for", ("medium", *EMPTY))
ALIKE = Ignored("all requests have one priority", ("auto", "default", "standard", *EMPTY))
NOT_PADDED = Ignored("events are never padded")
ALL_SHOWN = Ignored("all tools are shown at once")
NEVER_SHORTENED = Ignored("a conversation is never shortened", ("disabled", {"edits": []}, *EMPTY))
NO_NAMES = Ignored("the model is not shown names of speakers")
ECHO = Ignored("repeated from an earlier answer; not used here", is_named=False)
OF_USE_TO_CLIENTS = Ignored(ECHO.text, is_named=False, if_strict=True)
KEPT_TO = Ignored("calls and answers always follow their schema", is_named=False, if_strict=True)
TEXT_ONLY = "this model reads and writes text only"
CALLERS = Refused("the model calls tools itself", (["direct"], *EMPTY))
OTHERS_TOOL = "a tool of another provider, which the model is not offered"


class Fields(Struct, kw_only=True):
    """An object of a request."""


# -- chats and completions, as OpenAI has them


class TextPart(Fields, tag_field="type", tag="text"):
    text: str
    cache_control: Annotated[object, CACHE] = None
    prompt_cache_breakpoint: Annotated[object, CACHE] = None


class RefusalPart(Fields, tag_field="type", tag="refusal"):
    refusal: str


PART = Kinds("this model reads text only")
ANSWER_PART = Kinds(
    PART.text, ignored=frozenset({"thinking", "reasoning", "redacted_thinking"}), why=ECHO.text
)
Texts = str | Annotated[list[Annotated[TextPart, PART]], PARTS]


class CalledFunction(Fields):
    name: str
    arguments: str | None


class ChatCall(Fields, tag_field="type", tag="function"):
    id: str
    function: CalledFunction
    index: Annotated[object, ECHO] = None


class SystemMessage(Fields, tag_field="role", tag="system"):
    content: Texts | None
    name: Annotated[object, NO_NAMES] = None


class DeveloperMessage(Fields, tag_field="role", tag="developer"):
    content: Texts | None
    name: Annotated[object, NO_NAMES] = None


class UserMessage(Fields, tag_field="role", tag="user"):
    content: Texts | None
    name: Annotated[object, NO_NAMES] = None


class AssistantMessage(Fields, tag_field="role", tag="assistant"):
    content: str | Annotated[list[Annotated[TextPart | RefusalPart, ANSWER_PART]], PARTS] | None = (
        None
    )
    tool_calls: (
        Annotated[
            list[Annotated[ChatCall, Kinds("calls are of functions", default="function")]], PARTS
        ]
        | None
    ) = None
    refusal: str | None = None
    name: Annotated[object, NO_NAMES] = None
    audio: Annotated[object, Refused("this model reads text only")] = None
    function_call: Annotated[object, Refused("tool_calls took its place")] = None
    annotations: Annotated[object, ECHO] = None
    reasoning_content: Annotated[object, ECHO] = None
    provider_specific_fields: Annotated[object, ECHO] = None


class ToolMessage(Fields, tag_field="role", tag="tool"):
    tool_call_id: str
    content: Texts | None = None
    name: Annotated[object, OF_USE_TO_CLIENTS] = None


ChatMessage = Annotated[
    SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage,
    Kinds("no message has this role"),
]


class Function(Fields):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Annotated[object, KEPT_TO] = None


class ChatFunctionTool(Fields, tag_field="type", tag="function"):
    function: Function
    cache_control: Annotated[object, CACHE] = None


OTHERS_TOOLS = Kinds(
    "this server runs no tools of its own", default="function", ignored=None, why=OTHERS_TOOL
)
ChatTool = Annotated[ChatFunctionTool, OTHERS_TOOLS]


class NamedFunction(Fields):
    name: str


class ChosenFunction(Fields, tag_field="type", tag="function"):
    function: NamedFunction


class ChatAllowed(Fields):
    mode: Literal["auto", "required"]
    tools: Annotated[list[Annotated[ChosenFunction, OTHERS_TOOLS]], TOOLS]


class ChatAllowedTools(Fields, tag_field="type", tag="allowed_tools"):
    allowed_tools: ChatAllowed


ChatToolChoice = (
    Literal["auto", "none", "required"]
    | Annotated[ChosenFunction | ChatAllowedTools, Kinds("the only tools are functions")]
)
CHOICES = "Allowed are auto, none, required, and a function of tools by its name."


class ChatStreamOptions(Fields):
    include_usage: bool | None = None
    include_obfuscation: Annotated[object, NOT_PADDED] = None


class JsonSchema(Fields):
    name: FormatName
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: Annotated[object, KEPT_TO] = None


class TextFormat(Fields, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(Fields, tag_field="type", tag="json_object"):
    pass


class ChatSchemaFormat(Fields, tag_field="type", tag="json_schema"):
    json_schema: JsonSchema


ChatFormat = Annotated[
    TextFormat | JsonObjectFormat | ChatSchemaFormat, Kinds("answers have no other formats")
]


Choices = Annotated[list[str], Meta(max_length=MAX_CHOICES)]


class StructuredOutputs(Fields):
    """A constraint under one of vLLM's names."""

    json: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: Annotated[object, Refused("JSON is written in one way")] = None


OLDER = Honoured("the older names of `structured_outputs`", off=("", []))
PENALTY = Honoured("-2 to 2, for tokens that are in the answer")


class SampledRequest(Fields):
    """The fields that chats and completions share."""

    model: Annotated[str, MODEL]
    stream: Annotated[bool | None, STREAM] = None
    stream_options: Annotated[
        ChatStreamOptions | None,
        Honoured(
            "`include_usage` adds a last event with the counts, in chats also with `timings`: milliseconds "
            "until the first sampled token, and tokens per second after it",
            shapes_answers=False,
        ),
    ] = None
    n: Annotated[
        Count | None,
        Honoured(
            "number of answers for each prompt; the first has `seed`, from which the other seeds are derived"
        ),
    ] = None
    max_tokens: Annotated[Limit | None, LIMIT] = None
    temperature: Annotated[Temperature | None, SAMPLING] = None
    top_p: Annotated[Share | None, SAMPLING] = None
    top_k: Annotated[Whole | None, TOP_K] = None
    min_p: Annotated[Share | None, SAMPLING] = None
    seed: Annotated[Seed | None, SEED] = None
    stop: Annotated[
        Stop,
        Honoured(
            "up to 16 strings that end the answer and are not part of it; found across tokens, too",
            off=("",),
        ),
    ] = None
    frequency_penalty: Annotated[Penalty | None, PENALTY] = None
    presence_penalty: Annotated[Penalty | None, PENALTY] = None
    repetition_penalty: Annotated[
        RepetitionPenalty | None,
        Honoured("above 0 to 10, for tokens that are in the prompt or the answer"),
    ] = None
    logit_bias: Annotated[
        Annotated[dict[str, Bias], Meta(max_length=MAX_BIASES)] | None,
        Honoured("-100 to 100, added to the logits of token ids"),
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None,
        Honoured(
            "vLLM's: one of `json`, `regex`, `choice`, `grammar` (Lark, or GBNF with `::=`), `json_object`",
            off=({},),
        ),
    ] = None
    guided_json: Annotated[dict[str, Any] | str | None, OLDER] = None
    guided_regex: Annotated[str | None, OLDER] = None
    guided_choice: Annotated[Choices | None, OLDER] = None
    guided_grammar: Annotated[str | None, OLDER] = None
    user: Annotated[object, WHO] = None
    safety_identifier: Annotated[object, WHO] = None
    prompt_cache_key: Annotated[object, CACHE_MARK] = None
    prompt_cache_options: Annotated[object, CACHE] = None
    prompt_cache_retention: Annotated[object, Ignored(CACHE.text, ("in_memory", *EMPTY))] = None
    metadata: Annotated[object, Ignored("nothing is stored")] = None
    store: Annotated[object, Ignored("nothing is stored")] = None
    service_tier: Annotated[object, ALIKE] = None


class ChatRequest(SampledRequest, kw_only=True):
    messages: Annotated[
        Annotated[list[ChatMessage], SOME_MESSAGES],
        Honoured(
            "roles `system`, `developer`, `user`, `assistant`, `tool`; content as text or parts of type "
            "`text`. Instructions after other messages become a part of the user's turn there. An answer "
            "at the end is continued"
        ),
    ]
    max_completion_tokens: Annotated[Limit | None, LIMIT] = None
    logprobs: Annotated[
        bool | None,
        Honoured("log-probabilities, in streams too; up to 20 most likely tokens", off=(0,)),
    ] = None
    top_logprobs: Annotated[
        TopLogprobs | None,
        Honoured("log-probabilities, in streams too; up to 20 most likely tokens"),
    ] = None
    response_format: Annotated[
        ChatFormat | None,
        Honoured(
            "`text`, `json_object`, `json_schema`: answers always follow the schema; one that "
            "can't be enforced is refused",
            off=({},),
        ),
    ] = None
    tools: Annotated[
        Annotated[list[ChatTool], TOOLS] | None,
        Honoured(
            "functions; arguments always follow their schema, and are streamed while they are generated"
        ),
    ] = None
    tool_choice: Annotated[
        ChatToolChoice | None,
        Honoured("`auto`, `none`, `required`, one by its name, `allowed_tools`", CHOICES, ("", {})),
    ] = None
    parallel_tool_calls: Annotated[bool | None, PARALLEL] = None
    audio: Annotated[object, Refused(TEXT_ONLY)] = None
    modalities: Annotated[object, Refused(TEXT_ONLY, (["text"], *EMPTY))] = None
    functions: Annotated[object, Refused("tools and tool_choice took its place")] = None
    function_call: Annotated[
        object, Refused("tools and tool_choice took its place", ("none", *EMPTY))
    ] = None
    moderation: Annotated[object, Refused("there is no moderation")] = None
    prediction: Annotated[object, Ignored("outputs are not predicted by requests")] = None
    reasoning_effort: Annotated[object, NO_THOUGHTS] = None
    verbosity: Annotated[object, LENGTH] = None
    web_search_options: Annotated[object, Ignored(OTHERS_TOOL, ())] = None


TokenIds = Annotated[list[int], Meta(max_length=MAX_TOKENS)]
PROMPTS = Honoured(
    "a text, a list of texts, token ids, or a list of lists of them",
    "A text, a list of texts, a list of token ids, or a list of such lists is needed.",
)


class CompletionRequest(SampledRequest, kw_only=True):
    prompt: Annotated[
        str | Annotated[list[str | int | TokenIds], Meta(max_length=MAX_TOKENS)], PROMPTS
    ]
    best_of: Annotated[
        Count | None,
        Honoured(
            "generates this many answers, and returns the `n` with the highest mean log-probability; not in "
            "streams"
        ),
    ] = None
    echo: Annotated[
        bool | None, Honoured("the prompt comes before the answer; not with `logprobs`")
    ] = None
    logprobs: Annotated[
        TopLogprobs | None,
        Honoured(
            "log-probabilities of this many most likely tokens, up to 20; in streams too",
            off=(False,),
        ),
    ] = None
    suffix: Annotated[object, Refused("this model continues texts, and does not fill gaps")] = None


# -- responses, OpenAI's newer API


class InputTextPart(Fields, tag_field="type", tag="input_text"):
    text: str
    prompt_cache_breakpoint: Annotated[object, CACHE_MARK] = None
    cache_control: Annotated[object, CACHE] = None


class OutputTextPart(Fields, tag_field="type", tag="output_text"):
    text: str
    annotations: Annotated[object, ECHO] = None
    logprobs: Annotated[object, OF_USE_TO_CLIENTS] = None


ItemTexts = (
    str | Annotated[list[Annotated[InputTextPart | OutputTextPart | RefusalPart, PART]], PARTS]
)


class MessageItem(Fields, tag_field="type", tag="message"):
    """A message; `type` may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: ItemTexts | None
    id: Annotated[object, OF_USE_TO_CLIENTS] = None
    status: Annotated[object, OF_USE_TO_CLIENTS] = None
    phase: Annotated[object, ECHO] = None


class CallItem(Fields, tag_field="type", tag="function_call"):
    """A tool call of the model."""

    call_id: str
    name: str
    arguments: str | None
    id: Annotated[object, OF_USE_TO_CLIENTS] = None
    status: Annotated[object, OF_USE_TO_CLIENTS] = None
    caller: Annotated[object, ECHO] = None
    namespace: Annotated[object, ECHO] = None


class ResultItem(Fields, tag_field="type", tag="function_call_output"):
    """The result of a tool call."""

    call_id: str
    output: ItemTexts | None = None
    id: Annotated[object, OF_USE_TO_CLIENTS] = None
    name: Annotated[object, OF_USE_TO_CLIENTS] = None
    status: Annotated[object, OF_USE_TO_CLIENTS] = None
    caller: Annotated[object, ECHO] = None
    namespace: Annotated[object, ECHO] = None


class ReferenceItem(Fields, tag_field="type", tag="item_reference"):
    """A reference to an item of a kept response."""

    id: str


InputItem = Annotated[
    MessageItem | CallItem | ResultItem | ReferenceItem,
    Kinds(
        "the model reads text only, calls of functions and their results",
        default="message",
        ignored=frozenset({"reasoning", "web_search_call", "file_search_call"}),
        why=ECHO.text,
    ),
]


class ResponseFunctionTool(Fields, tag_field="type", tag="function"):
    """A tool that the client runs."""

    name: ToolName
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: Annotated[object, KEPT_TO] = None
    defer_loading: Annotated[object, ALL_SHOWN] = None
    allowed_callers: Annotated[object, CALLERS] = None
    cache_control: Annotated[object, CACHE] = None


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
    effort: Annotated[object, NO_THOUGHTS] = None
    summary: Annotated[object, NO_THOUGHTS] = None
    generate_summary: Annotated[object, NO_THOUGHTS] = None


class ResponseStreamOptions(Fields):
    include_obfuscation: Annotated[object, NOT_PADDED] = None


class ResponseSchemaFormat(Fields, tag_field="type", tag="json_schema"):
    """`text.format`: JSON under a schema."""

    name: FormatName
    schema: dict[str, Any]
    description: str | None = None
    strict: Annotated[object, KEPT_TO] = None


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | ResponseSchemaFormat, Kinds("answers have no other formats")
]


class TextOptions(Fields):
    format: ResponseFormat | None = None
    verbosity: Annotated[object, LENGTH] = None


class InputRequest(Fields):
    """The fields that make a prompt, also the body of `/v1/responses/input_tokens`."""

    model: Annotated[str, MODEL]
    input: Annotated[
        str | Annotated[list[InputItem], MESSAGES] | None,
        Honoured(
            "a text, or items: messages (`input_text`, `output_text`, `refusal`), `function_call`, "
            "`function_call_output`, `item_reference` to an item of a kept response. Messages of the "
            "roles `system` and `developer` that come first are instructions; later ones become a part of "
            "the user's turn there"
        ),
    ] = None
    instructions: Annotated[
        str | None, Honoured("come before all other instructions", off=("",))
    ] = None
    previous_response_id: Annotated[
        str | None,
        Honoured("continues a kept response; its `instructions` are not carried over", off=("",)),
    ] = None
    text: Annotated[
        TextOptions | None,
        Honoured("`format`: `text`, `json_object`, `json_schema`; answers always follow it"),
    ] = None
    tools: Annotated[
        Annotated[list[ResponseTool], TOOLS] | None,
        Honoured("functions; arguments always follow their schema"),
    ] = None
    tool_choice: Annotated[
        ResponseToolChoice | None,
        Honoured("`auto`, `none`, `required`, one by its name, `allowed_tools`", CHOICES, ("", {})),
    ] = None
    parallel_tool_calls: Annotated[bool | None, PARALLEL] = None
    conversation: Annotated[
        object, Refused("conversations are continued by previous_response_id")
    ] = None
    reasoning: Annotated[Reasoning | None, Honoured(shapes_answers=False)] = None
    truncation: Annotated[object, NEVER_SHORTENED] = None


Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]
GIVEN_BACK = Honoured("returned in the response; no other effect", shapes_answers=False)


class ResponseRequest(InputRequest, kw_only=True):
    stream: Annotated[bool | None, STREAM] = None
    temperature: Annotated[Temperature | None, SAMPLING] = None
    top_p: Annotated[Share | None, SAMPLING] = None
    max_output_tokens: Annotated[
        Limit | None,
        Honoured(
            "maximum number of new tokens; -1 for as many as the context holds. An answer that is cut off is "
            "`incomplete`"
        ),
    ] = None
    include: Annotated[
        Annotated[list[str], PARTS] | None,
        Honoured(
            "`message.output_text.logprobs` requests log-probabilities, of up to 20 most likely tokens. "
            "Other names are accepted, for items that no answer here has",
            shapes_answers=False,
        ),
    ] = None
    top_logprobs: Annotated[
        TopLogprobs | None,
        Honoured(
            "number of most likely tokens in the log-probabilities that `include` requests, up to 20"
        ),
    ] = None
    store: Annotated[
        bool | None,
        Honoured(
            "keeps the response; true by default. Kept responses are in memory until the server "
            "stops, and only the client (key) that made one can read it",
            shapes_answers=False,
        ),
    ] = None
    metadata: Annotated[Metadata | None, GIVEN_BACK] = None
    user: Annotated[str | None, GIVEN_BACK] = None
    safety_identifier: Annotated[str | None, GIVEN_BACK] = None
    prompt_cache_key: Annotated[str | None, GIVEN_BACK] = None
    stream_options: Annotated[ResponseStreamOptions | None, Honoured(shapes_answers=False)] = None
    background: Annotated[object, Refused("an answer is made while its client waits")] = None
    background_options: Annotated[object, Refused("an answer is made while its client waits")] = (
        None
    )
    access_programs: Annotated[object, Refused("this server has no such programs")] = None
    image: Annotated[object, Refused(TEXT_ONLY)] = None
    moderation: Annotated[object, Refused("there is no moderation")] = None
    prompt: Annotated[object, Refused("there are no stored prompts; send the text as input")] = None
    client_metadata: Annotated[object, WHO_ELSE] = None
    context_management: Annotated[object, NEVER_SHORTENED] = None
    max_tool_calls: Annotated[
        object, Ignored("it counts calls of built-in tools, of which there are none")
    ] = None
    prompt_cache_options: Annotated[object, CACHE] = None
    prompt_cache_retention: Annotated[object, Ignored(CACHE.text, ("in_memory", *EMPTY))] = None
    service_tier: Annotated[object, ALIKE] = None


# -- messages, Anthropic's API


class ClaudeText(Fields, tag_field="type", tag="text"):
    text: str
    cache_control: Annotated[object, CACHE_MARK] = None
    citations: Annotated[object, ECHO] = None


class ToolUseBlock(Fields, tag_field="type", tag="tool_use"):
    """A tool call of the model."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: Annotated[object, CACHE_MARK] = None
    caller: Annotated[object, OF_USE_TO_CLIENTS] = None
    toolset_name: Annotated[object, ECHO] = None


RESULT_PART = Kinds(PART.text, ignored=frozenset({"tool_reference"}), why=ALL_SHOWN.text)


class ToolResultBlock(Fields, tag_field="type", tag="tool_result"):
    """The result of a tool call."""

    tool_use_id: str
    content: str | Annotated[list[Annotated[ClaudeText, RESULT_PART]], PARTS] | None = None
    is_error: bool | None = None
    cache_control: Annotated[object, CACHE_MARK] = None
    toolset_name: Annotated[object, ECHO] = None


READS_TEXT = "the model reads text only, calls of tools and their results"


class ClaudeUser(Fields, tag_field="role", tag="user"):
    content: (
        str | Annotated[list[Annotated[ClaudeText | ToolResultBlock, Kinds(READS_TEXT)]], PARTS]
    )


CLAUDE_ECHOES = frozenset(
    {
        *("thinking", "redacted_thinking", "server_tool_use", "mcp_tool_use", "mcp_tool_result"),
        *("web_search_tool_result", "web_fetch_tool_result", "tool_search_tool_result"),
        *("code_execution_tool_result", "bash_code_execution_tool_result"),
        *("text_editor_code_execution_tool_result", "advisor_tool_result"),
    }
)
"""Blocks of other models' answers: thoughts, calls of the provider's tools, and their results."""


class ClaudeAssistant(Fields, tag_field="role", tag="assistant"):
    content: (
        str
        | Annotated[
            list[
                Annotated[
                    ClaudeText | ToolUseBlock,
                    Kinds(READS_TEXT, ignored=CLAUDE_ECHOES, why=ECHO.text),
                ]
            ],
            PARTS,
        ]
    )


class ClaudeSystem(Fields, tag_field="role", tag="system"):
    content: str | Annotated[list[Annotated[ClaudeText, PART]], PARTS]


ClaudeMessage = Annotated[
    ClaudeUser | ClaudeAssistant | ClaudeSystem, Kinds("no message has this role")
]


EAGER = Ignored("calls are always streamed as they come", is_named=False, if_strict=True)


class ClaudeTool(Fields, tag_field="type", tag="custom"):
    """A tool that the client runs."""

    name: ClaudeToolName
    input_schema: dict[str, Any]
    description: str | None = None
    strict: Annotated[object, KEPT_TO] = None
    cache_control: Annotated[object, CACHE_MARK] = None
    eager_input_streaming: Annotated[object, EAGER] = None
    defer_loading: Annotated[object, ALL_SHOWN] = None
    input_examples: Annotated[object, Ignored("the model isn't shown any")] = None
    allowed_callers: Annotated[object, CALLERS] = None


class AutoChoice(Fields, tag_field="type", tag="auto"):
    """`tool_choice`: text, calls, or both."""

    disable_parallel_tool_use: bool | None = None


class AnyChoice(Fields, tag_field="type", tag="any"):
    """`tool_choice`: calls only."""

    disable_parallel_tool_use: bool | None = None


class ToolChoice(Fields, tag_field="type", tag="tool"):
    """`tool_choice`: exactly one call of this tool."""

    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(Fields, tag_field="type", tag="none"):
    """`tool_choice`: text only."""


class SchemaFormat(Fields, tag_field="type", tag="json_schema"):
    """`output_config.format`: JSON under a schema."""

    schema: dict[str, Any]


ClaudeFormat = Annotated[SchemaFormat, Kinds("answers have no other formats")]


class OutputConfig(Fields):
    format: ClaudeFormat | None = None
    effort: Annotated[object, NO_THOUGHTS] = None


FORMAT = Honoured(
    "JSON under a schema; `output_format` is the older name of `output_config.format`"
)


class PromptRequest(Fields):
    """The fields that make a prompt, also the body of `/v1/messages/count_tokens`."""

    model: Annotated[str, MODEL]
    messages: Annotated[
        Annotated[list[ClaudeMessage], SOME_MESSAGES],
        Honoured(
            "texts, or blocks: `text`, `tool_use`, `tool_result`. Text blocks are paragraphs; texts next to "
            "results follow them. A failed tool's result (`is_error`) is shown as JSON, "
            '`{"error": ...}`. Messages of the role `system` that come first are instructions; later ones '
            "become a part of the user's turn there. An answer at the end is continued"
        ),
    ]
    system: Annotated[
        str | Annotated[list[Annotated[ClaudeText, PART]], PARTS] | None,
        Honoured("instructions; blocks are paragraphs"),
    ] = None
    tools: Annotated[
        Annotated[
            list[
                Annotated[
                    ClaudeTool,
                    Kinds(OTHERS_TOOLS.text, default="custom", ignored=None, why=OTHERS_TOOL),
                ]
            ],
            TOOLS,
        ]
        | None,
        Honoured("tools that the client runs; their input follows `input_schema`"),
    ] = None
    tool_choice: Annotated[
        Annotated[
            AutoChoice | AnyChoice | ToolChoice | NoChoice, Kinds("there are no other choices")
        ]
        | None,
        Honoured("`auto`, `any`, `none`, one by its name; `disable_parallel_tool_use`"),
    ] = None
    output_config: Annotated[OutputConfig | None, FORMAT] = None
    output_format: Annotated[ClaudeFormat | None, FORMAT] = None
    cache_control: Annotated[object, CACHE_MARK] = None
    thinking: Annotated[object, Ignored(NO_THOUGHTS.text, ({"type": "disabled"}, *EMPTY))] = None
    context_management: Annotated[object, NEVER_SHORTENED] = None
    mcp_servers: Annotated[object, Ignored(OTHERS_TOOL)] = None
    compaction: Annotated[object, Refused("conversations are not summarized here")] = None
    thread: Annotated[object, Refused("conversations are not kept; send all messages")] = None
    billing_policy: Annotated[object, WHO_ELSE] = None
    fallback_credit_token: Annotated[object, WHO_ELSE] = None
    fallbacks: Annotated[object, Ignored("no other model answers in this one's place")] = None
    speed: Annotated[object, ALIKE] = None
    user_profile_id: Annotated[object, WHO_ELSE] = None
    workspace_id: Annotated[object, WHO_ELSE] = None


CLAUDE_SAMPLING = Honoured(
    "sampling, 0 to 1; also under the API's newer version, with `extra_body` in its client"
)


class MessageRequest(PromptRequest, kw_only=True):
    max_tokens: Annotated[Count, Honoured("maximum number of new tokens; required")]
    stream: Annotated[bool | None, STREAM] = None
    stop_sequences: Annotated[
        Annotated[
            list[Annotated[str, Meta(min_length=1, max_length=MAX_STOP)]],
            Meta(max_length=MAX_STOPS),
        ]
        | None,
        Honoured("up to 16 texts"),
    ] = None
    temperature: Annotated[Share | None, CLAUDE_SAMPLING] = None
    top_p: Annotated[Share | None, CLAUDE_SAMPLING] = None
    top_k: Annotated[Whole | None, TOP_K] = None
    metadata: Annotated[object, WHO] = None
    container: Annotated[object, Ignored(OTHERS_TOOL)] = None
    diagnostics: Annotated[object, WHO_ELSE] = None
    inference_geo: Annotated[object, Ignored("answers are made on this machine")] = None
    service_tier: Annotated[object, Ignored(ALIKE.text, ("auto", "standard_only", *EMPTY))] = None


# -- fields that no struct has

REQUESTS: tuple[type[Fields], ...] = (
    ChatRequest,
    CompletionRequest,
    ResponseRequest,
    MessageRequest,
)
"""The bodies of the four APIs."""

OTHER_SERVERS: Mapping[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "allowed_token_ids": EMPTY,
    "bad_words": EMPTY,
    "chat_template": EMPTY,
    "continue_final_message": EMPTY,
    "documents": EMPTY,
    "dry_multiplier": (0, 0.0),
    "format": EMPTY,
    "grammar": EMPTY,
    "ignore_eos": EMPTY,
    "json_schema": EMPTY,
    "length_penalty": (1, 1.0),
    "max_new_tokens": (-1,),
    "min_tokens": (0,),
    "mirostat": (0,),
    "n_predict": (-1,),
    "no_repeat_ngram_size": (0,),
    "options": EMPTY,
    "prompt_logprobs": EMPTY,
    "repeat_penalty": (1, 1.0),
    "stop_token_ids": EMPTY,
    "structural_tag": EMPTY,
    "template": EMPTY,
    "truncate_prompt_tokens": (-1,),
    "typical_p": (1, 1.0),
    "use_beam_search": EMPTY,
    "xtc_probability": (0, 0.0),
}
"""Fields of vLLM, llama.cpp and others that change answers, and the values that mean the same as null."""
OFF: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "frequency_penalty": (0, 0.0),
    "logprobs": (False, 0),
    "min_p": (0, 0.0),
    "n": (1,),
    "presence_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "seed": (-1,),
    "top_k": (0, -1),
    "top_logprobs": (0,),
}
"""Fields that not all APIs here have, and the values that mean the same as null."""


@cache
def known_elsewhere() -> Mapping[str, tuple[object, ...]]:
    """Return fields that change answers elsewhere, and the values that mean the same as null."""
    shaping = {
        name: OFF.get(name, EMPTY)
        for kind in REQUESTS
        for name, field in rules_of(kind).items()
        if isinstance(field.rule, Honoured) and field.rule.shapes_answers
    }
    return {**shaping, **OTHER_SERVERS}


def all_fields(kind: type[Fields]) -> Iterator[tuple[str, Rule | Kinds]]:
    """Yield the fields of a request at all levels: paths such as `messages[].content[].text`, and rules.

    Ignored objects of a union are yielded with the union's path and its `Kinds`.
    """
    seen: set[str] = set()

    def walk(kind: type[Struct], place: str) -> Iterator[tuple[str, Rule | Kinds]]:
        for name, field in rules_of(kind).items():
            path = f"{place}.{name}" if place else name
            if path not in seen:
                seen.add(path)
                yield path, field.rule
            shape, inner = field.shape, path
            while shape.element is not None:
                shape, inner = shape.element, f"{inner}[]"
            if shape.kinds.why and inner not in seen:
                seen.add(inner)
                yield inner, shape.kinds
            for struct in shape.structs.values():
                yield from walk(struct, inner)

    yield from walk(kind, "")
