"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from afm_mlx.server.admission import in_thread
from afm_mlx.server.answer_events import (
    Ended,
    TextDelta,
    ThoughtDelta,
    TokenCounts,
    ToolCallBegins,
    ToolCallDelta,
    answer_events,
)
from afm_mlx.server.bodies import read_body
from afm_mlx.server.chat_inputs import (
    ConversationBuilder,
    Message,
    OfferedTools,
    Tool,
    check_format_fits,
    function_tool,
    offered_tools,
)
from afm_mlx.server.generation_request import GenerationRequest
from afm_mlx.server.images import RequestImages
from afm_mlx.server.model_registry import ModelLease, ModelRegistry
from afm_mlx.server.openai_fields import (
    PROMPT_NOT_STREAMED,
    WholeChoice,
    chat_logprobs,
    check_count,
    format_of,
    head,
    limit,
    prompt_logprobs,
    sampled_request,
    text_of,
    thought_of,
    timings,
    tool_call,
    usage,
)
from afm_mlx.server.replies import (
    EventStream,
    JsonObject,
    bad_request,
    event,
    json_response,
    while_connected,
)
from afm_mlx.server.request_fields import openai_chats as fields
from afm_mlx.server.server_options import ServerOptions
from afm_mlx.server.thinking import thinking_of


async def chat_completions(request: Request) -> Response:
    """Answer a chat, whole or as a stream."""
    models: ModelRegistry = request.app.state.models
    body = await read_body(request, fields.ChatRequest)
    lease = models.lease(request, body.model)
    made = await while_connected(request, _generation_request(body, lease, models.options))
    if body.stream:
        with_usage = bool(body.stream_options and body.stream_options.include_usage)
        return EventStream(_chunks(lease, made, body.model, with_usage), request)
    return json_response(await while_connected(request, _completion(lease, made, body.model)))


# -- from a body to a request


async def _generation_request(
    body: fields.ChatRequest, lease: ModelLease, options: ServerOptions
) -> GenerationRequest:
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: true.", "top_logprobs", "invalid_value")
    if body.prompt_logprobs is not None and body.stream:
        raise bad_request(PROMPT_NOT_STREAMED, "prompt_logprobs", "unsupported_parameter")
    images = lease.images()
    messages = await in_thread(
        lambda: chat_messages(body.messages, images, folds=not options.strict)
    )
    tools = _tools(body)
    format = await format_of(body, body.response_format)
    check_format_fits(format, messages, f"messages[{len(body.messages) - 1}]")
    older = limit("max_tokens", body.max_tokens)
    newer = limit("max_completion_tokens", body.max_completion_tokens)
    if None not in (older, newer) and older != newer:
        raise bad_request(
            "max_tokens and max_completion_tokens say the same thing, and differ; choose one.",
            "max_tokens",
        )
    return sampled_request(
        body,
        messages=messages,
        images=images.chat,
        tools=tools,
        format=format,
        thinking=thinking_of(body, body.reasoning_effort, "reasoning_effort"),
        adapter=lease.adapter,
        max_tokens=older if newer is None else newer,
        n=check_count(body.n, options),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        client=lease.client,
    )


def chat_messages(
    messages: Sequence[fields.ChatMessage], images: RequestImages, folds: bool
) -> list[Message]:
    """Convert messages for the chat template; raise a 400 for those that can't be honoured.

    Images are read, and marked. `folds` is True to accept late instructions, see `ConversationBuilder`.
    """
    conversation = ConversationBuilder(folds=folds)
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        if isinstance(message, fields.AssistantMessage):
            content = message.content if message.content is not None else message.refusal or ""
            thought = message.reasoning_content or message.reasoning or thought_of(content)
            conversation.add_answer(text_of(content), place, thought)
            for number, call in enumerate(message.tool_calls or ()):
                where = f"{place}.tool_calls[{number}]"
                name, arguments = call.function.name, call.function.arguments
                conversation.add_call(
                    call.id, name, arguments, f"{where}.id", f"{where}.function.arguments"
                )
        elif isinstance(message, fields.ToolMessage):
            text = text_of(message.content, f"{place}.content", images)
            conversation.add_result(message.tool_call_id, text, f"{place}.tool_call_id")
        elif isinstance(message, fields.UserMessage):
            conversation.add_user(text_of(message.content, f"{place}.content", images), place)
        else:
            conversation.add_system(text_of(message.content), place)
    return conversation.finished("messages")


def chat_tools(tools: Sequence[fields.ChatFunctionTool] | None) -> list[Tool]:
    """Convert tool definitions for the chat template."""
    functions = (tool.function for tool in tools or ())
    return [function_tool(each.name, each.description, each.parameters) for each in functions]


def _tools(body: fields.ChatRequest) -> OfferedTools:
    tools, choice = chat_tools(body.tools), body.tool_choice
    parallel = body.parallel_tool_calls is not False
    if isinstance(choice, fields.ChosenFunction):
        return offered_tools(tools, "one", parallel=parallel, allowed=[choice.function.name])
    if isinstance(choice, fields.ChatAllowedTools):
        allowed = [tool.function.name for tool in choice.allowed_tools.tools]
        mode = choice.allowed_tools.mode
        return offered_tools(tools, mode, parallel=parallel, allowed=allowed)
    return offered_tools(tools, choice or "auto", parallel=parallel)


# -- responses


async def _completion(lease: ModelLease, request: GenerationRequest, model: str) -> JsonObject:
    choices = [WholeChoice() for _ in range(request.n)]
    counts: JsonObject = {}
    async with aclosing(answer_events(lease, request)) as parts:
        async for part in parts:
            if isinstance(part, TokenCounts):
                counts = usage(part)
            else:
                choices[part.index].take(part)
    written: list[JsonObject] = []
    for choice in choices:
        content = choice.text if choice.text.strip() or not choice.calls else None
        message: JsonObject = {"role": "assistant", "content": content, "refusal": None}
        if choice.thought:
            message["reasoning_content"] = choice.thought
        if choice.calls:
            message["tool_calls"] = choice.calls
        logprobs = None if request.logprobs is None else chat_logprobs(choice.logprobs)
        reply = {"index": len(written), "message": message, "logprobs": logprobs}
        written.append({**reply, "finish_reason": choice.reason})
    whole = {**head("chat.completion", "chatcmpl", model), "choices": written, "usage": counts}
    scored, top = choices[0].prompt, request.prompt_logprobs
    if scored is not None and top is not None:
        texts = lease.served.token_texts
        whole["prompt_logprobs"] = await in_thread(
            lambda: prompt_logprobs(scored, top, texts), is_admitted=True
        )
    return whole


async def _chunks(
    lease: ModelLease, request: GenerationRequest, model: str, with_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Yield the encoded events of a stream; `with_usage` adds one with the numbers of tokens at the end."""
    start = head("chat.completion.chunk", "chatcmpl", model) | (
        {"usage": None} if with_usage else {}
    )

    def chunk(index: int, delta: JsonObject, reason: str | None = None, **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason, **more}
        return event({**start, "choices": [choice]})

    begun: set[int] = set()
    async with aclosing(answer_events(lease, request)) as parts:
        async for part in parts:
            if isinstance(part, TokenCounts):
                if with_usage:
                    last = {**start, "choices": [], "usage": usage(part)}
                    yield event({**last, "timings": timings(part)})
                continue
            if part.index not in begun:
                begun.add(part.index)
                yield chunk(part.index, {"role": "assistant", "content": "", "refusal": None})
            match part:
                case TextDelta(index, text, logprobs):
                    more: JsonObject = {"logprobs": chat_logprobs(logprobs)} if logprobs else {}
                    yield chunk(index, {"content": text}, **more)
                case ThoughtDelta(index, text):
                    yield chunk(index, {"reasoning_content": text})
                case ToolCallBegins(index, call):
                    yield chunk(index, {"tool_calls": [{"index": call, **tool_call(part)}]})
                case ToolCallDelta(index, call, arguments):
                    delta = {"index": call, "function": {"arguments": arguments}}
                    yield chunk(index, {"tool_calls": [delta]})
                case Ended(index, reason):
                    yield chunk(index, {}, reason)
    yield event("[DONE]")
