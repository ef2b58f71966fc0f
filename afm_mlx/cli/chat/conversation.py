"""A conversation that keeps its keys and values from turn to turn."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.engine.generation import GenerationResponse, stream_generate
from afm_mlx.engine.prompt_cache import PromptCaches
from afm_mlx.errors import AFMError, RequestError, TokenizerError
from afm_mlx.tokenizer.chat_messages import Message, checked_messages


class Conversation:
    """Turns of user and assistant.

    A turn renders the whole conversation and computes what the cache does not hold yet, as a rule the end
    of the last answer and the new question.

    Each adapter has keys and values of its own, for those of another would be wrong. So the first turn after a
    switch computes what the adapter has not seen of the conversation.

    Whatever is raised in a method, Ctrl-C too, leaves the conversation as it was before; an answer that Ctrl-C
    stops stays as far as it came.

    Args:
        model, tokenizer: what `load` returns.
        new_cache: makes an empty cache.
        system_prompt: instructions for all turns.
        adapters: pool of the adapters that may answer.

    Attributes:
        adapter: name of the adapter that answers, or None.
        last_response: the last answer's last response, with its figures; None before there is one.
        prompt_tokens: tokens of the last question and the conversation before it.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        new_cache: Callable[[], list[Any]],
        system_prompt: str | None = None,
        adapters: AdapterPool | None = None,
    ):
        self._model = model
        self._tokenizer = tokenizer
        self._new_cache = new_cache
        self._adapters = adapters
        self.adapter: str | None = None
        self._system: list[Message] = []
        self.system = system_prompt
        self.reset()

    # -- what was said

    @property
    def messages(self) -> list[Message]:
        """Instructions, if there are any, and all turns."""
        return [*self._system, *self._turns]

    @property
    def turns(self) -> list[Message]:
        """What was said, without the instructions."""
        return list(self._turns)

    @property
    def system(self) -> str | None:
        """Instructions for all turns; None leaves those that the chat template itself may have.

        Raises:
            TokenizerError: when they are set to what is no text.
        """
        return self._system[0]["content"] if self._system else None

    @system.setter
    def system(self, text: str | None) -> None:
        # Tools that came with loaded instructions stay with the new ones.
        old: Mapping[str, Any] = self._system[0] if self._system else {}
        new = [] if text is None else [{**old, "role": "system", "content": text}]
        self._system = _checked(new)

    @property
    def tokens(self) -> int:
        """Tokens of the whole conversation, as the chat template writes it."""
        return len(self._encoded(self.messages, open_answer=False)) if self.messages else 0

    def reset(self) -> None:
        """Forget all turns; instructions and adapter stay."""
        self._turns: list[Message] = []
        self._asked: list[Message] = []  # the turns up to the last question, answered or not
        self._caches = PromptCaches(self._new_cache)
        self.last_response: GenerationResponse | None = None
        self.prompt_tokens = 0

    def restore(self, messages: Sequence[Message], adapter: str | None) -> None:
        """Go on with another conversation.

        Args:
            messages: turns of the other conversation, and instructions if it has any.
            adapter: name of the adapter that answers from now on; None for none.

        Raises:
            AFMError: when the messages can't be used, or the adapter can't be loaded.
        """
        checked = _checked(messages)
        self._encoded(checked, open_answer=False)
        starts = int(bool(checked) and checked[0]["role"] == "system")
        turns = checked[starts:]
        questions = [i for i, turn in enumerate(turns) if turn["role"] == "user"]
        self.switch(adapter)
        self.reset()
        self._system, self._turns = checked[:starts], turns
        self._asked = turns[: questions[-1] + 1] if questions else []

    def switch(self, adapter: str | None) -> None:
        """Answer with another adapter of the pool from now on, or with none.

        Raises:
            AFMError: when it can't be loaded; the one before stays.
        """
        if adapter is not None:
            if self._adapters is None:
                raise RequestError(f"There is no adapter {adapter!r}: the conversation has none.")
            self._adapters.load(adapter)
        self.adapter = adapter

    # -- answers

    def ask(
        self, question: str, show: Callable[[str], None], **arguments: Any
    ) -> GenerationResponse | None:
        """Ask and answer one question.

        Ctrl-C ends the answer where it is; the conversation goes on from there.

        Args:
            question: what the user says.
            show: called with each segment of the answer.
            arguments: options for `stream_generate`.

        Returns:
            The last response, with its figures; None after Ctrl-C.

        Raises:
            AFMError: when the question can't be answered, or not to the end. The conversation is then
                as it was before.
        """
        self._asked = [*self._turns, {"role": "user", "content": question}]
        return self._answer(show, arguments)

    def retry(self, show: Callable[[str], None], **arguments: Any) -> GenerationResponse | None:
        """Answer the last question again, in place of the answer that it has, if it has one.

        Args:
            show, arguments: see `ask`.

        Raises:
            RequestError: when nothing was asked yet.
            AFMError: as `ask`.
        """
        if not self._asked:
            raise RequestError("There is no question yet that could be answered again.")
        return self._answer(show, arguments)

    def _answer(
        self, show: Callable[[str], None], arguments: Mapping[str, Any]
    ) -> GenerationResponse | None:
        prompt = self._encoded([*self._system, *self._asked], open_answer=True)
        self.prompt_tokens = len(prompt)
        answer, stopped, last = "", False, None
        try:
            with (
                self._caches.continuing(prompt, self.adapter) as run,
                closing(
                    stream_generate(
                        self._model,
                        self._tokenizer,
                        run.rest,
                        prompt_cache=run.cache,
                        logprobs=False,
                        adapter=self.adapter,
                        adapters=self._adapters,
                        **arguments,
                    )  # type: ignore[type-var]
                ) as responses,
            ):
                for response in responses:
                    answer += response.text
                    run.answer.append(response.token)
                    self.last_response = last = response
                    show(response.text)
        except KeyboardInterrupt:
            stopped = True
        if answer:
            self._turns = [*self._asked, {"role": "assistant", "content": answer}]
        return None if stopped else last

    def _encoded(self, messages: Sequence[Message], open_answer: bool) -> list[int]:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=open_answer
            )
        except AFMError:
            raise
        except Exception as error:  # templates of mlx-lm's zoo raise what they like
            raise TokenizerError(
                f"The model's chat template can't write this conversation: {error}"
            ) from error


def _checked(messages: Sequence[Message]) -> list[Message]:
    """Messages that can be encoded, and saved.

    Raises:
        TokenizerError: says which message is wrong.
    """
    checked = checked_messages(messages) if messages else []
    for index, message in enumerate(checked):
        try:
            json.dumps(message, ensure_ascii=False).encode("utf-8")
        except (ValueError, RecursionError) as error:  # half of a surrogate pair, a deep nesting
            raise TokenizerError(
                f"messages[{index}] ({message['role']}) can't be written as JSON in UTF-8: {error}. "
                "Change or remove it."
            ) from None
    return checked
