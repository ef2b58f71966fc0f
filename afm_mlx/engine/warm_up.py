"""Compiling the Metal kernels of a model before a request needs them.

MLX compiles a kernel when it is evaluated for the first time, which takes a fraction of a second. What a server
can meet is known before: numbers of rows, tokens of a row, and adapters. A block of each kind and the head have
every kernel, whatever the numbers are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import mlx.core as mx

from afm_mlx.adapters.active import BatchAdapters, bind
from afm_mlx.adapters.resident import ResidentAdapter
from afm_mlx.adapters.target_modules import target_modules
from afm_mlx.kernels import Part
from afm_mlx.kernels.metal import runtime
from afm_mlx.model.attention import Positions
from afm_mlx.model.kv_cache import KVCache
from afm_mlx.model.model import Model

PROMPTS = (2, 16, 64, 300)  # tokens, for which there are different kernels
COLUMNS = (100, 1100)  # of a cache, on both sides of attention's `SINGLE_PASS`
RANKS = (8, 16, 32)
MAX_TOKENS = 8  # of a row, for which there are kernels


def warm_up(
    model: Model, max_batch: int, *, drafts: bool = False, adapters: bool = False, kv: str = "int8"
) -> Iterator[str | None]:
    """Return an iterator that compiles Metal's kernels for a model, one or none in each step.

    It gives the library's name, or None. Use it in the thread that runs the model, between the model's steps.

    Args:
        model: the model, with its weights.
        max_batch: number of rows of the largest batch.
        drafts: True if draft tokens are verified.
        adapters: True if rows may have adapters, to which the model's layers are bound (`bind`).
        kv: as for `Model.make_cache`.
    """
    known: set[str] = set()

    def compile_with(batch: BatchAdapters | None, run: Callable[[], None]) -> Iterator[str | None]:
        # The rows of the last step may have left their adapters, which are another number of rows'.
        active = bind(model).using(batch) if adapters else contextlib.nullcontext()
        with active, runtime.recorded() as launches:
            run()
        yield None
        for library, outputs in launches:
            if library not in known:
                known.add(library)
                mx.eval(outputs)
                yield library

    for tokens in PROMPTS:
        yield from compile_with(None, partial(_prompt, model, tokens, kv))
    residents = _residents(model) if adapters else []
    for rows in range(1, max_batch + 1):
        batches: list[BatchAdapters | None] = [None]
        batches += [BatchAdapters.of([resident] * rows) for resident in residents]
        if rows > 1 and residents:
            batches.append(BatchAdapters.of([residents[i % len(residents)] for i in range(rows)]))
        several = drafts and rows in (1, 2, max_batch)
        for tokens in range(1, MAX_TOKENS + 1 if several else 2):
            for columns in COLUMNS:
                for batch in batches:
                    step = partial(_step, model, rows, tokens, columns, kv)
                    yield from compile_with(batch, step)
    mx.clear_cache()  # of the largest batch, whose memory nothing needs for now


def _prompt(model: Model, tokens: int, kv: str) -> None:
    """Begin a prompt in the first block that writes keys and values."""
    entry = model.make_cache(kv)[0]
    assert isinstance(entry, KVCache)
    positions = Positions(entry.offset, entry.make_mask(tokens), cached=True)
    h = model.model.embedding(mx.zeros((1, tokens), mx.int32))
    model.model.layers[0](h, positions, entry)


def _step(model: Model, rows: int, tokens: int, columns: int, kv: str) -> None:
    """Begin a step over a cache of some columns, in a block of each kind and the head."""
    entry = model.make_cache(kv)[0]
    assert isinstance(entry, KVCache)
    shape = (1, 2 * model.kv_heads, columns, model.args.head_dim)
    entry.begin_with(
        mx.zeros(shape, mx.int8 if entry.int8 else model.model.output_norm.weight.dtype)
    )
    entry = KVCache.merge([entry] * rows)
    lengths = entry.decode_lengths(tokens)
    assert lengths is not None
    positions = Positions(lengths - 1, None, lengths)
    h = model.model.embedding(mx.zeros((rows, tokens), mx.int32))
    h, keys_and_values = model.model.layers[0](h, positions, entry)
    for block in model.model.kv_reuse_layers[:1]:
        h = block(h, positions, keys_and_values)
    model.greedy_head(h)
    model.head(h)


def _residents(model: Model) -> list[ResidentAdapter]:
    """Return an adapter of zeros for each of `RANKS`, on all layers."""
    targets = target_modules(model)
    numbers = max(
        max(RANKS) * sum(inputs + outputs + 16 for inputs, outputs in target.shapes.values())
        for target in targets
    )
    zeros = mx.zeros((numbers,), mx.float16)
    return [
        ResidentAdapter(zeros, {t.path: Part(0, 0, rank) for t in targets}, 1.0, "", rank)
        for rank in RANKS
    ]
