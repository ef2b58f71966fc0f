"""The errors of Apple's SDK, in its hierarchy, and the translation of the engine's errors to them.

They are not `AFMError`s, so that a script's `except` clauses mean the same as with Apple's package.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

from afm_mlx.errors import (
    AFMError,
    CheckpointError,
    ConfigError,
    ConstraintError,
    ContextLengthError,
)


class FoundationModelsError(Exception):
    """Base of the errors of models, sessions, schemas and tools."""


class GenerationError(FoundationModelsError):
    """A request that can't be answered."""


class ExceededContextWindowSizeError(GenerationError):
    """Instructions, tools, schemas, prompts and answers together are more than the context window holds."""


class AssetsUnavailableError(GenerationError):
    """The model's files are missing or can't be loaded."""


class GuardrailViolationError(GenerationError):
    """A prompt or an answer that a guardrail refuses; never raised here."""


class UnsupportedGuideError(GenerationError):
    """A guide that can't be applied to its field's type."""


class UnsupportedLanguageOrLocaleError(GenerationError):
    """A language that the model can't answer in; never raised here."""


class DecodingFailureError(GenerationError):
    """An answer or a transcript whose JSON is not valid or has the wrong form."""


class RateLimitedError(GenerationError):
    """Too many requests in a short time; never raised here."""


class ConcurrentRequestsError(GenerationError):
    """A request to a session from inside its own running request, or from another event loop."""


class RefusalError(GenerationError):
    """A refusal of the model to answer; never raised here.

    Args:
        message: the refusal in one line.
        debug_description: details for a developer.
        explanation_entries: transcript entries with the model's explanation.
    """

    def __init__(
        self,
        message: str,
        debug_description: str | None = None,
        explanation_entries: list[Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.debug_description = debug_description
        self.explanation_entries = explanation_entries or []


class InvalidGenerationSchemaError(FoundationModelsError):
    """A class or a schema under which no answer can be generated."""


class ToolCallError(FoundationModelsError):
    """A tool that failed.

    Args:
        tool_name: the tool's name.
        underlying_error: the error that the tool raised.
    """

    def __init__(self, tool_name: str, underlying_error: Exception) -> None:
        super().__init__(f"The tool {tool_name!r} failed: {underlying_error}")
        self.tool_name = tool_name
        self.underlying_error = underlying_error


class GenerationErrorCode(IntEnum):
    """Numbers of errors in Apple's native library."""

    SUCCESS = 0
    EXCEEDED_CONTEXT_WINDOW_SIZE = 1
    ASSETS_UNAVAILABLE = 2
    GUARDRAIL_VIOLATION = 3
    UNSUPPORTED_GUIDE = 4
    UNSUPPORTED_LANGUAGE_OR_LOCALE = 5
    DECODING_FAILURE = 6
    RATE_LIMITED = 7
    CONCURRENT_REQUESTS = 8
    REFUSAL = 9
    INVALID_SCHEMA = 10
    UNKNOWN_ERROR = 255


_KINDS: dict[type[Exception], type[GenerationError]] = {
    ContextLengthError: ExceededContextWindowSizeError,
    ConstraintError: DecodingFailureError,
    CheckpointError: AssetsUnavailableError,
    ConfigError: AssetsUnavailableError,
}


@contextmanager
def translated(kind: type[GenerationError] = GenerationError) -> Iterator[None]:
    """Raise the engine's errors as errors of Apple's SDK, caused by them, while the context is open.

    An error without a counterpart becomes a `kind`.
    """
    # The package is imported without the engine, which takes a second.
    from afm_mlx.engine.async_engine import StepError

    try:
        yield
    except (AFMError, StepError) as error:
        found = next((k for k in _KINDS if isinstance(error, k)), Exception)
        context = "The context window is full. " if found is ContextLengthError else ""
        raise _KINDS.get(found, kind)(f"{context}{error}") from error
