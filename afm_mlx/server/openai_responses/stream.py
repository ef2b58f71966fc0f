"""From the events of generation to a response, item by item, and to the events of its stream.

Answers that are not streamed are made in the same way, so that both are the same.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence

from afm_mlx.server import generation
from afm_mlx.server.conversation import Message
from afm_mlx.server.errors import ApiError
from afm_mlx.server.generation import Ended, TextDelta, ToolCallBegins, ToolCallDelta
from afm_mlx.server.openai_responses.answer import (
    ArgumentsDelta,
    ArgumentsDone,
    ContentPartAdded,
    ContentPartDone,
    FunctionCall,
    IncompleteDetails,
    InputDetails,
    Item,
    Logprob,
    OutputItemAdded,
    OutputItemDone,
    OutputMessage,
    OutputText,
    OutputTextDelta,
    OutputTextDone,
    Response,
    ResponseCompleted,
    ResponseCreated,
    ResponseError,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    StreamEvent,
    TopLogprob,
    Usage,
)
from afm_mlx.server.request_fields import CallItem, InputItem, MessageItem
from afm_mlx.server.token_texts import TokenLogprob


def new_id(kind: str) -> str:
    """An id that nothing else has."""
    return f"{kind}_{uuid.uuid4().hex}"


class ResponseStream:
    """Fills a response, and yields the events that tell of it; each is to be written before the next is taken.

    Args:
        response: what is filled.
    """

    def __init__(self, response: Response):
        self.response = response
        self._count = 0
        self._open: Item | None = None
        self._texts: list[str] = []  # of the open item, joined at its end
        self._space, self._space_logprobs = "", list[Logprob]()
        self._is_cut = self._has_ended = False

    def begin(self) -> Iterator[StreamEvent]:
        """The first events."""
        yield self._numbered(ResponseCreated(response=self.response))
        yield self._numbered(ResponseInProgress(response=self.response))

    def take(self, event: generation.Event) -> Iterator[StreamEvent]:
        """What an event of generation means to the stream."""
        for told in self._take(event):
            yield self._numbered(told)

    def fail(self, error: ApiError) -> Iterator[StreamEvent]:
        """The last event, after an error; items stay as they are."""
        code = {429: "rate_limit_exceeded"}.get(error.status, "server_error")
        code = "invalid_prompt" if error.status == 400 else code
        self.response.status = "failed"
        self.response.error = ResponseError(code, error.message)
        yield self._numbered(ResponseFailed(response=self.response))

    def _numbered(self, event: StreamEvent) -> StreamEvent:
        event.sequence_number = self._count
        self._count += 1
        return event

    def _take(self, event: generation.Event) -> Iterator[StreamEvent]:
        match event:
            case TextDelta():
                yield from self._more_text(event.text, [_logprob(each) for each in event.logprobs])
            case ToolCallBegins():
                yield from self._close("completed")
                yield from self._begin(FunctionCall(new_id("fc"), event.id, event.name))
            case ToolCallDelta():
                yield self._more_arguments(event.arguments)
            case Ended():
                self._is_cut, self._has_ended = event.reason == "length", True
                if not self.response.output:  # an answer of no text is one, too
                    yield from self._more_text("", [])
                yield from self._close("incomplete" if self._is_cut else "completed")
            case generation.Usage():
                yield self._end(event)

    def _begin(self, item: Item) -> Iterator[StreamEvent]:
        self._open, self._texts = item, []
        self.response.output.append(item)
        yield OutputItemAdded(output_index=len(self.response.output) - 1, item=item)

    def _begin_message(self) -> Iterator[StreamEvent]:
        message = OutputMessage(new_id("msg"))
        yield from self._begin(message)
        message.content.append(OutputText())
        yield ContentPartAdded(
            item_id=message.id, output_index=self._index, part=message.content[0]
        )

    @property
    def _index(self) -> int:
        return len(self.response.output) - 1

    def _more_text(self, text: str, logprobs: list[Logprob]) -> Iterator[StreamEvent]:
        if not isinstance(self._open, OutputMessage):
            # Space before a call is no message; whether it is one shows when more comes.
            text, logprobs = self._space + text, self._space_logprobs + logprobs
            self._space, self._space_logprobs = text, logprobs
            if not text.strip() and not self._has_ended:
                return
            self._space, self._space_logprobs = "", []
            yield from self._close("completed")
            yield from self._begin_message()
        assert isinstance(self._open, OutputMessage)
        if text or logprobs:
            self._texts.append(text)
            self._open.content[0].logprobs += logprobs
            yield OutputTextDelta(
                item_id=self._open.id, output_index=self._index, delta=text, logprobs=logprobs
            )

    def _more_arguments(self, arguments: str) -> StreamEvent:
        assert isinstance(self._open, FunctionCall)
        self._texts.append(arguments)
        return ArgumentsDelta(item_id=self._open.id, output_index=self._index, delta=arguments)

    def _close(self, status: str) -> Iterator[StreamEvent]:
        """End the open item, if there is one."""
        item, text = self._open, "".join(self._texts)
        self._open = None
        if item is None:
            return
        item.status = status
        if isinstance(item, OutputMessage):
            part = item.content[0]
            part.text = text
            yield OutputTextDone(
                item_id=item.id, output_index=self._index, text=text, logprobs=part.logprobs
            )
            yield ContentPartDone(item_id=item.id, output_index=self._index, part=part)
        else:
            item.arguments = text
            yield ArgumentsDone(
                item_id=item.id, output_index=self._index, arguments=text, name=item.name
            )
        yield OutputItemDone(output_index=self._index, item=item)

    def _end(self, usage: generation.Usage) -> StreamEvent:
        response = self.response
        response.usage = Usage(
            input_tokens=usage.prompt,
            input_tokens_details=InputDetails(usage.cached),
            output_tokens=usage.completion,
            total_tokens=usage.prompt + usage.completion,
        )
        if self._is_cut:
            response.status = "incomplete"
            response.incomplete_details = IncompleteDetails("max_output_tokens")
            return ResponseIncomplete(response=response)
        response.status = "completed"
        response.completed_at = int(time.time())
        return ResponseCompleted(response=response)


def _logprob(token: TokenLogprob) -> Logprob:
    top = [_top_logprob(each) for each in token.top]
    return Logprob(token.text, list(token.bytes), token.logprob, top)


def _top_logprob(token: TokenLogprob) -> TopLogprob:
    return TopLogprob(token.text, list(token.bytes), token.logprob)


def input_items(output: Sequence[Item]) -> dict[str, InputItem]:
    """An answer's items as requests send them, by their ids."""
    return {
        item.id: CallItem(call_id=item.call_id, name=item.name, arguments=item.arguments)
        if isinstance(item, FunctionCall)
        else MessageItem(role="assistant", content="".join(part.text for part in item.content))
        for item in output
    }


def answered_message(output: Sequence[Item]) -> Message:
    """The message that a later request finds where it goes on from a response."""
    texts = (
        part.text for item in output if isinstance(item, OutputMessage) for part in item.content
    )
    calls = [
        {
            "id": item.call_id,
            "type": "function",
            "function": {"name": item.name, "arguments": item.arguments},
        }
        for item in output
        if isinstance(item, FunctionCall)
    ]
    message: Message = {"role": "assistant", "content": "".join(texts)}
    return {**message, "tool_calls": calls} if calls else message
