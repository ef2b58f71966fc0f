"""A conversation put together from an API's items or blocks, in the form that chat templates read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from afm_mlx.errors import shown
from afm_mlx.server.errors import bad_request

Message = dict[str, Any]
PARAGRAPH = "\n\n"


class Conversation:
    """Messages in OpenAI's chat form: instructions first, calls in the message of the text before them.

    Results of one answer's calls stand in the order of the calls, however they came: models are not shown the
    ids by which they belong together. The user's texts that come among the results stand behind them.

    Models read instructions at the beginning of a conversation only. Later ones become a part of the user's
    turn at their place, which gives them less weight, never more: a paragraph of the user's message before
    them, or of the one behind them.

    Args:
        earlier: messages that come before all others, as `finished` returned them.
        folds: take late instructions; False refuses them.
    """

    def __init__(self, earlier: Sequence[Message] = (), folds: bool = True):
        self.messages: list[Message] = list(earlier)
        self._folds = folds
        self._instructions: list[str] = []
        # Of the last answer: its calls in their order, the results that are there, and what came among these.
        self._calls: list[Message] = []
        self._results: dict[str, Message | None] = {}
        self._has_results = False
        self._waiting: list[tuple[Callable[[str, str], None], str, str]] = []
        self._paragraphs: list[str] = []  # of the last message, the user's, when it is several
        self._awaits_text = (
            False  # the last message is a late instruction that the user's next text joins
        )
        if self.messages and self.messages[0]["role"] == "system":
            self._instructions.append(self.messages.pop(0)["content"])
        if self.messages and self.messages[-1]["role"] == "assistant":
            last = self.messages.pop()
            self.messages.append({**last})  # which may come to have more calls
            self._begin_calls(last.get("tool_calls", ()))

    def add_system(self, text: str, place: str) -> None:
        """Add instructions; `place` is where the text stands in the body.

        Raises:
            ApiError: 400 for late ones where they are refused.
        """
        if not self.messages:
            self._instructions.append(text)
        elif not self._folds:
            raise bad_request(
                f"{place} has instructions within a conversation, which this model can't be given. Put them "
                "before all other messages.",
                place,
                "unsupported_value",
            )
        elif self._lacks_results:
            self._waiting.append((self.add_system, text, place))
        else:
            self._end_calls(place)
            is_first = self.messages[-1]["role"] != "user"
            self._add_user(text, joins=not is_first)
            self._awaits_text = is_first or self._awaits_text

    def add_user(self, text: str, place: str) -> None:
        """Add what the user has said; `place` is where the text stands in the body."""
        if self._lacks_results:
            self._waiting.append((self.add_user, text, place))
            return
        self._end_calls(place)
        self._add_user(text, joins=self._awaits_text)
        self._awaits_text = False

    def _add_user(self, text: str, joins: bool) -> None:
        if not joins:
            self._end_user()
            self.messages.append({"role": "user", "content": text})
            return
        if not self._paragraphs:
            self.messages[-1] = {**self.messages[-1]}
            self._paragraphs.append(self.messages[-1]["content"])
        self._paragraphs.append(text)

    def _end_user(self) -> None:
        """Join the paragraphs of the user's message: one by one, many would take quadratic time."""
        if self._paragraphs:
            self.messages[-1]["content"] = PARAGRAPH.join(self._paragraphs)
            self._paragraphs = []

    def add_answer(self, text: str, place: str) -> None:
        """Add what the assistant has said; `place` is where the text stands in the body.

        Raises:
            ApiError: 400 behind a call that has no result.
        """
        self._end_calls(place)
        self._end_user()
        self._awaits_text = False
        self.messages.append({"role": "assistant", "content": text})

    def add_call(
        self, call_id: str, name: str, arguments: str | None, place: str, arguments_place: str = ""
    ) -> None:
        """Add a call to the assistant's message that it stands behind, or to a message of its own.

        Args:
            call_id, name: the call's id and the tool's name.
            arguments: JSON of an object; None and an empty text are one without arguments.
            place, arguments_place: where the id and the arguments stand in the body.

        Raises:
            ApiError: 400 for an id that another call of the answer has, for arguments that are no JSON, or
                while results are missing.
        """
        if self._has_results or not self.messages or self.messages[-1]["role"] != "assistant":
            self.add_answer("", place)
        if call_id in self._results:
            raise bad_request(
                f"{place} is {shown(call_id)}, as of another call; each needs an id of its own.",
                place,
                "invalid_value",
            )
        arguments = (arguments or "").strip() or "{}"
        try:
            msgspec.json.decode(arguments, type=dict)
        except (msgspec.DecodeError, RecursionError) as error:
            raise bad_request(
                f"{arguments_place} is {shown(arguments)}, which is no JSON object ({error}). Send the "
                "arguments as the answer had them; leave a call out that was cut off.",
                arguments_place,
                "invalid_value",
            ) from None
        function = {"name": name, "arguments": arguments}
        self._calls.append({"id": call_id, "type": "function", "function": function})
        self._results[call_id] = None
        self.messages[-1]["tool_calls"] = self._calls

    def add_result(self, call_id: str, text: str, place: str) -> None:
        """Add what a call of the last answer has returned.

        Raises:
            ApiError: 400 when there is no such call, or it has a result already.
        """
        if call_id not in self._results or self._results[call_id] is not None:
            is_known = call_id in self._results
            why = "has a result already" if is_known else "the answer before it didn't make"
            raise bad_request(
                f"{place} is {shown(call_id)}, a call that {why}.", place, "invalid_value"
            )
        self._has_results = True
        self._results[call_id] = {"role": "tool", "tool_call_id": call_id, "content": text}

    def _begin_calls(self, calls: Sequence[Message]) -> None:
        self._calls = list(calls)
        self._results = dict.fromkeys(call["id"] for call in calls)
        self._has_results = False

    @property
    def _lacks_results(self) -> bool:
        return None in self._results.values()

    def _end_calls(self, place: str) -> None:
        """Add the results of the last answer's calls, in the order of the calls, and what came among them."""
        for call_id, result in self._results.items():
            if result is None:
                place = self._waiting[0][2] if self._waiting else place
                raise bad_request(
                    f"{place}: the call {shown(call_id)} has no result before it. Results come right behind "
                    "all calls of an answer, and an answer's text before its calls.",
                    place,
                    "invalid_value",
                )
            self.messages.append(result)
        self._begin_calls(())
        waiting, self._waiting = self._waiting, []
        for add, text, where in waiting:
            add(text, where)

    def finished(self, place: str, instructions: str | None = None) -> list[Message]:
        """All messages, the instructions first.

        Args:
            place: where the messages stand in the body.
            instructions: what comes before all other instructions.

        Raises:
            ApiError: 400 for no messages, or calls whose results are missing at the end.
        """
        if not self.messages and not self._instructions:
            raise bad_request(
                f"{place} has no message to answer; at least one is needed.", place, "invalid_value"
            )
        self._end_calls(place)
        self._end_user()
        texts = [*([] if instructions is None else [instructions]), *self._instructions]
        if not texts:
            return self.messages
        return [{"role": "system", "content": PARAGRAPH.join(texts)}, *self.messages]
