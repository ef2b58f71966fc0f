"""`generate`, `stream_generate` and `batch_generate`, with mlx-lm's signatures, on the engine's loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, overload

import mlx.core as mx
import mlx.nn as nn

from afm_mlx import threads
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.adapters.registry import AdapterChoice
from afm_mlx.engine.batch import fit_empty, kind_of
from afm_mlx.engine.draft_length import DraftCounts
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.prefix_cache import PrefixCache
from afm_mlx.engine.request import (
    LogitsProcessor,
    PromptLogprobs,
    PromptScores,
    Request,
    Sampler,
    token_ids,
)
from afm_mlx.engine.speculation.drafting import Speculation
from afm_mlx.errors import RequestError, shown
from afm_mlx.model.kv_cache import Cache
from afm_mlx.model.model import is_afm
from afm_mlx.model.wired_memory import wired_memory
from afm_mlx.tokenizer.chat_images import ChatImages
from afm_mlx.tokenizer.protocol import Tokenizer

if TYPE_CHECKING:
    from afm_mlx.guidance.constraint import Constraint
    from afm_mlx.guidance.types import AnswerType
    from afm_mlx.vision.prompt_image import PromptImage

T = TypeVar("T")
Messages = str | Sequence[Mapping[str, Any]]


@dataclass
class GenerationResponse:
    """One step of `stream_generate`, with mlx-lm's fields."""

    text: str  # the next segment of the answer; may be empty
    token: int  # -1 with max_tokens 0
    logprobs: (
        mx.array | None
    )  # (vocab_size,), which `token` was drawn from; None without `logprobs=True`
    from_draft: bool  # True if it was a draft token that the model accepted
    prompt_tokens: int
    prompt_tps: float  # prompt tokens per second
    generation_tokens: int  # new tokens so far
    generation_tps: float  # new tokens per second, counted from the first one on
    peak_memory: float  # most that MLX has allocated, GB
    finish_reason: str | None = None  # "stop", "length", or None while it goes on
    draft_counts: DraftCounts | None = None  # at the end; None without speculation
    prompt_logprobs: PromptScores | None = None  # in the first response; None if not asked for
    completion: Sequence[int] = ()  # at the end, tokens that complete a cut-off answer


@dataclass
class BatchResponse:
    """What `batch_generate` returns: lists have one entry for each prompt."""

    texts: list[str]
    token_ids: list[list[int]]  # end tokens excepted
    finish_reasons: list[str]  # "stop" or "length"
    prompt_tps: float  # prompt tokens per second, all rows together
    generation_tps: float  # new tokens per second, all rows together
    prompt_logprobs: list[PromptScores | None]  # None if not asked for


def encode_prompt(tokenizer: Tokenizer, prompt: str | Sequence[int] | mx.array) -> list[int]:
    """Return the token ids of a text, sequence or array of integers; `RequestError` for anything else."""
    if not isinstance(prompt, str):
        return token_ids(prompt)
    bos = tokenizer.bos_token
    adds_bos = bos is None or not prompt.startswith(bos)
    ids: list[int] = tokenizer.encode(prompt, add_special_tokens=adds_bos)
    return ids


def stream_generate(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int] | mx.array,
    max_tokens: int = 256,
    draft_model: nn.Module | None = None,
    *,
    sampler: Sampler | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    max_kv_size: int | None = None,
    sliding_window: bool = False,
    prompt_cache: Cache | None = None,
    prefill_step_size: int = 2048,
    kv_bits: int | None = None,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    seed: int | None = None,
    stop: Sequence[str] = (),
    logprobs: bool = True,
    prompt_logprobs: PromptLogprobs | None = None,
    adapter: AdapterChoice | None = None,
    adapters: AdapterPool | None = None,
    constraint: Constraint | None = None,
    at_limit: str = "error",
    heal: bool | None = None,
    num_draft_tokens: int | None = None,
    speculation: Speculation | None = None,
    prefix_cache: PrefixCache | None = None,
    images: Sequence[PromptImage] = (),
) -> Iterator[GenerationResponse]:
    """Continue one prompt and yield the answer as it grows.

    Args:
        model: a model of `load`.
        tokenizer: the model's tokenizer, of `load`.
        prompt: text, or token ids.
        max_tokens: maximum number of new tokens; -1 for no limit except the context's, 0 for none: then the
            only response has the token -1.
        draft_model: a smaller model with the same vocabulary, of `load_draft`. It proposes tokens, and the
            model verifies several in one step; the answer is the same.
        sampler: log-probabilities to token, as mlx-lm's `make_sampler` builds; None is greedy.
        logits_processors: as mlx-lm's `make_logits_processors` builds.
        max_kv_size: tokens that the cache may hold; pass None for the model's context length.
        sliding_window: past `max_kv_size`, forget the oldest tokens; without it the run ends with an error.
        prompt_cache: keys and values of tokens that come before the prompt; updated in place, at the end or
            when the iterator is closed before.
        prefill_step_size: maximum number of prompt tokens per step.
        kv_bits: storage of an AFM model's keys and values: None takes int8 when the model has scales
            for it, 8 insists on that, and 16 stores floats.
        prompt_progress_callback: called with (tokens done, tokens in all), at last with equal numbers.
        seed: seed of this run's own random stream.
        stop: strings that end the answer; they are not part of it.
        logprobs: True if responses carry log-probabilities; without them, greedy decoding skips the logits.
        prompt_logprobs: which log-probabilities of the prompt's tokens the first response has; None for none.
        adapter: name of an adapter in the pool, or weights of several by their names; pass None for none.
        adapters: the pool that `adapter` is in.
        constraint: what the answer must look like, such as `Constraint.json_schema(schema)`.
        at_limit: "error", or "complete" for the shortest end of an answer that is cut off; see `Request`.
        heal: True if a prompt may end within a word; by default if it is text and there is a constraint.
        num_draft_tokens: tokens that `draft_model` proposes at a time, 1 to 7; pass None for as many as pay.
        speculation: other ways to draft, in place of `draft_model` and `num_draft_tokens`.
        prefix_cache: has the keys and values of earlier prompts' beginnings, and gets the run's, too.
        images: the prompt's images, in the order of their tokens: `ChatImages.placed` of the encoded chat.

    Raises:
        AFMError: for what can't be honoured in the arguments or the prompt.
    """
    if draft_model is not None:
        if speculation is not None:
            raise RequestError(
                "draft_model and speculation are both given; speculation has one, too."
            )
        speculation = Speculation(draft_model, num_draft_tokens=num_draft_tokens)
    elif num_draft_tokens is not None:
        raise RequestError("num_draft_tokens is given, and no draft_model.")
    options = _cache_options(
        model, _caches([prompt_cache], 1), kv_bits, max_kv_size, sliding_window
    )
    options |= {"prefill_step_size": prefill_step_size, "speculation": speculation}
    options["prefix_cache"] = prefix_cache
    engine = Engine(model, tokenizer, adapters=adapters, **options)
    request = Request(
        prompt=encode_prompt(tokenizer, prompt),
        max_tokens=max_tokens,
        sampler=sampler,
        seed=seed,
        logits_processors=() if logits_processors is None else logits_processors,
        stop=stop,
        cache=prompt_cache,
        on_prefill=prompt_progress_callback,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        adapter=adapter,
        constraint=constraint,
        at_limit=at_limit,
        heal=heal if heal is not None else constraint is not None and isinstance(prompt, str),
        images=images,
    )
    row = engine.submit(request)
    with wired_memory(model):
        try:
            yield from _timed(engine, len(request.prompt))
        except GeneratorExit:  # the caller has closed it
            with suppress(RequestError):  # Python is ending, and its threads run no more
                engine.cancel(row)
            raise


def _cache_options(
    model: nn.Module,
    caches: Sequence[Cache | None],
    kv_bits: int | None,
    max_kv_size: int | None,
    sliding_window: bool,
) -> dict[str, Any]:
    """Return an engine's cache options: the caller's where given, and empty caches get them, too.

    Other options are those that the prompt caches have, or the defaults.
    """
    kv = None if kv_bits is None else kv_storage(model, kv_bits)
    context = model.args.context_length if is_afm(model) else None
    given = [cache for cache in caches if cache is not None]
    for cache in given:
        bound = max_kv_size or kind_of(cache)[1] or context
        fit_empty(cache, kv, bound if sliding_window else None)
    storage, bound, slides = kind_of(given[0] if given else [])
    if max_kv_size is None and (slides or storage is None):
        max_kv_size = bound  # bounds without a window are their rows' own
    return {
        "kv": kv or storage or "int8",
        "max_kv_size": max_kv_size,
        "sliding_window": sliding_window or slides,
    }


def kv_storage(model: nn.Module, kv_bits: int) -> str:
    """Return the kind of cache with `kv_bits` bits, "int8" or "float"; raise if the model has none."""
    config_bits = model.args.kv_bits if is_afm(model) else None
    if kv_bits == 16:
        return "float"
    if kv_bits != 8 or config_bits != 8:
        int8 = "8 (int8 with the checkpoint's scales) or " if config_bits else ""
        raise RequestError(f"kv_bits is {kv_bits}; this model's cache can be {int8}16 (float).")
    return "int8"


def _timed(engine: Engine, prompt_tokens: int) -> Iterator[GenerationResponse]:
    """Yield the engine's responses with mlx-lm's figures; raise a row's error after its last response."""
    start = time.perf_counter()
    prompt_tps = 0.0
    for count, response in enumerate(engine.run(), start=1):
        if response.error is not None and response.token < 0 and not response.text:
            raise response.error  # there is nothing to show
        if count == 1:
            prompt_tps = prompt_tokens / (time.perf_counter() - start)
            start = time.perf_counter()
        yield GenerationResponse(
            text=response.text,
            token=response.token,
            logprobs=response.logprobs,
            from_draft=response.from_draft,
            prompt_tokens=prompt_tokens,
            prompt_tps=prompt_tps,
            generation_tokens=count - (response.token < 0),
            # The first token came with the prompt; its time is not in the clock.
            generation_tps=(count - 1) / (time.perf_counter() - start) if count > 1 else 0.0,
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=None if response.error else response.finish_reason,
            draft_counts=response.draft_counts,
            prompt_logprobs=response.prompt_logprobs,
            completion=response.completion,
        )
        if response.error is not None:
            raise response.error


def generate(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int] | mx.array,
    verbose: bool = False,
    **kwargs: Any,
) -> str:
    """Continue one prompt and return the whole answer.

    Args:
        model, tokenizer, prompt: as for `stream_generate`, whose other options `kwargs` takes.
        verbose: print the answer as it grows, and mlx-lm's three lines of figures.
    """
    text = ""
    response = None
    if verbose:
        print("=" * 10)
    for response in stream_generate(model, tokenizer, prompt, **{"logprobs": False, **kwargs}):
        if verbose:
            print(response.text, end="", flush=True)
        text += response.text
    if verbose and response is not None:
        print()
        print("=" * 10)
        print(summary(response))
    return text


def summary(response: GenerationResponse) -> str:
    """Return mlx-lm's three closing lines for an answer's last response, and a line about draft tokens."""
    lines = (
        f"Prompt: {response.prompt_tokens} tokens, {response.prompt_tps:.3f} tokens-per-sec\n"
        f"Generation: {response.generation_tokens} tokens, "
        f"{response.generation_tps:.3f} tokens-per-sec\n"
        f"Peak memory: {response.peak_memory:.3f} GB"
    )
    if response.draft_counts is not None:
        lines += f"\nDrafts: {response.draft_counts}"
    return lines


def batch_generate(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Sequence[int]],
    max_tokens: int | Sequence[int] = 128,
    *,
    max_batch: int = 8,
    prefill_step_size: int = 2048,
    max_kv_size: int | None = None,
    sliding_window: bool = False,
    cache: Sequence[Any] | None = None,
    kv_bits: int | None = None,
    adapter: AdapterChoice | Sequence[AdapterChoice | None] | None = None,
    adapters: AdapterPool | None = None,
    constraint: Constraint | Sequence[Constraint | None] | None = None,
    speculation: Speculation | None = None,
    images: Sequence[Sequence[PromptImage]] | None = None,
    **request: Any,
) -> BatchResponse:
    """Continue many prompts at once.

    Args:
        model, tokenizer: what `load` returns.
        prompts: texts or token ids.
        max_tokens: maximum number of new tokens, for all or for each.
        max_batch: prompts that run at the same time; the others follow as rows end.
        prefill_step_size, max_kv_size, sliding_window, kv_bits: as for `stream_generate`.
        cache: the prompt cache of the only prompt, or one or None for each; updated in place.
        adapter: as for `stream_generate`, for all or for each; rows of one batch may have different ones.
        adapters: the pool that `adapter` is in.
        constraint: as for `stream_generate`, for all or for each.
        speculation: as for `stream_generate`.
        images: the images of each prompt, as for `stream_generate`; pass None if no prompt has any.
        request: other fields of `Request`, the same for all prompts.

    Raises:
        AFMError: as `stream_generate` does, and as soon as one row can't go on.
    """
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Collection | mx.array):
        raise RequestError(
            f"prompts is {shown(prompts)}; a list of prompts is needed, texts or lists of token ids."
        )
    max_new = _for_each("max_tokens", max_tokens, len(prompts))
    names = _for_each("adapter", adapter, len(prompts))
    constraints = _for_each("constraint", constraint, len(prompts))
    pictures = [()] * len(prompts) if images is None else _for_each("images", images, len(prompts))
    caches = _caches(cache, len(prompts))
    options = _cache_options(model, caches, kv_bits, max_kv_size, sliding_window)
    options |= {"prefill_step_size": prefill_step_size, "speculation": speculation}
    engine = Engine(model, tokenizer, adapters=adapters, max_batch=max_batch, **options)
    encoded = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    request = {"logprobs": False, **request}  # nothing here returns them
    rows: dict[int, int] = {}
    each = zip(encoded, max_new, caches, names, constraints, pictures, strict=True)
    for index, (ids, most, own, name, must, shown_ones) in enumerate(each):
        row = Request(
            ids, most, cache=own, adapter=name, constraint=must, images=shown_ones, **request
        )
        rows[engine.submit(row)] = index
    with wired_memory(model):
        return _answers(engine, rows, sum(map(len, encoded)))


def _for_each(name: str, value: object, count: int) -> list[Any]:
    """Return one value for each prompt, from one for all or one for each."""
    if isinstance(value, Iterable) and not isinstance(value, str | Mapping):
        values = list(value)
    else:
        values = [value] * count
    if len(values) != count:
        raise RequestError(f"{name} has {len(values)} entries for {count} prompts.")
    return values


def _caches(cache: object, count: int) -> list[Cache | None]:
    """Return one prompt cache or None for each prompt, from the only prompt's cache or a list of them."""
    if cache is None:
        return [None] * count
    is_one = isinstance(cache, list) and not any(c is None or isinstance(c, list) for c in cache)
    each = [cache] if is_one else cache
    if not isinstance(each, list | tuple) or not all(
        c is None or isinstance(c, list) for c in each
    ):
        raise RequestError(
            f"The prompt cache is {shown(cache)}; a list of entries is needed, of Model.make_cache or "
            "mlx-lm's make_prompt_cache."
        )
    if len(each) != count:
        raise RequestError(
            f"There are {len(each)} prompt caches for {count} prompts; give each prompt its own, or None."
        )
    return list(each)


def _answers(engine: Engine, rows: Mapping[int, int], prompt_tokens: int) -> BatchResponse:
    """Run an engine to the end; `rows` has the index of each row's prompt."""
    texts, reasons = [""] * len(rows), [""] * len(rows)
    tokens: list[list[int]] = [[] for _ in rows]
    scores: list[PromptScores | None] = [None] * len(rows)
    start = first = time.perf_counter()
    for response in engine.run():
        if response.error is not None:
            for row in rows:
                engine.cancel(row)  # returns the prompt caches, as far as they are filled
            raise response.error
        index = rows[response.row]
        if not any(tokens) and not any(reasons):
            first = time.perf_counter()
        texts[index] += response.text
        if response.prompt_logprobs is not None:
            scores[index] = response.prompt_logprobs
        if response.token >= 0 and response.token not in engine.tokenizer.eos_token_ids:
            tokens[index].append(response.token)
        reasons[index] = response.finish_reason or ""
    return BatchResponse(
        texts=texts,
        token_ids=tokens,
        finish_reasons=reasons,
        prompt_tps=prompt_tokens / max(first - start, 1e-9),
        generation_tps=sum(map(len, tokens)) / max(time.perf_counter() - first, 1e-9),
        prompt_logprobs=scores,
    )


# -- asyncio


async def stream_generate_async(*args: Any, **options: Any) -> AsyncIterator[GenerationResponse]:
    """Yield what `stream_generate` yields, without blocking the event loop.

        async for response in stream_generate_async(model, tokenizer, prompt, max_tokens=100):
            print(response.text, end="")

    Several of them take turns, token by token. Samplers, logits processors and callbacks run in MLX's thread.
    If a task is cancelled, its answer ends after the current token. Takes the arguments of
    `stream_generate`, and raises the same errors.
    """
    stream = stream_generate(*args, **options)
    try:
        while True:
            response = await asyncio.wrap_future(threads.submit(next, stream, None))
            if response is None:
                return
            yield response
    finally:
        # Once Python has begun to end, the generator can't be closed, and need not be.
        with suppress(RequestError):
            threads.submit(stream.close)  # type: ignore[attr-defined]


# -- Python types


@overload
def generate_as(
    kind: type[T], model: nn.Module, tokenizer: Tokenizer, messages: Messages, **options: Any
) -> T: ...
@overload
def generate_as(
    kind: Any, model: nn.Module, tokenizer: Tokenizer, messages: Messages, **options: Any
) -> Any: ...
def generate_as(
    kind: Any, model: nn.Module, tokenizer: Tokenizer, messages: Messages, **options: Any
) -> Any:
    """Answer a chat with an instance of a type.

        person = generate_as(Person, model, tokenizer, "Who wrote Emma?", max_tokens=100)

    Args:
        kind: what `answer_type` takes (a dataclass, `TypedDict`, class of msgspec or pydantic, function, ...),
            or what it returns. A function's answer is a dict of its arguments.
        model, tokenizer: what `load` returns.
        messages: the chat, or a user's only message; a part of it may be an image (`checked_messages`). The
            last message of the user gets the type's schema, unless it has a `response_format`. Without a chat
            template a text is continued as it is.
        options: the keyword arguments of `stream_generate`.

    Raises:
        AFMError: as `stream_generate` does; `ConstraintError` for a type that can't be generated, and for a
            value that its code refuses; `IncompleteError` for an answer that is cut off.
    """
    *_, answer = stream_generate_as(kind, model, tokenizer, messages, **options)
    return answer


def stream_generate_as(
    kind: Any, model: nn.Module, tokenizer: Tokenizer, messages: Messages, **options: Any
) -> Iterator[Any]:
    """Answer a chat with an instance of a type, and yield snapshots of it as it grows.

    Yields a snapshot whenever the answer has more (`AnswerType.partial`), and the instance as the last item.
    Takes the arguments of `generate_as`, and raises the same errors.
    """
    from afm_mlx.guidance.types import AnswerType, answer_type

    answers = kind if isinstance(kind, AnswerType) else answer_type(kind)
    prompt, images = _prompt(answers, tokenizer, messages)
    options = {"images": images, "logprobs": False, **options, "constraint": answers.constraint}
    text, seen = "", None
    for response in stream_generate(model, tokenizer, prompt, **options):
        text += response.text
        snapshot = answers.partial(text)
        if snapshot is not None and snapshot != seen:
            yield snapshot
            seen = snapshot
    yield answers.instance(text)


def _prompt(
    answers: AnswerType, tokenizer: Tokenizer, messages: Messages
) -> tuple[str | list[int], Sequence[PromptImage]]:
    """Render a chat, with the type's schema in the last message of the user; return prompt and images."""
    if not tokenizer.has_chat_template:
        if not isinstance(messages, str):
            raise RequestError("The model has no chat template; give a text instead of messages.")
        return messages, ()
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, Iterable):
        raise RequestError(
            f"messages is {shown(messages)}; a text or a list of messages is needed."
        )
    chat = list(messages)
    for i, message in reversed(list(enumerate(chat))):
        if isinstance(message, Mapping) and message.get("role") == "user":
            chat[i] = {"response_format": answers.response_format, **message}
            break
    images = ChatImages()
    sees = getattr(tokenizer, "vision_config", None) is not None
    given: dict[str, Any] = {"images": images} if sees else {}
    ids: list[int] = tokenizer.apply_chat_template(chat, add_generation_prompt=True, **given)
    return ids, images.placed
