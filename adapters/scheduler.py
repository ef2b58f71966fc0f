"""When adapters are read into memory, and when they are evicted: the loads of a pool.

    registered -> opening (headers) -> waiting (for memory) -> loading -> resident -> registered, when evicted

Notable choices:

- One thread of the scheduler's own reads files. Everything else happens in the callers' threads, under one lock
  that is never held while a file is read.
- What is leased or pinned is never evicted.
- Of the loads that wait for memory, the one that most leases wait for comes first, so that rows of one adapter
  run together. The oldest load lets `PATIENCE` leases of other adapters pass. Then it comes first, and the
  adapters that have to be evicted for it, least recently used first, drain: rows get no new leases of them.
- A resident adapter needs its files no more. Read again, they must hold what they held the first time.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from afm_mlx.adapters.eviction import next_load, to_drain, too_large, victims
from afm_mlx.adapters.lease import Lease
from afm_mlx.adapters.opening import Base, OpenAdapter, open_adapter, open_sum
from afm_mlx.adapters.registry import Entry, Files, Registry
from afm_mlx.errors import AFMError, CheckpointError, RequestError

PATIENCE = 64
"""Leases of other adapters that a load which waits for memory lets pass."""
LOOK_AGAIN = 0.1
"""Seconds after which a wait looks for leases that were forgotten: their end wakes nobody."""


class LoadScheduler:
    """Loads adapters for leases, and evicts others for them.

    Methods with an underscore are called under `lock`, but for `_open` and `_read`; others take it.

    Args:
        entries: the adapters of the pool.
        base: the model that they have to fit.
        budget: see `AdapterPool`.
    """

    def __init__(self, entries: Registry, base: Base, budget: int | None):
        self.lock = threading.Condition()
        self.counts = {"loads": 0, "hits": 0, "evictions": 0, "failures": 0}
        self._entries, self._base, self._budget = entries, base, budget
        self._queue: deque[Entry] = deque()  # loads that wait for memory
        self._abandoned: deque[Entry] = deque()  # entries whose leases were garbage-collected
        self._clock = itertools.count(1)
        self._executor: ThreadPoolExecutor | None = None
        self._closed = False

    # -- leases

    def lease(self, entry: Entry, patient: bool) -> Lease:
        """Ask for an adapter, and start loading it if it is not in memory; this does not wait.

        Args:
            entry: the adapter's entry; that of a new sum is entered in the registry.
            patient: whether it may wait until rows give other adapters back; if not, it fails.

        Raises:
            RequestError: when the pool is closed.
        """
        with self.lock:
            if self._closed:
                raise RequestError("The adapter pool is closed; make a new one.")
            self._entries.setdefault(entry.key, entry)
            lease = Lease(self, entry, patient)
            # A draining adapter is about to be evicted: a row waits until it is loaded again. A lease that must
            # not wait for rows takes it as long as it is here.
            if entry.resident is not None and not (entry.draining and patient):
                self.counts["hits"] += 1
                self._grant(entry, lease)
                if self._queue:
                    self._queue[0].passed += 1
            else:
                entry.waiting.add(lease)
                self._start(entry)
            self._advance()
        return lease

    def wait(self, leases: Iterable[Lease], timeout: float | None = None) -> bool:
        """Wait until one of the leases is ready or has failed; returns whether one has in `timeout` s."""
        leases = list(leases)
        end = None if timeout is None else time.monotonic() + timeout
        with self.lock:
            self._advance()
            while not any(lease.ready or lease.error is not None for lease in leases):
                left = LOOK_AGAIN if end is None else min(end - time.monotonic(), LOOK_AGAIN)
                if left <= 0:
                    return False
                self.lock.wait(left)
                if self._abandoned or (self._queue and not self._queue[0].waiting):
                    self._advance()  # not always, for it wakes others that wait
            return True

    def release(self, lease: Lease) -> None:
        """End a lease, or the wait for it."""
        with self.lock:
            entry = lease._entry
            entry.waiting.discard(lease)
            if lease._resident is not None:
                lease._resident = None
                self._returned(entry)
            elif lease._error is None:
                lease._error = RequestError(f"The lease of the adapter {entry.name} was released.")
            self._advance()

    def abandon(self, entry: Entry) -> None:
        """Take note of a lease that was garbage-collected; this takes no lock, and can be called anywhere."""
        self._abandoned.append(entry)

    def _grant(self, entry: Entry, lease: Lease) -> None:
        lease._resident = entry.resident
        entry.waiting.discard(lease)
        entry.held += 1
        entry.order = next(self._clock)

    def _grant_all(self, entry: Entry) -> None:
        for lease in list(entry.waiting):
            self._grant(entry, lease)

    def _refuse(self, leases: Iterable[Lease], error: Exception) -> None:
        for lease in list(leases):
            lease._error = error
            lease._entry.waiting.discard(lease)

    def _returned(self, entry: Entry) -> None:
        entry.held -= 1
        entry.order = next(self._clock)
        if self._closed and not entry.held:
            self._forget(entry)

    # -- memory

    def advance(self) -> None:
        """Take note of forgotten leases, and start the loads that there is memory for."""
        with self.lock:
            self._advance()

    def unload(self, entries: Collection[Entry]) -> None:
        """Drop adapters from memory, and their pins.

        Raises:
            RequestError: when rows use one of them or wait for it; all stay as they are.
        """
        with self.lock:
            self._advance()
            for entry in entries:
                if entry.in_use:
                    raise RequestError(
                        f"The adapter {entry.name} is in use: {entry.held} rows run with it or are about to, "
                        f"and {len(entry.waiting)} wait for it. Let them end, or cancel them."
                    )
            for entry in entries:
                entry.pinned, entry.dropped = False, True
                if entry.state not in ("opening", "loading"):  # else it is dropped once it is read
                    self._forget(entry)
            self._advance()

    def close(self) -> None:
        """End the loading thread, fail what waits, and drop what no row uses."""
        with self.lock:
            self._closed = True
            for entry in list(self._entries.values()):
                self._refuse(entry.waiting, RequestError("The adapter pool was closed."))
                if not entry.held:
                    self._forget(entry)
            self.lock.notify_all()
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(cancel_futures=True)

    def _advance(self) -> None:
        """Start the loads that there is memory for."""
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
                self._in_thread(self._read, entry, self._entries.files(entry), entry.opened)
            elif entry in self._queue and not self._refuse_hasty():
                break
        self._drain()
        self.lock.notify_all()

    def _make_room(self, entry: Entry) -> bool:
        """Evict what has to go for a load; false while too much is in use, or when it has failed."""
        if self._budget is None:
            return True
        if (reason := too_large(entry, self._entries.values(), self._budget)) is not None:
            self._fail(entry, RequestError(reason))
            return False
        chosen = victims(entry, self._entries.values(), self._budget)
        for victim in chosen or ():
            self.counts["evictions"] += 1
            self._forget(victim)
            if victim.waiting:  # since it was draining
                self._start(victim)
        return chosen is not None

    def _refuse_hasty(self) -> bool:
        """Refuse the leases that must not wait for rows to end; returns whether there were any."""
        if any(e.state == "loading" for e in self._entries.values()):
            return False  # what is being read may turn out to be in no use
        hasty = [lease for e in self._queue for lease in e.waiting if not lease.patient]
        for lease in hasty:
            self._refuse(
                [lease],
                RequestError(
                    f"The adapter {lease.name} needs {lease._entry.nbytes:,} bytes, and adapters that are in "
                    f"use leave too little of the budget of {self._budget:,}. Let rows end, or raise the "
                    "budget."
                ),
            )
        return bool(hasty)

    def _drain(self) -> None:
        """Choose the adapters that drain, so that a load which has waited for long gets its memory."""
        head = self._queue[0] if self._queue else None
        leaving: list[Entry] = []
        if head is not None and self._budget is not None and head.passed >= PATIENCE:
            leaving = to_drain(head, self._entries.values(), self._budget)
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

    # -- loading

    def _start(self, entry: Entry) -> None:
        if entry.state == "registered":
            entry.state, entry.passed, entry.dropped = "opening", 0, False
            self._in_thread(self._open, entry, self._entries.files(entry))

    def _in_thread(self, load: Callable[..., None], entry: Entry, *arguments: Any) -> None:
        """Have the loading thread call `load`, whose error is the load's: rows wait for it, whatever it is."""

        def run() -> None:
            try:
                load(entry, *arguments)
            except Exception as error:
                with self.lock:
                    self._fail(entry, error)
                    self._advance()

        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="afm-mlx adapters")
        self._executor.submit(run)

    def _open(self, entry: Entry, files: Files) -> None:
        """In the loading thread: read headers, and queue for memory."""
        opened = self._opened(entry, files)
        with self.lock:
            if not self._closed:
                entry.opened, entry.nbytes, entry.state = opened, opened.nbytes, "waiting"
                self._queue.append(entry)
            self._advance()
            entry.opened = None  # other formats are read whole, and what waits must take no memory

    def _opened(self, entry: Entry, files: Files) -> OpenAdapter:
        if isinstance(files, Path):
            return open_adapter(files, self._base)
        parts = [(open_adapter(file, self._base), weight) for file, weight in files]
        return open_sum(parts, self._base, entry.name)

    def _read(self, entry: Entry, files: Files, opened: OpenAdapter | None) -> None:
        """In the loading thread: read the numbers; `opened` is None after a wait for memory."""
        opened = opened or self._opened(entry, files)
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
        with self.lock:
            self.counts["loads"] += 1
            entry.error, entry.fingerprint = None, resident.fingerprint
            entry.nbytes, entry.order = resident.nbytes, next(self._clock)
            entry.resident, entry.state = resident, "resident"
            self._grant_all(entry)  # before it could be evicted
            if (self._closed or entry.dropped) and not entry.held:
                self._forget(entry)
            self._advance()

    def _fail(self, entry: Entry, error: Exception) -> None:
        """End a load; what waits for it gets the error."""
        self.counts["failures"] += 1
        entry.error = str(error) if isinstance(error, AFMError) else repr(error)
        # The frames that errors have passed through would keep arrays.
        error.__cause__ = error.__context__ = None
        error = error.with_traceback(None)
        self._refuse(entry.waiting, error)
        self._forget(entry)
