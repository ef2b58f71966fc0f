"""Sessions: conversations with a model."""

from __future__ import annotations

import contextvars
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from types import EllipsisType
from typing import Any

from afm_mlx.adapters.registry import AdapterChoice
from afm_mlx.engine.generation import encode_prompt
from afm_mlx.engine.request import Request
from afm_mlx.errors import shown
from afm_mlx.fm.answer import Answer, check_logprobs
from afm_mlx.fm.answer_form import AnswerForm, answer_form
from afm_mlx.fm.context_window import POLICIES
from afm_mlx.fm.core import SystemLanguageModel
from afm_mlx.fm.error_translation import translated
from afm_mlx.fm.errors import AssetsUnavailableError
from afm_mlx.fm.feedback import Issue, Sentiment, feedback_attachment
from afm_mlx.fm.generable import Generable, GeneratedContent, GenerationID
from afm_mlx.fm.generation_options import GenerationOptions
from afm_mlx.fm.generation_schema import GenerationSchema
from afm_mlx.fm.prompt import Prompt, prompt_text
from afm_mlx.fm.request_options import request_options
from afm_mlx.fm.session_lock import SessionLock
from afm_mlx.fm.tool import Tool
from afm_mlx.fm.transcript import Transcript
from afm_mlx.fm.transcript_entries import Entry
from afm_mlx.fm.turn import Asked, Turn

TOOL_ERRORS = ("model", "raise")
TOOL_CHOICES = ("auto", "none", "required", "one")


class LanguageModelSession:
    """A conversation with a model.

    One request is answered at a time, and others wait for it, in their order; different sessions are answered
    side by side, in one batch. A turn computes what is new in it: keys and values of the turns before are kept,
    for each adapter its own.

    Arguments after `tools` go beyond Apple's SDK.

    Args:
        instructions: what the model is told before all else; None and "" for nothing.
        model: the model; None for `SystemLanguageModel()`.
        tools: tools that the model may call. A function with annotations and a docstring is one, too. Of
            several that look the same to the model, the first is called.
        adapter: the adapter that answers: the name of one of the model's, or weights of several by their names,
            which are added up. None for the model alone; the default is the adapter of the model's use case.
        context_policy: what happens when the history leaves too little room for an answer: "error" raises
            `ExceededContextWindowSizeError`; "drop_oldest" takes the oldest turns out of the transcript;
            "summarize" puts the model's own summary of them in their place.
        max_tool_rounds: answers with calls of tools at most; the next one is text.
        tool_errors: "model" lets the model read what a tool raises, as its result; "raise" makes it a
            `ToolCallError`.

    Attributes:
        transcript: what was said so far. It changes when an answer is complete.
        last_answer: tokens, log-probabilities and counts of the last answer; None before there is one.

    Raises:
        ValueError: for a policy or a number that is not allowed, and two different tools of one name.
        TypeError: for instructions or a model of another type.
    """

    def __init__(
        self,
        instructions: str | None = None,
        model: SystemLanguageModel | None = None,
        tools: Sequence[Tool | Callable[..., Any]] | None = None,
        *,
        adapter: AdapterChoice | EllipsisType | None = ...,
        context_policy: str = "error",
        max_tool_rounds: int = 8,
        tool_errors: str = "model",
    ):
        for name, value, allowed in (
            ("context_policy", context_policy, POLICIES),
            ("tool_errors", tool_errors, TOOL_ERRORS),
        ):
            if value not in allowed:
                raise ValueError(f"{name} is {shown(value)}; allowed are {', '.join(allowed)}.")
        if type(max_tool_rounds) is not int or max_tool_rounds < 0:
            raise ValueError(f"max_tool_rounds is {shown(max_tool_rounds)}; allowed is 0 and more.")
        _check_type("instructions", instructions, str)
        _check_type("model", model, SystemLanguageModel)
        self._model = model or SystemLanguageModel()
        self._tools = _by_name(tools or ())
        self._adapter = adapter
        self._context_policy = context_policy
        self._max_tool_rounds = max_tool_rounds
        self._tool_errors = tool_errors
        self._lock = SessionLock()
        self.last_answer: Answer | None = None
        self._failed: tuple[list[Entry], str] | None = None  # what became of the last request
        self.transcript = Transcript()
        if instructions or self._tools:
            definitions = [tool.tool_definition for tool in self._tools.values()]
            self.transcript.add_instructions(instructions or "", definitions)

    @classmethod
    def from_transcript(
        cls,
        transcript: Transcript,
        model: SystemLanguageModel | None = None,
        tools: Sequence[Tool | Callable[..., Any]] | None = None,
        **options: Any,
    ) -> LanguageModelSession:
        """A session that goes on from a transcript, which becomes its own.

        Args:
            transcript: the history; instructions are part of it. Tools that it names are history, too.
            model: the model; None for `SystemLanguageModel()`.
            tools: tools that the model may call from now on.
            options: the other arguments of a session.

        Raises:
            TypeError: for a transcript that is none, and as a session does.
        """
        if not isinstance(transcript, Transcript):
            raise TypeError(f"transcript is {shown(transcript)}; a Transcript is needed.")
        session = cls(None, model, tools, **options)
        session.transcript = transcript
        return session

    @property
    def is_responding(self) -> bool:
        """True if a request is being answered."""
        return self._lock.is_held

    # -- answers

    async def respond(
        self,
        prompt: Prompt,
        generating: type[Any] | Generable | None = None,
        *,
        schema: GenerationSchema | None = None,
        json_schema: Mapping[str, Any] | None = None,
        options: GenerationOptions | None = None,
        **more: Any,
    ) -> Any:
        """Answer a prompt.

        Args:
            prompt: text, or a list of texts.
            generating: a generable class: the answer is an instance of it.
            schema, json_schema: the answer is `GeneratedContent` under this schema, which may be JSON.
            options: how tokens are chosen. Without any, they are the most likely ones.
            more: the arguments of `stream_response` from `include_schema_in_prompt` on.

        Returns:
            A text, where neither class nor schema is given.

        Raises:
            ValueError: for arguments that don't go together.
            TypeError: for a JSON schema that JSON can't hold.
            PromptError: for a prompt that is none.
            FoundationModelsError: when there can't be an answer. The session stays as it was.
        """
        form = answer_form(generating, schema, json_schema)
        last: tuple[str, Any] = ("", None)
        async with aclosing(self._answered(prompt, form, options, **more)) as texts:
            async for last in texts:  # noqa: B007
                pass
        return last[1]

    async def stream_response(
        self,
        prompt: Prompt,
        options: GenerationOptions | None = None,
        *,
        generating: type[Any] | Generable | None = None,
        schema: GenerationSchema | None = None,
        json_schema: Mapping[str, Any] | None = None,
        include_schema_in_prompt: bool = True,
        adapter: AdapterChoice | EllipsisType | None = ...,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
        tool_choice: str = "auto",
        at_limit: str = "complete",
    ) -> AsyncGenerator[Any, None]:
        """Answer a prompt, and yield the whole answer so far each time that there is more of it.

        A stream that is left early is cancelled: nothing of it is in the transcript, and the session works on.
        No other request of the session is answered before the stream has ended.

        Arguments after `options` go beyond Apple's SDK, as does all that isn't text.

        Args:
            prompt, generating, schema, json_schema, options: see `respond`.
            include_schema_in_prompt: whether the model reads the schema; its answers follow it in any case.
            adapter: the adapter that answers this prompt, or None for none; the session's if it is left out.
            stop: a string that ends the answer and is not part of it, or several.
            logprobs: number of most likely tokens that `last_answer` has for each token; None for no
                log-probabilities.
            tool_choice: "auto" lets the model call tools or not; "none", "required" and "one" (exactly one
                call) say which; a tool's name demands a call of it. After such a call the model is free.
            at_limit: what becomes of an answer under a schema that `maximum_response_tokens` or a full context
                ends: "complete" appends the shortest text that makes it valid, and `last_answer.finish_reason`
                is "length"; "error" raises `DecodingFailureError` or `ExceededContextWindowSizeError`. A call
                of a tool that is cut off is an error in any case, and not made.

        Yields:
            Texts; of an answer under a schema `PartiallyGenerated` instances of the class, or
            `GeneratedContent` that is complete in the end.

        Raises:
            Exception: as `respond` does.
        """
        form = answer_form(generating, schema, json_schema)
        more: dict[str, Any] = {
            "include_schema_in_prompt": include_schema_in_prompt,
            "adapter": adapter,
            "stop": stop,
            "logprobs": logprobs,
            "tool_choice": tool_choice,
            "at_limit": at_limit,
        }
        id, last = GenerationID(), None
        async with aclosing(self._answered(prompt, form, options, **more)) as texts:
            async for text, value in texts:
                is_complete = value is not None
                so_far = text if form.is_text else form.so_far(text, is_complete)
                # The last snapshot comes in any case, but no text comes twice.
                is_new = so_far != last and so_far not in ("", None)
                if is_new or (is_complete and (last is None or not form.is_text)):
                    last = so_far
                    yield so_far if form.is_text else form.snapshot(so_far, id, is_complete)

    async def _answered(
        self,
        prompt: Prompt,
        form: AnswerForm,
        options: GenerationOptions | None,
        *,
        include_schema_in_prompt: bool = True,
        adapter: AdapterChoice | EllipsisType | None = ...,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
        tool_choice: str = "auto",
        at_limit: str = "complete",
    ) -> AsyncGenerator[tuple[str, Any], None]:
        """Yield the answer's text so far and None; and, when the transcript has it, all of it and its value."""
        text = prompt_text(prompt)
        self._check_tool_choice(tool_choice)
        check_logprobs(logprobs)
        asked = Asked(
            form,
            request_options(options, stop, at_limit),
            tool_choice=tool_choice,
            max_tool_rounds=self._max_tool_rounds,
            tool_errors=self._tool_errors,
            context_policy=self._context_policy,
            logprobs=logprobs,
        )
        async with self._lock.held() as hold:
            await self._ready()
            asked.adapter = self._chosen(adapter)
            asked.form = form = await form.compiled()
            draft = self.transcript.copy()
            shown_format = form.response_format if include_schema_in_prompt else None
            draft.add_prompt(text, shown_format, options, tool_choice)
            hold.mark()
            asked.tool_context = contextvars.copy_context()
            turn = Turn(self._model._shared, draft, self._tools, asked)
            assets = self._assets(asked.adapter)
            try:
                async with aclosing(turn.texts()) as texts:
                    async for text in texts:
                        hold.mark()  # another task may ask for this text than for the one before
                        yield text, None
                text = turn.answer.text
                content = text if form.is_text else form.content(text)
                value = content if isinstance(content, str) else form.value(content)
            except Exception as error:
                turn.draft.add_response(turn.answer.text, assets)
                self._failed = turn.draft.last_turn(), f"{type(error).__name__}: {error}"
                raise
            turn.draft.add_response(content, assets, form.name)
            self.transcript.merge(turn.draft)
            self.last_answer, self._failed = turn.answer, None
        yield text, value

    def _chosen(self, adapter: AdapterChoice | EllipsisType | None = ...) -> AdapterChoice | None:
        """Return the request's adapter, else the session's, else the adapter of the model's use case."""
        for choice in (adapter, self._adapter):
            if not isinstance(choice, EllipsisType):
                return choice
        return self._model.use_case_adapter

    def _check_tool_choice(self, choice: str) -> None:
        allowed = [*TOOL_CHOICES, *self._tools] if self._tools else ["auto", "none"]
        if choice not in allowed:
            has = "" if self._tools else "The session has no tools. "
            raise ValueError(
                f"{has}tool_choice is {shown(choice)}; allowed are {', '.join(allowed)}."
            )

    def _assets(self, adapter: AdapterChoice | None) -> list[str]:
        names = [] if adapter is None else [adapter] if isinstance(adapter, str) else list(adapter)
        return [self._model._shared.name, *names]

    async def _ready(self) -> None:
        """Load the model."""
        with translated(AssetsUnavailableError):
            await self._model._shared.load()

    # -- beyond Apple's SDK

    async def complete(
        self,
        text: str,
        options: GenerationOptions | None = None,
        *,
        adapter: AdapterChoice | EllipsisType | None = ...,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
    ) -> str:
        """Continue a text as it is, without instructions, history or chat template; the transcript stays as it
        is.

        Args:
            text: what the model goes on from.
            options, adapter, stop, logprobs: see `stream_response`.

        Raises:
            FoundationModelsError: when it can't be continued.
        """
        text, fields = prompt_text(text), request_options(options, stop)
        check_logprobs(logprobs)
        await self._ready()
        shared, answer = self._model._shared, Answer()
        with translated():
            request = Request(
                encode_prompt(shared.tokenizer, text),
                adapter=self._chosen(adapter),
                logprobs=logprobs is not None,
                heal=True,
                **fields,
            )
            answer.prompt_tokens = len(request.prompt)
            async with aclosing(shared.engine.stream(request)) as responses:
                async for response in responses:
                    answer.take(response, shared.tokenizer, logprobs)
        self.last_answer = answer
        return answer.text

    def log_feedback_attachment(
        self,
        sentiment: Sentiment | str | None = None,
        issues: Iterable[Issue] = (),
        desired_output: str | GeneratedContent | Entry | Any = None,
    ) -> bytes:
        """Write down what somebody thinks of the last answer, or of the error in its place.

        The result is a line of JSON with the conversation, for a file to which more may be appended. The
        framework's Swift method has the same name and arguments; Apple's Python SDK has no such method.

        Args:
            sentiment: what they think.
            issues: what is wrong.
            desired_output: the answer that was wanted: a text, generated content, an instance of a generable
                class, or an entry of a transcript.

        Raises:
            ValueError, TypeError: for arguments that are none of these.
        """
        failed, error = self._failed or ([], None)
        return feedback_attachment(
            self.transcript, failed, error, sentiment, issues, desired_output
        )

    async def prewarm(self, prompt_prefix: Prompt | None = None) -> None:
        """Load the model, and compute what the next prompt begins with, so that its answer comes sooner.

        Args:
            prompt_prefix: the beginning of the next prompt, as far as it is known.

        Raises:
            FoundationModelsError: when that can't be done.
        """
        text = "" if prompt_prefix is None else prompt_text(prompt_prefix)
        async with self._lock.held():
            await self._ready()
            with translated():
                prompt = self._tokens(text, continue_final_message=True)
                request = Request(prompt, max_tokens=1, adapter=self._chosen(), logprobs=False)
                async with aclosing(self._model._shared.engine.stream(request)) as responses:
                    async for _ in responses:
                        pass

    async def token_count(self, prompt: Prompt | None = None) -> int:
        """Tokens of the context that the history takes, together with a prompt if one is given.

        Raises:
            FoundationModelsError: when the model can't be loaded.
        """
        await self._ready()
        with translated():
            if prompt is None and not self.transcript.messages()[0] and not self._tools:
                return 0
            return len(self._tokens(None if prompt is None else prompt_text(prompt)))

    def _tokens(self, prompt: str | None, **options: Any) -> list[int]:
        draft = self.transcript.copy()
        if prompt is not None:
            draft.add_prompt(prompt)
        messages, _ = draft.messages()
        definitions = [tool.tool_definition for tool in self._tools.values()]
        return self._model._shared.encode_chat(messages, definitions, **options)


def _check_type(name: str, value: Any, allowed: type) -> None:
    if value is not None and not isinstance(value, allowed):
        raise TypeError(
            f"{name} has the type {type(value).__name__}; {allowed.__name__} is needed."
        )


def _by_name(tools: Sequence[Tool | Callable[..., Any]]) -> dict[str, Tool]:
    found: dict[str, Tool] = {}
    for given in tools:
        tool = given if isinstance(given, Tool) else Tool.from_function(given)
        first = found.setdefault(tool.name, tool)
        if first.tool_definition != tool.tool_definition:
            raise ValueError(
                f"Two different tools have the name {shown(tool.name)}; each needs its own."
            )
    return found
