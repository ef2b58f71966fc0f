"""Arguments of the commands: from a YAML file, from the command line, and checked either way.

Command line beats YAML beats defaults. Nothing here imports MLX.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from afm_mlx import __version__
from afm_mlx.cli.argument_table import FLAG, Argument, Unavailable, add_tables, flag_of
from afm_mlx.errors import AFMError, did_you_mean, named, shown

PROGRAM = "afm-mlx"
MAX_INTEGER = 2**31 - 1
"""The largest integer that arguments take by default: MLX counts a dimension's elements in int32."""
MAX_ROWS = 4096
"""The most rows of a batch."""
MAX_NUMBER = 1e30
"""The largest number that arguments take by default: float32 ends at 3e38."""


class UsageError(AFMError):
    """Arguments that can't be used."""


def check_text(where: str, value: Any) -> None:
    """Refuse texts that file systems, tokenizers and terminals don't take, in lists and maps too.

    Raises:
        UsageError: for a NUL, or half of a surrogate pair, as which Python holds bytes of the command line that
            are no UTF-8.
    """
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple):
        for item in value:
            check_text(where, item)
    elif isinstance(value, str):
        if "\0" in value:
            raise UsageError(f"{where} has a NUL character in {shown(value)}; leave it out.")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise UsageError(
                f"{where} is not valid UTF-8: {shown(value)}. Give it in UTF-8; a file may have to be renamed."
            ) from None


class Parser(argparse.ArgumentParser):
    """Raises `UsageError` where argparse would print its usage and exit."""

    def __init__(self, **options: Any):
        # An abbreviation that works today would be ambiguous once a flag is added.
        super().__init__(
            allow_abbrev=False,
            **{"formatter_class": _HelpFormatter, **options},
        )

    def error(self, message: str) -> NoReturn:
        message = message.rstrip(".")
        if missing := re.fullmatch(r"argument \S*?(--[\w-]+)\S*: expected .*argument", message):
            # argparse takes such a text for another option.
            message += f"; one that starts with a dash is written {missing[1]}=TEXT"
        raise UsageError(f"{message}. {self.prog} --help explains the arguments.")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        args, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            known = [
                name
                for action in self._actions
                if action.help is not argparse.SUPPRESS
                for name in action.option_strings
            ]
            self.error(
                f"unrecognized arguments: {named(' '.join(unknown))}{did_you_mean(flag, known)}"
            )
        return args

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(
                action,
                f"invalid choice: {shown(value)}{did_you_mean(str(value), choices)} "
                f"(choose from {', '.join(choices)})",
            )

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        flag = "/".join(action.option_strings) or action.metavar or action.dest
        check_text(str(flag), arg_strings)
        dashes = arg_strings == ["--"] and action.option_strings
        values = super()._get_values(action, arg_strings)
        if dashes and values == []:  # before Python 3.13 `--option=--` loses its value
            values = self._get_value(action, "--")
            self._check_value(action, values)
            return [values] if action.nargs in ("+", "*") else values
        return values


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but for None, False and empty ones."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default == []:
            return action.help
        return super()._get_help_string(action)


def chosen_command(
    program: str,
    description: str,
    commands: Mapping[str, str],
    argv: Sequence[str],
    notes: str = "",
) -> str:
    """Return the command that a program's arguments begin with; without arguments, print the help.

    Args:
        program: what is typed before the command.
        description: of the program, for its help.
        commands: by their names, with a line about each.
        argv: what follows the program's name.
        notes: lines of the help behind the commands.

    Raises:
        SystemExit: after the help, which lists the commands, and after --version.
        UsageError: when they begin with no command.
    """
    if argv and argv[0] in commands:
        return argv[0]
    width = max(map(len, commands))
    table = "\n".join(f"  {name:<{width}}  {line}" for name, line in commands.items())
    parser = Parser(
        prog=program,
        usage=f"{program} [--version] COMMAND ...",
        description=description,
        epilog=f"commands:\n{table}\n\n{notes}{program} COMMAND --help shows the arguments of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", nargs="?", choices=commands, metavar="COMMAND", help="see below")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    parser.parse_args(argv or ["--help"])
    raise UsageError(
        f"{program} needs a command: {', '.join(commands)}. {program} --help explains them."
    )


_COMMON = [
    Argument(
        "-c --config",
        None,
        "take arguments from a YAML file: the same names, with _ for -; the command line has the last word",
        metavar="FILE.yaml",
    ),
    Argument("--debug", FLAG, "show the traceback of an error, for bug reports"),
]


def command_parser(name: str, command: ModuleType) -> Parser:
    """The parser of one command, with the arguments that all commands have.

    Args:
        name: name of the command.
        command: its module, see `parse`.
    """
    parser = Parser(prog=f"{PROGRAM} {name}", description=(command.__doc__ or "").split("\n\n")[0])
    add_arguments(parser, command)
    return parser


def add_arguments(parser: argparse.ArgumentParser, command: ModuleType) -> None:
    """Add all arguments of a command, those that every command has included."""
    add_tables(parser, {**command.ARGUMENTS, "options": [*command.ARGUMENTS["options"], *_COMMON]})


def parse(name: str, command: ModuleType, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of one command.

    Args:
        name: name of the command.
        command: its module. It has `ARGUMENTS`, see `add_tables`, and may have `ALTERNATIVES`: pairs of
            arguments that say the same thing, and what. One of a pair on the command line replaces the other
            in the file.
        argv: what follows the command's name.

    Raises:
        UsageError: for an argument, a key or a value that can't be used.
    """
    parser = command_parser(name, command)
    parser.set_defaults(command_line=shlex.join([PROGRAM, *name.split(), *argv]))  # for advice
    args = parser.parse_args(argv)
    alternatives = getattr(command, "ALTERNATIVES", ())
    if args.config is not None:
        values = _from_yaml(args.config, parser)
        drop_said_otherwise(values, args, alternatives)
        parser.set_defaults(**values)
        args = parser.parse_args(argv)
    for one, other, what in alternatives:
        if None not in (getattr(args, one), getattr(args, other)):
            names = [_shown_name(parser, name) for name in (one, other)]
            raise UsageError(f"{' and '.join(names)} both say {what}; choose one.")
    return args


def _shown_name(parser: Parser, name: str) -> str:
    """Return how help writes an argument: its flag, or the metavar of a positional one."""
    action = next(action for action in parser._actions if action.dest == name)
    return flag_of(name) if action.option_strings else str(action.metavar)


def drop_said_otherwise(
    values: dict[str, Any], args: argparse.Namespace, alternatives: Iterable[tuple[str, str, str]]
) -> None:
    """Take out of `values` each argument whose alternative `args` has; see `parse`."""
    for one, other, _ in alternatives:
        for given, name in ((one, other), (other, one)):
            if getattr(args, given) is not None:
                values.pop(name, None)


def _from_yaml(path: str, parser: Parser) -> dict[str, Any]:
    """The arguments that a file sets, by their names, checked as those of the command line are."""
    from afm_mlx.cli.yaml_config import read_yaml

    given = (
        (f"{path}, line {line}", name, value)
        for name, (value, line) in read_yaml(Path(path)).items()
    )
    return checked_arguments(
        given, parser, f"the names that {parser.prog} --help lists, with _ for -"
    )


def checked_arguments(
    given: Iterable[tuple[str, str, Any]], parser: Parser, known: str
) -> dict[str, Any]:
    """Arguments by their names, checked as those of the command line are.

    Args:
        given: where each argument stands, its name and its value.
        parser: has the arguments that are allowed.
        known: what they are, for messages.

    Raises:
        UsageError: for an unknown name, or a value that can't be used.
    """
    actions = {a.dest: a for a in parser._actions if a.dest not in ("help", "config", "command")}
    values = {}
    for where, name, value in given:
        if name not in actions:
            shown_names = [n for n, a in actions.items() if a.help is not argparse.SUPPRESS]
            raise UsageError(
                f"{where}: unknown key {named(name)}{did_you_mean(name, shown_names)}. Known are {known}."
            )
        # An empty value leaves the default, and what is not available may be declined.
        if value is None or (value is False and isinstance(actions[name], Unavailable)):
            continue
        values[name] = _checked(f"{where}: {name}", value, actions[name])
    return values


def _checked(where: str, value: Any, action: argparse.Action) -> Any:
    """A value of YAML as the command line would have given it."""
    if isinstance(action, Unavailable):
        raise UsageError(f"{where}: {action.reason}.")
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise UsageError(f"{where} is {shown(value)}; allowed are true and false.")
        return value
    if action.nargs in ("+", "*") or isinstance(action, argparse._AppendAction):
        return [
            _converted(where, v, action) for v in (value if isinstance(value, list) else [value])
        ]
    return _converted(where, value, action)


def _converted(where: str, value: Any, action: argparse.Action) -> Any:
    if action.type is boolean and isinstance(value, bool):
        return value
    if action.type is json_object and isinstance(value, dict):
        value = json.dumps(value)
    convert: Callable[[str], Any] = action.type if callable(action.type) else str
    is_text = isinstance(value, str)
    if convert is str and not is_text:
        raise UsageError(f"{where} is {shown(value)} ({type(value).__name__}); a string is needed.")
    try:
        converted = convert(value if is_text else repr(value))
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{where}: {error}.") from None
    except ValueError:
        kind = getattr(convert, "__name__", "value")
        raise UsageError(f"{where} is {shown(value)}; {kind} is needed.") from None
    if action.choices is not None and converted not in action.choices:
        allowed = ", ".join(map(str, action.choices))
        hint = did_you_mean(str(converted), map(str, action.choices))
        raise UsageError(f"{where} is {shown(value)}{hint}; allowed are {allowed}.")
    return converted


# -- types of arguments


def boolean(text: str) -> bool:
    """True, T, False or F in any case, as mlx-lm's `--verbose` takes them."""
    lowered = text.lower()
    if lowered not in ("true", "t", "false", "f"):
        raise argparse.ArgumentTypeError(f"{shown(text)} is neither True nor False")
    return lowered in ("true", "t")


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """An integer from `low` to `high`, which is `MAX_INTEGER` by default."""
    return _number(int, "an integer", low, high, MAX_INTEGER)


def number(low: float, high: float | None = None) -> Callable[[str], float]:
    """A finite number from `low` to `high`, which is `MAX_NUMBER` by default."""
    return _number(float, "a number", low, high, MAX_NUMBER)


def _number(
    kind: type, name: str, low: float, high: float | None, highest: float
) -> Callable[[str], Any]:
    allowed = f"{low} or more" if high is None else f"{low} to {high}"

    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{shown(text)} is not {name}; allowed is {allowed}"
            ) from None
        if high is None and value > highest:
            raise argparse.ArgumentTypeError(
                f"{named(text)} is out of range; allowed is {low} to {highest}"
            )
        if not low <= value <= (highest if high is None else high):
            raise argparse.ArgumentTypeError(f"{named(text)} is out of range; allowed is {allowed}")
        return value

    return convert


def positive(high: float | None = None) -> Callable[[str], float]:
    """A number over 0, up to `high`, which is `MAX_NUMBER` by default."""

    def convert(text: str) -> float:
        if (value := number(0, high)(text)) == 0:
            raise argparse.ArgumentTypeError(
                f"{named(text)} is out of range; allowed is more than 0"
            )
        return value

    return convert


def count_or_all(text: str) -> int:
    """A number of things, or -1 for all of them."""
    if (value := integer(-1)(text)) == 0:
        raise argparse.ArgumentTypeError("0 is out of range; allowed are 1 and more, or -1 for all")
    return value


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
        check_text("it", value)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{shown(text)} can't be used as JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not a JSON object, such as '{{\"key\": 1}}'"
        )
    return value
