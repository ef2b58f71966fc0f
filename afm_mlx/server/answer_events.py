"""The events of an answer, which every API makes its response from.

lease = models.lease(request, "afm-nano")
async for event in answer_events(lease, GenerationRequest(messages=[...])):
    ...
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Protocol

from afm_mlx.adapters.registry import AdapterChoice
from afm_mlx.engine.request import MASK64, PromptScores, Request, TokenResponse
from afm_mlx.engine.row import StopStrings
from afm_mlx.errors import AFMError, CheckpointError, IncompleteError
from afm_mlx.guidance.answer_parts import (
    CallArguments,
    CallBegins,
    Part,
    Text,
    Thought,
    splitter_for,
)
from afm_mlx.server.admission import in_thread
from afm_mlx.server.generation_request import (
    GenerationRequest,
    behind_thoughts,
    engine_request,
    form_of_calls,
    logits_processors,
    tools_constraint,
)
from afm_mlx.server.metrics import AnswerClock
from afm_mlx.server.model_registry import ModelLease
from afm_mlx.server.replies import (
    REQUEST_ID,
    ApiError,
    JsonObject,
    api_error,
    bad_request,
    named_event,
)
from afm_mlx.server.served_model import ServedModel, TokenLikelihood

_LOG = logging.getLogger("afm_mlx.server")
_SEED_STEP = 0xD1342543DE82EF95
"""The difference between the seeds of two choices; not the difference between two tokens of a row."""
_MAX_GRAMMARS = 1 << 22
"""Characters of all grammars of one request, which are compiled once for each choice."""
_FORCED_WAIT = 0.01
"""Seconds in which consecutive forced tokens are joined into one event."""


@dataclass(frozen=True)
class PromptScored:
    """The tokens of the prompt, and their log-probabilities except the first's; `index` is always 0."""

    index: int
    tokens: Sequence[int]
    scores: PromptScores


@dataclass(frozen=True)
class TextDelta:
    """The next piece of the text of choice number `index`.

    Args:
        text: empty while the engine holds it back because it may begin a stop string.
        logprobs: log-probabilities of the tokens since the previous `TextDelta`; empty if not requested.
    """

    index: int
    text: str
    logprobs: Sequence[TokenLikelihood] = ()


@dataclass(frozen=True)
class ThoughtDelta:
    """The next piece of what the model thinks before choice number `index`."""

    index: int
    text: str


@dataclass(frozen=True)
class ToolCallBegins:
    """The beginning of call number `call` in choice number `index`, with the call's id and the tool's name."""

    index: int
    call: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallDelta:
    """The next piece of the JSON of a tool call's arguments; `index` and `call` as in `ToolCallBegins`."""

    index: int
    call: int
    arguments: str


@dataclass(frozen=True)
class Ended:
    """The end of choice number `index` after `tokens` tokens.

    Args:
        reason: "stop" for the model's own end or a stop string, "length" for `max_tokens` or a full context
            (JSON is unfinished then), or "tool_calls".
        stop_string: the stop string that ended the choice, if one did.
    """

    index: int
    reason: str
    stop_string: str | None
    tokens: int


@dataclass(frozen=True)
class TokenCounts:
    """Numbers of tokens, and times: the last event of an answer.

    Args:
        cached: tokens of the prompt that the prefix cache had.
        completion: tokens of all choices.
        thought: the tokens among them that are in thoughts.
        drafted: draft tokens, see docs/speculation.md; None if the server drafts none.
        clock: times of the first choice.
    """

    prompt: int
    cached: int
    completion: int
    thought: int = 0
    drafted: int | None = None
    accepted: int = 0
    clock: AnswerClock = field(default_factory=AnswerClock)


Event = (
    PromptScored | TextDelta | ThoughtDelta | ToolCallBegins | ToolCallDelta | Ended | TokenCounts
)


async def answer_events(
    lease: ModelLease, request: GenerationRequest
) -> AsyncGenerator[Event, None]:
    """Answer a request, and yield the events of its choices as they come.

    Events are taken from the engine as fast as they come, however slowly they are read here. Closing the
    generator (`contextlib.aclosing`) or cancelling its task frees the rows before the next decode step.

    The answer waits until the lease's model is loaded. A lease whose answers are all generated ends, however
    slowly they are read here.

    Raises:
        ApiError: before the first event, or after others; it ends the generator.
    """
    queue: asyncio.Queue[Event | ApiError] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    async with lease.answering() as generated:
        served = lease.served
        with served.admission.admitted(request.client, request.n, queue.put_nowait):
            seconds = served.options.timeout
            late = ApiError(
                504, f"The answer was not complete after {seconds:g} s.", code="timeout"
            )
            deadline = loop.call_later(seconds, queue.put_nowait, late)
            tasks: list[asyncio.Task[None]] = []
            try:
                row = await in_thread(lambda: engine_request(served, request), is_admitted=True)
                constraint = request.format.constraint
                if request.tools.definitions:
                    constraint = await in_thread(
                        lambda: tools_constraint(served, request, row.prompt),
                        compiles=True,
                        is_admitted=True,
                    )
                elif constraint is not None:
                    constraint = behind_thoughts(served, request, row.prompt, constraint)
                size = 0 if constraint is None else len(constraint.grammar)
                if request.n > 1 and size * request.n > _MAX_GRAMMARS:
                    raise bad_request(
                        f"n is {request.n}, and the grammar that each answer is held to has {size} characters; "
                        f"together they may have {_MAX_GRAMMARS}. Request fewer answers at a time.",
                        "n",
                    )
                row = replace(row, constraint=constraint)
                if served.options.log_prompts:
                    _LOG.info("Prompt: %r", served.tokenizer.decode(row.prompt))
                choices = [_ChoiceTask(served, request, row, i, queue) for i in range(request.n)]
                tasks += [asyncio.create_task(choice.run()) for choice in choices]
                running = len(choices)
                asyncio.gather(*tasks, return_exceptions=True).add_done_callback(generated)
                while running:
                    event = await queue.get()
                    if isinstance(event, ApiError):
                        raise event
                    running -= isinstance(event, Ended)
                    yield event
                cached = choices[0].cached
                served.metrics.prompt(len(row.prompt), cached)
                yield TokenCounts(
                    len(row.prompt),
                    cached,
                    sum(choice.tokens for choice in choices),
                    sum(choice.thought_tokens for choice in choices),
                    sum(choice.drafted for choice in choices) if served.drafts else None,
                    sum(choice.accepted for choice in choices),
                    choices[0].clock,
                )
            except AFMError as error:
                raise api_error(error, request.prompt_field) from error
            finally:
                deadline.cancel()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)


class EventBuilder(Protocol):
    """Builds an API's reply piece by piece, and the events of its stream.

    Each event must be encoded before the next one is taken, because events hold parts of the reply. Replies
    that are not streamed are built in the same way, so that both are equal.

    Attributes:
        prompt_field: the field of the API's requests that errors of the prompt are about.
    """

    prompt_field: str

    def begin(self) -> Iterator[JsonObject]:
        """Yield the first events."""

    def take(self, event: Event) -> Iterator[JsonObject]:
        """Yield the stream's events for an event of the answer."""


async def encoded_events(
    lease: ModelLease,
    request: GenerationRequest,
    builder: EventBuilder,
    encode: Callable[[JsonObject], bytes] = named_event,
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream, the first ones once the answer has begun; raise as `answer_events`."""
    has_begun = False
    try:
        async with aclosing(answer_events(lease, request)) as parts:
            async for part in parts:
                for each in () if has_begun else builder.begin():
                    yield encode(each)
                has_begun = True
                for each in builder.take(part):
                    yield encode(each)
    except ApiError as error:
        if error.param == request.prompt_field:
            error.param = builder.prompt_field
        raise


def row_error(
    served: ServedModel, adapter: AdapterChoice | None, error: AFMError, field: str
) -> ApiError:
    """Convert the error of a row that runs with an adapter; `field` is the field of its prompt."""
    pool = served.pool
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
    return api_error(error, "model" if "adapter" in str(error) else field)


class _ChoiceTask:
    """Generates choice number `index`, and puts its events, or the error that ends it, into a queue.

    `row` is the engine's request for the first choice, from which the others' differ in the seed.
    """

    def __init__(
        self,
        served: ServedModel,
        request: GenerationRequest,
        row: Request,
        index: int,
        events: asyncio.Queue[Event | ApiError],
    ):
        self._served, self._request, self._index, self._events = served, request, index, events
        form = form_of_calls(served, request) if request.tools.may_call else None
        thinking = request.thinking
        self._shows_thoughts = thinking is not None and thinking.is_shown
        thoughts = None if thinking is None else served.thoughts
        self._splitter = splitter_for(form, request.tools.definitions, thoughts, row.prompt)
        # Stop strings are of the answer, not of the thoughts before it.
        self._stop = StopStrings(row.stop) if thoughts is not None and row.stop else None
        self._stopped = False
        if self._stop is not None:
            row = replace(row, stop=())
        self._calls = 0  # that have begun
        self._answer: list[int] = []
        self.thought_tokens = 0  # the tokens among them that are in thoughts
        self.cached = self.drafted = self.accepted = 0  # numbers of tokens
        self._loop = asyncio.get_running_loop()
        self.clock = AnswerClock()
        self._forced: TextDelta | ToolCallDelta | None = None  # waits for more forced tokens
        self._lost_space = ""  # the engine drops the space that an answer begins with
        self._drops_space = False  # True if that space is not part of the answer
        seed = request.seed
        self._row = replace(
            row,
            seed=None if seed is None else (seed + index * _SEED_STEP) & MASK64,
            logits_processors=logits_processors(served, request, row.prompt),
            on_prefill=self._on_prefill,
            prompt_logprobs=row.prompt_logprobs if index == 0 else None,
            client=request.client,
        )

    @property
    def tokens(self) -> int:
        """Number of the choice's tokens."""
        return len(self._answer)

    def _on_prefill(self, done: int, tokens: int) -> None:
        """Report to the metrics that the prefill has begun. It is a `Request.on_prefill`, for MLX's thread."""
        self._loop.call_soon_threadsafe(self._served.metrics.scheduled, self.clock)

    async def run(self) -> None:
        """Generate the choice; the last event put into the queue is `Ended` or an `ApiError`."""
        reason, request = "abort", self._request
        self._served.metrics.waits()
        try:
            reason = await self._generate()
        except AFMError as error:
            reason = "error"
            self._put(row_error(self._served, request.adapter, error, request.prompt_field))
        except Exception as error:
            reason = "error"
            _LOG.error("An answer to the request %s has failed.", REQUEST_ID.get(), exc_info=error)
            self._put(api_error(error))
        finally:
            self._served.metrics.leaves(self.clock, reason, self.tokens)

    async def _generate(self) -> str:
        reason = "stop"
        try:
            async with aclosing(self._served.engine.stream(self._row)) as responses:
                async for response in responses:
                    self._take(response)
                    reason = response.finish_reason or reason
                    if self._stopped:
                        reason = "stop"
                        break
        except IncompleteError:
            # The constraint is unfinished; finish_reason says so, and the text so far is the answer.
            is_cut = self.tokens >= self._row.max_tokens
            reason = "length" if is_cut else "stop"
        if self._splitter is not None:
            self._put_parts(self._splitter.finish(), [])
        if self._stop is not None and (held := self._stop.flush()):
            self._put(TextDelta(self._index, held))
        stop_string = self._stop_string() if reason == "stop" and self._request.stop else None
        if reason == "stop" and stop_string is None and self._calls:
            reason = "tool_calls"
        if self._served.options.log_prompts:
            _LOG.info("Answer: %r", self._served.tokenizer.decode(self._answer))
        self._put(Ended(self._index, reason, stop_string, self.tokens))
        return reason

    def _take(self, response: TokenResponse) -> None:
        """Put the events of one of the engine's responses into the queue."""
        if (drafts := response.draft_counts) is not None:
            self.drafted, self.accepted = drafts.proposed, drafts.accepted
            self._served.metrics.drafts(drafts)
        token = response.token
        if response.prompt_logprobs is not None:
            self._put(PromptScored(self._index, self._row.prompt, response.prompt_logprobs))
        self.cached = response.cached_tokens
        logprobs: list[TokenLikelihood] = []
        text, is_forced = response.text, response.is_forced
        if token >= 0:
            if not is_forced:
                self._served.metrics.sampled(self.clock)
            if not self._answer and self._served.token_texts.drops_space(
                token, self._row.constraint is not None
            ):
                self._lost_space = " " if self._request.continues else ""
                self._drops_space = not self._request.continues
            self._answer.append(token)
            is_end = token in self._served.tokenizer.eos_token_ids
            split = self._splitter
            in_text = split is None or not (
                split.in_calls
                or split.is_hidden(token)
                or (split.drops_line_breaks and text and not text.strip("\n"))
            )
            top = self._request.logprobs
            if top is not None and in_text and (self._request.with_end or not is_end):
                texts = self._served.token_texts
                likelihood = texts.likelihood(token, response.logprobs, top)
                if self._drops_space and len(self._answer) == 1:
                    likelihood = replace(likelihood, bytes=likelihood.bytes.removeprefix(b" "))
                logprobs = [likelihood]
        if text:
            text, self._lost_space = self._lost_space + text, ""
        if self._splitter is None:
            if text or logprobs:
                self._put(TextDelta(self._index, text, logprobs), is_forced)
            return
        was_thought = self._splitter.in_thought
        self._put_parts(self._splitter.feed(text, token), logprobs, is_forced)
        self.thought_tokens += token >= 0 and (was_thought or self._splitter.in_thought)

    def _put_parts(
        self, parts: Iterable[Part], logprobs: list[TokenLikelihood], is_forced: bool = False
    ) -> None:
        """Put the parts of an answer into the queue, the log-probabilities with the first text."""
        for part in parts:
            match part:
                case Text(text):
                    if self._stopped:
                        return
                    if self._stop is not None:
                        text, self._stopped = self._stop.feed(text)
                    self._put(TextDelta(self._index, text, logprobs), is_forced)
                    logprobs = []
                case Thought(text) if self._shows_thoughts:
                    self._put(ThoughtDelta(self._index, text))
                case CallBegins(name):
                    self._calls += 1
                    call_id = f"call_{uuid.uuid4().hex[:24]}"
                    self._put(ToolCallBegins(self._index, self._calls - 1, call_id, name))
                case CallArguments(text):
                    self._put(ToolCallDelta(self._index, self._calls - 1, text), is_forced)
        if logprobs:
            self._put(TextDelta(self._index, "", logprobs), is_forced)

    def _put(self, event: Event | ApiError, is_forced: bool = False) -> None:
        """Put an event into the queue; events of consecutive forced tokens are joined."""
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
        self._put_forced()
        if is_forced and isinstance(event, TextDelta | ToolCallDelta):
            self._forced = event
            self._loop.call_later(_FORCED_WAIT, self._put_forced)
        else:
            self._events.put_nowait(event)

    def _put_forced(self) -> None:
        if self._forced is not None:
            self._events.put_nowait(self._forced)
            self._forced = None

    def _stop_string(self) -> str | None:
        """Return the stop string that ended the choice, found in its tokens; None if there is none."""
        if self._stop is not None:
            return self._stop.found or None
        tokens = [t for t in self._answer if t not in self._served.tokenizer.eos_token_ids]
        text = self._served.tokenizer.decode(tokens)
        found = [(at, stop) for stop in self._row.stop if (at := text.find(stop)) >= 0]
        return min(found)[1] if found else None
