"""A model that another framework runs: prompts by functions of fixed lengths, then steps of one token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

import numpy as np

from afm_mlx.errors import AFMError, ContextLengthError, shown

_PADDING = 0


class ExportedSizes(Protocol):
    """What running an exported model takes from its architecture."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def context_length(self) -> int: ...


class ExportedModel(ABC):
    """A loaded exported model, with the keys and values of one conversation.

    Args:
        config: the architecture's sizes; its context is the number of tokens that the states hold.
        prompt_lengths: numbers of tokens that `read_prompt` takes.

    Attributes:
        position: number of tokens that have keys and values.
    """

    def __init__(self, config: ExportedSizes, prompt_lengths: Sequence[int]) -> None:
        self.config, self.position = config, 0
        self._lengths = prompt_lengths

    @abstractmethod
    def read_prompt(self, tokens: np.ndarray, count: int) -> np.ndarray | None:
        """Write keys and values of `tokens` (L,) int32 from `position` on; those after `count` are padding.

        Returns:
            logits (vocab_size,) float32 after token `count - 1`, or None if prompts have none.
        """

    @abstractmethod
    def read_token(self, token: int) -> np.ndarray:
        """Write keys and values of one token at `position`; return logits (vocab_size,) float32."""

    def prefill(self, tokens: Sequence[int]) -> None:
        """Compute the keys and values of the next tokens.

        Args:
            tokens: ids of any number of tokens.

        Raises:
            AFMError: for ids outside of the vocabulary.
            ContextLengthError: for more tokens than fit into the context.
        """
        self._read(tokens)

    def decode(self, token: int) -> np.ndarray:
        """Return the logits (vocab_size,) float32 after one more token.

        Raises:
            AFMError: for an id outside of the vocabulary.
            ContextLengthError: if the context is full.
        """
        (token,) = self._checked([token])
        logits = self.read_token(int(token))
        self.position += 1
        return logits

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Return the logits (vocab_size,) float32 after a prompt.

        Raises:
            AFMError: if there is no token, and as `prefill` does.
        """
        if not len(tokens):
            raise AFMError("The prompt has no tokens; one at least is needed.")
        self._checked(tokens)
        if self.prompts_have_logits:
            logits = self._read(tokens)
            assert logits is not None
            return logits
        self.prefill(tokens[:-1])
        return self.decode(tokens[-1])

    prompts_have_logits = False
    """True if `read_prompt` returns logits."""

    def _read(self, tokens: Sequence[int]) -> np.ndarray | None:
        """Read tokens; return what the last call returned."""
        ids, done, logits = self._checked(tokens), 0, None
        room = self.config.context_length - self.position - len(ids)
        for length in prompt_chunks(len(ids), self._lengths, room):
            chunk = ids[done : done + (length or 1)]
            done += len(chunk)
            if length == ONE_TOKEN:
                logits = self.read_token(int(chunk[0]))
            else:
                padded = np.pad(chunk, (0, length - len(chunk)), constant_values=_PADDING)
                logits = self.read_prompt(padded, len(chunk))
            self.position += len(chunk)
        return logits

    def greedy(
        self, tokens: Sequence[int], max_tokens: int, end_tokens: Collection[int] = ()
    ) -> Iterator[int]:
        """Yield the tokens that follow a prompt, each the most likely one.

        Args:
            tokens: ids of the prompt, which continues from `position`.
            max_tokens: maximum number of tokens to generate.
            end_tokens: ids that end the answer and are not part of it.
        """
        logits = self.logits(tokens)
        for left in reversed(range(max_tokens)):
            token = int(logits.argmax())
            if token in end_tokens:
                return
            yield token
            if left:
                logits = self.decode(token)

    def rewind(self, position: int = 0) -> None:
        """Drop the keys and values of all tokens from `position` on.

        Raises:
            AFMError: if there are fewer tokens than `position`.
        """
        if not 0 <= position <= self.position:
            raise AFMError(
                f"position is {shown(position)}; 0 to {self.position} have been reached."
            )
        self.position = position

    def _checked(self, tokens: Sequence[int]) -> np.ndarray:
        """Return tokens as (L,) int32; raise unless they are in the vocabulary and fit into the context."""
        config = self.config
        ids = np.asarray(tokens, np.int64).reshape(-1)
        for wrong in ids[(ids < 0) | (ids >= config.vocab_size)]:
            raise AFMError(
                f"The token {wrong} is none of this model; ids are 0 to {config.vocab_size - 1}."
            )
        if self.position + len(ids) > config.context_length:
            raise ContextLengthError(
                f"{len(ids)} tokens after {self.position} are more than the exported model's context of "
                f"{config.context_length}. Shorten the prompt, or rewind."
            )
        return ids.astype(np.int32)


# -- prompts

ONE_TOKEN = 0
"""Represents a call of `decode` with one token, whose logits are dropped."""

_CALL = 32
"""Number of tokens that take roughly as long to compute as the weights take to read."""


def prompt_chunks(count: int, lengths: Sequence[int], room: int) -> list[int]:
    """Return the lengths of the calls that together prefill `count` tokens in the least time.

    Each is one of `lengths`, or `ONE_TOKEN` for a call of `decode`.

    All choices of lengths compute the same keys and values. A call reads all weights, however few its tokens,
    and computes all its tokens, padding included. Only the last call may be longer than the rest of the prompt.
    Its padding writes columns after the prompt, no more than `room`, which are written again before any token
    sees them.
    """
    costs, first = [0], [ONE_TOKEN]
    for left in range(1, count + 1):
        # A call of `decode` runs the reuse blocks and the head too.
        options = [(2 * (_CALL + 1) + costs[left - 1], ONE_TOKEN)]
        options += [
            (_CALL + length + costs[max(0, left - length)], length)
            for length in lengths
            if length - left <= room
        ]
        cost, length = min(options)
        costs.append(cost)
        first.append(length)
    chunks, left = [], count
    while left > 0:
        chunks.append(first[left])
        left -= first[left] or 1
    return chunks
