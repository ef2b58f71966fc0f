"""Ctrl-C in a chat."""

import signal

import pytest

from afm_mlx.cli.chat.loop import Interrupts


def ctrl_c():
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_counts_once_and_only_where_it_is_allowed():
    before = signal.getsignal(signal.SIGINT)
    cleaned = False
    with Interrupts() as interrupts:
        ctrl_c()
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt), interrupts.allowed():
                try:
                    ctrl_c()
                finally:
                    ctrl_c()
                    cleaned = True
            ctrl_c()
    assert cleaned
    assert signal.getsignal(signal.SIGINT) is before


def test_an_ignored_ctrl_c_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts, interrupts.allowed():
            ctrl_c()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
