"""Conversations, tools and answer formats in one form, whichever API a request came by.

Messages and tools have the form of OpenAI's chat completions, which chat templates read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from afm_mlx.errors import ConstraintError, did_you_mean, shown
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.server.replies import bad_request

Message = dict[str, Any]
Tool = Mapping[str, Any]
PARAGRAPH = "\n\n"


class ConversationBuilder:
    """Puts messages together: instructions first, tool calls in the message of the text before them.

    Results of an answer's calls are put into the order of the calls, because models are not shown the call ids.
    User texts among the results are put after them.

    Models read instructions only at the beginning of a conversation. Later instructions become a paragraph of
    the user's message before them, or else after them, which gives them less weight, never more.

    Args:
        earlier: messages that come before all others, as `finished` returned them; they are not changed.
        folds: True to accept late instructions, False to refuse them.
    """

    def __init__(self, earlier: Sequence[Message] = (), folds: bool = True):
        self.messages: list[Message] = list(earlier)
        self._folds = folds
        self._instructions: list[str] = []
        # Of the last answer: its calls, their results so far, and texts that came among the results.
        self._calls: list[Message] = []
        self._results: dict[str, Message | None] = {}
        self._has_results = False
        self._deferred: list[tuple[Callable[[str, str], None], str, str]] = []
        self._paragraphs: list[str] = []  # of the user's last message, if it has several
        self._joins_next = False  # the next user text joins the last message, a late instruction
        if self.messages and self.messages[0]["role"] == "system":
            self._instructions.append(self.messages.pop(0)["content"])
        if self.messages and self.messages[-1]["role"] == "assistant":
            last = self.messages.pop()
            self.messages.append({**last})  # a copy, because calls may be added to it
            self._begin_calls(last.get("tool_calls", ()))

    def add_system(self, text: str, place: str) -> None:
        """Add instructions that are at `place` in the body; raise a 400 for late ones if they are refused."""
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
            self._deferred.append((self.add_system, text, place))
        else:
            self._end_calls(place)
            is_first = self.messages[-1]["role"] != "user"
            self._add_user(text, joins=not is_first)
            self._joins_next = is_first or self._joins_next

    def add_user(self, text: str, place: str) -> None:
        """Add a text of the user that is at `place` in the body."""
        if self._lacks_results:
            self._deferred.append((self.add_user, text, place))
            return
        self._end_calls(place)
        self._add_user(text, joins=self._joins_next)
        self._joins_next = False

    def _add_user(self, text: str, joins: bool) -> None:
        if not joins:
            self._join_paragraphs()
            self.messages.append({"role": "user", "content": text})
            return
        if not self._paragraphs:
            self.messages[-1] = {**self.messages[-1]}
            self._paragraphs.append(self.messages[-1]["content"])
        self._paragraphs.append(text)

    def _join_paragraphs(self) -> None:
        """Set the last message's text to its paragraphs; adding each alone would be quadratic."""
        if self._paragraphs:
            self.messages[-1]["content"] = PARAGRAPH.join(self._paragraphs)
            self._paragraphs = []

    def add_answer(self, text: str, place: str, thought: str = "") -> None:
        """Add a text of the assistant, and the `thought` before it; raise a 400 after an open call.

        The text is at `place` in the body.
        """
        self._end_calls(place)
        self._join_paragraphs()
        self._joins_next = False
        self.messages.append({"role": "assistant", "content": text})
        if thought:
            self.messages[-1]["reasoning_content"] = thought

    def add_thought(self, thought: str, place: str) -> None:
        """Add the thought before an answer's calls; one between calls of the same answer is left out."""
        if not self._lacks_results:
            self.add_answer("", place, thought)

    def add_call(
        self, call_id: str, name: str, arguments: str | None, place: str, arguments_place: str = ""
    ) -> None:
        """Add a tool call to the assistant's last message, or to a new one.

        The id is at `place` in the body, and the arguments, a JSON object (or None or "" for an empty one), at
        `arguments_place`.

        Raises:
            ApiError: 400 if another call of the answer has the id, the arguments are not a JSON object, or an
                earlier call has no result.
        """
        if self._has_results or not self.messages or self.messages[-1]["role"] != "assistant":
            self.add_answer("", place)
        if call_id in self._results:
            raise bad_request(
                f"{place} is {shown(call_id)}, as of another call; each needs its own id.",
                place,
                "invalid_value",
            )
        arguments = (arguments or "").strip() or "{}"
        try:
            msgspec.json.decode(arguments, type=dict)
        except (msgspec.DecodeError, RecursionError) as error:
            raise bad_request(
                f"{arguments_place} is {shown(arguments)}, which is no JSON object ({error}). Send the "
                "arguments as the answer had them; leave out a call that was cut off.",
                arguments_place,
                "invalid_value",
            ) from None
        function = {"name": name, "arguments": arguments}
        self._calls.append({"id": call_id, "type": "function", "function": function})
        self._results[call_id] = None
        self.messages[-1]["tool_calls"] = self._calls

    def add_result(self, call_id: str, text: str, place: str) -> None:
        """Add the result of a call of the last answer, whose id is at `place`; raise a 400 for any other id."""
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
        """Add the results of the last answer's calls in the order of the calls, then the deferred texts."""
        for call_id, result in self._results.items():
            if result is None:
                place = self._deferred[0][2] if self._deferred else place
                raise bad_request(
                    f"{place}: the call {shown(call_id)} has no result before it. Results come directly after "
                    "all calls of an answer, and an answer's text before its calls.",
                    place,
                    "invalid_value",
                )
            self.messages.append(result)
        self._begin_calls(())
        deferred, self._deferred = self._deferred, []
        for add, text, where in deferred:
            add(text, where)

    def finished(self, place: str, instructions: str | None = None) -> list[Message]:
        """Return all messages, with `instructions` before all other instructions.

        Raises:
            ApiError: 400 about `place` in the body if there is no message, or a call has no result.
        """
        if not self.messages and not self._instructions:
            raise bad_request(
                f"{place} has no message to answer; at least one is needed.", place, "invalid_value"
            )
        self._end_calls(place)
        self._join_paragraphs()
        texts = [*([] if instructions is None else [instructions]), *self._instructions]
        if not texts:
            return self.messages
        return [{"role": "system", "content": PARAGRAPH.join(texts)}, *self.messages]


def is_answer(message: Message) -> bool:
    """True if a message is an answer that can be continued."""
    return message.get("role") == "assistant" and not message.get("tool_calls")


# -- tools


def function_tool(name: str, description: str | None, parameters: object) -> Tool:
    """Make a tool definition in OpenAI's chat form, which models were trained on."""
    described = {} if description is None else {"description": description}
    schema = {"type": "object", "properties": {}} if parameters is None else parameters
    return {"type": "function", "function": {"name": name, **described, "parameters": schema}}


@dataclass(frozen=True)
class OfferedTools:
    """The tools that a model is shown, and which of them its answer may or must call.

    Args:
        definitions: tools in OpenAI's chat form.
        choice: "auto", "none", "required", or "one" for exactly one call.
        parallel: True if one answer may have several calls.
        allowed: names of the tools that may be called; pass None for all.
    """

    definitions: Sequence[Tool] = ()
    choice: str = "auto"
    parallel: bool = True
    allowed: Sequence[str] | None = None

    @property
    def callable(self) -> Sequence[Tool]:
        """The definitions of the tools that may be called."""
        if not self.definitions or self.choice == "none":
            return ()
        if self.allowed is None:
            return self.definitions
        return [tool for tool in self.definitions if tool["function"]["name"] in set(self.allowed)]

    @property
    def may_call(self) -> bool:
        """True if the answer may have calls."""
        return bool(self.definitions) and self.choice != "none"


NO_TOOLS = OfferedTools()


def offered_tools(
    tools: Sequence[Tool], choice: str, *, parallel: bool, allowed: Sequence[str] | None = None
) -> OfferedTools:
    """Make `OfferedTools` of the client's fields; its arguments have the same meaning.

    Raises:
        ApiError: 400 if a call is required without tools, or `allowed` has a name that no tool has.
    """
    names = [tool["function"]["name"] for tool in tools]
    known = set(names)
    for name in allowed or ():
        if name not in known:
            raise bad_request(
                f"tool_choice names the tool {shown(name)}{did_you_mean(name, names)}, which tools does not "
                f"have: {', '.join(names) or 'there are none'}.",
                "tool_choice",
                "invalid_value",
            )
    if allowed == [] and choice == "auto":  # only tools of other providers were allowed
        choice, allowed = "none", None
    if (not tools or allowed == []) and choice not in ("auto", "none"):
        raise bad_request(
            "tool_choice requires a call, and there is no tool to call: only functions are. Give one, or leave "
            "out tool_choice.",
            "tool_choice",
            "invalid_value",
        )
    return OfferedTools(tools, choice, parallel, allowed)


# -- answer formats


@dataclass(frozen=True)
class AnswerFormat:
    """What an answer without tool calls must look like.

    Args:
        constraint: what the answer is held to; pass None for free text.
        shown: OpenAI's `response_format`, which chat templates show to the model.
    """

    constraint: Constraint | None = None
    shown: Message | None = None


FREE_TEXT = AnswerFormat()


def schema_format(
    schema: Message, place: str, name: str | None = None, description: str | None = None
) -> AnswerFormat:
    """Make the format of JSON under a schema; raise a 400 about `place` if it can't be enforced.

    The model is shown the name and the description; without a name, the schema's own title and description.
    """
    try:
        constraint = Constraint.json_schema(schema)
    except ConstraintError as error:
        raise bad_request(str(error), place, "invalid_schema") from None
    if name is None:
        name, description = schema.get("title", "answer"), schema.get("description")
    described = {} if description is None else {"description": description}
    shown_schema = {"name": name, **described, "schema": schema}
    return AnswerFormat(constraint, {"type": "json_schema", "json_schema": shown_schema})


def json_object_format() -> AnswerFormat:
    """Make the format of answers that are any JSON object."""
    return AnswerFormat(Constraint.json_schema({"type": "object"}))


def check_format_fits(format: AnswerFormat, messages: Sequence[Message], place: str) -> None:
    """Raise a 400 about `place` if `format` constrains an answer that continues an assistant's last message."""
    if format.constraint is not None and messages[-1]["role"] == "assistant":
        raise bad_request(
            "A format applies to whole answers, and the last message is an answer to continue. Leave out the "
            "last message, or the format.",
            place,
        )
