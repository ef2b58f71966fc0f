"""One request to a session: prompt, answer, tool calls and their outputs, until there is a final answer.

If the history leaves too little context for the answer, `fit_to_context` drops or summarizes the oldest turns.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
from bisect import bisect_left
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from afm_mlx.adapters.registry import AdapterChoice
from afm_mlx.engine.request import MASK64, Request, TokenResponse
from afm_mlx.engine.samplers import make_sampler
from afm_mlx.errors import (
    AFMError,
    ConstraintError,
    ContextLengthError,
    IncompleteError,
    TokenizerError,
    shown,
)
from afm_mlx.fm.answer_form import AnswerForm
from afm_mlx.fm.core import HistoryImages, SharedModel
from afm_mlx.fm.errors import DecodingFailureError, GenerationError, ToolCallError, translated
from afm_mlx.fm.generable import GeneratedContent
from afm_mlx.fm.generation_options import GenerationOptions, SamplingMode, SamplingModeType
from afm_mlx.fm.generation_schema import with_whole_patterns
from afm_mlx.fm.tool import Tool
from afm_mlx.fm.transcript import Transcript
from afm_mlx.fm.transcript_entries import JSON
from afm_mlx.guidance.answer_parts import (
    AnySplitter,
    CallArguments,
    CallBegins,
    Text,
    split,
    splitter_for,
)
from afm_mlx.guidance.call_forms import CallForm, call_form
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.guidance.thoughts import after_thoughts, thought_form
from afm_mlx.guidance.tool_calls import tool_call_constraint
from afm_mlx.tokenizer.protocol import Tokenizer

if TYPE_CHECKING:  # imports Pillow
    from afm_mlx.vision.prompt_image import PromptImage

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
        said: the text without tool calls and thoughts.
        calls: names of the called tools, and the pieces of their arguments' JSON.
        prompt_tokens: tokens of the whole conversation before the answer.
        computed_tokens: prompt tokens that were prefilled; the others came from the prefix cache.
        tokens: ids of the answer's tokens.
        finish_reason: "stop" at the answer's own end or a stop string, "length" at `maximum_response_tokens`.
        logprobs: log-probabilities of each token; empty if they weren't requested.
    """

    text: str = ""
    said: str = ""
    calls: list[tuple[str, list[str]]] = field(default_factory=list)
    prompt_tokens: int = 0
    computed_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)

    def take(self, response: TokenResponse, tokenizer: Tokenizer, top: int | None) -> None:
        """Add the engine's next response; `tokenizer` has the pieces of its tokens.

        `top` is the number of most likely tokens to keep for each token; pass None for no log-probabilities.
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

    def take_parts(self, splitter: AnySplitter | None, response: TokenResponse) -> None:
        """Add the parts of the engine's next response; without a splitter, all of it is text."""
        if splitter is None:
            self.said += response.text
            return
        tokens = (response.token, *response.completion)
        for part in split(splitter, response.text, tokens, response.finish_reason is not None):
            match part:
                case Text(text):
                    self.said += text
                case CallBegins(name):
                    self.calls.append((name, []))
                case CallArguments(text):
                    self.calls[-1][1].append(text)


def json_arguments(name: str, text: str) -> Any:
    """Decode the arguments of a call of the tool `name`; raise `TokenizerError` if they are not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(
            f"The model's call of {shown(name)} has arguments that are not JSON ({error}): {shown(text)}."
        ) from None


def request_fields(
    options: GenerationOptions | None,
    stop: str | Sequence[str],
    logprobs: int | None,
    at_limit: str = "complete",
) -> dict[str, Any]:
    """Convert a request's options to fields of the engine's `Request`.

    Decoding is greedy without options. A temperature, or `SamplingMode.random`, draws tokens; without a
    temperature, at 1. The arguments are `stream_response`'s, or `Request`'s.

    Raises:
        TypeError: for options or a `stop` of another type.
        ValueError: for options that were changed to invalid values, and `logprobs` that is not a count.
        GenerationError: for options that no sampler can have.
    """
    if logprobs is not None and (type(logprobs) is not int or logprobs < 0):
        raise ValueError(
            f"logprobs is {shown(logprobs)}; allowed are 0 and more, and None for none."
        )
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
        "logprobs": logprobs is not None,
    }
    mode, temperature = options.sampling, options.temperature
    is_greedy = temperature is None if mode is None else mode.mode_type is SamplingModeType.GREEDY
    if is_greedy:
        return fields
    mode = mode or SamplingMode.random()
    top, threshold, seed = mode.top, mode.probability_threshold, mode.seed
    if threshold == 0:  # only the most likely token
        top, threshold = 1, None
    with translated():
        sampler = make_sampler(
            temp=1.0 if temperature is None else temperature, top_k=top or 0, top_p=threshold or 0.0
        )
    return {**fields, "sampler": sampler, "seed": None if seed is None else seed & MASK64}


# Turns


@dataclass(eq=False)
class Turn:
    """A running request. It changes nothing of the session.

    Args:
        shared: the model, loaded.
        draft: the session's history with the new prompt; tool calls and their outputs are added to it.
        form: text, or JSON under a schema.
        fields: fields of the engine's `Request`, see `request_fields`.
        adapter: the adapter that answers; pass None for the model alone.
        tools: tools that may be called, by name. They run in the context in which the turn was made.
        tool_choice, logprobs: see `LanguageModelSession.stream_response`.
        context_policy, max_tool_rounds, tool_errors: see `LanguageModelSession`.

    Attributes:
        answer: the model's latest answer, as far as it is generated; it is not in the draft.
    """

    shared: SharedModel
    draft: Transcript
    form: AnswerForm
    fields: Mapping[str, Any]
    adapter: AdapterChoice | None
    tools: Mapping[str, Tool] = field(default_factory=dict)
    tool_choice: str = "auto"
    logprobs: int | None = None
    context_policy: str = "error"
    max_tool_rounds: int = 0
    tool_errors: str = "model"

    def __post_init__(self) -> None:
        self.answer = Answer()
        self._definitions = [tool.tool_definition for tool in self.tools.values()]
        self._context = contextvars.copy_context()
        self._images: HistoryImages = {}

    async def texts(self) -> AsyncGenerator[str, None]:
        """Yield the answer's text so far as it grows; make the model's tool calls on the way."""
        rounds = self.max_tool_rounds
        choice = self.tool_choice if self.tools else "none"
        for round in range(rounds + 1):
            choice = "none" if round == rounds else choice
            form = self._form(choice)
            constraint = await self._constraint(choice, form)
            if choice == "none" and form is not None and not form.is_harmony:
                form = None  # all of the answer is text
            async with aclosing(self._generated(constraint, form, choice)) as texts:
                async for text in texts:
                    yield text
            if choice == "none" or not await self._make_calls():
                return
            choice = "auto"  # the required call has been made

    def _form(self, choice: str) -> CallForm | None:
        """Return the form of the model's calls, None if there are no tools.

        Raises `GenerationError` if the model can't call tools, and `choice` lets it.
        """
        if not self.tools:
            return None
        try:
            return call_form(self.shared.tokenizer)
        except AFMError as error:
            if choice == "none":
                return None
            raise GenerationError(str(error)) from error

    async def _constraint(self, choice: str, form: CallForm | None) -> Constraint | None:
        """Compile the next answer's constraint; raise `GenerationError` for tools that can't be called."""
        if form is None:  # a model that has read of tools must not call them
            return Constraint.text() if self.form.is_text and self.tools else self.form.constraint
        definitions = with_whole_patterns(self._definitions)
        try:
            return await asyncio.to_thread(
                tool_call_constraint, definitions, choice, self.form.constraint, form=form
            )
        except ConstraintError as error:
            raise GenerationError(str(error)) from error

    async def _make_calls(self) -> bool:
        """Make the last answer's tool calls, all at once; return True if it has any."""
        if not self.answer.calls:
            return False
        said = self.answer.said
        with translated(DecodingFailureError):
            calls = [
                {"name": name, "arguments": json_arguments(name, "".join(pieces))}
                for name, pieces in self.answer.calls
            ]
        ids = self.draft.add_tool_calls(calls, said)
        tasks = [
            asyncio.create_task(self._output(call), context=self._context.copy()) for call in calls
        ]
        try:
            outputs = await asyncio.gather(*tasks)
        except GeneratorExit:  # the event loop has ended
            raise
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        for call, call_id, text in zip(calls, ids, outputs, strict=True):
            self.draft.add_tool_output(call_id, call["name"], text)
        return True

    async def _output(self, call: JSON) -> str:
        """Call a tool; return its result as text, or its error unless `tool_errors` is "raise"."""
        name, task = call["name"], asyncio.current_task()
        try:
            if name not in self.tools:
                raise LookupError(f"there is no tool {name!r}; there are {', '.join(self.tools)}.")
            result: object = await self.tools[name].call(GeneratedContent(call["arguments"]))
            text = str(result)
            if isinstance(result, GeneratedContent):
                text = result.to_json()
            elif isinstance(result, dict | list):
                with suppress(TypeError, ValueError):
                    text = json.dumps(result, ensure_ascii=False)
        except (Exception, asyncio.CancelledError) as cause:
            error: Exception
            if isinstance(cause, Exception):
                error = cause
            elif task is None or task.cancelling():
                raise
            else:  # something that the tool waited for was cancelled, not the request
                error = RuntimeError(f"cancelled {cause}".strip())
            if self.tool_errors == "raise":
                raise ToolCallError(name, error) from cause
            text = f"Tool error: {error}"
        # Half surrogate pairs, which file names may have, can't be encoded by the tokenizer.
        return text.encode("utf-8", "replace").decode()

    async def _generated(
        self, constraint: Constraint | None, form: CallForm | None, choice: str
    ) -> AsyncGenerator[str, None]:
        """Generate an answer to the draft; yield its text so far, without the thoughts and calls in it.

        Answers under a constraint have no thought, except one that the chat template begins.
        """
        tokenizer, size = self.shared.tokenizer, self.shared.context_size
        with translated():
            self._images = await self.shared.read_images(self.draft)
            if self.context_policy != "error":
                self.draft = await fit_to_context(
                    self.draft,
                    lambda history: len(self._prompt(history)[0]),
                    size,
                    self.fields["max_tokens"],
                    self._summary if self.context_policy == "summarize" else None,
                )
            prompt, images = self._prompt(self.draft)
            if len(prompt) >= size:
                raise ContextLengthError(
                    f"The conversation with this prompt takes {len(prompt)} tokens of {size}, and an answer "
                    "needs some, too. Shorten it, begin a new session, or make the session with "
                    'context_policy="drop_oldest" or "summarize".'
                )
            answer = self.answer = Answer(prompt_tokens=len(prompt))
            thoughts = thought_form(tokenizer)
            splitter = splitter_for(form, self._definitions, thoughts, prompt)
            is_free = self.form.constraint is None and self.tools and choice in ("auto", "none")
            if thoughts is not None and constraint is not None and not is_free:
                constraint = after_thoughts(
                    constraint,
                    thoughts,
                    is_begun=thoughts.is_begun(prompt),
                    may_think=False,
                    is_answer=form is None or choice == "none",
                )
            request = Request(
                prompt,
                adapter=self.adapter,
                constraint=constraint,
                images=images,
                **self.fields,
            )
            try:
                async with aclosing(self.shared.engine.stream(request)) as responses:
                    async for response in responses:
                        answer.take(response, tokenizer, self.logprobs)
                        was_open = splitter is not None and (
                            splitter.is_open or not splitter.in_calls
                        )
                        answer.take_parts(splitter, response)
                        if response.text:
                            yield answer.said
                # The text of the last response has the completion of an answer that was cut off.
                is_cut = answer.finish_reason == "length" and was_open
                if splitter is not None and (
                    splitter.is_open
                    or (is_cut and splitter.in_calls and not splitter.closes(answer.tokens[-1]))
                ):
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

    def _prompt(self, history: Transcript) -> tuple[list[int], tuple[PromptImage, ...]]:
        return self.shared.encode_history(
            history, self._images, self._definitions, add_generation_prompt=True
        )

    async def _summary(self, history: Transcript, max_tokens: int) -> str:
        fields = {"max_tokens": max_tokens, "logprobs": False}
        turn = Turn(self.shared, history, AnswerForm(), fields, self.adapter)
        async for _ in turn.texts():
            pass
        return turn.answer.said.strip()


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
        context_size: tokens of the whole context.
        max_tokens: the answer's limit, -1 for none; up to a quarter of the context is reserved for it.
        summarize: answers a history that ends with `SUMMARY_PROMPT`, given a maximum number of tokens; the
            summary replaces the dropped turns. Pass None for no summary.
    """
    most = context_size // 4
    if count(draft) + (most if max_tokens < 0 else min(max_tokens, most)) <= context_size:
        return draft
    before, turns = draft.turns()
    reserved = context_size // 8 if summarize else 0
    target = context_size // 2 - reserved

    def without(first: int) -> Transcript:
        return draft.with_entries([*before, *chain(*turns[first:])])

    # Fewer turns have fewer tokens; if even the last turn alone has too many, it alone stays.
    first = bisect_left(range(len(turns) - 1), -target, key=lambda n: -count(without(n)))
    kept = without(first)
    if first == 0 or summarize is None or count(kept) > context_size - 2 * reserved:
        return kept
    # Summarize the newest of the dropped turns that fit.
    for start in range(first):
        history = draft.with_entries([*before, *chain(*turns[start:first])])
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
    return draft.with_entries([*before, *chain(*summarized.turns()[1], *turns[first:])])
