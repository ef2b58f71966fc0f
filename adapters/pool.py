"""Adapters by name: loaded when first requested, kept under a byte budget, leased to rows.

    pool = AdapterPool(model, budget=1 << 30)
    pool.register("summary", "path/to/adapter")
    engine = Engine(model, tokenizer, adapters=pool)
    engine.submit(Request(prompt, adapter="summary"))

A row has a `Lease` of its adapter from the time it is submitted until it ends.

    registered -> opening (headers) -> waiting (for memory) -> loading -> resident -> registered, when evicted

- Leased and pinned adapters are never evicted.
- Loads get memory in the order of their requests. For the first one, unused adapters are evicted, least
  recently used first. If these are too few, the least recently leased ones are evicted once their rows have
  ended, and give rows no new leases until then: so a load waits for rows that run already, and for no others.
- One thread of the pool's own reads files. Everything else happens in the callers' threads, under one lock
  that is never held while a file is read.
- A resident adapter needs its files no more. When they are read again, they must hold the same numbers.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.adapters.active import active_adapters
from afm_mlx.adapters.registry import AdapterChoice, Files, Lease, PoolEntry, Registry
from afm_mlx.adapters.resident import Base, OpenAdapter, ResidentAdapter, open_adapter, open_sum
from afm_mlx.errors import AFMError, CheckpointError, RequestError
from afm_mlx.threads import call

LOOK_AGAIN = 0.1
"""Seconds after which a wait looks for garbage-collected leases, whose end wakes nobody."""


class AdapterPool:
    """The adapters of one model.

    Methods whose names begin with an underscore are called under the lock, except `_abandon`, and `_open` and
    `_read`, which run in the loading thread.

    Args:
        model: a model without an attached adapter. Only the constructor looks at it, so other threads may use
            the pool while the model runs.
        budget: bytes that resident adapters and adapters that are being read may take; pass None for no limit.
        base_folder: folder that the model was loaded from; see `Base.of`.
        force: accept adapters that were made for another model, if their shapes fit.

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
        self._base = call(Base.of, model, base_folder, force)
        self._registry = Registry()
        self._lock = threading.Condition()
        self._counts = {"loads": 0, "hits": 0, "evictions": 0, "failures": 0}
        self._queue: deque[PoolEntry] = deque()  # loads that wait for memory
        self._abandoned: deque[PoolEntry] = deque()  # entries whose leases were garbage-collected
        self._clock = itertools.count(1)
        self._executor: ThreadPoolExecutor | None = None
        self._closed = False

    # -- names

    def register(
        self,
        name: str,
        source: str | Path | Mapping[str, float],
        *,
        mask: str | Path | None = None,
    ) -> None:
        """Give an adapter a name; nothing is loaded.

        Args:
            name: any printable text; it is never taken for a path.
            source: an adapter of any format, or the folder of a task mask; or weights of registered adapters,
                for their weighted sum.
            mask: folder of a task mask that the adapter runs with; the name stands for both.

        Raises:
            RequestError: for a name that is taken or not printable text, and weights that can't be used.
            CheckpointError: when there is no such path.
        """
        with self._lock:
            self._registry.add(name, source, mask)

    def unregister(self, name: str) -> None:
        """Remove a name, and drop the adapter from memory.

        Raises:
            RequestError: when the name is unknown, rows use it, or a registered sum does.
        """
        with self._lock:
            entry = self._registry.named(name)
            sums = [e for e in self._registry.values() if name in e.parts]
            for each in sums:
                if isinstance(each.key, str):
                    raise RequestError(
                        f"{name!r} is a part of the registered adapter {each.name!r}; unregister that one "
                        "first."
                    )
            self._unload(entry, *sums)
            # A sum that is still being read would be found again by its weights.
            for each in (entry, *sums):
                self._registry.pop(each.key, None)
        mx.clear_cache()

    def serves(self, model: nn.Module) -> bool:
        """Return True if the pool was made for this very model."""
        return self._model() is model

    @property
    def registered(self) -> list[str]:
        """Names, in the order of registration."""
        with self._lock:
            return self._registry.names

    @property
    def paths(self) -> dict[str, Path]:
        """Paths of the registered adapters that have files, by name."""
        with self._lock:
            return {
                name: entry.source
                for name, entry in self._registry.items()
                if isinstance(name, str) and isinstance(entry.source, Path)
            }

    @property
    def resident(self) -> list[str]:
        """Names of the adapters in memory, unnamed sums included."""
        with self._lock:
            return [e.name for e in self._registry.values() if e.resident is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of the resident adapters, and of those that are being read."""
        with self._lock:
            return self._used()

    def name_of(self, fingerprint: str) -> str | None:
        """Return the name of the adapter that was loaded with this fingerprint; None if there is none."""
        with self._lock:
            found = (e.name for e in self._registry.values() if e.fingerprint == fingerprint)
            return next(found, None)

    def describe(self) -> dict[str, Any]:
        """Return the registered and resident adapters as JSON values, for listings."""
        with self._lock:
            self._advance()
            return {
                "budget": self.budget,
                "bytes": self._used(),
                **self._counts,
                "adapters": [entry.describe() for entry in self._registry.values()],
            }

    # -- leases

    def request(self, adapter: AdapterChoice) -> Lease:
        """Lease an adapter, and start loading it if it is not in memory; don't wait for it.

        Args:
            adapter: a registered name, or weights of registered adapters.

        Raises:
            RequestError: for a name that is not registered, weights that can't be used, or a closed pool.
        """
        return self._lease(adapter, patient=True)

    def load(self, adapter: AdapterChoice) -> ResidentAdapter:
        """Load an adapter and wait for it; unused adapters are evicted for it.

        Raises:
            RequestError: as `request`, and when adapters that are in use leave too little memory.
            AFMError: when the adapter can't be read.
        """
        with self._lease(adapter, patient=False) as lease:
            lease.wait()
            return lease.resident

    def wait(self, leases: Iterable[Lease], timeout: float | None = None) -> bool:
        """Wait until one of `leases` is ready or has failed; return False if `timeout` seconds pass before."""
        leases = list(leases)
        end = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            self._advance()
            while not any(lease.ready or lease.error is not None for lease in leases):
                left = LOOK_AGAIN if end is None else min(end - time.monotonic(), LOOK_AGAIN)
                if left <= 0:
                    return False
                self._lock.wait(left)
                if self._abandoned or (self._queue and not self._queue[0].waiting):
                    self._advance()  # not always, for it wakes others that wait
            return True

    def _lease(self, adapter: AdapterChoice, patient: bool) -> Lease:
        """Lease an adapter; if not `patient`, the lease fails rather than wait for rows to end."""
        with self._lock:
            entry = self._registry.entry_of(adapter)
            if self._closed:
                raise RequestError("The adapter pool is closed; make a new one.")
            self._registry.setdefault(entry.key, entry)
            lease = Lease(self, entry, patient)
            # A program that loads an adapter may be the one that runs the rows whose end it would wait for.
            if entry.resident is not None and not (patient and entry in self._victims()):
                self._counts["hits"] += 1
                self._grant(lease)
            else:
                entry.waiting.add(lease)
                self._start(entry)
            self._advance()
        return lease

    def _release(self, lease: Lease) -> None:
        """End a lease, or the wait for it; takes the lock."""
        with self._lock:
            entry = lease._entry
            entry.waiting.discard(lease)
            if lease._resident is not None:
                lease._resident = None
                self._returned(entry)
            elif lease.error is None:
                lease.error = RequestError(f"The lease of the adapter {entry.name} was released.")
            self._advance()

    def _abandon(self, entry: PoolEntry) -> None:
        """Record a garbage-collected lease; takes no lock, so it can be called anywhere."""
        self._abandoned.append(entry)

    def _grant(self, lease: Lease) -> None:
        entry = lease._entry
        lease._resident = entry.resident
        entry.waiting.discard(lease)
        entry.held += 1
        if lease.patient:  # `load` must not keep an adapter that a row's load waits for
            entry.order = next(self._clock)

    def _refuse(self, leases: Iterable[Lease], error: Exception) -> None:
        for lease in list(leases):
            lease.error = error
            lease._entry.waiting.discard(lease)

    def _returned(self, entry: PoolEntry) -> None:
        entry.held -= 1
        if not entry.held:
            entry.order = next(self._clock)
            if self._closed:
                self._forget(entry)

    # -- memory

    def pin(self, name: str) -> ResidentAdapter:
        """Load a registered adapter, and keep it in memory until `unpin`.

        Raises:
            AFMError: as `load`.
        """
        with self._lock:
            self._registry.named(name)  # raises for an unnamed sum: `unpin` takes names
        with self._lease(name, patient=False) as lease:
            lease.wait()
            resident = lease.resident
            with self._lock:
                lease._entry.pinned = True
        return resident

    def unpin(self, name: str) -> None:
        """Let an adapter be evicted again."""
        with self._lock:
            self._registry.named(name).pinned = False
            self._advance()

    def unload(self, adapter: AdapterChoice) -> None:
        """Drop an adapter from memory, and its pin; it stays registered.

        Args:
            adapter: a registered name, or weights of registered adapters.

        Raises:
            RequestError: for a name that is not registered, and when rows use the adapter or wait for it.
        """
        with self._lock:
            self._unload(self._registry.entry_of(adapter))
        mx.clear_cache()

    def close(self) -> None:
        """End the loading thread, fail waiting leases, and drop adapters that no row uses.

        Later requests raise `RequestError`.
        """
        with self._lock:
            self._closed = True
            for entry in list(self._registry.values()):
                self._refuse(entry.waiting, RequestError("The adapter pool was closed."))
                if not entry.held:
                    self._forget(entry)
            self._lock.notify_all()
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(cancel_futures=True)

    def __enter__(self) -> AdapterPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _unload(self, *entries: PoolEntry) -> None:
        """Drop adapters and their pins; if one of them is in use, raise `RequestError` and drop none."""
        self._advance()
        for entry in entries:
            if entry.held or entry.waiting:
                raise RequestError(
                    f"The adapter {entry.name} is in use: {entry.held} rows run with it or are about to, "
                    f"and {len(entry.waiting)} wait for it. Let them end, or cancel them."
                )
        for entry in entries:
            entry.pinned, entry.dropped = False, True
            if entry.state not in ("opening", "loading"):  # else it is dropped once it is read
                self._forget(entry)
        self._advance()

    def _used(self) -> int:
        """Return the number of bytes of adapters that are in memory or being read into it."""
        counted = ("loading", "resident")
        return sum(entry.nbytes for entry in self._registry.values() if entry.state in counted)

    def _advance(self) -> None:
        """Give back abandoned leases, start the loads that there is memory for, and grant leases."""
        while self._abandoned:
            self._returned(self._abandoned.popleft())
        while self._queue:
            entry = self._first_load()
            if not entry.waiting:  # all that requested it have gone
                self._forget(entry)
            elif (reason := self._too_large(entry)) is not None:
                self._fail(entry, RequestError(reason))
            elif self._make_room(entry):
                self._queue.remove(entry)
                entry.state = "loading"
                self._in_thread(self._read, entry)
            elif any(e.state == "loading" for e in self._registry.values()):
                break  # what is being read may turn out to be in no use
            elif not self._refuse_impatient():
                break
        victims = self._victims()
        for entry in self._registry.values():
            if entry.resident is not None and entry not in victims:
                for lease in list(entry.waiting):
                    self._grant(lease)
        self._lock.notify_all()

    def _first_load(self) -> PoolEntry:
        """Return the queued entry that gets memory next: one that `load` or `pin` needs, else the oldest."""
        impatient = (e for e in self._queue if not all(lease.patient for lease in e.waiting))
        return next(impatient, self._queue[0])

    def _too_large(self, entry: PoolEntry) -> str | None:
        """Return why an adapter can't be loaded even when no row runs; None if it can."""
        if self.budget is None:
            return None
        pinned = [other for other in self._registry.values() if other.pinned and other is not entry]
        left = self.budget - sum(other.nbytes for other in pinned)
        if entry.nbytes <= left:
            return None
        needed = f"The adapter {entry.name} needs {entry.nbytes:,} bytes"
        if entry.nbytes > self.budget:
            return f"{needed}, and the pool's budget is {self.budget:,}. Raise the budget."
        return (
            f"{needed}, and {', '.join(other.name for other in pinned)}, which are pinned, leave {left:,} of "
            f"the budget of {self.budget:,}. Unpin one, or raise the budget."
        )

    def _victims(self) -> list[PoolEntry]:
        """Return the adapters to evict for the first load: unused ones, then the least recently leased."""
        victims: list[PoolEntry] = []
        if not self._queue or self.budget is None:
            return victims
        missing = self._used() + self._first_load().nbytes - self.budget
        evictable = [e for e in self._registry.values() if e.resident is not None and not e.pinned]
        for entry in sorted(evictable, key=lambda e: (e.held > 0, e.order)):
            if missing <= 0:
                break
            victims.append(entry)
            missing -= entry.nbytes
        return victims

    def _make_room(self, entry: PoolEntry) -> bool:
        """Evict unused adapters to make room for `entry`; return False, and evict none, if they are too few."""
        unused = [victim for victim in self._victims() if not victim.held]
        freed = sum(victim.nbytes for victim in unused)
        if self.budget is not None and self._used() - freed + entry.nbytes > self.budget:
            return False
        for victim in unused:
            self._counts["evictions"] += 1
            self._forget(victim)
            if victim.waiting:  # rows that came after this load
                self._start(victim)
        return True

    def _refuse_impatient(self) -> bool:
        """Fail the queued leases that are not patient; return True if there were any."""
        impatient = [lease for e in self._queue for lease in e.waiting if not lease.patient]
        for lease in impatient:
            error = RequestError(
                f"The adapter {lease.name} needs {lease._entry.nbytes:,} bytes, and adapters that are in use "
                f"leave too little of the budget of {self.budget:,}. Let rows end, or raise the budget."
            )
            self._refuse([lease], error)
        return bool(impatient)

    def _forget(self, entry: PoolEntry) -> None:
        """Drop an adapter from memory and from the queue; remove the entry of an unnamed sum."""
        if entry in self._queue:
            self._queue.remove(entry)
        entry.resident, entry.opened, entry.state = None, None, "registered"
        is_listed = self._registry.get(entry.key) is entry
        if is_listed and not (isinstance(entry.key, str) or entry.waiting):
            del self._registry[entry.key]

    # -- loading

    def _start(self, entry: PoolEntry) -> None:
        if entry.state == "registered":
            entry.state, entry.dropped = "opening", False
            self._in_thread(self._open, entry)

    def _in_thread(self, load: Callable[..., None], entry: PoolEntry) -> None:
        """Call `load` in the loading thread; whatever it raises fails the entry's leases."""
        files, opened = self._registry.files(entry), entry.opened

        def run() -> None:
            try:
                load(entry, opened or self._opened(entry, files))
            except Exception as error:
                with self._lock:
                    self._fail(entry, error)
                    self._advance()

        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="afm-mlx adapters")
        self._executor.submit(run)

    def _open(self, entry: PoolEntry, opened: OpenAdapter) -> None:
        """Put an entry whose headers were read into the queue for memory."""
        with self._lock:
            if not self._closed:
                entry.opened, entry.nbytes, entry.state = opened, opened.nbytes, "waiting"
                self._queue.append(entry)
            self._advance()
            entry.opened = None  # other formats are read whole, and what waits must take no memory

    def _opened(self, entry: PoolEntry, files: Files) -> OpenAdapter:
        if isinstance(files, Path):
            opened = open_adapter(files, self._base)
        else:
            parts = [(open_adapter(file, self._base), weight) for file, weight in files]
            opened = open_sum(parts, self._base, entry.name)
        return opened if entry.mask is None else opened.with_mask(entry.mask)

    def _read(self, entry: PoolEntry, opened: OpenAdapter) -> None:
        """Read an adapter's arrays into memory, and grant the leases that wait for it.

        Raises `CheckpointError` if the files have changed since the adapter was opened, or first loaded; the
        caller then fails the leases.
        """
        if opened.nbytes > entry.nbytes:
            raise CheckpointError(
                f"{opened.source} has grown from {entry.nbytes:,} bytes in memory to {opened.nbytes:,} "
                "since its load began. Load the adapter again."
            )
        resident = opened.read()
        if entry.fingerprint not in (None, resident.fingerprint):
            raise CheckpointError(
                f"{opened.source} holds another adapter than when {entry.name!r} was loaded first: its "
                f"fingerprint was {entry.fingerprint} and is {resident.fingerprint}. Unregister the name "
                "and register it again to take the new one."
            )
        with self._lock:
            self._counts["loads"] += 1
            entry.error, entry.fingerprint = None, resident.fingerprint
            entry.nbytes, entry.order = resident.nbytes, next(self._clock)
            entry.resident, entry.state = resident, "resident"
            for lease in list(entry.waiting):  # before the adapter could be evicted
                self._grant(lease)
            if (self._closed or entry.dropped) and not entry.held:
                self._forget(entry)
            self._advance()

    def _fail(self, entry: PoolEntry, error: Exception) -> None:
        """End the load of `entry` with `error`, which becomes the `error` of the leases that wait for it."""
        self._counts["failures"] += 1
        entry.error = str(error) if isinstance(error, AFMError) else repr(error)
        # The frames that errors have passed through would keep arrays.
        error.__cause__ = error.__context__ = None
        error = error.with_traceback(None)
        self._refuse(entry.waiting, error)
        self._forget(entry)
