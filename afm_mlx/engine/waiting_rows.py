"""The rows that wait to begin: for room in the batch, for their adapters, and for their clients' turns."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from afm_mlx.engine.kv_memory import KVMemory
from afm_mlx.engine.row import Row
from afm_mlx.engine.row_adapters import RowAdapters, can_start, must_not_overtake
from afm_mlx.engine.row_prefixes import RowPrefixes

Waiting = tuple[Row, list[Any]]
"""A row, and its cache."""


class WaitingRows:
    """Rows that wait, in turn by client: first come those of the client with the fewest rows before them.

    A client's rows keep their order, and those that run count as before all that wait. Among clients with as
    many rows, it is the one that has waited for longest: since its last row began, or else its first one came.

    Args:
        adapters: the adapters of the engine's rows.
    """

    def __init__(self, adapters: RowAdapters):
        self._adapters = adapters
        self._waiting: list[Waiting] = []  # in the order in which they came
        self._clock = itertools.count()
        self._since: dict[
            str, int
        ] = {}  # by client, when its last row began, or its first one came

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Row]:
        return (row for row, _ in self._waiting)

    def append(self, row: Row, cache: list[Any]) -> None:
        self._since.setdefault(row.request.client, next(self._clock))
        self._waiting.append((row, cache))

    def drop(self, ids: set[int]) -> None:
        """Take rows out, by their ids, and release their adapters; unknown ids are ignored."""
        for row in self:
            if row.id in ids:
                row.release()
        self._keep([pair for pair in self._waiting if pair[0].id not in ids])

    def take(
        self, room: int, running: Sequence[Row], memory: KVMemory, prefixes: RowPrefixes
    ) -> tuple[list[Waiting], list[tuple[Row, Exception]]]:
        """Take the first rows that can start.

        A row whose adapter or prefix is not loaded lets others pass. One that waits for memory doesn't: small
        ones might pass it for ever.

        Args:
            room: rows at most.
            running: rows of the batch that they will run with.
            memory: the budget of their keys and values.
            prefixes: what is known of their prompts.

        Returns:
            The rows that start; and those that never can, released, with the errors that say why.
        """
        taken: list[Waiting] = []
        refused: list[tuple[Row, Exception]] = []
        left: list[Waiting] = []
        side_by_side = list(running)
        overtaken: list[Row] = []
        waits_for_memory = False
        if not self._waiting or room <= 0:
            return [], []
        for row, cache in self._in_turn(running):
            if len(taken) == room or waits_for_memory:
                left.append((row, cache))
            elif not can_start(row, side_by_side) or must_not_overtake(row, overtaken):
                left.append((row, cache))
                overtaken.append(row)
            elif (error := self._adapters.refusal(row, cache)) is not None:
                row.release()
                refused.append((row, error))
            elif not memory.fits(row, side_by_side):
                left.append((row, cache))
                waits_for_memory = True
            elif not prefixes.is_ready(row, cache):
                left.append((row, cache))
            else:
                taken.append((row, cache))
                self._since[row.request.client] = next(self._clock)
                side_by_side.append(row)
                for other in overtaken:
                    other.overtaken += row.lease is not None
        self._keep(left)
        return taken, refused

    def _keep(self, pairs: list[Waiting]) -> None:
        self._waiting = sorted(pairs, key=lambda pair: pair[0].id)
        clients = {row.request.client for row in self}
        self._since = {client: at for client, at in self._since.items() if client in clients}

    def _in_turn(self, running: Sequence[Row]) -> list[Waiting]:
        """The rows that wait, those first whose turn it is."""
        before = Counter(row.request.client for row in running)
        turns = []
        for row, cache in self._waiting:
            client = row.request.client
            turns.append(((before[client], self._since[client], row.id), (row, cache)))
            before[client] += 1
        return [pair for _, pair in sorted(turns, key=lambda turn: turn[0])]
