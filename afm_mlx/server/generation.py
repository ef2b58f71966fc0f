"""What all APIs share: a request whose fields were checked, and the events of its answer.

async for event in answer(served, Ask(messages=[...])):
    ...
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from afm_mlx.adapters.registry import AdapterChoice
from afm_mlx.engine.request import MASK64, Request, Response
from afm_mlx.errors import AFMError, CheckpointError, IncompleteError
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.guidance.tool_calls import tool_call_constraint
from afm_mlx.server.call_splitter import CallArguments, CallHead, CallSplitter, Said
from afm_mlx.server.errors import ApiError, api_error, bad_request
from afm_mlx.server.metrics import AnswerClock
from afm_mlx.server.request_ids import REQUEST_ID
from afm_mlx.server.sampling import logits_processors, sampler
from afm_mlx.server.served_model import ServedModel, is_answer
from afm_mlx.server.token_texts import TokenLogprob
from afm_mlx.server.workers import in_thread
from afm_mlx.tokenizer.vocabulary import EXECUTABLE_START

_LOG = logging.getLogger("afm_mlx.server")
_SEED_STEP = 0xD1342543DE82EF95
"""Between the seeds of two choices; another number than the one between two tokens of a row."""
_MOST_GRAMMARS = 1 << 22
"""Characters of the grammars of one request's answers at most: each is compiled for itself."""
_FORCED_WAIT = 0.01
"""Seconds in which the forced tokens that come one after the other become one event."""


@dataclass(frozen=True)
class Ask:
    """One request of any API, after its fields were checked.

    Args:
        messages: a chat in OpenAI's form, for the chat template; an answer at its end is continued.
        prompt: or token ids.
        tools: definitions in OpenAI's form.
        tool_choice: "auto", "none", "required", "one", or the name of a tool, see `tool_call_constraint`.
        parallel_tool_calls: whether one answer may have several calls.
        allowed_tools: names of the tools that may be called; None for all. The model reads of all.
        answer: what an answer without calls must look like.
        response_format: shown to the model by its chat template, where it has one.
        adapter: the adapter that answers; None for the model alone.
        max_tokens: new tokens at most; None for the server's default. The context bounds them, too.
        temperature, top_p, top_k, min_p: sampling; None for the server's defaults.
        seed: of the first choice; the others' follow from it. None draws one.
        frequency_penalty, presence_penalty: of tokens in the answer.
        repetition_penalty: of tokens in prompt and answer.
        logit_bias: what is added to logits, by token.
        stop: texts that end the answer.
        n: number of choices.
        logprobs: most likely tokens to tell for each token; None for no log-probabilities.
        client: who asks: key of fairness and of the prefix cache.
    """

    messages: Sequence[Mapping[str, Any]] | None = None
    prompt: Sequence[int] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    allowed_tools: Sequence[str] | None = None
    answer: Constraint | None = None
    response_format: Mapping[str, Any] | None = None
    adapter: AdapterChoice | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: Sequence[str] = ()
    n: int = 1
    logprobs: int | None = None
    client: str = ""

    @property
    def continues(self) -> bool:
        """True if the answer goes on with a text: a prompt, or an answer that the chat ends with."""
        return self.messages is None or is_answer(self.messages[-1] if self.messages else {})

    @property
    def may_call(self) -> bool:
        """True if the answer may have calls of tools."""
        return bool(self.tools) and self.tool_choice != "none"


@dataclass(frozen=True)
class TextDelta:
    """More of a choice's text.

    Args:
        index: the choice.
        text: may be empty, while a stop string may be beginning.
        logprobs: of the tokens since the last delta; empty when they were not asked for.
    """

    index: int
    text: str
    logprobs: Sequence[TokenLogprob] = ()


@dataclass(frozen=True)
class ToolCallBegins:
    """A choice's call of a tool: its number in the choice, its id, and the tool's name."""

    index: int
    call: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallDelta:
    """More of the JSON of a call's arguments."""

    index: int
    call: int
    arguments: str


@dataclass(frozen=True)
class Ended:
    """A choice has ended.

    Args:
        index: the choice.
        reason: "stop" at its own end or a stop string, "length" at `max_tokens` or the end of the context, or
            "tool_calls". What a constraint asks for is unfinished after "length".
        stop_string: the text of `stop` that ended it; None otherwise.
        tokens: number of its tokens.
    """

    index: int
    reason: str
    stop_string: str | None
    tokens: int


@dataclass(frozen=True)
class Usage:
    """The last event.

    Args:
        prompt: tokens of the prompt.
        cached: those of them that were known from earlier prompts.
        completion: new tokens of all choices.
        guessed: tokens that were guessed for the model to check, see docs/speculation.md; None where a server
            guesses none.
        accepted: those of them that were right.
        until_first: seconds until the first choice's first token was drawn; None where none was.
        rate: tokens per second that were drawn for the first choice; None where that can't be told.
    """

    prompt: int
    cached: int
    completion: int
    guessed: int | None = None
    accepted: int = 0
    until_first: float | None = None
    rate: float | None = None


Event = TextDelta | ToolCallBegins | ToolCallDelta | Ended | Usage


async def answer(served: ServedModel, ask: Ask) -> AsyncGenerator[Event, None]:
    """Answer a request, and yield what comes of it.

    The rows are gone before the next step once the iterator is closed (`contextlib.aclosing`), or the task that
    runs it is cancelled. Events are taken from the engine as they come, whether anybody waits for them or not.

    Raises:
        ApiError: before the first event or behind others; nothing follows.
    """
    queue: asyncio.Queue[Event | ApiError] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    with served.admission.admitted(ask.client, ask.n, queue.put_nowait):
        seconds = served.options.timeout
        late = ApiError(504, f"The answer was not there after {seconds:g} s.", code="timeout")
        deadline = loop.call_later(seconds, queue.put_nowait, late)
        tasks: list[asyncio.Task[None]] = []
        try:
            request = await in_thread(lambda: _request(served, ask), is_admitted=True)
            constraint = ask.answer
            if ask.tools:
                constraint = await in_thread(
                    lambda: _constraint(served, ask), compiles=True, is_admitted=True
                )
            _check_grammars(constraint, ask.n)
            request = replace(request, constraint=constraint)
            if served.options.log_prompts:
                _LOG.info("Prompt: %r", served.tokenizer.decode(request.prompt))
            choices = [_Choice(served, ask, request, i, queue) for i in range(ask.n)]
            tasks += [asyncio.create_task(choice.run()) for choice in choices]
            running = len(choices)
            while running:
                event = await queue.get()
                if isinstance(event, ApiError):
                    raise event
                running -= isinstance(event, Ended)
                yield event
            cached = choices[0].cached
            served.metrics.prompt(len(request.prompt), cached)
            yield Usage(
                len(request.prompt),
                cached,
                sum(choice.tokens for choice in choices),
                sum(choice.guessed for choice in choices) if served.guesses else None,
                sum(choice.accepted for choice in choices),
                choices[0].clock.until_first,
                choices[0].clock.rate,
            )
        except ApiError:
            raise
        except AFMError as error:
            raise api_error(error, _field_of(ask)) from error
        finally:
            deadline.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _field_of(ask: Ask) -> str:
    return "prompt" if ask.messages is None else "messages"


def _request(served: ServedModel, ask: Ask) -> Request:
    """The engine's request, for the first choice, without its constraint. This may take a while."""
    if ask.messages is None:
        prompt = list(ask.prompt or ())
    else:
        prompt = served.encode_chat(ask.messages, ask.tools, ask.response_format)
    room = served.context_size - len(prompt)
    if room < 1:
        raise ApiError(
            400,
            f"The prompt has {len(prompt)} tokens, and the context of {served.name} holds "
            f"{served.context_size} with the answer. Shorten it.",
            param=_field_of(ask),
            code="context_length_exceeded",
        )
    if ask.logit_bias and max(ask.logit_bias) >= served.vocab_size:
        raise bad_request(
            f"logit_bias has the token {max(ask.logit_bias)}; this model's go from 0 to "
            f"{served.vocab_size - 1}.",
            "logit_bias",
        )
    max_tokens = served.options.max_tokens if ask.max_tokens is None else ask.max_tokens
    if ask.max_tokens == -1:
        max_tokens = room
    return Request(
        prompt,
        max_tokens=min(max_tokens, room),
        sampler=sampler(ask, served),
        stop=list(ask.stop),
        logprobs=ask.logprobs is not None,
        adapter=ask.adapter,
    )


def _check_grammars(constraint: Constraint | None, n: int) -> None:
    """Refuse more than all answers of a request may have to be compiled, each for itself."""
    size = 0 if constraint is None else len(constraint.grammar)
    if n > 1 and size * n > _MOST_GRAMMARS:
        raise bad_request(
            f"n is {n}, and the grammar that each answer is held to has {size} characters; together they may "
            f"have {_MOST_GRAMMARS}. Ask for fewer answers at a time.",
            "n",
        )


def _constraint(served: ServedModel, ask: Ask) -> Constraint | None:
    """What an answer that may have calls must look like. This may take a while."""
    if not ask.may_call:  # the model has read of tools
        return ask.answer or Constraint.text()
    # Those of mlx-lm's zoo have marks of their own, and other forms of calls.
    if getattr(served.tokenizer, "tool_call_start", None) != EXECUTABLE_START:
        raise bad_request(
            f"The model {served.name} can't call tools: its tokenizer has no {EXECUTABLE_START}. Leave tools "
            "out.",
            "tools",
        )
    tools: Sequence[Mapping[str, Any]] = ask.tools
    if ask.allowed_tools is not None:
        allowed = set(ask.allowed_tools)
        tools = [tool for tool in tools if tool.get("function", tool)["name"] in allowed]
    try:
        return tool_call_constraint(
            tools, ask.tool_choice, ask.answer, parallel=ask.parallel_tool_calls
        )
    except AFMError as error:
        raise bad_request(str(error), "tools") from error


class _Choice:
    """One choice of an answer: takes the engine's responses and makes events of them.

    Args:
        served, ask: what is asked of whom.
        request: the first choice's.
        index: number of the choice.
        events: where its events go, and its error.

    Attributes:
        tokens: number of its tokens so far.
        cached: tokens of the prompt that the prefix cache had.
        guessed: tokens that were guessed for it.
        accepted: those of them that were right.
        clock: when its tokens were drawn.
    """

    def __init__(
        self,
        served: ServedModel,
        ask: Ask,
        request: Request,
        index: int,
        events: asyncio.Queue[Event | ApiError],
    ):
        self._served, self._ask, self._index, self._events = served, ask, index, events
        self._texts = served.token_texts
        self._splitter = CallSplitter() if ask.may_call else None
        self._mark = (
            served.tokenizer.convert_tokens_to_ids(EXECUTABLE_START) if ask.may_call else -1
        )
        self._ids: list[str] = []  # of its calls
        self._answer: list[int] = []
        self.cached = self.guessed = self.accepted = 0
        self._loop = asyncio.get_running_loop()
        self.clock = AnswerClock()
        self._forced: TextDelta | ToolCallDelta | None = None  # not told yet
        self._lost_space = ""  # that the answer begins with, and the engine has dropped
        self._drops_space = False  # whether it begins with one that is no part of the answer
        seed = ask.seed
        if seed is not None:
            seed = (seed + index * _SEED_STEP) & MASK64
        self._request = Request(
            request.prompt,
            max_tokens=request.max_tokens,
            sampler=request.sampler,
            seed=seed,
            logits_processors=logits_processors(ask, request.prompt),
            stop=request.stop,
            logprobs=request.logprobs,
            adapter=request.adapter,
            constraint=request.constraint,
            on_prefill=self._on_prefill,
            client=ask.client,
        )

    @property
    def tokens(self) -> int:
        return len(self._answer)

    def _on_prefill(self, done: int, tokens: int) -> None:
        """Called in MLX's thread."""
        self._loop.call_soon_threadsafe(self._served.metrics.scheduled, self.clock)

    async def run(self) -> None:
        """Generate the choice; whatever happens, the last event says so."""
        reason = "abort"
        self._served.metrics.waits()
        try:
            reason = await self._generated()
        except AFMError as error:
            reason = "error"
            self._tell(self._told(error))
        except Exception as error:
            reason = "error"
            _LOG.error("An answer to the request %s has failed.", REQUEST_ID.get(), exc_info=error)
            self._tell(api_error(error))
        finally:
            self._served.metrics.leaves(self.clock, reason, self.tokens)

    def _told(self, error: AFMError) -> ApiError:
        """What the client reads of an error of the row."""
        adapter, pool = self._ask.adapter, self._served.pool
        if isinstance(error, CheckpointError):
            _LOG.error("The request %s: %s", REQUEST_ID.get(), error)
            return ApiError(
                500,
                f"The adapter {adapter} can't be read: its files are damaged or gone. The server's log says "
                "more.",
                param="model",
                code="adapter_failed",
            )
        if isinstance(adapter, str) and pool is not None and adapter not in pool.registered:
            return ApiError(404, str(error), param="model", code="model_not_found")
        return api_error(error, "model" if "adapter" in str(error) else _field_of(self._ask))

    async def _generated(self) -> str:
        reason = "stop"
        try:
            async with aclosing(self._served.engine.stream(self._request)) as responses:
                async for response in responses:
                    self._take(response)
                    reason = response.finish_reason or reason
        except IncompleteError:
            # The text so far is what was asked for, as far as it goes; finish_reason says that it was cut.
            is_cut = self.tokens >= self._request.max_tokens
            reason = "length" if is_cut else "stop"
        stop_string = self._stop_string() if reason == "stop" and self._request.stop else None
        if reason == "stop" and self._ids and stop_string is None:
            reason = "tool_calls"
        if self._served.options.log_prompts:
            _LOG.info("Answer: %r", self._served.tokenizer.decode(self._answer))
        self._tell(Ended(self._index, reason, stop_string, self.tokens))
        return reason

    def _take(self, response: Response) -> None:
        if (guesses := response.guesses) is not None:
            self.guessed, self.accepted = guesses.proposed, guesses.accepted
            self._served.metrics.guesses(guesses)
        token = response.token
        logprobs: list[TokenLogprob] = []
        text = response.text
        if token >= 0:
            if not response.is_forced:
                self._served.metrics.drawn(self.clock)
            self.cached = response.cached_tokens
            if not self._answer:
                self._begin(token)
            self._answer.append(token)
            is_end = token in self._served.tokenizer.eos_token_ids
            in_text = self._splitter is None or not self._splitter.in_calls
            if self._ask.logprobs is not None and not is_end and in_text and token != self._mark:
                told = self._texts.logprob(token, response.logprobs, self._ask.logprobs)
                if self._drops_space and len(self._answer) == 1:
                    told = replace(told, bytes=told.bytes.removeprefix(b" "))
                logprobs = [told]
        if text:
            text, self._lost_space = self._lost_space + text, ""
        if self._splitter is None:
            if text or logprobs:
                self._tell(TextDelta(self._index, text, logprobs), response.is_forced)
            return
        for part in self._splitter.feed(text, token == self._mark):
            match part:
                case Said(said):
                    self._tell(TextDelta(self._index, said, logprobs), response.is_forced)
                    logprobs = []
                case CallHead(call, name):
                    self._ids.append(f"call_{uuid.uuid4().hex[:24]}")
                    self._tell(ToolCallBegins(self._index, call, self._ids[call], name))
                case CallArguments(call, more):
                    self._tell(ToolCallDelta(self._index, call, more), response.is_forced)
        if logprobs:
            self._tell(TextDelta(self._index, "", logprobs), response.is_forced)

    def _tell(self, event: Event | ApiError, is_forced: bool = False) -> None:
        """Hand an event over; what forced tokens add one after the other is one event."""
        match self._forced, event:
            case TextDelta() as before, TextDelta() if is_forced:
                logprobs = [*before.logprobs, *event.logprobs]
                self._forced = replace(before, text=before.text + event.text, logprobs=logprobs)
                return
            case ToolCallDelta() as before, ToolCallDelta() if (
                is_forced and before.call == event.call
            ):
                self._forced = replace(before, arguments=before.arguments + event.arguments)
                return
        self._tell_forced()
        if is_forced and isinstance(event, TextDelta | ToolCallDelta):
            self._forced = event
            self._loop.call_later(_FORCED_WAIT, self._tell_forced)
        else:
            self._events.put_nowait(event)

    def _tell_forced(self) -> None:
        if self._forced is not None:
            self._events.put_nowait(self._forced)
            self._forced = None

    def _begin(self, token: int) -> None:
        """See whether the engine drops a space: one that is a part of an answer that goes on with a text."""
        if self._texts.drops_space(token, self._request.constraint is not None):
            self._lost_space = " " if self._ask.continues else ""
            self._drops_space = not self._ask.continues

    def _stop_string(self) -> str | None:
        """The stop string that ended the choice; the engine has cut it off."""
        tokens = [t for t in self._answer if t not in self._served.tokenizer.eos_token_ids]
        text = self._served.tokenizer.decode(tokens)
        found = [(at, stop) for stop in self._request.stop if (at := text.find(stop)) >= 0]
        return min(found)[1] if found else None
