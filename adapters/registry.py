"""The adapters that a pool knows by name, and what state each is in."""

from __future__ import annotations

import math
import numbers
import os
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from afm_mlx.adapters.opening import OpenAdapter
from afm_mlx.adapters.resident import ResidentAdapter
from afm_mlx.errors import CheckpointError, RequestError, shown

AdapterChoice: TypeAlias = str | Mapping[str, float]
"""A registered name, or weights of registered adapters by their names, which are added up."""

Key: TypeAlias = str | tuple[tuple[str, float], ...]
Files: TypeAlias = Path | list[tuple[Path, float]]
"""An adapter's folder or file, or those of a sum's parts with their weights."""


@dataclass(eq=False)
class Entry:
    """An adapter that is registered, or a sum without a name that some request has asked for.

    Args:
        key: its name, or the sum's names and weights.
        source: an adapter folder, or weights of adapters that come from folders.
        state: "registered", "opening" (headers are read), "waiting" (for memory), "loading" or "resident".
        order: when it was last leased or given back; larger is later.
        held: number of leases that have it.
        waiting: leases that wait for it.
        draining: whether rows get no new leases of it, so that it can be evicted.
        passed: leases of other adapters that were given since this one waits for memory.
        dropped: whether it was unloaded while it was read.
        pinned: whether it is never evicted.
        nbytes: bytes in memory, as far as known.
        opened: what was read so far, between "opening" and "waiting".
        resident: the adapter, in state "resident".
        fingerprint: fingerprint of the numbers that were loaded first.
        error: what its last load has raised; None when it has succeeded.
    """

    key: Key
    source: Path | dict[str, float]
    state: str = "registered"
    order: int = 0
    held: int = 0
    waiting: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    draining: bool = False
    passed: int = 0
    dropped: bool = False
    pinned: bool = False
    nbytes: int = 0
    opened: OpenAdapter | None = None
    resident: ResidentAdapter | None = None
    fingerprint: str | None = None
    error: str | None = None

    @property
    def name(self) -> str:
        """Its name, or the sum in words."""
        return self.key if isinstance(self.key, str) else _sum(self.key)

    @property
    def origin(self) -> str:
        """The folder, or the sum in words."""
        return str(self.source) if isinstance(self.source, Path) else _sum(self.source.items())

    @property
    def parts(self) -> Collection[str]:
        """Names of a sum's parts."""
        return () if isinstance(self.source, Path) else self.source

    @property
    def in_use(self) -> bool:
        return bool(self.held or self.waiting)

    def describe(self) -> dict[str, Any]:
        """For listings: values that JSON can hold."""
        return {
            "name": self.name,
            "source": self.origin,
            "state": self.state,
            "bytes": self.nbytes,
            "rank": None if self.resident is None else self.resident.rank,
            "fingerprint": self.fingerprint,
            "pinned": self.pinned,
            "rows": self.held,
            "waiting": len(self.waiting),
            "error": self.error,
        }


class Registry(dict[Key, Entry]):
    """Entries by name; sums without a name by their weights. It has no lock of its own."""

    def add(self, name: str, source: str | Path | Mapping[str, float]) -> None:
        """See `AdapterPool.register`."""
        _check_name(name)
        if name in self:
            raise RequestError(
                f"The adapter name {shown(name)} is taken, by {self[name].origin}. Choose another, or "
                "unregister that one first."
            )
        if isinstance(source, Mapping):
            self[name] = Entry(name, self.flattened(source))
            return
        self[name] = Entry(name, _path_of(name, source))

    @property
    def names(self) -> list[str]:
        return [key for key in self if isinstance(key, str)]

    def named(self, name: str) -> Entry:
        """The entry of a registered adapter.

        Raises:
            RequestError: lists what is registered.
        """
        entry = self.get(name) if isinstance(name, str) else None
        if entry is None:
            raise RequestError(
                f"There is no adapter {shown(name)}; registered are {', '.join(self.names) or 'none'}."
            )
        return entry

    def entry_of(self, adapter: AdapterChoice) -> Entry:
        """The entry of a name or of a sum; that of a new sum is not in the table yet.

        Raises:
            RequestError: for names that are not registered, and weights that can't be used.
        """
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
        return self.get(key) or Entry(key, dict(key))

    def files(self, entry: Entry) -> Files:
        """The files that an entry is read from."""
        if isinstance(entry.source, Path):
            return entry.source
        return [(Path(self.named(name).origin), weight) for name, weight in entry.source.items()]

    def flattened(self, weights: Mapping[str, float]) -> dict[str, float]:
        """The weights of adapters that come from folders: a sum among the names is replaced by its parts."""
        flat: dict[str, float] = {}
        for name, weight in weights.items():
            factor = _finite(name, weight)
            source = self.named(name).source
            for part, share in source.items() if isinstance(source, dict) else [(name, 1.0)]:
                flat[part] = _finite(part, flat.get(part, 0.0) + share * factor)
        flat = {name: weight for name, weight in flat.items() if weight}
        if not flat:
            raise RequestError(
                f"The weights {shown(dict(weights))} leave no adapter; give None for the model without one."
            )
        return flat


def _path_of(name: str, source: str | Path) -> Path:
    if not isinstance(source, str | Path) or not str(source):
        raise RequestError(
            f"The adapter {shown(name)} is to come from {shown(source)}; a path, or weights of registered "
            "adapters by their names, are needed."
        )
    path = Path(os.path.expanduser(source)).absolute()
    try:
        missing = "there is no such path" if not path.exists() else None
    except OSError as error:
        missing = f"that can't be read: {error.strerror}"
    if missing is not None:
        raise CheckpointError(f"The adapter {shown(name)} is to come from {path}, and {missing}.")
    return path


def _finite(name: str, weight: object) -> float:
    """A weight of any numeric type, NumPy's too, as a float."""
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


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not name.strip() or not name.isprintable() or len(name) > 200:
        raise RequestError(
            f"The adapter name is {shown(name)}; a text of 1 to 200 printable characters is needed."
        )


def _sum(weights: Collection[tuple[str, float]]) -> str:
    return " + ".join(f"{weight:g} * {name}" for name, weight in weights).replace("+ -", "- ")
