"""The errors of Apple's SDK, in its hierarchy: `GenerationError` is what a request can end in.

They are no `AFMError`s, so that a script's `except` clauses mean what they mean with Apple's package.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any


class FoundationModelsError(Exception):
    """Any error of a model, a session, a schema or a tool."""


class GenerationError(FoundationModelsError):
    """A request that could not be answered."""


class ExceededContextWindowSizeError(GenerationError):
    """Instructions, tools, schemas, prompts and answers together are more than the context window holds."""


class AssetsUnavailableError(GenerationError):
    """The model's files are missing or can't be loaded."""


class GuardrailViolationError(GenerationError):
    """A prompt or an answer that a guardrail refuses."""


class UnsupportedGuideError(GenerationError):
    """A guide on a type of field that it can't be applied to."""


class UnsupportedLanguageOrLocaleError(GenerationError):
    """A language that the model can't answer in."""


class DecodingFailureError(GenerationError):
    """JSON (an answer, a transcript) that has not the form it must have."""


class RateLimitedError(GenerationError):
    """Too many requests in a short time."""


class ConcurrentRequestsError(GenerationError):
    """A request that may not run beside another one."""


class RefusalError(GenerationError):
    """The model refused to answer.

    Args:
        message: what was refused.
        debug_description: details for a developer.
        explanation_entries: transcript entries in which the model says why.
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
    """A class or a schema that no answer can be generated for."""


class ToolCallError(FoundationModelsError):
    """A tool that failed.

    Args:
        tool_name: the tool.
        underlying_error: what it raised.
    """

    def __init__(self, tool_name: str, underlying_error: Exception) -> None:
        super().__init__(f"The tool {tool_name!r} failed: {underlying_error}")
        self.tool_name = tool_name
        self.underlying_error = underlying_error


class GenerationErrorCode(IntEnum):
    """The numbers that Apple's native library has for its errors."""

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
