"""What is printed never commands a terminal."""

import sys

from afm_mlx.cli.output import note, print_answer

ORDERS = "a\x1b[2Jb\x9b1mc\x07\r\x7f\td\n"


def test_a_terminal_gets_no_orders_from_a_model(capsys, monkeypatch):
    for print_it, stream in ((print_answer, "stdout"), (note, "stderr")):
        print_it(ORDERS)
        assert getattr(capsys.readouterr(), stream[3:])[: len(ORDERS)] == ORDERS
        monkeypatch.setattr(getattr(sys, stream), "isatty", lambda: True)
        print_it(ORDERS)
        printed = getattr(capsys.readouterr(), stream[3:])
        assert printed.startswith("a\\x1b[2Jb\\x9b1mc\\x07\\x0d\\x7f\td\n")
