"""What a row holds while it waits for an adapter and runs with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from afm_mlx.adapters.registry import Entry
from afm_mlx.adapters.resident import ResidentAdapter
from afm_mlx.errors import RequestError

if TYPE_CHECKING:
    from afm_mlx.adapters.scheduler import LoadScheduler


class Lease:
    """One row's hold on an adapter: from the request, through loading, until `release`.

    A lease that is forgotten without `release` ends when it is garbage-collected. `error` is why the adapter
    could not be loaded; None while that is not known.
    """

    def __init__(self, scheduler: LoadScheduler, entry: Entry, patient: bool):
        self._scheduler, self._entry, self.patient = scheduler, entry, patient
        self._resident: ResidentAdapter | None = None
        self.error: Exception | None = None

    @property
    def name(self) -> str:
        """What the adapter is called in listings."""
        return self._entry.name

    @property
    def ready(self) -> bool:
        """True if the adapter is in memory, and stays there until `release`."""
        return self._resident is not None

    @property
    def resident(self) -> ResidentAdapter:
        """The adapter.

        Raises:
            AFMError: what loading it has raised, or that it is not loaded yet.
        """
        if self.error is not None:
            raise self.error
        if self._resident is None:
            raise RequestError(f"The adapter {self.name} is not loaded yet; wait() for it.")
        return self._resident

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the adapter is ready or has failed; returns whether it is, within `timeout` seconds."""
        return self._scheduler.wait([self], timeout)

    def release(self) -> None:
        """Give the adapter back; once is enough."""
        self._scheduler.release(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.release()

    def __del__(self) -> None:
        # A garbage collector may run in the middle of anything: take note, and act on it later.
        if self._resident is not None:
            self._scheduler.abandon(self._entry)
