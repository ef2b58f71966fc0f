"""`/v1/messages`: answers, and the tokens of prompts."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from afm_mlx.errors import shown
from afm_mlx.server.anthropic_messages.answer import Message, Ping, StreamEvent, Usage
from afm_mlx.server.anthropic_messages.ask import asked, prompt_fields
from afm_mlx.server.anthropic_messages.stream import MessageStream
from afm_mlx.server.bodies import read_body
from afm_mlx.server.errors import ApiError, bad_request
from afm_mlx.server.generation import Ask, answer
from afm_mlx.server.request_fields import MessageRequest, PromptRequest
from afm_mlx.server.served_model import ServedModel
from afm_mlx.server.sse import EventStream, event, json_response, while_connected
from afm_mlx.server.workers import in_thread

VERSIONS = ("2023-06-01", "2026-10-21")
"""Values of the header anthropic-version, which may be left out.

The newer one took temperature, top_p and top_k away, which this server honours under both.
"""


async def create_message(request: Request) -> Response:
    """Answer, whole or as a stream."""
    served: ServedModel = request.app.state.served
    _check_version(request)
    body = await read_body(request, MessageRequest)

    def prepared() -> Ask:
        ask = asked(served, body, request.state.client)
        assert ask.messages is not None
        # A stream tells the number of the prompt's tokens first.
        prompt = served.encode_chat(ask.messages, ask.tools, ask.response_format)
        return replace(ask, messages=None, prompt=prompt)

    # Large conversations and schemas take a while, and others must not wait for them.
    ask = await while_connected(request, in_thread(prepared, compiles=_has_format(body)))
    message = Message(
        id=f"msg_{uuid.uuid4().hex}", model=body.model, usage=Usage(len(ask.prompt or ()))
    )
    stream = MessageStream(message)
    if body.stream:
        return EventStream(_events(served, ask, stream), request, _failed, _written(Ping()))
    return json_response(await while_connected(request, _whole(served, ask, stream)))


async def count_tokens(request: Request) -> Response:
    """How many tokens a prompt would have."""
    served: ServedModel = request.app.state.served
    _check_version(request)
    body = await read_body(request, PromptRequest)
    served.adapter_of(body.model)

    def counted() -> int:
        fields = prompt_fields(body, folds=not served.options.strict)
        return len(
            served.encode_chat(fields["messages"], fields["tools"], fields.get("response_format"))
        )

    count = await while_connected(request, in_thread(counted, compiles=_has_format(body)))
    return json_response({"input_tokens": count})


ROUTES = [
    Route("/v1/messages", create_message, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
]


def _has_format(body: PromptRequest) -> bool:
    return body.output_config is not None or body.output_format is not None


def _check_version(request: Request) -> None:
    version = request.headers.get("anthropic-version")
    if version is not None and version not in VERSIONS:
        raise bad_request(
            f"anthropic-version is {shown(version)}; allowed is {', '.join(VERSIONS)}.",
            "anthropic-version",
        )


async def _told(
    served: ServedModel, ask: Ask, stream: MessageStream
) -> AsyncGenerator[StreamEvent, None]:
    """The events of an answer; the first ones wait until it is sure that there is one."""
    begun = False
    try:
        async with aclosing(answer(served, ask)) as parts:
            async for part in parts:
                for told in () if begun else stream.begin():
                    yield told
                begun = True
                for told in stream.take(part):
                    yield told
    except ApiError as error:
        if error.param == "prompt":
            error.param = "messages"
        raise


async def _whole(served: ServedModel, ask: Ask, stream: MessageStream) -> Message:
    async with aclosing(_told(served, ask, stream)) as events:
        async for _ in events:
            pass
    return stream.message


async def _events(
    served: ServedModel, ask: Ask, stream: MessageStream
) -> AsyncGenerator[bytes, None]:
    async with aclosing(_told(served, ask, stream)) as events:
        async for told in events:
            yield _written(told)


def _written(told: StreamEvent) -> bytes:
    return event(told, str(told.__struct_config__.tag))


def _failed(error: ApiError) -> bytes:
    """The last event of an answer that an error has ended."""
    return event(error.anthropic(), "error")
