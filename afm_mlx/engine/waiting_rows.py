"""The rows that wait to begin: for room in the batch, and for their adapters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from afm_mlx.engine.row import Row
from afm_mlx.engine.row_adapters import RowAdapters, can_start, must_not_overtake

Waiting = tuple[Row, list[Any]]
"""A row, and its cache."""


class WaitingRows:
    """Rows that wait, in their order.

    Args:
        adapters: the adapters of the engine's rows.
    """

    def __init__(self, adapters: RowAdapters):
        self._adapters = adapters
        self._waiting: list[Waiting] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __iter__(self) -> Iterator[Row]:
        return (row for row, _ in self._waiting)

    def append(self, row: Row, cache: list[Any]) -> None:
        self._waiting.append((row, cache))

    def drop(self, ids: set[int]) -> None:
        """Take rows out, by their ids, and release their adapters; unknown ids are ignored."""
        for row in self:
            if row.id in ids:
                row.release()
        self._waiting = [pair for pair in self._waiting if pair[0].id not in ids]

    def take(
        self, room: int, running: Sequence[Row]
    ) -> tuple[list[Waiting], list[tuple[Row, Exception]]]:
        """Take the first rows that can start; a row whose adapter is not loaded lets others pass.

        Args:
            room: rows at most.
            running: rows of the batch that they will run with.

        Returns:
            The rows that start; and those that never can, released, with the errors that say why.
        """
        taken: list[Waiting] = []
        refused: list[tuple[Row, Exception]] = []
        left: list[Waiting] = []
        side_by_side = list(running)
        overtaken: list[Row] = []
        for row, cache in self._waiting:
            if len(taken) == room:
                left.append((row, cache))
            elif not can_start(row, side_by_side) or must_not_overtake(row, overtaken):
                left.append((row, cache))
                overtaken.append(row)
            elif (error := self._adapters.refusal(row, cache)) is not None:
                row.release()
                refused.append((row, error))
            else:
                taken.append((row, cache))
                side_by_side.append(row)
                for other in overtaken:
                    other.overtaken += row.lease is not None
        self._waiting = left
        return taken, refused
