"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's API, as coding agents use it."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from afm_mlx.errors import shown
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
    PARAGRAPH,
    AnswerFormat,
    ConversationBuilder,
    Message,
    OfferedTools,
    check_format_fits,
    function_tool,
    offered_tools,
    schema_format,
)
from afm_mlx.server.generation_request import GenerationRequest
from afm_mlx.server.images import RequestImages
from afm_mlx.server.model_registry import ModelLease, ModelRegistry
from afm_mlx.server.replies import (
    EventStream,
    JsonObject,
    bad_request,
    drain,
    event,
    json_response,
    named_event,
    while_connected,
)
from afm_mlx.server.request_fields import anthropic_messages as fields
from afm_mlx.server.thinking import Thinking, thinking_of

VERSIONS = ("2023-06-01", "2026-10-21")
"""Allowed values of the header anthropic-version, which may be left out.

The newer version has no temperature, top_p and top_k; this server honours them under both.
"""


async def create_message(request: Request) -> Response:
    """Answer a request, whole or as a stream."""
    models: ModelRegistry = request.app.state.models
    _check_version(request)
    body = await read_body(request, fields.MessageRequest)
    lease = models.lease(request, body.model)
    built = MessageBuilder(body.model)
    events = _events(lease, body, built)
    if body.stream:
        ping = named_event({"type": "ping"})
        return EventStream(events, request, lambda error: event(error.anthropic(), "error"), ping)
    await while_connected(request, drain(events))
    return json_response(built.message)


async def _events(
    lease: ModelLease, body: fields.MessageRequest, built: MessageBuilder
) -> AsyncGenerator[bytes, None]:
    def prepared() -> GenerationRequest:
        images = lease.images()
        messages, tools, format = _prompt(body, images, folds=not lease.served.options.strict)
        # Encoded here, because the first event of a stream has the number of the prompt's tokens.
        thinking = _thinking(body)
        prompt = lease.served.encode_chat(messages, tools, format, thinking, images.chat)
        return GenerationRequest(
            prompt=prompt,
            images=images.chat,
            tools=tools,
            format=format,
            thinking=thinking,
            adapter=lease.adapter,
            max_tokens=body.max_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            stop=body.stop_sequences or (),
            client=lease.client,
        )

    async with lease:
        # In a thread, because large conversations and schemas take a while.
        made = await in_thread(prepared, compiles=_has_format(body))
        built.message["usage"] = _usage(len(made.prompt or ()))
        async with aclosing(encoded_events(lease, made, built)) as events:
            async for each in events:
                yield each


async def count_tokens(request: Request) -> Response:
    """Count the tokens of a prompt."""
    models: ModelRegistry = request.app.state.models
    _check_version(request)
    body = await read_body(request, fields.PromptRequest)
    lease = models.lease(request, body.model)

    def counted() -> int:
        images = lease.images()
        inputs = _prompt(body, images, folds=not models.options.strict)
        return len(lease.served.encode_chat(*inputs, _thinking(body), images.chat))

    count = await while_connected(request, lease.run(counted, compiles=_has_format(body)))
    return json_response({"input_tokens": count})


ROUTES = [
    Route("/v1/messages", create_message, methods=["POST"]),
    Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
]


def _has_format(body: fields.PromptRequest) -> bool:
    return body.output_config is not None or body.output_format is not None


def _check_version(request: Request) -> None:
    version = request.headers.get("anthropic-version")
    if version is not None and version not in VERSIONS:
        raise bad_request(
            f"anthropic-version is {shown(version)}; allowed is {', '.join(VERSIONS)}.",
            "anthropic-version",
        )


# -- from a body to a prompt


def _prompt(
    body: fields.PromptRequest, images: RequestImages, folds: bool
) -> tuple[list[Message], OfferedTools, AnswerFormat]:
    """Read the conversation, the tools and the answer format of a body; `folds` is `ConversationBuilder`'s.

    Images are read, and marked.
    """
    given, place = body.output_format, "output_format"
    if body.output_config is not None and body.output_config.format is not None:
        if given is not None:
            raise bad_request(
                "output_format and output_config.format are both given. Leave one out.", place
            )
        given, place = body.output_config.format, "output_config.format"
    messages = _messages(body, images, folds)
    format = FREE_TEXT
    if given is not None:
        format = schema_format(given.schema, f"{place}.schema")
    check_format_fits(format, messages, place)
    return messages, _tools(body), format


def _thinking(body: fields.PromptRequest) -> Thinking:
    effort = None if body.output_config is None else body.output_config.effort
    return thinking_of(body, effort, "output_config.effort")


def _tools(body: fields.PromptRequest) -> OfferedTools:
    tools = [function_tool(t.name, t.description, t.input_schema) for t in body.tools or ()]
    choice = body.tool_choice
    if isinstance(choice, fields.ToolChoice):
        return offered_tools(tools, "one", parallel=False, allowed=[choice.name])
    if choice is None or isinstance(choice, fields.NoChoice):
        return offered_tools(tools, "auto" if choice is None else "none", parallel=True)
    word = "required" if isinstance(choice, fields.AnyChoice) else "auto"
    return offered_tools(tools, word, parallel=not choice.disable_parallel_tool_use)


def _messages(body: fields.PromptRequest, images: RequestImages, folds: bool) -> list[Message]:
    conversation = ConversationBuilder(folds=folds)
    for index, message in enumerate(body.messages):
        place = f"messages[{index}]"
        if isinstance(message, fields.ClaudeUser):
            _add_user(conversation, message, place, images)
        elif isinstance(message, fields.ClaudeSystem):
            conversation.add_system(_joined(message.content), place)
        else:
            _add_answer(conversation, message, place)
    return conversation.finished("messages", _joined(body.system) if body.system else None)


def _add_user(
    conversation: ConversationBuilder,
    message: fields.ClaudeUser,
    place: str,
    images: RequestImages,
) -> None:
    """Add the tool results of a user's message, which is at `place` in the body, then its texts and images."""
    if isinstance(message.content, str):
        conversation.add_user(message.content, place)
        return
    blocks: list[tuple[str, fields.ClaudeText | fields.ClaudeImage]] = []
    for number, block in enumerate(message.content):
        where = f"{place}.content[{number}]"
        if not isinstance(block, fields.ToolResultBlock):
            blocks.append((where, block))
            continue
        text = block.content or ""
        if not isinstance(text, str):
            text = _with_images(
                [(f"{where}.content[{i}]", each) for i, each in enumerate(text)], images
            )
        if block.is_error:
            # `ensure_ascii` would change the marks of images.
            text = json.dumps({"error": text}, ensure_ascii=False)
        conversation.add_result(block.tool_use_id, text, f"{where}.tool_use_id")
    if blocks or not message.content:
        conversation.add_user(_with_images(blocks, images), place)


def _with_images(
    blocks: Sequence[tuple[str, fields.ClaudeText | fields.ClaudeImage]], images: RequestImages
) -> str:
    """Join texts and images with their places in the body; texts that follow each other are paragraphs."""
    joined: list[str] = []
    follows_text = False
    for place, block in blocks:
        if isinstance(block, fields.ClaudeText):
            joined += [PARAGRAPH, block.text] if follows_text else [block.text]
        elif isinstance(block.source, fields.Base64Source):
            joined.append(images.mark_base64(block.source.data, f"{place}.source.data"))
        else:
            joined.append(images.mark(block.source.url, f"{place}.source.url"))
        follows_text = isinstance(block, fields.ClaudeText)
    return "".join(joined)


def _add_answer(
    conversation: ConversationBuilder, message: fields.ClaudeAssistant, place: str
) -> None:
    """Add the texts and calls of an assistant's message, which is at `place` in the body.

    A message that has only ignored blocks adds nothing.
    """
    if isinstance(message.content, str):
        conversation.add_answer(message.content, place)
        return
    texts: list[str] = []
    thoughts: list[str] = []
    for number, block in enumerate(message.content):
        if isinstance(block, fields.ClaudeText):
            texts.append(block.text)
            continue
        if isinstance(block, fields.ThinkingBlock):
            thoughts.append(block.thinking)
            continue
        where = f"{place}.content[{number}]"
        if texts:  # before a call
            conversation.add_answer(PARAGRAPH.join(texts), where, PARAGRAPH.join(thoughts))
        elif thoughts:
            conversation.add_thought(PARAGRAPH.join(thoughts), where)
        texts, thoughts = [], []
        conversation.add_call(block.id, block.name, json.dumps(block.input), f"{where}.id")
    if texts or thoughts:
        conversation.add_answer(PARAGRAPH.join(texts), place, PARAGRAPH.join(thoughts))


def _joined(content: str | Sequence[fields.ClaudeText]) -> str:
    return content if isinstance(content, str) else PARAGRAPH.join(block.text for block in content)


# -- from an answer's events to a message

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageBuilder:
    """Builds `message` block by block, and the events of its stream: an `EventBuilder`."""

    prompt_field = "messages"

    def __init__(self, model: str):
        self.message: JsonObject = {
            "type": "message",
            "id": f"msg_{uuid.uuid4().hex}",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(0),  # until the prompt is encoded
        }
        self._open: JsonObject | None = None  # the last block, until it ends
        self._texts: list[str] = []  # of the open block, joined at its end
        self._space = ""

    def begin(self) -> Iterator[JsonObject]:
        yield {"type": "message_start", "message": self.message}
        yield {"type": "ping"}

    def take(self, event: Event) -> Iterator[JsonObject]:
        match event:
            case TextDelta():
                yield from self._more_text(event.text)
            case ThoughtDelta():
                if self._open is None or self._open["type"] != "thinking":
                    yield from self._close()
                    yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
                yield self._delta("thinking_delta", "thinking", event.text)
            case ToolCallBegins():
                yield from self._close()
                call_id = "toolu_" + event.id.removeprefix("call_")
                yield from self._begin(
                    {"type": "tool_use", "id": call_id, "name": event.name, "input": {}}
                )
            case ToolCallDelta():
                yield self._delta("input_json_delta", "partial_json", event.arguments)
            case Ended():
                if self._space and not self.message["content"]:
                    yield from self._begin(_text_block())
                    yield from self._more_text(self._space)
                yield from self._close()
                self.message["stop_reason"] = _STOP_REASONS[event.reason]
                if event.stop_string is not None:
                    self.message["stop_reason"] = "stop_sequence"
                    self.message["stop_sequence"] = event.stop_string
            case TokenCounts():
                self.message["usage"] = _usage(
                    event.prompt - event.cached, event.completion, event.cached
                )
                stop = {name: self.message[name] for name in ("stop_reason", "stop_sequence")}
                yield {"type": "message_delta", "delta": stop, "usage": self.message["usage"]}
                yield {"type": "message_stop"}

    @property
    def _index(self) -> int:
        return len(self.message["content"]) - 1

    def _begin(self, block: JsonObject) -> Iterator[JsonObject]:
        self._open, self._texts = block, []
        self.message["content"].append(block)
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, kind: str, field: str, text: str) -> JsonObject:
        self._texts.append(text)
        delta = {"type": kind, field: text}
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _more_text(self, text: str) -> Iterator[JsonObject]:
        if self._open is None or self._open["type"] != "text":
            # Space before a call makes no block; what it is shows when more text comes.
            text = self._space + text
            self._space = "" if text.strip() else text
            if self._space or not text:
                return
            yield from self._close()
            yield from self._begin(_text_block())
        if text:
            yield self._delta("text_delta", "text", text)

    def _close(self) -> Iterator[JsonObject]:
        """Yield the event that ends the open block, if there is one."""
        block, text = self._open, "".join(self._texts)
        self._open = None
        if block is None:
            return
        if block["type"] == "text":
            block["text"] = text
        elif block["type"] == "thinking":
            # Clients give back thoughts that are signed only.
            signature = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
            yield self._delta("signature_delta", "signature", signature)
            block["thinking"], block["signature"] = text, signature
        else:
            try:
                block["input"] = dict(json.loads(text))
            except ValueError:  # the call was cut off
                block["input"] = {}
        yield {"type": "content_block_stop", "index": self._index}


def _text_block() -> JsonObject:
    return {"type": "text", "text": "", "citations": None}


def _usage(prompt: int, completion: int = 0, cached: int = 0) -> dict[str, int]:
    return {
        "input_tokens": prompt,
        "output_tokens": completion,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }
