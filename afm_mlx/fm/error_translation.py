"""Errors of the engine as those of Apple's SDK."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from afm_mlx.engine.async_engine import StepError
from afm_mlx.errors import (
    AFMError,
    CheckpointError,
    ConfigError,
    ConstraintError,
    ContextLengthError,
)
from afm_mlx.fm.errors import (
    AssetsUnavailableError,
    DecodingFailureError,
    ExceededContextWindowSizeError,
    GenerationError,
)

_KINDS: dict[type[Exception], type[GenerationError]] = {
    ContextLengthError: ExceededContextWindowSizeError,
    ConstraintError: DecodingFailureError,
    CheckpointError: AssetsUnavailableError,
    ConfigError: AssetsUnavailableError,
}


@contextmanager
def translated(kind: type[GenerationError] = GenerationError) -> Iterator[None]:
    """Raise what the engine raises inside as an error of Apple's SDK, whose cause it is.

    Args:
        kind: the error for what has no kind of its own.
    """
    try:
        yield
    except (AFMError, StepError) as error:
        found = next((k for k in _KINDS if isinstance(error, k)), Exception)
        context = "The context window is full. " if found is ContextLengthError else ""
        raise _KINDS.get(found, kind)(f"{context}{error}") from error
