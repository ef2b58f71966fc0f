"""A conversation that keeps its keys and values from turn to turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from afm_mlx.cli.reuse import keep_common, tokens_in
from afm_mlx.generation import GenerationResponse, stream_generate


class Conversation:
    """Turns of user and assistant.

    A turn renders the whole conversation and computes what the cache does not hold yet, as a rule the end
    of the last answer and the new question.

    Args:
        model, tokenizer: of `load`.
        new_cache: makes an empty cache.
        system_prompt: instructions for all turns.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        new_cache: Callable[[], list[Any]],
        system_prompt: str | None = None,
    ):
        self._model = model
        self._tokenizer = tokenizer
        self._new_cache = new_cache
        self._system = (
            [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        )
        self.reset()

    def reset(self) -> None:
        """Forget all turns."""
        self.messages: list[dict[str, str]] = list(self._system)
        self._cache = self._new_cache()
        self._held: list[int] = []  # the tokens in the cache

    def ask(
        self, question: str, show: Callable[[str], None], **arguments: Any
    ) -> GenerationResponse | None:
        """Ask and answer one question.

        Ctrl-C ends the answer where it is; the conversation goes on from there.

        Args:
            question: what the user says.
            show: is given each segment of the answer.
            arguments: of `stream_generate`.

        Returns:
            The last response, with its figures; None after Ctrl-C.

        Raises:
            AFMError: when the question can't be answered, or not to the end. The conversation is then
                as it was before.
        """
        messages = [*self.messages, {"role": "user", "content": question}]
        prompt = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        common = keep_common(self._cache, self._held, prompt)
        if common is None:
            self._cache, common = self._new_cache(), 0
        self._held = prompt[:common]
        answer, tokens, last = "", [], None
        try:
            for response in stream_generate(
                self._model,
                self._tokenizer,
                prompt[common:],
                prompt_cache=self._cache,
                logprobs=False,
                **arguments,
            ):
                answer += response.text
                tokens.append(response.token)
                show(response.text)
                last = response
        except KeyboardInterrupt:
            last = None
        finally:
            self._held = [*prompt, *tokens][: tokens_in(self._cache)]
        if answer:
            self.messages = [*messages, {"role": "assistant", "content": answer}]
        return last
