"""Every field of every request of the five APIs: its type and its rule (`field_rules.py`).

The tables of docs/server.md are generated from it. A field is `Honoured`, `Refused` if it would change the
answer and can't be honoured, or `Ignored` if it is a hint or for another program. Fields that a struct doesn't
have are accepted; at the top of a request they are named, or refused if `known_elsewhere`.

| structs | request |
| --- | --- |
| `ChatRequest` | `/v1/chat/completions` |
| `CompletionRequest` | `/v1/completions` |
| `EmbeddingRequest`, `RerankRequest` | `/v1/embeddings`, and `/v1/rerank` |
| `ResponseRequest`, `InputRequest` | `/v1/responses`, and `/v1/responses/input_tokens` |
| `MessageRequest`, `PromptRequest` | `/v1/messages`, and `/v1/messages/count_tokens` |
| `OllamaChatRequest`, `OllamaGenerateRequest` | `/api/chat`, and `/api/generate` |
| `OllamaEmbedRequest`, `OllamaEmbeddingRequest` | `/api/embed`, and `/api/embeddings` |
"""

# ruff: noqa: RUF012  (the rules of a class are never changed)

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from afm_mlx.server.field_rules import (
    EMPTY,
    Fields,
    Honoured,
    Ignored,
    Kinds,
    Refused,
    Rule,
    rules_of,
)

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
Detail = Literal["auto", "low", "high", "original"]

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
_NO_THOUGHTS = "; of no effect if the model answers without thinking first"
EFFORT = Ignored(
    "`none` switches thinking off, other words switch it on and are shown to the model if its template has a "
    "place for them" + _NO_THOUGHTS,
    ("none", *EMPTY),
    unless_thinking=True,
)
SWITCH = Ignored("switches thinking on or off" + _NO_THOUGHTS, unless_thinking=True)
BUDGET = Ignored(
    "maximum number of tokens of thoughts, after which the answer begins" + _NO_THOUGHTS,
    unless_thinking=True,
)
THINKING = Ignored(
    "`type` is `enabled`, `disabled` or `adaptive`; `budget_tokens` limits the tokens of thoughts; `display` "
    "is `summarized` (whole, in fact) or `omitted`" + _NO_THOUGHTS,
    ({"type": "disabled"}, *EMPTY),
    unless_thinking=True,
)
VARIABLES = Honoured("variables for the chat template", off=({},))
THOUGHT = Ignored(
    "the thought of an earlier answer, shown to the model if its template has a place for it",
    is_named=False,
    unless_thinking=True,
)
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
DETAIL = Honoured(
    "`low` gives an image few tokens, `high` and `original` many; `auto`, the default, decides by its size",
    shapes_answers=False,
)
CALLERS = Refused("the model calls tools itself", (["direct"], *EMPTY))
OTHERS_TOOL = "a tool of another provider, which the model is not offered"


# -- chats and completions, as OpenAI has them


class TextPart(Fields, tag_field="type", tag="text"):
    text: str
    rules = {"cache_control prompt_cache_breakpoint": CACHE}


class RefusalPart(Fields, tag_field="type", tag="refusal"):
    refusal: str


class ThinkingPart(Fields, tag_field="type", tag="thinking"):
    """The thought of an earlier answer, as Anthropic's API has it."""

    thinking: str


class ImageUrl(Fields):
    url: str
    detail: Detail | None = None
    rules = {"detail": DETAIL}


class ImagePart(Fields, tag_field="type", tag="image_url"):
    image_url: str | ImageUrl
    rules = {"cache_control prompt_cache_breakpoint": CACHE}
    is_image = True


PART = Kinds("this model reads text only", if_seen="this model reads text and images only")
INSTRUCTION = Kinds(PART.text, if_seen="instructions are text")
THOUGHT_ECHO = "the thought of an earlier answer; not used by models that don't think"
AnswerPart = Annotated[
    TextPart | RefusalPart | ThinkingPart,
    Kinds(
        PART.text,
        ignored=frozenset({"thinking", "reasoning", "redacted_thinking"}),
        why=THOUGHT_ECHO,
        if_seen="answers are text",
    ),
]
Texts = str | Annotated[list[Annotated[TextPart, INSTRUCTION]], PARTS]
TextsAndImages = str | Annotated[list[Annotated[TextPart | ImagePart, PART]], PARTS]


class CalledFunction(Fields):
    name: str
    arguments: str | None


class ChatCall(Fields, tag_field="type", tag="function"):
    id: str
    function: CalledFunction
    rules = {"index": ECHO}


AnyCall = Annotated[ChatCall, Kinds("calls are of functions", default="function")]


class TextMessage(Fields):
    content: Texts | None
    rules = {"name": NO_NAMES}


class SystemMessage(TextMessage, tag_field="role", tag="system"):
    pass


class DeveloperMessage(TextMessage, tag_field="role", tag="developer"):
    pass


class UserMessage(Fields, tag_field="role", tag="user"):
    content: TextsAndImages | None
    rules = {"name": NO_NAMES}


class AssistantMessage(Fields, tag_field="role", tag="assistant"):
    content: str | Annotated[list[AnswerPart], PARTS] | None = None
    tool_calls: Annotated[list[AnyCall], PARTS] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    rules = {
        "name": NO_NAMES,
        "reasoning_content reasoning": THOUGHT,
        "audio": Refused("this model reads text only"),
        "function_call": Refused("tool_calls took its place"),
        "annotations provider_specific_fields": ECHO,
    }


class ToolMessage(Fields, tag_field="role", tag="tool"):
    tool_call_id: str
    content: TextsAndImages | None = None
    rules = {"name": OF_USE_TO_CLIENTS}


ChatMessage = Annotated[
    SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage,
    Kinds("no message has this role"),
]


class Function(Fields):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    rules = {"strict": KEPT_TO}


class ChatFunctionTool(Fields, tag_field="type", tag="function"):
    function: Function
    rules = {"cache_control": CACHE}


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
    rules = {"include_obfuscation": NOT_PADDED}


class JsonSchema(Fields):
    name: FormatName
    schema: dict[str, Any] | None = None
    description: str | None = None
    rules = {"strict": KEPT_TO}


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
    rules = {"whitespace_pattern": Refused("JSON is written in one way")}


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Variables = Annotated[
    dict[Annotated[str, Meta(max_length=64)], str | int | float | bool | list[str] | None],
    Meta(max_length=64),
]


class ThinkingOptions(Fields):
    """`thinking`, as Anthropic's API has it, and others after it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Whole | None = None
    display: Literal["summarized", "omitted"] | None = None


class ThinkingFields(Fields):
    """The fields about thinking that all chats share."""

    thinking: ThinkingOptions | None = None
    enable_thinking: bool | None = None
    thinking_budget: Whole | None = None
    thinking_token_budget: Whole | None = None
    chat_template_kwargs: Variables | None = None
    rules = {
        "thinking": THINKING,
        "enable_thinking": SWITCH,
        "thinking_budget thinking_token_budget": BUDGET,
        "chat_template_kwargs": VARIABLES,
    }


PROMPT_LOGPROBS = Honoured(
    "vLLM's: log-probabilities of the prompt's tokens, and of this many most likely ones at each position, up "
    "to 20; not in streams"
)
OLDER = Honoured("the older names of `structured_outputs`", off=("", []))
PENALTY = Honoured("-2 to 2, for tokens that are in the answer")


class SampledRequest(Fields):
    """The fields that chats and completions share."""

    model: str
    stream: bool | None = None
    stream_options: ChatStreamOptions | None = None
    n: Count | None = None
    max_tokens: Limit | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Whole | None = None
    min_p: Share | None = None
    seed: Seed | None = None
    stop: Stop = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    repetition_context_size: Whole | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=MAX_BIASES)] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    rules = {
        "model": MODEL,
        "stream": STREAM,
        "stream_options": Honoured(
            "`include_usage` adds a last event with the counts, in chats also with `timings`: milliseconds "
            "until the first sampled token, and tokens per second after it",
            shapes_answers=False,
        ),
        "n": "number of answers for each prompt; the first has `seed`, from which the other seeds are derived",
        "max_tokens": LIMIT,
        "temperature top_p min_p": SAMPLING,
        "top_k": TOP_K,
        "seed": SEED,
        "stop": Honoured(
            "up to 16 strings that end the answer and are not part of it; found across tokens, too",
            off=("",),
        ),
        "frequency_penalty presence_penalty": PENALTY,
        "repetition_penalty": "above 0 to 10, for tokens that are in the prompt or the answer",
        "repetition_context_size": "`repetition_penalty` looks at this many last tokens; 0, the default, "
        "means all",
        "logit_bias": "-100 to 100, added to the logits of token ids",
        "structured_outputs": Honoured(
            "vLLM's: one of `json`, `regex`, `choice`, `grammar` (Lark, or GBNF with `::=`), `json_object`",
            off=({},),
        ),
        "guided_json guided_regex guided_choice guided_grammar": OLDER,
        "user safety_identifier": WHO,
        "prompt_cache_key": CACHE_MARK,
        "prompt_cache_options": CACHE,
        "prompt_cache_retention": Ignored(CACHE.text, ("in_memory", *EMPTY)),
        "metadata store": Ignored("nothing is stored"),
        "service_tier": ALIKE,
    }


class ChatReasoning(Fields):
    """`reasoning`, as OpenRouter's chats have it."""

    effort: Effort | None = None
    max_tokens: Whole | None = None
    enabled: bool | None = None
    exclude: bool | None = None


class ChatRequest(SampledRequest, kw_only=True):
    messages: Annotated[list[ChatMessage], SOME_MESSAGES]
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    prompt_logprobs: TopLogprobs | None = None
    response_format: ChatFormat | None = None
    tools: Annotated[list[ChatTool], TOOLS] | None = None
    tool_choice: ChatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    reasoning: ChatReasoning | None = None
    thinking: ThinkingOptions | None = None
    enable_thinking: bool | None = None
    thinking_budget: Whole | None = None
    thinking_token_budget: Whole | None = None
    chat_template_kwargs: Variables | None = None
    rules = {
        **ThinkingFields.rules,
        "messages": "roles `system`, `developer`, `user`, `assistant`, `tool`; content as text or parts of "
        "type `text`; the user's and tools' also `image_url`, if the model [sees](images.md). Instructions "
        "after other messages become a part of the user's turn there. An answer at the end is continued",
        "max_completion_tokens": LIMIT,
        "logprobs": Honoured(
            "log-probabilities, in streams too; up to 20 most likely tokens", off=(0,)
        ),
        "top_logprobs": "log-probabilities, in streams too; up to 20 most likely tokens",
        "prompt_logprobs": PROMPT_LOGPROBS,
        "response_format": Honoured(
            "`text`, `json_object`, `json_schema`: answers always follow the schema; one that can't be "
            "enforced is refused",
            off=({},),
        ),
        "tools": "functions; arguments always follow their schema, and are streamed while they are generated",
        "tool_choice": Honoured(
            "`auto`, `none`, `required`, one by its name, `allowed_tools`", CHOICES, ("", {})
        ),
        "parallel_tool_calls": PARALLEL,
        "audio": Refused(TEXT_ONLY),
        "modalities": Refused(TEXT_ONLY, (["text"], *EMPTY)),
        "functions": Refused("tools and tool_choice took its place"),
        "function_call": Refused("tools and tool_choice took its place", ("none", *EMPTY)),
        "moderation": Refused("there is no moderation"),
        "prediction": Ignored("outputs are not predicted by requests"),
        "reasoning_effort": EFFORT,
        "reasoning": Ignored(
            "`effort`, `enabled`, `max_tokens` (a budget of thoughts), `exclude`" + _NO_THOUGHTS,
            unless_thinking=True,
        ),
        "verbosity": LENGTH,
        "web_search_options": Ignored(OTHERS_TOOL, ()),
    }


TokenIds = Annotated[list[int], Meta(max_length=MAX_TOKENS)]
PROMPTS = Honoured(
    "a text, a list of texts, token ids, or a list of lists of them",
    "A text, a list of texts, a list of token ids, or a list of such lists is needed.",
)


class CompletionRequest(SampledRequest, kw_only=True):
    prompt: str | Annotated[list[str | int | TokenIds], Meta(max_length=MAX_TOKENS)]
    best_of: Count | None = None
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    prompt_logprobs: TopLogprobs | None = None
    rules = {
        "prompt": PROMPTS,
        "max_tokens": f"{LIMIT.text}; 0, with `echo` or `prompt_logprobs`, for none",
        "best_of": "generates this many answers, and returns the `n` with the highest mean log-probability; "
        "not in streams",
        "echo": "the prompt comes before the answer; its tokens have `logprobs`, too, but not in streams",
        "logprobs": Honoured(
            "log-probabilities of this many most likely tokens, up to 20; in streams too",
            off=(False,),
        ),
        "prompt_logprobs": PROMPT_LOGPROBS,
        "suffix": Refused("this model continues texts, and does not fill gaps"),
    }


# -- embeddings, as OpenAI has them, and rankings, as Jina and Cohere have them

Dimensions = Annotated[int, Meta(ge=1, le=2**31 - 1)]
DIMENSIONS = Honoured(
    "numbers of each vector, from the first on; all by default", shapes_answers=False
)


class EmbeddingRequest(Fields):
    model: str
    input: str | Annotated[list[str | int | TokenIds], Meta(max_length=MAX_TOKENS)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None
    pooling: Literal["last", "mean"] | None = None
    input_type: (
        Literal["query", "document", "search_query", "search_document", "passage"] | None
    ) = None
    instruction: str | None = None
    rules = {
        "model": MODEL,
        "input": Honoured(PROMPTS.text + ", up to 2,048; none of them empty", PROMPTS.hint),
        "encoding_format": Honoured(
            "`float`, or `base64` of little-endian float32", shapes_answers=False
        ),
        "dimensions": DIMENSIONS,
        "pooling": Honoured(
            "`last` or `mean`, by default what the adapter was trained with, or else `last`",
            shapes_answers=False,
        ),
        "input_type": Honoured(
            "`query` or `search_query` puts the adapter's instruction before texts; others are documents",
            off=("",),
            shapes_answers=False,
        ),
        "instruction": Honoured(
            "a text to put before queries in place of the adapter's; inputs are queries then",
            off=("",),
            shapes_answers=False,
        ),
        "user": WHO,
        "output_dtype embedding_type embedding_types": Refused(
            "vectors are of float32", ("float", ["float"], *EMPTY)
        ),
        "output_dimension": Refused("it is called dimensions here"),
        "normalized": Refused("all vectors have a norm of 1", (True, *EMPTY[:-1])),
        "truncate truncation": Refused("texts are never shortened", ("NONE", *EMPTY)),
        "task late_chunking": Refused(
            "there are no such tasks; adapters are models, see /v1/models"
        ),
    }


class DocumentText(Fields):
    text: str


class RerankRequest(Fields):
    model: str
    query: str
    documents: Annotated[list[str | DocumentText], Meta(max_length=MAX_TOKENS)]
    top_n: Count | None = None
    return_documents: bool | None = None
    instruction: str | None = None
    rules = {
        "model": MODEL,
        "query": Honoured("a text", shapes_answers=False),
        "documents": "up to 2,048 texts, or objects with a `text`; they are never shortened",
        "top_n": Honoured("number of results; all by default", shapes_answers=False),
        "return_documents": Honoured("results have their documents", shapes_answers=False),
        "instruction": Honoured(
            "what makes a document relevant; by default that it answers a web search query",
            off=("",),
            shapes_answers=False,
        ),
        "max_tokens_per_doc max_chunks_per_doc": Refused("documents are never shortened"),
        "rank_fields": Refused("a document is one text", (["text"], *EMPTY)),
        "truncation": Ignored("documents are never shortened"),
        "user": WHO,
        "priority": ALIKE,
    }


# -- responses, OpenAI's newer API


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


# -- messages, Anthropic's API


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


StopSequence = Annotated[str, Meta(min_length=1, max_length=MAX_STOP)]


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


# -- Ollama's API


class OllamaFunction(Fields):
    name: str
    arguments: dict[str, Any]
    rules = {"index": ECHO}


class OllamaCall(Fields):
    function: OllamaFunction
    id: str | None = None


OllamaImages = Annotated[list[str], PARTS]
OLLAMA_IMAGES = (
    "images in base64, if the model [sees](images.md): each in the place of an `[img]` in the text, the "
    "others before it"
)


class OllamaMessage(Fields):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaCall], PARTS] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: OllamaImages | None = None
    rules = {
        "thinking": THOUGHT,
        "images": Refused(PART.text, if_seen=f"{OLLAMA_IMAGES}. Not in answers and instructions"),
    }


LOADED = Ignored("the model was loaded with the server's settings")
NO_LONGER = Ignored("not one of Ollama's own options any more")


class OllamaOptions(Fields):
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Whole | None = None
    min_p: Share | None = None
    seed: Seed | None = None
    num_predict: Annotated[int, Meta(ge=-2, le=2**31 - 1)] | None = None
    stop: Annotated[list[StopSequence], Meta(max_length=MAX_STOPS)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repeat_penalty: RepetitionPenalty | None = None
    repeat_last_n: Limit | None = None
    rules = {
        "temperature top_p min_p": SAMPLING,
        "top_k": TOP_K,
        "seed": SEED,
        "num_predict": "maximum number of new tokens, by default the server's (`--max-tokens`); -1, -2 and 0 "
        "mean as many as the context holds",
        "stop": "up to 16 strings that end the answer and are not part of it",
        "frequency_penalty presence_penalty": PENALTY,
        "repeat_penalty": Honoured(
            "above 0 to 10, for the last tokens of prompt and answer", off=(1, 1.0)
        ),
        "repeat_last_n": "number of last tokens for `repeat_penalty`: 64 by default, -1 for all, 0 for none",
        "typical_p": Refused("there is no typical sampling", (1, 1.0, *EMPTY)),
        "num_ctx num_batch num_gpu main_gpu num_thread use_mmap draft_num_predict": LOADED,
        "num_keep": NEVER_SHORTENED,
        "numa low_vram f16_kv logits_all vocab_only use_mlock embedding_only penalize_newline": NO_LONGER,
        "mirostat mirostat_tau mirostat_eta tfs_z": NO_LONGER,
    }


class OllamaRequest(Fields):
    """The fields that Ollama's chats and prompts share."""

    model: str
    stream: bool | None = None
    format: Literal["json"] | dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    options: OllamaOptions | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    keep_alive: float | str | None = None
    rules = {
        "model": "a name of `/api/tags`, with or without `:latest`; any other is a 404",
        "stream": Honoured(STREAM.text + ", one JSON object a line; true by default"),
        "format": Honoured('`"json"`, or a schema, which answers always follow', off=("",)),
        "think": Ignored(
            "`true` and `false` switch thinking on and off; `low`, `medium`, `high` and `max` switch it on "
            "and are shown to the model if its template has a place for them" + _NO_THOUGHTS,
            unless_thinking=True,
        ),
        "options": Honoured(off=({},)),
        "logprobs top_logprobs": Honoured(
            "log-probabilities, in streams too; up to 20 most likely tokens", off=(0, False)
        ),
        "keep_alive": Honoured(
            "0 without a prompt loads no model; otherwise `--keep-alive` decides how long a model stays loaded",
            shapes_answers=False,
        ),
        "truncate shift": NEVER_SHORTENED,
        "_debug_render_only": Refused("prompts are not shown; see /tokenize"),
    }


class OllamaChatRequest(OllamaRequest, kw_only=True):
    messages: Annotated[list[OllamaMessage], MESSAGES] | None = None
    tools: Annotated[list[ChatTool], TOOLS] | None = None
    rules = {
        "messages": "roles `system`, `user`, `assistant`, `tool`. A result is of the call that `tool_call_id` "
        "or `tool_name` says, or of the first call without one. Instructions after other messages become a "
        "part of the user's turn there; an answer at the end is continued. Without messages, nothing is "
        "generated",
        "tools": "functions; arguments always follow their schema",
    }


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: OllamaImages | None = None
    rules = {
        "prompt": "one message of the user; without it, nothing is generated",
        "system": Honoured("instructions; not with `raw`", off=("",)),
        "raw": Honoured(
            "the prompt is continued without the chat template, as it is if the model has none",
            off=(False,),
        ),
        "template": Refused("the model's own chat template is used; see `raw`"),
        "context": Refused("Ollama has deprecated it; send the conversation to /api/chat"),
        "suffix": Refused("this model continues texts, and does not fill gaps"),
        "images": Refused(TEXT_ONLY, if_seen=f"{OLLAMA_IMAGES}. Not with `raw`"),
        "width height steps": Refused(TEXT_ONLY),
    }


TRUNCATES = Honoured(
    "texts that the context can't hold are shortened, unless this is false", shapes_answers=False
)


LASTING = Ignored("`--keep-alive` decides how long a model stays loaded")


class OllamaEmbedRequest(Fields):
    model: str
    input: str | Annotated[list[str], Meta(max_length=MAX_TOKENS)] | None = None
    truncate: bool | None = None
    dimensions: Dimensions | None = None
    rules = {
        "model": OllamaRequest.rules["model"],
        "input": "a text, or a list of up to 2,048; without it, the model is loaded",
        "truncate": TRUNCATES,
        "dimensions": DIMENSIONS,
        "options": LOADED,
        "keep_alive": LASTING,
    }


class OllamaEmbeddingRequest(Fields):
    model: str
    prompt: str | None = None
    rules = {
        "model": OllamaRequest.rules["model"],
        "prompt": "a text; without it, the model is loaded",
        "options": LOADED,
        "keep_alive": LASTING,
    }


# -- fields that no struct has

REQUESTS: tuple[type[Fields], ...] = (
    ChatRequest,
    CompletionRequest,
    ResponseRequest,
    MessageRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
    EmbeddingRequest,
    RerankRequest,
    OllamaEmbedRequest,
    OllamaEmbeddingRequest,
)
"""The bodies of all APIs."""

OTHER_SERVERS: Mapping[str, tuple[object, ...]] = {
    "adapters": EMPTY,
    "add_generation_prompt": (True,),
    **dict.fromkeys(("allowed_token_ids", "bad_words", "chat_template"), EMPTY),
    "continue_final_message": EMPTY,
    "dry_multiplier": (0, 0.0),
    **dict.fromkeys(("frequency_context_size", "grammar", "ignore_eos", "json_schema"), EMPTY),
    "images": EMPTY,
    "length_penalty": (1, 1.0),
    "max_new_tokens": (-1,),
    "min_tokens": (0,),
    "mirostat": (0,),
    "n_predict": (-1,),
    "no_repeat_ngram_size": (0,),
    "presence_context_size": EMPTY,
    "repeat_penalty": (1, 1.0),
    **dict.fromkeys(("stop_token_ids", "structural_tag", "template"), EMPTY),
    "truncate_prompt_tokens": (-1,),
    "typical_p": (1, 1.0),
    "use_beam_search": EMPTY,
    "xtc_probability": (0, 0.0),
}
"""Fields of other servers that change answers, and the values that mean the same as null."""
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
