"""A conversation that keeps its keys and values from turn to turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.cli.reuse import keep_common, tokens_in
from afm_mlx.errors import RequestError
from afm_mlx.generation import GenerationResponse, stream_generate


@dataclass
class _Kept:
    """Keys and values that an adapter has computed, and the tokens that they are of."""

    cache: list[Any]
    tokens: list[int]


class Conversation:
    """Turns of user and assistant.

    A turn renders the whole conversation and computes what the cache does not hold yet, as a rule the end
    of the last answer and the new question.

    Each adapter has keys and values of its own, for those of another would be wrong. So the first turn after a
    switch computes what the adapter has not seen of the conversation.

    Args:
        model, tokenizer: of `load`.
        new_cache: makes an empty cache.
        system_prompt: instructions for all turns.
        adapters: that turns may use.
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
        self._system = (
            [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        )
        self.reset()

    def reset(self) -> None:
        """Forget all turns."""
        self.messages: list[dict[str, str]] = list(self._system)
        self._caches: dict[str | None, _Kept] = {}

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
        kept = self._caches.get(self.adapter) or _Kept(self._new_cache(), [])
        common = keep_common(kept.cache, kept.tokens, prompt)
        if common is None:
            kept, common = _Kept(self._new_cache(), []), 0
        self._caches[self.adapter] = kept
        kept.tokens = prompt[:common]
        answer, tokens, last = "", [], None
        try:
            for response in stream_generate(
                self._model,
                self._tokenizer,
                prompt[common:],
                prompt_cache=kept.cache,
                logprobs=False,
                adapter=self.adapter,
                adapters=self._adapters,
                **arguments,
            ):
                answer += response.text
                tokens.append(response.token)
                show(response.text)
                last = response
        except KeyboardInterrupt:
            last = None
        finally:
            kept.tokens = [*prompt, *tokens][: tokens_in(kept.cache)]
        if answer:
            self.messages = [*messages, {"role": "assistant", "content": answer}]
        return last
