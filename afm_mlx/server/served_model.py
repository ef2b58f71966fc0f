"""The model that a server answers with: its tokenizer, its adapters, and the engine that all requests share."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from afm_mlx import threads
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.checkpoint.weights import stored_tensors
from afm_mlx.config import is_afm_config, read_config_json
from afm_mlx.engine.async_engine import AsyncEngine
from afm_mlx.engine.generation import kv_storage
from afm_mlx.engine.prefix_cache import PrefixCache
from afm_mlx.engine.request import PromptScores
from afm_mlx.engine.speculation.drafting import Speculation
from afm_mlx.errors import AFMError, RequestError, TokenizerError
from afm_mlx.guidance.thoughts import ThoughtForm, thought_form
from afm_mlx.loading.load import import_packages, load, load_drafts
from afm_mlx.loading.resolve import (
    EMBEDDED_MODEL,
    model_adapters,
    resolve_adapter,
    resolve_mask,
    resolve_model,
)
from afm_mlx.model.model import is_afm
from afm_mlx.quantization.packed_layers import activation_dtype
from afm_mlx.server.chat_inputs import (
    FREE_TEXT,
    NO_TOOLS,
    AnswerFormat,
    Message,
    OfferedTools,
    is_answer,
)
from afm_mlx.server.replies import JsonObject, bad_request
from afm_mlx.server.server_options import ServerOptions
from afm_mlx.server.server_resources import ServerResources
from afm_mlx.server.thinking import BY_DEFAULT, Thinking
from afm_mlx.tokenizer.chat_images import ChatImages
from afm_mlx.tokenizer.control_tokens import strings_in
from afm_mlx.tokenizer.detokenizer import NEWLINE, SPACE, PieceKind
from afm_mlx.tokenizer.protocol import Tokenizer
from afm_mlx.tokenizer.tokenizer import AFMTokenizer
from afm_mlx.vision_config import VisionConfig

_LOG = logging.getLogger("afm_mlx.server")
_LONG = 1 << 16
"""Number of characters, or token ids, that are always looked at."""
_SET_BY_SERVER = {"messages", "tools", "tokenize", "add_generation_prompt", "images"}
"""Arguments of chat templates that a request can't set."""
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
            spaces = len(self._zoo(token)) - len(self._zoo(token).lstrip(b" "))
            return not detokenizer.text.startswith(" " * spaces)
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

    def prompt_likelihoods(
        self, prompt: Sequence[int], scores: PromptScores, top: int
    ) -> list[TokenLikelihood]:
        """Return the likelihoods of a prompt's tokens, from the first one that `scores` has."""

        def one(token: int, logprob: float, top: Sequence[TokenLikelihood] = ()) -> TokenLikelihood:
            return TokenLikelihood(token, self.bytes_of(token), max(logprob, LEAST_LOGPROB), top)

        tops = (scores.top_tokens[:, :top].tolist(), scores.top_logprobs[:, :top].tolist())
        each = zip(prompt[scores.start :], scores.logprobs.tolist(), *tops, strict=True)
        return [
            one(token, logprob, [one(*pair) for pair in zip(ids, values, strict=True)])
            for token, logprob, ids, values in each
        ]


@dataclass(frozen=True)
class ModelSource:
    """A model that can be served: its folder, and how it is loaded. Made by `ModelSource.of`.

    Args:
        name: the model's id in the APIs; its adapters have the ids `name:adapter`.
        adapters: mapping from names to paths of its adapters.
        default_adapter: the adapter of requests for the model's own id; pass None for none.
        adapter_memory: bytes that adapters may take; pass None for no limit.
        force_adapters: True to accept adapters that were made for another model, if their shapes fit.
        kv_bits: bits of keys and values that the model must be able to have; pass None for any.
        loaded_adapters: adapters that requests have loaded, and may remove, by name.
        drafts: False to load no draft model, whatever the server's settings say.
        load_options: further arguments of `load`.
        engine_options: further options of `Engine`.
        masks: mapping from adapters' names to folders of task masks that they run with.
    """

    name: str
    folder: Path
    adapters: Mapping[str, Path] = field(default_factory=dict)
    default_adapter: str | None = None
    adapter_memory: int | None = None
    force_adapters: bool = False
    kv_bits: int | None = None
    loaded_adapters: Mapping[str, Path] = field(default_factory=dict)
    drafts: bool = True
    load_options: Mapping[str, Any] = field(default_factory=dict)
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    masks: Mapping[str, Path] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        source: str | Path = EMBEDDED_MODEL,
        *,
        name: str | None = None,
        adapter_path: str | Path | None = None,
        mask: str | Path | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        **settings: Any,
    ) -> ModelSource:
        """Find a model's folder and its adapters'.

        Args:
            source: folder, hub id or name of the embedded model.
            name: the model's id in the APIs; the last part of `source` by default.
            adapter_path: adapter of requests for the model's own id: a path, or the name of one that comes with
                the model.
            mask: task mask of requests for the model's own id, found like `adapter_path`; with an adapter, the
                two have one name, ADAPTER+MASK.
            adapters: mapping from name to path of further adapters, besides those that come with the model.
            settings: further fields of the result.

        Raises:
            AFMError: for what does not exist.
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
        masks = {}
        if mask is not None:
            place = resolve_mask(mask, folder)
            path = place if default is None else given[default]
            default = place.name if default is None else f"{default}+{place.name}"
            if given.setdefault(default, path) != path:
                raise RequestError(
                    f"The mask {place} would have the name {default}, as {given[default]} has. Rename one."
                )
            if path != place:
                masks[default] = place
        model_id = name or Path(source).name or folder.resolve().name
        return cls(
            model_id, folder, model_adapters(folder) | given, default, masks=masks, **settings
        )

    def load(
        self,
        options: ServerOptions | None = None,
        resources: ServerResources | None = None,
    ) -> ServedModel:
        """Load the model in MLX's thread, and register its adapters; raise `AFMError` for what can't be loaded.

        Args:
            options: the server's settings.
            resources: what the server's models share; made if None.
        """

        def make() -> ServedModel:
            model, tokenizer = load(self.folder, **self.load_options)
            if self.kv_bits is not None:
                kv_storage(model, self.kv_bits)
            pool = AdapterPool(
                model,
                budget=self.adapter_memory,
                base_folder=self.folder,
                force=self.force_adapters,
            )
            for each, path in self.adapters.items():
                pool.register(each, path, mask=self.masks.get(each))
            engine_options = dict(self.engine_options)
            draft_model = options.draft_model if options and self.drafts else None
            if options and (draft_model is not None or options.prompt_lookup):
                draft, own = load_drafts(draft_model, model, tokenizer, self.folder, pool.paths)
                engine_options["speculation"] = Speculation(
                    draft, options.prompt_lookup, own, options.num_draft_tokens
                )
            for each, path in self.loaded_adapters.items():
                try:
                    pool.register(each, path)
                except AFMError as error:  # the model is there without it
                    _LOG.error("The adapter %s of %s is left out: %s", each, self.name, error)
            return ServedModel(
                model,
                tokenizer,
                pool,
                name=self.name,
                default_adapter=self.default_adapter,
                own_adapters=self.adapters,
                folder=self.folder,
                options=options,
                resources=resources,
                **engine_options,
            )

        import_packages(self.folder)
        return threads.submit(make).result()

    @property
    def adapter_names(self) -> list[str]:
        """The names of all adapters."""
        return [*self.adapters, *self.loaded_adapters]

    def with_adapters(self, adapters: Mapping[str, Path]) -> ModelSource:
        """Return the source with all these adapters, of which requests may remove the ones that are new."""
        new = {name: path for name, path in adapters.items() if name not in self.adapters}
        return replace(self, loaded_adapters=new)

    @cached_property
    def disk_bytes(self) -> int:
        """Bytes of the folder's weights."""
        files = (path for path in self.folder.glob("*.safetensors") if path.is_file())
        return sum(path.stat().st_size for path in files)

    @cached_property
    def memory_bytes(self) -> int:
        """Bytes that the weights will take in memory, about: half types may be widened."""
        tensors = stored_tensors(self.folder).values()
        halves = mx.float16, mx.bfloat16
        return sum(
            each.size * activation_dtype().size if each.dtype in halves else each.nbytes
            for each in tensors
        )

    @cached_property
    def vision_config(self) -> VisionConfig | None:
        """How config.json says that the model sees images; None for a model that reads text only."""
        values = read_config_json(self.folder / "config.json")
        if not is_afm_config(values) or values.get("vision_config") is None:
            return None
        return VisionConfig.from_dict(values["vision_config"])

    @cached_property
    def context_size(self) -> int:
        """Number of tokens that config.json says prompt and answer may have together."""
        values = read_config_json(self.folder / "config.json")
        inner = values.get("text_config")
        for each in (values, inner if isinstance(inner, dict) else {}):
            for name in ("context_length", "max_position_embeddings"):
                if isinstance(each.get(name), int):
                    return int(each[name])
        return sys.maxsize


class ServedModel:
    """A model with everything that answers need. Made by `ServedModel.load`, or of a loaded model.

    Args:
        model, tokenizer: as `load` returns them, with weights in memory.
        pool: the model's adapters; pass None for a model that can't have any.
        name: the model's id in the APIs; its adapters have the ids `name:adapter`.
        default_adapter: the adapter of requests for the model's own id; pass None for none.
        own_adapters: names of adapters that requests can't remove; pass None for all of the pool.
        folder: the model's folder, for descriptions; pass None if unknown.
        options: the server's settings.
        resources: what the server's models share; made if None.
        engine_options: further options of `Engine`.

    Attributes:
        prefix_cache: keys and values of earlier prompts and answers; None if the options keep none.
        created: time of loading, in seconds since 1970.
        drafts: True if draft tokens are proposed for the model to verify.
        nbytes: bytes of the weights in memory, including draft models.
        own_adapters: names of the adapters that the server was started with, which requests can't remove.
        context_size: number of tokens that prompt and answer may have together; very large if the model has no
            limit.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
        pool: AdapterPool | None,
        *,
        name: str = EMBEDDED_MODEL,
        default_adapter: str | None = None,
        own_adapters: Collection[str] | None = None,
        folder: Path | None = None,
        options: ServerOptions | None = None,
        resources: ServerResources | None = None,
        **engine_options: Any,
    ):
        self.options = options = options or ServerOptions()
        self.resources = resources or ServerResources(options)
        self._owns_resources = resources is None
        self._is_closed = False
        self.model, self.tokenizer, self.pool = model, tokenizer, pool
        self.name = name
        self.default_adapter, self.folder = default_adapter, folder
        self.created = int(time.time())
        self.prefix_cache: PrefixCache | None = None
        if self.resources.prefixes is not None:
            self.prefix_cache = PrefixCache(
                self.resources.prefixes,
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
            group=self.resources.engines,
            **engine_options,
        )
        self.engine.warm_up()
        speculation: Speculation | None = engine_options.get("speculation")
        self.drafts = speculation is not None
        models: list[Any] = [model]
        if speculation is not None:
            models += [speculation.draft_model, *speculation.adapter_drafts.values()]
        self.nbytes = sum(
            array.nbytes
            for each in models
            if isinstance(each, nn.Module)
            for _, array in tree_flatten(each.parameters())
        )
        if own_adapters is None:
            own_adapters = () if pool is None else pool.registered
        self.own_adapters = frozenset(own_adapters)
        name_of_size = "context_length" if is_afm(model) else "max_position_embeddings"
        size = getattr(model.args, name_of_size, None)
        self.context_size = size if isinstance(size, int) else sys.maxsize
        if options.max_kv_size is not None:
            self.context_size = min(self.context_size, options.max_kv_size)
        self.admission, self.workers = self.resources.admission, self.resources.workers
        self.metrics = self.resources.metrics.of(name)
        self.token_texts = TokenTexts(tokenizer)

    @classmethod
    def load(
        cls,
        source: str | Path = EMBEDDED_MODEL,
        *,
        options: ServerOptions | None = None,
        **settings: Any,
    ) -> ServedModel:
        """Load a model in MLX's thread, and register its adapters.

        Args:
            source: folder, hub id or name of the embedded model.
            options: the server's settings.
            settings: further arguments of `ModelSource.of`.

        Raises:
            AFMError: for what can't be loaded.
        """
        return ModelSource.of(source, **settings).load(options)

    @property
    def model_ids(self) -> list[str]:
        """The model's id and its adapters' ids."""
        adapters = [] if self.pool is None else self.pool.registered
        return [self.name, *(f"{self.name}:{adapter}" for adapter in adapters)]

    @property
    def vision_config(self) -> VisionConfig | None:
        """How the model sees images; None if it reads text only."""
        return getattr(self.tokenizer, "vision_config", None)

    # -- tokens

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return int(self.model.args.vocab_size)

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
        images: ChatImages | None = None,
    ) -> list[int]:
        """Encode a conversation with the model's chat template; an answer at its end is continued.

        `format` is shown with the last of the user's messages. If thinking is off, and the template begins a
        thought nevertheless, the prompt ends it. `images` has the images that the messages' marks stand for.

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
        if taken := variables.keys() & _SET_BY_SERVER:
            raise RequestError(
                f"chat_template_args can't set {', '.join(sorted(taken))}: the server does."
            )
        options = {**variables, "images": images} if images else variables
        prompt = self.tokenizer.apply_chat_template(
            shown_to_model,
            [dict(tool) for tool in tools.definitions] or None,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            **options,
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

    def without_folders(self, text: str) -> str:
        """Shorten the paths of the server's folders in a text to the folders' names."""
        return without_folders(
            text,
            getattr(self.tokenizer, "name_or_path", ""),
            self.options.draft_model or "",
            self.options.prompt_cache_folder or "",
            *self.options.adapter_folders,
            *(() if self.pool is None else self.pool.paths.values()),
        )

    # -- metrics

    def gauges(self) -> Iterator[tuple[str, str, float]]:
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
        features = None if rows is None else rows.image_features
        yield (
            "image_features_bytes",
            "Memory of images' features.",
            features.nbytes if features else 0,
        )
        yield (
            "image_encoder_passes",
            "Tiles of images encoded since the model was loaded.",
            features.passes if features else 0,
        )
        yield "kv_cache_bytes", "Keys and values of running answers.", rows.kv_bytes if rows else 0
        yield "kv_cache_usage_perc", "Share of the keys and values that fit, up to 1.", usage
        yield "adapter_resident_bytes", "Memory of adapters.", known["bytes"]
        yield "adapters_resident", "Adapters in memory.", len(resident)
        yield "adapters_registered", "Adapters by name.", len(known["adapters"])

    def close(self) -> None:
        """End the threads, write pending pages of the prefix cache to its folder, and free the weights.

        A step that fails stops none of the others.
        """
        with contextlib.ExitStack() as last_first:
            if not self._is_closed:
                self._is_closed = True
                last_first.callback(lambda: threads.submit(self._release).result())
            if self.prefix_cache is not None:
                prefixes, self.prefix_cache = self.prefix_cache, None
                last_first.callback(lambda: threads.submit(prefixes.close).result())
            if self.pool is not None:
                last_first.callback(self.pool.close)
            if self._owns_resources:
                last_first.callback(self.resources.close)

    def _release(self) -> None:
        self.engine.close()
        del self.model
        gc.collect()  # an engine's parts refer to each other
        mx.clear_cache()


def without_folders(text: str, *paths: str | Path) -> str:
    """Shorten the paths of folders in a text to the folders' names."""
    if "/" not in text:
        return text
    absolute = [Path(each).absolute() for each in paths if str(each)]
    found = {path for each in absolute for path in (each, each.resolve()) if len(path.parts) > 2}
    for folder in sorted(found, key=lambda path: -len(path.parts)):  # inner folders first
        text = text.replace(str(folder), folder.name)
    return text
