"""A row: one request that runs, from its lease on an adapter to its last response.

A row knows its tokens and its text. It takes the tokens that were drawn for it (`Row.take`) and those that its
constraint forces (`Row.take_forced`), and makes the responses. Whatever its caller's code raises (sampler,
logits processors, callbacks, detokenizer) is kept in `Row.error` and ends this row alone.

While a row waits, it has a cache of its own; while it runs, its cache is a row of a batch's (`batch.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from afm_mlx.adapters.active import BatchAdapters, adapter_fingerprint, bind
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.adapters.registry import AdapterChoice, Lease
from afm_mlx.adapters.resident import ResidentAdapter
from afm_mlx.engine.draft_length import DraftCounts
from afm_mlx.engine.image_features import PlacedImage, placed_images, prefix_names
from afm_mlx.engine.request import MASK64, Embedding, PromptScores, Request, TokenResponse
from afm_mlx.errors import (
    ConstraintError,
    ContextLengthError,
    EmbeddingError,
    IncompleteError,
    LogitsError,
    RequestError,
    shown,
)
from afm_mlx.model.kv_cache import Cache
from afm_mlx.quantization.quantize_model import is_vision
from afm_mlx.tokenizer.protocol import Detokenizer

if TYPE_CHECKING:
    from afm_mlx.guidance.matcher import Matcher


@dataclass(eq=False)
class Row:
    """A request that runs, and its place in a batch."""

    id: int  # as `Engine.submit` returned it
    request: Request  # checked
    text: AnswerText
    cache: Cache = field(default_factory=list)  # while the row waits
    end_tokens: Collection[int] = ()
    vocab_size: int | None = None  # number of the model's logits; None if its config doesn't say
    start: int = 0  # tokens in the cache before the prompt
    bound: int | None = None  # tokens that the cache may hold; None for no limit
    seed: int = 0  # of the row's random stream
    matcher: Matcher | None = None  # the answer's state under the request's constraint
    lease: Lease | None = None  # the row's hold on its adapter
    columns: int = 0  # that the cache can grow to; 0 if the engine has no memory budget
    image_token_id: int | None = None  # None if the model reads text only
    draft_counts: DraftCounts | None = None  # None without speculation

    def __post_init__(self) -> None:
        request = self.request
        self.position = self.start  # tokens in the cache, and in `unfed`
        # Last tokens that were taken back from the cache because states lose all tokens of a rejected draft.
        self.unfed: list[int] = []
        self.pending = list(request.prompt)  # known tokens that are still to be fed
        self.images: list[PlacedImage] = []  # of the prompt
        # Names of the prompt's tokens in a prefix cache.
        self.prefix_names: Sequence[int] = request.prompt
        if request.images and self.image_token_id is not None:
            self.images = placed_images(request.prompt, request.images, self.image_token_id)
            self.prefix_names = prefix_names(request.prompt, self.images)
        self.tokens: list[int] = []  # the answer, as far as it was read back
        self.sampled = 0  # number of the answer's tokens, read back or not
        self.error: Exception | None = None  # ends the row with its next response
        self.is_prompt_fed = False
        # The response of a row that ends with its prompt, and decodes nothing.
        self.closing: TokenResponse | None = None
        if request.max_tokens == 0:
            self.closing = TokenResponse(self.id, -1, "", None, "length")
        # Of the prompt's chunks; None once a response has them.
        self._scores: list[PromptScores] | None = []
        self.overtaken = 0  # later rows with adapters that started while this one could not
        self.cached_tokens = 0  # tokens of the prompt that the prefix cache had
        self.prefix_key: Hashable = None  # None if the row has no prefix cache
        # Number of first tokens at which its prefill pauses, because others went on otherwise; 0 for none.
        self.branch = 0
        # False if the largest logit is enough for each response.
        self.needs_logits = bool(
            self.matcher is not None
            or request.sampler
            or request.logits_processors
            or request.logprobs
        )
        self.sampler_vocab_size: int | None = None  # None until a sampler was called
        self._context: mx.array | None = None  # for logits processors
        self._completion: Sequence[int] = ()  # tokens that complete a cut-off answer
        self._reported = -1  # prompt tokens that `on_prefill` knows of

    # -- the adapter

    @property
    def adapter(self) -> ResidentAdapter | None:
        """The row's adapter, which must be loaded; None without one."""
        return None if self.lease is None else self.lease.resident

    def release(self) -> None:
        if self.lease is not None:
            self.lease.release()

    # -- the prompt

    @property
    def scored_from(self) -> int | None:
        """Index in the prompt of the first token to score; None without any, and once the prompt is fed."""
        asked = self.request.prompt_logprobs
        return None if asked is None or self.is_prompt_fed else int(asked.start)

    @property
    def unfed_images(self) -> list[PlacedImage]:
        """The prompt's images that have tokens which are not in the cache."""
        fed = self.position - self.start
        return [placed for placed in self.images if placed.places[-1] >= fed]

    @property
    def reusable(self) -> list[int]:
        """The names of tokens that a prefix cache may serve to a row that waits: their logits aren't needed."""
        if self.embedding is not None and self.embedding.pooling == "mean":
            return []  # hidden states of all tokens are needed, and these aren't kept
        last = self.scored_from
        names = [*self.prefix_names, *self.pending[len(self.prefix_names) :]]
        return names[: len(names) - 1 if last is None else last - 1]

    @property
    def prefill_length(self) -> int:
        """Number of pending tokens that are fed before the row decodes: all, if the row becomes a vector."""
        return len(self.pending) - (self.embedding is None)

    @property
    def generates(self) -> bool:
        """False if the row ends with its prompt: somebody waits for the whole answer, but not for a token."""
        return self.request.max_tokens != 0

    @property
    def embedding(self) -> Embedding | None:
        """The vector that the request asks for."""
        return self.request.embedding

    def take_vector(self, vector: np.ndarray) -> None:
        """Take the prompt's vector for the response; NaN and infinity are the row's error."""
        assert self.closing is not None
        if not np.isfinite(vector).all():
            self.error = self.error or EmbeddingError(
                "The model's hidden states hold NaN, infinity or only zeros: they make no vector. Weights, "
                "adapters or scales that hold NaN or overflow lead to that; load them in another type "
                "(bfloat16, float32), or take other ones."
            )
        self.closing.embedding = vector

    def take_scores(self, scores: PromptScores, normalizers: np.ndarray) -> None:
        """Append the log-probabilities of the prompt's next tokens; non-finite logits are the row's error."""
        wrong = normalizers[~np.isfinite(normalizers)]
        if wrong.size:
            self.error = self.error or _no_token_error(float(wrong[0]), self.request)
        if self._scores is not None:
            self._scores.append(scores)

    def scored_prompt(self) -> PromptScores | None:
        """Return the log-probabilities of the whole prompt, once; None if there are none, or the next time."""
        asked, parts = self.request.prompt_logprobs, self._scores
        if asked is None or not self.is_prompt_fed or parts is None:
            return None
        self._scores = None
        return PromptScores.joined(asked.start, parts or [PromptScores.none(asked)])

    def close(self) -> TokenResponse:
        """Return the only response of a row that ends with its prompt."""
        assert self.closing is not None
        self.report(len(self.request.prompt))
        if self.error is not None:
            return self.failure()
        self.closing.prompt_logprobs = self.scored_prompt()
        return self.closing

    # -- tokens in the cache

    @property
    def is_full(self) -> bool:
        return self.bound is not None and self.position >= self.bound

    @property
    def surplus(self) -> int:
        """Number of tokens in the cache besides prompt and answer, whose last token is not fed."""
        needed = self.start + len(self.request.prompt) + len(self.tokens) - 1
        return max(0, self.position - needed)

    @property
    def ends(self) -> bool:
        """True if the row can't be fed the token that was drawn last."""
        return self.sampled == self.request.max_tokens or self.error is not None or self.is_full

    @property
    def last_token(self) -> int:
        """The last token of prompt and answer that was read back and is not pending."""
        known = len(self.tokens) - len(self.pending)
        return self.tokens[known - 1] if known else int(self.request.prompt[-1])

    def settle(self, fed: int) -> None:
        """Record that a step ended: the cache holds `fed` more tokens, and all of the answer was read back."""
        self.position += fed
        self.sampled, self._context = len(self.tokens), None

    def report(self, done: int) -> None:
        """Call `on_prefill` if more prompt tokens are done than reported; its exception is the row's error."""
        whole = len(self.request.prompt)
        done = min(done, whole)
        if self.request.on_prefill is None or done <= self._reported:
            return
        self._reported = done
        try:
            self.request.on_prefill(done, whole)
        except Exception as error:
            self.error = self.error or error

    # -- drawing

    def seed_at(self, index: int) -> int:
        """Seed of the draw of answer token `index`, counted from the row's own: nothing has to be read back."""
        return (self.seed + index * 0x9E3779B97F4A7C15) & MASK64

    def context(self, token: mx.array | None) -> mx.array:
        """Prompt and answer so far with `token` (1,) appended, for logits processors."""
        if self.matcher is not None:  # all of it was read back
            return mx.array([*self.request.prompt, *self.tokens], dtype=mx.int32)
        if self._context is None:
            before = [*self.request.prompt, *self.tokens][:-1]
            self._context = mx.array(before, dtype=mx.int32)
        assert token is not None
        self._context = mx.concatenate([self._context, token.astype(mx.int32)])
        return self._context

    # -- the answer

    def take(self, token: int, max_logit: float, logprobs: mx.array | None) -> list[TokenResponse]:
        """Append a drawn token, and the tokens that the constraint forces after it; return their responses.

        If `max_logit` is NaN or infinite, no token could be drawn, and the row ends with an error.
        """
        if self.request.on_prefill is not None:
            self.report(len(self.request.prompt))
        if self.error is None:
            if not math.isfinite(max_logit):
                self.error = _no_token_error(max_logit, self.request)
            elif self.sampler_vocab_size is not None and not 0 <= token < self.sampler_vocab_size:
                self.error = RequestError(
                    f"The sampler returned the token {token}; this model's tokens go from 0 to "
                    f"{self.sampler_vocab_size - 1}."
                )
            if self.error is not None:
                return [self.failure()]
        responses = [self._respond(token, logprobs)]
        if responses[0].finish_reason is None and self.matcher is not None:
            responses += self.take_forced()
        if responses[-1].finish_reason is not None:
            responses[-1].draft_counts = self.draft_counts
        return responses

    def take_forced(self) -> list[TokenResponse]:
        """Append the tokens that the constraint forces next, as pending tokens; return their responses."""
        responses: list[TokenResponse] = []
        if self.matcher is None:
            return responses
        try:
            forced = self.matcher.forced()
        except Exception as problem:
            self.error = problem  # the next token ends the row
            return responses
        for token in forced:
            logprobs = None
            if self.request.logprobs:  # there was no alternative
                assert self.vocab_size is not None
                logprobs = mx.where(mx.arange(self.vocab_size) == token, 0.0, -math.inf)
            responses.append(self._respond(token, logprobs, is_forced=True))
            self.pending.append(token)
            if responses[-1].finish_reason is not None:
                break
        self.sampled = len(self.tokens)
        return responses

    def failure(self) -> TokenResponse:
        """Make the last response of a row that ends with its error before another token."""
        try:
            text, _ = self.text.show(ended=True)
        except Exception:  # the detokenizer's; the row has an error already
            text = ""
        cached = self.cached_tokens
        return TokenResponse(self.id, -1, text, None, "error", self.error, cached_tokens=cached)

    def _respond(
        self, token: int, logprobs: mx.array | None, is_forced: bool = False
    ) -> TokenResponse:
        """Append the answer's next token, and make its response."""
        text, reason = self._accept(token)
        response = TokenResponse(self.id, token, text, logprobs, reason, is_forced=is_forced)
        response.error = self.error if reason == "error" else None
        response.prompt_logprobs = self.scored_prompt()
        response.cached_tokens = self.cached_tokens
        response.completion = self._completion
        return response

    def _accept(self, token: int) -> tuple[str, str | None]:
        """Append the answer's next token; return the text to show and the finish reason."""
        try:
            self.tokens.append(token)
            is_end = token in self.end_tokens
            if not is_end:
                try:
                    self.text.add(token)
                except Exception as error:
                    # For example, if the model has more logits than the tokenizer has tokens.
                    self.error = self.error or error
            matcher = self.matcher
            if matcher is not None and self.error is None:
                try:
                    matcher.accept(token)
                    is_end = is_end or matcher.is_stopped
                except ConstraintError as error:
                    self.error = error
            reason: str | None = "stop"
            if not is_end:
                reason = "length" if len(self.tokens) == self.request.max_tokens else None
                held = self.start + len(self.request.prompt) + len(self.tokens) - 1
                is_full = self.bound is not None and held >= self.bound
                if reason is None and self.error is None and is_full:
                    self.error = ContextLengthError(
                        f"The context of {self.bound} tokens is full after {len(self.tokens)} new ones. Ask "
                        "for fewer, raise max_kv_size, or ask for a sliding window."
                    )
            if self.error is not None:
                reason = "error"
            is_cut_off = reason is not None and matcher is not None and not matcher.is_complete
            # True if nothing ends the row except a limit: of tokens, or of the context.
            is_at_limit = self.error is None or isinstance(self.error, ContextLengthError)
            if is_cut_off and is_at_limit and self.request.at_limit == "complete":
                from afm_mlx.guidance.matcher import shortest_completion

                assert matcher is not None
                if (completion := shortest_completion(matcher)) is not None:
                    self._completion = completion
                    for each in completion:
                        self.text.add(each)
                    self.error, reason, is_cut_off = None, "length", False
            text, stopped = self.text.show(ended=reason is not None)
            reason = "stop" if stopped else reason
            if is_cut_off or (stopped and matcher is not None and not matcher.is_complete):
                if is_at_limit:
                    self._fail_incomplete(reason or "")
                reason = "error"
            return text, reason
        except Exception as error:
            self.error = self.error or error
            return "", "error"

    def _fail_incomplete(self, reason: str) -> None:
        """Set the error of an answer that ends before its constraint is met."""
        assert self.matcher is not None
        causes = {
            "length": f"it had {len(self.tokens)} tokens",
            "stop": "a stop string came",
            "error": "the context was full",
        }
        answer = self.text.whole
        self.error = IncompleteError(
            f"The answer ended when {causes[reason]}, before its constraint ({self.matcher.what}) was met. "
            'Raise max_tokens, or ask for the shortest completion with at_limit="complete". The answer so '
            f"far is: {shown(answer)}",
            answer,
        )


def _no_token_error(max_logit: float, request: Request) -> LogitsError:
    """Return the error of a row whose largest logit is NaN or infinite."""
    if max_logit == -math.inf and request.constraint is not None:
        return LogitsError(
            f"The {request.constraint.what} allows no token here whose logit is above -infinity. Leave out "
            "logits processors that ban tokens."
        )
    if max_logit == -math.inf:
        return LogitsError(
            "Every token is banned: all logits are -infinity. The logits processors of a request have to leave "
            "one token at least."
        )
    source = "The model's logits"
    if request.logits_processors:
        source += ", or what the logits processors made of them,"
    return LogitsError(
        f"{source} hold {max_logit}: no token can be chosen. Weights, adapters or scales that hold NaN or "
        "overflow lead to that; load them in another type (bfloat16, float32), or take other ones."
    )


# -- text


class AnswerText:
    """An answer's text, without stop strings and the `hidden` characters that repeat the prompt's end."""

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str] = (), hidden: int = 0):
        self._detokenizer = detokenizer
        self._stop = StopStrings(stop) if stop else None
        self._hidden = self._left_to_hide = hidden
        self.add: Callable[[int], None] = detokenizer.add_token

    @property
    def whole(self) -> str:
        """All text so far, shown or withheld."""
        return self._detokenizer.text[self._hidden :]

    def show(self, ended: bool) -> tuple[str, bool]:
        """Return the text that can be shown now, and True if a stop string ends the answer.

        The possible beginning of a stop string is held back until `ended`.
        """
        if ended:
            self._detokenizer.finalize()
        segment = self._detokenizer.last_segment
        if self._left_to_hide:
            hidden = self._left_to_hide
            segment, self._left_to_hide = segment[hidden:], max(0, hidden - len(segment))
        if self._stop is None:
            return segment, False
        text, stopped = self._stop.feed(segment)
        return text + self._stop.flush() if ended and not stopped else text, stopped


class StopStrings:
    """Finds stop strings in a growing text, and withholds an end that may be the beginning of one.

    The first string to be completed ends the text, the longest of several. Each character is looked at once,
    however long the strings are: the state of a string is the number of its characters that the text ends with.

    Source: Knuth, Morris and Pratt, "Fast Pattern Matching in Strings" (SIAM J. Comput. 6, 1977).
    """

    def __init__(self, stop: Sequence[str]):
        self._stop = sorted(stop, key=len, reverse=True)
        self._borders = [_borders(string) for string in self._stop]
        self._matched = [0] * len(self._stop)
        self._held = self.found = ""  # `found` is the string that ended the text

    def feed(self, text: str) -> tuple[str, bool]:
        """Return the text that is safe to show, and True if a stop string was completed."""
        held = self._held + text
        for at, character in enumerate(text, start=len(self._held) + 1):
            for i, (string, borders) in enumerate(zip(self._stop, self._borders, strict=True)):
                matched = self._matched[i]
                while matched and string[matched] != character:
                    matched = borders[matched - 1]
                self._matched[i] = matched = matched + (string[matched] == character)
                if matched == len(string):
                    self._held, self.found = "", string
                    return held[: at - matched], True
        safe = len(held) - max(self._matched, default=0)
        self._held = held[safe:]
        return held[:safe], False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _borders(string: str) -> list[int]:
    """Return, for each prefix of a string, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(string)
    length = 0
    for i in range(1, len(string)):
        while length and string[i] != string[length]:
            length = borders[length - 1]
        length += string[i] == string[length]
        borders[i] = length
    return borders


# -- adapters


class RowAdapters:
    """Leases the adapters of an engine's rows from its pool, and activates them in its model.

    Without a pool, rows have no adapter except one that is attached to the model.
    """

    def __init__(self, model: nn.Module, pool: AdapterPool | None):
        self._model, self._pool = model, pool
        if pool is None:
            return
        if not isinstance(pool, AdapterPool):
            raise RequestError(
                f"adapters is {pool!r}; a pool is needed: AdapterPool(model), with adapters registered by name."
            )
        if not pool.serves(model):
            raise RequestError(
                "The adapter pool was made for another model; make one for this model."
            )
        if bind(model).batch is not None:
            raise RequestError(
                "The model has an attached adapter that all rows use, and an adapter pool too. Detach the "
                "adapter (detach_adapter)."
            )

    def lease(self, adapter: AdapterChoice | None) -> Lease | None:
        """Lease the adapter that a request names, and start loading it."""
        if adapter is None:
            return None
        if self._pool is None:
            raise RequestError(
                f"The request names the adapter {adapter!r}, and there is no adapter pool: give the engine, or "
                "the function that generates, adapters=AdapterPool(model)."
            )
        return self._pool.request(adapter)

    def wait(self, rows: Iterable[Row], seconds: float) -> None:
        """Wait up to `seconds` until the first of the rows' adapters is loaded or has failed."""
        leases = [row.lease for row in rows if row.lease is not None]
        if self._pool is not None and leases:
            self._pool.wait(leases, seconds)

    def using(self, batch: BatchAdapters | None) -> AbstractContextManager[None]:
        """Have the model add these adapters to what is computed inside the context."""
        # Bound each time, because `detach_adapter` unbinds the model and may have been called since.
        return nullcontext() if self._pool is None else bind(self._model).using(batch)

    def vision_fingerprint(self, row: Row) -> str:
        """Return the fingerprint of the adapter that a row's images depend on; "" if none changes them."""
        changes = self._pool is None or (row.adapter is not None and _changes_vision(row.adapter))
        return self.fingerprint(row) if changes else ""

    def using_for_images(self, row: Row) -> AbstractContextManager[None]:
        """Have the model's vision part add a row's adapter to what is computed inside the context."""
        adapter = row.adapter
        if adapter is None or not _changes_vision(adapter):
            return self.using(None)
        return self.using(BatchAdapters.everywhere(adapter))

    def fingerprint(self, row: Row) -> str:
        """Return the fingerprint of the adapter that a row's keys and values depend on; "" without one."""
        if self._pool is None:
            return adapter_fingerprint(self._model) or ""
        if row.adapter is None:
            return ""
        # Equal parts of two adapters may be on this rank, while others differ.
        return row.adapter.whole or row.adapter.fingerprint

    def refusal(self, row: Row) -> Exception | None:
        """Return why a row can't start: its adapter failed to load, or its cache was filled under another."""
        if row.lease is not None and not row.lease.ready:
            failure: Exception | None = row.lease.error
            return failure
        filled_under: str | None = getattr(row.cache[0], "adapter", None)
        if filled_under is None or row.cache[0].empty():
            return None
        if filled_under == (wanted := self.fingerprint(row)):
            return None
        return RequestError(
            f"The prompt cache was filled under {self._described(filled_under)}, and the request runs with "
            f"{self._described(wanted)}. Keys and values don't carry over: begin a new cache, or name "
            "the other adapter."
        )

    def _described(self, fingerprint: str) -> str:
        if not fingerprint:
            return "no adapter"
        name = None if self._pool is None else self._pool.name_of(fingerprint)
        return f"the adapter {name or 'with fingerprint'} ({fingerprint})"


def _changes_vision(adapter: ResidentAdapter) -> bool:
    return any(is_vision(path) and part.rank for path, part in adapter.parts.items())


def batch_adapters(rows: Sequence[Row]) -> BatchAdapters | None:
    residents = [row.adapter for row in rows]
    return BatchAdapters.of(residents) if any(residents) else None
