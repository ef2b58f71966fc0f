"""Log-likelihoods of continuations of contexts, as benchmarks with given answers need them.

A context that has several continuations is computed once: a row computes its keys and values for the engine's
prefix cache, from which the row of each continuation begins. Contexts are taken in the order of their tokens,
so those that begin alike, with the same examples for instance, share that beginning, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any

import mlx.nn as nn

from afm_mlx.adapters.registry import AdapterChoice
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.prefix_cache import PrefixCache
from afm_mlx.engine.request import PromptLogprobs, PromptScores, Request, token_ids
from afm_mlx.errors import AFMError, DataError
from afm_mlx.model.wired_memory import wired_memory
from afm_mlx.tokenizer.protocol import Tokenizer
from afm_mlx.vision.prompt_image import PromptImage

PREFIX_MEMORY = 1 << 30  # bytes


def score_continuations(
    model: nn.Module,
    tokenizer: Tokenizer,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    batch_size: int = 8,
    top: int = 0,
    adapter: AdapterChoice | None = None,
    kv: str = "float",
    prefix_memory: int = PREFIX_MEMORY,
    images: Mapping[int, Sequence[PromptImage]] = MappingProxyType({}),
    **engine_options: Any,
) -> Iterator[tuple[int, PromptScores]]:
    """Score each continuation of each context, and yield the results as they come.

        scores = dict(score_continuations(model, tokenizer, [(context, answer) for answer in answers]))
        likelihoods = [scores[i].total for i in range(len(answers))]

    Args:
        model, tokenizer: what `load` returns.
        pairs: a context and a continuation each, as token ids. A context has one token or more, such as the
            model's start token. Equal contexts without images are computed once.
        images: images of pairs by the pairs' indices, see `Request.images`.
        batch_size: maximum number of rows that run at the same time.
        top: number of most likely tokens that are reported at each position.
        adapter: name of an adapter in the pool `adapters` (an engine option), or weights of several.
        kv: storage of keys and values, "float" or "int8" (`Model.make_cache`). With "int8", attention is
            rounded more, and log-likelihoods of whole sentences move by some hundredths.
        prefix_memory: maximum bytes of the keys and values of contexts; 0 computes every pair from its first
            token.
        engine_options: further options of `Engine`.

    Yields:
        The index of a pair, and the scores of its continuation's tokens: `total` is the log-likelihood, and
        `is_greedy` is True if the model would generate the continuation.

    Raises:
        DataError: names the pair that can't be scored: an empty context, an id that is no token, or more
            tokens than the context holds.
        AFMError: as `Engine` does.
    """
    ids = [_checked(index, *pair) for index, pair in enumerate(pairs)]
    if prefix_memory:
        engine_options["prefix_cache"] = PrefixCache(prefix_memory)
    engine = Engine(model, tokenizer, max_batch=batch_size, kv=kv, **engine_options)
    # By row: the index of its pair, or of a context, the indices of the pairs that continue it.
    rows: dict[int, int] = {}
    forks: dict[int, list[int]] = {}

    def submit(index: int, prompt: list[int], asked: PromptLogprobs | None = None) -> int:
        seen = images.get(index, ())
        try:
            return engine.submit(
                Request(prompt, 0, prompt_logprobs=asked, adapter=adapter, images=seen)
            )
        except AFMError as error:
            raise DataError(f"Pair {index}: {error}") from None

    def submit_pairs(indices: Sequence[int]) -> None:
        for index in indices:
            context, continuation = ids[index]
            asked = PromptLogprobs(len(context), top)
            rows[submit(index, context + continuation, asked)] = index

    order = sorted(range(len(ids)), key=lambda i: ids[i][0])
    groups = deque(list(group) for _, group in groupby(order, key=lambda i: ids[i][0]))
    with wired_memory(model):
        while groups or engine.busy:
            # As many contexts as have room for all of their continuations, which then share chunks.
            while groups:
                group, begun = groups[0], len(rows) + sum(map(len, forks.values()))
                if begun and begun + len(group) > batch_size:
                    break
                groups.popleft()
                context = ids[group[0]][0]
                has_images = any(index in images for index in group)
                if prefix_memory and len(group) > 1 and len(context) > 1 and not has_images:
                    forks[submit(group[0], context)] = group
                else:
                    submit_pairs(group)
            for response in engine.step():
                if response.error is not None:
                    raise response.error
                if response.row in forks:
                    submit_pairs(forks.pop(response.row))
                else:
                    assert response.prompt_logprobs is not None
                    yield rows.pop(response.row), response.prompt_logprobs


def _checked(index: int, context: object, continuation: object) -> tuple[list[int], list[int]]:
    """Return a pair as lists of token ids."""
    try:
        ids = token_ids(context), token_ids(continuation)
    except AFMError as error:
        raise DataError(f"Pair {index}: {error}") from None
    if not ids[0]:
        raise DataError(
            f"Pair {index}: the context is empty; it needs a token, such as the model's start token."
        )
    return ids
