"""The one decode loop.

Rows join and leave a batch while it runs. A step computes a chunk of a prompt, and feeds every row of the batch
its last token (`Decoding`), so that the device is never waiting for Python.

    submit -> waiting -> prefill (a chunk per step) -> batch (a token per step) -> finished

A prompt is prefilled but for its last token, by the writing blocks alone; that token is the row's first
step. So the reuse blocks and the head run for one token per row and step, whatever the path.

A row under a constraint needs its token before the next one can be drawn: it is read back, and what is allowed
next is found, while the device computes the logits. Tokens that the constraint forces are not drawn; when they
are many, they go into the cache like a prompt.

With `Speculation`, rows are fed guesses behind their last tokens, and keep those that the model would have
drawn (`SpeculativeDecoding`).

A row may run with an adapter of a pool (`AdapterPool`); it waits until that is loaded, and others don't. Rows
of one batch may have different ones, `MAX_ADAPTERS` at most.

An engine that is made in the main thread belongs to it, because MLX's streams do. Made in any other thread, it
runs in the thread of `afm_mlx.threads`, and every thread may use it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from functools import partial
from numbers import Integral
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.engine.batch import Prefill
from afm_mlx.engine.decoding import Decoding
from afm_mlx.engine.healing import healed
from afm_mlx.engine.kv_memory import KVMemory, bytes_in
from afm_mlx.engine.prefills import Prefills
from afm_mlx.engine.prefix_cache import PrefixCache
from afm_mlx.engine.request import Request, Response
from afm_mlx.engine.row import Prepared, Row
from afm_mlx.engine.row_adapters import RowAdapters
from afm_mlx.engine.row_caches import RowCaches, make_ready
from afm_mlx.engine.row_prefixes import RowPrefixes
from afm_mlx.engine.row_responses import RowResponses
from afm_mlx.engine.speculation.drafting import Drafting, Speculation
from afm_mlx.engine.speculation.speculative_decoding import SpeculativeDecoding
from afm_mlx.engine.waiting_rows import WaitingRows
from afm_mlx.errors import ContextLengthError, RequestError, shown
from afm_mlx.guidance.matcher import Matcher
from afm_mlx.kernels import dispatch
from afm_mlx.kernels.cpu.memory import hold_heaps_down
from afm_mlx.kernels.replay import keep_compiler_out
from afm_mlx.model.model import is_afm
from afm_mlx.threads import Home
from afm_mlx.tokenizer.tokenizer import AFMTokenizer

# Prompt tokens of a step, unless the caller says.
STEP = 2048
# On a CPU, MLX takes memory for some ten operations ahead: 219 MB for 512 tokens of the 3B. Fewer are as fast a
# token, from 32 on; so few go into a step for which rows that decode wait.
CPU_STEP, CPU_STEP_BESIDE = 128, 32
# What options of these names are.
NEEDED = {
    "model": "a model, such as load returns,",
    "prefix_cache": "a PrefixCache or None",
    "speculation": "a Speculation or None",
}
# Seconds that a step waits for an adapter when there is nothing else to do; then new requests have their turn.
LOADING_STEP = 0.01


class Engine:
    """The decode loop: it continues prompts, many at a time.

    Args:
        model: an AFM `Model`, or one of mlx-lm's zoo.
        tokenizer: has `eos_token_ids` and `detokenizer`, as ours and mlx-lm's do.
        max_batch: rows that decode together; more wait.
        prefill_step_size: prompt tokens per step at most, of all rows together; bounds memory, and how long
            others wait. A CPU takes no more than 128, because more would not be faster there. None takes 2048;
            on a CPU 128, and 32 while other rows decode.
        max_kv_size: tokens that a row may hold; None takes its prompt cache's bound, or else the model's
            context length.
        sliding_window: past `max_kv_size`, forget the oldest tokens instead of ending the row with an error.
        kv: "int8" or "float" storage of keys and values (`Model.make_cache`).
        adapters: pool of the adapters that requests may name; None for no adapter but the attached one.
        speculation: how tokens are guessed, for the model to check several in one step; None for one at a time.
        prefix_cache: where the beginning of a prompt is looked up, and what rows compute is kept; or None.
        kv_memory: budget in bytes for the keys and values of all rows together, including draft models' caches
            and temporary copies, excluding the prefix cache; None for no budget. A row waits until the most
            that it may need is free (`KVMemory`).

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
        prefill_step_size: int | None = None,
        max_kv_size: int | None = None,
        sliding_window: bool = False,
        kv: str = "int8",
        adapters: AdapterPool | None = None,
        speculation: Speculation | None = None,
        prefix_cache: PrefixCache | None = None,
        kv_memory: int | None = None,
    ):
        for name, value in (
            ("max_batch", max_batch),
            ("prefill_step_size", 1 if prefill_step_size is None else prefill_step_size),
            ("max_kv_size", 1 if max_kv_size is None else max_kv_size),
        ):
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
                raise RequestError(f"{name} is {shown(value)}; an integer of 1 or more is needed.")
        for name, given, kind in (
            ("model", model, nn.Module),
            ("prefix_cache", prefix_cache, PrefixCache | None),
            ("speculation", speculation, Speculation | None),
        ):
            if not isinstance(given, kind):
                raise RequestError(f"{name} is {shown(given)}; {NEEDED[name]} is needed.")
        if kv not in ("int8", "float"):
            raise RequestError(f"kv is {shown(kv)}; allowed are int8 and float.")
        ends = getattr(tokenizer, "eos_token_ids", None)
        if not hasattr(tokenizer, "detokenizer") or not isinstance(ends, Collection):
            raise RequestError(
                f"tokenizer is {shown(tokenizer)}; one with eos_token_ids and a detokenizer is needed, such as "
                "load returns."
            )
        self.model = model
        self.tokenizer = tokenizer
        self.adapters = adapters
        self._home = Home()
        self._home.call(self._home.take_in, model.state, "The model")
        self._adapters = self._home.call(RowAdapters, model, adapters)
        self.max_batch = max_batch
        keep_compiler_out()
        on_cpu = dispatch.device() == "cpu"
        if on_cpu:
            hold_heaps_down()
        asked = STEP if prefill_step_size is None else prefill_step_size
        self.prefill_step_size = min(asked, CPU_STEP) if on_cpu else asked
        self._is_afm = is_afm(model)
        self._caches = RowCaches(model, kv, max_kv_size, sliding_window, kv_memory is not None)
        self._drafting: Drafting | None = None
        if speculation is not None:
            speculation.check(model, sliding_window)
            ends = tokenizer.eos_token_ids
            self._drafting = Drafting(
                speculation, model, ends, self.prefill_step_size, self._caches.by_block
            )
        self.prefix_cache = prefix_cache
        self._prefixes = self._home.call(
            RowPrefixes, model, prefix_cache, self._adapters, self._caches.by_block
        )
        guesses = 0 if self._drafting is None else self._drafting.surplus
        drafts = [] if self._drafting is None else self._drafting.draft_caches
        self._memory = self._home.call(
            KVMemory, self._caches, kv_memory, self.prefill_step_size, guesses, drafts
        )
        self._responses = RowResponses(tokenizer, model, self._drafting)
        self._ids = itertools.count()
        self._waiting = WaitingRows(self._adapters)
        self._early: list[
            Response
        ] = []  # of rows that can't start, or that begin with forced tokens
        beside = CPU_STEP_BESIDE if on_cpu and prefill_step_size is None else self.prefill_step_size
        self._prefills = Prefills(self._caches, self._adapters, self.prefill_step_size, beside)
        drafting = self._drafting
        made: Callable[..., Decoding] = (
            Decoding if drafting is None else partial(SpeculativeDecoding, drafting)
        )
        self._decoding = made(
            model, self._caches, self._adapters, self._prefixes, self._responses, self._prefills
        )

    # -- requests

    def make_cache(self) -> list[Any]:
        """An empty cache for one row, one entry per block."""
        return self._caches.make()

    def submit(self, request: Request) -> int:
        """Queue a request; returns the id that its responses carry.

        An adapter begins to load now. When that fails, the row's only response has the error. A cache that was
        filled under another adapter is an error here if the adapter is in memory, and else the row's response.

        Raises:
            RequestError: for what can't be honoured.
            ConstraintError: for a constraint that can't.
            ContextLengthError: when the prompt alone does not fit.
        """
        # In the caller's thread: it may take a while, and the rows go on.
        return self.submit_prepared(self.prepare(request))

    def prepare(self, request: Request) -> Prepared:
        """Check a request and compile its constraint: what of `submit` takes a while, and any thread can do.

        Raises:
            RequestError, ConstraintError: as `submit` does.
        """
        if not isinstance(request, Request):
            raise RequestError(
                f"The request is {shown(request)}; a Request is needed, such as Request(token_ids)."
            )
        request = request.checked(getattr(self.model.args, "vocab_size", None))
        request, repeated = healed(request, self.tokenizer)
        constraint = request.constraint
        matcher = None if constraint is None else Matcher(constraint, self.tokenizer)
        return Prepared(request, matcher, len(repeated))

    def submit_prepared(self, prepared: Prepared) -> int:
        """Queue a request that `prepare` has checked; see `submit`."""
        return self._home.call(self._submit, prepared.request, prepared.matcher, prepared.hidden)

    def _submit(self, request: Request, matcher: Matcher | None, hidden: int) -> int:
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
        columns = self._memory.columns(request, cache)
        detokenizer = self._detokenizer(matcher)
        lease = self._adapters.lease(request.adapter)
        row = Row(
            next(self._ids),
            request,
            detokenizer,
            position,
            _seed_of(request),
            matcher,
            lease=lease,
            bound=bound,
            hidden=hidden,
            columns=columns,
        )
        # A load's error is the row's response, however early it comes.
        known = lease is None or lease.ready
        if known and (error := self._adapters.refusal(row, cache)) is not None:
            row.release()
            raise error
        early = self._responses.to_forced_tokens(row)
        if row.error is not None and not early:
            row.release()
            raise row.error
        self._early += early
        if early and early[-1].finish_reason is not None:
            row.release()
        else:
            self._waiting.append(row, cache)
        return row.id

    def _detokenizer(self, matcher: Matcher | None) -> Any:
        if matcher is not None and isinstance(self.tokenizer, AFMTokenizer):
            return self.tokenizer.inner_detokenizer  # a constraint's text may begin with a space
        return self.tokenizer.detokenizer

    def cancel(self, row_id: int) -> None:
        """Drop a row, wherever it is; unknown and finished ids are ignored.

        The request's cache then holds prompt and answer as far as they came.
        """
        self._home.call(self._cancel, row_id)

    def _cancel(self, row_id: int) -> None:
        self._waiting.drop({row_id})
        self._early = [response for response in self._early if response.row != row_id]
        self._prefills.cancel(row_id)
        if any(row.id == row_id for row in self._decoding.batch.rows):
            self._decoding.leave({row_id})
        if self._drafting is not None:
            self._drafting.forget([row_id])
        self._prefixes.forget(row_id)
        if not self.busy:  # there may be no step for a while
            self._prefixes.advance(until_all_is_computed=True)

    def drop_started(self) -> list[int]:
        """Drop every row of which anything was computed or told, after a step that raised.

        Nothing is handed back to their caches, whatever state the step has left them in.

        Returns:
            The ids of the rows that still wait.
        """
        return self._home.call(self._drop_started)

    def _drop_started(self) -> list[int]:
        self._waiting.drop(
            {row.id for row in self._waiting if row.sampled or row.error is not None}
        )
        started = self._decoding.drop_all() + self._prefills.drop_all()
        if self._drafting is not None:
            self._drafting.forget([row.id for row in started])
        self._early = []
        self._prefixes.drop_newest()
        return [row.id for row in self._waiting]

    @property
    def busy(self) -> bool:
        """True if any row is under way."""
        return bool(self._early or self._waiting or self._prefills or self._decoding)

    # What follows may be read in any thread, while rows run.

    @property
    def rows_waiting(self) -> int:
        """Rows that have not begun."""
        return len(self._waiting)

    @property
    def rows_running(self) -> int:
        """Rows of which something is in the cache, or about to be."""
        return len(self._decoding.batch.rows) + len(self._prefills.rows)

    @property
    def kv_tokens(self) -> int:
        """Tokens in the cache, of all rows; those of prompts count from their beginning."""
        return sum(row.position for row in self._decoding.batch.rows + self._prefills.rows)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of all rows, including draft models, excluding the prefix cache."""
        drafts = [] if self._drafting is None else self._drafting.caches
        return bytes_in([self._decoding.batch.cache, *self._prefills.caches, *drafts])

    @property
    def kv_memory(self) -> int | None:
        """The budget of `kv_bytes`."""
        return self._memory.budget

    def run(self) -> Iterator[Response]:
        """Step until every row has finished."""
        while self.busy:
            yield from self.step()

    # -- the loop

    def step(self) -> list[Response]:
        """Advance prompts by a chunk and every row by a token; returns what was read back."""
        return self._home.call(self._step)

    def _step(self) -> list[Response]:
        # 1) Prompts: waiting rows are admitted, a chunk goes into the cache, and whole ones join the batch.
        self._advance_prefill()
        responses, self._early = self._early, []
        # 2) Rows: each is fed its last token, and those of the step before are read back.
        responses += self._decoding.step()
        # 3) With nothing to compute, rows may still wait for their adapters.
        if not (responses or self._prefills or self._decoding.batch.rows):
            self._adapters.wait(self._waiting, LOADING_STEP)
            self._prefixes.wait(LOADING_STEP)
        self._prefixes.tell(responses)
        self._prefixes.advance(until_all_is_computed=not self.busy)
        self._home.hand_out([r.logprobs for r in responses if r.logprobs is not None])
        return responses

    # -- prompts

    def _advance_prefill(self) -> None:
        for prefill in self._prefills.begin(self._next_rows()):
            if not prefill.left:  # prompts of one token
                prefill.report()
                self._end_failed(prefill)
        if (turn := self._prefills.next(bool(self._decoding.batch.rows))) is not None:
            self._prefill_chunk(*turn)
        for prefill in self._prefills.take_whole():
            for layer in prefill.batch.cache:
                layer.finalize()
            for i, row in enumerate(prefill.batch.rows):
                if not row.is_prompt_fed:
                    self._prefixes.keep(row, prefill.batch.cache, i)
                row.is_prompt_fed = True
            prefill.batch.drop(prefill.cancelled)
            self._decoding.batch.join(prefill.batch)

    def _prefill_chunk(self, prefill: Prefill, columns: int) -> None:
        """Compute the keys and values of a prefill's next columns."""
        chunk = prefill.tokens[:, prefill.done : prefill.done + columns]
        if self._caches.by_block:
            make_ready(prefill.batch.cache, None, chunk.shape[1])
        # A zoo model's logits are never evaluated, and MLX computes only what is.
        prefill_step = self.model.prefill if self._is_afm else self.model
        with self._adapters.using(prefill.batch.adapters):
            prefill_step(chunk, cache=prefill.batch.cache)
        prefill.done += chunk.shape[1]
        if len(prefill.batch.rows) == 1:  # prompts that share a chunk are whole after it
            (row,) = prefill.batch.rows
            self._prefixes.keep(row, prefill.batch.cache, 0, row.position - prefill.left)
        mx.eval([layer.state for layer in prefill.batch.cache])
        mx.clear_cache()
        prefill.report()
        self._end_failed(prefill)

    def _end_failed(self, prefill: Prefill) -> None:
        """End the rows of a prefill whose callbacks have raised."""
        for row in list(prefill.batch.rows):
            if row.error is not None and row.id not in prefill.cancelled:
                self._early.append(Response(row.id, -1, row.rest(), None, "error", row.error))
                self._prefills.cancel(row.id)

    def _next_rows(self) -> list[tuple[Row, list[Any]]]:
        """Take the first waiting rows that can start: the batch has room, and their adapters are loaded."""
        running = self._decoding.batch.rows + self._prefills.rows
        taken, refused = self._waiting.take(
            self.max_batch - len(running), running, self._memory, self._prefixes
        )
        self._early += [Response(row.id, -1, "", None, "error", error) for row, error in refused]
        for row, cache in taken:
            self._prefixes.begin(row, cache)
        return taken


def _seed_of(request: Request) -> int:
    if request.seed is not None or request.sampler is None:
        return request.seed or 0
    return mx.random.randint(0, 2**31 - 1).item()
