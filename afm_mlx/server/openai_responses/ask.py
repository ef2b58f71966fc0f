"""What a body for `/v1/responses` asks for, in the terms that all APIs share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from afm_mlx.errors import ConstraintError, shown
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.server.conversation import Conversation, Message
from afm_mlx.server.errors import bad_request
from afm_mlx.server.generation import Ask
from afm_mlx.server.openai_fields import limit
from afm_mlx.server.request_fields import (
    CallItem,
    ChosenTool,
    InputRequest,
    ItemTexts,
    JsonObjectFormat,
    ReferenceItem,
    RefusalPart,
    ResponseAllowedTools,
    ResponseFormat,
    ResponseRequest,
    ResponseSchemaFormat,
    ResultItem,
)
from afm_mlx.server.served_model import ServedModel
from afm_mlx.server.tool_use import function_tool, tool_fields

LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
"""What `include` may name: log-probabilities, and parts of items that no answer here has."""


def asked(
    served: ServedModel, body: ResponseRequest, conversation: Sequence[Message], client: str
) -> Ask:
    """What generation is asked for.

    Args:
        served: the model.
        body: the request.
        conversation: what `messages_of` made of its input.
        client: who asks.

    Raises:
        ApiError: for fields that can't be honoured.
    """
    for name in body.include or ():
        if name not in INCLUDABLE:
            raise bad_request(
                f"include has {shown(name)}; allowed are {', '.join(INCLUDABLE)}.", "include"
            )
    with_logprobs = LOGPROBS in (body.include or ())
    if body.top_logprobs and not with_logprobs:
        raise bad_request(
            f"top_logprobs is {body.top_logprobs}, but log-probabilities are not asked for. Put "
            f"{LOGPROBS!r} into include.",
            "top_logprobs",
        )
    return Ask(
        **prompt_fields(body, conversation),
        adapter=served.adapter_of(body.model),
        max_tokens=limit("max_output_tokens", body.max_output_tokens),
        temperature=body.temperature,
        top_p=body.top_p,
        logprobs=(body.top_logprobs or 0) if with_logprobs else None,
        client=client,
    )


def prompt_fields(body: InputRequest, conversation: Sequence[Message]) -> dict[str, Any]:
    """The fields of an `Ask` that make its prompt, and what its answer has to be.

    Raises:
        ApiError: for fields that can't be honoured.
    """
    answer = response_format = None
    if body.text is not None:
        answer, response_format = _answer_format(body.text.format)
    if answer is not None and conversation[-1]["role"] == "assistant":
        raise bad_request(
            "An answer that the input begins already can't be held to a format, which is said of whole "
            "answers. Leave the last item out, or the format.",
            "input",
        )
    return {
        "messages": conversation,
        **_tool_fields(body),
        "answer": answer,
        "response_format": response_format,
    }


def _answer_format(
    format: ResponseFormat | None,
) -> tuple[Constraint | None, dict[str, Any] | None]:
    """The constraint of an answer, and its format as the model is shown it."""
    if isinstance(format, JsonObjectFormat):
        return Constraint.json_schema({"type": "object"}), None
    if not isinstance(format, ResponseSchemaFormat):
        return None, None
    try:
        constraint = Constraint.json_schema(format.schema)
    except ConstraintError as error:
        raise bad_request(str(error), "text.format.schema", "invalid_schema") from None
    described = {} if format.description is None else {"description": format.description}
    schema = {"name": format.name, **described, "schema": format.schema}
    return constraint, {"type": "json_schema", "json_schema": schema}


def _tool_fields(body: InputRequest) -> dict[str, Any]:
    tools = [function_tool(t.name, t.description, t.parameters) for t in body.tools or ()]
    parallel = body.parallel_tool_calls is not False
    choice = body.tool_choice
    if isinstance(choice, ChosenTool):
        return tool_fields(tools, "one", parallel=parallel, only=[choice.name])
    if isinstance(choice, ResponseAllowedTools):
        only = [tool.name for tool in choice.tools]
        return tool_fields(tools, choice.mode, parallel=parallel, only=only)
    return tool_fields(tools, choice or "auto", parallel=parallel)


def messages_of(
    body: InputRequest, earlier: Sequence[Message], folds: bool
) -> tuple[list[Message], list[Message]]:
    """The conversation that a body's input continues.

    Args:
        body: the request; items that it refers to are in their places.
        earlier: messages of the response that the request goes on from.
        folds: whether late instructions are taken, see `Conversation`.

    Returns:
        The messages for the model; and those that a later request goes on from, without `instructions`.

    Raises:
        ApiError: for items that can't be honoured.
    """
    if body.input is None or body.input == []:
        raise bad_request(
            "input is missing; a text or items are needed.", "input", "missing_required_parameter"
        )
    conversation = Conversation(earlier, folds)
    if isinstance(body.input, str):
        conversation.add_user(body.input, "input")
    for index, item in enumerate(body.input if isinstance(body.input, list) else ()):
        place = f"input[{index}]"
        assert not isinstance(item, ReferenceItem)
        if isinstance(item, CallItem):
            conversation.add_call(
                item.call_id, item.name, item.arguments, f"{place}.call_id", f"{place}.arguments"
            )
        elif isinstance(item, ResultItem):
            conversation.add_result(item.call_id, _text(item.output), f"{place}.call_id")
        elif item.role == "user":
            conversation.add_user(_text(item.content), place)
        elif item.role == "assistant":
            conversation.add_answer(_text(item.content), place)
        else:
            conversation.add_system(_text(item.content), place)
    kept = conversation.finished("input")
    if body.instructions is None:
        return kept, kept
    return conversation.finished("input", body.instructions), kept


def _text(content: ItemTexts | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in content)
