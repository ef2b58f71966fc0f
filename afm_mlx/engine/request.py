"""What a caller asks the engine for, what comes back, and the state of one row between the two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from afm_mlx.errors import RequestError

if TYPE_CHECKING:
    from afm_mlx.adapters.lease import Lease
    from afm_mlx.adapters.registry import AdapterChoice
    from afm_mlx.adapters.resident import ResidentAdapter

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]

_MASK64 = 2**64 - 1


@dataclass
class Request:
    """One prompt to continue.

    Args:
        prompt: token ids, at least one.
        max_tokens: new tokens at most; -1 for no limit but the context's.
        sampler: maps log-probabilities (1, vocab_size) to a token (1,), as mlx-lm's `make_sampler`
            builds; None takes the most likely token.
        seed: seed of this row's own random stream, which depends on nothing else in the batch; None
            draws one from `mx.random`.
        logits_processors: each maps (tokens so far, logits (1, vocab_size)) to logits, as mlx-lm's do.
        stop: strings that end the text; they are not part of it.
        cache: keys and values of tokens that come before the prompt, from `Model.make_cache` or mlx-lm's
            `make_prompt_cache`; at the end it holds prompt and answer, the last token excepted. Its bound is
            the row's bound, too.
        on_prefill: called with (prompt tokens done, prompt tokens in all).
        logprobs: whether responses carry log-probabilities. Without them, a batch of rows that take the
            most likely token needs no logits.
        adapter: name of an adapter in the engine's pool, or weights of several by their names, which are
            added up; None for the model alone, or with the adapter that is attached to it.
    """

    prompt: Sequence[int]
    max_tokens: int = 256
    sampler: Sampler | None = None
    seed: int | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    stop: Sequence[str] = ()
    cache: list[Any] | None = None
    on_prefill: Callable[[int, int], None] | None = None
    logprobs: bool = True
    adapter: AdapterChoice | None = None

    def validate(self, vocab_size: int | None) -> None:
        """Raise `RequestError` for a request that no model could answer."""
        if len(self.prompt) == 0:
            raise RequestError(
                "The prompt is empty; at least one token is needed to continue from."
            )
        if self.max_tokens == 0 or self.max_tokens < -1:
            raise RequestError(
                f"max_tokens is {self.max_tokens}; allowed are 1 and more, or -1 for no limit."
            )
        if vocab_size is not None and not 0 <= min(self.prompt) <= max(self.prompt) < vocab_size:
            raise RequestError(
                f"The prompt has token ids from {min(self.prompt)} to {max(self.prompt)}; this model's "
                f"go from 0 to {vocab_size - 1}. Was it encoded by another model's tokenizer?"
            )
        if isinstance(self.stop, str) or not all(isinstance(s, str) and s for s in self.stop):
            raise RequestError(f"stop is {self.stop!r}; a list of non-empty strings is needed.")
        if self.seed is not None and not 0 <= self.seed <= _MASK64:
            raise RequestError(f"seed is {self.seed}; allowed is 0 to 2**64 - 1.")


@dataclass
class Response:
    """One new token of one row.

    Args:
        row: the row's id, which `Engine.submit` returned.
        token: id of the token; -1 when the row ended with an error before there was one.
        text: what can be shown since the last response; may be empty.
        logprobs: (vocab_size,) float32, log-probabilities that the token was drawn from, computed when
            they are looked at; None when the request asked for none.
        finish_reason: "stop" at an end token or stop string, "length" at max_tokens, "error" when the
            row could not go on, None while it does.
        error: why, when finish_reason is "error".
    """

    row: int
    token: int
    text: str
    logprobs: mx.array | None
    finish_reason: str | None = None
    error: Exception | None = None


@dataclass
class Row:
    """A request under way.

    Args:
        id: the id that `Engine.submit` returned.
        request: the request as it was submitted.
        detokenizer: turns tokens into text.
        position: tokens in the cache.
        seed: seed of the row's random stream.
        tokens: the answer so far, as far as it was read back.
        sampled: number of tokens that were drawn, read back or not.
        error: raised by the row's own sampler or logits processor.
        lease: lease of the row's adapter; None without an adapter.
        overtaken: number of later rows with adapters that started while this one could not.
        bound: tokens that the cache may hold; None where nothing but the request ends the row.
    """

    id: int
    request: Request
    detokenizer: Any
    position: int
    seed: int = 0
    tokens: list[int] = field(default_factory=list)
    sampled: int = 0
    error: Exception | None = None
    lease: Lease | None = None
    overtaken: int = 0
    bound: int | None = None

    def __post_init__(self) -> None:
        self._stop = StopStrings(self.request.stop)
        self._context: mx.array | None = None

    @property
    def adapter(self) -> ResidentAdapter | None:
        """The row's adapter; None without one, and until it is loaded."""
        return None if self.lease is None else self.lease.resident

    def release(self) -> None:
        """Give the adapter back."""
        if self.lease is not None:
            self.lease.release()

    @property
    def needs_logits(self) -> bool:
        """Whether the next token, or its response, depends on more than which logit is the largest."""
        request = self.request
        return bool(request.sampler or request.logits_processors or request.logprobs)

    @property
    def out_of_tokens(self) -> bool:
        """Whether the last token drawn is the last one that was asked for."""
        return self.sampled == self.request.max_tokens

    @property
    def is_full(self) -> bool:
        """Whether the cache has no room for another token."""
        return self.bound is not None and self.position >= self.bound

    @property
    def step_seed(self) -> int:
        """Seed of the next draw: counted from the row's own, so that nothing has to be read back."""
        return (self.seed + self.sampled * 0x9E3779B97F4A7C15) & _MASK64

    def context(self, token: mx.array) -> mx.array:
        """Prompt and answer so far with `token` (1,) appended, for logits processors."""
        if self._context is None:
            self._context = mx.array(list(self.request.prompt[:-1]), dtype=mx.int32)
        self._context = mx.concatenate([self._context, token.astype(mx.int32)])
        return self._context

    def accept(self, token: int, end_tokens: set[int], full: bool) -> tuple[str, str | None]:
        """Take a token that was read back.

        Args:
            token: id of the token.
            end_tokens: ids that end an answer.
            full: whether the context has no room to go on after it.

        Returns:
            The text to show, and the finish reason.
        """
        self.tokens.append(token)
        reason: str | None = "stop"
        if token not in end_tokens:
            self.detokenizer.add_token(token)
            reason = "length" if len(self.tokens) == self.request.max_tokens else None
        if self.error is not None or (full and reason is None):
            reason = "error"
        if reason is not None:
            self.detokenizer.finalize()
        text, stopped = self._stop.feed(self.detokenizer.last_segment)
        if stopped:
            return text, "stop"
        return (text + self._stop.flush() if reason is not None else text), reason

    def give_up(self) -> str:
        """End the answer before its next token; returns the text that was not shown yet."""
        self.detokenizer.finalize()
        text, stopped = self._stop.feed(self.detokenizer.last_segment)
        return text if stopped else text + self._stop.flush()


class StopStrings:
    """Holds back text that may turn out to be the start of a stop string."""

    def __init__(self, stop: Sequence[str]):
        self._stop = tuple(stop)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Returns the text that is safe to show, and whether a stop string was completed."""
        if not self._stop:
            return text, False
        held = self._held + text
        found = [at for at in (held.find(s) for s in self._stop) if at >= 0]
        if found:
            self._held = ""
            return held[: min(found)], True
        longest = max(
            (n for s in self._stop for n in range(1, len(s)) if held.endswith(s[:n])), default=0
        )
        self._held = held[len(held) - longest :]
        return held[: len(held) - longest], False

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held
