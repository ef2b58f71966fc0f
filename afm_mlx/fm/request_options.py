"""The options of a request, as the engine takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from afm_mlx.engine.request import MASK64
from afm_mlx.engine.samplers import make_sampler
from afm_mlx.errors import shown
from afm_mlx.fm.error_translation import translated
from afm_mlx.fm.generation_options import GenerationOptions, SamplingModeType


def request_options(
    options: GenerationOptions | None,
    stop: str | Sequence[str] = (),
    at_limit: str = "complete",
) -> dict[str, Any]:
    """Fields of the engine's `Request`.

    Without options, tokens are the most likely ones. A temperature, or `SamplingMode.random`, draws them; where
    only the mode is given, at temperature 1.

    Args:
        options: None for none.
        stop: a string that ends the answer and is not part of it, or several.
        at_limit: see `Request`.

    Raises:
        TypeError: for options or a `stop` of another type.
        ValueError: for options that were changed to what they can't be.
        GenerationError: for options that no sampler can have.
    """
    options = GenerationOptions() if options is None else options
    if not isinstance(options, GenerationOptions):
        raise TypeError(f"options must be GenerationOptions, got {shown(options)}.")
    if not isinstance(stop, Sequence):
        raise TypeError(f"stop must be a string or a list of strings, got {shown(stop)}.")
    options = replace(options)  # checks what was set since it was made
    limit = options.maximum_response_tokens
    return {
        "max_tokens": -1 if limit is None else limit,
        "stop": [stop] if isinstance(stop, str) else list(stop),
        "at_limit": at_limit,
        **_sampling(options),
    }


def _sampling(options: GenerationOptions) -> dict[str, Any]:
    mode, temperature = options.sampling, options.temperature
    is_random = (
        temperature is not None if mode is None else mode.mode_type is SamplingModeType.RANDOM
    )
    if not is_random:
        return {}
    top = mode.top if mode else None
    threshold = mode.probability_threshold if mode else None
    if threshold == 0:  # nothing but the most likely token
        top, threshold = 1, None
    with translated():
        sampler = make_sampler(
            temp=1.0 if temperature is None else temperature, top_k=top or 0, top_p=threshold or 0.0
        )
    seed = mode.seed if mode else None
    return {"sampler": sampler, "seed": None if seed is None else seed & MASK64}
