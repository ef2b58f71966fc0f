"""The model that sessions run on: `SystemLanguageModel`, and the process's loaded models behind it."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future
from enum import IntEnum
from locale import getlocale
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import mlx.nn as nn
import yaml

from afm_mlx import threads
from afm_mlx.adapters.active import active_adapters
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.config import ModelConfig, is_afm_config, read_config_json
from afm_mlx.engine.async_engine import AsyncEngine
from afm_mlx.engine.prefix_cache import PrefixCache
from afm_mlx.errors import AFMError, RequestError, shown
from afm_mlx.fm.errors import AssetsUnavailableError, translated
from afm_mlx.fm.generation_schema import GenerationSchema
from afm_mlx.fm.prompt import ImagePromptError, Prompt, prompt_parts
from afm_mlx.fm.tool import Tool
from afm_mlx.fm.transcript import Transcript
from afm_mlx.fm.transcript_entries import ImageSegment
from afm_mlx.loading.load import load
from afm_mlx.loading.resolve import EMBEDDED_MODEL, model_adapters, resolve_model
from afm_mlx.model.model import is_afm
from afm_mlx.tokenizer.chat_images import ChatImages
from afm_mlx.tokenizer.protocol import Tokenizer
from afm_mlx.vision_config import VisionConfig

if TYPE_CHECKING:  # imports Pillow
    from afm_mlx.vision.prompt_image import PromptImage

PREFIX_BYTES = 1 << 30
"""Bytes of keys and values that sessions keep for later prompts: 60,000 tokens of the 3B."""
MOST_IMAGES = 16
"""Images of prompts that stay read for the next turn: 7 MB each in high mode."""
_CARD_BYTES = 1 << 16  # bytes of a model card that are read

HistoryImages = dict[tuple[str, str], "PromptImage"]
"""Images of a transcript by data URI and mode, read for a model."""

Source = str | Path | tuple[nn.Module, Tokenizer] | None
"""A model: folder, hub id or name; or the model and its tokenizer, as `afm_mlx.load` returns them; None for the
environment's (AFM_MLX_MODEL) or the embedded one."""


class SystemLanguageModelUnavailableReason(IntEnum):
    """Why a model can't be used."""

    APPLE_INTELLIGENCE_NOT_ENABLED = 0
    DEVICE_NOT_ELIGIBLE = 1
    MODEL_NOT_READY = 2
    UNKNOWN = 0xFF


class SystemLanguageModelUseCase(IntEnum):
    """The purpose of a model."""

    GENERAL = 0
    CONTENT_TAGGING = 1


class SystemLanguageModelGuardrails(IntEnum):
    """The strictness of a model's guardrails."""

    DEFAULT = 0
    PERMISSIVE_CONTENT_TRANSFORMATIONS = 1


class SystemLanguageModel:
    """A language model, loaded when it is first needed and freed with the last object that uses it.

    Objects for the same model share it, and their sessions' requests run in one batch.

    Args:
        use_case: `CONTENT_TAGGING` makes the adapter `content_tagging` the default of sessions. A model without
            such an adapter answers as in general, with a warning.
        guardrails: kept; the models that run here have no guardrails.
        model: folder, hub id or name of a model; or a model and its tokenizer, as `afm_mlx.load` returns them.
            Pass None for the environment variable AFM_MLX_MODEL, else the embedded `afm-nano`.
        adapters: folders of adapters by name, or an `AdapterPool` of the given model. The adapters in the
            model's folder are found without it.

    Raises:
        AssetsUnavailableError: for adapters that can't be used.
    """

    def __init__(
        self,
        use_case: SystemLanguageModelUseCase = SystemLanguageModelUseCase.GENERAL,
        guardrails: SystemLanguageModelGuardrails = SystemLanguageModelGuardrails.DEFAULT,
        *,
        model: Source = None,
        adapters: AdapterPool | Mapping[str, str | Path] | None = None,
    ):
        self.use_case = _known(SystemLanguageModelUseCase.GENERAL, use_case)
        self.guardrails = _known(SystemLanguageModelGuardrails.DEFAULT, guardrails)
        with translated(AssetsUnavailableError):
            self._shared = shared_model(model, adapters)
        self._has_warned = False

    def is_available(self) -> tuple[bool, SystemLanguageModelUnavailableReason | None]:
        """Return True if the model's files are there, else False and a reason; fetch a hub id's files first."""
        try:
            _ = self._shared.context_size
        except AFMError:
            return False, SystemLanguageModelUnavailableReason.MODEL_NOT_READY
        return True, None

    @property
    def context_size(self) -> int:
        """Largest number of tokens of instructions, tools, schemas, prompts and answers together.

        Raises:
            AssetsUnavailableError: if the model's files are not there.
        """
        with translated(AssetsUnavailableError):
            return self._shared.context_size

    @property
    def supported_languages(self) -> set[str]:
        """Codes of the languages that the model's card (`README.md`) names; empty if it names none.

        Raises:
            AssetsUnavailableError: if the model's files are not there.
        """
        with translated(AssetsUnavailableError):
            return {_language(one) for one in self._shared.languages} - {""}

    def supports_locale(self, locale: str | None = None) -> bool:
        """True if the model's card names a locale's language, or no languages at all.

        Args:
            locale: such as "de", "de-AT", "zh_Hant_TW" or "de_AT.UTF-8"; pass None for the process's locale.

        Raises:
            ValueError: for a name that is not a locale.
            AssetsUnavailableError: if the model's files are not there.
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
        """Name of the use case's adapter; None if it needs or has none, and until the model is loaded."""
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
        """Count the tokens of a value in the model's context, without tokens that separate messages.

        Args:
            value: a prompt, a schema, a list of tools, or a transcript, which is counted as a whole.
            instructions: instructions, in place of a value.

        Raises:
            ValueError: for both arguments, and for neither.
            PromptError: for a value of another type.
            AssetsUnavailableError: if the model can't be loaded.
        """
        if (value is None) == (instructions is None):
            raise ValueError("token_count() takes either a value or instructions.")
        with translated(AssetsUnavailableError):
            await self._shared.load()
        with translated():
            if isinstance(value, Transcript):
                images = await self._shared.read_images(value)
                messages, tools = value.messages(str)
                if not messages and not tools:
                    return 0
                return len(self._shared.encode_history(value, images, tools)[0])
            system: dict[str, object] = {"role": "system", "content": ""}
            user: dict[str, object] = {"role": "user", "content": ""}
            empty = len(self._shared.encode_chat([system, user]))
            tools = []
            if instructions is not None:
                system["content"] = instructions
            elif isinstance(value, GenerationSchema):
                user["response_format"] = value.response_format()
            elif isinstance(value, list) and all(isinstance(tool, Tool) for tool in value):
                tools = [tool.tool_definition for tool in value if isinstance(tool, Tool)]
            else:
                parts = prompt_parts(value)  # type: ignore[arg-type]
                prompt = Transcript([await asyncio.to_thread(Transcript.Prompt, parts)])
                images = await self._shared.read_images(prompt)
                ids, _ = self._shared.encode_history(prompt, images)
                without, _ = self._shared.encode_history(Transcript([Transcript.Prompt("")]), {})
                return len(ids) - len(without)
            return len(self._shared.encode_chat([system, user], tools)) - empty


Choice = TypeVar("Choice", bound=IntEnum)


def _language(locale: str) -> str:
    found = re.match(r"([A-Za-z]{2,3})(?![A-Za-z])", locale)
    return found[1].lower() if found else ""


def _known(default: Choice, given: Any) -> Choice:
    """Convert `given` to a member of the enumeration of `default`; warn and return `default` if it is none."""
    try:
        return type(default)(getattr(given, "value", given))
    except ValueError:
        warnings.warn(
            f"{shown(given)} is no {type(default).__name__}; {default.name} is used.", stacklevel=3
        )
        return default


class SharedModel:
    """A model with its tokenizer, its adapters, and the engine that all of its sessions use.

    `load` loads it in MLX's thread; `engine` and `tokenizer` need that.

    Args:
        source: folder, hub id or name; or a model and its tokenizer, as `load` returns them.
        pool: the model's adapters; pass None to make a pool.
    """

    tokenizer: Tokenizer
    engine: AsyncEngine

    def __init__(self, source: str | tuple[nn.Module, Tokenizer], pool: AdapterPool | None):
        self._source, self._pool = source, pool
        self._loading: Future[None] | None = None
        self._lock = threading.Lock()
        self._adapters: dict[str, Path] = {}  # adapters that were given as folders
        self._folder: Path | None = None
        self._context: int | None = None
        self._is_loaded = False
        # The last images that were read, by data URI and mode.
        self._images: OrderedDict[tuple[str, str], PromptImage] = OrderedDict()

    @property
    def name(self) -> str:
        """The model's name: the last part of its path or id."""
        if isinstance(self._source, str):
            return Path(self._source).name
        folder = getattr(self._source[1], "name_or_path", "")
        return Path(folder).name or type(self._source[0]).__name__

    @property
    def context_size(self) -> int:
        """Largest number of tokens of prompt and answer; very large if the model doesn't say.

        Raises `AFMError` if the model can't be found.
        """
        if self._context is not None:
            return self._context
        if isinstance(self._source, str):
            path = self._found() / "config.json"
            values = read_config_json(path)
            known = values.get("max_position_embeddings")
            if is_afm_config(values):
                known = ModelConfig.from_dict(values, source=str(path)).context_length
        else:
            model = self._source[0]
            name = "context_length" if is_afm(model) else "max_position_embeddings"
            known = getattr(model.args, name, None)
        self._context = known if isinstance(known, int) else sys.maxsize
        return self._context

    @property
    def languages(self) -> list[str]:
        """The `language` of the model's card, `README.md`; empty without one. Raises as `context_size`."""
        if isinstance(self._source, str):
            folder = self._found()
        else:
            folder = Path(getattr(self._source[1], "name_or_path", "") or os.devnull)
        card = folder / "README.md"
        if not card.is_file():
            return []
        try:
            with card.open("rb") as file:
                text = file.read(_CARD_BYTES).decode("utf-8", "replace")
            head = re.match(r"---\s*\n(.*?)\n---", text, re.S)
            fields = yaml.safe_load(head[1]) if head else None
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            return []
        found = fields.get("language") if isinstance(fields, dict) else None
        listed = found if isinstance(found, list) else [found]
        # YAML reads the code of Norwegian as the word "no".
        return [
            "no" if one is False else one for one in listed if one is False or isinstance(one, str)
        ]

    def has_adapter(self, name: str) -> bool:
        """True if the model has an adapter of this name; False for all names until the model is loaded."""
        return self._pool is not None and name in self._pool.registered

    def _found(self) -> Path:
        """Return the model's folder; fetch the files of a hub id once."""
        assert isinstance(self._source, str)
        if self._folder is None:
            self._folder = resolve_model(self._source)
        return self._folder

    async def load(self) -> None:
        """Load the model, unless it is loaded; raise an `AFMError` if that fails."""
        if self._is_loaded:
            return
        if isinstance(self._source, str):
            # In another thread than MLX's: other models' rows don't wait for a download.
            await asyncio.to_thread(self._found)
        with self._lock:
            loading = self._loading
            if loading is None or (loading.done() and loading.exception()):
                loading = self._loading = threads.submit(self._load)
        # If one task is cancelled, the others still get the model.
        await asyncio.shield(asyncio.wrap_future(loading))

    def _load(self) -> None:
        if isinstance(self._source, str):
            model, self.tokenizer = load(self._found())
        else:
            model, self.tokenizer = self._source
        if self._pool is None:
            active = active_adapters(model)
            is_taken = active is not None and active.batch is not None
            pool = None if is_taken else AdapterPool(model, base_folder=self._folder)
            own = model_adapters(self._folder) if self._folder else {}
            with self._lock:
                if pool is None and self._adapters:
                    raise RequestError(
                        f"The adapters {', '.join(self._adapters)} can't be used: the model has one that all "
                        "rows use. Remove that one (detach_adapter)."
                    )
                for name, path in own.items():
                    self._adapters.setdefault(name, path.resolve())
                if pool is not None:
                    for name, path in self._adapters.items():
                        pool.register(name, path)
                self._pool = pool
        cache = PrefixCache(PREFIX_BYTES)
        self.engine = AsyncEngine(model, self.tokenizer, adapters=self._pool, prefix_cache=cache)
        self._is_loaded = True

    def register(self, adapters: Mapping[str, str | Path]) -> None:
        """Register adapters' folders by name; raise `RequestError` for a taken name or a missing folder."""
        for name, path in adapters.items():
            if not isinstance(path, str | os.PathLike):
                raise RequestError(
                    f"The adapter {shown(name)} is {shown(path)}; a folder is needed."
                )
            folder = Path(os.path.expanduser(path)).resolve()
            with self._lock:
                if self._adapters.get(name, folder) != folder:
                    raise RequestError(
                        f"The adapter {shown(name)} is {self._adapters[name]} already, and can't be {folder}, "
                        "too. Take another name."
                    )
                if not folder.exists():
                    raise RequestError(f"The adapter {shown(name)}: there is no {folder}.")
                if self._pool is not None and name not in self._adapters:
                    self._pool.register(name, folder)
                self._adapters[name] = folder

    @property
    def _vision_config(self) -> VisionConfig | None:
        # A caller's tokenizer may be another one than `load` returns.
        return getattr(self.tokenizer, "vision_config", None)

    async def read_images(self, history: Transcript) -> HistoryImages:
        """Read a history's images for the model, in another thread.

        Raises `ImagePromptError` if there are any and the model reads text only, or one can't be read.
        """
        found = history.images
        if not found:
            return {}
        config = self._vision_config
        if config is None:
            raise ImagePromptError(
                "The prompt has an attachment, and this model reads text only. Describe in words what the "
                "model needs to know about it."
            )
        return await asyncio.to_thread(self._read_images, found, config)

    def _read_images(self, found: list[ImageSegment], config: VisionConfig) -> HistoryImages:
        from afm_mlx.vision.message_images import data_uri_content
        from afm_mlx.vision.prompt_image import read_image

        images: HistoryImages = {}
        for each in found:
            key = each.url, each.mode
            with self._lock:
                image = self._images.get(key)
            if image is None:
                try:
                    image = read_image(data_uri_content(each.url), config, each.mode)
                except ValueError as error:
                    name = "" if each.label is None else f" ({shown(each.label)})"
                    raise ImagePromptError(f"An image of the prompt{name}: {error}") from error
            images[key] = image
            with self._lock:
                self._images[key] = image
                self._images.move_to_end(key)
                while len(self._images) > MOST_IMAGES:
                    self._images.popitem(last=False)
        return images

    def encode_history(
        self,
        history: Transcript,
        images: HistoryImages,
        tools: Sequence[Mapping[str, object]] = (),
        **options: Any,
    ) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Encode a history as `encode_chat` does; `images` are of `read_images`.

        Returns:
            The token ids, and the images in the order of their tokens.
        """
        marks, mark = ChatImages(), None
        if self._vision_config is not None:
            mark = lambda each: marks.mark(images[each.url, each.mode])  # noqa: E731
        messages, _ = history.messages(mark)
        if len(marks):
            options["images"] = marks
        return self.encode_chat(messages, tools, **options), marks.placed

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] = (),
        **options: Any,
    ) -> list[int]:
        """Encode a conversation with `AFMTokenizer.apply_chat_template`, whose arguments and errors it has."""
        given: dict[str, Any] = {"tools": list(tools)} if tools else {}
        return list(self.tokenizer.apply_chat_template(list(messages), **given, **options))


_models: weakref.WeakValueDictionary[Hashable, SharedModel] = weakref.WeakValueDictionary()
_models_lock = threading.Lock()


def shared_model(
    source: Source, adapters: AdapterPool | Mapping[str, str | Path] | None
) -> SharedModel:
    """Return the process's model for a source; make one if none is in use.

    `adapters` are folders by name, or a pool, which needs the model that it was made for. Raises `RequestError`
    for a source or adapters that can't be used.
    """
    if not isinstance(adapters, AdapterPool | Mapping | None):
        raise RequestError(
            f"adapters is {shown(adapters)}; folders by their names, or an AdapterPool, are needed."
        )
    pool = adapters if isinstance(adapters, AdapterPool) else None
    key: Hashable
    if isinstance(source, tuple):
        if len(source) != 2 or not hasattr(source[1], "apply_chat_template"):
            raise RequestError(
                f"model is {shown(source)}; a folder, hub id or name, or (model, tokenizer) is needed."
            )
        key = (id(source[0]), id(source[1]), id(pool))
    else:
        source = str(source or os.environ.get("AFM_MLX_MODEL") or EMBEDDED_MODEL)
        path = Path(os.path.expanduser(source))
        key = str(path.resolve()) if path.is_dir() else source
        if pool is not None:
            raise RequestError(
                "A pool of adapters belongs to one model: give model=(model, tokenizer) with it, or "
                "adapters={name: folder}."
            )
    with _models_lock:
        found = _models.get(key)
        if found is None:
            found = _models[key] = SharedModel(source, pool)
    if isinstance(adapters, Mapping):
        found.register(adapters)
    return found
