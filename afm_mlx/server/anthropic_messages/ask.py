"""What a body for `/v1/messages` asks for, in the terms that all APIs share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from afm_mlx.errors import ConstraintError
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.server.conversation import PARAGRAPH, Conversation, Message
from afm_mlx.server.errors import bad_request
from afm_mlx.server.generation import Ask
from afm_mlx.server.request_fields import (
    AnyChoice,
    ClaudeAssistant,
    ClaudeSystem,
    ClaudeText,
    ClaudeUser,
    MessageRequest,
    NoChoice,
    PromptRequest,
    SchemaFormat,
    ToolChoice,
    ToolResultBlock,
)
from afm_mlx.server.served_model import ServedModel
from afm_mlx.server.tool_use import function_tool, tool_fields


def asked(served: ServedModel, body: MessageRequest, client: str) -> Ask:
    """What generation is asked for.

    Args:
        served: the model.
        body: the request.
        client: who asks.

    Raises:
        ApiError: for fields that can't be honoured.
    """
    return Ask(
        **prompt_fields(body, folds=not served.options.strict),
        adapter=served.adapter_of(body.model),
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences or (),
        client=client,
    )


def prompt_fields(body: PromptRequest, folds: bool) -> dict[str, Any]:
    """The fields of an `Ask` that make its prompt, and what its answer has to be.

    Args:
        body: the request.
        folds: whether late instructions are taken, see `Conversation`.

    Raises:
        ApiError: for fields that can't be honoured.
    """
    format, place = body.output_format, "output_format"
    if body.output_config is not None and body.output_config.format is not None:
        if format is not None:
            raise bad_request(
                "output_format and output_config.format are both given. Leave one out.", place
            )
        format, place = body.output_config.format, "output_config.format"
    messages = _messages(body, folds)
    if format is not None and messages[-1]["role"] == "assistant":
        raise bad_request(
            "An answer that the messages begin already can't be held to a format, which is said of whole "
            "answers. Leave the last message out, or the format.",
            place,
        )
    return {"messages": messages, **_tool_fields(body), **_answer_format(format, place)}


def _answer_format(format: SchemaFormat | None, place: str) -> dict[str, Any]:
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


def _tool_fields(body: PromptRequest) -> dict[str, Any]:
    tools = [function_tool(t.name, t.description, t.input_schema) for t in body.tools or ()]
    choice = body.tool_choice
    if isinstance(choice, ToolChoice):
        return tool_fields(tools, "one", parallel=False, only=[choice.name])
    if choice is None or isinstance(choice, NoChoice):
        return tool_fields(tools, "auto" if choice is None else "none", parallel=True)
    word = "required" if isinstance(choice, AnyChoice) else "auto"
    return tool_fields(tools, word, parallel=not choice.disable_parallel_tool_use)


def _messages(body: PromptRequest, folds: bool) -> list[Message]:
    conversation = Conversation(folds=folds)
    for index, message in enumerate(body.messages):
        place = f"messages[{index}]"
        if isinstance(message, ClaudeUser):
            _add_user(conversation, message, place)
        elif isinstance(message, ClaudeSystem):
            conversation.add_system(_joined(message.content), place)
        else:
            _add_answer(conversation, message, place)
    return conversation.finished("messages", _system(body.system))


def _add_user(conversation: Conversation, message: ClaudeUser, place: str) -> None:
    """Results, and behind them what the user says."""
    if isinstance(message.content, str):
        conversation.add_user(message.content, place)
        return
    texts = [block.text for block in message.content if isinstance(block, ClaudeText)]
    for number, block in enumerate(message.content):
        if isinstance(block, ToolResultBlock):
            where = f"{place}.content[{number}].tool_use_id"
            conversation.add_result(block.tool_use_id, _result(block), where)
    if texts or not message.content:
        conversation.add_user(PARAGRAPH.join(texts), place)


def _add_answer(conversation: Conversation, message: ClaudeAssistant, place: str) -> None:
    """Text and calls; a message of nothing else (of thoughts) is none."""
    if isinstance(message.content, str):
        conversation.add_answer(message.content, place)
        return
    texts: list[str] = []
    for number, block in enumerate(message.content):
        if isinstance(block, ClaudeText):
            texts.append(block.text)
            continue
        where = f"{place}.content[{number}]"
        if texts:  # what stands before a call
            conversation.add_answer(PARAGRAPH.join(texts), where)
            texts = []
        conversation.add_call(block.id, block.name, json.dumps(block.input), f"{where}.id")
    if texts:
        conversation.add_answer(PARAGRAPH.join(texts), place)


def _system(system: str | Sequence[ClaudeText] | None) -> str | None:
    return _joined(system) if system else None


def _joined(content: str | Sequence[ClaudeText]) -> str:
    """Blocks are paragraphs."""
    return content if isinstance(content, str) else PARAGRAPH.join(block.text for block in content)


def _result(block: ToolResultBlock) -> str:
    """A call's result as the model reads it; JSON, where the call has failed."""
    text = _joined(block.content or "")
    return json.dumps({"error": text}) if block.is_error else text
