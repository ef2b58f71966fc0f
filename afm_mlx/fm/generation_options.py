"""How tokens are chosen, and how many."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum
from typing import Any


class SamplingModeType(str, Enum):  # noqa: UP042  its members print as Apple's do
    """How the next token is chosen."""

    GREEDY = "greedy"
    RANDOM = "random"


@dataclass
class SamplingMode:
    """Greedy, or at random among likely tokens; made by `greedy()` and `random()`.

    Args:
        mode_type: which of the two.
        top: the number of most likely tokens among which is drawn.
        probability_threshold: the most likely tokens, up to this sum of probabilities, among which is drawn.
        seed: equal seeds draw equal tokens for equal requests.

    Raises:
        ValueError: for a value out of its range, and for both limits at once.
    """

    mode_type: SamplingModeType
    top: int | None = None
    probability_threshold: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        self.mode_type = SamplingModeType(self.mode_type)
        if self.top is not None and self.probability_threshold is not None:
            raise ValueError(
                "Cannot specify both 'top' and 'probability_threshold'. Leave one out."
            )
        if self.top is not None and not (_is_integer(self.top) and self.top > 0):
            raise ValueError(f"'top' must be a positive integer, got {self.top!r}.")
        threshold = self.probability_threshold
        if threshold is not None and not (_is_number(threshold) and 0 <= threshold <= 1):
            raise ValueError(
                f"'probability_threshold' must be between 0.0 and 1.0, got {threshold!r}."
            )
        if self.seed is not None and not _is_integer(self.seed):
            raise ValueError(f"'seed' must be an integer, got {self.seed!r}.")

    @classmethod
    def greedy(cls) -> SamplingMode:
        """Always the most likely token."""
        return cls(SamplingModeType.GREEDY)

    @classmethod
    def random(
        cls,
        top: int | None = None,
        probability_threshold: float | None = None,
        seed: int | None = None,
    ) -> SamplingMode:
        """A token drawn by its probability, among all or the most likely ones.

        Raises:
            ValueError: for a value out of its range, and for both limits at once.
        """
        return cls(SamplingModeType.RANDOM, top, probability_threshold, seed)


@dataclass
class GenerationOptions:
    """Options of one request; None leaves one to the model.

    Args:
        sampling: how tokens are chosen.
        temperature: divides the logits: below 1 likely tokens become likelier still; 0 is greedy.
        maximum_response_tokens: the answer is cut off there.

    Raises:
        ValueError: for a value of another type or out of its range.
    """

    sampling: SamplingMode | None = None
    temperature: float | None = None
    maximum_response_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.temperature is not None:
            if not _is_number(self.temperature):
                raise ValueError(f"'temperature' must be a number, got {self.temperature!r}.")
            if self.temperature < 0:
                raise ValueError(f"'temperature' must be non-negative, got {self.temperature!r}.")
        limit = self.maximum_response_tokens
        if limit is not None:
            if not _is_integer(limit):
                raise ValueError(f"'maximum_response_tokens' must be an integer, got {limit!r}.")
            if limit <= 0:
                raise ValueError(f"'maximum_response_tokens' must be positive, got {limit!r}.")
        if self.sampling is not None and not isinstance(self.sampling, SamplingMode):
            raise ValueError(
                f"'sampling' must be a SamplingMode instance, got {self.sampling!r}; "
                "make one with SamplingMode.greedy() or SamplingMode.random()."
            )

    def to_dict(self) -> dict[str, Any]:
        """The options that are set, as JSON."""
        options: dict[str, Any] = {}
        if self.sampling is not None:
            limits = {
                "top_k": self.sampling.top,
                "top_p": self.sampling.probability_threshold,
                "seed": self.sampling.seed,
            }
            is_random = self.sampling.mode_type is SamplingModeType.RANDOM
            given = {
                name: value for name, value in limits.items() if is_random and value is not None
            }
            options["sampling"] = {"mode": self.sampling.mode_type.value, **given}
        if self.temperature is not None:
            options["temperature"] = self.temperature
        if self.maximum_response_tokens is not None:
            options["maximum_response_tokens"] = self.maximum_response_tokens
        return options


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max  # an int may be larger, and NaN is not
