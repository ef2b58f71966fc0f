"""The adapters of an engine's rows: asked for, waited for, handed to the model, and kept apart in caches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import mlx.nn as nn

from afm_mlx.adapters.active import BatchAdapters, adapter_fingerprint, bind
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.adapters.registry import AdapterChoice, Lease
from afm_mlx.engine.row import Row
from afm_mlx.errors import RequestError
from afm_mlx.kernels import MAX_ADAPTERS

PATIENCE = 64
"""Rows that overtake a row which waits for one of a batch's adapters to end."""


class RowAdapters:
    """Gets the adapters of an engine's rows from its pool, and hands them to its model.

    Args:
        model: the model that the engine runs.
        pool: the engine's adapters; None for no adapter but the one that is attached to the model.

    Raises:
        RequestError: when the pool is another model's, or the model has an attached adapter beside it.
    """

    def __init__(self, model: nn.Module, pool: AdapterPool | None):
        self._model, self._pool = model, pool
        if pool is None:
            return
        if not isinstance(pool, AdapterPool):
            raise RequestError(
                f"adapters is {pool!r}; a pool is needed: AdapterPool(model), with adapters registered by name."
            )
        if not pool.serves(model):
            raise RequestError(
                "The adapter pool was made for another model; make one for this model."
            )
        if bind(model).batch is not None:
            raise RequestError(
                "The model has an adapter that all rows use, and an adapter pool too. Take the former off "
                "(detach_adapter)."
            )

    def lease(self, adapter: AdapterChoice | None) -> Lease | None:
        """Ask for the adapter that a request names; None for none.

        Raises:
            RequestError: see `AdapterPool.request`; and when there is no pool.
        """
        if adapter is None:
            return None
        if self._pool is None:
            raise RequestError(
                f"The request names the adapter {adapter!r}, and there is no adapter pool: give the engine, or "
                "the function that generates, adapters=AdapterPool(model)."
            )
        return self._pool.request(adapter)

    def wait(self, rows: Iterable[Row], seconds: float) -> None:
        """Wait for the first of the rows' adapters to be loaded, or to fail; not at all if none has one."""
        leases = [row.lease for row in rows if row.lease is not None]
        if self._pool is not None and leases:
            self._pool.wait(leases, seconds)

    def using(self, batch: BatchAdapters | None) -> AbstractContextManager[None]:
        """Have the model add these adapters to what is computed inside."""
        # Bound anew here, because `detach_adapter` unbinds the model and may have been called since.
        return nullcontext() if self._pool is None else bind(self._model).using(batch)

    def fingerprint(self, row: Row) -> str:
        """Fingerprint of the adapter that a row's keys and values are computed under; "" without one."""
        if self._pool is None:
            return adapter_fingerprint(self._model) or ""
        return "" if row.adapter is None else row.adapter.fingerprint

    def refusal(self, row: Row, cache: list[Any]) -> Exception | None:
        """Why a row can't start: its adapter has failed to load, or its cache was filled under another one.

        None while the adapter loads.
        """
        if row.lease is not None and not row.lease.ready:
            return row.lease.error
        known = getattr(cache[0], "adapter", None)
        if known is None or cache[0].empty() or known == (wanted := self.fingerprint(row)):
            return None
        return RequestError(
            f"The prompt cache was filled under {self._in_words(known)}, and the request runs with "
            f"{self._in_words(wanted)}. Keys and values don't carry over: begin a new cache, or name the other."
        )

    def _in_words(self, fingerprint: str) -> str:
        if not fingerprint:
            return "no adapter"
        name = None if self._pool is None else self._pool.name_of(fingerprint)
        return f"the adapter {name or 'with fingerprint'} ({fingerprint})"


def batch_adapters(rows: Sequence[Row]) -> BatchAdapters | None:
    """The adapters that a batch's rows use; None when no row has one."""
    residents = [row.adapter for row in rows]
    return BatchAdapters.of(residents) if any(residents) else None


def can_start(row: Row, beside: Iterable[Row]) -> bool:
    """True if a row's adapter is loaded, and the batch with it has at most `MAX_ADAPTERS` adapters.

    A row without an adapter can start, and so can one whose adapter has failed to load: to be refused.
    """
    lease = row.lease
    if lease is None or lease.error is not None:
        return True
    if not lease.ready:
        return False
    others = {id(other.adapter) for other in beside if other.adapter is not None}
    return len(others | {id(lease.resident)}) <= MAX_ADAPTERS


def must_not_overtake(row: Row, waiting: Iterable[Row]) -> bool:
    """True if a row must wait for earlier rows, because `PATIENCE` rows with adapters have overtaken one.

    Args:
        row: a row that could start.
        waiting: earlier rows that could not. Only those whose adapters are loaded count: they wait for rows to
            end. The pool sees to it that the others are not overtaken for ever.
    """
    if row.lease is None or not row.lease.ready:
        return False
    return any(
        other.overtaken >= PATIENCE and other.lease is not None and other.lease.ready
        for other in waiting
    )
