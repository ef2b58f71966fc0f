"""Arguments as tables: one row for each."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from afm_mlx.cli.parser import Unavailable

FLAG = "store_true"
"""What an argument takes that has no value: it is given, or it is not."""
SWITCH = argparse.BooleanOptionalAction
"""What an argument takes that has no value and a second form, `--no-...`."""


class Argument:
    """One argument of a command, a row of a table.

    Args:
        flags: `--name`, and other names for it, separated by spaces. The first long one, with _ for -, is its
            `name`: in YAML files, and in what a parser returns.
        takes: a type (a function of the text), a list to choose from, `FLAG` or `SWITCH`; None for any text.
        help: what `--help` says of it.
        default: its value when it is not given; False for a `FLAG`.
        others: more options of `ArgumentParser.add_argument`, such as metavar and nargs.
    """

    def __init__(
        self,
        flags: str,
        takes: Any = None,
        help: str | None = None,
        default: Any = None,
        **others: Any,
    ):
        self._flags = flags.split()
        first_long = next((flag for flag in self._flags if flag.startswith("--")), self._flags[0])
        self.name = first_long.removeprefix("--").replace("-", "_")
        self._options = {"help": help, "default": default, **others}
        if takes in (FLAG, SWITCH):
            self._options |= {"action": takes, "default": False if takes == FLAG else default}
        elif isinstance(takes, list):
            self._options["choices"] = takes
        elif takes is not None:
            self._options["type"] = takes

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        parser.add_argument(*self._flags, **self._options)


def unavailable(flags: str, reason: str, **others: Any) -> Argument:
    """A row for a flag of mlx-lm that is refused; `others` may hold `nargs`, as mlx-lm has it."""
    return Argument(flags, action=Unavailable, reason=reason, **others)


def add_table(
    parser: argparse.ArgumentParser,
    rows: Iterable[Argument],
    title: str | None = None,
    description: str | None = None,
) -> None:
    """Add arguments to a parser; with a title, as a group that --help shows under it."""
    group = None if title is None else parser.add_argument_group(title, description)
    for row in rows:
        row.add_to(group or parser)


def flag_of(name: str) -> str:
    """The flag of an argument's name: `--learning-rate` of `learning_rate`."""
    return f"--{name.replace('_', '-')}"
