"""End a command on Ctrl-C, SIGTERM (`kill`, a shutdown) and SIGHUP (a closed terminal).

The signals raise, so that partly written files are removed. Python runs handlers only between steps of the main
thread, which may be in native code for many seconds: a thread ends the process in that case. Signals that are
ignored (`nohup`, background jobs of a script) stay ignored.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

GRACE = 5.0
"""Seconds in which native code must return before the process is ended."""

_REPEATED = 1.0
"""Seconds in which a second signal counts as the first: `timeout` and terminals send two."""
_WATCHED = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class Terminated(BaseException):
    """Raised by SIGTERM and SIGHUP; `status` is the exit status that shells expect."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.status = 128 + number


@contextmanager
def handled_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise `Terminated` in the main thread; a second SIGTERM ends the process.

    Does nothing in other threads, and for signals that are ignored or that a program handles.
    """
    global _watch
    if threading.current_thread() is not threading.main_thread() or _watch is not None:
        yield
        return
    _watch = _Watch()
    try:
        yield
    finally:
        watch, _watch = _watch, None
        watch.end()


@contextmanager
def deferred_signals() -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C, SIGTERM or SIGHUP sets; raise when the context closes with it set.

    For work that polls the event and stops cleanly soon after. A second Ctrl-C interrupts at once. If the work
    finished anyway, it clears the event, and nothing is raised.
    """
    flag = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield flag  # only the main thread gets signals
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, previous)
        flag.set()

    watch, previous = _watch, signal.getsignal(signal.SIGINT)
    if previous is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    if watch is not None:
        watch.deferred_to = flag
    try:
        yield flag
        if flag.is_set():
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        if watch is not None and watch.number is not None:
            raise Terminated(watch.number) from None
        raise
    finally:
        if watch is not None:
            watch.deferred_to = None
        signal.signal(signal.SIGINT, previous)


class _Watch:
    """Signal handlers, and the thread that sees a signal before its handler runs."""

    def __init__(self) -> None:
        self.number: int | None = None  # number of the signal that a handler has taken
        self.deferred_to: threading.Event | None = None
        self._handled = [n for n in _WATCHED if signal.getsignal(n) == signal.SIG_DFL]
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._thread = threading.Thread(target=self._run, name="signals", daemon=True)
        self._thread.start()
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in self._handled:
            signal.signal(number, self._take)

    def end(self) -> None:
        for number in self._handled:
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(self._wakeup)
        os.write(self._writer, _END)
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            return  # repeated; the thread handles it
        self.number = number
        if self.deferred_to is None:
            raise Terminated(number)
        self.deferred_to.set()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        first, number = 0.0, 0  # when, and which
        while True:
            # The main thread is in charge once a handler ran, or if it defers signals.
            in_charge = self.number is not None or self.deferred_to is not None
            rest = max(0.0, first + GRACE - time.monotonic()) if number and not in_charge else None
            if not poll.poll(None if rest is None else rest * 1000):
                if self.number is not None or self.deferred_to is not None:
                    continue
                # The main thread is in native code. If this module was never imported, there are no temporary
                # files; an import could wait for the main thread.
                if files := sys.modules.get("afm_mlx.files"):
                    files.remove_places()
                stopped = Terminated(number)
                with suppress(OSError):
                    os.write(2, f"afm-mlx: {stopped}\n".encode())
                os._exit(stopped.status)
            data = os.read(self._reader, 256)
            if _END in data:
                return
            arrived = [n for n in data if n in self._handled]
            if not arrived:
                continue  # Ctrl-C, which has its own handler
            if not number:
                first, number = time.monotonic(), arrived[0]
            elif signal.SIGTERM in arrived and time.monotonic() - first > _REPEATED:
                os._exit(128 + signal.SIGTERM)


_END = b"\0"  # no signal has this number
_watch: _Watch | None = None
