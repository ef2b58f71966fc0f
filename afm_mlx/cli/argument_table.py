"""Arguments as tables: a row for each, by the titles that --help shows them under."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

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
        self.flags = flags.split()
        first_long = next((flag for flag in self.flags if flag.startswith("--")), self.flags[0])
        self.name = first_long.removeprefix("--").replace("-", "_")
        self.options = {"help": help, "default": default, **others}
        if takes in (FLAG, SWITCH):
            self.options |= {"action": takes, "default": False if takes == FLAG else default}
        elif isinstance(takes, list):
            self.options["choices"] = takes
        elif takes is not None:
            self.options["type"] = takes


Tables = Mapping[str, Iterable[Argument]]


class Unavailable(argparse.Action):
    """A flag of mlx-lm that has no effect here: it is refused, never ignored."""

    def __init__(self, option_strings: Sequence[str], dest: str, reason: str, **options: Any):
        hidden = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        super().__init__(option_strings, dest, **options | hidden)
        self.reason = reason

    def __call__(self, *args: Any) -> NoReturn:
        raise argparse.ArgumentError(self, self.reason)


def unavailable(flags: str, reason: str, **others: Any) -> Argument:
    """A row for a flag of mlx-lm that is refused; `others` may hold `nargs`, as mlx-lm has it."""
    return Argument(flags, action=Unavailable, reason=reason, **others)


def add_tables(parser: argparse.ArgumentParser, tables: Tables) -> None:
    """Add tables of arguments to a parser, by their titles in --help; "options" is argparse's own."""
    for title, rows in tables.items():
        group = parser if title == "options" else parser.add_argument_group(title)
        for row in rows:
            group.add_argument(*row.flags, **row.options)


def flag_of(name: str) -> str:
    """The flag of an argument's name: `--learning-rate` of `learning_rate`."""
    return f"--{name.replace('_', '-')}"
