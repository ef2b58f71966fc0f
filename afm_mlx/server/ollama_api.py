"""`/api/chat`, `/api/generate` and `/api/embed`: Ollama's API, for programs that speak no other."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

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
    check_format_fits,
    json_object_format,
    offered_tools,
    schema_format,
)
from afm_mlx.server.embeddings import TextInputs, embedded, written_vectors
from afm_mlx.server.generation_request import GenerationRequest
from afm_mlx.server.images import RequestImages
from afm_mlx.server.model_registry import ModelLease, ModelRegistry
from afm_mlx.server.ollama_models import timestamp
from afm_mlx.server.openai_chat import chat_tools
from afm_mlx.server.openai_completions import encoded_prompt
from afm_mlx.server.openai_fields import chat_logprobs
from afm_mlx.server.replies import (
    JSON_LINES,
    EventStream,
    JsonObject,
    bad_request,
    drain,
    json_line,
    json_response,
    while_connected,
)
from afm_mlx.server.request_fields import ollama, openai_chats
from afm_mlx.server.served_model import TokenLikelihood
from afm_mlx.server.thinking import Thinking, thinking_of

_REPEAT_WINDOW = 64
"""Ollama's default number of last tokens that `repeat_penalty` counts."""
_IMAGE_PLACE = "[img]"
"""Where Ollama's texts have an image."""
_UNLOADS = (0, "0", "0s", "0m")
"""Values of `keep_alive` that ask for no model in memory."""


async def chat(request: Request) -> Response:
    """Answer a chat, as a stream unless it is switched off."""
    begun = time.monotonic()
    body = await read_body(request, ollama.OllamaChatRequest)
    return await _answered(request, body, ReplyBuilder(body.model, begun, "messages"))


async def generate(request: Request) -> Response:
    """Answer or continue a prompt, as a stream unless it is switched off."""
    begun = time.monotonic()
    body = await read_body(request, ollama.OllamaGenerateRequest)
    return await _answered(request, body, ReplyBuilder(body.model, begun, "prompt"))


async def embed(request: Request) -> Response:
    """Return the vectors of texts; without texts, load the model."""
    begun = time.monotonic()
    body = await read_body(request, ollama.OllamaEmbedRequest)
    inputs = [body.input] if isinstance(body.input, str) else body.input or []
    truncates = body.truncate is not False
    found = await _vectors(request, body.model, inputs, "input", truncates, body.dimensions)
    taken = _nanoseconds(time.monotonic() - begun)
    durations = {"total_duration": taken, "load_duration": 0}
    counts = {"prompt_eval_count": found[1]}
    return json_response({"model": body.model, "embeddings": found[0], **durations, **counts})


async def embedding(request: Request) -> Response:
    """Return the vector of a prompt, as Ollama's older route does; without one, load the model."""
    body = await read_body(request, ollama.OllamaEmbeddingRequest)
    inputs = [body.prompt] if body.prompt else []
    vectors, _ = await _vectors(request, body.model, inputs, "prompt", truncates=True)
    return json_response({"embedding": vectors[0] if vectors else []})


async def _vectors(
    request: Request,
    model: str,
    inputs: Sequence[str],
    field: str,
    truncates: bool,
    dimensions: int | None = None,
) -> tuple[list[object], int]:
    """Return vectors for JSON, and the number of tokens of all inputs."""
    models: ModelRegistry = request.app.state.models
    lease = models.lease(request, model)
    texts = TextInputs(inputs, field, dimensions, truncates=truncates)

    async def found() -> tuple[list[object], int]:
        async with lease:
            vectors, tokens = await embedded(lease, texts) if inputs else ([], 0)
            written = await in_thread(lambda: written_vectors(vectors), is_admitted=True)
            return written, tokens

    return await while_connected(request, found())


ROUTES = [
    Route("/api/chat", chat, methods=["POST"]),
    Route("/api/generate", generate, methods=["POST"]),
    Route("/api/embed", embed, methods=["POST"]),
    Route("/api/embeddings", embedding, methods=["POST"]),
]


async def _answered(request: Request, body: ollama.OllamaRequest, built: ReplyBuilder) -> Response:
    models: ModelRegistry = request.app.state.models
    lease = models.lease(request, body.model)
    if not getattr(body, built.prompt_field) and not getattr(body, "images", None):
        model, _ = models.find(body.model)
        if body.keep_alive in _UNLOADS and model.state != "loaded":
            return json_response(built.without_answer("unload"))
        await while_connected(request, lease.run(lambda: None))
        return json_response(built.without_answer("load"))
    lines = _lines(lease, body, built)
    if body.stream is False:
        await while_connected(request, drain(lines))
        return json_response(built.reply)
    # Clients read every line as an object, so a ping is a piece without text.
    ping = json_line(built.piece())
    failed = lambda error: json_line(error.ollama())  # noqa: E731
    return EventStream(lines, request, failed, ping, JSON_LINES)


async def _lines(
    lease: ModelLease, body: ollama.OllamaRequest, built: ReplyBuilder
) -> AsyncGenerator[bytes, None]:
    async with lease:
        # In a thread, because large conversations and schemas take a while.
        compiles = body.format is not None
        made = await in_thread(lambda: _generation_request(body, lease), compiles=compiles)
        async with aclosing(encoded_events(lease, made, built, json_line)) as lines:
            async for line in lines:
                yield line


# -- from a body to a request


def _generation_request(body: ollama.OllamaRequest, lease: ModelLease) -> GenerationRequest:
    options = body.options or ollama.OllamaOptions()
    format = FREE_TEXT
    if isinstance(body.format, dict):
        format = schema_format(body.format, "format")
    elif body.format is not None:
        format = json_object_format()
    if isinstance(body, ollama.OllamaChatRequest):
        inputs = _chat(body, format, lease)
    else:
        assert isinstance(body, ollama.OllamaGenerateRequest)
        inputs = _prompt(body, lease)
    window = _REPEAT_WINDOW if options.repeat_last_n is None else options.repeat_last_n
    most = options.num_predict
    return GenerationRequest(
        **inputs,
        format=format,
        adapter=lease.adapter,
        max_tokens=most if most is None or most > 0 else -1,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        seed=options.seed,
        frequency_penalty=options.frequency_penalty or 0.0,
        presence_penalty=options.presence_penalty or 0.0,
        repetition_penalty=(options.repeat_penalty or 0.0) if window else 0.0,
        repetition_context_size=None if window < 0 else window,
        stop=options.stop or (),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        client=lease.client,
    )


def _chat(
    body: ollama.OllamaChatRequest, format: AnswerFormat, lease: ModelLease
) -> dict[str, Any]:
    images = lease.images()
    messages = _messages(body.messages or (), images, folds=not lease.served.options.strict)
    check_format_fits(format, messages, f"messages[{len(body.messages or ()) - 1}]")
    tools = offered_tools(chat_tools(body.tools), "auto", parallel=True)
    return {
        "messages": messages,
        "images": images.chat,
        "tools": tools,
        "thinking": _thinking(body),
    }


def _prompt(body: ollama.OllamaGenerateRequest, lease: ModelLease) -> dict[str, Any]:
    prompt, served = body.prompt or "", lease.served
    if body.raw and body.system:
        raise bad_request("system can't be combined with raw: put it into the prompt.", "system")
    if body.raw or not (body.system or getattr(served.tokenizer, "has_chat_template", False)):
        if body.images:
            raise bad_request("images need the chat template; leave out raw.", "images")
        return {"prompt": encoded_prompt(prompt, served, "prompt")}
    images = lease.images()
    conversation = ConversationBuilder()
    conversation.add_user(_with_images(prompt, body.images, "images", images), "prompt")
    messages = conversation.finished("prompt", body.system)
    return {"messages": messages, "images": images.chat, "thinking": _thinking(body)}


def _thinking(body: ollama.OllamaRequest) -> Thinking:
    switch = body.think if isinstance(body.think, bool) else None
    effort = body.think if isinstance(body.think, str) else None
    return thinking_of(openai_chats.ThinkingFields(enable_thinking=switch), effort, "think")


def _with_images(text: str, given: Sequence[str] | None, place: str, images: RequestImages) -> str:
    """Put images (in base64, at `place` in the body) in the places of `[img]`, and others before the text."""
    before = ""
    for index, data in enumerate(given or ()):
        mark = images.mark_base64(data, f"{place}[{index}]")
        if _IMAGE_PLACE in text:
            text = text.replace(_IMAGE_PLACE, mark, 1)
        else:
            before += mark
    return before + text


def _messages(
    messages: Sequence[ollama.OllamaMessage], images: RequestImages, folds: bool
) -> list[Message]:
    """Convert messages for the chat template, and read their images; `folds` is `ConversationBuilder`'s.

    Calls without an id are given one that is the same in each request, so that prompts with it can be cached.
    """
    conversation = ConversationBuilder(folds=folds)
    # The tools of the last answer's calls that have no result yet, by id.
    calls: dict[str, str] = {}
    have_ids = False
    for index, message in enumerate(messages):
        place, text = f"messages[{index}]", message.content or ""
        where = f"{place}.images"
        if message.images and message.role not in ("user", "tool"):
            raise bad_request(
                f"{where} is of the role {message.role}; only messages of the user and results of tools have "
                "images. Put them there.",
                where,
            )
        text = _with_images(text, message.images, where, images)
        if message.role == "system":
            conversation.add_system(text, place)
        elif message.role == "user":
            conversation.add_user(text, place)
        elif message.role == "tool":
            named = [i for i, name in calls.items() if name == (message.tool_name or name)]
            is_known = message.tool_call_id and (have_ids or message.tool_call_id in calls)
            call_id = message.tool_call_id if is_known or not named else named[0]
            where = f"{place}.{'tool_call_id' if is_known else 'tool_name'}"
            conversation.add_result(call_id or message.tool_name or "", text, where)
            calls.pop(call_id or "", None)
        else:
            conversation.add_answer(text, place, message.thinking or "")
            made = message.tool_calls or ()
            have_ids = any(call.id for call in made)
            calls = {}
            for number, call in enumerate(made):
                call_id = call.id or f"call_{index}_{number}"
                name = call.function.name
                arguments = json.dumps(call.function.arguments, ensure_ascii=False)
                conversation.add_call(call_id, name, arguments, f"{place}.tool_calls[{number}].id")
                calls[call_id] = name
    return conversation.finished("messages")


# -- from an answer's events to a reply


class ReplyBuilder:
    """Builds a reply, and the lines of its stream: an `EventBuilder`.

    Args:
        model: the name that the request has.
        begun: time of the request, in seconds of `time.monotonic`.
        prompt_field: "messages" for chats, "prompt" for the form of `/api/generate`.

    Attributes:
        reply: the whole reply, once the last event was taken.
    """

    def __init__(self, model: str, begun: float, prompt_field: str):
        self._model, self._begun, self.prompt_field = model, begun, prompt_field
        self.reply: JsonObject = {}
        self._content = self._thinking = ""
        self._calls: list[JsonObject] = []
        self._logprobs: list[TokenLikelihood] = []
        self._call: ToolCallBegins | None = None  # until its arguments end
        self._arguments: list[str] = []
        self._reason = ""

    def begin(self) -> Iterator[JsonObject]:
        return iter(())

    def take(self, event: Event) -> Iterator[JsonObject]:
        if not isinstance(event, ToolCallDelta):
            yield from self._end_call()
        match event:
            case TextDelta():
                self._content += event.text
                self._logprobs += event.logprobs
                yield self.piece(event.text, logprobs=event.logprobs)
            case ThoughtDelta():
                self._thinking += event.text
                yield self.piece(thinking=event.text)
            case ToolCallBegins():
                self._call, self._arguments = event, []
            case ToolCallDelta():
                self._arguments.append(event.arguments)
            case Ended():
                self._reason = "length" if event.reason == "length" else "stop"
            case TokenCounts():
                end = self._end(event)
                parts = (self._content, self._thinking, self._calls, self._logprobs)
                self.reply = self.piece(*parts) | end
                yield self.piece() | end

    def piece(
        self,
        content: str = "",
        thinking: str = "",
        calls: Sequence[JsonObject] = (),
        logprobs: Sequence[TokenLikelihood] = (),
    ) -> JsonObject:
        """Make a line of the stream with a part of the answer."""
        more: JsonObject = {"thinking": thinking} if thinking else {}
        if calls:
            more["tool_calls"] = calls
        said: JsonObject = {"response": content, **more}
        if self.prompt_field == "messages":
            said = {"message": {"role": "assistant", "content": content, **more}}
        if logprobs:
            said["logprobs"] = chat_logprobs(logprobs)["content"]
        return {"model": self._model, "created_at": timestamp(time.time()), **said, "done": False}

    def without_answer(self, reason: str) -> JsonObject:
        """Make the reply to a request that generates nothing."""
        taken = _nanoseconds(time.monotonic() - self._begun)
        durations = {"total_duration": taken, "load_duration": taken}
        return self.piece() | {"done": True, "done_reason": reason, **durations}

    def _end_call(self) -> Iterator[JsonObject]:
        """Yield the open call, if there is one; one that was cut off is left out."""
        begun, self._call = self._call, None
        if begun is None:
            return
        try:
            arguments = json.loads("".join(self._arguments))
        except ValueError:
            return
        function = {"index": begun.call, "name": begun.name, "arguments": arguments}
        self._calls.append({"id": begun.id, "function": function})
        yield self.piece(calls=self._calls[-1:])

    def _end(self, counts: TokenCounts) -> JsonObject:
        """Return the last line's fields: why the answer ended, numbers of tokens, and times.

        An answer whose tokens were all forced has no time between its prompt and its tokens.
        """
        clock = counts.clock
        left = time.monotonic() if clock.left is None else clock.left
        scheduled = left if clock.scheduled is None else clock.scheduled
        first = scheduled if clock.first is None else clock.first
        return {
            "done": True,
            "done_reason": self._reason,
            "total_duration": _nanoseconds(left - self._begun),
            "load_duration": _nanoseconds(scheduled - self._begun),
            "prompt_eval_count": counts.prompt,
            "prompt_eval_duration": _nanoseconds(first - scheduled),
            "eval_count": counts.completion,
            "eval_duration": _nanoseconds(left - first),
        }


def _nanoseconds(seconds: float) -> int:
    return round(1e9 * seconds)
