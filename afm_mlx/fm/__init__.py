"""The API of Apple's `apple-fm-sdk`, on this engine.

    from afm_mlx import fm

    session = fm.LanguageModelSession("Answer in one sentence.")
    print(await session.respond("What is the capital of France?"))

Models, sessions, tools and transcripts are loaded when they are first used; the rest is cheap to import.

| file | what it holds |
| --- | --- |
| `session.py` | sessions; one request at a time |
| `turn.py`, `answer_form.py` | one request: its answers, its tool calls, the context that it has |
| `core.py` | models; each is loaded once and runs all of its sessions in one batch |
| `generable.py` | the decorator `generable`; generated values as JSON and as instances |
| `generation_schema.py` | schemas, fields, guides |
| `generation_options.py`, `prompt.py` | options of a request; prompts |
| `tool.py` | tools written as classes, and made of functions |
| `transcript.py`, `transcript_entries.py` | a session's history |
| `feedback.py` | feedback about an answer |
| `errors.py` | the SDK's errors |
| `__main__.py` | running scripts that import `apple_fm_sdk` |
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

if TYPE_CHECKING:
    from afm_mlx.fm.core import (
        SystemLanguageModel,
        SystemLanguageModelGuardrails,
        SystemLanguageModelUnavailableReason,
        SystemLanguageModelUseCase,
    )
    from afm_mlx.fm.feedback import LanguageModelFeedback
    from afm_mlx.fm.session import LanguageModelSession
    from afm_mlx.fm.tool import Tool
    from afm_mlx.fm.transcript import Transcript

__version__ = "0.1.0"

_HOME = {
    "LanguageModelFeedback": "feedback",
    "LanguageModelSession": "session",
    "SystemLanguageModel": "core",
    "SystemLanguageModelGuardrails": "core",
    "SystemLanguageModelUnavailableReason": "core",
    "SystemLanguageModelUseCase": "core",
    "Tool": "tool",
    "Transcript": "transcript",
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
    from importlib import import_module

    if name in _HOME.values():
        return import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
