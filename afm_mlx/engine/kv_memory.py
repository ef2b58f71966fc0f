"""What the keys and values of rows may come to take of a budget, before they take any of it.

A batch has one rectangular cache for each block of the model: as many columns for each row as the longest one
has. When that row leaves, its columns go with it. So rows may take

    (number of rows) x (most columns that one of them may need) x (bytes of a column)

and temporarily more: when rows join or leave or the cache grows, which happens block by block, one block
has its old and its new array; and while a step copies the tail, there are two tails. The budget counts these
copies, and counts a draft model's cache like the model's. A prefix cache has a budget of its own. A cache
that a caller passes in is counted while its row runs, not before or after.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

from afm_mlx.engine.request import Request
from afm_mlx.engine.row import Row
from afm_mlx.engine.row_caches import RowCaches
from afm_mlx.errors import RequestError, shown
from afm_mlx.model.kv_cache import STEP, TAIL


class KVMemory:
    """A budget of the keys and values of an engine's rows.

    Args:
        caches: makes the rows' caches.
        budget: bytes at most; None for no budget.
        chunk: tokens of a prompt that are written at once, at most.
        guesses: tokens that a row may be fed in vain, at most.
        drafts: caches of draft models; a row has one of them at most.

    Raises:
        RequestError: when the budget has no room for a token, or the model's caches don't say what they take.
    """

    def __init__(
        self,
        caches: RowCaches,
        budget: int | None,
        chunk: int,
        guesses: int = 0,
        drafts: Sequence[RowCaches] = (),
    ):
        self.budget, self._caches, self._chunk, self._guesses = budget, caches, chunk, guesses
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
        """Bytes that rows with these columns each, one tail included, take at most."""
        return rows * (columns * (self._column + self._copies) + TAIL * self._column)

    def columns(self, request: Request, cache: Sequence[Any]) -> int:
        """Columns that a row's cache may come to have; 0 without a budget.

        Args:
            request: the row's request.
            cache: its cache as it is now.

        Raises:
            RequestError: when the row could never run, or nothing says how many tokens it may have.
        """
        if self.budget is None:
            return 0
        held, bound = self._caches.position(list(cache)), self._caches.bound(list(cache))
        if request.max_tokens < 0 and bound is None and not self._caches.sliding:
            raise RequestError(
                "max_tokens is -1, and with a budget of memory (kv_memory) a row needs a limit: give "
                "max_tokens, or max_kv_size to the engine."
            )
        wanted = (
            held + len(request.prompt) + request.max_tokens if request.max_tokens > 0 else bound
        )
        if self._caches.sliding and self._caches.limit is not None:
            kept = self._caches.limit + max(STEP, self._chunk)
            wanted = kept if wanted is None else min(kept, wanted)
        assert wanted is not None
        wanted += self._guesses
        columns = _columns(wanted if bound is None else min(wanted, bound))
        if (needed := self._bytes(1, columns)) > self.budget:
            raise RequestError(
                f"The request may need {needed} bytes for keys and values: {held} tokens are "
                f"there, the prompt has {len(request.prompt)}, and max_tokens is {request.max_tokens}. The "
                f"engine has {self.budget} (kv_memory). Ask for fewer tokens, or give the engine more."
            )
        return columns

    def fits(self, row: Row, running: Sequence[Row]) -> bool:
        """True if the budget allows a row beside the running rows, however long all of them become."""
        if self.budget is None:
            return True
        columns = (
            max(row.columns, *(other.columns for other in running)) if running else row.columns
        )
        return self._bytes(len(running) + 1, columns) <= self.budget


def bytes_in(caches: Iterable[Sequence[Any]]) -> int:
    """Bytes that caches take, spare capacity included; safe in any thread."""
    return sum(getattr(entry, "nbytes", 0) for cache in caches for entry in list(cache))


def _columns(tokens: int) -> int:
    """Columns of a cache that has come to hold this many tokens."""
    return -(-tokens // STEP) * STEP + TAIL
