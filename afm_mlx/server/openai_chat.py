"""`/v1/chat/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from afm_mlx.server.bodies import read_body
from afm_mlx.server.chat_messages import chat_messages, chat_tool_fields
from afm_mlx.server.errors import bad_request
from afm_mlx.server.generation import (
    Ask,
    Ended,
    TextDelta,
    ToolCallBegins,
    ToolCallDelta,
    Usage,
    answer,
)
from afm_mlx.server.openai_fields import (
    chat_logprobs,
    check_count,
    constraint_of,
    guided,
    limit,
    sampling_of,
    timings,
    usage,
)
from afm_mlx.server.request_fields import ChatRequest
from afm_mlx.server.served_model import ServedModel
from afm_mlx.server.sse import EventStream, event, json_response, while_connected
from afm_mlx.server.token_texts import TokenLogprob
from afm_mlx.server.workers import in_thread


async def chat_completions(request: Request) -> Response:
    """Answer a chat."""
    served: ServedModel = request.app.state.served
    body = await read_body(request, ChatRequest)
    ask = await while_connected(request, ask_of(body, served, request.state.client))
    if body.stream:
        with_usage = bool(body.stream_options and body.stream_options.include_usage)
        return EventStream(_chunks(served, ask, body.model, with_usage), request)
    return json_response(await while_connected(request, _completion(served, ask, body.model)))


async def ask_of(body: ChatRequest, served: ServedModel, client: str) -> Ask:
    """What a body asks for.

    Raises:
        ApiError: for what can't be honoured.
    """
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: true.", "top_logprobs", "invalid_value")
    adapter = served.adapter_of(body.model)
    messages = await in_thread(
        lambda: chat_messages(body.messages, folds=not served.options.strict)
    )
    parallel = body.parallel_tool_calls is not False
    tools = chat_tool_fields(body.tools, body.tool_choice, parallel)
    structured, name = guided(body)
    constraint, shown_format = await constraint_of(body.response_format, structured, name)
    if constraint is not None and messages[-1]["role"] == "assistant":
        raise bad_request(
            "An answer that the messages begin already can't be held to a format, which is said of whole "
            "answers. Leave the last message out, or the format.",
            f"messages[{len(body.messages) - 1}]",
        )
    return Ask(
        messages=messages,
        **tools,
        answer=constraint,
        response_format=shown_format,
        adapter=adapter,
        max_tokens=_limit(body),
        **sampling_of(body),
        n=check_count(body.n, served),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        client=client,
    )


def _limit(body: ChatRequest) -> int | None:
    older = limit("max_tokens", body.max_tokens)
    given = limit("max_completion_tokens", body.max_completion_tokens)
    if None not in (older, given) and older != given:
        raise bad_request(
            "max_tokens and max_completion_tokens say the same thing, and differ; choose one.",
            "max_tokens",
        )
    return older if given is None else given


def _head(kind: str, model: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


class _Choice:
    """A choice while it comes."""

    def __init__(self) -> None:
        self.text = ""
        self.calls: list[dict[str, Any]] = []
        self.logprobs: list[TokenLogprob] = []
        self.reason = ""

    def take(self, part: TextDelta | ToolCallBegins | ToolCallDelta | Ended) -> None:
        match part:
            case TextDelta():
                self.text += part.text
                self.logprobs += part.logprobs
            case ToolCallBegins():
                self.calls.append(_call(part))
            case ToolCallDelta():
                self.calls[part.call]["function"]["arguments"] += part.arguments
            case Ended():
                self.reason = part.reason

    def message(self) -> dict[str, Any]:
        has_text = bool(self.text.strip()) or not self.calls
        message: dict[str, Any] = {
            "role": "assistant",
            "content": self.text if has_text else None,
            "refusal": None,
        }
        return {**message, "tool_calls": self.calls} if self.calls else message


def _call(part: ToolCallBegins) -> dict[str, Any]:
    return {
        "id": part.id,
        "type": "function",
        "function": {"name": part.name, "arguments": ""},
    }


async def _completion(served: ServedModel, ask: Ask, model: str) -> dict[str, Any]:
    """A whole answer."""
    choices = [_Choice() for _ in range(ask.n)]
    counts: dict[str, Any] = {}
    async with aclosing(answer(served, ask)) as parts:
        async for part in parts:
            if isinstance(part, Usage):
                counts = usage(part)
            else:
                choices[part.index].take(part)
    return {
        **_head("chat.completion", model),
        "choices": [
            {
                "index": index,
                "message": choice.message(),
                "logprobs": None if ask.logprobs is None else chat_logprobs(choice.logprobs),
                "finish_reason": choice.reason,
            }
            for index, choice in enumerate(choices)
        ],
        "usage": counts,
    }


async def _chunks(
    served: ServedModel, ask: Ask, model: str, with_usage: bool
) -> AsyncGenerator[bytes, None]:
    """The events of a streamed answer."""
    head = _head("chat.completion.chunk", model)
    if with_usage:
        head["usage"] = None

    def chunk(index: int, delta: dict[str, Any], reason: str | None = None, **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason, **more}
        return event({**head, "choices": [choice]})

    begun: set[int] = set()
    async with aclosing(answer(served, ask)) as parts:
        async for part in parts:
            if isinstance(part, Usage):
                if with_usage:
                    last = {**head, "choices": [], "usage": usage(part)}
                    yield event({**last, "timings": timings(part)})
                continue
            if part.index not in begun:
                begun.add(part.index)
                yield chunk(part.index, {"role": "assistant", "content": "", "refusal": None})
            match part:
                case TextDelta(index, text, logprobs):
                    more: dict[str, Any] = {"logprobs": chat_logprobs(logprobs)} if logprobs else {}
                    yield chunk(index, {"content": text}, **more)
                case ToolCallBegins(index, call):
                    yield chunk(index, {"tool_calls": [{"index": call, **_call(part)}]})
                case ToolCallDelta(index, call, arguments):
                    delta = {"index": call, "function": {"arguments": arguments}}
                    yield chunk(index, {"tool_calls": [delta]})
                case Ended(index, reason):
                    yield chunk(index, {}, reason)
    yield event("[DONE]")
