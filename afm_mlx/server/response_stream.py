"""A response of `/v1/responses`, built item by item from an answer's events, and the events of its stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

from afm_mlx.server.answer_events import (
    Ended,
    Event,
    TextDelta,
    TokenCounts,
    ToolCallBegins,
    ToolCallDelta,
)
from afm_mlx.server.chat_inputs import Message
from afm_mlx.server.replies import ApiError, JsonObject
from afm_mlx.server.request_fields import CallItem, InputItem, MessageItem, ResponseRequest
from afm_mlx.server.served_model import TokenLikelihood
from afm_mlx.server.server_options import ServerOptions


def new_response(body: ResponseRequest, options: ServerOptions, is_kept: bool) -> JsonObject:
    """Make the response to a request as it is before the answer; much of it repeats the request."""
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
        "reasoning": {"effort": None, "summary": None},
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


class ResponseStream:
    """Fills a response, and yields the events of its stream.

    Each event must be encoded before the next one is taken, because events hold the response itself. Responses
    that are not streamed are filled in the same way, so that both are equal.

    Args:
        response: the result of `new_response`, which is filled in place.
    """

    def __init__(self, response: JsonObject):
        self.response = response
        self._count = 0
        self._open: JsonObject | None = None
        self._texts: list[str] = []  # of the open item, joined at its end
        self._space, self._space_logprobs = "", list[JsonObject]()
        self._is_cut = self._has_ended = False

    def begin(self) -> Iterator[JsonObject]:
        """Yield the first events."""
        yield self._response_event("created")
        yield self._response_event("in_progress")

    def take(self, event: Event) -> Iterator[JsonObject]:
        """Yield the stream's events for an event of the answer."""
        match event:
            case TextDelta():
                yield from self._more_text(event.text, [_logprob(each) for each in event.logprobs])
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
                yield self._end(event)

    def fail(self, error: ApiError) -> Iterator[JsonObject]:
        """Yield the last event of an answer that an error has ended; items stay as they are."""
        code = {429: "rate_limit_exceeded", 400: "invalid_prompt"}.get(error.status, "server_error")
        self.response["status"] = "failed"
        self.response["error"] = {"code": code, "message": error.message}
        yield self._response_event("failed")

    def _event(self, kind: str, **fields: Any) -> JsonObject:
        number = self._count
        self._count += 1
        return {"type": f"response.{kind}", **fields, "sequence_number": number}

    def _response_event(self, kind: str) -> JsonObject:
        return self._event(kind, response=self.response)

    def _item_event(self, kind: str, **fields: Any) -> JsonObject:
        """Make an event of type `kind` with `fields` about the open item, the last item of the response."""
        assert self._open is not None
        index = len(self.response["output"]) - 1
        if self._open["type"] == "message":
            fields["content_index"] = 0
        return self._event(kind, item_id=self._open["id"], output_index=index, **fields)

    def _begin(self, kind: str, prefix: str, **fields: Any) -> Iterator[JsonObject]:
        item = {"type": kind, "id": _new_id(prefix), **fields, "status": "in_progress"}
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

    def _close(self, status: str) -> Iterator[JsonObject]:
        """End the open item, if there is one, with `status`; yield its last events."""
        item, text = self._open, "".join(self._texts)
        if item is None:
            return
        item["status"] = status
        if item["type"] == "message":
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
            "output_tokens_details": {"reasoning_tokens": 0},
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


def input_items(output: list[JsonObject]) -> dict[str, InputItem]:
    """Return a mapping from item id to the response's item in the form of requests."""
    return {
        item["id"]: MessageItem(role="assistant", content=_text(item))
        if item["type"] == "message"
        else CallItem(call_id=item["call_id"], name=item["name"], arguments=item["arguments"])
        for item in output
    }


def answer_message(output: list[JsonObject]) -> Message:
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
    text = "".join(_text(item) for item in output if item["type"] == "message")
    message: Message = {"role": "assistant", "content": text}
    return {**message, "tool_calls": calls} if calls else message


def _text(message: JsonObject) -> str:
    return "".join(part["text"] for part in message["content"])
