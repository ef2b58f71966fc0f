"""One request to a session: prompt, answer, tool calls and their outputs, until there is a final answer.

If the history leaves too little context for the answer, `fit_to_context` drops or summarizes the oldest turns.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
from bisect import bisect_left
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from afm_mlx.adapters.registry import AdapterChoice
from afm_mlx.engine.request import MASK64, Request, TokenResponse
from afm_mlx.engine.samplers import make_sampler
from afm_mlx.errors import ConstraintError, ContextLengthError, IncompleteError, shown
from afm_mlx.fm.answer_form import AnswerForm
from afm_mlx.fm.core import SharedModel
from afm_mlx.fm.errors import DecodingFailureError, GenerationError, ToolCallError, translated
from afm_mlx.fm.generable import GeneratedContent
from afm_mlx.fm.generation_options import GenerationOptions, SamplingModeType
from afm_mlx.fm.generation_schema import with_whole_patterns
from afm_mlx.fm.tool import Tool
from afm_mlx.fm.transcript import Transcript, joined
from afm_mlx.fm.transcript_entries import JSON
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.guidance.tool_calls import tool_call_constraint
from afm_mlx.tokenizer.chat_messages import parse_tool_calls
from afm_mlx.tokenizer.protocol import Tokenizer
from afm_mlx.tokenizer.vocabulary import EXECUTABLE_END, EXECUTABLE_START

POLICIES = ("error", "drop_oldest", "summarize")
SUMMARY_PROMPT = "Summarize our conversation so far."

# Answers


@dataclass(frozen=True)
class TokenLogprob:
    """A token of an answer, and its log-probability.

    Args:
        token: the token's id.
        text: the token's piece of the vocabulary.
        logprob: natural logarithm of the token's probability; 0 if a schema allowed no other token.
        top: the most likely tokens in its place as (id, piece, log-probability), most likely first.
    """

    token: int
    text: str
    logprob: float
    top: list[tuple[int, str, float]] = field(default_factory=list)


@dataclass
class Answer:
    """A model's answer to one prompt.

    Args:
        text: the whole text, tool calls included.
        prompt_tokens: tokens of the whole conversation before the answer.
        computed_tokens: prompt tokens that were prefilled; the others came from the prefix cache.
        tokens: ids of the answer's tokens.
        finish_reason: "stop" at the answer's own end or a stop string, "length" at `maximum_response_tokens`.
        logprobs: log-probabilities of each token; empty if they weren't requested.
    """

    text: str = ""
    prompt_tokens: int = 0
    computed_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def take(self, response: TokenResponse, tokenizer: Tokenizer, top: int | None) -> None:
        """Add the engine's next response.

        Args:
            response: the response.
            tokenizer: has the vocabulary's pieces.
            top: number of most likely tokens to keep for each token; None for no log-probabilities.
        """
        self.text += response.text
        self.computed_tokens = self.prompt_tokens - response.cached_tokens
        self.finish_reason = response.finish_reason
        token = response.token
        if token < 0:
            return
        self.tokens.append(token)
        if top is None:
            return
        piece = tokenizer.convert_ids_to_tokens
        if response.logprobs is None:
            self.logprobs.append(TokenLogprob(token, piece(token), 0.0))
            return
        values = np.array(response.logprobs)
        likeliest = np.argpartition(-values, min(top, values.size - 1))[:top]
        likeliest = likeliest[np.argsort(-values[likeliest], kind="stable")]
        found = [(int(t), piece(int(t)), float(values[t])) for t in likeliest]
        self.logprobs.append(TokenLogprob(token, piece(token), float(values[token]), found))


def check_logprobs(top: object) -> None:
    """Raise `ValueError` if `logprobs` is not a valid number of tokens, see `Answer.take`."""
    if top is not None and (type(top) is not int or top < 0):
        raise ValueError(f"logprobs is {shown(top)}; allowed are 0 and more, and None for none.")


def request_fields(
    options: GenerationOptions | None, stop: str | Sequence[str] = (), at_limit: str = "complete"
) -> dict[str, Any]:
    """Convert options to fields of the engine's `Request`.

    Decoding is greedy without options. A temperature, or `SamplingMode.random`, draws tokens; without a
    temperature, at 1.

    Args:
        options: the options; None for none.
        stop: a stop string, or several.
        at_limit: see `Request`.

    Raises:
        TypeError: for options or a `stop` of another type.
        ValueError: for options that were changed to invalid values.
        GenerationError: for options that no sampler can have.
    """
    options = GenerationOptions() if options is None else options
    if not isinstance(options, GenerationOptions):
        raise TypeError(f"options must be GenerationOptions, got {shown(options)}.")
    if not isinstance(stop, Sequence):
        raise TypeError(f"stop must be a string or a list of strings, got {shown(stop)}.")
    options = replace(options)  # checks values that were set after it was made
    limit = options.maximum_response_tokens
    fields: dict[str, Any] = {
        "max_tokens": -1 if limit is None else limit,
        "stop": [stop] if isinstance(stop, str) else list(stop),
        "at_limit": at_limit,
    }
    mode, temperature = options.sampling, options.temperature
    is_random = (
        temperature is not None if mode is None else mode.mode_type is SamplingModeType.RANDOM
    )
    if not is_random:
        return fields
    top = mode.top if mode else None
    threshold = mode.probability_threshold if mode else None
    seed = mode.seed if mode else None
    if threshold == 0:  # only the most likely token
        top, threshold = 1, None
    with translated():
        sampler = make_sampler(
            temp=1.0 if temperature is None else temperature, top_k=top or 0, top_p=threshold or 0.0
        )
    return {**fields, "sampler": sampler, "seed": None if seed is None else seed & MASK64}


# Turns


@dataclass
class TurnOptions:
    """How a request to a session is answered.

    Args:
        form: text, or JSON under a schema.
        fields: fields of the engine's `Request`, see `request_fields`.
        adapter: the adapter that answers; None for the model alone.
        tool_choice: "auto", "none", "required", "one", or the name of a tool.
        max_tool_rounds: largest number of answers with tool calls; the next answer is text.
        tool_errors: "model" passes a tool's error to the model as the tool's output; "raise" ends the request.
        context_policy: one of `POLICIES`, for a history that leaves too little context, see `fit_to_context`.
        logprobs: number of most likely tokens to keep for each token; None for no log-probabilities.
        tool_context: the context in which tools run.
    """

    form: AnswerForm
    fields: Mapping[str, Any]
    adapter: AdapterChoice | None = None
    tool_choice: str = "auto"
    max_tool_rounds: int = 0
    tool_errors: str = "model"
    context_policy: str = "error"
    logprobs: int | None = None
    tool_context: contextvars.Context = field(default_factory=contextvars.copy_context)


class Turn:
    """A running request. It changes nothing of the session.

    Args:
        shared: the model, loaded.
        draft: the session's history with the new prompt; tool calls and outputs are added to it.
        tools: tools that may be called, by name.
        options: how to answer.

    Attributes:
        draft: the history, without the final answer.
        answer: the model's latest answer, as far as it is generated.
    """

    def __init__(
        self,
        shared: SharedModel,
        draft: Transcript,
        tools: Mapping[str, Tool],
        options: TurnOptions,
    ):
        self._shared, self._tools, self._options = shared, tools, options
        self._definitions = [tool.tool_definition for tool in tools.values()]
        self.draft = draft
        self.answer = Answer()

    async def texts(self) -> AsyncGenerator[str, None]:
        """Yield the answer's text so far as it grows; make the model's tool calls on the way.

        Raises:
            FoundationModelsError: if there can't be an answer.
        """
        rounds = self._options.max_tool_rounds
        choice = self._options.tool_choice if self._tools else "none"
        for round in range(rounds + 1):
            choice = "none" if round == rounds else choice
            async with aclosing(self._generated(await self._constraint(choice))) as texts:
                async for text in texts:
                    yield text if choice == "none" else text.partition(EXECUTABLE_START)[0]
            if choice == "none" or not await self._make_calls():
                return
            choice = "auto"  # the required call has been made

    async def _constraint(self, choice: str) -> Constraint | None:
        """Compile the constraint of the next answer.

        Raises:
            GenerationError: if the model can't call tools, or not these.
        """
        form = self._options.form
        if choice == "none":  # a model that has read of tools must not call them
            return Constraint.text() if form.is_text and self._tools else form.constraint
        if not getattr(self._shared.tokenizer, "has_tool_calling", False):
            raise GenerationError(
                f"The model {self._shared.name} can't call tools: its tokenizer has no "
                f"{EXECUTABLE_START} and {EXECUTABLE_END}. Make the session without tools."
            )
        definitions = with_whole_patterns(self._definitions)
        try:
            return await asyncio.to_thread(
                tool_call_constraint, definitions, choice, form.constraint
            )
        except ConstraintError as error:
            raise GenerationError(str(error)) from error

    async def _make_calls(self) -> bool:
        """Make the last answer's tool calls; return True if it has any."""
        if self._shared.tokenizer.convert_tokens_to_ids(EXECUTABLE_START) not in self.answer.tokens:
            return False  # text may have the marker's name
        said, _, rest = self.answer.text.partition(EXECUTABLE_START)
        with translated(DecodingFailureError):
            calls = parse_tool_calls(rest.rpartition(EXECUTABLE_END)[0] or rest)
        ids = self.draft.add_tool_calls(calls, said)
        outputs = await _run_calls(
            calls, self._tools, self._options.tool_context, self._options.tool_errors == "raise"
        )
        for call, call_id, text in zip(calls, ids, outputs, strict=True):
            self.draft.add_tool_output(call_id, call["name"], text)
        return True

    async def _generated(self, constraint: Constraint | None) -> AsyncGenerator[str, None]:
        """Generate an answer to the draft; yield its text so far."""
        options, tokenizer = self._options, self._shared.tokenizer
        size = self._shared.context_size
        with translated():
            if options.context_policy != "error":
                self.draft = await fit_to_context(
                    self.draft,
                    lambda history: len(self._prompt(history)),
                    size,
                    options.fields["max_tokens"],
                    self._summary if options.context_policy == "summarize" else None,
                )
            prompt = self._prompt(self.draft)
            if len(prompt) >= size:
                raise ContextLengthError(
                    f"The conversation with this prompt takes {len(prompt)} tokens of {size}, and an answer "
                    "needs some, too. Shorten it, begin a new session, or make the session with "
                    'context_policy="drop_oldest" or "summarize".'
                )
            answer = self.answer = Answer(prompt_tokens=len(prompt))
            request = Request(
                prompt,
                adapter=options.adapter,
                constraint=constraint,
                logprobs=options.logprobs is not None,
                **options.fields,
            )
            try:
                async with aclosing(self._shared.engine.stream(request)) as responses:
                    async for response in responses:
                        answer.take(response, tokenizer, options.logprobs)
                        if response.text:
                            yield answer.text
                start = tokenizer.convert_tokens_to_ids(EXECUTABLE_START)
                end = tokenizer.convert_tokens_to_ids(EXECUTABLE_END)
                if self._tools and start in answer.tokens and end not in answer.tokens:
                    # Completed, the call would have arguments that the model has not chosen.
                    raise IncompleteError(
                        f"The answer ended after {len(answer.tokens)} tokens, in the middle of a tool call, "
                        "which was not made. Raise maximum_response_tokens. The answer so far is: "
                        f"{shown(answer.text)}",
                        answer.text,
                    )
            except IncompleteError as error:
                if len(prompt) + len(answer.tokens) < size:
                    raise
                raise ContextLengthError(str(error)) from error

    def _prompt(self, history: Transcript) -> list[int]:
        messages, _ = history.messages()
        return self._shared.encode_chat(messages, self._definitions, add_generation_prompt=True)

    async def _summary(self, history: Transcript, max_tokens: int) -> str:
        options = TurnOptions(AnswerForm(), {"max_tokens": max_tokens}, self._options.adapter)
        turn = Turn(self._shared, history, {}, options)
        async for _ in turn.texts():
            pass
        return turn.answer.text.strip()


# Tool calls


async def _run_calls(
    calls: Sequence[JSON],
    tools: Mapping[str, Tool],
    context: contextvars.Context,
    raises: bool,
) -> list[str]:
    """Make calls concurrently, and return their outputs as texts.

    Args:
        calls: `name` and `arguments` (a JSON object) of each.
        tools: the tools by name.
        context: the context that the calls run in.
        raises: True to raise a tool's error; False to return it as the tool's output.

    Raises:
        ToolCallError: for the first tool that failed, after all others have ended.
    """
    tasks = [
        asyncio.create_task(_run_call(call, tools, raises), context=context.copy())
        for call in calls
    ]
    try:
        return list(await asyncio.gather(*tasks))
    except GeneratorExit:  # the event loop has ended
        raise
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def _run_call(call: JSON, tools: Mapping[str, Tool], raises: bool) -> str:
    name, task = call["name"], asyncio.current_task()
    try:
        if name not in tools:
            raise LookupError(f"there is no tool {name!r}; there are {', '.join(tools)}.")
        text = _output_text(await tools[name].call(GeneratedContent(call["arguments"])))
    except (Exception, asyncio.CancelledError) as cause:
        error: Exception
        if isinstance(cause, Exception):
            error = cause
        elif task is None or task.cancelling():
            raise
        else:  # something that the tool waited for was cancelled, not the request
            error = RuntimeError(f"cancelled {cause}".strip())
        if raises:
            raise ToolCallError(name, error) from cause
        text = f"Tool error: {error}"
    # Half surrogate pairs, which file names may have, can't be encoded by the tokenizer.
    return text.encode("utf-8", "replace").decode()


def _output_text(result: object) -> str:
    """Write a tool's result as text; as JSON if it is a dict, a list or generated content."""
    if isinstance(result, GeneratedContent):
        return result.to_json()
    if isinstance(result, dict | list):
        try:
            return json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError):
            return str(result)
    return str(result)


# The context window


def reserved_tokens(context_size: int, max_tokens: int) -> int:
    """Return the number of tokens to reserve for an answer: its limit, up to a quarter of the context.

    Args:
        context_size: tokens of the whole context.
        max_tokens: the answer's limit; -1 for none.
    """
    most = context_size // 4
    return most if max_tokens < 0 else min(max_tokens, most)


async def fit_to_context(
    draft: Transcript,
    count: Callable[[Transcript], int],
    context_size: int,
    max_tokens: int,
    summarize: Callable[[Transcript, int], Awaitable[str]] | None,
) -> Transcript:
    """Drop a history's oldest turns if they leave too little context for the answer.

    The instructions and the last turn, which has the new prompt, always stay. If turns are dropped, half of the
    context is freed, so that this does not happen with every prompt.

    Args:
        draft: the history.
        count: counts a history's tokens, up to the answer.
        context_size, max_tokens: see `reserved_tokens`.
        summarize: answers a history that ends with `SUMMARY_PROMPT`, in a number of tokens at most; the summary
            replaces the dropped turns. None for no summary.
    """
    if count(draft) + reserved_tokens(context_size, max_tokens) <= context_size:
        return draft
    before, turns = draft.turns()
    reserved = context_size // 8 if summarize else 0
    target = context_size // 2 - reserved

    def without(first: int) -> Transcript:
        return draft.with_entries([*before, *joined(turns[first:])])

    # Fewer turns have fewer tokens; if even the last turn alone has too many, it alone stays.
    first = bisect_left(range(len(turns) - 1), -target, key=lambda n: -count(without(n)))
    kept = without(first)
    if first == 0 or summarize is None or count(kept) > context_size - 2 * reserved:
        return kept
    # Summarize the newest of the dropped turns that fit.
    for start in range(first):
        history = draft.with_entries([*before, *joined(turns[start:first])])
        history.add_prompt(SUMMARY_PROMPT)
        if count(history) <= context_size - reserved:
            summary = await summarize(history, reserved)
            break
    else:
        return kept
    if not summary:
        return kept
    summarized = draft.with_entries(before)
    summarized.add_prompt(SUMMARY_PROMPT)
    summarized.add_response(summary)
    entries: list[JSON] = joined([before, *summarized.turns()[1], *turns[first:]])
    return draft.with_entries(entries)
