"""Ctrl-C stops what is under way, and never the chat itself."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interrupts:
    """Lets Ctrl-C raise `KeyboardInterrupt` inside of `allowed` only, and once in each.

    Between, while an answer is put away or a message printed, there is nothing to stop; and a second Ctrl-C
    must not end what cleans up after the first. Outside of the main thread, signals are none of ours; and where
    Ctrl-C is ignored (`nohup`), it stays so.
    """

    def __init__(self) -> None:
        self._allowed = False

    def __enter__(self) -> Interrupts:
        self._previous = None
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _handle(self, *signal_and_frame: Any) -> None:
        if self._allowed:
            self._allowed = False
            raise KeyboardInterrupt

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Ctrl-C raises `KeyboardInterrupt` inside, once."""
        self._allowed = True
        try:
            yield
        finally:
            self._allowed = False
