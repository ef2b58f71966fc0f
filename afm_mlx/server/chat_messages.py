"""What a chat of OpenAI's form is made of, as messages for the chat template, and its tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from afm_mlx.server.conversation import Conversation, Message
from afm_mlx.server.request_fields import (
    AssistantMessage,
    ChatAllowedTools,
    ChatFunctionTool,
    ChatToolChoice,
    ChosenFunction,
    RefusalPart,
    TextPart,
    ToolMessage,
    UserMessage,
)
from afm_mlx.server.tool_use import Tool, function_tool, tool_fields


def chat_messages(messages: Sequence[Any], folds: bool) -> list[Message]:
    """Messages for the chat template.

    Args:
        messages: of the kinds that `ChatMessage` names.
        folds: whether late instructions are taken, see `Conversation`.

    Raises:
        ApiError: for messages that can't be honoured.
    """
    conversation = Conversation(folds=folds)
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        if isinstance(message, AssistantMessage):
            _add_answer(conversation, message, place)
        elif isinstance(message, ToolMessage):
            conversation.add_result(
                message.tool_call_id, _text(message.content), f"{place}.tool_call_id"
            )
        elif isinstance(message, UserMessage):
            conversation.add_user(_text(message.content), place)
        else:
            conversation.add_system(_text(message.content), place)
    return conversation.finished("messages")


def _add_answer(conversation: Conversation, message: AssistantMessage, place: str) -> None:
    content = message.content if message.content is not None else message.refusal or ""
    conversation.add_answer(_text(content), place)
    for index, call in enumerate(message.tool_calls or ()):
        where = f"{place}.tool_calls[{index}]"
        function = call.function
        conversation.add_call(
            call.id, function.name, function.arguments, f"{where}.id", f"{where}.function.arguments"
        )


def _text(content: str | Sequence[TextPart | RefusalPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)


def chat_tools(tools: Sequence[ChatFunctionTool] | None) -> list[Tool]:
    """Definitions for the chat template and for `tool_call_constraint`."""
    functions = (tool.function for tool in tools or ())
    return [function_tool(each.name, each.description, each.parameters) for each in functions]


def chat_tool_fields(
    tools: Sequence[ChatFunctionTool] | None, choice: ChatToolChoice | None, parallel: bool
) -> dict[str, Any]:
    """The fields of an `Ask` about tools.

    Raises:
        ApiError: for a choice that can't be honoured.
    """
    made = chat_tools(tools)
    if isinstance(choice, ChosenFunction):
        return tool_fields(made, "one", parallel=parallel, only=[choice.function.name])
    if isinstance(choice, ChatAllowedTools):
        allowed = choice.allowed_tools
        only = [tool.function.name for tool in allowed.tools]
        return tool_fields(made, allowed.mode, parallel=parallel, only=only)
    return tool_fields(made, choice or "auto", parallel=parallel)
