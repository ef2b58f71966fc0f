"""The model that a server answers with: its tokenizer, its adapters, and the engine that all requests share."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from afm_mlx import threads
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.engine.async_engine import AsyncEngine
from afm_mlx.engine.prefix_cache import PrefixCache
from afm_mlx.engine.speculation.drafting import Speculation
from afm_mlx.errors import RequestError, TokenizerError, did_you_mean, shown
from afm_mlx.guidance.thoughts import ThoughtForm, thought_form
from afm_mlx.loading.load import load, load_drafts
from afm_mlx.loading.resolve import EMBEDDED_MODEL, model_adapters, resolve_adapter, resolve_model
from afm_mlx.measure.describe import Facts, describe_model
from afm_mlx.model.model import is_afm
from afm_mlx.server.admission import Admission, Workers
from afm_mlx.server.chat_inputs import (
    FREE_TEXT,
    NO_TOOLS,
    AnswerFormat,
    Message,
    OfferedTools,
    is_answer,
)
from afm_mlx.server.metrics import Metrics
from afm_mlx.server.replies import ApiError, JsonObject, api_error, bad_request
from afm_mlx.server.server_options import ServerOptions
from afm_mlx.server.thinking import BY_DEFAULT, Thinking
from afm_mlx.tokenizer.control_tokens import strings_in
from afm_mlx.tokenizer.detokenizer import NEWLINE, SPACE, PieceKind
from afm_mlx.tokenizer.protocol import Tokenizer
from afm_mlx.tokenizer.tokenizer import AFMTokenizer

_LONG = 1 << 16
"""Number of characters, or token ids, that are always looked at."""
LEAST_LOGPROB = -9999.0
"""The log-probability of an impossible token: JSON has no -infinity, and OpenAI's API writes this number."""


@dataclass(frozen=True)
class TokenLikelihood:
    """A token of an answer with its log-probability.

    Args:
        bytes: UTF-8 bytes that the token adds to the text; may be a part of a character.
        logprob: `LEAST_LOGPROB` or more; 0 if a constraint allowed no other token.
        top: the most likely tokens at its position, the likeliest first.
    """

    token: int
    bytes: bytes
    logprob: float
    top: Sequence[TokenLikelihood] = ()

    @property
    def text(self) -> str:
        """The token as text; bytes that are not UTF-8 are replaced."""
        return self.bytes.decode("utf-8", "replace")


class TokenTexts:
    """The bytes of the tokens of our tokenizer or one of mlx-lm's, cached."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._afm = tokenizer if type(tokenizer) is AFMTokenizer else None
        self._zoo: Callable[[int], bytes] | None = getattr(tokenizer, "token_bytes", None)
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text; empty for ids above the tokenizer's."""
        if (found := self._known.get(token)) is not None:
            return found
        if self._zoo is not None:
            found = self._zoo(token)
        elif self._afm is None:
            found = self._tokenizer.decode([token]).encode()
        elif token >= len(self._afm):  # embeddings may have more rows than there are tokens
            found = b""
        else:
            piece = self._afm.piece(token)
            text = piece.text.replace(SPACE, " ").replace(NEWLINE, "\n").encode()
            found = bytes([piece.byte]) if piece.kind is PieceKind.BYTE else text
        self._known[token] = found
        return found

    def drops_space(self, token: int, is_constrained: bool) -> bool:
        """True if decoding an answer that begins with `token` drops its leading space; False if constrained."""
        if self._afm is None:
            if self._zoo is None or self._zoo(token)[:1] != b" ":
                return False
            detokenizer = self._tokenizer.detokenizer
            detokenizer.add_token(token)
            detokenizer.finalize()
            return not detokenizer.text.startswith(" ")
        if is_constrained or not self._afm.spacing.dummy_prefix:
            return False
        return self.bytes_of(token)[:1] == b" "

    def likelihood(self, token: int, logprobs: mx.array | None, top: int) -> TokenLikelihood:
        """Look up a token's log-probability, and the `top` most likely tokens at its position.

        `logprobs` is (vocab_size,) float32, evaluated; None if a constraint allowed no other token.
        """
        if logprobs is None:
            return TokenLikelihood(token, self.bytes_of(token), 0.0)
        values = np.maximum(np.array(logprobs), LEAST_LOGPROB)
        likeliest: Sequence[int] = ()
        if top:
            unsorted = np.argpartition(-values, min(top, values.size - 1))[:top]
            likeliest = unsorted[np.argsort(-values[unsorted], kind="stable")].tolist()
        others = [TokenLikelihood(t, self.bytes_of(t), float(values[t])) for t in likeliest]
        return TokenLikelihood(token, self.bytes_of(token), float(values[token]), others)


class ServedModel:
    """A model with everything that answers need. Made by `ServedModel.load`, or of a loaded model.

    Args:
        model, tokenizer: as `load` returns them, with weights in memory.
        pool: the model's adapters; pass None for a model that can't have any.
        name: the model's id in the APIs; its adapters have the ids `name:adapter`.
        default_adapter: the adapter of requests for the model's own id; pass None for none.
        options: the server's settings.
        engine_options: further options of `Engine`.

    Attributes:
        prefix_cache: keys and values of earlier prompts and answers; None if the options keep none.
        created: time of loading, in seconds since 1970.
        drafts: True if draft tokens are proposed for the model to verify.
        own_adapters: names of the adapters that the server was started with, which requests can't remove.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
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
        self.engine.warm_up()
        self.drafts = engine_options.get("speculation") is not None
        self.own_adapters = frozenset(() if pool is None else pool.registered)
        self.admission = Admission(options)
        self.workers = Workers(self.admission)
        self.metrics = Metrics(name, self._gauges)
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
            adapter_path: adapter of requests for the model's own id: a path, or the name of one that comes with
                the model.
            adapters: mapping from name to path of further adapters, besides those that come with the model.
            adapter_memory: bytes that adapters may take; pass None for no limit.
            options: the server's settings.
            force_adapters: True to accept adapters that were made for another model, if their shapes fit.
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
            if options and (options.draft_model is not None or options.prompt_lookup):
                draft, own = load_drafts(options.draft_model, model, tokenizer, folder, pool.paths)
                engine_options["speculation"] = Speculation(
                    draft, options.prompt_lookup, own, options.num_draft_tokens
                )
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
        """The model's id and its adapters' ids."""
        adapters = [] if self.pool is None else self.pool.registered
        return [self.name, *(f"{self.name}:{adapter}" for adapter in adapters)]

    def adapter_of(self, model_id: str) -> str | None:
        """Return the adapter that a model id names; the default one, or None, for the model's own id.

        Raises:
            ApiError: 404 for an id that is not in `model_ids`.
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
        """Number of tokens that prompt and answer may have together; very large if the model has no limit."""
        args = self.model.args
        name = "context_length" if is_afm(self.model) else "max_position_embeddings"
        known = getattr(args, name, None)
        size = known if isinstance(known, int) else sys.maxsize
        return size if self.options.max_kv_size is None else min(size, self.options.max_kv_size)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return int(self.model.args.vocab_size)

    @cached_property
    def facts(self) -> Facts:
        """Sizes and fingerprint of the model, see `describe_model`; found in MLX's thread."""
        return describe_model(self.model)

    def check_length(self, texts: Iterable[str], place: str) -> None:
        """Refuse a prompt with more characters than the context can hold, before it is encoded.

        The error, a 400 about `place` in the body, is raised if no tokenization could fit.
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
        """Raise a 400 for more token ids than the context holds; the error names `place`, their body field."""
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
        tools: OfferedTools = NO_TOOLS,
        format: AnswerFormat = FREE_TEXT,
        thinking: Thinking = BY_DEFAULT,
    ) -> list[int]:
        """Encode a conversation with the model's chat template; an answer at its end is continued.

        `format` is shown with the last of the user's messages. If thinking is off, and the template begins a
        thought nevertheless, the prompt ends it.

        Raises:
            ApiError: for a model without a chat template.
            TokenizerError: for messages that can't be encoded.
        """
        variables = self._template_variables(thinking)
        self.check_length(strings_in([messages, tools.definitions, variables]), "messages")
        if not getattr(self.tokenizer, "has_chat_template", False):
            raise bad_request(
                f"The model {self.name} has no chat template: it continues texts, see /v1/completions.",
                "messages",
            )
        if tools.definitions and (check := getattr(self.tokenizer, "check_tools", None)):
            try:
                check()
            except TokenizerError as error:
                raise bad_request(str(error), "tools") from error
        shown_to_model = [dict(message) for message in messages]
        if format.shown is not None:
            for message in reversed(shown_to_model):
                if message.get("role") == "user":
                    message["response_format"] = format.shown
                    break
        continues = bool(shown_to_model) and is_answer(shown_to_model[-1])
        if taken := variables.keys() & {"messages", "tools", "tokenize", "add_generation_prompt"}:
            raise RequestError(
                f"chat_template_args can't set {', '.join(sorted(taken))}: the server does."
            )
        prompt = self.tokenizer.apply_chat_template(
            shown_to_model,
            [dict(tool) for tool in tools.definitions] or None,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            **variables,
        )
        form = self.thoughts
        if form is not None and thinking.is_off(variables) and form.is_begun(prompt):
            prompt = [*prompt, *form.end_ids]
        return prompt

    @cached_property
    def thoughts(self) -> ThoughtForm | None:
        """How the model writes thoughts; None if it answers without thinking first."""
        if not getattr(self.tokenizer, "has_chat_template", False):
            return None
        return thought_form(self.tokenizer)

    def thinks(self, thinking: Thinking) -> bool:
        """True if an answer may begin with thoughts."""
        return self.thoughts is not None and not thinking.is_off(self._template_variables(thinking))

    def _template_variables(self, thinking: Thinking) -> dict[str, Any]:
        source = getattr(self.tokenizer, "template_source", "")
        return thinking.template_variables(self.options.chat_template_args, source)

    # -- errors

    def client_error(self, error: Exception) -> ApiError:
        """Convert an exception as `api_error` does, without the folders that files are in."""
        reported = api_error(error)
        reported.message = self.without_folders(reported.message)
        return reported

    def without_folders(self, text: str) -> str:
        """Shorten the paths of the server's folders in a text to the folders' names."""
        if "/" not in text:
            return text
        given = [
            getattr(self.tokenizer, "name_or_path", ""),
            self.options.draft_model or "",
            self.options.prompt_cache_folder or "",
            *self.options.adapter_folders,
            *(() if self.pool is None else self.pool.paths.values()),
        ]
        paths = [Path(each).absolute() for each in given if str(each)]
        found = {path for each in paths for path in (each, each.resolve()) if len(path.parts) > 2}
        for folder in sorted(found, key=lambda path: -len(path.parts)):  # inner folders first
            text = text.replace(str(folder), folder.name)
        return text

    # -- metrics

    def _gauges(self) -> Iterator[tuple[str, str, float]]:
        """Yield name, help and value of the gauges that are read when metrics are requested."""
        known: JsonObject = {"bytes": 0, "adapters": []}
        if self.pool is not None:
            known = self.pool.describe()
        resident = [each for each in known["adapters"] if each["state"] == "resident"]
        prefixes, rows = self.prefix_cache, self.engine.engine
        usage = 0.0
        if rows is not None and rows.kv_memory is not None:
            usage = rows.kv_bytes / rows.kv_memory
        elif rows is not None:
            usage = rows.kv_tokens / (rows.max_batch * self.context_size)
        cached = prefixes.nbytes if prefixes else 0
        yield "prefix_cache_bytes", "Memory of the prefix cache.", cached
        yield "kv_cache_bytes", "Keys and values of running answers.", rows.kv_bytes if rows else 0
        yield "kv_cache_usage_perc", "Share of the keys and values that fit, up to 1.", usage
        yield "adapter_resident_bytes", "Memory of adapters.", known["bytes"]
        yield "adapters_resident", "Adapters in memory.", len(resident)
        yield "adapters_registered", "Adapters by name.", len(known["adapters"])

    def close(self) -> None:
        """End the threads, and write pending pages of the prefix cache to its folder."""
        self.workers.close()
        if self.pool is not None:
            self.pool.close()
        if self.prefix_cache is not None:
            threads.submit(self.prefix_cache.close).result()
