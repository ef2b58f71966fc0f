"""What ends a command from outside; `test_kills.py` does it to real ones."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from afm_mlx.cli import info, main
from afm_mlx.cli.signals import Terminated, deferred_signals, handled_signals
from tests.tools.cli import ROOT, process

TERM, HUP, INT = signal.SIGTERM, signal.SIGHUP, signal.SIGINT


def send(number):
    os.kill(os.getpid(), number)
    time.sleep(0.01)  # the handler runs before the next line


@pytest.fixture
def handlers():
    """Restore the signal handlers of the test's process."""
    before = {number: signal.getsignal(number) for number in (TERM, HUP, INT)}
    yield before
    assert {number: signal.getsignal(number) for number in before} == before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(("number", "status"), [(TERM, 143), (HUP, 129)])
def test_the_exit_status_is_that_of_the_signal(monkeypatch, run, number, status):
    monkeypatch.setattr(info, "run", lambda args: send(number))
    assert run("info") == (status, "", f"afm-mlx: stopped by {number.name}\n")


@pytest.mark.parametrize("number", [HUP, TERM, INT])
def test_an_ignored_signal_stays_ignored(monkeypatch, run, number):
    """`nohup`, and jobs in the background of a script."""

    def signalled(args):
        send(number)
        with deferred_signals() as flag:
            send(number)
        assert not flag.is_set()

    monkeypatch.setattr(info, "run", signalled)
    before = signal.signal(number, signal.SIG_IGN)
    try:
        assert run("info") == (0, "", "")
    finally:
        signal.signal(number, before)


def test_a_programs_own_handlers_are_its_own(handlers, monkeypatch, run):
    seen = []
    monkeypatch.setattr(info, "run", lambda args: send(TERM))
    signal.signal(TERM, lambda *signal_and_frame: seen.append(TERM))
    assert run("info")[0] == 0
    signal.signal(TERM, handlers[TERM])
    assert seen == [TERM]


def test_other_threads_install_nothing(handlers, monkeypatch):
    seen = []

    def look(args):
        with deferred_signals() as flag:
            seen.append(({n: signal.getsignal(n) for n in handlers}, flag.is_set()))

    monkeypatch.setattr(info, "run", look)
    thread = threading.Thread(target=main, args=(["info"],))
    thread.start()
    thread.join()
    assert seen == [(handlers, False)]


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(("number", "raised"), [(TERM, Terminated), (INT, KeyboardInterrupt)])
def test_deferred_signals_raise_at_the_end(number, raised):
    done = False
    with pytest.raises(raised) as error, handled_signals(), deferred_signals() as flag:
        send(number)
        assert flag.is_set()
        if number == TERM:
            send(TERM)  # `timeout` sends two
        done = True
    assert done
    assert getattr(error.value, "status", 143) == 143


@pytest.mark.usefixtures("handlers")
def test_a_second_interrupt_does_not_wait():
    with pytest.raises(KeyboardInterrupt), handled_signals(), deferred_signals():
        send(INT)
        send(INT)
        raise AssertionError("must not be reached")


# It writes a file, does long work in native code or cleans up for long, and sends itself signals.
STUCK = """
import hashlib, os, signal, sys, threading, time
from afm_mlx.cli import signals
from afm_mlx.files import atomic_write
signals.GRACE, signals._REPEATED = 0.2, 0.05
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
with signals.handled_signals(), atomic_write(sys.argv[1]) as path:
    path.write_text("half")
    if sys.argv[2] == "native":
        hashlib.pbkdf2_hmac("sha256", b"", b"", (1 << 31) - 1)
    try:
        time.sleep(60)
    finally:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        time.sleep(60)
"""


@pytest.mark.parametrize("where", ["native", "clean-up"])
def test_neither_native_work_nor_a_long_clean_up_holds_a_process(tmp_path, where):
    done = process(tmp_path / "x.json", where, code=STUCK, timeout=30)
    assert done.returncode == 143
    if where == "native":
        assert done.stderr == "afm-mlx: stopped by SIGTERM\n"
        assert list(tmp_path.iterdir()) == []
    else:  # the next process removes it
        assert len(list(tmp_path.glob(".x.json-*"))) == 1


def test_a_closed_terminal_changes_no_exit_status():
    """Nothing can be printed any more."""
    reader, writer = os.pipe()
    os.close(reader)
    code = (
        "import os, signal\nfrom afm_mlx.cli import info, main\n"
        "def run(args):\n    os.kill(os.getpid(), signal.SIGHUP)\n    signal.pause()\n"
        "info.run = run\nraise SystemExit(main(['info']))"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=writer, cwd=ROOT)
    os.close(writer)
    assert done.returncode == 129
