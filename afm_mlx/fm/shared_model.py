"""Models of this process: each is loaded once, and runs the rows of all sessions in one batch."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import yaml

from afm_mlx import threads
from afm_mlx.adapters.active import active_adapters
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.config import ModelConfig, is_afm_config, read_config_json
from afm_mlx.engine.async_engine import AsyncEngine
from afm_mlx.engine.prefix_cache import PrefixCache
from afm_mlx.errors import RequestError, shown
from afm_mlx.loading.load import load
from afm_mlx.loading.resolve import EMBEDDED_MODEL, model_adapters, resolve_model
from afm_mlx.model.model import is_afm

Message = Mapping[str, Any]

_CARD_BYTES = 1 << 16  # of a model card are looked at
PREFIX_BYTES = 1 << 30  # of what sessions have computed: 60,000 tokens of the 3B


class SharedModel:
    """A model with its tokenizer, its adapters, and the engine that all of its sessions use.

    It is loaded when it is first needed, in MLX's thread.

    Args:
        source: folder, hub id or name; or a model and its tokenizer, as `load` returns them.
        pool: the model's adapters; None makes a pool.
    """

    def __init__(self, source: str | tuple[Any, Any], pool: AdapterPool | None):
        self._source, self._pool = source, pool
        self._loading: Future[None] | None = None
        self._lock = threading.Lock()
        self._adapters: dict[str, Path] = {}  # those that were asked for by a folder
        self._folder: Path | None = None
        self._context: int | None = None
        self._tokenizer: Any = None
        self._engine: AsyncEngine | None = None

    @property
    def name(self) -> str:
        """The model's name: the last part of its path or id."""
        if isinstance(self._source, str):
            return Path(self._source).name
        folder = getattr(self._source[1], "name_or_path", "")
        return Path(folder).name or type(self._source[0]).__name__

    @property
    def engine(self) -> AsyncEngine:
        """The engine, once the model is loaded."""
        assert self._engine is not None
        return self._engine

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, once the model is loaded."""
        return self._tokenizer

    @property
    def context_size(self) -> int:
        """Tokens that prompt and answer may have together; where the model doesn't say, a very large number.

        Raises:
            AFMError: when the model can't be found.
        """
        if self._context is None:
            self._context = self._found_context()
        return self._context

    def _found_context(self) -> int:
        if isinstance(self._source, str):
            path = self._found() / "config.json"
            values = read_config_json(path)
            if is_afm_config(values):
                return ModelConfig.from_dict(values, source=str(path)).context_length
            known = values.get("max_position_embeddings")
        else:
            args = self._source[0].args
            name = "context_length" if is_afm(self._source[0]) else "max_position_embeddings"
            known = getattr(args, name, None)
        return known if isinstance(known, int) else sys.maxsize

    @property
    def languages(self) -> list[str]:
        """The languages that the model's card names; none where it has none.

        Raises:
            AFMError: when the model can't be found.
        """
        if isinstance(self._source, str):
            folder = self._found()
        else:
            folder = Path(getattr(self._source[1], "name_or_path", "") or os.devnull)
        return card_languages(folder / "README.md")

    def has_adapter(self, name: str) -> bool:
        """True if the model has an adapter of this name, once it is loaded."""
        return self._pool is not None and name in self._pool.registered

    def _found(self) -> Path:
        """The model's folder; a hub id is fetched once."""
        assert isinstance(self._source, str)
        if self._folder is None:
            self._folder = resolve_model(self._source)
        return self._folder

    # -- loading

    async def load(self) -> None:
        """Load the model, unless it is there.

        Raises:
            AFMError: what is wrong with it.
        """
        if self._engine is not None:
            return
        if isinstance(self._source, str):
            await asyncio.to_thread(
                self._found
            )  # other models' rows don't wait for what is fetched
        with self._lock:
            failed = (
                self._loading is not None and self._loading.done() and self._loading.exception()
            )
            if self._loading is None or failed:
                self._loading = threads.submit(self._load)
            loading = self._loading
        # A task that is cancelled leaves the others their model.
        await asyncio.shield(asyncio.wrap_future(loading))

    def _load(self) -> None:
        if isinstance(self._source, str):
            model, self._tokenizer = load(self._found())
        else:
            model, self._tokenizer = self._source
        if self._pool is None:
            self._make_pool(model)
        self._engine = AsyncEngine(
            model,
            self._tokenizer,
            adapters=self._pool,
            prefix_cache=PrefixCache(PREFIX_BYTES),
        )

    def _make_pool(self, model: Any) -> None:
        """Make a pool of the model's adapters, unless it has one that all rows use."""
        active = active_adapters(model)
        is_taken = active is not None and active.batch is not None
        pool = None if is_taken else AdapterPool(model, base_folder=self._folder)
        own = model_adapters(self._folder) if self._folder else {}
        with self._lock:
            if pool is None and self._adapters:
                raise RequestError(
                    f"The adapters {', '.join(self._adapters)} can't be used: the model has one that all rows "
                    "use. Take that off (detach_adapter)."
                )
            for name, path in own.items():
                self._adapters.setdefault(name, path.resolve())
            if pool is not None:
                for name, path in self._adapters.items():
                    pool.register(name, path)
            self._pool = pool

    def register(self, adapters: Mapping[str, str | Path]) -> None:
        """Give adapters of the model names.

        Raises:
            RequestError: for a name that another adapter has.
            AFMError: for a path that isn't there.
        """
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

    # -- tokens

    def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Message] = (), **options: Any
    ) -> list[int]:
        """Token ids of a conversation, as the model's chat template writes it.

        Args:
            messages, tools, options: those of `AFMTokenizer.apply_chat_template`.

        Raises:
            TokenizerError: for what can't be encoded.
        """
        given = {"tools": list(tools)} if tools else {}
        return list(self._tokenizer.apply_chat_template(list(messages), **given, **options))


def card_languages(card: Path) -> list[str]:
    """The `language` field of a model card, as the Hugging Face Hub has it; empty where there is none."""
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
    # YAML takes the code of Norwegian for the word "no".
    return ["no" if one is False else one for one in listed if one is False or isinstance(one, str)]


_models: weakref.WeakValueDictionary[Any, SharedModel] = weakref.WeakValueDictionary()
_models_lock = threading.Lock()


def shared_model(
    source: str | Path | tuple[Any, Any] | None,
    adapters: AdapterPool | Mapping[str, str | Path] | None,
) -> SharedModel:
    """The model of this process that a source names: the one that others use already, if there is one.

    Args:
        source: folder, hub id, name, or a model and its tokenizer; None takes the environment's or the embedded
            one.
        adapters: folders of adapters by their names; or a pool, which needs the model that it was made for.

    Raises:
        RequestError: for adapters that can't be used.
    """
    pool = adapters if isinstance(adapters, AdapterPool) else None
    key: Any
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
    if not isinstance(adapters, AdapterPool | Mapping | None):
        raise RequestError(
            f"adapters is {shown(adapters)}; folders by their names, or an AdapterPool, are needed."
        )
    if adapters is not None and pool is None:
        found.register(adapters)  # type: ignore[arg-type]
    return found
