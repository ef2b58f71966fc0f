"""The one decode loop.

Rows join and leave a batch while it runs. A step feeds every row its last token, submits the computation,
and only then reads back the tokens of the step before, so the device is never waiting for Python.

    submit -> waiting -> prefill (a chunk per step) -> batch (a token per step) -> finished

A prompt is prefilled but for its last token, by the writing blocks alone; that token is the row's first
step. So the reuse blocks and the head run for one token per row and step, whatever the path.

A row may run with an adapter of a pool (`AdapterPool`); it waits until that is loaded, and others don't. Rows
of one batch may have different ones, `MAX_ADAPTERS` at most.

An engine that is made in the main thread belongs to it, because MLX's streams do. Made in any other thread, it
runs in the thread of `afm_mlx.threads`, and every thread may use it.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.adapters.active import BatchAdapters
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.config import ModelConfig
from afm_mlx.errors import ContextLengthError, RequestError
from afm_mlx.kernels import dispatch
from afm_mlx.kernels.cpu.heap import hold_heaps_down
from afm_mlx.request import Request, Response, Row
from afm_mlx.row_adapters import RowAdapters, batch_adapters, can_start, must_not_overtake
from afm_mlx.row_caches import RowCaches, hand_back
from afm_mlx.sampling import no_token, sample
from afm_mlx.threads import Home

# On a CPU, MLX takes memory for some ten operations ahead: 219 MB for 512 tokens of the 3B.
CPU_STEP = 128
# Seconds that a step waits for an adapter when there is nothing else to do; then new requests have their turn.
LOADING_STEP = 0.01


@dataclass
class _Batch:
    """Rows that decode together."""

    rows: list[Row] = field(default_factory=list)
    cache: list[Any] = field(default_factory=list)
    inputs: mx.array = field(default_factory=lambda: mx.zeros((0,), mx.int32))  # (B,) to feed next
    adapters: BatchAdapters | None = None

    def join(self, other: _Batch) -> None:
        if not other.rows:
            return
        if not self.rows:
            self.rows, self.cache, self.inputs = other.rows, other.cache, other.inputs
            self.adapters = other.adapters
            return
        for mine, theirs in zip(self.cache, other.cache, strict=True):
            mine.extend(theirs)
        self.rows = self.rows + other.rows
        self.inputs = mx.concatenate([self.inputs, other.inputs])
        self.adapters = batch_adapters(self.rows)

    def drop(self, ids: set[int]) -> None:
        self.keep([i for i, row in enumerate(self.rows) if row.id not in ids])

    def keep(self, indices: list[int]) -> None:
        if len(indices) == len(self.rows):
            return
        for i in set(range(len(self.rows))) - set(indices):
            self.rows[i].release()
        self.rows = [self.rows[i] for i in indices]
        self.adapters = batch_adapters(self.rows)
        self.inputs = self.inputs[mx.array(indices, dtype=mx.int32)]
        if not self.rows:
            self.cache = []
        for layer in self.cache:
            layer.filter(indices)


@dataclass
class _Prefill:
    """Prompts on their way into the cache, padded on the right to the longest."""

    batch: _Batch
    tokens: mx.array  # (B, longest prompt - 1)
    done: int = 0
    cancelled: set[int] = field(default_factory=set)


@dataclass
class _Flight:
    """Tokens that were submitted and not yet read back."""

    rows: list[Row]
    tokens: mx.array  # (B,)
    peaks: mx.array  # (B,) largest logits
    logprobs: mx.array | None  # (B, vocab_size), None when no row asked for them

    def logprobs_of(self, index: int) -> mx.array | None:
        if self.logprobs is None or not self.rows[index].request.logprobs:
            return None
        return self.logprobs[index]

    def keep(self, indices: list[int]) -> _Flight:
        index = mx.array(indices, dtype=mx.int32)
        logprobs = None if self.logprobs is None else self.logprobs[index]
        rows, peaks = [self.rows[i] for i in indices], self.peaks[index]
        return _Flight(rows, self.tokens[index], peaks, logprobs)


class Engine:
    """Continues prompts, many at a time.

    Args:
        model: an AFM `Model`, or one of mlx-lm's zoo.
        tokenizer: with `eos_token_ids` and `detokenizer`, as ours and mlx-lm's are.
        max_batch: rows that decode together; more wait.
        prefill_step_size: prompt tokens per row and step at most; bounds memory, and how long others wait. A
            CPU takes no more than 128, because more would not be faster there.
        max_kv_size: tokens that a row may hold; None takes its prompt cache's bound, or else the model's
            context length.
        sliding_window: past that, forget the oldest tokens instead of ending the row with an error.
        kv: "int8" or "float" storage of keys and values (`Model.make_cache`).
        adapters: that requests may name; None for no adapter but the one that is attached to the model.

    Raises:
        RequestError: for options that can't be honoured; and from any method when an engine of the main
            thread is used in another.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        max_batch: int = 8,
        prefill_step_size: int = 2048,
        max_kv_size: int | None = None,
        sliding_window: bool = False,
        kv: str = "int8",
        adapters: AdapterPool | None = None,
    ):
        for name, value in (
            ("max_batch", max_batch),
            ("prefill_step_size", prefill_step_size),
            ("max_kv_size", 1 if max_kv_size is None else max_kv_size),
        ):
            if value < 1:
                raise RequestError(f"{name} is {value}; at least 1 is needed.")
        self.model = model
        self.tokenizer = tokenizer
        self.adapters = adapters
        self._home = Home()
        self._home.call(self._home.take_in, model.state, "The model")
        self._adapters = self._home.call(RowAdapters, model, adapters)
        self.max_batch = max_batch
        on_cpu = dispatch.device() == "cpu"
        if on_cpu:
            hold_heaps_down()
        self.prefill_step_size = min(prefill_step_size, CPU_STEP) if on_cpu else prefill_step_size
        self._is_afm = isinstance(getattr(model, "args", None), ModelConfig)
        self._caches = RowCaches(model, kv, max_kv_size, sliding_window)
        self._ids = itertools.count()
        self._waiting: deque[tuple[Row, list[Any]]] = deque()
        self._refused: list[Response] = []  # of rows that could not start
        self._prefill: _Prefill | None = None
        self._batch = _Batch()
        self._flight: _Flight | None = None

    # -- requests

    def make_cache(self) -> list[Any]:
        """An empty cache for one row, one entry per block."""
        return self._caches.make()

    def submit(self, request: Request) -> int:
        """Queue a request; returns the id that its responses carry.

        An adapter begins to load now. When that fails, the row's only response has the error. So it does for a
        cache that was filled under another adapter, unless that is known now.

        Raises:
            RequestError: for what can't be honoured.
            ContextLengthError: when the prompt alone does not fit.
        """
        return self._home.call(self._submit, request)

    def _submit(self, request: Request) -> int:
        request.validate(self.model.args.vocab_size if self._is_afm else None)
        given = request.cache
        cache = self._caches.make() if given is None else self._caches.checked(given)
        self._home.take_in([layer.state for layer in given or ()], "The prompt cache")
        position, bound = self._caches.position(cache), self._caches.bound(cache)
        needed = position + len(request.prompt)
        if bound is not None and needed > bound:
            raise ContextLengthError(
                f"The prompt needs {needed} tokens and the context holds {bound}. Shorten it, "
                "raise max_kv_size, or ask for a sliding window."
            )
        lease = self._adapters.lease(request.adapter)
        detokenizer, seed = self.tokenizer.detokenizer, _seed_of(request)
        row = Row(next(self._ids), request, detokenizer, position, seed, bound=bound, lease=lease)
        # A load's error is the row's response, however early it comes.
        known = lease is None or lease.ready
        if known and (error := self._adapters.refusal(row, cache)) is not None:
            row.release()
            raise error
        self._waiting.append((row, cache))
        return row.id

    def cancel(self, row_id: int) -> None:
        """Drop a row, wherever it is; unknown and finished ids are ignored."""
        self._home.call(self._cancel, row_id)

    def _cancel(self, row_id: int) -> None:
        for row, _ in self._waiting:
            if row.id == row_id:
                row.release()
        self._waiting = deque(pair for pair in self._waiting if pair[0].id != row_id)
        if self._prefill and any(row.id == row_id for row in self._prefill.batch.rows):
            # Padded rows are only taken apart once they are whole.
            self._prefill.cancelled.add(row_id)
        self._batch.drop({row_id})

    @property
    def busy(self) -> bool:
        """Whether any row is under way."""
        return bool(self._waiting or self._prefill or self._batch.rows or self._flight)

    def run(self) -> Iterator[Response]:
        """Step until every row has finished."""
        while self.busy:
            yield from self.step()

    # -- the loop

    def step(self) -> list[Response]:
        """Advance prompts by a chunk and every row by a token; returns what was read back."""
        return self._home.call(self._step)

    def _step(self) -> list[Response]:
        self._advance_prefill()
        responses, self._refused = self._refused, []
        previous, self._flight = self._flight, None
        if previous and any(self._is_last(row) for row in previous.rows):
            responses += self._read(previous)
            previous = None
        if self._batch.rows:
            self._flight = self._forward()
        if previous:
            responses += self._read(previous)
        if not (responses or self._prefill or self._batch.rows):
            self._adapters.wait((row for row, _ in self._waiting), LOADING_STEP)
        self._home.hand_out([r.logprobs for r in responses if r.logprobs is not None])
        return responses

    def _is_last(self, row: Row) -> bool:
        """Whether the row can't be fed the token that is in flight."""
        return row.out_of_tokens or row.error is not None or row.is_full

    def _forward(self) -> _Flight:
        batch = self._batch
        logprobs = None
        with self._adapters.using(batch.adapters):
            if self._is_afm and not any(row.needs_logits for row in batch.rows):
                tokens, peaks = self.model.greedy(batch.inputs[:, None], batch.cache)
                tokens = tokens.astype(mx.int32)
            else:
                logits = self.model(batch.inputs[:, None], cache=batch.cache)[:, -1]
                tokens, peaks, logprobs = sample(batch.rows, logits, batch.inputs)
        mx.async_eval(tokens, peaks)
        for row in batch.rows:
            row.position += 1
            row.sampled += 1
        batch.inputs = tokens
        return _Flight(list(batch.rows), tokens, peaks, logprobs)

    def _read(self, flight: _Flight) -> list[Response]:
        alive = {row.id for row in self._batch.rows}
        responses, finished = [], set()
        read_back = zip(flight.rows, flight.tokens.tolist(), flight.peaks.tolist(), strict=True)
        for i, (row, token, peak) in enumerate(read_back):
            if row.id not in alive:  # cancelled
                continue
            if not math.isfinite(peak) and row.error is None:
                cause = no_token(peak, row.request)
                responses.append(Response(row.id, -1, row.give_up(), None, "error", cause))
                finished.add(row.id)
                continue
            is_newest = row.sampled == len(row.tokens) + 1  # nothing was submitted after it
            full = row.is_full and is_newest
            text, reason = row.accept(token, self.tokenizer.eos_token_ids, full)
            error = row.error
            if reason == "error" and error is None:
                error = self._context_error(row)
            logprobs = flight.logprobs_of(i)
            responses.append(Response(row.id, token, text, logprobs, reason, error))
            if reason is not None:
                finished.add(row.id)
        if finished:
            self._leave(finished)
        return responses

    def _context_error(self, row: Row) -> ContextLengthError:
        return ContextLengthError(
            f"The context of {row.bound} tokens is full after {len(row.tokens)} new ones. Ask for "
            "fewer, raise max_kv_size, or ask for a sliding window."
        )

    def _leave(self, finished: set[int]) -> None:
        for i, row in enumerate(self._batch.rows):
            if row.id in finished and row.request.cache is not None:
                mine = [layer.extract(i) for layer in self._batch.cache]
                # Tokens that were fed before it was known that they are past the end.
                hand_back(mine, row.request.cache, surplus=row.sampled - len(row.tokens))
                mx.async_eval([layer.state for layer in row.request.cache])  # for any thread
                row.request.cache[0].adapter = self._adapters.fingerprint(row)
        keep = [i for i, row in enumerate(self._batch.rows) if row.id not in finished]
        if self._flight:
            self._flight = self._flight.keep(keep) if keep else None
        self._batch.keep(keep)

    # -- prompts

    def _advance_prefill(self) -> None:
        if self._prefill is None:
            self._prefill = self._admit()
        prefill = self._prefill
        if prefill is None:
            return
        total = prefill.tokens.shape[1]
        chunk = prefill.tokens[:, prefill.done : prefill.done + self.prefill_step_size]
        if chunk.shape[1]:
            # A zoo model's logits are never evaluated, and MLX computes only what is.
            with self._adapters.using(prefill.batch.adapters):
                getattr(self.model, "prefill", self.model)(chunk, cache=prefill.batch.cache)
            mx.eval([layer.state for layer in prefill.batch.cache])
            mx.clear_cache()
            prefill.done += chunk.shape[1]
        for row in prefill.batch.rows:
            if row.request.on_prefill:
                whole = len(row.request.prompt)
                row.request.on_prefill(min(prefill.done, whole), whole)
        if prefill.done >= total:
            for layer in prefill.batch.cache:
                layer.finalize()
            prefill.batch.drop(prefill.cancelled)
            self._batch.join(prefill.batch)
            self._prefill = None

    def _admit(self) -> _Prefill | None:
        admitted = self._next_rows()
        if not admitted:
            return None
        rows, caches = [row for row, _ in admitted], [cache for _, cache in admitted]
        if not all(hasattr(layer, "merge") for layer in caches[0]):
            raise RequestError(
                f"{type(caches[0][0]).__name__} caches can't be batched; this model does not run here."
            )
        cache = [layers[0].merge(list(layers)) for layers in zip(*caches, strict=True)]
        prompts = [list(row.request.prompt[:-1]) for row in rows]
        lengths = [len(prompt) for prompt in prompts]
        longest = max(lengths)
        padding = [longest - length for length in lengths]
        if any(padding):
            for layer in cache:
                layer.prepare(lengths=lengths, right_padding=padding)
        tokens = mx.array(
            [prompt + [0] * pad for prompt, pad in zip(prompts, padding, strict=True)],
            dtype=mx.int32,
        ).reshape(len(rows), longest)
        for row, length in zip(rows, lengths, strict=True):
            row.position += length
        last = mx.array([row.request.prompt[-1] for row in rows], dtype=mx.int32)
        return _Prefill(_Batch(rows, cache, last, batch_adapters(rows)), tokens)

    def _next_rows(self) -> list[tuple[Row, list[Any]]]:
        """Take the first waiting rows that can start: there is room, and their adapters are loaded."""
        room = self.max_batch - len(self._batch.rows)
        if self._caches.sliding:
            room = min(room, 1)  # a window takes no padding
        taken: list[tuple[Row, list[Any]]] = []
        left: deque[tuple[Row, list[Any]]] = deque()
        side_by_side = list(self._batch.rows)
        overtaken: list[Row] = []
        for row, cache in self._waiting:
            if len(taken) == room:
                left.append((row, cache))
            elif not can_start(row, side_by_side) or must_not_overtake(row, overtaken):
                left.append((row, cache))
                overtaken.append(row)
            elif (error := self._adapters.refusal(row, cache)) is not None:
                row.release()
                self._refused.append(Response(row.id, -1, "", None, "error", error))
            else:
                taken.append((row, cache))
                side_by_side.append(row)
                for other in overtaken:
                    other.overtaken += row.lease is not None
        self._waiting = left
        return taken


def _seed_of(request: Request) -> int:
    if request.seed is not None or request.sampler is None:
        return request.seed or 0
    return mx.random.randint(0, 2**31 - 1).item()
