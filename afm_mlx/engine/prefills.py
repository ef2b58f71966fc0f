"""Prefills that are under way: which rows share one, and whose turn the next chunk is.

A step computes one chunk of one prefill, so that rows which decode never wait for more. Short prompts share a
chunk; a long one takes many, and others have their turns between them.
"""

from __future__ import annotations

from collections.abc import Sequence

from afm_mlx.engine.batch import Prefill
from afm_mlx.engine.row import Row
from afm_mlx.engine.row_adapters import RowAdapters
from afm_mlx.engine.row_caches import Cache, RowCaches, hand_back


class Prefills:
    """Prefills that are under way, in the order in which they began.

    Turns go by turns to the oldest prefill and to the one with the least left. So a short prompt waits for one
    chunk of a longer one, and a long one has every other chunk at least once it is the oldest.

    Args:
        caches: makes batches of the rows' caches.
        adapters: the rows' adapters.
        chunk: tokens that a step computes at most, of all rows together.
        chunk_beside: the same while other rows decode, which wait for them.
    """

    def __init__(self, caches: RowCaches, adapters: RowAdapters, chunk: int, chunk_beside: int):
        self._caches, self._adapters = caches, adapters
        self._chunk, self._chunk_beside = chunk, chunk_beside
        self._under_way: list[Prefill] = []
        self._is_oldests_turn = False

    def __bool__(self) -> bool:
        return bool(self._under_way)

    @property
    def caches(self) -> list[Cache]:
        """The caches of all prefills."""
        return [prefill.batch.cache for prefill in self._under_way]

    @property
    def rows(self) -> list[Row]:
        """The rows of all prefills."""
        return [row for prefill in self._under_way for row in prefill.batch.rows]

    def begin(self, admitted: Sequence[tuple[Row, Cache]]) -> list[Prefill]:
        """Begin the prefills of rows with these caches, and return them: short prompts share one."""
        group: list[tuple[Row, Cache]] = []
        before = len(self._under_way)
        # Rows are padded to the longest, and those of about one length have little padding.
        for row, cache in sorted(admitted, key=lambda pair: len(pair[0].known)):
            shared = (len(group) + 1) * (len(row.known) - 1) <= self._chunk
            if group and (self._caches.sliding or not shared):  # a window takes no padding
                self._begin(group)
                group = []
            group.append((row, cache))
        if group:
            self._begin(group)
        return self._under_way[before:]

    def _begin(self, group: Sequence[tuple[Row, Cache]]) -> None:
        rows, caches = zip(*group, strict=True)
        self.append(Prefill.of(rows, self._caches.merged(caches), self._caches.by_block))

    def append(self, prefill: Prefill) -> None:
        self._under_way.append(prefill)

    def next(self, is_beside: bool) -> tuple[Prefill, int] | None:
        """Whose turn it is, and how many of its columns make a chunk; None when nothing is left to compute.

        Args:
            is_beside: whether other rows decode.
        """
        waiting = [prefill for prefill in self._under_way if prefill.left]
        if not waiting:
            return None
        oldest, shortest = waiting[0], min(waiting, key=lambda prefill: prefill.left)
        prefill = oldest if self._is_oldests_turn else shortest
        self._is_oldests_turn = not self._is_oldests_turn
        chunk = self._chunk_beside if is_beside else self._chunk
        return prefill, max(1, chunk // len(prefill.batch.rows))

    def take_whole(self) -> list[Prefill]:
        """Take out the prefills of which nothing is left to compute."""
        whole = [prefill for prefill in self._under_way if not prefill.left]
        self._under_way = [prefill for prefill in self._under_way if prefill.left]
        return whole

    def drop_all(self) -> list[Row]:
        """Take out all rows, and release their adapters. Nothing is handed back to their caches."""
        rows, self._under_way = self.rows, []
        for row in rows:
            row.release()
        return rows

    def cancel(self, row_id: int) -> None:
        """Drop a row and hand its cache back to the caller; unknown ids are ignored.

        Padded rows are taken apart only once they are whole; so a row in company stays until then.
        """
        for prefill in list(self._under_way):
            rows = prefill.batch.rows
            index = next((i for i, row in enumerate(rows) if row.id == row_id), None)
            if index is None or row_id in prefill.cancelled:
                continue
            prefill.cancelled.add(row_id)
            row = rows[index]
            if row.request.cache is not None and not prefill.batch.cache[0].empty():
                padding = max(0, prefill.done - prefill.lengths[index])
                adapter = self._adapters.fingerprint(row)
                hand_back(prefill.batch.cache, index, row.request.cache, padding, adapter)
            if {row.id for row in rows} == prefill.cancelled:
                prefill.batch.drop(prefill.cancelled)
                self._under_way.remove(prefill)
