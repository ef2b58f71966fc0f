"""Checks chat messages, and converts them to the one form that templates read.

Messages of the training toolkit and of the OpenAI API are accepted: `content` is a string, null (with tool
calls) or a list of text parts; tool call arguments are a JSON string or an object. The caller's messages are
never changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from afm_mlx.errors import TokenizerError, shown
from afm_mlx.tokenizer.chat_images import ChatImage, ChatImages

Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool", "function")
_CALL_START, _CALL_END = "```function", "```"


def checked_messages(
    messages: Sequence[Mapping[str, object]], images: ChatImages | None = None
) -> list[Message]:
    """Check messages, and return copies in the form that templates read.

    With `images`, a part of `content` may also be `{"type": "image", "image": ...}` with an image that is
    fitted to the model (`vision.prompt_image.PromptImage`); its mark in `images` takes its place.

    Returns:
        Dicts with `role`, `content` and, if given, `tool_calls`, `response_format`, `tools`. `content` is a
        string; a tool's may also be a dict (its result) or a list of dicts (new tools). Arguments of tool calls
        are decoded JSON; a string that isn't JSON stays a string, as in tamm.

    Raises:
        TokenizerError: names the message's index, what it has, and what is allowed.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise TokenizerError(
            f"messages must be a list of {{'role', 'content'}} dicts, got {type(messages).__name__}."
        )
    if not messages:
        raise TokenizerError("messages is empty: give at least one {'role', 'content'} dict.")
    checked = [_checked_message(index, message, images) for index, message in enumerate(messages)]
    late = [i for i, message in enumerate(checked) if message["role"] == "system"]
    if late and late[0] != 0:
        raise TokenizerError(
            f"messages[{late[0]}] has the role 'system', but only the first message may start the "
            "system role. Move it to the front."
        )
    return checked


def _checked_message(
    index: int, message: Mapping[str, object], images: ChatImages | None
) -> Message:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise TokenizerError(
            f"{where} must be a dict with 'role' and 'content', got {type(message).__name__}."
        )
    role = message.get("role")
    if role not in ROLES:
        raise TokenizerError(f"{where} has the role {shown(role)}; allowed are {', '.join(ROLES)}.")
    checked: Message = {"role": role}
    calls = message.get("tool_calls")
    if calls:  # in the OpenAI API, null and an empty list both mean none
        checked["tool_calls"] = _checked_calls(where, calls)
    content = message.get("content")
    if content is None and calls:
        content = ""
    checked["content"] = _checked_content(where, role, content, images)
    response_format = message.get("response_format")
    given = response_format if isinstance(response_format, Mapping) else {}
    # In the OpenAI API, the type "text" means no format.
    if response_format is not None and given.get("type") != "text":
        schema = given.get("json_schema") if given.get("type") == "json_schema" else None
        if not isinstance(schema, Mapping) or "schema" not in schema:
            raise TokenizerError(
                f"{where}['response_format'] must be {{'type': 'json_schema', 'json_schema': "
                f"{{'name', 'schema'}}}}, got {shown(response_format)}."
            )
        checked["response_format"] = {"type": "json_schema", "json_schema": dict(schema)}
    if role == "system" and message.get("tools"):
        checked["tools"] = checked_tools(message["tools"], f"{where}['tools']")
    return checked


def _checked_content(where: str, role: str, content: object, images: ChatImages | None) -> object:
    if isinstance(content, str):
        return content
    is_tool = role in ("tool", "function")
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        parts = list(content) if images is None else [_with_mark(part, images) for part in content]
        other = next((i for i, part in enumerate(parts) if not _is_text_part(part)), None)
        if is_tool and (other is not None or not parts):
            return checked_tools(parts, f"{where}['content']")
        if other is None:
            return "".join(part["text"] for part in parts)
        part = parts[other]
        got = shown(part.get("type")) if isinstance(part, Mapping) else type(part).__name__
        forms = "{'type': 'text', 'text': a string}"
        reads = "this model reads text only"
        if images is not None:
            forms += " and {'type': 'image', 'image': a PromptImage}"
            reads = "allowed are"
        raise TokenizerError(f"{where}['content'][{other}] has the type {got}; {reads}: {forms}.")
    if is_tool and isinstance(content, Mapping):
        return dict(content)
    allowed = "a string or a list of text parts"
    if is_tool:
        allowed += ", a dict (the tool's result) or a list of dicts (new tools)"
    if role == "assistant":
        allowed += ", or null together with tool_calls"
    got = "nothing" if content is None else type(content).__name__
    raise TokenizerError(f"{where} ({role}) has {got} as 'content'; allowed is {allowed}.")


def _with_mark(part: Any, images: ChatImages) -> Any:
    """Return an image part as a text part with its mark; other parts stay."""
    is_image = isinstance(part, Mapping) and part.get("type") == "image"
    if is_image and isinstance(image := part.get("image"), ChatImage):
        return {"type": "text", "text": images.mark(image)}
    return part


def _is_text_part(part: Any) -> bool:
    is_text = isinstance(part, Mapping) and part.get("type") == "text"
    return is_text and isinstance(part.get("text"), str)


def _checked_calls(where: str, calls: object) -> list[Message]:
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise TokenizerError(
            f"{where}['tool_calls'] must be a list of "
            f"{{'function': {{'name', 'arguments'}}}} dicts, got {type(calls).__name__}."
        )
    checked = []
    for index, call in enumerate(calls):
        # Data sets of mlx-lm also have calls without the enclosing "function".
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise TokenizerError(
                f"{where}['tool_calls'][{index}] must be {{'function': {{'name': a string, "
                f"'arguments': JSON}}}}, got {shown(call)}."
            )
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with suppress(ValueError, RecursionError):
                arguments = json.loads(arguments)
        arguments = {} if function.get("arguments") is None else arguments
        checked.append({"function": {"name": function["name"], "arguments": arguments}})
    return checked


def checked_tools(tools: object, where: str = "tools") -> list[Message]:
    """Check tool definitions, and return copies; raise `TokenizerError` unless `tools` is a list of dicts.

    `where` names the list in errors.
    """
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise TokenizerError(
            f"{where} must be a list of tool definitions (dicts), got {type(tools).__name__}."
        )
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise TokenizerError(
                f"{where}[{index}] must be a tool definition such as {{'type': 'function', "
                f"'function': {{'name', ...}}}}, got {type(tool).__name__}."
            )
    return [dict(tool) for tool in tools]


def parse_tool_calls(text: str, tools: object = None) -> list[Message]:
    """Parse the text between `<executable_start>` and `<executable_end>`: JSON, in a fence of backticks or not.

    `tools` is ignored; mlx-lm passes tool definitions to its parsers.

    Returns:
        `[{"name": ..., "arguments": ...}]`, as mlx-lm's tool parsers do.

    Raises:
        TokenizerError: if the text is neither a JSON list of calls nor one call: it was cut off, for example.
    """
    body = text.strip().removeprefix(_CALL_START).removesuffix(_CALL_END)
    try:
        calls = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(
            f"The model's tool call is not JSON ({error}): {shown(text)}."
        ) from None
    calls = calls if isinstance(calls, list) else [calls]
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise TokenizerError(
                f"The model's tool call has no name: {shown(call)}, in {shown(text)}."
            )
    return [{"name": call["name"], "arguments": call.get("arguments", {})} for call in calls]
