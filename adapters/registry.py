"""The adapters that a pool knows by name, the state that each is in, and leases of them."""

from __future__ import annotations

import math
import numbers
import os
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

from afm_mlx.adapters.resident import OpenAdapter, ResidentAdapter
from afm_mlx.errors import CheckpointError, RequestError, shown

AdapterChoice: TypeAlias = str | Mapping[str, float]
"""A registered name, or weights by registered names: the sum of these adapters, each times its weight."""

Key: TypeAlias = str | tuple[tuple[str, float], ...]
Files: TypeAlias = Path | list[tuple[Path, float]]
"""An adapter's folder or file; of a sum, each part's with its weight."""


@dataclass(eq=False)
class PoolEntry:
    """A registered adapter, or an unnamed sum, which a request gives as weights of registered ones."""

    key: Key  # name, or the sum's names and weights
    source: Path | dict[str, float]  # folder or file; of a sum, weights of adapters that have files
    mask: Path | None = None  # folder of a task mask that the adapter runs with
    # "registered", "opening" (headers are read), "waiting" (for memory), "loading" or "resident"
    state: str = "registered"
    order: int = 0  # counter value at the last use; larger is later
    held: int = 0  # leases that have been granted and not released
    waiting: weakref.WeakSet[Lease] = field(default_factory=weakref.WeakSet)
    dropped: bool = False  # unloaded while it was read
    pinned: bool = False  # never evicted
    nbytes: int = 0  # in memory, 0 while unknown
    opened: OpenAdapter | None = None  # between "opening" and "waiting"
    resident: ResidentAdapter | None = None
    fingerprint: str | None = None  # at the first load
    error: str | None = None  # message of the last load's error; None if it succeeded

    @property
    def name(self) -> str:
        """Registered name; of an unnamed sum, its formula, such as "0.5 * a - 2 * b"."""
        return self.key if isinstance(self.key, str) else _formula(self.key)

    @property
    def origin(self) -> str:
        """Path of the files, or the sum's formula."""
        return str(self.source) if isinstance(self.source, Path) else _formula(self.source.items())

    @property
    def parts(self) -> Collection[str]:
        """Names of a sum's parts; empty for an adapter that has files."""
        return () if isinstance(self.source, Path) else self.source

    def describe(self) -> dict[str, object]:
        """Return the entry's facts as JSON values, for listings."""
        mask = None if self.resident is None else self.resident.mask
        return {
            "name": self.name,
            "source": self.origin,
            "mask": None if self.mask is None else str(self.mask),
            "kept_share": None if mask is None else mask.share,
            "state": self.state,
            "bytes": self.nbytes,
            "rank": None if self.resident is None else self.resident.rank,
            "fingerprint": self.fingerprint,
            "pinned": self.pinned,
            "rows": self.held,
            "waiting": len(self.waiting),
            "error": self.error,
        }


class _Pool(Protocol):
    """The methods of a pool that its leases call."""

    def wait(self, leases: Collection[Lease], timeout: float | None = None) -> bool: ...

    def _release(self, lease: Lease) -> None: ...

    def _abandon(self, entry: PoolEntry) -> None: ...


class Lease:
    """One row's hold on an adapter: from the request, through loading, until `release` or garbage collection.

    Attributes:
        error: why the adapter could not be loaded; None while it loads and once it is ready.
        patient: True if the lease may wait until rows release other adapters; otherwise it fails.
    """

    def __init__(self, pool: _Pool, entry: PoolEntry, patient: bool):
        self._pool, self._entry, self.patient = pool, entry, patient
        self._resident: ResidentAdapter | None = None
        self.error: Exception | None = None

    @property
    def name(self) -> str:
        """Name of the adapter in listings; of an unnamed sum, its formula, such as "0.5 * a - 2 * b"."""
        return self._entry.name

    @property
    def ready(self) -> bool:
        """True if the adapter is in memory; it stays there until `release`."""
        return self._resident is not None

    @property
    def resident(self) -> ResidentAdapter:
        """The adapter. Raises the error of loading, or `RequestError` before the adapter is loaded."""
        if self.error is not None:
            raise self.error
        if self._resident is None:
            raise RequestError(f"The adapter {self.name} is not loaded yet; wait() for it.")
        return self._resident

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the adapter is ready or has failed; return False if `timeout` seconds pass before."""
        return self._pool.wait([self], timeout)

    def release(self) -> None:
        """End the lease; a second call does nothing."""
        self._pool._release(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def __del__(self) -> None:
        # The garbage collector may run while this thread holds the pool's lock: the pool acts on it later.
        if self._resident is not None:
            self._pool._abandon(self._entry)


class Registry(dict[Key, PoolEntry]):
    """Entries by name, and unnamed sums by their weights. Callers hold the pool's lock."""

    def add(
        self,
        name: str,
        source: str | Path | Mapping[str, float],
        mask: str | Path | None = None,
    ) -> None:
        """Add an adapter by its path, or a weighted sum of registered adapters by their weights; with a mask.

        Raises `RequestError` for a bad or taken name and bad weights, `CheckpointError` for a missing path.
        """
        is_text = isinstance(name, str) and name.strip() and name.isprintable()
        if not is_text or len(name) > 200:
            raise RequestError(
                f"The adapter name is {shown(name)}; a text of 1 to 200 printable characters is needed."
            )
        if name in self:
            raise RequestError(
                f"The adapter name {shown(name)} is taken, by {self[name].origin}. Choose another, or "
                "unregister that one first."
            )
        place = None if mask is None else _existing(name, mask)
        if isinstance(source, Mapping):
            self[name] = PoolEntry(name, self.flattened(source), place)
            return
        if not isinstance(source, str | Path) or not str(source):
            raise RequestError(
                f"The adapter {shown(name)} is to come from {shown(source)}; a path, or weights of registered "
                "adapters by their names, are needed."
            )
        self[name] = PoolEntry(name, _existing(name, source), place)

    @property
    def names(self) -> list[str]:
        return [key for key in self if isinstance(key, str)]

    def named(self, name: str) -> PoolEntry:
        """Return the entry of a registered adapter, or raise `RequestError` with the registered names."""
        entry = self.get(name) if isinstance(name, str) else None
        if entry is None:
            raise RequestError(
                f"There is no adapter {shown(name)}; registered are {', '.join(self.names) or 'none'}."
            )
        return entry

    def entry_of(self, adapter: AdapterChoice) -> PoolEntry:
        """Return the entry of a name or a sum, or raise `RequestError`; a new sum's entry is not added."""
        if isinstance(adapter, str):
            return self.named(adapter)
        if not isinstance(adapter, Mapping):
            raise RequestError(
                f"adapter is {shown(adapter)}; a registered name, weights by name, or None is needed."
            )
        weights = self.flattened(adapter)
        for plain in (adapter, weights):  # one adapter with the weight 1 is that adapter
            if list(plain.values()) == [1]:
                return self.named(next(iter(plain)))
        key = tuple(sorted(weights.items()))
        return self.get(key) or PoolEntry(key, dict(key))

    def files(self, entry: PoolEntry) -> Files:
        """Return the paths of the files from which an entry's adapter is read."""
        if isinstance(entry.source, Path):
            return entry.source
        return [(Path(self.named(name).origin), weight) for name, weight in entry.source.items()]

    def flattened(self, weights: Mapping[str, float]) -> dict[str, float]:
        """Return weights of adapters that have files: each registered sum is replaced by its parts."""
        flat: dict[str, float] = {}
        for name, weight in weights.items():
            factor = _finite(name, weight)
            source = self.named(name).source
            if self[name].mask is not None:
                raise RequestError(
                    f"The adapter {shown(name)} has a task mask, which can't be weighted. Add up adapters "
                    "without masks, and register the sum with the mask."
                )
            for part, share in source.items() if isinstance(source, dict) else [(name, 1.0)]:
                flat[part] = _finite(part, flat.get(part, 0.0) + share * factor)
        flat = {name: weight for name, weight in flat.items() if weight}
        if not flat:
            raise RequestError(
                f"The weights {shown(dict(weights))} leave no adapter; give None for the model without one."
            )
        return flat


def _existing(name: str, source: str | Path) -> Path:
    """Return the absolute path of an adapter's or a mask's files; raise `CheckpointError` if there are none."""
    path = Path(os.path.expanduser(source)).absolute()
    try:
        missing = "there is no such path" if not path.exists() else None
    except OSError as error:
        missing = f"that can't be read: {error.strerror}"
    if missing is not None:
        raise CheckpointError(f"The adapter {shown(name)} is to come from {path}, and {missing}.")
    return path


def _finite(name: str, weight: object) -> float:
    """Return an adapter's weight in a sum as a float; raise an error with its `name` if it is not finite."""
    try:
        is_number = isinstance(weight, numbers.Real) and not isinstance(weight, bool)
        value = float(weight) if is_number else math.nan  # type: ignore[arg-type]
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise RequestError(
            f"The weight of the adapter {shown(name)} is {shown(weight)}; a finite number is needed."
        )
    return value


def _formula(weights: Collection[tuple[str, float]]) -> str:
    """Return a sum as text, such as "0.5 * a - 2 * b"."""
    return " + ".join(f"{weight:g} * {name}" for name, weight in weights).replace("+ -", "- ")
