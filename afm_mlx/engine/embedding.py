"""`embed`: vectors of texts, many at a time, on the engine's loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.nn as nn
import numpy as np

from afm_mlx.adapters.adapter_folder import EmbeddingUse, embedding_use
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.adapters.registry import AdapterChoice
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.request import Embedding, Request
from afm_mlx.errors import AFMError, DataError, EmbeddingError, RequestError, shown
from afm_mlx.model.wired_memory import wired_memory
from afm_mlx.progress import Progress
from afm_mlx.ranks import ALONE, Ranks
from afm_mlx.tokenizer.embedding_text import embedding_tokens, query_text
from afm_mlx.tokenizer.protocol import Tokenizer

_ROUNDING = 1e-5
"""Length of what is left of a vector, over the vector's, that may come from rounding alone."""


def embed(
    model: nn.Module,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    pooling: str | None = None,
    dimensions: int | None = None,
    queries: bool = False,
    instruction: str | None = None,
    adapter: AdapterChoice | None = None,
    adapters: AdapterPool | None = None,
    batch_size: int = 32,
    center: bool = False,
    progress: Progress | None = None,
    kv: str = "float",
    ranks: Ranks = ALONE,
    **engine_options: Any,
) -> np.ndarray:
    """Compute a vector for each text; the dot product of two of them is their cosine similarity.

        vectors = embed(model, tokenizer, ["a cat", "a kitten", "tax law"])
        print(vectors @ vectors[0])

    A model that was not trained for embeddings gives poor vectors; see docs/embeddings.md.

    Args:
        model, tokenizer: what `load` returns.
        texts: n texts, none of them empty; names of control tokens in them are plain text.
        pooling: "last" or "mean" (`afm_mlx.model.pooling`); pass None for what the adapter was trained with, in
            the pool or attached to the model, or else "last".
        dimensions: numbers of each vector, from the first on; pass None for all.
        queries: True if the texts are queries, before which the adapter's instruction is put, if it has one.
        instruction: text to put before queries in place of the adapter's; makes the texts queries.
        adapter: name of an adapter in the pool `adapters`, or weights of several.
        batch_size: maximum number of texts that are computed at the same time.
        center: subtract the mean of all n vectors, which vectors of untrained models have in common.
        progress: called with (texts done, n).
        kv: storage of keys and values, "float" or "int8" (`Model.make_cache`).
        ranks: processes that split the texts; all get all vectors.
        engine_options: further options of `Engine`.

    Returns:
        (n, dimensions) float32, each row with an L2 norm of 1.

    Raises:
        DataError: names the text that has no vector: it is empty or no text, or has more tokens than the
            context holds.
        EmbeddingError: if hidden states are NaN, infinite or zeros.
        AFMError: for what can't be honoured.
    """
    if isinstance(texts, str):
        raise RequestError("texts is one text; a list of texts is needed.")
    if center and len(texts) < 2:
        raise RequestError(f"center needs the mean of several texts, and there are {len(texts)}.")
    use: EmbeddingUse = getattr(model, "embedding_use", None) or EmbeddingUse()
    if isinstance(adapter, str) and adapters is not None and adapter in adapters.paths:
        use = embedding_use(adapters.paths[adapter]) or use
    pooling = use.pooling if pooling is None else pooling
    instruction = instruction if instruction or not queries else use.instruction
    engine = Engine(
        model, tokenizer, max_batch=batch_size, adapters=adapters, kv=kv, **engine_options
    )
    asked = Embedding(pooling, None if center else dimensions)
    engine.prepare(Request([0], 0, embedding=Embedding(pooling, dimensions)))  # raises at once
    prompts = [_tokens(tokenizer, text, i, pooling, instruction) for i, text in enumerate(texts)]
    wheres = [f"Text {index}" for index in range(len(prompts))]

    def computed(own: list[int]) -> np.ndarray:
        mine, names = [prompts[i] for i in own], [wheres[i] for i in own]
        return prompt_vectors(engine, mine, asked, names, adapter=adapter, progress=progress)

    vectors = ranks.each_row(range(len(prompts)), computed)
    return centered(vectors, dimensions) if center else vectors


def prompt_vectors(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    asked: Embedding,
    wheres: Sequence[str],
    *,
    adapter: AdapterChoice | None = None,
    progress: Progress | None = None,
) -> np.ndarray:
    """Compute a vector for each of n prompts, (n, dimensions) float32.

    Args:
        engine: an engine without rows.
        prompts: token ids of each.
        asked: which vectors.
        wheres: what errors call each prompt.
        adapter: an adapter of the engine's pool, as for `Request`.
        progress: called with (prompts done, n).

    Raises:
        DataError: names a prompt that is refused, such as one with more tokens than the context holds.
        EmbeddingError: if hidden states are NaN, infinite or zeros.
    """
    vectors = np.zeros((len(prompts), engine.embedding_dim), np.float32)[:, : asked.dimensions]
    rows: dict[int, int] = {}
    # Prompts of about one length, which share chunks, have little padding; the longest come first.
    left = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    with wired_memory(engine.model):
        while left or rows:
            while left and engine.rows_waiting < engine.max_batch:
                index = left.pop()
                try:
                    request = Request(prompts[index], 0, embedding=asked, adapter=adapter)
                    rows[engine.submit(request)] = index
                except AFMError as error:
                    raise DataError(f"{wheres[index]}: {error}") from None
            for response in engine.step():
                if response.error is not None:
                    raise response.error
                assert response.embedding is not None
                vectors[rows.pop(response.row)] = response.embedding
                if progress is not None:
                    progress(len(prompts) - len(left) - len(rows), len(prompts))
    return vectors


def centered(vectors: np.ndarray, dimensions: int | None = None) -> np.ndarray:
    """Subtract the mean of vectors (n, D), keep the first `dimensions`, and scale them to an L2 norm of 1.

    Raises:
        EmbeddingError: if a vector equals the mean up to rounding, so that nothing is left of it.
    """
    found = (vectors - vectors.mean(axis=0))[:, :dimensions]
    norms = np.linalg.norm(found, axis=-1, keepdims=True)
    # Equal texts of a batch may differ in their last bits.
    whole = np.linalg.norm(vectors[:, :dimensions], axis=-1, keepdims=True)
    if not (norms > _ROUNDING * whole).all():
        raise EmbeddingError(
            f"Text {int(norms.argmin())} has the mean of all vectors, and nothing is left when that is "
            "subtracted. Leave out center, or give more texts."
        )
    return found / norms


def _tokens(
    tokenizer: Tokenizer, text: object, index: int, pooling: str, instruction: str | None
) -> list[int]:
    if not isinstance(text, str) or not text:
        raise DataError(f"Text {index} is {shown(text)}; a text that is not empty is needed.")
    try:
        return embedding_tokens(tokenizer, query_text(text, instruction), pooling)
    except AFMError as error:
        raise DataError(f"Text {index}: {error}") from None
