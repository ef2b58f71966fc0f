"""A Core ML package that reads prompts and gives logits."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np

from afm_mlx.coreml.functions import CompiledPackage, LoadedFunction
from afm_mlx.coreml.package import CoreMLPackage
from afm_mlx.coreml.prompt_chunks import DECODE, prompt_chunks
from afm_mlx.errors import AFMError, ContextLengthError, shown

_PADDING = 0


class CoreMLModel:
    """A package of `afm-mlx convert --to coreml` in Core ML, with the keys and values of one conversation.

        model = CoreMLModel("model.mlpackage", compute_units="CPU_AND_NE")
        for token in model.greedy(prompt, max_tokens=100, end_tokens={2}):
            ...

    Args:
        package: the `.mlpackage` folder.
        compute_units: "CPU_ONLY", "CPU_AND_GPU", "CPU_AND_NE" (the CPU and the Neural Engine) or "ALL".
        adapter: name of an adapter of the package; None for none.

    Attributes:
        package: what the package says of itself.
        position: number of tokens whose keys and values are there.

    Raises:
        AFMError: when the package is damaged or was made by others, has no such adapter, or can't run here.
    """

    def __init__(
        self, package: str | Path, compute_units: str = "ALL", adapter: str | None = None
    ) -> None:
        self.package = CoreMLPackage.read(package)
        self._units = compute_units
        self._compiled = CompiledPackage(self.package.path)
        self._prefill, self._decode = self._compiled.load(
            self.package.function_names(adapter), compute_units
        )
        self._state = self._decode.make_state()
        self.position = 0

    def prefill(self, tokens: Sequence[int]) -> None:
        """Write keys and values of tokens, and compute nothing else.

        Args:
            tokens: ids of the next tokens, any number of them.

        Raises:
            AFMError: for ids that the vocabulary does not have.
            ContextLengthError: for more tokens than the context has room for.
        """
        ids = self._checked(tokens)
        room = self.package.config.context_length - self.position - len(ids)
        done = 0
        for length in prompt_chunks(len(ids), self.package.prompt_lengths, room):
            chunk = ids[done : done + (length or 1)]
            done += len(chunk)
            if length == DECODE:
                self._call(self._decode, chunk)
            else:
                padded = np.pad(chunk, (0, length - len(chunk)), constant_values=_PADDING)
                end = self._call(self._prefill, padded)["next_position"]
                self._check_end(int(end[0]), length)
            self.position += len(chunk)

    def decode(self, token: int) -> np.ndarray:
        """The logits behind one more token.

        Args:
            token: its id.

        Returns:
            (vocab_size,) float32.

        Raises:
            AFMError: for an id that the vocabulary does not have.
            ContextLengthError: when the context is full.
        """
        logits = self._call(self._decode, self._checked([token]))["logits"]
        self.position += 1
        return np.asarray(logits, np.float32).reshape(-1)

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """The logits behind a prompt: `prefill` of all tokens but the last, and `decode` of that.

        Returns:
            (vocab_size,) float32.

        Raises:
            AFMError: for no token at all, and as `prefill` does.
        """
        if not len(tokens):
            raise AFMError("The prompt has no tokens; one at least is needed.")
        self._checked(tokens)
        self.prefill(tokens[:-1])
        return self.decode(tokens[-1])

    def greedy(
        self, tokens: Sequence[int], max_tokens: int, end_tokens: Collection[int] = ()
    ) -> Iterator[int]:
        """Tokens that follow a prompt, the most likely one each time.

        Args:
            tokens: ids of the prompt, which goes on from `position`.
            max_tokens: ids to make at most.
            end_tokens: ids that end the answer; they are not part of it.
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
        """Forget the tokens from a position on.

        Raises:
            AFMError: for a position that has not been reached.
        """
        if not 0 <= position <= self.position:
            raise AFMError(
                f"position is {shown(position)}; 0 to {self.position} have been reached."
            )
        self.position = position

    def _call(self, function: LoadedFunction, tokens: np.ndarray) -> dict[str, np.ndarray]:
        inputs = {"tokens": tokens[None], "position": np.array([self.position], np.int32)}
        return dict(function.predict(inputs, self._state))

    def _checked(self, tokens: Sequence[int]) -> np.ndarray:
        """(L,) int32 of tokens that the vocabulary and the context have room for."""
        config = self.package.config
        ids = np.asarray(tokens, np.int64).reshape(-1)
        for wrong in ids[(ids < 0) | (ids >= config.vocab_size)]:
            raise AFMError(
                f"The token {wrong} is none of this model; ids are 0 to {config.vocab_size - 1}."
            )
        if self.position + len(ids) > config.context_length:
            raise ContextLengthError(
                f"{len(ids)} tokens after {self.position} are more than the package's context of "
                f"{config.context_length}. Shorten the prompt, or rewind."
            )
        return ids.astype(np.int32)

    def _check_end(self, end: int, length: int) -> None:
        # Core ML has run other lengths than it was given before, without an error.
        if end != self.position + length:
            raise AFMError(
                f"Core ML read {end - self.position} tokens of {length}, on {self._units}. Try other compute "
                "units, or a package with one prompt length."
            )
