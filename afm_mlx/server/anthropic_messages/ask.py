"""What a body for `/v1/messages` asks for, in the terms that all APIs share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from afm_mlx.errors import ConstraintError
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.server.anthropic_messages.fields import (
    NOT_HONOURED,
    AnyChoice,
    JsonFormat,
    MessageFields,
    NoChoice,
    PromptFields,
    TextBlock,
    Tool,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from afm_mlx.server.bodies import refuse
from afm_mlx.server.conversation import PARAGRAPH, Conversation, Message
from afm_mlx.server.errors import bad_request
from afm_mlx.server.generation import Ask
from afm_mlx.server.kinds import of_kind
from afm_mlx.server.served_model import ServedModel
from afm_mlx.server.tool_use import function_tool, tool_fields

_TEXT = {"text": TextBlock}
_USER = {**_TEXT, "tool_result": ToolResultBlock}
_ASSISTANT = {**_TEXT, "tool_use": ToolUseBlock}
_READS_TEXT = "the model reads text only, calls of tools and their results"


def asked(served: ServedModel, body: MessageFields, client: str) -> Ask:
    """What generation is asked for.

    Args:
        served: the model.
        body: the request.
        client: who asks.

    Raises:
        ApiError: for fields that can't be honoured.
    """
    return Ask(
        **prompt_fields(body),
        adapter=served.adapter_of(body.model),
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences or (),
        client=client,
    )


def prompt_fields(body: PromptFields) -> dict[str, Any]:
    """The fields of an `Ask` that make its prompt, and what its answer has to be.

    Raises:
        ApiError: for fields that can't be honoured.
    """
    for name, (why, allowed) in NOT_HONOURED.items():
        refuse(getattr(body, name, None), name, why, *allowed)
    refuse(
        body.thinking, "thinking", "the model answers without thinking first", {"type": "disabled"}
    )
    format, place = body.output_format, "output_format"
    if body.output_config is not None:
        refuse(body.output_config.effort, "output_config.effort", "answers take one effort")
        if body.output_config.format is not None:
            if format is not None:
                raise bad_request(
                    "output_format and output_config.format are both given. Leave one out.", place
                )
            format, place = body.output_config.format, "output_config.format"
    messages = _messages(body)
    if format is not None and messages[-1]["role"] == "assistant":
        raise bad_request(
            "An answer that the messages begin already can't be held to a format, which is said of whole "
            "answers. Leave the last message out, or the format.",
            place,
        )
    return {"messages": messages, **_tool_fields(body), **_answer_format(format, place)}


def _answer_format(format: JsonFormat | None, place: str) -> dict[str, Any]:
    if format is None:
        return {}
    try:
        constraint = Constraint.json_schema(format.schema)
    except ConstraintError as error:
        raise bad_request(str(error), f"{place}.schema", "invalid_schema") from None
    named = {key: format.schema[key] for key in ("description",) if key in format.schema}
    schema = {"name": format.schema.get("title", "answer"), **named, "schema": format.schema}
    return {
        "answer": constraint,
        "response_format": {"type": "json_schema", "json_schema": schema},
    }


def _tool_fields(body: PromptFields) -> dict[str, Any]:
    tools = []
    for index, tool in enumerate(body.tools or ()):
        place = f"tools[{index}]"
        why = "this server runs no tools of its own"
        made: Tool = of_kind(tool, place, {"custom": Tool}, why, "custom")
        refuse(made.defer_loading, f"{place}.defer_loading", "all tools are shown at once", False)
        refuse(made.allowed_callers, f"{place}.allowed_callers", "models call tools", ["direct"])
        refuse(made.input_examples, f"{place}.input_examples", "models aren't shown any", [])
        tools.append(function_tool(made.name, made.description, made.input_schema))
    choice = body.tool_choice
    if isinstance(choice, ToolChoice):
        return tool_fields(tools, "one", parallel=False, only=[choice.name])
    if choice is None or isinstance(choice, NoChoice):
        return tool_fields(tools, "auto" if choice is None else "none", parallel=True)
    word = "required" if isinstance(choice, AnyChoice) else "auto"
    return tool_fields(tools, word, parallel=not choice.disable_parallel_tool_use)


def _messages(body: PromptFields) -> list[Message]:
    conversation = Conversation()
    for index, message in enumerate(body.messages):
        place = f"messages[{index}]"
        kinds = {"user": _USER, "assistant": _ASSISTANT}.get(message.role, _TEXT)
        texts: list[str] = []
        if isinstance(message.content, str):
            texts.append(message.content)
        for number, block in enumerate(() if texts else message.content):
            where = f"{place}.content[{number}]"
            made = of_kind(block, where, kinds, _READS_TEXT)
            if isinstance(made, TextBlock):
                texts.append(made.text)
                continue
            if texts:  # what stands before a call or a result
                conversation.add_text(message.role, PARAGRAPH.join(texts), where)
                texts = []
            if isinstance(made, ToolUseBlock):
                arguments = json.dumps(made.input)
                conversation.add_call(made.id, made.name, arguments, f"{where}.id")
            else:
                conversation.add_result(
                    made.tool_use_id, _result(made, where), f"{where}.tool_use_id"
                )
        if message.role == "system":
            conversation.add_system(PARAGRAPH.join(texts), place)
        elif texts or not message.content:
            conversation.add_text(message.role, PARAGRAPH.join(texts), place)
    return conversation.finished("messages", _system(body.system))


def _system(system: str | Sequence[TextBlock] | None) -> str | None:
    """Instructions; blocks are paragraphs."""
    if system is None or isinstance(system, str):
        return system
    return PARAGRAPH.join(block.text for block in system) if system else None


def _result(block: ToolResultBlock, place: str) -> str:
    """A call's result as the model reads it; JSON, where the call has failed."""
    text = block.content or ""
    if not isinstance(text, str):
        blocks = (
            of_kind(part, f"{place}.content[{index}]", _TEXT, "the model reads text only")
            for index, part in enumerate(text)
        )
        text = PARAGRAPH.join(made.text for made in blocks)
    return json.dumps({"error": text}) if block.is_error else text
