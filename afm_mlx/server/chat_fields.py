"""The body of `/v1/chat/completions`: its fields, its messages, and its tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from afm_mlx.errors import shown
from afm_mlx.server.bodies import refuse
from afm_mlx.server.errors import bad_request
from afm_mlx.server.openai_fields import (
    Count,
    ResponseFormat,
    SampledRequest,
    check_stream,
    unsupported,
)


class TextPart(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    text: str


class RefusalPart(Struct, tag_field="type", tag="refusal", forbid_unknown_fields=True):
    refusal: str


class CalledFunction(Struct, forbid_unknown_fields=True):
    name: str
    arguments: str


class FunctionCall(Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    function: CalledFunction
    id: str


class SystemMessage(Struct, tag_field="role", tag="system", forbid_unknown_fields=True):
    content: str | list[TextPart]
    name: str | None = None


class DeveloperMessage(Struct, tag_field="role", tag="developer", forbid_unknown_fields=True):
    content: str | list[TextPart]
    name: str | None = None


class UserMessage(Struct, tag_field="role", tag="user", forbid_unknown_fields=True):
    content: str | list[TextPart]
    name: str | None = None


class AssistantMessage(Struct, tag_field="role", tag="assistant", forbid_unknown_fields=True):
    content: str | list[TextPart | RefusalPart] | None = None
    tool_calls: list[FunctionCall] | None = None
    name: str | None = None
    refusal: str | None = None
    audio: Any = None
    function_call: Any = None
    annotations: list[Any] | None = None


class ToolMessage(Struct, tag_field="role", tag="tool", forbid_unknown_fields=True):
    content: str | list[TextPart]
    tool_call_id: str
    name: str | None = None


ChatMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class Function(Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}\\Z")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    function: Function


class NamedFunction(Struct, forbid_unknown_fields=True):
    name: str


class NamedChoice(Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    function: NamedFunction


class AllowedTool(Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    function: NamedFunction


class AllowedTools(Struct, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class AllowedChoice(Struct, tag_field="type", tag="allowed_tools", forbid_unknown_fields=True):
    allowed_tools: AllowedTools


ToolChoice = Literal["auto", "none", "required"] | NamedChoice | AllowedChoice


HINTS = {
    r"messages\[\d+\]\.role": "Allowed are system, developer, user, assistant and tool.",
    r"messages\[\d+\]\.content(\[\d+\]\.type)?": "This model reads texts, and parts of the type text.",
    r"response_format\.type": "Allowed are text, json_object and json_schema.",
    r"tool_choice(\.type)?": "Allowed are auto, none, required, and a function of tools by its name.",
    r"tools\[\d+\]\.type": "Allowed are tools of the type function.",
}


class ChatRequest(SampledRequest, kw_only=True, forbid_unknown_fields=True):
    """The fields of a request. Those of the last group are refused unless they ask for nothing."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    # Names of who asks, for OpenAI's own use
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # What this server can't do
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    metadata: Any = None
    modalities: Any = None
    moderation: Any = None
    prediction: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    reasoning_effort: Any = None
    service_tier: Any = None
    store: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    def check(self) -> None:
        """Raise `ApiError` for a field that can't be honoured."""
        for name in ("function_call", "functions"):
            refuse(getattr(self, name), name, "functions were replaced by tools and tool_choice")
        for name, why, *allowed in (
            ("audio", "this model reads and writes text only"),
            ("modalities", "this model reads and writes text only", ["text"]),
            ("metadata", "nothing is stored", {}),
            ("store", "nothing is stored", False),
            ("moderation", "there is no moderation"),
            ("prediction", "there are no predicted outputs"),
            ("prompt_cache_options", "what prompts begin with is kept by itself"),
            ("prompt_cache_retention", "what prompts begin with is kept by itself", "in_memory"),
            ("reasoning_effort", "this model does not reason before it answers", "none"),
            ("service_tier", "all requests are served alike", "auto", "default"),
            ("verbosity", "say it in the prompt", "medium"),
            ("web_search_options", "there is no search"),
        ):
            refuse(getattr(self, name), name, why, *allowed)
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise bad_request(
                "max_tokens and max_completion_tokens say the same thing; choose one.", "max_tokens"
            )
        check_stream(self.stream_options, self.stream)
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs: true.", "top_logprobs", "invalid_value")


# -- messages


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages for the chat template: instructions that come first are one system message.

    Raises:
        ApiError: for a message that can't be honoured.
    """
    found: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        if isinstance(message, SystemMessage | DeveloperMessage):
            _refuse_name(message, place)
            text = _text(message.content)
            if found and found[-1]["role"] == "system":
                found[-1]["content"] += f"\n\n{text}"
            elif found:
                raise bad_request(
                    f"{place} has instructions behind other messages; they have to come first.",
                    f"{place}.role",
                )
            else:
                found.append({"role": "system", "content": text})
        elif isinstance(message, UserMessage):
            _refuse_name(message, place)
            found.append({"role": "user", "content": _text(message.content)})
        elif isinstance(message, ToolMessage):
            found.append(
                {
                    "role": "tool",
                    "content": _text(message.content),
                    "tool_call_id": message.tool_call_id,
                }
            )
        else:
            found.append(_assistant(message, place))
    return found


def _refuse_name(message: SystemMessage | DeveloperMessage | UserMessage, place: str) -> None:
    if message.name is not None:
        unsupported(f"{place}.name", "the model is not shown the names of speakers")


def _text(content: str | list[Any]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)


def _assistant(message: AssistantMessage, place: str) -> dict[str, Any]:
    if message.name is not None:
        unsupported(f"{place}.name", "the model is not shown the names of speakers")
    refuse(message.audio, f"{place}.audio", "this model reads text only")
    refuse(message.function_call, f"{place}.function_call", "tool_calls took its place")
    refuse(message.annotations, f"{place}.annotations", "this model reads text only", [])
    content = _text(message.content if message.content is not None else message.refusal or "")
    found: dict[str, Any] = {"role": "assistant", "content": content}
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for call in message.tool_calls
        ]
    elif message.content is None and message.refusal is None:
        raise bad_request(f"{place} has neither content nor tool_calls.", f"{place}.content")
    return found


# -- tools


def tool_definitions(tools: Sequence[FunctionTool] | None) -> list[dict[str, Any]]:
    """Definitions for the chat template and for `tool_call_constraint`."""
    return [
        {"type": "function", "function": _without_nulls(msgspec.to_builtins(tool.function))}
        for tool in tools or ()
    ]


def _without_nulls(function: dict[str, Any]) -> dict[str, Any]:
    # Every call is one under the schema, asked for or not.
    return {n: value for n, value in function.items() if value is not None and n != "strict"}


def chosen_tools(
    choice: ToolChoice | None, tools: Sequence[FunctionTool] | None
) -> tuple[str, list[str] | None]:
    """The `tool_choice` and the `allowed_tools` of an `Ask`.

    Raises:
        ApiError: for a choice that names no tool.
    """
    names = [tool.function.name for tool in tools or ()]
    if not names:
        if choice is not None and choice != "none":
            raise bad_request("tool_choice needs tools.", "tool_choice")
        return "none", None
    if isinstance(choice, NamedChoice):
        _check_known([choice.function.name], names, "tool_choice.function.name")
        return "one", [choice.function.name]
    if isinstance(choice, AllowedChoice):
        allowed = [tool.function.name for tool in choice.allowed_tools.tools]
        _check_known(allowed, names, "tool_choice.allowed_tools.tools")
        return choice.allowed_tools.mode, allowed
    return choice or "auto", None


def _check_known(chosen: Sequence[str], names: Sequence[str], place: str) -> None:
    unknown = [name for name in chosen if name not in names]
    if unknown or not chosen:
        raise bad_request(
            f"{place} has {shown(unknown[0]) if unknown else 'no tool'}; the tools are {', '.join(names)}.",
            place,
        )
