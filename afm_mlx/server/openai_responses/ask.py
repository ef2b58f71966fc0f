"""What a body for `/v1/responses` asks for, in the terms that all APIs share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from afm_mlx.errors import ConstraintError, shown
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.server.bodies import refuse
from afm_mlx.server.conversation import Conversation, Message
from afm_mlx.server.errors import bad_request
from afm_mlx.server.generation import Ask
from afm_mlx.server.kinds import of_kind
from afm_mlx.server.openai_responses.fields import (
    NOT_HONOURED,
    AllowedTools,
    AnswerPart,
    CallItem,
    Format,
    FunctionTool,
    InputFields,
    JsonObjectFormat,
    JsonSchemaFormat,
    MessageItem,
    RefusalPart,
    ResponseFields,
    ResultItem,
    TextPart,
    ToolName,
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

_ITEMS = {"message": MessageItem, "function_call": CallItem, "function_call_output": ResultItem}
_PARTS = {"input_text": TextPart, "output_text": AnswerPart, "refusal": RefusalPart}
_TOOLS = {"function": FunctionTool}
_CHOICES = {"function": ToolName, "allowed_tools": AllowedTools}
_READS_TEXT = "the model reads text only"


def asked(
    served: ServedModel, body: ResponseFields, conversation: Sequence[Message], client: str
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
    if body.stream_options is not None:
        refuse(
            body.stream_options.include_obfuscation,
            "stream_options.include_obfuscation",
            "events are never padded",
            False,
        )
    return Ask(
        **prompt_fields(body, conversation),
        adapter=served.adapter_of(body.model),
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        logprobs=(body.top_logprobs or 0) if with_logprobs else None,
        client=client,
    )


def prompt_fields(body: InputFields, conversation: Sequence[Message]) -> dict[str, Any]:
    """The fields of an `Ask` that make its prompt, and what its answer has to be.

    Raises:
        ApiError: for fields that can't be honoured.
    """
    for name, (why, allowed) in NOT_HONOURED.items():
        refuse(getattr(body, name, None), name, why, *allowed)
    if body.reasoning is not None:
        why = "the model answers without reasoning first"
        refuse(body.reasoning.effort, "reasoning.effort", why, "none")
        refuse(body.reasoning.summary, "reasoning.summary", why)
        refuse(body.reasoning.generate_summary, "reasoning.generate_summary", why)
    answer = response_format = None
    if body.text is not None:
        refuse(body.text.verbosity, "text.verbosity", "answers are as long as they are", "medium")
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


def _answer_format(format: Format | None) -> tuple[Constraint | None, dict[str, Any] | None]:
    """The constraint of an answer, and its format as the model is shown it."""
    if isinstance(format, JsonObjectFormat):
        return Constraint.json_schema({"type": "object"}), None
    if not isinstance(format, JsonSchemaFormat):
        return None, None
    try:
        constraint = Constraint.json_schema(format.schema)
    except ConstraintError as error:
        raise bad_request(str(error), "text.format.schema", "invalid_schema") from None
    described = {} if format.description is None else {"description": format.description}
    schema = {"name": format.name, **described, "schema": format.schema}
    return constraint, {"type": "json_schema", "json_schema": schema}


def _tool_fields(body: InputFields) -> dict[str, Any]:
    tools = []
    for index, tool in enumerate(body.tools or ()):
        place = f"tools[{index}]"
        made: FunctionTool = of_kind(tool, place, _TOOLS, "this server runs no tools of its own")
        refuse(made.defer_loading, f"{place}.defer_loading", "all tools are shown at once", False)
        tools.append(function_tool(made.name, made.description, made.parameters))
    parallel = body.parallel_tool_calls is not False
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return tool_fields(tools, choice or "auto", parallel=parallel)
    named = of_kind(choice, "tool_choice", _CHOICES, "the only tools are functions")
    if isinstance(named, ToolName):
        return tool_fields(tools, "one", parallel=parallel, only=[named.name])
    only = [tool.name for tool in named.tools]
    return tool_fields(tools, named.mode, parallel=parallel, only=only)


def messages_of(
    body: InputFields, earlier: Sequence[Message] = ()
) -> tuple[list[Message], list[Message]]:
    """The conversation that a body's input continues.

    Args:
        body: the request.
        earlier: messages of the response that the request goes on from.

    Returns:
        The messages for the model; and those that a later request goes on from, without `instructions`.

    Raises:
        ApiError: for items that can't be honoured.
    """
    if body.input is None or body.input == []:
        raise bad_request(
            "input is missing; a text or items are needed.", "input", "missing_required_parameter"
        )
    conversation = Conversation(earlier)
    if isinstance(body.input, str):
        conversation.add_text("user", body.input, "input")
    for index, item in enumerate(body.input if isinstance(body.input, list) else ()):
        place = f"input[{index}]"
        why = (
            "items can't be referred to; send the item itself, or previous_response_id"
            if isinstance(item, dict) and item.get("type") == "item_reference"
            else _READS_TEXT + ", calls of functions and their results"
        )
        made = of_kind(item, place, _ITEMS, why, "message")
        if isinstance(made, CallItem):
            conversation.add_call(made.call_id, made.name, made.arguments, f"{place}.call_id")
        elif isinstance(made, ResultItem):
            text = _text(made.output, f"{place}.output")
            conversation.add_result(made.call_id, text, f"{place}.call_id")
        elif made.role in ("system", "developer"):
            conversation.add_system(_text(made.content, f"{place}.content"), place)
        else:
            conversation.add_text(made.role, _text(made.content, f"{place}.content"), place)
    kept = conversation.finished("input")
    if body.instructions is None:
        return kept, kept
    return conversation.finished("input", body.instructions), kept


def _text(content: str | list[Any], place: str) -> str:
    if isinstance(content, str):
        return content
    parts = [
        of_kind(part, f"{place}[{index}]", _PARTS, _READS_TEXT)
        for index, part in enumerate(content)
    ]
    return "".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in parts)
