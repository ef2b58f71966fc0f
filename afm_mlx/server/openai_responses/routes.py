"""`/v1/responses`: answers, and those of them that are kept."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec
from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.routing import Route

from afm_mlx.errors import TokenizerError, shown
from afm_mlx.server.bodies import read_body
from afm_mlx.server.conversation import Message
from afm_mlx.server.errors import ApiError, api_error, bad_request
from afm_mlx.server.generation import Ask, Usage, answer
from afm_mlx.server.openai_responses.answer import Response, StreamEvent
from afm_mlx.server.openai_responses.ask import asked, messages_of, prompt_fields
from afm_mlx.server.openai_responses.kept_responses import KeptResponse, KeptResponses
from afm_mlx.server.openai_responses.stream import (
    ResponseStream,
    answered_message,
    input_items,
    new_id,
)
from afm_mlx.server.request_fields import InputRequest, ReferenceItem, ResponseRequest
from afm_mlx.server.served_model import ServedModel
from afm_mlx.server.sse import EventStream, event, json_response, while_connected
from afm_mlx.server.workers import in_thread


async def create_response(request: Request) -> HttpResponse:
    """Answer, whole or as a stream."""
    served: ServedModel = request.app.state.served
    body = await read_body(request, ResponseRequest)
    client = request.state.client
    kept: KeptResponses = request.app.state.kept_responses
    if body.store and not kept.is_on:
        raise bad_request(
            "store is true, but this server keeps no responses: it was started with --kept-responses 0.",
            "store",
            "unsupported_parameter",
        )
    earlier = _earlier(body, kept, client)
    _resolve_references(body, kept, client)

    def prepared() -> _Answer:
        messages, lasting = messages_of(body, earlier, folds=not served.options.strict)
        ask = asked(served, body, messages, client)
        is_kept = kept.is_on and body.store is not False
        return _Answer(
            served, ask, _begun(served, body, is_kept), lasting, kept if is_kept else None
        )

    # Large conversations and schemas take a while, and others must not wait for them.
    compiles = body.text is not None and body.text.format is not None
    made = await while_connected(request, in_thread(prepared, compiles=compiles))
    if body.stream:
        return EventStream(made.events(), request, made.failed)
    return json_response(await while_connected(request, made.whole()))


async def count_input_tokens(request: Request) -> HttpResponse:
    """How many tokens a prompt would have."""
    served: ServedModel = request.app.state.served
    body = await read_body(request, InputRequest)
    served.adapter_of(body.model)
    kept: KeptResponses = request.app.state.kept_responses
    earlier = _earlier(body, kept, request.state.client)
    _resolve_references(body, kept, request.state.client)

    def counted() -> int:
        messages, _ = messages_of(body, earlier, folds=not served.options.strict)
        fields = prompt_fields(body, messages)
        return len(served.encode_chat(messages, fields["tools"], fields["response_format"]))

    try:
        count = await while_connected(request, in_thread(counted, compiles=body.text is not None))
    except (ApiError, TokenizerError) as error:
        raise _of_input(api_error(error, "input")) from error
    return json_response({"object": "response.input_tokens", "input_tokens": count})


async def retrieve_response(request: Request) -> HttpResponse:
    """A response that is kept."""
    for name, value in request.query_params.items():
        if name != "stream" or value != "false":
            raise bad_request(
                f"{name} can't be honoured: a kept response is given as a whole.", name
            )
    kept: KeptResponses = request.app.state.kept_responses
    found = kept.get(request.state.client, request.path_params["id"])
    if found is None:
        raise _not_kept(request.path_params["id"], 404, None)
    return HttpResponse(found.body, media_type="application/json")


async def delete_response(request: Request) -> HttpResponse:
    """Forget a response."""
    kept: KeptResponses = request.app.state.kept_responses
    id = request.path_params["id"]
    if not kept.remove(request.state.client, id):
        raise _not_kept(id, 404, None)
    return json_response({"id": id, "object": "response", "deleted": True})


ROUTES = [
    Route("/v1/responses", create_response, methods=["POST"]),
    Route("/v1/responses/input_tokens", count_input_tokens, methods=["POST"]),
    Route("/v1/responses/{id}", retrieve_response, methods=["GET"]),
    Route("/v1/responses/{id}", delete_response, methods=["DELETE"]),
]


def _earlier(body: InputRequest, kept: KeptResponses, client: str) -> Sequence[Message]:
    """The conversation that a request goes on from."""
    if body.previous_response_id is None:
        return ()
    found = kept.get(client, body.previous_response_id)
    if found is None:
        raise _not_kept(body.previous_response_id, 400, "previous_response_id")
    return found.messages


def _resolve_references(body: InputRequest, kept: KeptResponses, client: str) -> None:
    """Put items of kept responses into the places of the references to them."""
    for index, item in enumerate(body.input if isinstance(body.input, list) else ()):
        if isinstance(item, ReferenceItem):
            assert isinstance(body.input, list)
            found = kept.find_item(client, item.id)
            if found is None:
                place = f"input[{index}].id"
                raise bad_request(
                    f"{place} is {shown(item.id)}, an item of no response that is kept. The last responses of "
                    "each client are, until the server stops; send the item itself instead.",
                    place,
                    "item_not_found",
                )
            body.input[index] = found


def _not_kept(id: str, status: int, param: str | None) -> ApiError:
    return ApiError(
        status,
        f"There is no response {shown(id)}. The last ones of each client are kept, until the server stops; "
        "send the whole conversation as input instead.",
        param=param,
        code="previous_response_not_found" if param else "response_not_found",
    )


def _begun(served: ServedModel, body: ResponseRequest, is_kept: bool) -> Response:
    """The response to a body, as far as it is known before there is an answer."""
    options = served.options
    return Response(
        id=new_id("resp"),
        created_at=int(time.time()),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=body.model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        safety_identifier=body.safety_identifier,
        store=is_kept,
        temperature=options.temperature if body.temperature is None else body.temperature,
        text={"format": (body.text and body.text.format) or {"type": "text"}},
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=options.top_p if body.top_p is None else body.top_p,
        user=body.user,
    )


class _Answer:
    """One answer while it is made.

    Args:
        served, ask: what is asked of whom.
        response: what is filled.
        messages: the conversation so far, as a later request finds it.
        kept: where the response is kept; None for nowhere.
    """

    def __init__(
        self,
        served: ServedModel,
        ask: Ask,
        response: Response,
        messages: list[Message],
        kept: KeptResponses | None,
    ):
        self._served, self._ask, self._messages, self._kept = served, ask, messages, kept
        self._stream = ResponseStream(response)

    async def whole(self) -> Response:
        """The response, filled."""
        async with aclosing(self._told()) as told:
            async for _ in told:
                pass
        return self._stream.response

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events of a streamed answer."""
        async with aclosing(self._told()) as told:
            async for each in told:
                yield _written(each)

    async def _told(self) -> AsyncGenerator[StreamEvent, None]:
        """The events; the first ones wait until it is sure that there is an answer."""
        begun = False
        try:
            async with aclosing(answer(self._served, self._ask)) as parts:
                async for part in parts:
                    for told in () if begun else self._stream.begin():
                        yield told
                    begun = True
                    for told in self._stream.take(part):
                        if isinstance(part, Usage):
                            self._keep()
                        yield told
        except ApiError as error:
            raise _of_input(error) from error.__cause__

    def failed(self, error: ApiError) -> bytes:
        """The last event of an answer that an error has ended."""
        return b"".join(_written(told) for told in self._stream.fail(error))

    def _keep(self) -> None:
        response = self._stream.response
        if self._kept is not None:
            message = answered_message(response.output)
            body, items = msgspec.json.encode(response), input_items(response.output)
            kept = KeptResponse(body, [*self._messages, message], items)
            self._kept.keep(self._ask.client, response.id, kept)


def _written(told: StreamEvent) -> bytes:
    return event(told, str(told.__struct_config__.tag))


def _of_input(error: ApiError) -> ApiError:
    """The error with the name that the conversation has in this API."""
    if error.param == "messages":
        error.param = "input"
    return error
