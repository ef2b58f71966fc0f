"""Which rows wait, which ones prefill, and when they join the rows that decode.

    add -> waiting -> (admitted) -> prefill, a chunk per step -> the decode batch

A row is admitted when the batch has a place for it, its adapter is loaded, the memory budget allows it, its
stored pages are in memory, and it is its client's turn. A step computes one chunk of one prefill, so that rows
which decode never wait for more. Short prompts share a chunk; a long one takes many, and others have their
turns in between.

Rows that end with their prompts (scores and embeddings) are work in the background: they take no place in the
decode batch, and while other rows generate, no more than a share of the time (`BACKGROUND_SHARE`). So an index
of many texts delays nobody's first token for long.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.engine.batch import (
    ImageColumns,
    Prefill,
    RowBatch,
    RowCaches,
    prefill_tokens,
    reserve_columns,
    return_cache,
)
from afm_mlx.engine.image_features import Features, ImageFeatures
from afm_mlx.engine.prompt_scores import columns_at_once, score_chunk
from afm_mlx.engine.request import Request, TokenResponse
from afm_mlx.engine.row import Row, RowAdapters
from afm_mlx.engine.row_prefixes import RowPrefixes
from afm_mlx.errors import RequestError, shown
from afm_mlx.kernels import MAX_ADAPTERS, dispatch
from afm_mlx.model.kv_cache import STEP, TAIL
from afm_mlx.model.model import is_afm
from afm_mlx.ranks import Ranks, ranks_of

if TYPE_CHECKING:  # imports Pillow
    from afm_mlx.vision.prompt_image import PromptImage

BACKGROUND_SHARE = 0.125  # of the time, for rows that generate nothing, while others generate
# Patches that a step encodes on a CPU while rows decode, each in one block of the encoder: with our sizes, two
# blocks of a tile of 672 pixels are as many operations as 32 prompt tokens of the 3B (0.1 TFLOP).
CPU_PATCHES_WHILE_DECODING = 4096
PATIENCE = 64  # rows that may overtake a row which waits until one of a batch's adapters is free


class EngineGroup:
    """Engines of one thread that share a batch's places and a memory budget.

    The rows of all members that generate are at most `max_batch` together, and so are the others; their KV
    caches are within `kv_memory`. Both should be equal in all. Members take steps in turn, so each has its
    chance at a place that gets free. If a row of one waits for memory, no other begins a row that has waited
    for less time.
    """

    def __init__(self) -> None:
        self._members: WeakSet[Scheduler] = WeakSet()
        self.clock = itertools.count()

    def join(self, scheduler: Scheduler) -> None:
        """Add the scheduler of a new engine."""
        self._members.add(scheduler)

    def leave(self, scheduler: Scheduler) -> None:
        """Remove the scheduler of an engine that takes no more steps."""
        self._members.discard(scheduler)

    def others(self, scheduler: Scheduler) -> list[Scheduler]:
        """Return all other members."""
        return [each for each in self._members if each is not scheduler]


class Scheduler:
    """Admits an engine's rows and computes their prompts.

    Rows have their turns by client: first the client with the fewest rows before the row, counting those that
    run. A client's rows keep their order. Among clients with equally many, the one that has waited longest
    comes first: since its last row began, or else its first one came.

    Prefills have their turns, too: by turns, the oldest and the one with the fewest columns left. So a short
    prompt waits for one chunk of a longer one, and a long one has at least every other chunk once it is the
    oldest.
    """

    def __init__(
        self,
        model: nn.Module,
        caches: RowCaches,
        adapters: RowAdapters,
        prefixes: RowPrefixes | None,
        images: ImageFeatures,
        memory: KVMemory,
        max_batch: int,
        chunk: int,
        chunk_while_decoding: int,
        decoding: Callable[[], Sequence[Row]],
        group: EngineGroup | None = None,
    ):
        self._model = model
        self._caches, self._adapters, self._prefixes = caches, adapters, prefixes
        self._images, self._memory, self._max_batch = images, memory, max_batch
        self._ranks = ranks_of(model)
        # Maximum number of prompt tokens per step, of all rows: at any time, and while other rows decode.
        self._chunk, self._chunk_while_decoding = chunk, chunk_while_decoding
        # Responses that the next step returns: of rows that can't start, or begin with forced tokens.
        self.early: list[tuple[Row, TokenResponse]] = []
        self.waiting: list[Row] = []  # in the order in which they came
        self.prefills: list[Prefill] = []  # in the order in which they began
        self._is_oldests_turn = False
        # By `time.perf_counter`, when rows that generate nothing have their next turn if others generate.
        self._background_from = 0.0
        self._decoding = decoding  # returns the rows that decode
        self._group = group or EngineGroup()
        self._group.join(self)
        # The row that waits for memory, and since when, by the group's clock.
        self._waits_for_memory: tuple[int, int] | None = None
        self._clock = itertools.count()
        # By client, when its last row began, or its first one came.
        self._since: dict[str, int] = {}

    @property
    def rows(self) -> list[Row]:
        """The rows of all prefills."""
        return [row for prefill in self.prefills for row in prefill.batch.rows]

    def leave_group(self) -> None:
        """Give the rows' places and memory back to the other engines, once there are no more steps."""
        self._group.leave(self)

    @property
    def running(self) -> list[Row]:
        """The rows that prefill or decode."""
        return [*self._decoding(), *self.rows]

    @property
    def reserved(self) -> int:
        """Bytes of `KVMemory` that the running rows reserve."""
        return self._memory.reserved(self.running)

    @property
    def waits_for_memory(self) -> int | None:
        """When the row that waits for memory began to wait, by the group's clock; None if none does."""
        known = self._waits_for_memory
        return known[1] if known is not None and self.waiting else None

    def add(self, row: Row) -> None:
        self._since.setdefault(row.request.client, next(self._clock))
        self.waiting.append(row)

    def take_early(self) -> list[TokenResponse]:
        early, self.early = self.early, []
        for row, response in early:
            response.cached_tokens = row.cached_tokens
        return [response for _, response in early]

    def advance(self, decoding: RowBatch) -> None:
        """Admit rows, compute a chunk of one prefill, and join rows with whole prompts to `decoding`."""
        for prefill in self._begin(self._admitted(decoding.rows)):
            prefill.report()
            self._end_failed(prefill)
        if unfinished := self._in_this_turn(bool(decoding.rows)):
            shortest = min(unfinished, key=lambda prefill: prefill.left)
            prefill = unfinished[0] if self._is_oldests_turn else shortest
            self._is_oldests_turn = not self._is_oldests_turn
            chunk = self._chunk_while_decoding if decoding.rows else self._chunk
            begun = time.perf_counter()
            self._compute(prefill, max(1, chunk // len(prefill.batch.rows)))
            if not prefill.generates:
                ended = time.perf_counter()
                self._background_from = ended + (ended - begun) * (1 / BACKGROUND_SHARE - 1)
        whole = [prefill for prefill in self.prefills if prefill.is_whole]
        self.prefills = [prefill for prefill in self.prefills if not prefill.is_whole]
        for prefill in whole:
            for entry in prefill.batch.cache:
                entry.finalize()
            for i, row in enumerate(prefill.batch.rows):
                if not row.is_prompt_fed and self._prefixes is not None:
                    self._prefixes.keep(row, prefill.batch.cache, i)
                row.is_prompt_fed = True
            self._close(prefill)
            rows = prefill.batch.rows
            prefill.batch.keep([i for i, r in enumerate(rows) if r.id not in prefill.cancelled])
            decoding.join(prefill.batch)

    def _in_this_turn(self, others_decode: bool) -> list[Prefill]:
        """Return the unfinished prefills of which one may compute a chunk now, the oldest first."""
        unfinished = [prefill for prefill in self.prefills if not prefill.is_whole]
        background = [prefill for prefill in unfinished if not prefill.generates]
        generating = [prefill for prefill in unfinished if prefill.generates]
        if not background:
            return generating
        elsewhere = (row for other in self._group.others(self) for row in other.running)
        if generating or others_decode or any(row.generates for row in elsewhere):
            is_due = time.perf_counter() >= self._background_from
            if self._ranks is not None:
                is_due = self._ranks.first(is_due)
            return background if is_due else generating
        return background

    def _compute(self, prefill: Prefill, columns: int) -> None:
        """Compute a chunk of a prefill, and the vectors of rows that are then whole.

        If the chunk has an image that is not encoded, the next tile of that is computed instead.
        """
        batch = prefill.batch
        if len(batch.rows) == 1:
            row = batch.rows[0]
            if 0 < (to_branch := row.branch - (row.position - prefill.left)) < columns:
                columns = to_branch
        first = prefill.scored_from
        is_scored = first is not None and first <= prefill.done
        if is_scored:
            most = columns_at_once(self._model, len(batch.rows), batch.rows[0].vocab_size)
            columns = min(columns, most)
        elif first is not None:
            columns = min(columns, first - prefill.done)
        if (image := prefill.next_to_encode(columns)) is not None:
            self._encode_tile(prefill, image, self._encoder_blocks(image))
            return
        tokens = prefill.inputs(self._model, columns)
        if self._caches.by_block:
            reserve_columns(batch.cache, None, tokens.shape[1])
        if len(set(prefill.lengths)) > 1 and not is_afm(self._model):
            from afm_mlx.engine.zoo_caches import set_lengths

            # A state of mlx-lm's that has more tokens to come than this chunk has would read beyond the chunk.
            width = tokens.shape[1]
            set_lengths(batch.cache, [min(n - prefill.done, width) for n in prefill.lengths])
        with self._adapters.using(batch.adapters):
            if is_scored:
                self._score(prefill, tokens)
            elif prefill.pooling is not None:
                prefill.compute_states(self._model, tokens)
            else:
                prefill_tokens(self._model, tokens, batch.cache)
        prefill.done += tokens.shape[1]
        if len(batch.rows) == 1 and self._prefixes is not None:
            # Prompts that share a chunk are whole after it.
            row = batch.rows[0]
            self._prefixes.keep(row, batch.cache, 0, row.position - prefill.left)
        if prefill.pooling is not None and prefill.is_whole:
            prefill.take_vectors()
        mx.eval([entry.state for entry in batch.cache])
        mx.clear_cache()
        prefill.report()
        self._end_failed(prefill)

    def _encoder_blocks(self, image: ImageColumns) -> int | None:
        """Return how many blocks of the image encoder a step may compute; None for all."""
        if dispatch.device() != "cpu" or not self._decoding():
            return None
        pixels, config = image.features.image, self._model.args.vision_config
        assert pixels is not None
        return max(1, CPU_PATCHES_WHILE_DECODING // config.grid(pixels.mode) ** 2)

    def _features_of(self, row: Row, image: PromptImage) -> Features:
        return self._images.of(image, self._adapters.vision_fingerprint(row), row.request.client)

    def _encode_tile(self, prefill: Prefill, image: ImageColumns, blocks: int | None) -> None:
        """Compute the next tile of an image, or `blocks` of it; a failure ends the image's row."""
        row = prefill.batch.rows[image.row]
        try:
            with self._adapters.using_for_images(row):
                self._images.encode_tile(self._model.vision, image.features, blocks)
        except Exception as error:
            row.error = row.error or error
            self._end_failed(prefill)

    def _score(self, prefill: Prefill, tokens: mx.array) -> None:
        """Feed a chunk, and have its rows take the log-probabilities of their prompts' tokens."""
        rows, targets = prefill.batch.rows, prefill.targets(tokens.shape[1])
        tops = [0 if (asked := r.request.prompt_logprobs) is None else asked.top for r in rows]
        if not targets:  # the columns left are padding, or of rows that were cancelled
            prefill_tokens(self._model, tokens, prefill.batch.cache)
            return
        cache = prefill.batch.cache
        asked = rows[targets[0].row].request.prompt_logprobs  # with the same others as all rows'
        others = () if asked is None else asked.others
        scores, normalizers = score_chunk(self._model, tokens, cache, targets, max(tops), others)
        ends = Counter(target.row for target in targets)
        start = 0
        for index, count in sorted(ends.items()):
            end = start + count
            rows[index].take_scores(scores.part(start, end, tops[index]), normalizers[start:end])
            start = end

    def _close(self, prefill: Prefill) -> None:
        """Have the rows that end with their prompts respond and leave; their caches go to the callers."""
        for i, row in enumerate(prefill.batch.rows):
            if row.closing is None or row.id in prefill.cancelled:
                continue
            prefill.cancelled.add(row.id)
            response = row.close()
            if row.request.cache is not None and not prefill.batch.cache[0].empty():
                adapter = self._adapters.fingerprint(row)
                try:
                    return_cache(prefill.batch.cache, i, row.request.cache, 0, adapter)
                except Exception as error:
                    response.finish_reason, response.error = "error", response.error or error
            self.early.append((row, response))

    def _end_failed(self, prefill: Prefill) -> None:
        for row in list(prefill.batch.rows):
            if row.error is not None and row.id not in prefill.cancelled:
                self.early.append((row, row.failure()))
                self._cancel_prefill(row.id)

    # -- admission

    def _admitted(self, decoding: Sequence[Row]) -> list[Row]:
        """Remove the waiting rows that can start, and fill their caches with what is known of their prompts.

        A row whose adapter or stored pages are not loaded lets others pass, up to `PATIENCE` of them. A row
        that waits for memory doesn't: small ones might pass it forever. A row that can never start is released,
        and its error becomes an early response.
        """
        running = [*decoding, *self.rows]
        others = self._group.others(self)
        everywhere = [*running, *(row for other in others for row in other.running)]
        taken = Counter(row.generates for row in everywhere)
        places = {kind: self._max_batch - taken[kind] for kind in (True, False)}
        if not any(places[row.generates] > 0 for row in self.waiting):
            return []
        if self._ranks is not None and not self._ranks.is_first:
            return self._admitted_with_first(self._ranks)
        admitted: list[Row] = []
        left: list[Row] = []
        overtaken: list[Row] = []
        elsewhere = sum(other.reserved for other in others)
        waited = self._waits_for_memory
        self._waits_for_memory = None
        waits_for_memory = False
        for row in self._in_turn(running):
            if places[row.generates] <= 0 or waits_for_memory:
                left.append(row)
            elif not _can_start(row, running) or _must_not_overtake(row, overtaken):
                left.append(row)
                overtaken.append(row)
            elif (error := self._adapters.refusal(row)) is not None:
                row.release()
                self.early.append((row, TokenResponse(row.id, -1, "", None, "error", error)))
            elif not self._memory.fits(row, running, elsewhere) or _others_come_first(
                others, waited, row
            ):
                left.append(row)
                waits_for_memory = True
                is_known = waited is not None and waited[0] == row.id
                self._waits_for_memory = waited if is_known else (row.id, next(self._group.clock))
            elif self._prefixes is not None and not self._prefixes.is_ready(row):
                left.append(row)
            else:
                admitted.append(row)
                places[row.generates] -= 1
                self._since[row.request.client] = next(self._clock)
                running.append(row)
                for other in overtaken:
                    other.overtaken += row.lease is not None
        if self._ranks is not None:
            kept = {row.id for row in (*left, *admitted)}
            refused = [row.id for row in self.waiting if row.id not in kept]
            self._ranks.first({"admitted": [row.id for row in admitted], "refused": refused})
        self._keep(left)
        return self._begun(admitted)

    def _admitted_with_first(self, ranks: Ranks) -> list[Row]:
        """Do what `_admitted` does on rank 0, whose rows are admitted; wait for their adapters."""
        chosen = ranks.first(None)
        rows = {row.id: row for row in self.waiting}
        admitted = [rows.pop(each) for each in chosen["admitted"]]
        for each in chosen["refused"]:
            row, error = rows.pop(each), RequestError("Rank 0 has refused the request.")
            row.release()
            self.early.append((row, TokenResponse(each, -1, "", None, "error", error)))
        self._keep([*rows.values()])
        return self._begun(admitted)

    def _begun(self, admitted: Sequence[Row]) -> list[Row]:
        """Begin the rows that can start on all ranks, and look up what is known of their prompts."""
        admitted = self._with_adapters(list(admitted))
        if self._prefixes is not None:
            for row in admitted:
                self._prefixes.begin(row)
        return admitted

    def _with_adapters(self, rows: list[Row]) -> list[Row]:
        """Return the rows whose adapters all ranks have loaded; the others respond with the first error."""
        if self._ranks is None or all(row.lease is None for row in rows):
            return rows
        own: list[tuple[str, str]] = []  # why it failed, and the digest of the whole adapter
        for row in rows:
            while row.lease is not None and not row.lease.ready and row.lease.error is None:
                self._adapters.wait([row], 1.0)
            lease = row.lease
            failed = "" if lease is None or lease.error is None else str(lease.error)
            own.append((failed, "" if lease is None or failed else lease.resident.whole))
        left = []
        for row, *found in zip(rows, *self._ranks.gather(own), strict=True):
            problem = next((f"{text} (rank {i})" for i, (text, _) in enumerate(found) if text), "")
            if not problem and len({whole for _, whole in found}) > 1:
                problem = (
                    f"The adapter {row.request.adapter} is another one on rank 0 than on other ranks. Copy the "
                    "same files to all machines."
                )
            if problem:
                row.release()
                response = TokenResponse(row.id, -1, "", None, "error", RequestError(problem))
                self.early.append((row, response))
            else:
                left.append(row)
        return left

    def _in_turn(self, running: Sequence[Row]) -> list[Row]:
        before = Counter(row.request.client for row in running)
        turns = {}
        for row in self.waiting:
            client = row.request.client
            turns[row.id] = (before[client], self._since[client], row.id)
            before[client] += 1
        return sorted(self.waiting, key=lambda row: turns[row.id])

    def _keep(self, rows: Iterable[Row]) -> None:
        self.waiting = sorted(rows, key=lambda row: row.id)
        clients = {row.request.client for row in self.waiting}
        self._since = {client: at for client, at in self._since.items() if client in clients}

    def _begin(self, admitted: Sequence[Row]) -> list[Prefill]:
        """Begin the prefills of admitted rows and return them: short prompts share one."""
        groups: list[list[Row]] = []
        # Rows are padded to the longest, and rows of about one length have little padding.
        for row in sorted(admitted, key=lambda row: (_kind(row), row.prefill_length)):
            fits = groups and (len(groups[-1]) + 1) * row.prefill_length <= self._chunk
            has_branch = row.branch or (
                groups and groups[-1][-1].branch
            )  # its prefill pauses there
            is_alike = groups and _kind(groups[-1][-1]) == _kind(row)
            if fits and is_alike and not has_branch and self._caches.takes_padding:
                groups[-1].append(row)
            else:
                groups.append([row])
        begun = []
        for rows in groups:
            cache = self._caches.merged([row.cache for row in rows])
            for row in rows:
                row.cache = []
            begun.append(Prefill.of(rows, cache, self._caches.by_block, self._features_of))
            self.prefills.append(begun[-1])
        return begun

    # -- removal

    def cancel(self, row_id: int) -> None:
        """Drop a row that waits or prefills, and its early responses; unknown ids are ignored."""
        self._drop_waiting({row_id})
        self.early = [(row, response) for row, response in self.early if row.id != row_id]
        self._cancel_prefill(row_id)

    def _drop_waiting(self, ids: set[int]) -> None:
        for row in self.waiting:
            if row.id in ids:
                row.release()
        self._keep([row for row in self.waiting if row.id not in ids])

    def _cancel_prefill(self, row_id: int) -> None:
        """Drop a row that prefills, and return its cache to the caller.

        Padded rows can't be taken apart before they are whole; so a row that shares a prefill stays until then.
        """
        for prefill in list(self.prefills):
            rows = prefill.batch.rows
            index = next((i for i, row in enumerate(rows) if row.id == row_id), None)
            if index is None or row_id in prefill.cancelled:
                continue
            prefill.cancelled.add(row_id)
            row = rows[index]
            if len(rows) == 1 and self._prefixes is not None:
                fed = row.position - prefill.left
                self._prefixes.keep(row, prefill.batch.cache, 0, fed, is_last=True)
            row.prefix_key = None
            if row.request.cache is not None and not prefill.batch.cache[0].empty():
                padding = max(0, prefill.done - prefill.lengths[index])
                adapter = self._adapters.fingerprint(row)
                return_cache(prefill.batch.cache, index, row.request.cache, padding, adapter)
            if {row.id for row in rows} == prefill.cancelled:
                prefill.batch.keep([])
                self.prefills.remove(prefill)

    def drop_started(self) -> list[Row]:
        """Remove all rows that have started or have responses; return those that were in prefills."""
        self._drop_waiting({r.id for r in self.waiting if r.sampled or r.error is not None})
        rows, self.prefills, self.early = self.rows, [], []
        for row in rows:
            row.release()
        return rows


def _kind(row: Row) -> tuple[Any, ...]:
    """Return what the rows of a prefill have in common: who waits for it, and what it computes."""
    pooling = "" if row.embedding is None else row.embedding.pooling
    scored = row.request.prompt_logprobs if row.scored_from is not None else None
    # Without it, texts would wait until images of other rows are encoded.
    has_images = bool(row.unfed_images)
    return row.generates, scored is not None, scored.others if scored else (), pooling, has_images


def _can_start(row: Row, running: Iterable[Row]) -> bool:
    """True if a row has no adapter, or one that is loaded and fits next to the running rows' adapters.

    Also true if the adapter failed to load: the caller then refuses the row.
    """
    lease = row.lease
    if lease is None or lease.error is not None:
        return True
    if not lease.ready:
        return False
    others = {id(other.adapter) for other in running if other.adapter is not None}
    return len(others | {id(lease.resident)}) <= MAX_ADAPTERS


def _others_come_first(
    others: Iterable[Scheduler], waited: tuple[int, int] | None, row: Row
) -> bool:
    """True if a row of another engine has waited for memory longer than `row`; `waited` is of this engine."""
    since = [each.waits_for_memory for each in others]
    mine = waited[1] if waited is not None and waited[0] == row.id else None
    return any(each is not None and (mine is None or each < mine) for each in since)


def _must_not_overtake(row: Row, earlier: Iterable[Row]) -> bool:
    """True if `PATIENCE` rows with adapters have overtaken an earlier row, whose adapter is loaded.

    The pool keeps rows with other adapters from being overtaken forever.
    """
    if row.lease is None or not row.lease.ready:
        return False
    return any(
        other.overtaken >= PATIENCE and other.lease is not None and other.lease.ready
        for other in earlier
    )


# -- memory


class KVMemory:
    """Byte budget for the KV caches of an engine's rows; each row reserves the most that it can grow to.

    A batch has one rectangular cache for each of the model's blocks, with as many columns for each row as the
    longest one has. When that row leaves, its columns go with it. So rows can take

        (number of rows) x (most columns that one of them can need) x (bytes of a column)

    (a column is one position of the cache) and temporarily more: when rows join or leave or the cache grows,
    one block after the other has its old and its new array; and while a step copies the tail (columns of the
    newest tokens), there are two tails. The budget counts these copies, and a draft model's cache like the
    model's (a row uses one draft model). A prefix cache has its own budget. A cache that a caller passes in
    is counted while its row runs, not before or after.
    """

    def __init__(
        self,
        caches: RowCaches,
        budget: int | None,  # bytes
        chunk: int,  # most tokens of a prompt that are written at once
        surplus: int,  # most draft tokens of a row that can be rejected in a step
        drafts: Sequence[RowCaches],  # of the draft models
    ):
        self.budget, self._caches, self._chunk, self._surplus = budget, caches, chunk, surplus
        self._column = self._copies = 0  # bytes: of a column, and of one block's
        if budget is None:
            return
        if isinstance(budget, bool) or not isinstance(budget, Integral):
            raise RequestError(
                f"kv_memory is {shown(budget)}; a number of bytes or None is needed."
            )
        blocks, others = caches.bytes_per_token(), [draft.bytes_per_token() for draft in drafts]
        self._column = sum(blocks) + max(map(sum, others), default=0)
        # A window that forgets takes rows apart and puts them together again.
        self._copies = max(map(max, [blocks, *others])) * (2 if caches.sliding else 1)
        if budget < (least := self._bytes(1, _columns(1))):
            raise RequestError(
                f"kv_memory is {budget} bytes; the smallest cache of a row takes {least}. Give more, or None "
                "for no budget."
            )

    def _bytes(self, rows: int, columns: int) -> int:
        """Return the maximum bytes of `rows` rows with `columns` columns each, one tail included."""
        return rows * (columns * (self._column + self._copies) + TAIL * self._column)

    def columns(self, request: Request, held: int, bound: int | None) -> int:
        """Return the columns that a row's cache, with `held` tokens now, can grow to; 0 without a budget."""
        if self.budget is None:
            return 0
        if request.max_tokens < 0 and bound is None and not self._caches.sliding:
            raise RequestError(
                "max_tokens is -1, and with a budget of memory (kv_memory) a row needs a limit: give "
                "max_tokens, or max_kv_size to the engine."
            )
        wanted = bound
        if request.max_tokens >= 0:
            wanted = held + len(request.prompt) + request.max_tokens
        if self._caches.sliding and self._caches.limit is not None:
            kept = self._caches.limit + max(STEP, self._chunk)
            wanted = kept if wanted is None else min(kept, wanted)
        assert wanted is not None
        wanted += self._surplus
        columns = _columns(wanted if bound is None else min(wanted, bound))
        if (needed := self._bytes(1, columns)) > self.budget:
            raise RequestError(
                f"The request may need {needed} bytes for keys and values: {held} tokens are "
                f"there, the prompt has {len(request.prompt)}, and max_tokens is {request.max_tokens}. The "
                f"engine has {self.budget} (kv_memory). Ask for fewer tokens, or give the engine more."
            )
        return columns

    def fits(self, row: Row, running: Sequence[Row], elsewhere: int = 0) -> bool:
        """True if the budget allows a row next to the running rows, however long all of them become.

        `elsewhere` are bytes of the budget that other engines reserve.
        """
        if self.budget is None:
            return True
        return self.reserved([row, *running]) + elsewhere <= self.budget

    def reserved(self, rows: Sequence[Row]) -> int:
        """Return the bytes that rows may take, however long they become; 0 without a budget."""
        if self.budget is None:
            return 0
        return self._bytes(len(rows), max((row.columns for row in rows), default=0))


def _columns(tokens: int) -> int:
    """Return the columns of a cache that has grown to this many tokens."""
    return -(-tokens // STEP) * STEP + TAIL
