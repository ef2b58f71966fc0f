"""Adapters by name: loaded when they are first asked for, kept under a byte budget, handed to rows.

    pool = AdapterPool(model, budget=1 << 30)
    pool.register("summary", "path/to/adapter")
    engine = Engine(model, tokenizer, adapters=pool)
    engine.submit(Request(prompt, adapter="summary"))

A row has a `Lease` of its adapter from the time it is submitted until it ends. `scheduler.py` decides what is
loaded and evicted when.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.adapters.active import active_adapters
from afm_mlx.adapters.eviction import used
from afm_mlx.adapters.lease import Lease
from afm_mlx.adapters.opening import Base
from afm_mlx.adapters.registry import AdapterChoice, Registry
from afm_mlx.adapters.resident import ResidentAdapter
from afm_mlx.adapters.scheduler import LoadScheduler
from afm_mlx.errors import RequestError
from afm_mlx.threads import call


class AdapterPool:
    """The adapters of one model.

    Args:
        model: a model without an attached adapter. It is looked at only while the pool is made, so that other
            threads may ask for adapters while it runs.
        budget: bytes that resident adapters may take, those that are being read included; None for no limit.
        base_folder: folder that the model was loaded from; see `Base.of`.
        force: take adapters that were made for another model, if their shapes fit.

    Raises:
        RequestError: when the model has an adapter, or the budget is no number of bytes.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        budget: int | None = None,
        base_folder: str | Path | None = None,
        force: bool = False,
    ):
        if budget is not None and (type(budget) is not int or budget < 1):
            raise RequestError(f"budget is {budget!r}; a number of bytes of 1 or more, or None.")
        active = active_adapters(model)
        if active is not None and active.batch is not None:
            raise RequestError(
                "The model has an adapter that all rows use. Take it off (detach_adapter) and register it in "
                "the pool."
            )
        self.budget = budget
        self._model = weakref.ref(model)
        base = call(Base.of, model, base_folder, force)
        self._entries = Registry()
        self._scheduler = LoadScheduler(self._entries, base, budget)
        self._lock = self._scheduler.lock

    # -- names

    def register(self, name: str, source: str | Path | Mapping[str, float]) -> None:
        """Give an adapter a name; nothing is loaded.

        Args:
            name: any printable text; it is never taken for a path.
            source: an adapter of any format, or weights of registered adapters: what this one adds is the
                sum of what those add, each times its weight.

        Raises:
            RequestError: for a name that is taken or no name, and weights that can't be used.
            CheckpointError: when there is no such path.
        """
        with self._lock:
            self._entries.add(name, source)

    def unregister(self, name: str) -> None:
        """Forget a name, and drop the adapter from memory.

        Raises:
            RequestError: when the name is unknown, rows use it, or a registered sum does.
        """
        with self._lock:
            entry = self._entries.named(name)
            sums = [e for e in self._entries.values() if name in e.parts]
            for each in sums:
                if isinstance(each.key, str):
                    raise RequestError(
                        f"{name!r} is a part of the registered adapter {each.name!r}; unregister that one "
                        "first."
                    )
            self._scheduler.unload([entry, *sums])
            # A sum that is still being read would be found again by its weights.
            for each in (entry, *sums):
                self._entries.pop(each.key, None)
        mx.clear_cache()

    def serves(self, model: nn.Module) -> bool:
        """True if the pool was made for this very model."""
        return self._model() is model

    @property
    def registered(self) -> list[str]:
        """Names, in the order of registration."""
        with self._lock:
            return self._entries.names

    @property
    def paths(self) -> dict[str, Path]:
        """Where the registered adapters lie, by their names; sums lie nowhere."""
        with self._lock:
            entries = {name: entry.source for name, entry in self._entries.items()}
        return {
            name: path
            for name, path in entries.items()
            if isinstance(name, str) and isinstance(path, Path)
        }

    @property
    def resident(self) -> list[str]:
        """Names of the adapters in memory, sums that requests have asked for included."""
        with self._lock:
            return [e.name for e in self._entries.values() if e.resident is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of the resident adapters, and of those that are being read."""
        with self._lock:
            return used(self._entries.values())

    def name_of(self, fingerprint: str) -> str | None:
        """Name of the adapter that was loaded with this fingerprint; None when there is none."""
        with self._lock:
            found = (e.name for e in self._entries.values() if e.fingerprint == fingerprint)
            return next(found, None)

    # -- leases

    def request(self, adapter: AdapterChoice) -> Lease:
        """Ask for an adapter, and start loading it if it is not in memory; this does not wait.

        Args:
            adapter: a registered name, or weights of registered adapters.

        Raises:
            RequestError: for what is not registered, or weights that can't be used.
        """
        return self._request(adapter, patient=True)

    def load(self, adapter: AdapterChoice) -> ResidentAdapter:
        """Load an adapter and wait for it; the least recently used ones are evicted for it.

        Raises:
            RequestError: for what is not registered, and when other adapters that are in use leave no room.
            AFMError: when it can't be read.
        """
        with self._request(adapter, patient=False) as lease:
            lease.wait()
            return lease.resident

    def wait(self, leases: Iterable[Lease], timeout: float | None = None) -> bool:
        """Wait until one of the leases is ready or has failed; returns whether one has in `timeout` s."""
        return self._scheduler.wait(leases, timeout)

    def _request(self, adapter: AdapterChoice, patient: bool) -> Lease:
        with self._lock:
            return self._scheduler.lease(self._entries.entry_of(adapter), patient)

    # -- memory

    def pin(self, name: str) -> ResidentAdapter:
        """Load a registered adapter, and keep it in memory until `unpin`.

        Raises:
            AFMError: as `load`.
        """
        with self._lock:
            self._entries.named(name)  # raises for a sum without a name: `unpin` takes names
        with self._request(name, patient=False) as lease:
            lease.wait()
            resident = lease.resident
            with self._lock:
                lease._entry.pinned = True
        return resident

    def unpin(self, name: str) -> None:
        """Let an adapter be evicted again."""
        with self._lock:
            self._entries.named(name).pinned = False
            self._scheduler.advance()

    def unload(self, adapter: AdapterChoice) -> None:
        """Drop an adapter from memory, and its pin; it stays registered.

        Args:
            adapter: a registered name, or weights of registered adapters.

        Raises:
            RequestError: for what is not registered, and when rows use it or wait for it.
        """
        with self._lock:
            self._scheduler.unload([self._entries.entry_of(adapter)])
        mx.clear_cache()

    def close(self) -> None:
        """End the loading thread and drop what no row uses; requests are errors from then on."""
        self._scheduler.close()

    def __enter__(self) -> AdapterPool:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def describe(self) -> dict[str, Any]:
        """What is registered and resident, for listings: plain values that JSON can hold."""
        with self._lock:
            self._scheduler.advance()
            return {
                "budget": self.budget,
                "bytes": used(self._entries.values()),
                **self._scheduler.counts,
                "adapters": [entry.describe() for entry in self._entries.values()],
            }
