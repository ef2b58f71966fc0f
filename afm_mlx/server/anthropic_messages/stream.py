"""From the events of generation to a message, block by block, and to the events of its stream.

Answers that are not streamed are made in the same way, so that both are the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from afm_mlx.server import generation
from afm_mlx.server.anthropic_messages.answer import (
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    JsonDelta,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    Ping,
    StopDelta,
    StreamEvent,
    TextBlock,
    TextDelta,
    ToolUseBlock,
    Usage,
)
from afm_mlx.server.generation import Ended, ToolCallBegins, ToolCallDelta

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageStream:
    """Fills a message, and yields the events that tell of it; each is to be written before the next is taken.

    Args:
        message: what is filled.
    """

    def __init__(self, message: Message):
        self.message = message
        self._open: Block | None = None
        self._texts: list[str] = []  # of the open block, joined at its end
        self._space = ""

    def begin(self) -> Iterator[StreamEvent]:
        """The first events."""
        yield MessageStart(self.message)
        yield Ping()

    def take(self, event: generation.Event) -> Iterator[StreamEvent]:
        """What an event of generation means to the stream."""
        match event:
            case generation.TextDelta():
                yield from self._more_text(event.text)
            case ToolCallBegins():
                yield from self._close()
                id = "toolu_" + event.id.removeprefix("call_")
                yield from self._begin(ToolUseBlock(id, event.name))
            case ToolCallDelta():
                self._texts.append(event.arguments)
                yield BlockDelta(self._index, JsonDelta(event.arguments))
            case Ended():
                if self._space and not self.message.content:
                    yield from self._begin(TextBlock())
                    yield from self._more_text(self._space)
                yield from self._close()
                self.message.stop_reason = _STOP_REASONS[event.reason]
                if event.stop_string is not None:
                    self.message.stop_reason = "stop_sequence"
                    self.message.stop_sequence = event.stop_string
            case generation.Usage():
                yield from self._end(event)

    @property
    def _index(self) -> int:
        return len(self.message.content) - 1

    def _begin(self, block: Block) -> Iterator[StreamEvent]:
        self._open, self._texts = block, []
        self.message.content.append(block)
        yield BlockStart(self._index, block)

    def _more_text(self, text: str) -> Iterator[StreamEvent]:
        if not isinstance(self._open, TextBlock):
            # Space before a call is no block; whether it is one shows when more comes.
            text = self._space + text
            self._space = "" if text.strip() else text
            if self._space or not text:
                return
            yield from self._close()
            yield from self._begin(TextBlock())
        if text:
            self._texts.append(text)
            yield BlockDelta(self._index, TextDelta(text))

    def _close(self) -> Iterator[StreamEvent]:
        """End the open block, if there is one."""
        block, text = self._open, "".join(self._texts)
        self._open = None
        if isinstance(block, TextBlock):
            block.text = text
        elif isinstance(block, ToolUseBlock):
            block.input = _object(text)
        if block is not None:
            yield BlockStop(self._index)

    def _end(self, usage: generation.Usage) -> Iterator[StreamEvent]:
        self.message.usage = Usage(usage.prompt - usage.cached, usage.completion, usage.cached)
        assert self.message.stop_reason is not None
        stop = StopDelta(self.message.stop_reason, self.message.stop_sequence)
        yield MessageDelta(stop, self.message.usage)
        yield MessageStop()


def _object(text: str) -> dict[str, object]:
    """A call's input; of one that was cut, nothing can be told."""
    try:
        return dict(json.loads(text))
    except ValueError:
        return {}
