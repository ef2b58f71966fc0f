"""The state of one request under way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from afm_mlx.engine.request import MASK64, Request
from afm_mlx.errors import ConstraintError, ContextLengthError, IncompleteError, shown
from afm_mlx.guidance.matcher import Matcher, shortest_completion

if TYPE_CHECKING:
    from afm_mlx.adapters.registry import Lease
    from afm_mlx.adapters.resident import ResidentAdapter


@dataclass(frozen=True)
class Prepared:
    """A request that was checked, see `Engine.prepare`.

    Args:
        request: the request, without what is to be generated again of its prompt.
        matcher: the state of the answer under its constraint; None without one.
        hidden: characters at the answer's beginning that repeat the prompt's end.
    """

    request: Request
    matcher: Matcher | None
    hidden: int


@dataclass
class Row:
    """A request under way.

    Args:
        id: the id that `Engine.submit` returned.
        request: the request as it was submitted.
        detokenizer: turns tokens into text.
        start: tokens in the cache before the prompt.
        matcher: the state of the answer under the request's constraint; None without one.
        position: tokens in the cache.
        seed: seed of the row's random stream.
        known: tokens that are known and not yet fed to the model: the prompt, and what a constraint forces.
        tokens: the answer so far, as far as it was read back.
        sampled: number of the answer's tokens, read back or not.
        error: raised by what the caller gave for the row (sampler, logits processors, callbacks, detokenizer),
            or for what that returned.
        lease: lease of the row's adapter; None without an adapter.
        overtaken: number of later rows with adapters that started while this one could not.
        is_prompt_fed: whether all of the prompt is in the cache.
        bound: tokens that the cache may hold; None where nothing but the request ends the row.
        hidden: characters at the beginning of the answer that repeat the end of the prompt.
        columns: columns that the row's cache may come to have, where memory has a budget.
        vocab_size: number of ids that the row's sampler may return; None where it has none.
    """

    id: int
    request: Request
    detokenizer: Any
    start: int
    seed: int = 0
    matcher: Matcher | None = None
    known: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    sampled: int = 0
    error: Exception | None = None
    lease: Lease | None = None
    overtaken: int = 0
    is_prompt_fed: bool = False
    bound: int | None = None
    hidden: int = 0
    columns: int = 0
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        self.position = self.start
        self.known = list(self.request.prompt)
        self._unseen = self.hidden
        self._stop = StopStrings(self.request.stop)
        self._context: mx.array | None = None
        self._reported = -1

    @property
    def adapter(self) -> ResidentAdapter | None:
        """The row's adapter; None without one, and until it is loaded."""
        return None if self.lease is None else self.lease.resident

    def release(self) -> None:
        """Give the adapter back."""
        if self.lease is not None:
            self.lease.release()

    def report(self, done: int) -> None:
        """Call `on_prefill` if more of the prompt is done than it knows. Its error is the row's."""
        whole = len(self.request.prompt)
        done = min(done, whole)
        if self.request.on_prefill is None or done <= self._reported:
            return
        self._reported = done
        try:
            self.request.on_prefill(done, whole)
        except Exception as error:
            self.error = self.error or error

    @property
    def needs_logits(self) -> bool:
        """True if the next token, or its response, depends on more than which logit is the largest."""
        request = self.request
        is_plain = not (request.sampler or request.logits_processors or request.logprobs)
        return self.matcher is not None or not is_plain

    @property
    def is_full(self) -> bool:
        """True if the cache is full."""
        return self.bound is not None and self.position >= self.bound

    @property
    def surplus(self) -> int:
        """Tokens in the cache past prompt and answer, whose last token is not fed."""
        return max(0, self.position - self._needed)

    @property
    def _needed(self) -> int:
        return self.start + len(self.request.prompt) + len(self.tokens) - 1

    @property
    def ends(self) -> bool:
        """True if the row can't be fed the token that was drawn last."""
        return self.sampled == self.request.max_tokens or self.error is not None or self.is_full

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

    @property
    def last_token(self) -> int:
        """The last token of prompt and answer, as far as it was read back; forced tokens are behind it."""
        told = len(self.tokens) - len(self.known)
        return self.tokens[told - 1] if told else int(self.request.prompt[-1])

    def settle(self, fed: int) -> None:
        """Take note that the cache holds `fed` more tokens, and that all of the answer was read back."""
        self.position += fed
        self.sampled, self._context = len(self.tokens), None

    def accept(self, token: int, end_tokens: set[int]) -> tuple[str, str | None]:
        """Take the answer's next token.

        Args:
            token: id of the token.
            end_tokens: ids that end an answer.

        Returns:
            The text to show, and the finish reason.
        """
        try:
            return self._accept(token, end_tokens)
        except Exception as error:
            self.error = self.error or error
            return "", "error"

    def _accept(self, token: int, end_tokens: set[int]) -> tuple[str, str | None]:
        self.tokens.append(token)
        is_end = token in end_tokens
        if not is_end:
            try:
                self.detokenizer.add_token(token)
            except Exception as error:
                # As where the model has more logits than the tokenizer has tokens.
                self.error = self.error or error
        if self.matcher is not None and self.error is None:
            try:
                self.matcher.accept(token)
                is_end = is_end or self.matcher.is_stopped
            except ConstraintError as error:
                self.error = error
        reason: str | None = "stop"
        if not is_end:
            reason = "length" if len(self.tokens) == self.request.max_tokens else None
            if reason is None and self.error is None and self._has_no_room:
                self.error = ContextLengthError(
                    f"The context of {self.bound} tokens is full after {len(self.tokens)} new ones. Ask for "
                    "fewer, raise max_kv_size, or ask for a sliding window."
                )
        if self.error is not None:
            reason = "error"
        is_cut = reason is not None and self.matcher is not None and not self.matcher.is_complete
        if is_cut and self._completed():
            self.error, reason, is_cut = None, "length", False
        text, stopped = self.show(ended=reason is not None)
        reason = "stop" if stopped else reason
        if is_cut or (stopped and self.matcher is not None and not self.matcher.is_complete):
            self._cut_off(reason or "")
            reason = "error"
        return text, reason

    def force(self, end_tokens: set[int]) -> list[tuple[int, str, str | None]]:
        """Take the tokens that the constraint forces next; the model is to be fed them.

        Returns:
            For each token its id, and what `accept` returns; often none.
        """
        taken: list[tuple[int, str, str | None]] = []
        if self.matcher is None:
            return taken
        try:
            forced = self.matcher.forced()
        except Exception as error:
            self.error = error  # the next token ends the row
            return taken
        for token in forced:
            taken.append((token, *self.accept(token, end_tokens)))
            if taken[-1][2] is not None:
                break
        self.known += [token for token, _, _ in taken]
        self.sampled = len(self.tokens)
        return taken

    @property
    def _has_no_room(self) -> bool:
        return self.bound is not None and self._needed >= self.bound

    def _completed(self) -> bool:
        """Append the shortest text that meets the constraint, if the request wants that and there is one."""
        if self.request.at_limit != "complete" or not self._is_at_limit:
            return False
        assert self.matcher is not None
        completion = shortest_completion(self.matcher)
        for token in completion or ():
            self.detokenizer.add_token(token)
        return completion is not None

    @property
    def _is_at_limit(self) -> bool:
        """True if nothing ends the row but a limit: of tokens, or of the context."""
        return self.error is None or isinstance(self.error, ContextLengthError)

    def _cut_off(self, reason: str) -> None:
        """Make the error of an answer that ends before its constraint is met."""
        assert self.matcher is not None
        causes = {
            "length": f"it had {len(self.tokens)} tokens",
            "stop": "a stop string came",
            "error": "the context was full",
        }
        if self._is_at_limit:
            answer = self.detokenizer.text[self.hidden :]
            self.error = IncompleteError(
                f"The answer ended when {causes[reason]}, before its constraint ({self.matcher.what}) was met. "
                'Raise max_tokens, or ask for the shortest completion with at_limit="complete". So far it is: '
                f"{shown(answer)}",
                answer,
            )

    def rest(self) -> str:
        """Return the text that is left to show, for a row that ends with an error."""
        try:
            return self.show(ended=True)[0]
        except Exception:  # the detokenizer's; the row has an error already
            return ""

    def show(self, ended: bool) -> tuple[str, bool]:
        """Returns the text to show next, all of it once the answer has ended; and whether it stops there."""
        if ended:
            self.detokenizer.finalize()
        segment = self.detokenizer.last_segment
        more, self._unseen = segment[self._unseen :], max(0, self._unseen - len(segment))
        text, stopped = self._stop.feed(more)
        return text + self._stop.flush() if ended and not stopped else text, stopped


class StopStrings:
    """Finds stop strings in a growing text, and withholds an end that may be the beginning of one.

    Each character is looked at once, however long the strings are: for each string, the state is the number of
    its first characters that the text ends with.

    Source: Knuth, Morris and Pratt, "Fast Pattern Matching in Strings" (SIAM J. Comput. 6, 1977).

    Args:
        stop: the strings; the first one to be completed ends the text, the longest of several.
    """

    def __init__(self, stop: Sequence[str]):
        self._stop = sorted(stop, key=len, reverse=True)
        self._borders = [_borders(string) for string in self._stop]
        self._matched = [0] * len(self._stop)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Return the text that is safe to show, and whether a stop string was completed."""
        if not self._stop:
            return text, False
        held = self._held + text
        for at, character in enumerate(text, start=len(self._held) + 1):
            for i, (string, borders) in enumerate(zip(self._stop, self._borders, strict=True)):
                matched = self._matched[i]
                while matched and string[matched] != character:
                    matched = borders[matched - 1]
                self._matched[i] = matched = matched + (string[matched] == character)
                if matched == len(string):
                    self._held = ""
                    return held[: at - matched], True
        safe = len(held) - max(self._matched)
        self._held = held[safe:]
        return held[:safe], False

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held


def _borders(string: str) -> list[int]:
    """For each beginning of a string, the length of its longest proper beginning that it also ends with."""
    borders = [0] * len(string)
    length = 0
    for i in range(1, len(string)):
        while length and string[i] != string[length]:
            length = borders[length - 1]
        length += string[i] == string[length]
        borders[i] = length
    return borders
