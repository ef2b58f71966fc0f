"""Options of a request: how tokens are chosen, and how many."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum
from typing import Any


class SamplingModeType(str, Enum):  # noqa: UP042  its members print as Apple's do
    """The two ways to choose the next token."""

    GREEDY = "greedy"
    RANDOM = "random"


@dataclass
class SamplingMode:
    """Greedy or random sampling; made by `greedy()` and `random()`.

    Args:
        mode_type: greedy or random.
        top: draw from this number of most likely tokens.
        probability_threshold: draw from the most likely tokens whose probabilities add up to this.
        seed: random seed; equal seeds draw equal tokens for equal requests.

    Raises:
        ValueError: for a value out of range, and for both limits at once.
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
        """Always choose the most likely token."""
        return cls(SamplingModeType.GREEDY)

    @classmethod
    def random(
        cls,
        top: int | None = None,
        probability_threshold: float | None = None,
        seed: int | None = None,
    ) -> SamplingMode:
        """Draw tokens by their probability, from all or the most likely ones.

        Raises:
            ValueError: for a value out of range, and for both limits at once.
        """
        return cls(SamplingModeType.RANDOM, top, probability_threshold, seed)


@dataclass
class GenerationOptions:
    """Options of one request.

    Args:
        sampling: how tokens are chosen; pass None for greedy, or for random if there is a temperature.
        temperature: divides the logits: below 1, likely tokens become likelier; 0 is greedy. Pass None for 1.
        maximum_response_tokens: length at which the answer is cut off; pass None for no limit.

    Raises:
        ValueError: for a value of the wrong type or out of range.
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
        """Return the options that are set, as JSON."""
        found: dict[str, Any] = {
            "temperature": self.temperature,
            "maximum_response_tokens": self.maximum_response_tokens,
        }
        options: dict[str, Any] = {}
        if self.sampling is not None:
            limits = {
                "top_k": self.sampling.top,
                "top_p": self.sampling.probability_threshold,
                "seed": self.sampling.seed,
            }
            is_random = self.sampling.mode_type is SamplingModeType.RANDOM
            given = {n: value for n, value in limits.items() if is_random and value is not None}
            options["sampling"] = {"mode": self.sampling.mode_type.value, **given}
        return options | {name: value for name, value in found.items() if value is not None}


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max  # an int may be larger, and NaN is not
