"""A response of `/v1/responses`, its items and the events of its stream, as clients read them."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field

# -- items


class TopLogprob(Struct):
    """A token that might have come, with the logarithm of its probability."""

    token: str
    bytes: list[int]
    logprob: float


class Logprob(TopLogprob):
    """A token of an answer, and the most likely ones at its place."""

    top_logprobs: list[TopLogprob]


class OutputText(Struct, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str = ""
    annotations: list[Any] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)


class OutputMessage(Struct, tag_field="type", tag="message"):
    """What the model has said."""

    id: str
    content: list[OutputText] = field(default_factory=list)
    role: str = "assistant"
    status: str = "in_progress"


class FunctionCall(Struct, tag_field="type", tag="function_call"):
    """A tool that the model wants to be called; `arguments` is JSON."""

    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: str = "in_progress"


Item = OutputMessage | FunctionCall


# -- the response


class InputDetails(Struct):
    """How much of a prompt was known already."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(Struct):
    """How much of an answer nobody sees."""

    reasoning_tokens: int = 0


class Usage(Struct):
    """Tokens of a request."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    total_tokens: int
    output_tokens_details: OutputDetails = field(default_factory=OutputDetails)


class ResponseError(Struct):
    """Why there is no answer, or no more of it."""

    code: str
    message: str


class IncompleteDetails(Struct):
    """Why an answer has no end."""

    reason: str


class Response(Struct, kw_only=True):
    """One response; much of it repeats the request."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str = "in_progress"
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[Item] = field(default_factory=list)
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any] = field(default_factory=lambda: {"effort": None, "summary": None})
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: Any
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"
    usage: Usage | None = None
    user: str | None


# -- events


class StreamEvent(Struct, kw_only=True, tag_field="type"):
    """An event of a stream; `sequence_number` counts them."""

    sequence_number: int = -1


class ResponseCreated(StreamEvent, tag="response.created"):
    """The request is taken."""

    response: Response


class ResponseInProgress(StreamEvent, tag="response.in_progress"):
    """The answer begins."""

    response: Response


class ResponseCompleted(StreamEvent, tag="response.completed"):
    """The answer is there."""

    response: Response


class ResponseIncomplete(StreamEvent, tag="response.incomplete"):
    """The answer was cut by a limit."""

    response: Response


class ResponseFailed(StreamEvent, tag="response.failed"):
    """An error has ended the answer."""

    response: Response


class OutputItemAdded(StreamEvent, tag="response.output_item.added"):
    """An item begins."""

    output_index: int
    item: Item


class OutputItemDone(StreamEvent, tag="response.output_item.done"):
    """An item is there as a whole."""

    output_index: int
    item: Item


class ItemEvent(StreamEvent):
    """Something within an item."""

    item_id: str
    output_index: int


class ContentPartAdded(ItemEvent, tag="response.content_part.added"):
    """A message's text begins."""

    part: OutputText
    content_index: int = 0


class ContentPartDone(ItemEvent, tag="response.content_part.done"):
    """A message's text is there as a whole."""

    part: OutputText
    content_index: int = 0


class OutputTextDelta(ItemEvent, tag="response.output_text.delta"):
    """More of a message's text."""

    delta: str
    logprobs: list[Logprob]
    content_index: int = 0


class OutputTextDone(ItemEvent, tag="response.output_text.done"):
    """A message's text."""

    text: str
    logprobs: list[Logprob]
    content_index: int = 0


class ArgumentsDelta(ItemEvent, tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    delta: str


class ArgumentsDone(ItemEvent, tag="response.function_call_arguments.done"):
    """A call's arguments."""

    arguments: str
    name: str
