"""The engine: requests in, responses out, one decode loop for all of them.

Rows join and leave a batch while it runs. A step computes a chunk of a prompt, and feeds every row of the batch
its last token, so that the device never waits for Python.

    submit -> waiting -> prefill (a chunk per step) -> batch (a token per step) -> finished

`Scheduler` (`scheduler.py`) decides who waits and prefills; `DecodeBatch` (`decoding.py`) takes the decode
steps. A prompt is prefilled except for its last token, by the writing blocks alone; that token is the row's
first step. So the reuse blocks and the head run for one token per row and step.

An engine that is made in the main thread belongs to it, because MLX's streams do. Made in any other thread, it
runs in the thread of `afm_mlx.threads`, and every thread may use it.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.engine.batch import RowCaches, vision_config_of, vocab_size_of
from afm_mlx.engine.decoding import DecodeBatch
from afm_mlx.engine.image_features import ImageFeatures
from afm_mlx.engine.lockstep import Lead, check_in_step, request_of
from afm_mlx.engine.prefix_cache import PrefixCache
from afm_mlx.engine.request import Request, TokenResponse
from afm_mlx.engine.row import AnswerText, Row, RowAdapters
from afm_mlx.engine.row_prefixes import RowPrefixes
from afm_mlx.engine.scheduler import EngineGroup, KVMemory, Scheduler
from afm_mlx.engine.speculation.drafting import Drafting, Speculation
from afm_mlx.errors import ContextLengthError, RequestError, shown
from afm_mlx.kernels import dispatch
from afm_mlx.kernels.cpu.memory import release_freed_memory
from afm_mlx.kernels.replay import keep_compiler_out
from afm_mlx.model.kv_cache import Cache
from afm_mlx.model.pooling import hidden_dim_of
from afm_mlx.ranks import ranks_of
from afm_mlx.threads import Home
from afm_mlx.tokenizer.detokenizer import NEWLINE, SPACE, PieceKind
from afm_mlx.tokenizer.protocol import Tokenizer
from afm_mlx.tokenizer.tokenizer import AFMTokenizer

if TYPE_CHECKING:
    from afm_mlx.guidance.matcher import Matcher

STEP = 2048  # prompt tokens of a step, unless the caller says
# On a CPU, MLX takes memory for some ten operations ahead: 219 MB for 512 tokens of the 3B. From 32 tokens on,
# a token of a prompt costs the same in steps of any size; so steps are small while rows that decode wait.
CPU_STEP, CPU_STEP_WHILE_DECODING = 128, 32
# Seconds that a step waits for an adapter when there is nothing else to do; then new requests have their turn.
LOADING_STEP = 0.01


@dataclass(frozen=True)
class Prepared:
    """A request that was checked, see `Engine.prepare`."""

    request: Request  # without the token of its prompt that will be generated again
    matcher: Matcher | None  # the answer's state under its constraint
    hidden: int  # characters at the answer's beginning that repeat the prompt's end


class Engine:
    """The decode loop: it continues prompts, many at a time.

    Args:
        model: an AFM `Model`, or one of mlx-lm's.
        tokenizer: has `eos_token_ids` and `detokenizer`, as ours and mlx-lm's do.
        max_batch: rows that decode together; more wait.
        prefill_step_size: maximum number of prompt tokens per step, of all rows; bounds memory, and how long
            others wait. A CPU takes no more than 128, because more would not be faster there. Pass None for
            2048; on a CPU 128, and 32 while other rows decode.
        max_kv_size: tokens that a row may hold; pass None for its prompt cache's bound, or else the model's
            context length.
        sliding_window: past `max_kv_size`, forget the oldest tokens instead of ending the row with an error.
        kv: "int8" or "float" storage of keys and values (`Model.make_cache`).
        adapters: pool of the adapters that requests may name; pass None for no adapter except the attached one.
        speculation: how tokens are drafted, several of which the model verifies in one step; pass None for
            plain steps.
        prefix_cache: has the keys and values of earlier prompts' beginnings, and gets those that rows compute;
            pass None to compute every prompt from its beginning.
        kv_memory: budget in bytes for the keys and values of all rows together, including draft models' caches
            and temporary copies, excluding the prefix cache; pass None for no budget. A row waits until the
            most that it can need is free (`KVMemory`).
        group: engines of the same thread that share `max_batch` and `kv_memory`; pass None for none.
        image_features: has the features of earlier prompts' images, and gets those that rows compute; pass None
            for an own one with the default budget.

    Raises:
        RequestError: for options that can't be honoured; and from any method when an engine of the main
            thread is used in another.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Tokenizer,
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
        group: EngineGroup | None = None,
        image_features: ImageFeatures | None = None,
    ):
        for name, value in (
            ("max_batch", max_batch),
            ("prefill_step_size", 1 if prefill_step_size is None else prefill_step_size),
            ("max_kv_size", 1 if max_kv_size is None else max_kv_size),
        ):
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
                raise RequestError(f"{name} is {shown(value)}; an integer of 1 or more is needed.")
        for name, given, kind, needed in (
            ("model", model, nn.Module, "a model, such as load returns,"),
            ("prefix_cache", prefix_cache, PrefixCache | None, "a PrefixCache or None"),
            ("speculation", speculation, Speculation | None, "a Speculation or None"),
            ("image_features", image_features, ImageFeatures | None, "ImageFeatures or None"),
        ):
            if not isinstance(given, kind):
                raise RequestError(f"{name} is {shown(given)}; {needed} is needed.")
        if kv not in ("int8", "float"):
            raise RequestError(f"kv is {shown(kv)}; allowed are int8 and float.")
        end_tokens = getattr(tokenizer, "eos_token_ids", None)
        if not hasattr(tokenizer, "detokenizer") or not isinstance(end_tokens, Collection):
            raise RequestError(
                f"tokenizer is {shown(tokenizer)}; one with eos_token_ids and a detokenizer is needed, such as "
                "load returns."
            )
        self.model, self.tokenizer = model, tokenizer
        self.adapters, self.prefix_cache = adapters, prefix_cache
        self.max_batch = max_batch
        self.image_features = ImageFeatures() if image_features is None else image_features
        self._vision_config = vision = vision_config_of(model)
        self._image_token_id = None if vision is None else vision.image_token_id
        keep_compiler_out()
        chunk = chunk_while_decoding = STEP if prefill_step_size is None else prefill_step_size
        if dispatch.device() == "cpu":
            release_freed_memory()
            chunk = chunk_while_decoding = min(chunk, CPU_STEP)
            if prefill_step_size is None:
                chunk_while_decoding = CPU_STEP_WHILE_DECODING
        self.prefill_step_size = chunk
        self._home = Home()
        call = self._home.call
        self._lead: Lead | None = None  # of a split model's rank 0
        ranks = ranks_of(model)
        if ranks is not None and ranks.is_first:
            options = {
                "max_batch": max_batch,
                "prefill_step_size": prefill_step_size,
                "max_kv_size": max_kv_size,
                "sliding_window": sliding_window,
                "kv": kv,
                "adapters": adapters,
                "speculation": speculation,
                "prefix_cache": prefix_cache,
                "kv_memory": kv_memory,
            }
            self._lead = call(Lead, self, ranks, options)
        call(self._home.take_in, model.state, "The model")
        self._adapters = call(RowAdapters, model, adapters)
        self._caches = RowCaches(
            model, kv, max_kv_size, sliding_window, kv_memory is not None, speculation is not None
        )
        call(self._caches.check_kind)
        by_block = self._caches.by_block
        self._drafting: Drafting | None = None
        drafts: tuple[int, list[RowCaches]] = (0, [])
        if speculation is not None:
            speculation.check(model, sliding_window)
            self._drafting = Drafting(speculation, model, end_tokens, chunk, by_block, ranks)
            drafts = self._drafting.surplus, self._drafting.draft_caches
        self._prefixes: RowPrefixes | None = None
        if prefix_cache is not None:
            self._prefixes = call(RowPrefixes, model, prefix_cache, self._adapters, by_block)
        self._memory = call(KVMemory, self._caches, kv_memory, chunk, *drafts)
        self._ids = itertools.count()
        parts = model, self._caches, self._adapters, self._prefixes
        images = self.image_features
        sizes = max_batch, chunk, chunk_while_decoding
        engine = weakref.ref(self)

        def decoding() -> list[Row]:
            known = engine()
            return [] if known is None else known._decode.batch.rows

        self._scheduler = Scheduler(*parts, images, self._memory, *sizes, decoding, group)
        self._decode = DecodeBatch(*parts, self._scheduler, self._drafting)

    # -- requests

    @functools.cached_property
    def embedding_dim(self) -> int:
        """Number of dimensions of the model's embeddings; `RequestError` if it can't have any."""
        return self._home.call(hidden_dim_of, self.model)

    def make_cache(self) -> Cache:
        """Make an empty cache for one row, one entry per block."""
        return self._caches.make()

    def submit(self, request: Request) -> int:
        """Queue a request; return the id that its responses carry.

        The request's adapter begins to load. If that fails, the row's only response has the error. If a cache
        was filled under another adapter, that is an error here if the adapter is in memory, else the row's
        response.

        Raises:
            RequestError, ConstraintError: for what can't be honoured.
            ContextLengthError: when the prompt alone does not fit.
        """
        # In the caller's thread: it may take a while, and the rows go on.
        return self.submit_prepared(self.prepare(request))

    def prepare(self, request: Request) -> Prepared:
        """Check a request and compile its constraint: the slow part of `submit`, which any thread can do.

        Raises:
            RequestError, ConstraintError: as `submit` does.
        """
        if not isinstance(request, Request):
            raise RequestError(
                f"The request is {shown(request)}; a Request is needed, such as Request(token_ids)."
            )
        request = request.checked(vocab_size_of(self.model), self._vision_config)
        if self._lead is not None:
            self._lead.check(request)
        if request.embedding is not None and (asked := request.embedding.dimensions or 0) > (
            most := self.embedding_dim
        ):
            raise RequestError(
                f"The embedding's dimensions are {asked}; this model's vectors have {most}. Ask for 1 to "
                f"{most}, or None for all."
            )
        request, repeated = heal_prompt(request, self.tokenizer, self._image_token_id)
        if request.constraint is None:
            return Prepared(request, None, len(repeated))
        from afm_mlx.guidance.matcher import Matcher

        return Prepared(request, Matcher(request.constraint, self.tokenizer), len(repeated))

    def submit_prepared(self, prepared: Prepared) -> int:
        """Queue a request that `prepare` has checked; see `submit`."""
        return self._home.call(self._submit, prepared)

    def _submit(self, prepared: Prepared) -> int:
        request = prepared.request
        seed = request.seed or 0
        if request.seed is None and request.sampler is not None:
            seed = int(mx.random.randint(0, 2**31 - 1).item())
        row = self._queue(prepared, seed)
        if self._lead is not None:
            self._lead.submit(row, request, prepared.hidden, seed)
        return row

    def follow_submit(self, row: int, values: dict[str, Any], hidden: int, seed: int) -> None:
        """Queue a request of rank 0's engine (`request_values`), whose row has the id `row` there."""
        request, matcher = request_of(values), None
        if request.constraint is not None:
            from afm_mlx.guidance.matcher import Matcher

            matcher = Matcher(request.constraint, self.tokenizer)
        self._ids = itertools.count(row)
        self._home.call(self._queue, Prepared(request, matcher, hidden), seed)

    def _queue(self, prepared: Prepared, seed: int) -> int:
        request, matcher = prepared.request, prepared.matcher
        given = request.cache
        cache = self._caches.make() if given is None else self._caches.checked(given)
        self._home.take_in([entry.state for entry in given or ()], "The prompt cache")
        position, bound = self._caches.position(cache), self._caches.bound(cache)
        needed = position + len(request.prompt)
        if bound is not None and needed > bound:
            raise ContextLengthError(
                f"The prompt needs {needed} tokens and the context holds {bound}. Shorten it, "
                "raise max_kv_size, or ask for a sliding window."
            )
        columns = self._memory.columns(request, position, bound)
        lease = self._adapters.lease(request.adapter)
        detokenizer = self.tokenizer.detokenizer
        if matcher is not None and isinstance(self.tokenizer, AFMTokenizer):
            # A constraint's text may begin with a space.
            detokenizer = self.tokenizer.inner_detokenizer
        text = AnswerText(detokenizer, request.stop, prepared.hidden)
        fixed = self.tokenizer.eos_token_ids, vocab_size_of(self.model)
        row = Row(
            next(self._ids),
            request,
            text,
            cache,
            *fixed,
            position,
            bound,
            seed,
            matcher,
            lease,
            columns,
            self._image_token_id,
        )
        # If the adapter fails to load, that is the row's response, however early it fails.
        is_loaded = lease is None or lease.ready
        if is_loaded and (error := self._adapters.refusal(row)) is not None:
            row.release()
            raise error
        early = [] if row.closing is not None else row.take_forced()
        if row.error is not None and not early:
            row.release()
            raise row.error
        if early and early[-1].finish_reason is not None and request.prompt_logprobs is not None:
            # The whole answer is forced, and the prompt has to be computed all the same.
            row.closing = early.pop()
        self._scheduler.early += [(row, response) for response in early]
        if early and early[-1].finish_reason is not None:
            row.release()
        else:
            self._scheduler.add(row)
        return row.id

    def cancel(self, row_id: int) -> None:
        """Drop a row; unknown ids are ignored.

        The request's cache then holds the tokens computed so far: of a row that waits, none of its prompt.
        """
        self._home.call(self._cancel, row_id)

    def _cancel(self, row_id: int) -> None:
        if self._lead is not None:
            self._lead.say("cancel", row=row_id)
        self._scheduler.cancel(row_id)
        if any(row.id == row_id for row in self._decode.batch.rows):
            self._decode.leave({row_id})
        elif self._drafting is not None:
            self._drafting.forget([row_id])
        if self._prefixes is not None:
            self._prefixes.forget(row_id)
            if not self.busy:  # there may be no step for a while
                self._prefixes.advance(until_all_is_computed=True)

    def drop_started(self) -> list[int]:
        """Drop the rows that have begun or have responses, after a step that raised; return the other ids.

        Callers' caches are not filled, because the step may have left the rows' in any state.
        """
        return self._home.call(self._drop_started)

    def _drop_started(self) -> list[int]:
        if self._lead is not None:
            self._lead.say("drop_started")
        started = self._decode.drop_all() + self._scheduler.drop_started()
        if self._drafting is not None:
            self._drafting.forget([row.id for row in started])
        if self._prefixes is not None:
            self._prefixes.drop_newest()
        return [row.id for row in self._scheduler.waiting]

    def abandon(self) -> None:
        """Give the rows' places and memory back to the engine's group; the engine takes no more steps."""
        self._scheduler.leave_group()

    @property
    def busy(self) -> bool:
        """True if any row waits or runs."""
        scheduler, decode = self._scheduler, self._decode
        begun = decode.batch.rows or decode.submitted or scheduler.prefills
        return bool(begun or scheduler.waiting or scheduler.early)

    # The following may be read in any thread, while rows run.

    @property
    def rows_waiting(self) -> int:
        """Number of rows that have not begun."""
        return len(self._scheduler.waiting)

    @property
    def rows_running(self) -> int:
        """Number of rows that prefill or decode."""
        return len(self._scheduler.running)

    @property
    def kv_tokens(self) -> int:
        """Number of tokens in the KV caches of all rows; a prompt's tokens count from its beginning on."""
        return sum(row.position for row in self._scheduler.running)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of all rows, including draft models, excluding the prefix cache."""
        caches = [self._decode.batch.cache, *(p.batch.cache for p in self._scheduler.prefills)]
        caches += [] if self._drafting is None else self._drafting.caches
        return sum(getattr(entry, "nbytes", 0) for cache in caches for entry in list(cache))

    @property
    def kv_memory(self) -> int | None:
        """The budget that `kv_bytes` stays within; None if there is none."""
        return self._memory.budget

    # -- the loop

    def run(self) -> Iterator[TokenResponse]:
        """Step until every row has finished."""
        while self.busy:
            yield from self.step()

    def step(self) -> list[TokenResponse]:
        """Prefill one chunk of prompts, take one decode step of all rows; return the responses read back."""
        return self._home.call(self._step)

    def _step(self) -> list[TokenResponse]:
        if self._lead is None:
            return self._advance()
        with self._lead.step(self._scheduler.waiting, self._scheduler.running):
            return self._advance()

    def follow_step(self, rows: int) -> None:
        """Take a step of rank 0's engine; raise `OutOfStepError` unless `rows` is this engine's `checksum`."""
        check_in_step(rows, self._scheduler.waiting, self._scheduler.running)
        self._home.call(self._advance)

    def _advance(self) -> list[TokenResponse]:
        scheduler, decode, prefixes = self._scheduler, self._decode, self._prefixes
        # 1) Prompts: waiting rows are admitted, a chunk goes into the cache, and whole ones join the batch.
        if scheduler.waiting or scheduler.prefills:
            scheduler.advance(decode.batch)
        responses = scheduler.take_early() if scheduler.early else []
        # 2) Rows: each is fed its last token, and the tokens of the step before are read back.
        responses += decode.step()
        # 3) With nothing to compute, rows may still wait for their adapters and stored pages.
        if not (responses or scheduler.prefills or decode.batch.rows):
            self._adapters.wait(scheduler.waiting, LOADING_STEP)
            if prefixes is not None:
                prefixes.wait(LOADING_STEP)
        if prefixes is not None:
            prefixes.advance(until_all_is_computed=not self.busy)
        logprobs = [r.logprobs for r in responses if r.logprobs is not None]
        if logprobs:
            self._home.hand_out(logprobs)
        return responses


def heal_prompt(
    request: Request, tokenizer: Tokenizer, image_token_id: int | None = None
) -> tuple[Request, str]:
    """Remove the last token of a prompt that may end within a word; the answer must begin with its text.

    A text's tokens depend on what follows them. If a prompt of plain text ends in the middle of what would be
    one token, the model has never seen its last token there, and goes on badly. So that token is generated
    again, with what follows, and its text is not shown. Control tokens, newlines and bytes are never joined to
    what follows. The first token behind an image (`image_token_id`) stays, too.

    Returns:
        The request; and the text that its answer repeats, empty if no token was removed.
    """
    if not request.heal or len(request.prompt) < 2 or request.prompt[-2] == image_token_id:
        return request, ""
    token = request.prompt[-1]
    if type(tokenizer) is AFMTokenizer:
        piece = tokenizer.piece(token)
        is_text = piece.kind is PieceKind.TEXT and token not in tokenizer.control_ids
        text = piece.text.replace(SPACE, " ") if is_text and piece.text != NEWLINE else ""
    else:  # of mlx-lm
        text = "" if token in tokenizer.all_special_ids else tokenizer.decode([token])
    if not text:
        return request, ""
    from afm_mlx.guidance.constraint import Constraint

    constraint = (request.constraint or Constraint.text()).behind(text)
    return replace(request, prompt=request.prompt[:-1], constraint=constraint), text
