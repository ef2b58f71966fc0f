"""The model that sessions run on: what it is, whether it is there, and how many tokens something takes."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from enum import IntEnum
from locale import getlocale
from pathlib import Path
from typing import Any, TypeVar

from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.errors import AFMError, shown
from afm_mlx.fm.error_translation import translated
from afm_mlx.fm.errors import AssetsUnavailableError
from afm_mlx.fm.generation_schema import GenerationSchema
from afm_mlx.fm.prompt import Prompt, prompt_text
from afm_mlx.fm.shared_model import shared_model
from afm_mlx.fm.tool import Tool
from afm_mlx.fm.transcript import Transcript


class SystemLanguageModelUnavailableReason(IntEnum):
    """Why a model can't be used."""

    APPLE_INTELLIGENCE_NOT_ENABLED = 0
    DEVICE_NOT_ELIGIBLE = 1
    MODEL_NOT_READY = 2
    UNKNOWN = 0xFF


class SystemLanguageModelUseCase(IntEnum):
    """What a model is to be used for."""

    GENERAL = 0
    CONTENT_TAGGING = 1


class SystemLanguageModelGuardrails(IntEnum):
    """How much a model may say."""

    DEFAULT = 0
    PERMISSIVE_CONTENT_TRANSFORMATIONS = 1


class SystemLanguageModel:
    """A language model. All that name the same one share it, and their sessions' requests run as one batch.

    It is loaded when it is first needed, and freed with the last object that uses it.

    Args:
        use_case: `CONTENT_TAGGING` has sessions answer with the model's adapter `content_tagging`, where they
            name none themselves. A model without such an adapter answers as it does in general, with a warning.
        guardrails: kept; the models that run here have no guardrails.
        model: folder, hub id or name of a model, or a model and its tokenizer, as `afm_mlx.load` returns them.
            None takes what the environment variable AFM_MLX_MODEL names, or else the embedded `afm-nano`.
        adapters: folders of the model's adapters by their names, or an `AdapterPool` of a model that is given.
            Those that come with a model need not be named.

    Raises:
        AssetsUnavailableError: for adapters that can't be used.
    """

    def __init__(
        self,
        use_case: SystemLanguageModelUseCase = SystemLanguageModelUseCase.GENERAL,
        guardrails: SystemLanguageModelGuardrails = SystemLanguageModelGuardrails.DEFAULT,
        *,
        model: str | Path | tuple[Any, Any] | None = None,
        adapters: AdapterPool | Mapping[str, str | Path] | None = None,
    ):
        self.use_case = _known(SystemLanguageModelUseCase.GENERAL, use_case)
        self.guardrails = _known(SystemLanguageModelGuardrails.DEFAULT, guardrails)
        with translated(AssetsUnavailableError):
            self._shared = shared_model(model, adapters)
        self._has_warned = False

    def is_available(self) -> tuple[bool, SystemLanguageModelUnavailableReason | None]:
        """Return True if the model's files are there, else False and why. Fetches a hub id's files first."""
        try:
            _ = self._shared.context_size
        except AFMError:
            return False, SystemLanguageModelUnavailableReason.MODEL_NOT_READY
        return True, None

    @property
    def context_size(self) -> int:
        """Tokens that instructions, tools, schemas, prompts and answers may have together.

        Raises:
            AssetsUnavailableError: when the model's files are not there.
        """
        with translated(AssetsUnavailableError):
            return self._shared.context_size

    @property
    def supported_languages(self) -> set[str]:
        """Codes of the languages that the model's card (`README.md`) names; empty where it names none.

        Raises:
            AssetsUnavailableError: when the model's files are not there.
        """
        with translated(AssetsUnavailableError):
            return {_language(one) for one in self._shared.languages} - {""}

    def supports_locale(self, locale: str | None = None) -> bool:
        """True if the model is made for the language of a locale.

        Also true if the model's card names no languages.

        Args:
            locale: such as "de", "de-AT", "zh_Hant_TW" or "de_AT.UTF-8"; None for the one of this process.

        Raises:
            ValueError: for what is no locale.
            AssetsUnavailableError: when the model's files are not there.
        """
        if locale is None:
            locale = getlocale()[0] or "en"
        language = _language(locale) if isinstance(locale, str) else ""
        if not language:
            raise ValueError(
                f'locale is {shown(locale)}; a name such as "de" or "de-AT" is needed.'
            )
        languages = self.supported_languages
        return not languages or language in languages

    @property
    def use_case_adapter(self) -> str | None:
        """The adapter of the model's use case, once the model is loaded; None where it needs or has none."""
        if self.use_case is SystemLanguageModelUseCase.GENERAL:
            return None
        name = self.use_case.name.lower()
        if self._shared.has_adapter(name):
            return name
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"The model {self._shared.name} has no adapter {name!r}: for the use case {self.use_case.name} "
                f"it answers as it does in general. Give it one: adapters={{{name!r}: FOLDER}}.",
                stacklevel=2,
            )
        return None

    async def token_count(
        self,
        value: Prompt | GenerationSchema | Transcript | list[Tool] | None = None,
        *,
        instructions: str | None = None,
    ) -> int:
        """Tokens that something takes in the model's context, without those that separate messages.

        Args:
            value: a prompt, a schema, a list of tools, or a transcript, which is counted as a whole.
            instructions: instructions instead.

        Raises:
            ValueError: for both, and for neither.
            PromptError: for what is none of these.
            AssetsUnavailableError: when the model can't be loaded.
        """
        if (value is None) == (instructions is None):
            raise ValueError("token_count() takes either a value or instructions.")
        with translated(AssetsUnavailableError):
            await self._shared.load()
        with translated():
            if isinstance(value, Transcript):
                messages, tools = value.messages()
                return len(self._shared.encode_chat(messages, tools)) if messages or tools else 0
            empty = {"role": "system", "content": ""}, {"role": "user", "content": ""}
            system, user = map(dict, empty)
            tools = []
            if instructions is not None:
                system["content"] = instructions
            elif isinstance(value, GenerationSchema):
                user["response_format"] = value.response_format()  # type: ignore[assignment]
            elif isinstance(value, list) and all(isinstance(tool, Tool) for tool in value):
                tools = [tool.tool_definition for tool in value]  # type: ignore[union-attr]
            else:
                user["content"] = prompt_text(value)  # type: ignore[arg-type]
            count = self._shared.encode_chat
            return len(count([system, user], tools)) - len(count(empty))


Choice = TypeVar("Choice", bound=IntEnum)


def _language(locale: str) -> str:
    """The language's code in the name of a locale; empty where it has none."""
    found = re.match(r"([A-Za-z]{2,3})(?![A-Za-z])", locale)
    return found[1].lower() if found else ""


def _known(default: Choice, given: Any) -> Choice:
    """A member of the default's enumeration; the default in place of any other, with a warning."""
    try:
        return type(default)(getattr(given, "value", given))
    except ValueError:
        warnings.warn(
            f"{shown(given)} is no {type(default).__name__}; {default.name} is used.", stacklevel=3
        )
        return default
