"""Fields of chats and completions, as OpenAI has them."""

# ruff: noqa: RUF012  (the rules of a class are never changed)

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from afm_mlx.server.field_rules import EMPTY, Fields, Honoured, Ignored, Kinds, Refused
from afm_mlx.server.request_fields.shared import (
    ALIKE,
    BUDGET,
    CACHE,
    CACHE_MARK,
    DETAIL,
    ECHO,
    EFFORT,
    KEPT_TO,
    LENGTH,
    LIMIT,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_TOKENS,
    MODEL,
    NO_NAMES,
    NO_THOUGHTS,
    NOT_PADDED,
    OF_USE_TO_CLIENTS,
    OTHERS_TOOL,
    PARALLEL,
    PARTS,
    SAMPLING,
    SEED,
    SOME_MESSAGES,
    STREAM,
    SWITCH,
    TEXT_ONLY,
    THINKING,
    THOUGHT,
    TOOLS,
    TOP_K,
    VARIABLES,
    WHO,
    Bias,
    Count,
    Detail,
    FormatName,
    Limit,
    Penalty,
    RepetitionPenalty,
    Seed,
    Share,
    Stop,
    Temperature,
    ToolName,
    TopLogprobs,
    Whole,
)


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
            "`effort`, `enabled`, `max_tokens` (a budget of thoughts), `exclude`" + NO_THOUGHTS,
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
