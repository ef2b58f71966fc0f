"""One request to a session: prompt, answer, calls of tools and their results, until there is an answer to
return."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from afm_mlx.adapters.registry import AdapterChoice
from afm_mlx.engine.request import Request
from afm_mlx.errors import ConstraintError, ContextLengthError, IncompleteError, shown
from afm_mlx.fm.answer import Answer
from afm_mlx.fm.answer_form import AnswerForm
from afm_mlx.fm.context_window import made_to_fit
from afm_mlx.fm.error_translation import translated
from afm_mlx.fm.errors import DecodingFailureError, GenerationError
from afm_mlx.fm.generation_schema import with_whole_patterns
from afm_mlx.fm.shared_model import SharedModel
from afm_mlx.fm.tool import Tool
from afm_mlx.fm.tool_calls import run_calls
from afm_mlx.fm.transcript import Transcript
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.guidance.tool_calls import tool_call_constraint
from afm_mlx.tokenizer.chat_messages import parse_tool_calls
from afm_mlx.tokenizer.vocabulary import EXECUTABLE_END, EXECUTABLE_START


@dataclass
class Asked:
    """How a request is to be answered.

    Args:
        form: text, or JSON under a schema.
        options: fields of the engine's `Request`.
        adapter: the adapter that answers; None for the model alone.
        tool_choice: "auto", "none", "required", or the name of a tool.
        max_tool_rounds: answers with calls of tools at most; the next one is text.
        tool_errors: "model" lets the model read what a tool raises, "raise" ends the request with it.
        context_policy: what happens when the context is full, see `context_window`.
        logprobs: number of most likely tokens to keep for each token; None for no log-probabilities.
        tool_context: the context in which tools run.
    """

    form: AnswerForm
    options: Mapping[str, Any]
    adapter: AdapterChoice | None = None
    tool_choice: str = "auto"
    max_tool_rounds: int = 0
    tool_errors: str = "model"
    context_policy: str = "error"
    logprobs: int | None = None
    tool_context: contextvars.Context = field(default_factory=contextvars.copy_context)


class Turn:
    """A request under way. It changes nothing of the session.

    Args:
        shared: the model, loaded.
        draft: the session's history with the new prompt, to which calls and results are added.
        tools: tools that may be called, by their names.
        asked: how to answer.

    Attributes:
        draft: the history; the answer itself is not in it.
        answer: the last one that the model gave, so far.
    """

    def __init__(
        self,
        shared: SharedModel,
        draft: Transcript,
        tools: Mapping[str, Tool],
        asked: Asked,
    ):
        self._shared, self._tools, self._asked = shared, tools, asked
        self._definitions = [tool.tool_definition for tool in tools.values()]
        self.draft = draft
        self.answer = Answer()

    async def texts(self) -> AsyncGenerator[str, None]:
        """Yield the answer's text so far, again and again; calls of tools are made, and not part of it.

        Raises:
            FoundationModelsError: when there can't be an answer.
        """
        rounds = self._asked.max_tool_rounds
        choice = self._asked.tool_choice if self._tools else "none"
        for round in range(rounds + 1):
            choice = "none" if round == rounds else choice
            async with aclosing(self._generated(await self._constraint(choice))) as texts:
                async for text in texts:
                    yield text if choice == "none" else text.partition(EXECUTABLE_START)[0]
            if choice == "none" or not await self._make_calls():
                return
            choice = "auto"  # what was required has been done

    async def _constraint(self, choice: str) -> Constraint | None:
        """What the next answer must look like.

        Raises:
            GenerationError: where no tools can be called, or not these.
        """
        form = self._asked.form
        if choice == "none":  # no calls, where the model has read of tools
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
        """Make the calls of the last answer; returns whether there were any."""
        if self._shared.tokenizer.convert_tokens_to_ids(EXECUTABLE_START) not in self.answer.tokens:
            return False  # text may have the name of the mark
        said, _, rest = self.answer.text.partition(EXECUTABLE_START)
        with translated(DecodingFailureError):
            calls = parse_tool_calls(rest.rpartition(EXECUTABLE_END)[0] or rest)
        ids = self.draft.add_tool_calls(calls, said)
        results = await run_calls(
            calls, self._tools, self._asked.tool_context, self._asked.tool_errors == "raise"
        )
        for call, call_id, text in zip(calls, ids, results, strict=True):
            self.draft.add_tool_output(call_id, call["name"], text)
        return True

    async def _generated(self, constraint: Constraint | None) -> AsyncGenerator[str, None]:
        """Generate an answer to the draft; yield its text so far, and keep what is known of it."""
        with translated():
            if self._asked.context_policy != "error":
                await self._make_room()
            prompt = self._prompt(self.draft)
            size = self._shared.context_size
            if len(prompt) >= size:
                raise ContextLengthError(
                    f"The conversation with this prompt takes {len(prompt)} tokens of {size}, and an answer "
                    "needs some, too. Shorten it, begin a new session, or make the session with "
                    'context_policy="drop_oldest" or "summarize".'
                )
            answer = self.answer = Answer(prompt_tokens=len(prompt))

            request = Request(
                prompt,
                adapter=self._asked.adapter,
                constraint=constraint,
                logprobs=self._asked.logprobs is not None,
                **self._asked.options,
            )
            try:
                async with aclosing(self._shared.engine.stream(request)) as responses:
                    async for response in responses:
                        answer.take(response, self._shared.tokenizer, self._asked.logprobs)
                        if response.text:
                            yield answer.text
                self._check_calls(answer)
            except IncompleteError as error:
                if len(prompt) + len(answer.tokens) < size:
                    raise
                raise ContextLengthError(str(error)) from error

    def _check_calls(self, answer: Answer) -> None:
        """Raise `IncompleteError` for a call of a tool that was cut off.

        Completed, it would have arguments that the model has not chosen.
        """
        start, end = map(
            self._shared.tokenizer.convert_tokens_to_ids, (EXECUTABLE_START, EXECUTABLE_END)
        )
        if self._tools and start in answer.tokens and end not in answer.tokens:
            raise IncompleteError(
                f"The answer ended after {len(answer.tokens)} tokens, in the middle of a call of a tool, which "
                f"was not made. Raise maximum_response_tokens. So far it is: {shown(answer.text)}",
                answer.text,
            )

    def _prompt(self, history: Transcript) -> list[int]:
        messages, _ = history.messages()
        return self._shared.encode_chat(messages, self._definitions, add_generation_prompt=True)

    async def _make_room(self) -> None:
        self.draft = await made_to_fit(
            self.draft,
            lambda history: len(self._prompt(history)),
            self._shared.context_size,
            self._asked.options["max_tokens"],
            self._summary if self._asked.context_policy == "summarize" else None,
        )

    async def _summary(self, history: Transcript, max_tokens: int) -> str:
        asked = Asked(AnswerForm(), {"max_tokens": max_tokens}, self._asked.adapter)
        turn = Turn(self._shared, history, {}, asked)
        async for _ in turn.texts():
            pass
        return turn.answer.text.strip()
