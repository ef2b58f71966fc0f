"""`/v1/responses`: OpenAI's newer API, whose responses can be kept and continued."""

from __future__ import annotations

import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from afm_mlx.errors import TokenizerError, shown
from afm_mlx.server.admission import in_thread
from afm_mlx.server.answer_events import (
    Ended,
    Event,
    TextDelta,
    ThoughtDelta,
    TokenCounts,
    ToolCallBegins,
    ToolCallDelta,
    encoded_events,
)
from afm_mlx.server.bodies import read_body
from afm_mlx.server.chat_inputs import (
    FREE_TEXT,
    AnswerFormat,
    ConversationBuilder,
    Message,
    OfferedTools,
    check_format_fits,
    function_tool,
    json_object_format,
    offered_tools,
    schema_format,
)
from afm_mlx.server.generation_request import GenerationRequest
from afm_mlx.server.images import RequestImages
from afm_mlx.server.model_registry import ModelLease, ModelRegistry
from afm_mlx.server.openai_fields import limit, text_of
from afm_mlx.server.replies import (
    ApiError,
    EventStream,
    JsonObject,
    api_error,
    bad_request,
    drain,
    json_response,
    named_event,
    while_connected,
)
from afm_mlx.server.request_fields import openai_chats, openai_responses
from afm_mlx.server.served_model import TokenLikelihood
from afm_mlx.server.server_options import ServerOptions
from afm_mlx.server.thinking import Thinking, thinking_of
from afm_mlx.vision.prompt_image import PromptImage

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


# -- kept responses


@dataclass(frozen=True)
class KeptResponse:
    """A response that later requests can read and continue."""

    body: bytes
    messages: Sequence[Message]  # with the answer, without the request's instructions
    images: RequestImages  # that the messages' marks stand for
    items: Mapping[str, openai_responses.InputItem] = field(
        default_factory=dict
    )  # as of requests, by id


class KeptResponses:
    """The most recently used responses of each client, in memory.

    Args:
        per_client: maximum number of responses of one client; 0 keeps none.
        max_bytes: maximum bytes of all responses and their conversations as JSON, and of their fitted images,
            each counted once.
    """

    def __init__(self, per_client: int, max_bytes: int):
        self._per_client, self._max_bytes = per_client, max_bytes
        self._kept: OrderedDict[tuple[str, str], tuple[KeptResponse, int]] = OrderedDict()
        self._holders: Counter[PromptImage] = Counter()  # numbers of responses that have an image
        self._response_of_item: dict[tuple[str, str], str] = {}
        self._bytes = 0

    @property
    def is_on(self) -> bool:
        """True if responses are kept."""
        return self._per_client > 0

    def keep(self, client: str, id: str, kept: KeptResponse) -> None:
        """Keep a response of a client; the least recently used ones over the limits are dropped."""
        size = len(kept.body) + len(msgspec.json.encode(kept.messages))
        self._kept[client, id] = kept, size
        self._response_of_item |= {(client, item): id for item in kept.items}
        self._bytes += size
        for image in kept.images.images:
            self._bytes += 0 if self._holders[image] else image.tiles.nbytes
            self._holders[image] += 1
        own = [key for key in self._kept if key[0] == client]
        for key in own[: max(0, len(own) - self._per_client)]:
            self._drop(key)
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))

    def get(self, client: str, id: str) -> KeptResponse | None:
        """Return a response of this client, or None if it is not kept."""
        if (client, id) not in self._kept:
            return None
        self._kept.move_to_end((client, id))
        return self._kept[client, id][0]

    def find_item(self, client: str, id: str) -> openai_responses.InputItem | None:
        """Return the item `id` of this client's kept responses, or None if no response has it."""
        found = self.get(client, self._response_of_item.get((client, id), ""))
        return None if found is None else found.items[id]

    def remove(self, client: str, id: str) -> bool:
        """Drop a response of this client; return True if it was kept."""
        if (client, id) not in self._kept:
            return False
        self._drop((client, id))
        return True

    def _drop(self, key: tuple[str, str]) -> None:
        kept, size = self._kept.pop(key)
        self._bytes -= size
        for image in kept.images.images:
            self._holders[image] -= 1
            if not self._holders[image]:
                del self._holders[image]
                self._bytes -= image.tiles.nbytes
        for item in kept.items:
            self._response_of_item.pop((key[0], item), None)


def _not_kept(id: str, status: int, param: str | None) -> ApiError:
    return ApiError(
        status,
        f"There is no response {shown(id)}. The last ones of each client are kept, until the server stops; "
        "send the whole conversation as input instead.",
        param=param,
        code="previous_response_not_found" if param else "response_not_found",
    )


# -- routes


async def create_response(request: Request) -> Response:
    """Answer a request, whole or as a stream."""
    models: ModelRegistry = request.app.state.models
    options = models.options
    body = await read_body(request, openai_responses.ResponseRequest)
    client = request.state.client
    kept: KeptResponses = request.app.state.kept_responses
    if body.store and not kept.is_on:
        raise bad_request(
            "store is true, but this server keeps no responses: it was started with --kept-responses 0.",
            "store",
            "unsupported_parameter",
        )
    earlier = _kept_inputs(body, kept, client)
    lease = models.lease(request, body.model)

    is_kept = kept.is_on and body.store is not False

    def prepared() -> tuple[GenerationRequest, ResponseBuilder]:
        images = lease.images()
        prompt = _prompt(body, earlier, images, folds=not options.strict)
        made = _generation_request(lease, body, prompt)

        def keep(response: JsonObject) -> None:
            output = response["output"]
            messages = [*prompt.kept, _answer_message(output)]
            encoded = msgspec.json.encode(response)
            items = _input_items(output)
            kept.keep(client, response["id"], KeptResponse(encoded, messages, images, items))

        response = _new_response(body, options, is_kept)
        return made, ResponseBuilder(response, keep if is_kept else lambda _: None)

    # In a thread, because large conversations and schemas take a while.
    compiles = body.text is not None and body.text.format is not None
    made, built = await while_connected(request, in_thread(prepared, compiles=compiles))
    events = encoded_events(lease, made, built)
    if body.stream:
        return EventStream(events, request, built.failed)
    await while_connected(request, drain(events))
    return json_response(built.response)


async def count_input_tokens(request: Request) -> Response:
    """Count the tokens of a prompt."""
    models: ModelRegistry = request.app.state.models
    body = await read_body(request, openai_responses.InputRequest)
    lease = models.lease(request, body.model)
    kept: KeptResponses = request.app.state.kept_responses
    earlier = _kept_inputs(body, kept, request.state.client)

    def counted() -> int:
        images = lease.images()
        prompt = _prompt(body, earlier, images, folds=not models.options.strict)
        inputs = prompt.messages, prompt.tools, prompt.format, _thinking(body), images.chat
        return len(lease.served.encode_chat(*inputs))

    try:
        count = await while_connected(request, lease.run(counted, compiles=body.text is not None))
    except (ApiError, TokenizerError) as error:
        reported = api_error(error, "input")
        if reported.param == "messages":
            reported.param = "input"
        raise reported from error
    return json_response({"object": "response.input_tokens", "input_tokens": count})


async def retrieve_response(request: Request) -> Response:
    """Return a kept response."""
    for name, value in request.query_params.items():
        if name != "stream" or value != "false":
            raise bad_request(
                f"{name} can't be honoured: a kept response is returned as a whole.", name
            )
    kept: KeptResponses = request.app.state.kept_responses
    found = kept.get(request.state.client, request.path_params["id"])
    if found is None:
        raise _not_kept(request.path_params["id"], 404, None)
    return Response(found.body, media_type="application/json")


async def delete_response(request: Request) -> Response:
    """Drop a kept response."""
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


def _kept_inputs(
    body: openai_responses.InputRequest, kept: KeptResponses, client: str
) -> KeptResponse | None:
    """Return the response that a request continues; replace its references to kept items, in place."""
    earlier: KeptResponse | None = None
    if body.previous_response_id is not None:
        earlier = kept.get(client, body.previous_response_id)
        if earlier is None:
            raise _not_kept(body.previous_response_id, 400, "previous_response_id")
    for index, item in enumerate(body.input if isinstance(body.input, list) else ()):
        if isinstance(item, openai_responses.ReferenceItem):
            referenced = kept.find_item(client, item.id)
            if referenced is None:
                place = f"input[{index}].id"
                raise bad_request(
                    f"{place} is {shown(item.id)}, which is no item of a kept response. The last responses of "
                    "each client are kept, until the server stops; send the item itself instead.",
                    place,
                    "item_not_found",
                )
            body.input[index] = referenced  # type: ignore[index]
    return earlier


# -- from a body to a request


@dataclass(frozen=True)
class _Prompt:
    """The inputs of a prompt; `kept` has the messages for later requests, without `instructions`."""

    messages: list[Message]
    kept: list[Message]
    images: RequestImages
    tools: OfferedTools
    format: AnswerFormat


def _prompt(
    body: openai_responses.InputRequest,
    earlier: KeptResponse | None,
    images: RequestImages,
    folds: bool,
) -> _Prompt:
    """Read the conversation (`earlier` and the body's input), the tools and the answer format of a body.

    Images are read, and marked. `folds` is `ConversationBuilder`'s. What can't be honoured raises a 400.
    """
    if body.input is None or body.input == []:
        raise bad_request(
            "input is missing; a text or items are needed.", "input", "missing_required_parameter"
        )
    before = () if earlier is None else images.carried(earlier.messages, earlier.images)
    conversation = ConversationBuilder(before, folds)
    if isinstance(body.input, str):
        conversation.add_user(body.input, "input")
    thought = ""  # before the next message or call
    for index, item in enumerate(body.input if isinstance(body.input, list) else ()):
        place = f"input[{index}]"
        assert not isinstance(item, openai_responses.ReferenceItem)
        if isinstance(item, openai_responses.ReasoningItem):
            thought += "".join(part.text for part in item.content or ())
            continue
        if isinstance(item, openai_responses.CallItem):
            if thought:
                conversation.add_thought(thought, place)
            conversation.add_call(
                item.call_id, item.name, item.arguments, f"{place}.call_id", f"{place}.arguments"
            )
        elif isinstance(item, openai_responses.ResultItem):
            output = text_of(item.output, f"{place}.output", images)
            conversation.add_result(item.call_id, output, f"{place}.call_id")
        elif item.role == "user":
            conversation.add_user(text_of(item.content, f"{place}.content", images), place)
        elif item.role == "assistant":
            conversation.add_answer(text_of(item.content, f"{place}.content"), place, thought)
        else:
            conversation.add_system(text_of(item.content, f"{place}.content"), place)
        thought = ""
    messages = kept = conversation.finished("input")
    if body.instructions is not None:
        messages = conversation.finished("input", body.instructions)
    given, format = body.text and body.text.format, FREE_TEXT
    if isinstance(given, openai_chats.JsonObjectFormat):
        format = json_object_format()
    elif isinstance(given, openai_responses.ResponseSchemaFormat):
        format = schema_format(given.schema, "text.format.schema", given.name, given.description)
    check_format_fits(format, messages, "input")
    return _Prompt(messages, kept, images, _tools(body), format)


def _thinking(body: openai_responses.InputRequest) -> Thinking:
    effort = None if body.reasoning is None else body.reasoning.effort
    return thinking_of(body, effort, "reasoning.effort")


def _tools(body: openai_responses.InputRequest) -> OfferedTools:
    tools = [function_tool(t.name, t.description, t.parameters) for t in body.tools or ()]
    parallel = body.parallel_tool_calls is not False
    choice = body.tool_choice
    if isinstance(choice, openai_responses.ChosenTool):
        return offered_tools(tools, "one", parallel=parallel, allowed=[choice.name])
    if isinstance(choice, openai_responses.ResponseAllowedTools):
        allowed = [tool.name for tool in choice.tools]
        return offered_tools(tools, choice.mode, parallel=parallel, allowed=allowed)
    return offered_tools(tools, choice or "auto", parallel=parallel)


def _generation_request(
    lease: ModelLease, body: openai_responses.ResponseRequest, prompt: _Prompt
) -> GenerationRequest:
    for name in body.include or ():
        if name not in INCLUDABLE:
            raise bad_request(
                f"include has {shown(name)}; allowed are {', '.join(INCLUDABLE)}.", "include"
            )
    with_logprobs = LOGPROBS in (body.include or ())
    if body.top_logprobs and not with_logprobs:
        raise bad_request(
            f"top_logprobs is {body.top_logprobs}, but log-probabilities are not requested. Put "
            f"{LOGPROBS!r} into include.",
            "top_logprobs",
        )
    return GenerationRequest(
        messages=prompt.messages,
        images=prompt.images.chat,
        tools=prompt.tools,
        format=prompt.format,
        thinking=_thinking(body),
        adapter=lease.adapter,
        max_tokens=limit("max_output_tokens", body.max_output_tokens),
        temperature=body.temperature,
        top_p=body.top_p,
        logprobs=(body.top_logprobs or 0) if with_logprobs else None,
        client=lease.client,
    )


# -- the response


def _new_response(
    body: openai_responses.ResponseRequest, options: ServerOptions, is_kept: bool
) -> JsonObject:
    """Make the response (kept if `is_kept`) as it is before the answer; much of it repeats the request."""
    return {
        "id": _new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": body.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": is_kept,
        "temperature": options.temperature if body.temperature is None else body.temperature,
        "text": {"format": (body.text and body.text.format) or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": options.top_p if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


class ResponseBuilder:
    """Fills `response`, the result of `_new_response`, and calls `keep` with it: an `EventBuilder`."""

    prompt_field = "input"

    def __init__(self, response: JsonObject, keep: Callable[[JsonObject], None]):
        self.response = response
        self._keep = keep
        self._count = 0
        self._open: JsonObject | None = None
        self._texts: list[str] = []  # of the open item, joined at its end
        self._space, self._space_logprobs = "", list[JsonObject]()
        self._is_cut = self._has_ended = False

    def begin(self) -> Iterator[JsonObject]:
        yield self._response_event("created")
        yield self._response_event("in_progress")

    def take(self, event: Event) -> Iterator[JsonObject]:
        match event:
            case TextDelta():
                yield from self._more_text(event.text, [_logprob(each) for each in event.logprobs])
            case ThoughtDelta():
                yield from self._more_thought(event.text)
            case ToolCallBegins():
                yield from self._close("completed")
                call = {"call_id": event.id, "name": event.name, "arguments": ""}
                yield from self._begin("function_call", "fc", **call)
            case ToolCallDelta():
                self._texts.append(event.arguments)
                yield self._item_event("function_call_arguments.delta", delta=event.arguments)
            case Ended():
                self._is_cut, self._has_ended = event.reason == "length", True
                if not self.response["output"]:  # an answer without text has one empty message
                    yield from self._more_text("", [])
                yield from self._close("incomplete" if self._is_cut else "completed")
            case TokenCounts():
                ended = self._end(event)
                self._keep(self.response)
                yield ended

    def failed(self, error: ApiError) -> bytes:
        """Encode the last event of an answer that an error has ended; items stay as they are."""
        code = {429: "rate_limit_exceeded", 400: "invalid_prompt"}.get(error.status, "server_error")
        self.response["status"] = "failed"
        self.response["error"] = {"code": code, "message": error.message}
        return named_event(self._response_event("failed"))

    def _event(self, kind: str, **data: Any) -> JsonObject:
        number = self._count
        self._count += 1
        return {"type": f"response.{kind}", **data, "sequence_number": number}

    def _response_event(self, kind: str) -> JsonObject:
        return self._event(kind, response=self.response)

    def _item_event(self, kind: str, **data: Any) -> JsonObject:
        """Make an event of type `kind`, with the fields `data`, about the open item: the response's last."""
        assert self._open is not None
        index = len(self.response["output"]) - 1
        if self._open["type"] != "function_call":
            data["content_index"] = 0
        return self._event(kind, item_id=self._open["id"], output_index=index, **data)

    def _begin(self, kind: str, prefix: str, **data: Any) -> Iterator[JsonObject]:
        item = {"type": kind, "id": _new_id(prefix), **data, "status": "in_progress"}
        self._open, self._texts = item, []
        self.response["output"].append(item)
        index = len(self.response["output"]) - 1
        yield self._event("output_item.added", output_index=index, item=item)

    def _more_text(self, text: str, logprobs: list[JsonObject]) -> Iterator[JsonObject]:
        if self._open is None or self._open["type"] != "message":
            # Space before a call makes no message; what it is shows when more text comes.
            text, logprobs = self._space + text, self._space_logprobs + logprobs
            self._space, self._space_logprobs = text, logprobs
            if not text.strip() and not self._has_ended:
                return
            self._space, self._space_logprobs = "", []
            yield from self._close("completed")
            yield from self._begin("message", "msg", content=[], role="assistant")
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._open["content"].append(part)  # type: ignore[index]
            yield self._item_event("content_part.added", part=part)
        assert self._open is not None
        if text or logprobs:
            self._texts.append(text)
            self._open["content"][0]["logprobs"] += logprobs
            yield self._item_event("output_text.delta", delta=text, logprobs=logprobs)

    def _more_thought(self, text: str) -> Iterator[JsonObject]:
        if self._open is None or self._open["type"] != "reasoning":
            yield from self._close("completed")
            yield from self._begin("reasoning", "rs", summary=[], content=[])
            part = {"type": "reasoning_text", "text": ""}
            self._open["content"].append(part)  # type: ignore[index]
            yield self._item_event("content_part.added", part=part)
        self._texts.append(text)
        yield self._item_event("reasoning_text.delta", delta=text)

    def _close(self, status: str) -> Iterator[JsonObject]:
        """End the open item, if there is one, with `status`; yield its last events."""
        item, text = self._open, "".join(self._texts)
        if item is None:
            return
        item["status"] = status
        if item["type"] == "reasoning":
            part = item["content"][0]
            part["text"] = text
            yield self._item_event("reasoning_text.done", text=text)
            yield self._item_event("content_part.done", part=part)
        elif item["type"] == "message":
            part = item["content"][0]
            part["text"] = text
            yield self._item_event("output_text.done", text=text, logprobs=part["logprobs"])
            yield self._item_event("content_part.done", part=part)
        else:
            item["arguments"] = text
            yield self._item_event(
                "function_call_arguments.done", arguments=text, name=item["name"]
            )
        self._open = None
        index = len(self.response["output"]) - 1
        yield self._event("output_item.done", output_index=index, item=item)

    def _end(self, counts: TokenCounts) -> JsonObject:
        response = self.response
        response["usage"] = {
            "input_tokens": counts.prompt,
            "input_tokens_details": {"cached_tokens": counts.cached, "cache_write_tokens": 0},
            "output_tokens": counts.completion,
            "total_tokens": counts.prompt + counts.completion,
            "output_tokens_details": {"reasoning_tokens": counts.thought},
        }
        if self._is_cut:
            response["status"] = "incomplete"
            response["incomplete_details"] = {"reason": "max_output_tokens"}
            return self._response_event("incomplete")
        response["status"] = "completed"
        response["completed_at"] = int(time.time())
        return self._response_event("completed")


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _logprob(token: TokenLikelihood) -> JsonObject:
    top = [_top_logprob(each) for each in token.top]
    return {**_top_logprob(token), "top_logprobs": top}


def _top_logprob(token: TokenLikelihood) -> JsonObject:
    return {"token": token.text, "bytes": list(token.bytes), "logprob": token.logprob}


def _input_items(output: list[JsonObject]) -> dict[str, openai_responses.InputItem]:
    """Return a mapping from item id to the response's item in the form of requests."""

    def of_request(item: JsonObject) -> openai_responses.InputItem:
        if item["type"] == "message":
            return openai_responses.MessageItem(role="assistant", content=_written(item))
        if item["type"] == "reasoning":
            return openai_responses.ReasoningItem(
                content=[openai_responses.ReasoningText(text=_written(item))]
            )
        call = item["call_id"], item["name"], item["arguments"]
        return openai_responses.CallItem(call_id=call[0], name=call[1], arguments=call[2])

    return {item["id"]: of_request(item) for item in output}


def _answer_message(output: list[JsonObject]) -> Message:
    """Convert a response's items to one message, for requests that continue the response."""
    calls = [
        {
            "id": item["call_id"],
            "type": "function",
            "function": {"name": item["name"], "arguments": item["arguments"]},
        }
        for item in output
        if item["type"] == "function_call"
    ]
    text = "".join(_written(item) for item in output if item["type"] == "message")
    message: Message = {"role": "assistant", "content": text}
    if thought := "".join(_written(item) for item in output if item["type"] == "reasoning"):
        message["reasoning_content"] = thought
    return {**message, "tool_calls": calls} if calls else message


def _written(message: JsonObject) -> str:
    return "".join(part["text"] for part in message["content"])
