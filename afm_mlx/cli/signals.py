"""What ends a command from outside: Ctrl-C, SIGTERM (`kill`, a shutdown), SIGHUP (a closed terminal).

They raise, so that what is half written is removed on the way out. Python runs handlers between two steps of
its own in the main thread, and that may be in a product of many seconds: a thread looks after that. A signal
that is ignored (`nohup`, jobs in a script's background) stays so.
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
"""Seconds that native work has to end in, before the process ends within it."""

_REPEATED = (
    1.0  # seconds in which a signal is the first one again: `timeout` and terminals send two
)
_WATCHED = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class Terminated(BaseException):
    """SIGTERM or SIGHUP came.

    Attributes:
        number: number of the signal.
        status: the exit status that shells expect.
    """

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number
        self.status = 128 + number


@contextmanager
def handled_signals() -> Iterator[None]:
    """Within it SIGTERM and SIGHUP raise `Terminated` in the main thread; a second SIGTERM ends the process.

    Nothing is changed in other threads, and for signals that are ignored or that a program has handlers for.
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

    For work that polls the event and can stop cleanly soon after. A second Ctrl-C interrupts at once. Work that
    has finished anyway clears the event; then nothing is raised.
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
    """Handlers of signals, and the thread that learns of a signal before its handler runs."""

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
            return  # a repetition, which the thread knows of
        self.number = number
        if self.deferred_to is None:
            raise Terminated(number)
        self.deferred_to.set()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        first, number = 0.0, 0  # when, and which
        while True:
            # The main thread is in charge once a handler ran, or where it said that it comes to an end soon.
            in_charge = self.number is not None or self.deferred_to is not None
            rest = max(0.0, first + GRACE - time.monotonic()) if number and not in_charge else None
            if not poll.poll(None if rest is None else rest * 1000):
                if self.number is None and self.deferred_to is None:
                    _end_now(number)
                continue
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


def _end_now(number: int) -> None:
    """End the process while its main thread is somewhere in native code."""
    # What was never imported has made no temporary; an import could wait for the main thread.
    if files := sys.modules.get("afm_mlx.files"):
        files.remove_places()
    stopped = Terminated(number)
    with suppress(OSError):
        os.write(2, f"afm-mlx: {stopped}\n".encode())
    os._exit(stopped.status)
