"""What a caller submits to the engine (`Request`), and what comes back (`TokenResponse`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from afm_mlx.engine.draft_length import DraftCounts
from afm_mlx.errors import ContextLengthError, IncompleteError, RequestError, shown
from afm_mlx.model.pooling import POOLINGS

if TYPE_CHECKING:
    from afm_mlx.adapters.registry import AdapterChoice
    from afm_mlx.guidance.constraint import Constraint
    from afm_mlx.vision.prompt_image import PromptImage
    from afm_mlx.vision_config import VisionConfig

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]

MASK64 = 2**64 - 1
MOST_TOKENS = 2**31  # that a vocabulary can have
MOST_TOP = 1000  # most likely tokens that are reported for each token of a prompt
AT_LIMIT = ("error", "complete")
CUT_OFF = (ContextLengthError, IncompleteError)
"""Errors of an answer that a limit ends, whose text so far is right."""


@dataclass(frozen=True)
class PromptLogprobs:
    """Which log-probabilities of a prompt's tokens a request asks for.

    Args:
        start: index of the first token in the prompt, 1 or more: no token comes before the first.
        top: number of most likely tokens at each position, besides the prompt's own.
        others: ids of tokens that are scored at each position, too, however likely they are.
    """

    start: int = 1
    top: int = 0
    others: tuple[int, ...] = ()


@dataclass(frozen=True)
class Embedding:
    """Which vector of a prompt a request asks for.

    Args:
        pooling: "last" for the hidden state of the last token, "mean" for the average of all tokens.
        dimensions: how many of its first numbers are kept, before it is scaled to an L2 norm of 1; pass None
            for all.
        normalized: False for the hidden state itself, which is not scaled.
    """

    pooling: str = "last"
    dimensions: int | None = None
    normalized: bool = True


@dataclass(frozen=True)
class PromptScores:
    """Log-probabilities of n consecutive tokens of a prompt.

    Args:
        start: index of the first of these tokens in the prompt.
        logprobs: (n,) float32, log p(token | the tokens before it).
        ranks: (n,) int32, 1 for the most likely token; of equally likely ones, the smaller id comes first.
        top_tokens: (n, top) int32, the most likely tokens of each position, the likeliest first.
        top_logprobs: (n, top) float32.
        other_logprobs: (n, others) float32, of the tokens `PromptLogprobs.others`.
    """

    start: int
    logprobs: np.ndarray
    ranks: np.ndarray
    top_tokens: np.ndarray
    top_logprobs: np.ndarray
    other_logprobs: np.ndarray

    @classmethod
    def none(cls, asked: PromptLogprobs) -> PromptScores:
        """Return the scores of no tokens."""
        ids, values = np.zeros((0, asked.top), np.int32), np.zeros((0, asked.top), np.float32)
        others = np.zeros((0, len(asked.others)), np.float32)
        return cls(0, np.zeros(0, np.float32), np.zeros(0, np.int32), ids, values, others)

    @classmethod
    def joined(cls, start: int, parts: Sequence[PromptScores]) -> PromptScores:
        """Join the scores of consecutive tokens, the first of which has the index `start`."""
        return cls(
            start,
            np.concatenate([part.logprobs for part in parts]),
            np.concatenate([part.ranks for part in parts]),
            np.concatenate([part.top_tokens for part in parts]),
            np.concatenate([part.top_logprobs for part in parts]),
            np.concatenate([part.other_logprobs for part in parts]),
        )

    def part(self, start: int, stop: int, top: int) -> PromptScores:
        """Return the scores of tokens `start` to `stop` of these n, with at most `top` likeliest tokens."""
        return PromptScores(
            self.start + start,
            self.logprobs[start:stop],
            self.ranks[start:stop],
            self.top_tokens[start:stop, :top],
            self.top_logprobs[start:stop, :top],
            self.other_logprobs[start:stop],
        )

    @property
    def total(self) -> float:
        """The log-probability of all n tokens together, after the tokens before them."""
        return math.fsum(self.logprobs.tolist())

    @property
    def is_greedy(self) -> bool:
        """True if each of the n tokens is the most likely one."""
        return bool((self.ranks == 1).all())


@dataclass
class Request:
    """One prompt to continue.

    Args:
        prompt: token ids, at least one: a sequence, or an array (L,), of integers.
        max_tokens: maximum number of new tokens; -1 for no limit except the context's. With 0, the prompt is
            computed and nothing generated: the only response has the token -1.
        sampler: maps log-probabilities (1, vocab_size) to a token (1,), as mlx-lm's `make_sampler` builds; pass
            None for the most likely token.
        seed: seed of this row's own random stream, which depends on nothing else in the batch; pass None to
            draw one from `mx.random`.
        logits_processors: each maps (tokens so far, logits (1, vocab_size)) to logits, as mlx-lm's do.
        stop: strings that end the text; they are not part of it.
        cache: keys and values of tokens that come before the prompt, from `Model.make_cache` or mlx-lm's
            `make_prompt_cache`. At the end it holds prompt and answer, except the last token. If the cache
            has a bound, the row has it, too.
        on_prefill: called with (prompt tokens done, prompt tokens in all), with equal numbers once the first
            new token is there.
        logprobs: True if responses carry log-probabilities. Without them, a batch of rows that take the
            most likely token needs no logits.
        prompt_logprobs: which log-probabilities of the prompt's tokens are computed; pass None for none. The
            first response after the prompt has them (`TokenResponse.prompt_logprobs`). Keys and values of
            earlier prompts then serve only what comes before `start`.
        embedding: which vector of the prompt is computed; pass None for none. The only response has it
            (`TokenResponse.embedding`). `max_tokens` has to be 0, and `cache`, `prompt_logprobs`, `constraint`
            and `heal` must not be given.
        adapter: name of an adapter in the engine's pool, or weights of several by their names, which are added
            up; pass None for the model alone, or with the adapter that is attached to it.
        constraint: what the answer must look like; pass None for any text.
        at_limit: what happens if max_tokens or a full context ends an answer before its constraint is met:
            "error" raises an `IncompleteError`, as a stop string does; "complete" appends the shortest text
            that meets the constraint, however many tokens that has.
        heal: True if the prompt may end within a word: its last token is then generated again, together with
            what follows (`heal_prompt`).
        keeps_prefix: False if the prompt is not left in the prefix cache, because no other will begin like it.
        draft: True if draft tokens may be proposed for the row where the engine has `Speculation`. Sampler and
            logits processors are then called for tokens that may be rejected, and must depend on nothing
            except their arguments.
        images: the prompt's images, fitted by `vision.prompt_image.read_image`. Each takes the place of as many
            copies of the model's `image_token_id` in the prompt as it has tokens (`ChatImages` puts them
            there), in their order. The log-probabilities of these tokens themselves say nothing.
        client: name of the caller. Waiting requests have their turns by client, and clients share neither
            prefixes nor features of images.
    """

    prompt: Sequence[int]
    max_tokens: int = 256
    sampler: Sampler | None = None
    seed: int | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    stop: Sequence[str] = ()
    cache: list[Any] | None = None
    on_prefill: Callable[[int, int], None] | None = None
    logprobs: bool = True
    prompt_logprobs: PromptLogprobs | None = None
    embedding: Embedding | None = None
    adapter: AdapterChoice | None = None
    constraint: Constraint | None = None
    at_limit: str = "error"
    heal: bool = False
    keeps_prefix: bool = True
    draft: bool = True
    client: str = ""
    images: Sequence[PromptImage] = ()

    def checked(self, vocab_size: int | None, vision: VisionConfig | None = None) -> Request:
        """Return the request with plain Python values; raise `RequestError` if no model could answer it.

        `vision` is the config of the model's vision part; None if the model reads text only.
        """
        prompt = token_ids(self.prompt)
        if not prompt:
            raise RequestError(
                "The prompt is empty; at least one token is needed to continue from."
            )
        if not _is_whole(self.max_tokens) or self.max_tokens < -1:
            raise RequestError(
                f"max_tokens is {shown(self.max_tokens)}; allowed are 0 and more, or -1 for no limit."
            )
        if self.max_tokens == 0 and self.constraint is not None:
            raise RequestError(
                "max_tokens is 0, and a constraint says what the answer must look like; leave out one."
            )
        end = MOST_TOKENS if vocab_size is None else vocab_size
        if not 0 <= min(prompt) <= max(prompt) < end:
            raise RequestError(
                f"The prompt has token ids from {shown(min(prompt))} to {shown(max(prompt))}; this model's "
                f"go from 0 to {end - 1}. Was it encoded by another model's tokenizer?"
            )
        stop = _each("stop", self.stop, "non-empty strings", lambda s: isinstance(s, str) and s)
        if self.seed is not None and not (_is_whole(self.seed) and 0 <= self.seed <= MASK64):
            raise RequestError(f"seed is {shown(self.seed)}; allowed is 0 to 2**64 - 1.")
        processors = _each("logits_processors", self.logits_processors or (), "functions", callable)
        for name, function in (("sampler", self.sampler), ("on_prefill", self.on_prefill)):
            if function is not None and not callable(function):
                raise RequestError(f"{name} is {shown(function)}; a function or None is needed.")
        for name in ("logprobs", "heal", "draft", "keeps_prefix"):
            if not isinstance(flag := getattr(self, name), bool | np.bool_ | int):
                raise RequestError(f"{name} is {shown(flag)}; True or False is needed.")
        images = _checked_images(self.images, prompt, vision)
        if self.prompt_logprobs is not None:
            self._check_prompt_logprobs(len(prompt), end)
        if self.embedding is not None:
            self._check_embedding()
        if self.constraint is not None:
            from afm_mlx.guidance.constraint import Constraint

            if not isinstance(self.constraint, Constraint):
                raise RequestError(
                    f"constraint is {shown(self.constraint)}; a Constraint is needed, such as "
                    "Constraint.json_schema(schema)."
                )
        if not isinstance(self.client, str):
            raise RequestError(f"client is {shown(self.client)}; a text is needed, any.")
        if self.at_limit not in AT_LIMIT:
            raise RequestError(
                f"at_limit is {shown(self.at_limit)}; allowed are {', '.join(AT_LIMIT)}."
            )
        return replace(
            self,
            prompt=prompt,
            max_tokens=int(self.max_tokens),
            stop=stop,
            seed=None if self.seed is None else int(self.seed),
            logits_processors=processors,
            images=images,
        )

    def _check_prompt_logprobs(self, length: int, end: int) -> None:
        asked = self.prompt_logprobs
        if not isinstance(asked, PromptLogprobs):
            raise RequestError(
                f"prompt_logprobs is {shown(asked)}; PromptLogprobs(start, top) or None is needed."
            )
        if not _is_whole(asked.start) or not 1 <= asked.start <= length:
            raise RequestError(
                f"prompt_logprobs starts at {shown(asked.start)}; the prompt has {length} tokens, of which the "
                f"first has no log-probability: 1 to {length} are allowed."
            )
        if not _is_whole(asked.top) or not 0 <= asked.top <= MOST_TOP:
            raise RequestError(
                f"prompt_logprobs has top {shown(asked.top)}; 0 to {MOST_TOP} are allowed."
            )
        wrong = [token for token in asked.others if not (_is_whole(token) and 0 <= token < end)]
        if wrong:
            raise RequestError(
                f"prompt_logprobs has {shown(wrong[0])} among the other tokens; this model's go from 0 to "
                f"{end - 1}."
            )
        if self.heal:
            raise RequestError(
                "prompt_logprobs and heal are both given; heal removes the prompt's last token. Leave out one."
            )

    def _check_embedding(self) -> None:
        asked = self.embedding
        if not isinstance(asked, Embedding):
            raise RequestError(
                f"embedding is {shown(asked)}; Embedding(pooling, dimensions) or None is needed."
            )
        if asked.pooling not in POOLINGS:
            raise RequestError(
                f"The embedding's pooling is {shown(asked.pooling)}; allowed are {', '.join(POOLINGS)}."
            )
        if asked.dimensions is not None and not (
            _is_whole(asked.dimensions) and asked.dimensions > 0
        ):
            raise RequestError(
                f"The embedding's dimensions are {shown(asked.dimensions)}; 1 or more are allowed, or None."
            )
        if not isinstance(asked.normalized, bool):
            raise RequestError(
                f"The embedding's normalized is {shown(asked.normalized)}; True or False is needed."
            )
        if self.max_tokens != 0:
            raise RequestError(
                f"max_tokens is {self.max_tokens}, and an embedding has no answer; give max_tokens=0."
            )
        for name, value in (
            ("cache", self.cache),
            ("prompt_logprobs", self.prompt_logprobs),
            ("heal", self.heal or None),
        ):
            if value is not None:
                raise RequestError(f"embedding and {name} are both given; leave out one.")


def token_ids(prompt: object) -> list[int]:
    """Return a prompt's token ids, from a sequence or array of integers; `RequestError` for anything else."""
    if isinstance(prompt, mx.array):
        is_whole = mx.issubdtype(prompt.dtype, mx.integer)
    elif isinstance(prompt, np.ndarray):
        is_whole = np.issubdtype(prompt.dtype, np.integer)
    elif isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes | bytearray):
        if set(map(type, prompt)) == {int}:  # 30 times as fast as what follows
            return list(prompt)
        wrong = [token for token in prompt if not _is_whole(token)]
        if not wrong:
            return [int(token) for token in prompt]
        raise RequestError(
            f"The prompt has {shown(wrong[0])} for the id of a token; integers are needed, one list of them."
        )
    else:
        raise RequestError(
            f"The prompt is {shown(prompt)}; a list of token ids is needed, as tokenizer.encode(text) returns."
        )
    if not is_whole or prompt.ndim != 1:
        raise RequestError(
            f"The prompt is an array of {prompt.dtype} and shape {tuple(prompt.shape)}; token ids are "
            "integers in one dimension."
        )
    ids: list[int] = prompt.tolist()
    return ids


def _checked_images(
    images: object, prompt: Sequence[int], vision: VisionConfig | None
) -> tuple[PromptImage, ...]:
    """Return a request's images; raise `RequestError` unless they fit the model and the placeholders."""
    if isinstance(images, Sequence) and not images and vision is None:
        return ()
    from afm_mlx.vision.prompt_image import PromptImage

    given: tuple[PromptImage, ...]
    given = _each("images", images, "PromptImages", lambda each: isinstance(each, PromptImage))
    if vision is None:
        raise RequestError(
            "The request has images, and this model reads text only. Leave them out, or load a model with a "
            "vision part."
        )
    for i, image in enumerate(given):
        tiles, side = vision.num_tiles(image.mode), vision.tile_size(image.mode)
        if image.tiles.shape[:2] != (tiles, side) or image.tokens != vision.tokens(image.mode):
            raise RequestError(
                f"images[{i}] has {image.tiles.shape[0]} tiles of {image.tiles.shape[1]} pixels, and this "
                f"model's have {tiles} of {side}: read it with this model's vision_config (read_image)."
            )
    placeholder = vision.image_token_id
    count, wanted = prompt.count(placeholder), sum(image.tokens for image in given)
    if count != wanted:
        raise RequestError(
            f"The prompt has {count} image tokens (id {placeholder}), and its {len(given)} images need "
            f"{wanted}. Encode the chat with ChatImages, and pass ChatImages.placed."
        )
    if prompt[-1] == placeholder:
        raise RequestError(
            "The prompt ends with an image; at least one token of text is needed behind it."
        )
    return given


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _each(
    name: str, values: object, what: str, is_right: Callable[[Any], object]
) -> tuple[Any, ...]:
    """Return a caller's list `name` as a tuple; raise `RequestError` unless each value `is_right`."""
    if not isinstance(values, str) and isinstance(values, Iterable):
        given = tuple(values)
        if all(is_right(value) for value in given):
            return given
    raise RequestError(f"{name} is {shown(values)}; a list of {what} is needed.")


@dataclass
class TokenResponse:
    """One new token of one row.

    Args:
        row: the row's id, which `Engine.submit` returned.
        token: id of the token; -1 when the row ended with an error before there was one, or with max_tokens 0.
        text: what can be shown since the last response; may be empty.
        logprobs: (vocab_size,) float32, log-probabilities that the token was drawn from, computed when
            they are looked at; None when the request needs none.
        finish_reason: "stop" at an end token or stop string, "length" at max_tokens, "error" when the
            row could not go on, None while it does.
        error: why, when finish_reason is "error".
        from_draft: True if the token was a draft token that the model accepted.
        draft_counts: at the row's end, how many draft tokens were proposed for it, and how many were accepted;
            None if the engine has no `Speculation`.
        cached_tokens: tokens of the prompt that were not computed, because the prefix cache had them.
        is_forced: True if the constraint allowed no other token: it was not drawn, and may come before the
            prompt is computed.
        prompt_logprobs: log-probabilities of the prompt's tokens, in the first response after the prompt is
            computed; None in others, and if the request asks for none.
        embedding: the prompt's vector (dimensions,), float32, if the request asks for one; see `Embedding`.
        completion: tokens that complete the answer behind `token`, see `Request.at_limit`; their text is in
            `text`.
    """

    row: int
    token: int
    text: str
    logprobs: mx.array | None
    finish_reason: str | None = None
    error: Exception | None = None
    from_draft: bool = False
    draft_counts: DraftCounts | None = None
    cached_tokens: int = 0
    is_forced: bool = False
    prompt_logprobs: PromptScores | None = None
    embedding: np.ndarray | None = None
    completion: Sequence[int] = ()
