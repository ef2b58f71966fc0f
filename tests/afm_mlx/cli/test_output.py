"""What is printed never commands a terminal; bars."""

import sys
from argparse import Namespace
from contextlib import ExitStack

from afm_mlx.cli.output import note, print_answer, progress_bar
from afm_mlx.cli.training_runs import Reporter
from afm_mlx.training.loop.trainer import Preparing, Stepped

ORDERS = "a\x1b[2Jb\x9b1mc\x07\r\x7f\td\n"


def test_a_terminal_gets_no_orders_from_a_model(capsys, monkeypatch):
    for print_it, stream in ((print_answer, "stdout"), (note, "stderr")):
        print_it(ORDERS)
        assert getattr(capsys.readouterr(), stream[3:])[: len(ORDERS)] == ORDERS
        monkeypatch.setattr(getattr(sys, stream), "isatty", lambda: True)
        print_it(ORDERS)
        printed = getattr(capsys.readouterr(), stream[3:])
        assert printed.startswith("a\\x1b[2Jb\\x9b1mc\\x07\\x0d\\x7f\td\n")


def test_what_is_computed_before_the_first_step_has_its_own_bar(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress_bar("training", "step") as bar, ExitStack() as bars:
        reporter = Reporter(Namespace(json=False), bar, bars)
        for done in range(3):
            reporter.on_event(Preparing("the reference", done, 2))
        captured = capsys.readouterr()
        assert captured.out == "Computing the reference\n"
        assert captured.err.count("preparing: 0batch") == 1
        reporter.on_event(Stepped(1, 0.5))
        assert "preparing" not in capsys.readouterr().err
