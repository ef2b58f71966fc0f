"""Sessions: conversations with a model."""

from __future__ import annotations

import asyncio
import contextvars
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from types import EllipsisType
from typing import TYPE_CHECKING, Any

from afm_mlx.adapters.registry import AdapterChoice
from afm_mlx.engine.generation import encode_prompt
from afm_mlx.engine.request import Request
from afm_mlx.errors import shown
from afm_mlx.fm.answer_form import AnswerForm, answer_form
from afm_mlx.fm.core import SystemLanguageModel
from afm_mlx.fm.errors import AssetsUnavailableError, ConcurrentRequestsError, translated
from afm_mlx.fm.feedback import Issue, Sentiment, feedback_attachment
from afm_mlx.fm.generable import Generable, GenerationID
from afm_mlx.fm.generation_options import GenerationOptions
from afm_mlx.fm.generation_schema import GenerationSchema
from afm_mlx.fm.prompt import Prompt, PromptComponent, prompt_parts, prompt_text
from afm_mlx.fm.tool import Tool
from afm_mlx.fm.transcript import Transcript
from afm_mlx.fm.transcript_entries import Entry
from afm_mlx.fm.turn import POLICIES, Answer, Turn, request_fields

if TYPE_CHECKING:  # imports Pillow
    from afm_mlx.vision.prompt_image import PromptImage

TOOL_ERRORS = ("model", "raise")
TOOL_CHOICES = ("auto", "none", "required", "one")
_PATIENCE = 10
"""Rounds of the event loop within which it closes a stream that was left by `break`."""


class LanguageModelSession:
    """A conversation with a model.

    A session answers one request at a time; others wait in order. Different sessions are answered concurrently,
    in one batch. A turn computes only what is new: keys and values of earlier turns are kept for each adapter.

    Arguments after `tools` go beyond Apple's SDK.

    Args:
        instructions: instructions for the model; pass None or "" for none.
        model: the model; pass None for `SystemLanguageModel()`.
        tools: tools that the model may call, or functions with annotations and a docstring. If several look the
            same to the model, the first is called.
        adapter: the adapter that answers: the name of one of the model's, or weights of several by name, which
            are added up. Pass None for the model alone; the default is the adapter of the model's use case.
        context_policy: what happens if the history leaves too little context for an answer: "error" raises
            `ExceededContextWindowSizeError`; "drop_oldest" drops the oldest turns of the transcript;
            "summarize" replaces them with the model's own summary.
        max_tool_rounds: largest number of answers with tool calls; the next answer is text.
        tool_errors: "model" passes a tool's error to the model as the tool's output; "raise" raises it as
            `ToolCallError`.

    Attributes:
        transcript: the history. It changes when an answer is complete.
        last_answer: tokens, log-probabilities and counts of the last answer; None before the first.

    Raises:
        ValueError: for a policy or a number that is not allowed, and two different tools of one name.
        TypeError: for instructions or a model of another type.
    """

    def __init__(
        self,
        instructions: str | None = None,
        model: SystemLanguageModel | None = None,
        tools: Sequence[Tool | Callable[..., object]] | None = None,
        *,
        adapter: AdapterChoice | EllipsisType | None = ...,
        context_policy: str = "error",
        max_tool_rounds: int = 8,
        tool_errors: str = "model",
    ):
        for name, choice, allowed in (
            ("context_policy", context_policy, POLICIES),
            ("tool_errors", tool_errors, TOOL_ERRORS),
        ):
            if choice not in allowed:
                raise ValueError(f"{name} is {shown(choice)}; allowed are {', '.join(allowed)}.")
        if type(max_tool_rounds) is not int or max_tool_rounds < 0:
            raise ValueError(f"max_tool_rounds is {shown(max_tool_rounds)}; allowed is 0 and more.")
        given: tuple[tuple[str, object, type], ...] = (
            ("instructions", instructions, str),
            ("model", model, SystemLanguageModel),
        )
        for name, value, kind in given:
            if value is not None and not isinstance(value, kind):
                got = type(value).__name__
                raise TypeError(f"{name} has the type {got}; {kind.__name__} is needed.")
        self._model = model or SystemLanguageModel()
        self._tools: dict[str, Tool] = {}
        for one in tools or ():
            tool = one if isinstance(one, Tool) else Tool.from_function(one)
            first = self._tools.setdefault(tool.name, tool)
            if first.tool_definition != tool.tool_definition:
                raise ValueError(
                    f"Two different tools have the name {shown(tool.name)}; each needs its own."
                )
        self._adapter = adapter
        self._policies: dict[str, Any] = {
            "context_policy": context_policy,
            "max_tool_rounds": max_tool_rounds,
            "tool_errors": tool_errors,
        }
        self._lock = _SessionLock()
        self.last_answer: Answer | None = None
        self._failed: tuple[list[Entry], str] | None = None  # entries and error of the last request
        self.transcript = Transcript()
        if instructions or self._tools:
            definitions = [tool.tool_definition for tool in self._tools.values()]
            self.transcript.add_instructions(instructions or "", definitions)

    @classmethod
    def from_transcript(
        cls,
        transcript: Transcript,
        model: SystemLanguageModel | None = None,
        tools: Sequence[Tool | Callable[..., object]] | None = None,
        **options: Any,
    ) -> LanguageModelSession:
        """Make a session that continues a transcript, and adds its turns to it.

        Args:
            transcript: the history, with its instructions. The tools that it names can't be called.
            model: the model; pass None for `SystemLanguageModel()`.
            tools: tools that the model may call from now on.
            options: the other arguments of a session.

        Raises:
            TypeError: if `transcript` is not a `Transcript`, and as a session does.
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

    async def respond(
        self,
        prompt: Prompt,
        generating: type | Generable | None = None,
        *,
        schema: GenerationSchema | None = None,
        json_schema: Mapping[str, object] | None = None,
        options: GenerationOptions | None = None,
        **more: Any,
    ) -> Any:
        """Answer a prompt; return text if there is neither class nor schema.

        Args:
            prompt: text, an `ImageAttachment`, or a list of them.
            generating: a generable class, for an answer that is an instance of it.
            schema, json_schema: a schema, for an answer that is `GeneratedContent`.
            options: how tokens are chosen; pass None for greedy.
            more: the arguments of `stream_response` from `include_schema_in_prompt` on.

        Raises:
            ValueError: for arguments that exclude each other.
            TypeError: for a JSON schema that JSON can't hold.
            PromptError: for a prompt of another type; `ImagePromptError` for an image that can't be read, and
                from a model that reads text only.
            FoundationModelsError: if there can't be an answer. The session doesn't change.
        """
        form = answer_form(generating, schema, json_schema)
        last: tuple[str, object] = ("", None)
        async with aclosing(self._answered(prompt, form, options, **more)) as texts:
            async for last in texts:  # noqa: B007
                pass
        return last[1]

    async def stream_response(
        self,
        prompt: Prompt,
        options: GenerationOptions | None = None,
        *,
        generating: type | Generable | None = None,
        schema: GenerationSchema | None = None,
        json_schema: Mapping[str, object] | None = None,
        include_schema_in_prompt: bool = True,
        adapter: AdapterChoice | EllipsisType | None = ...,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
        tool_choice: str = "auto",
        at_limit: str = "complete",
    ) -> AsyncGenerator[Any, None]:
        """Answer a prompt; yield the whole answer so far each time that it grows.

        A stream that is left early is cancelled: nothing of it is in the transcript, and the session can be
        used again. Other requests to the session wait until the stream has ended.

        Arguments after `options`, and answers other than text, go beyond Apple's SDK.

        Args:
            prompt, generating, schema, json_schema, options: see `respond`, which raises the same errors.
            include_schema_in_prompt: True if the model reads the schema; answers follow it either way.
            adapter: the adapter that answers this prompt; pass None for none. The default is the session's.
            stop: a stop string, or several.
            logprobs: number of most likely tokens that `last_answer` has for each token; pass None for no
                log-probabilities.
            tool_choice: "auto" if the model may call tools, "none" if not; "required" for one or more calls,
                "one" for exactly one call, a tool's name for calls of it, in the first answer.
            at_limit: what happens if `maximum_response_tokens` or a full context ends an answer under a schema:
                "complete" appends the shortest text that makes it valid, and `last_answer.finish_reason` is
                "length"; "error" raises `DecodingFailureError` or `ExceededContextWindowSizeError`. A tool call
                that is cut off is always an error, and not made.

        Yields:
            Texts; for a class, its `PartiallyGenerated` instances; for a schema, `GeneratedContent`, which is
            complete in the end.
        """
        form = answer_form(generating, schema, json_schema)
        answered = self._answered(
            prompt,
            form,
            options,
            include_schema_in_prompt=include_schema_in_prompt,
            adapter=adapter,
            stop=stop,
            logprobs=logprobs,
            tool_choice=tool_choice,
            at_limit=at_limit,
        )
        id, last = GenerationID(), None
        async with aclosing(answered) as texts:
            async for text, value in texts:
                is_complete = value is not None
                so_far = text if form.is_text else form.so_far(text, is_complete)
                # The last snapshot is always yielded, but no text is yielded twice.
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
    ) -> AsyncGenerator[tuple[str, object], None]:
        """Yield (text so far, None) while an answer grows, then (text, value) once the transcript has it."""
        parts = prompt_parts(prompt)
        choices = [*TOOL_CHOICES, *self._tools] if self._tools else ["auto", "none"]
        if tool_choice not in choices:
            has = "" if self._tools else "The session has no tools. "
            raise ValueError(
                f"{has}tool_choice is {shown(tool_choice)}; allowed are {', '.join(choices)}."
            )
        fields = request_fields(options, stop, logprobs, at_limit)
        async with self._lock.held() as hold:
            await self._load()
            chosen = self._chosen(adapter)
            names = [chosen] if isinstance(chosen, str) else chosen or ()
            assets = [self._model._shared.name, *names]
            form = await form.compiled()
            draft = self.transcript.copy()
            shown_format = form.response_format if include_schema_in_prompt else None
            await _add_prompt(draft, parts, shown_format, options, tool_choice)
            hold.mark()
            turn = Turn(
                self._model._shared,
                draft,
                form,
                fields,
                chosen,
                self._tools,
                tool_choice,
                logprobs,
                **self._policies,
            )
            try:
                async with aclosing(turn.texts()) as texts:
                    async for text in texts:
                        hold.mark()  # each text may be requested by another task
                        yield text, None
                text = turn.answer.said
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

    async def _load(self) -> None:
        with translated(AssetsUnavailableError):
            await self._model._shared.load()

    async def complete(
        self,
        text: str,
        options: GenerationOptions | None = None,
        *,
        adapter: AdapterChoice | EllipsisType | None = ...,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
    ) -> str:
        """Continue a text, without instructions, history or chat template; leave the transcript unchanged.

        Args:
            text: the beginning of the text.
            options, adapter, stop, logprobs: see `stream_response`.

        Raises:
            FoundationModelsError: if the text can't be continued.
        """
        text, fields = prompt_text(text), request_fields(options, stop, logprobs)
        await self._load()
        shared, answer = self._model._shared, Answer()
        with translated():
            prompt = encode_prompt(shared.tokenizer, text)
            request = Request(prompt, adapter=self._chosen(adapter), heal=True, **fields)
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
        desired_output: object = None,
    ) -> bytes:
        """Write feedback about the last answer, or about the error in its place, as a line of JSON.

        The framework's Swift method has the same name and arguments; Apple's Python SDK has no such method.

        Args:
            sentiment: a member of `Sentiment` or its value.
            issues: faults in the answer.
            desired_output: a better answer: a text, generated content, an instance of a generable class, or an
                entry of a transcript.

        Raises:
            ValueError, TypeError: for arguments of other kinds.
        """
        failed, error = self._failed or ([], None)
        return feedback_attachment(
            self.transcript, failed, error, sentiment, issues, desired_output
        )

    async def prewarm(self, prompt_prefix: Prompt | None = None) -> None:
        """Load the model, and prefill the history and the beginning of the next prompt, if it is known.

        Raises:
            FoundationModelsError: if the model can't be loaded or run.
        """
        prefix: list[PromptComponent] = (
            [""] if prompt_prefix is None else prompt_parts(prompt_prefix)
        )
        async with self._lock.held():
            await self._load()
            with translated():
                # The end of the message is computed, too, where an image would come last.
                is_open = isinstance(prefix[-1], str)
                prompt, images = await self._tokens(prefix, continue_final_message=is_open)
                request = Request(
                    prompt, max_tokens=1, adapter=self._chosen(), logprobs=False, images=images
                )
                async with aclosing(self._model._shared.engine.stream(request)) as responses:
                    async for _ in responses:
                        pass

    async def token_count(self, prompt: Prompt | None = None) -> int:
        """Count the tokens of the history, and of a prompt if one is given.

        Raises:
            FoundationModelsError: if the model can't be loaded.
        """
        await self._load()
        with translated():
            if prompt is None and not self.transcript.messages(str)[0] and not self._tools:
                return 0
            ids, _ = await self._tokens(prompt)
            return len(ids)

    async def _tokens(
        self, prompt: Prompt | list[PromptComponent] | None, **options: Any
    ) -> tuple[list[int], tuple[PromptImage, ...]]:
        draft = self.transcript.copy()
        if prompt is not None:
            await _add_prompt(draft, prompt_parts(prompt))
        shared = self._model._shared
        images = await shared.read_images(draft)
        definitions = [tool.tool_definition for tool in self._tools.values()]
        return shared.encode_history(draft, images, definitions, **options)


async def _add_prompt(draft: Transcript, parts: list[PromptComponent], *more: Any) -> None:
    """Add a prompt to a history; its images are read in another thread."""
    if all(isinstance(part, str) for part in parts):
        draft.add_prompt(parts, *more)
    else:
        await asyncio.to_thread(draft.add_prompt, parts, *more)


class _Hold:
    """A request that holds a session's lock."""

    def __init__(self) -> None:
        self._is_active = True

    def mark(self) -> None:
        """Mark the current context, and all tasks started in it, as inside this request until it ends.

        `_SessionLock.held` refuses requests from a marked context, which would wait for themselves. Called
        before this request waits for code of the caller: its tools, and the loop over its stream.
        """
        marks = _marks.get()
        if self not in marks:
            _marks.set(frozenset(hold for hold in marks if hold._is_active) | {self})


_marks: contextvars.ContextVar[frozenset[_Hold]] = contextvars.ContextVar(
    "requests that this context is inside of", default=frozenset()
)


class _SessionLock:
    """An asyncio lock that admits one request at a time, in order of arrival, and refuses deadlocks.

    It serves the tasks of one event loop, and can move to another while nobody holds it. It refuses a request
    that would wait for itself: one in an `async for` over the session's own stream or in one of its tools, also
    in a task that was started there (`gather`, `wait_for`, a `TaskGroup`).
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._loop: weakref.ref[asyncio.AbstractEventLoop] | None = None
        self._hold: _Hold | None = None

    @property
    def is_held(self) -> bool:
        loop = self._loop() if self._loop else None
        # A request that holds the lock in a closed loop can't end.
        return self._lock.locked() and loop is not None and not loop.is_closed()

    @asynccontextmanager
    async def held(self) -> AsyncIterator[_Hold]:
        """Hold the lock while the context is open.

        Raises `ConcurrentRequestsError` if the request that holds it waits for this one, or is in another loop.
        """
        loop = asyncio.get_running_loop()
        if self._loop is None or self._loop() is not loop:
            if self.is_held:
                raise ConcurrentRequestsError(
                    "The session answers a request in another event loop. Use it in one loop at a time."
                )
            self._lock, self._loop, self._hold = asyncio.Lock(), weakref.ref(loop), None
        for _ in range(_PATIENCE):
            if self._hold not in _marks.get():
                break
            await asyncio.sleep(0)
        else:
            raise ConcurrentRequestsError(
                "The session answers a request that waits for this one, which comes from the loop over its "
                "stream, from one of its tools, or from a task that was started there. Use another session, or "
                "wait until the request has ended."
            )
        async with self._lock:
            hold = self._hold = _Hold()
            try:
                yield hold
            finally:
                hold._is_active = False
                if self._hold is hold:
                    self._hold = None
