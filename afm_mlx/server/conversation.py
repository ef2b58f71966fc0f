"""A conversation put together from an API's items or blocks, in the form that chat templates read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from afm_mlx.errors import shown
from afm_mlx.server.errors import bad_request

Message = dict[str, Any]
PARAGRAPH = "\n\n"


class Conversation:
    """Messages in OpenAI's chat form: instructions first, calls in the message of the text before them.

    Results of one answer's calls stand in the order of the calls, however they came: models are not shown the
    ids by which they belong together.

    Args:
        earlier: messages that come before all others, as `finished` returned them.
    """

    def __init__(self, earlier: Sequence[Message] = ()):
        self.messages: list[Message] = [dict(message) for message in earlier]
        self._instructions: list[str] = []
        if self.messages and self.messages[0]["role"] == "system":
            self._instructions.append(self.messages.pop(0)["content"])
        self._calls: dict[str, int] = {}  # of the last answer, by their ids: their order
        if self.messages and self.messages[-1]["role"] == "assistant":
            calls = self.messages[-1].get("tool_calls", ())
            self._calls = {call["id"]: index for index, call in enumerate(calls)}

    def add_system(self, text: str, place: str) -> None:
        """Add to the instructions; `place` is where the text stands in the body.

        Raises:
            ApiError: 400 when the conversation has begun: models read instructions at its beginning only.
        """
        if self.messages:
            raise bad_request(
                f"{place} has instructions within a conversation, which this model can't be given. Put them "
                "before all other messages.",
                place,
                "unsupported_value",
            )
        self._instructions.append(text)

    def add_text(self, role: str, text: str) -> None:
        """Add what the user or the assistant has said."""
        self.messages.append({"role": role, "content": text})
        self._calls = {}

    def add_call(self, call_id: str, name: str, arguments: str, place: str) -> None:
        """Add a call to the assistant's message that it stands behind, or a message of its own.

        Raises:
            ApiError: 400 for an id that another call of this answer has.
        """
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.add_text("assistant", "")
        if call_id in self._calls:
            raise bad_request(
                f"{place} is {shown(call_id)}, as of another call; each needs an id of its own.",
                place,
            )
        last = self.messages[-1]
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        last["tool_calls"] = [*last.get("tool_calls", ()), call]
        self._calls[call_id] = len(self._calls)

    def add_result(self, call_id: str, text: str, place: str) -> None:
        """Add what a call of the last answer has returned.

        Raises:
            ApiError: 400 when there is no such call, or it has a result already.
        """
        answered = self._answered()
        if call_id not in self._calls or call_id in answered:
            why = (
                "has a result already"
                if call_id in answered
                else "the answer before it didn't make"
            )
            raise bad_request(
                f"{place} is {shown(call_id)}, a call that {why}.", place, "invalid_value"
            )
        later = sum(self._calls[other] > self._calls[call_id] for other in answered)
        at = len(self.messages) - later
        self.messages.insert(at, {"role": "tool", "tool_call_id": call_id, "content": text})

    def _answered(self) -> list[str]:
        """The ids of calls of the last answer that have results, which are the last messages."""
        found = takewhile(lambda message: message["role"] == "tool", reversed(self.messages))
        return [message["tool_call_id"] for message in found]

    def finished(self, place: str, instructions: str | None = None) -> list[Message]:
        """All messages, the instructions first.

        Args:
            place: where the messages stand in the body.
            instructions: what comes before all other instructions.

        Raises:
            ApiError: 400 for no messages, or calls whose results are missing at the end.
        """
        if not self.messages:
            raise bad_request(
                f"{place} has no message to answer; at least one is needed.", place, "invalid_value"
            )
        if missing := self._calls.keys() - set(self._answered()):
            raise bad_request(
                f"{place} ends without the result of the call {shown(min(missing))}, which an answer needs.",
                place,
                "invalid_value",
            )
        texts = [*([] if instructions is None else [instructions]), *self._instructions]
        if not texts:
            return self.messages
        return [{"role": "system", "content": PARAGRAPH.join(texts)}, *self.messages]
