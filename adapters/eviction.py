"""Which adapters are evicted for another one: what a pool's budget decides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from afm_mlx.adapters.registry import Entry


def used(entries: Iterable[Entry]) -> int:
    """Bytes of the adapters in memory and of those that are being read."""
    return sum(entry.nbytes for entry in entries if entry.state in ("loading", "resident"))


def too_large(entry: Entry, entries: Iterable[Entry], budget: int) -> str | None:
    """Why an adapter can't be loaded, whatever rows give back; None when it can."""
    pinned = [other for other in entries if other.pinned and other is not entry]
    left = budget - sum(other.nbytes for other in pinned)
    if entry.nbytes <= left:
        return None
    needed = f"The adapter {entry.name} needs {entry.nbytes:,} bytes"
    if entry.nbytes > budget:
        return f"{needed}, and the pool's budget is {budget:,}. Raise the budget."
    return (
        f"{needed}, and {', '.join(other.name for other in pinned)}, which are pinned, leave {left:,} of the "
        f"budget of {budget:,}. Unpin one, or raise the budget."
    )


def next_load(queue: Sequence[Entry], patience: int) -> Entry:
    """The load that comes first of those that wait for memory.

    It is the one that most leases wait for: the more rows share what is in memory, the fewer loads there are.
    The oldest load goes before it once that has let `patience` leases pass, and so does one for a lease that
    does not wait for rows to end.

    Args:
        queue: at least one load, in the order of their requests.
        patience: leases of other adapters that the oldest load lets pass.
    """
    if queue[0].passed >= patience:
        return queue[0]
    hasty = (entry for entry in queue if not all(lease.patient for lease in entry.waiting))
    return next(hasty, None) or max(queue, key=lambda entry: len(entry.waiting))


def victims(entry: Entry, entries: Iterable[Entry], budget: int) -> list[Entry] | None:
    """The adapters to evict for one, least recently used first; None while too much is in use."""
    entries = list(entries)
    missing = used(entries) + entry.nbytes - budget
    free = [e for e in entries if e.resident is not None and not (e.pinned or e.held)]
    return _first(free, missing)


def to_drain(entry: Entry, entries: Iterable[Entry], budget: int) -> list[Entry]:
    """The adapters to evict, in use or not, for one that should wait no longer."""
    entries = list(entries)
    missing = used(entries) + entry.nbytes - budget
    here = [e for e in entries if e.resident is not None and not e.pinned]
    return _first(here, missing) or here


def _first(entries: list[Entry], missing: int) -> list[Entry] | None:
    """The least recently used of the entries, as many as hold the missing bytes; None when all hold fewer."""
    chosen = []
    # An adapter that drains stays chosen: else two that take turns in being used would both stay.
    for entry in sorted(entries, key=lambda e: (not e.draining, e.order)):
        if missing <= 0:
            break
        chosen.append(entry)
        missing -= entry.nbytes
    return None if missing > 0 else chosen
