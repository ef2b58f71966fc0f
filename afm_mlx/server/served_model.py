"""The model that a server has: its tokenizer, its adapters, and the engine that all requests share."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from afm_mlx import threads
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.engine.async_engine import AsyncEngine
from afm_mlx.engine.prefix_cache import PrefixCache
from afm_mlx.engine.speculation.drafting import Speculation
from afm_mlx.errors import RequestError, did_you_mean, shown
from afm_mlx.loading.draft_models import load_drafts
from afm_mlx.loading.load import load
from afm_mlx.loading.resolve import EMBEDDED_MODEL, model_adapters, resolve_adapter, resolve_model
from afm_mlx.model.model import is_afm
from afm_mlx.server.errors import ApiError, api_error, bad_request
from afm_mlx.server.limits import Admission
from afm_mlx.server.metrics import Metrics
from afm_mlx.server.options import ServerOptions
from afm_mlx.server.token_texts import TokenTexts
from afm_mlx.server.workers import Workers
from afm_mlx.tokenizer.control_tokens import strings_in
from afm_mlx.tokenizer.tokenizer import AFMTokenizer

Message = Mapping[str, Any]
_LONG = 1 << 16
"""Characters that are always encoded."""


class ServedModel:
    """A model with all that answers need. Made by `ServedModel.load`, or of what is loaded.

    Args:
        model, tokenizer: what `load` returns; the weights are read.
        pool: the model's adapters; None for a model that can't have any.
        name: the model's id in the APIs; those of its adapters are `name:adapter`.
        default_adapter: the adapter of requests for the model itself; None for none.
        options: the server's settings.
        engine_options: further options of `Engine`.

    Attributes:
        engine: runs the rows of all requests.
        prefix_cache: keys and values of earlier prompts and answers; None for none.
        admission: how many answers and requests may wait and run.
        workers: threads for what requests need besides the model.
        metrics: what is counted.
        token_texts: looks tokens up.
        created: when it was loaded, in seconds since 1970.
        guesses: whether tokens are guessed for the model to check.
        own_adapters: names of the adapters that it was started with; requests don't take them away.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        pool: AdapterPool | None,
        *,
        name: str = EMBEDDED_MODEL,
        default_adapter: str | None = None,
        options: ServerOptions | None = None,
        **engine_options: Any,
    ):
        self.options = options = options or ServerOptions()
        self.model, self.tokenizer, self.pool = model, tokenizer, pool
        self.name = name
        self._default_adapter = default_adapter
        self.created = int(time.time())
        self.prefix_cache: PrefixCache | None = None
        if options.prompt_cache_bytes:
            self.prefix_cache = PrefixCache(
                options.prompt_cache_bytes,
                options.prompt_cache_folder,
                options.prompt_cache_folder_bytes,
            )
        self.engine = AsyncEngine(
            model,
            tokenizer,
            adapters=pool,
            max_batch=options.max_batch,
            prefill_step_size=options.prefill_step_size,
            max_kv_size=options.max_kv_size,
            kv=options.kv,
            kv_memory=options.kv_memory,
            prefix_cache=self.prefix_cache,
            **engine_options,
        )
        self.guesses = engine_options.get("speculation") is not None
        self.own_adapters = frozenset(() if pool is None else pool.registered)
        self.admission = Admission(options)
        self.workers = Workers(self.admission)
        self.metrics = Metrics(self)
        self.token_texts = TokenTexts(tokenizer)

    @classmethod
    def load(
        cls,
        source: str | Path = EMBEDDED_MODEL,
        *,
        name: str | None = None,
        adapter_path: str | Path | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        adapter_memory: int | None = None,
        options: ServerOptions | None = None,
        force_adapters: bool = False,
        load_options: Mapping[str, Any] | None = None,
        **engine_options: Any,
    ) -> ServedModel:
        """Load a model in MLX's thread, and register its adapters.

        Args:
            source: folder, hub id or name of the embedded model.
            name: the model's id in the APIs; the last part of `source` by default.
            adapter_path: adapter of requests for the model's own id: its path, or the name of one that comes
                with the model.
            adapters: adapters by their names, besides those that come with the model.
            adapter_memory: bytes that adapters may take; None for no limit.
            options: the server's settings.
            force_adapters: take adapters that were made for another model, if their shapes fit.
            load_options: further arguments of `load`.
            engine_options: further options of `Engine`.

        Raises:
            AFMError: for what can't be loaded.
        """
        folder = resolve_model(source)
        given = {each: resolve_adapter(path, folder) for each, path in (adapters or {}).items()}
        default = None
        if adapter_path is not None:
            path = resolve_adapter(adapter_path, folder)
            default = path.name
            if given.setdefault(default, path) != path:
                raise RequestError(
                    f"The adapter {path} would have the name {default}, as {given[default]} has. Rename one."
                )
        model_id = name or Path(source).name or folder.resolve().name

        def make() -> ServedModel:
            model, tokenizer = load(folder, **(load_options or {}))
            pool = AdapterPool(
                model, budget=adapter_memory, base_folder=folder, force=force_adapters
            )
            for each, path in (model_adapters(folder) | given).items():
                pool.register(each, path)
            if speculation := _speculation(options, model, tokenizer, folder, pool):
                engine_options["speculation"] = speculation
            return cls(
                model,
                tokenizer,
                pool,
                name=model_id,
                default_adapter=default,
                options=options,
                **engine_options,
            )

        return threads.submit(make).result()

    # -- model ids

    @property
    def model_ids(self) -> list[str]:
        """The model's id, and those of its adapters."""
        adapters = [] if self.pool is None else self.pool.registered
        return [self.name, *(f"{self.name}:{adapter}" for adapter in adapters)]

    def adapter_of(self, model_id: str) -> str | None:
        """The adapter that a model id names; for the model's own id the default one, or None.

        Raises:
            ApiError: 404 for an id that is none of `model_ids`.
        """
        ids = self.model_ids
        if model_id not in ids:
            listed = ", ".join(ids[:20]) + (", ..." if len(ids) > 20 else "")
            raise ApiError(
                404,
                f"There is no model {shown(model_id)}{did_you_mean(model_id, ids)}. Known are {listed}.",
                param="model",
                code="model_not_found",
                type="invalid_request_error",
            )
        return model_id[len(self.name) + 1 :] or self._default_adapter

    # -- tokens

    @property
    def context_size(self) -> int:
        """Tokens that prompt and answer may have together; where the model doesn't say, a very large number."""
        args = self.model.args
        name = "context_length" if is_afm(self.model) else "max_position_embeddings"
        known = getattr(args, name, None)
        size = known if isinstance(known, int) else sys.maxsize
        return size if self.options.max_kv_size is None else min(size, self.options.max_kv_size)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return int(self.model.args.vocab_size)

    def check_length(self, texts: Iterable[str], place: str) -> None:
        """Refuse what can't fit, whatever its tokens are: they take a while to be found in a long text.

        Args:
            texts: all of a prompt.
            place: where they stand in the body.

        Raises:
            ApiError: for more characters than the context's tokens can have.
        """
        count = sum(map(len, texts))
        if count > _LONG and count > self.context_size * self._longest_piece:
            raise bad_request(
                f"The prompt has {count} characters, which is more than the context of {self.context_size} "
                "tokens can hold. Shorten it.",
                place,
                "context_length_exceeded",
            )

    def check_tokens(self, tokens: Sequence[int], place: str) -> None:
        """Refuse more token ids than the context holds, before anything looks at each of them.

        Raises:
            ApiError: 400 with their place in the body.
        """
        if len(tokens) > max(_LONG, self.context_size):
            raise bad_request(
                f"{place} has {len(tokens)} tokens, and the context of {self.name} holds {self.context_size}. "
                "Send fewer.",
                place,
                "context_length_exceeded",
            )

    @cached_property
    def _longest_piece(self) -> int:
        if not isinstance(self.tokenizer, AFMTokenizer):
            return sys.maxsize
        return max(len(self.tokenizer.piece(token).text) for token in range(len(self.tokenizer)))

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] = (),
        response_format: Message | None = None,
    ) -> list[int]:
        """Token ids of a conversation, as the model's chat template writes it.

        An answer that the conversation ends with is continued.

        Args:
            messages: in OpenAI's form.
            tools: definitions in OpenAI's form.
            response_format: what the answer has to be, shown with the last of the user's messages.

        Raises:
            ApiError: for a model without a chat template.
            TokenizerError: for messages that can't be encoded.
        """
        self.check_length(strings_in([messages, tools]), "messages")
        if not getattr(self.tokenizer, "has_chat_template", False):
            raise bad_request(
                f"The model {self.name} has no chat template: it continues texts, see /v1/completions.",
                "messages",
            )
        shown_to_model = [dict(message) for message in messages]
        if response_format is not None:
            for message in reversed(shown_to_model):
                if message.get("role") == "user":
                    message["response_format"] = response_format
                    break
        continues = bool(shown_to_model) and is_answer(shown_to_model[-1])
        given = {"tools": [dict(tool) for tool in tools]} if tools else {}
        variables = dict(self.options.chat_template_args)
        if taken := variables.keys() & {"messages", "tools", "tokenize", "add_generation_prompt"}:
            raise RequestError(
                f"chat_template_args can't set {', '.join(sorted(taken))}: the server does."
            )
        tokens = self.tokenizer.apply_chat_template(
            shown_to_model,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            **given,
            **variables,
        )
        return list(tokens)

    # -- errors

    def told(self, error: Exception) -> ApiError:
        """What a client reads of an error: as `api_error`, without the folders that files lie in."""
        told = api_error(error)
        told.message = self.without_folders(told.message)
        return told

    def without_folders(self, text: str) -> str:
        """A text in which paths of the model's files and adapters begin with the last folder's name."""
        for folder in self._folders() if "/" in text else ():
            text = text.replace(str(folder), folder.name)
        return text

    def _folders(self) -> list[Path]:
        """Folders that messages may name, those within others first."""
        options = self.options
        given = [
            getattr(self.tokenizer, "name_or_path", ""),
            options.draft_model or "",
            options.prompt_cache_folder or "",
            *options.adapter_folders,
            *(() if self.pool is None else self.pool.paths.values()),
        ]
        paths = [Path(each).absolute() for each in given if str(each)]
        found = {path for each in paths for path in (each, each.resolve()) if len(path.parts) > 2}
        return sorted(found, key=lambda path: -len(path.parts))

    def close(self) -> None:
        """End the threads, and write what is still to be written of the prefix cache."""
        self.workers.close()
        if self.pool is not None:
            self.pool.close()
        if self.prefix_cache is not None:
            threads.submit(self.prefix_cache.close).result()


def _speculation(
    options: ServerOptions | None, model: Any, tokenizer: Any, folder: Path, pool: AdapterPool
) -> Speculation | None:
    """How tokens are guessed, as the server's settings have it."""
    if options is None or (options.draft_model is None and not options.prompt_lookup):
        return None
    draft, own = load_drafts(options.draft_model, model, tokenizer, folder, pool.paths)
    return Speculation(draft, options.prompt_lookup, own, options.num_draft_tokens)


def is_answer(message: Message) -> bool:
    """True if a message is an answer that can be continued."""
    return message.get("role") == "assistant" and not message.get("tool_calls")
