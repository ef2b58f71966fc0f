"""The API of Apple's `apple-fm-sdk`, on this engine.

    from afm_mlx import fm

    session = fm.LanguageModelSession("Answer in one sentence.")
    print(await session.respond("What is the capital of France?"))

Models and sessions are loaded when they are first used; all else costs next to nothing to import.

| file | what it holds |
| --- | --- |
| `session.py`, `session_lock.py` | sessions; one request at a time |
| `turn.py`, `answer_form.py`, `tool_calls.py` | a request under way: its answers and its calls of tools |
| `context_window.py` | what becomes of a history that is too long |
| `core.py`, `shared_model.py` | models; each is loaded once and runs all of its sessions in one batch |
| `request_options.py`, `answer.py`, `error_translation.py` | between the engine's terms and the SDK's |
| `generable.py` | the decorator `generable`; generated values as JSON and as instances |
| `generation_schema.py` | schemas, fields, guides |
| `generation_options.py`, `prompt.py` | options of a request; prompts |
| `tool.py`, `function_tool.py` | tools written as classes, and made of functions |
| `transcript.py`, `transcript_entries.py`, `transcript_format.py` | a session's history |
| `feedback.py` | what somebody thinks of an answer |
| `errors.py` | the SDK's errors |
| `stand_in.py`, `__main__.py` | scripts that import `apple_fm_sdk` |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from afm_mlx.fm.errors import (
    AssetsUnavailableError,
    ConcurrentRequestsError,
    DecodingFailureError,
    ExceededContextWindowSizeError,
    FoundationModelsError,
    GenerationError,
    GenerationErrorCode,
    GuardrailViolationError,
    InvalidGenerationSchemaError,
    RateLimitedError,
    RefusalError,
    ToolCallError,
    UnsupportedGuideError,
    UnsupportedLanguageOrLocaleError,
)
from afm_mlx.fm.generable import (
    ConvertibleFromGeneratedContent,
    ConvertibleToGeneratedContent,
    Generable,
    GeneratedContent,
    GenerationID,
    generable,
)
from afm_mlx.fm.generation_options import GenerationOptions, SamplingMode, SamplingModeType
from afm_mlx.fm.generation_schema import GenerationGuide, GenerationSchema, GuideType, guide
from afm_mlx.fm.prompt import (
    Attachment,
    ImageAttachment,
    ImagePromptError,
    Prompt,
    PromptComponent,
    PromptError,
)
from afm_mlx.fm.tool import Tool
from afm_mlx.fm.transcript import Transcript

if TYPE_CHECKING:
    from afm_mlx.fm.core import (
        SystemLanguageModel,
        SystemLanguageModelGuardrails,
        SystemLanguageModelUnavailableReason,
        SystemLanguageModelUseCase,
    )
    from afm_mlx.fm.feedback import LanguageModelFeedback
    from afm_mlx.fm.session import LanguageModelSession

__version__ = "0.1.0"

_HOME = {
    "LanguageModelFeedback": "feedback",
    "LanguageModelSession": "session",
    "SystemLanguageModel": "core",
    "SystemLanguageModelGuardrails": "core",
    "SystemLanguageModelUnavailableReason": "core",
    "SystemLanguageModelUseCase": "core",
}

__all__ = [
    "AssetsUnavailableError",
    "Attachment",
    "ConcurrentRequestsError",
    "ConvertibleFromGeneratedContent",
    "ConvertibleToGeneratedContent",
    "DecodingFailureError",
    "ExceededContextWindowSizeError",
    "FoundationModelsError",
    "Generable",
    "GeneratedContent",
    "GenerationError",
    "GenerationErrorCode",
    "GenerationGuide",
    "GenerationID",
    "GenerationOptions",
    "GenerationSchema",
    "GuardrailViolationError",
    "GuideType",
    "ImageAttachment",
    "ImagePromptError",
    "InvalidGenerationSchemaError",
    "LanguageModelFeedback",
    "LanguageModelSession",
    "Prompt",
    "PromptComponent",
    "PromptError",
    "RateLimitedError",
    "RefusalError",
    "SamplingMode",
    "SamplingModeType",
    "SystemLanguageModel",
    "SystemLanguageModelGuardrails",
    "SystemLanguageModelUnavailableReason",
    "SystemLanguageModelUseCase",
    "Tool",
    "ToolCallError",
    "Transcript",
    "UnsupportedGuideError",
    "UnsupportedLanguageOrLocaleError",
    "generable",
    "guide",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
