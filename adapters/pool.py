"""Adapters by name: loaded when they are first asked for, kept under a byte budget, handed to rows.

    pool = AdapterPool(model, budget=1 << 30)
    pool.register("summary", "path/to/adapter")
    engine = Engine(model, tokenizer, adapters=pool)
    engine.submit(Request(prompt, adapter="summary"))

    registered -> opening (headers) -> waiting (for room) -> loading -> resident -> registered, when evicted

Notable choices:

- One thread of the pool's own reads files. Everything else happens in the callers' threads, under
  one lock that is never held while a file is read.
- A row has a `Lease` from the time it is submitted until it ends. What is leased or pinned is never evicted.
- Of the loads that wait for room, the one that most leases wait for comes first, so that rows of one adapter
  run together. The oldest lets `PATIENCE` leases of other adapters pass; then it comes first, and no new ones
  are given of those that have to go for it, least recently used first.
- A resident adapter needs its files no more. Read again, they must hold what they held the first time.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.adapters.active import active_adapters
from afm_mlx.adapters.eviction import due, never, next_load, used, victims
from afm_mlx.adapters.lease import Lease
from afm_mlx.adapters.opening import Base, OpenAdapter, open_adapter, open_sum
from afm_mlx.adapters.registry import Adapter, Entry, Registry
from afm_mlx.adapters.resident import ResidentAdapter
from afm_mlx.errors import AFMError, CheckpointError, RequestError
from afm_mlx.threads import call

PATIENCE = 64
"""Leases of other adapters that a load which waits for room lets pass."""
LOOK_AGAIN = 0.1
"""Seconds after which a wait looks for leases that were forgotten: their end wakes nobody."""


class AdapterPool:
    """The adapters of one model.

    Args:
        model: without an attached adapter. It is looked at here only, so that other threads may ask for
            adapters while it runs.
        budget: bytes that resident adapters may take, those that are being read included; None for no limit.
        base_folder: that the model was loaded from. Its fingerprint counts too, since that of the arrays in
            memory depends on the type that the device computes in.
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
        self._base = call(Base.of, model, base_folder, force)
        self._entries = Registry()
        self._queue: deque[Entry] = deque()  # loads that wait for room
        self._abandoned: deque[Entry] = deque()  # of leases that were forgotten
        self._changed = threading.Condition()
        self._clock = itertools.count(1)
        self._executor: ThreadPoolExecutor | None = None
        self._closed = False
        self._counts = {"loads": 0, "hits": 0, "evictions": 0, "failures": 0}

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
        with self._changed:
            self._entries.add(name, source)

    def unregister(self, name: str) -> None:
        """Forget a name, and drop the adapter from memory.

        Raises:
            RequestError: when the name is unknown, rows use it, or a registered sum does.
        """
        with self._changed:
            entry = self._entries.named(name)
            sums = [e for e in self._entries.values() if name in e.parts]
            for each in sums:
                if isinstance(each.key, str):
                    raise RequestError(
                        f"{name!r} is a part of the registered adapter {each.name!r}; unregister that one "
                        "first."
                    )
            self._unload([entry, *sums])  # what was added up of it goes too
            # A sum that is still being read would be found again by its weights.
            for each in (entry, *sums):
                self._entries.pop(each.key, None)
        mx.clear_cache()

    def serves(self, model: nn.Module) -> bool:
        """Whether the pool is that of this very model."""
        return self._model() is model

    @property
    def registered(self) -> list[str]:
        """Names, in the order of registration."""
        with self._changed:
            return self._entries.names

    @property
    def resident(self) -> list[str]:
        """Names of the adapters in memory, sums that requests have asked for included."""
        with self._changed:
            return [e.name for e in self._entries.values() if e.resident is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of the resident adapters, and of those that are being read."""
        with self._changed:
            return used(self._entries.values())

    def name_of(self, fingerprint: str) -> str | None:
        """The adapter that was loaded with this fingerprint; None when there is none."""
        with self._changed:
            found = (e.name for e in self._entries.values() if e.fingerprint == fingerprint)
            return next(found, None)

    # -- leases

    def request(self, adapter: Adapter) -> Lease:
        """Ask for an adapter, and start loading it if it is not in memory; this does not wait.

        Args:
            adapter: a registered name, or weights of registered adapters.

        Raises:
            RequestError: for what is not registered, or weights that can't be used.
        """
        return self._request(adapter, patient=True)

    def load(self, adapter: Adapter) -> ResidentAdapter:
        """Load an adapter and wait for it; the least recently used ones make room.

        Raises:
            RequestError: for what is not registered, and when other adapters that are in use leave no room.
            AFMError: when it can't be read.
        """
        with self._request(adapter, patient=False) as lease:
            lease.wait()
            return lease.resident

    def wait(self, leases: Iterable[Lease], timeout: float | None = None) -> bool:
        """Wait until one of the leases is ready or has failed; returns whether one has in `timeout` s."""
        leases = list(leases)
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            self._advance()
            while not any(lease.ready or lease.error is not None for lease in leases):
                left = LOOK_AGAIN if end is None else min(end - time.monotonic(), LOOK_AGAIN)
                if left <= 0:
                    return False
                self._changed.wait(left)
                if self._abandoned or (self._queue and not self._queue[0].waiting):
                    self._advance()  # not always, for it wakes others that wait
            return True

    def _request(self, adapter: Adapter, patient: bool) -> Lease:
        with self._changed:
            if self._closed:
                raise RequestError("The adapter pool is closed; make a new one.")
            entry = self._entries.entry_of(adapter)
            self._entries.setdefault(entry.key, entry)
            lease = Lease(self, entry, patient)
            # What must not wait for rows takes what drains, too.
            if entry.resident is not None and not (entry.draining and patient):
                self._counts["hits"] += 1
                self._grant(entry, lease)
                if self._queue:
                    self._queue[0].passed += 1
            else:
                entry.waiting.add(lease)
                self._start(entry)
            self._advance()
        return lease

    def _grant(self, entry: Entry, lease: Lease) -> None:
        lease._resident = entry.resident
        entry.waiting.discard(lease)
        entry.held += 1
        entry.order = next(self._clock)

    def _grant_all(self, entry: Entry) -> None:
        for lease in list(entry.waiting):
            self._grant(entry, lease)

    def _release(self, lease: Lease) -> None:
        with self._changed:
            entry = lease._entry
            entry.waiting.discard(lease)
            if lease._resident is not None:
                lease._resident = None
                self._returned(entry)
            elif lease._error is None:
                lease._error = RequestError(f"The lease of the adapter {entry.name} was released.")
            self._advance()

    def _returned(self, entry: Entry) -> None:
        entry.held -= 1
        entry.order = next(self._clock)
        if self._closed and not entry.held:
            self._forget(entry)

    # -- memory

    def pin(self, name: str) -> ResidentAdapter:
        """Load a registered adapter, and keep it in memory until `unpin`.

        Raises:
            AFMError: as `load`.
        """
        with self._changed:
            self._entries.named(name)  # a sum without a name has nothing to be unpinned by
        with self._request(name, patient=False) as lease:
            lease.wait()
            resident = lease.resident
            with self._changed:
                lease._entry.pinned = True
        return resident

    def unpin(self, name: str) -> None:
        """Let an adapter be evicted again."""
        with self._changed:
            self._entries.named(name).pinned = False
            self._advance()

    def unload(self, adapter: Adapter) -> None:
        """Drop an adapter from memory, and its pin; it stays registered.

        Args:
            adapter: a registered name, or weights of registered adapters.

        Raises:
            RequestError: for what is not registered, and when rows use it or wait for it.
        """
        with self._changed:
            self._unload([self._entries.entry_of(adapter)])
        mx.clear_cache()

    def close(self) -> None:
        """End the loading thread and drop what no row uses; requests are errors from then on."""
        with self._changed:
            self._closed = True
            for entry in list(self._entries.values()):
                error = RequestError("The adapter pool was closed.")
                self._refuse(list(entry.waiting), error)
                if not entry.held:
                    self._forget(entry)
            self._changed.notify_all()
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(cancel_futures=True)

    def __enter__(self) -> AdapterPool:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def describe(self) -> dict[str, Any]:
        """What is registered and resident, for listings: plain values that JSON can hold."""
        with self._changed:
            self._advance()
            return {
                "budget": self.budget,
                "bytes": used(self._entries.values()),
                **self._counts,
                "adapters": [entry.describe() for entry in self._entries.values()],
            }

    def _unload(self, entries: Collection[Entry]) -> None:
        self._advance()
        for entry in entries:
            if entry.in_use:
                raise RequestError(
                    f"The adapter {entry.name} is in use: {entry.held} rows run with it or are about to, and "
                    f"{len(entry.waiting)} wait for it. Let them end, or cancel them."
                )
        for entry in entries:
            entry.pinned, entry.dropped = False, True
            if entry.state not in ("opening", "loading"):  # what is read is dropped when it comes
                self._forget(entry)
        self._advance()

    # -- loading: `_open` and `_read` run in the loader's thread, all else under the lock

    def _start(self, entry: Entry) -> None:
        if entry.state == "registered":
            entry.state, entry.passed, entry.dropped = "opening", 0, False
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, thread_name_prefix="afm-mlx adapters")
            self._executor.submit(self._open, entry)

    def _open(self, entry: Entry) -> None:
        """Read headers, and queue for room."""
        try:
            opened = self._opened(entry)
        except Exception as error:  # whatever it is, rows wait for it
            self._ended(entry, error)
            return
        with self._changed:
            if not self._closed:
                entry.opened, entry.nbytes, entry.state = opened, opened.nbytes, "waiting"
                self._queue.append(entry)
            self._advance()
            entry.opened = None  # other formats are read whole, and what waits must take no memory

    def _opened(self, entry: Entry) -> OpenAdapter:
        if isinstance(entry.source, Path):
            return open_adapter(entry.source, self._base)
        with self._changed:
            folders = [Path(str(self._entries.named(name).source)) for name in entry.source]
        parts = [open_adapter(folder, self._base) for folder in folders]
        weights = entry.source.values()
        return open_sum(list(zip(parts, weights, strict=True)), self._base, entry.name)

    def _read(self, entry: Entry, opened: OpenAdapter | None) -> None:
        """Read the numbers, and hand them to those that wait; `opened` is None after a wait for room."""
        try:
            opened = opened or self._opened(entry)
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
        except Exception as error:
            self._ended(entry, error)
            return
        with self._changed:
            self._counts["loads"] += 1
            entry.error, entry.fingerprint = None, resident.fingerprint
            entry.nbytes, entry.order = resident.nbytes, next(self._clock)
            entry.resident, entry.state = resident, "resident"
            self._grant_all(entry)  # before it could be evicted
            if (self._closed or entry.dropped) and not entry.held:
                self._forget(entry)
            self._advance()

    def _ended(self, entry: Entry, error: Exception) -> None:
        with self._changed:
            self._fail(entry, error)
            self._advance()

    def _fail(self, entry: Entry, error: Exception) -> None:
        """End a load; what waits for it gets the error."""
        self._counts["failures"] += 1
        entry.error = str(error) if isinstance(error, AFMError) else repr(error)
        # The frames that errors have passed through would keep arrays.
        error.__cause__ = error.__context__ = None
        error = error.with_traceback(None)
        self._refuse(list(entry.waiting), error)
        self._forget(entry)

    def _refuse(self, leases: Iterable[Lease], error: Exception) -> None:
        for lease in leases:
            lease._error = error
            lease._entry.waiting.discard(lease)

    def _advance(self) -> None:
        """Start the loads for which there is room."""
        while self._abandoned:
            self._returned(self._abandoned.popleft())
        while self._queue:
            entry = next_load(self._queue, PATIENCE)
            if not entry.waiting:  # all that asked for it have gone
                self._forget(entry)
            elif self._make_room(entry):
                if entry is not self._queue[0]:
                    self._queue[0].passed += len(entry.waiting)
                self._queue.remove(entry)
                entry.state = "loading"
                assert self._executor is not None
                self._executor.submit(self._read, entry, entry.opened)
            elif entry in self._queue and not self._refuse_hasty():
                break
        self._drain()
        self._changed.notify_all()

    def _make_room(self, entry: Entry) -> bool:
        """Evict what has to go for a load; false while too much is in use, or when it has failed."""
        if self.budget is None:
            return True
        if (reason := never(entry, self._entries.values(), self.budget)) is not None:
            self._fail(entry, RequestError(reason))
            return False
        chosen = victims(entry, self._entries.values(), self.budget)
        for victim in chosen or ():
            self._counts["evictions"] += 1
            self._forget(victim)
            if victim.waiting:  # since it was draining
                self._start(victim)
        return chosen is not None

    def _refuse_hasty(self) -> bool:
        """Refuse those that must not wait for rows to end; returns whether there were any."""
        if any(e.state == "loading" for e in self._entries.values()):
            return False  # what is being read may turn out to be in no use
        hasty = [lease for e in self._queue for lease in e.waiting if not lease.patient]
        for lease in hasty:
            self._refuse(
                [lease],
                RequestError(
                    f"The adapter {lease.name} needs {lease._entry.nbytes:,} bytes, and adapters that are in "
                    f"use leave too little of the budget of {self.budget:,}. Let rows end, or raise the budget."
                ),
            )
        return bool(hasty)

    def _drain(self) -> None:
        """Choose what gives no new leases, so that a load which has waited for long gets its room."""
        head = self._queue[0] if self._queue else None
        leaving: list[Entry] = []
        if head is not None and self.budget is not None and head.passed >= PATIENCE:
            leaving = due(head, self._entries.values(), self.budget)
        for entry in self._entries.values():
            entry.draining = entry in leaving
            if entry.resident is not None and not entry.draining:
                self._grant_all(entry)

    def _forget(self, entry: Entry) -> None:
        """Back to registered: out of memory, and out of the queue. A sum without a name is gone."""
        if entry in self._queue:
            self._queue.remove(entry)
        entry.resident, entry.opened, entry.draining, entry.state = None, None, False, "registered"
        if self._entries.get(entry.key) is entry and not (
            isinstance(entry.key, str) or entry.waiting
        ):
            del self._entries[entry.key]
