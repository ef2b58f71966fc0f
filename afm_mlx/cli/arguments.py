"""Arguments of the commands: tables of them, the parser, YAML files, and conversions of values.

The command line takes precedence over a YAML file, and the file over defaults. This module doesn't import MLX.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from afm_mlx import __version__
from afm_mlx.errors import (
    AFMError,
    ContextLengthError,
    IncompleteError,
    RequestError,
    did_you_mean,
    named,
    shown,
)

if TYPE_CHECKING:
    import yaml

PROGRAM = "afm-mlx"
MAX_INTEGER = 2**31 - 1
"""Largest integer that arguments take by default: MLX counts a dimension's elements in int32."""
MAX_ROWS = 4096
"""Maximum rows of a batch."""
MAX_NUMBER = 1e30
"""Largest number that arguments take by default: float32 ends at 3e38."""


class UsageError(AFMError):
    """An error about arguments on the command line or in a YAML file that can't be used."""


def check_text(where: str, value: Any) -> None:
    """Raise `UsageError` for NUL characters and lone surrogates in a text, or in lists and maps of texts."""
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


# -- tables

FLAG = "store_true"
"""`takes` of an argument without a value."""
SWITCH = argparse.BooleanOptionalAction
"""`takes` of an argument without a value that also has the form `--no-...`."""


class Argument:
    """One argument of a command: a row of a table.

    Args:
        flags: `--name` and its other spellings, separated by spaces. The first long one, with _ for -, is the
            argument's `name` in YAML files and in parsed arguments.
        takes: a function that converts the text, a list of choices, `FLAG` or `SWITCH`; pass None for any text.
        help, default, others: options of `ArgumentParser.add_argument`; a `FLAG`'s default is False.
    """

    def __init__(
        self,
        flags: str,
        takes: Callable[[str], object] | list[Any] | str | type[argparse.Action] | None = None,
        help: str | None = None,
        default: object = None,
        **others: object,
    ):
        self.flags = flags.split()
        first_long = next((flag for flag in self.flags if flag.startswith("--")), self.flags[0])
        self.name = first_long.removeprefix("--").replace("-", "_")
        self.options: dict[str, Any] = {"help": help, "default": default, **others}
        if takes in (FLAG, SWITCH):
            self.options |= {"action": takes, "default": False if takes == FLAG else default}
        elif isinstance(takes, list):
            self.options["choices"] = takes
        elif takes is not None:
            self.options["type"] = takes


Tables = Mapping[str, Iterable[Argument]]
"""Rows of arguments by the title under which --help shows them."""


class Action:
    """One command of a group such as `adapter`, with the attributes that a command's module has.

    `summary` is its line in lists of commands, `description` the text above the arguments in `--help`.
    """

    def __init__(
        self,
        summary: str,
        description: str,
        arguments: Tables,
        run: Callable[[argparse.Namespace], int | None],
    ):
        self.summary = summary
        self.__doc__ = description
        self.ARGUMENTS = arguments
        self.run = run


Command = ModuleType | Action
"""A command: `ARGUMENTS`, `run(args)`, its docstring, and maybe `ALTERNATIVES` (see `parse`)."""


class Unavailable(argparse.Action):
    """An action that raises `UsageError` for a flag of mlx-lm that would have no effect here."""

    def __init__(self, option_strings: Sequence[str], dest: str, reason: str, **options: Any):
        hidden = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        super().__init__(option_strings, dest, **options | hidden)
        self.reason = reason

    def __call__(self, *args: Any) -> NoReturn:
        raise argparse.ArgumentError(self, self.reason)


def unavailable(flags: str, reason: str, nargs: int | str | None = None) -> Argument:
    """Return the row of a refused flag of mlx-lm, which takes `nargs` values there."""
    return Argument(flags, action=Unavailable, reason=reason, nargs=nargs)


def add_tables(parser: argparse.ArgumentParser, tables: Tables) -> None:
    """Add tables of arguments, grouped by title in --help; "options" is argparse's own group."""
    for title, rows in tables.items():
        group = parser if title == "options" else parser.add_argument_group(title)
        for row in rows:
            group.add_argument(*row.flags, **row.options)


def flag_of(name: str) -> str:
    """Return the flag for an argument's name: `--learning-rate` for `learning_rate`."""
    return f"--{name.replace('_', '-')}"


def with_flags(error: Exception, names: Iterable[str]) -> str:
    """Return an error's message; where it is about a request, with flags for these names of arguments.

    Names of one word are left alone, because they may be plain English.
    """
    if not isinstance(error, RequestError | ContextLengthError | IncompleteError):
        return str(error)
    if not (known := "|".join(name for name in names if "_" in name)):
        return str(error)
    written = re.compile(rf'(?<![\w-])({known})(?:="(\w+)")?(?![\w-])')
    return written.sub(lambda m: f"{flag_of(m[1])} {m[2] or ''}".rstrip(), str(error))


# -- the parser


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `UsageError` where argparse would print its usage and exit."""

    def __init__(self, **options: Any):
        # An abbreviation that works today would be ambiguous once a flag is added.
        super().__init__(allow_abbrev=False, **{"formatter_class": _HelpFormatter, **options})

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
            shown_actions = [a for a in self._actions if a.help is not argparse.SUPPRESS]
            hint = did_you_mean(flag, [name for a in shown_actions for name in a.option_strings])
            self.error(f"unrecognized arguments: {named(' '.join(unknown))}{hint}")
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
    """Show defaults, except None, False and empty lists."""

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
    """Return the command that starts `argv`; print the program's help and exit if `argv` is empty.

    Args:
        program: name of the program, with a group such as `adapter` if there is one.
        description, notes: lines of the help before and after the list of commands.
        commands: a summary line for each command's name.
        argv: arguments after the program's name.

    Raises:
        UsageError: if `argv` doesn't start with a command.
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
        "take arguments from a YAML file: with the flags' names, - written as _; the command line takes "
        "precedence",
        metavar="FILE.yaml",
    ),
    Argument("--debug", FLAG, "show the traceback of an error, for bug reports"),
]


def command_parser(name: str, command: Command) -> Parser:
    """Build the parser of one command."""
    parser = Parser(prog=f"{PROGRAM} {name}", description=(command.__doc__ or "").split("\n\n")[0])
    add_arguments(parser, command)
    return parser


def add_arguments(parser: argparse.ArgumentParser, command: Command) -> None:
    """Add the arguments of a command, and those that every command has, to a parser."""
    add_tables(parser, {**command.ARGUMENTS, "options": [*command.ARGUMENTS["options"], *_COMMON]})


def parse(name: str, command: Command, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of one command.

    The command may have `ALTERNATIVES`: two arguments that set the same thing, and what they set. If one is on
    the command line, the other in the YAML file is ignored.

    Raises:
        UsageError: for an unknown argument or key, or a value that is not allowed.
    """
    parser = command_parser(name, command)
    parser.set_defaults(command_line=shlex.join([PROGRAM, *name.split(), *argv]))  # for advice
    args = parser.parse_args(argv)
    alternatives = getattr(command, "ALTERNATIVES", ())
    if args.config is not None:
        known = f"the names that {parser.prog} --help lists, with _ for -"
        settings = read_yaml(Path(args.config)).items()
        given = ((f"{args.config}, line {line}", key, value) for key, (value, line) in settings)
        values = checked_arguments(given, parser, known)
        drop_alternatives(values, args, alternatives)
        parser.set_defaults(**values)
        args = parser.parse_args(argv)
    for one, other, what in alternatives:
        if None not in (getattr(args, one), getattr(args, other)):
            actions = [a for name in (one, other) for a in parser._actions if a.dest == name]
            names = [flag_of(a.dest) if a.option_strings else str(a.metavar) for a in actions]
            raise UsageError(f"{' and '.join(names)} both say {what}; choose one.")
    return args


def drop_alternatives(
    values: dict[str, Any], args: argparse.Namespace, alternatives: Iterable[tuple[str, str, str]]
) -> None:
    """Remove from `values` each argument whose alternative (see `parse`) is set in `args`."""
    for one, other, _ in alternatives:
        for given, name in ((one, other), (other, one)):
            if getattr(args, given) is not None:
                values.pop(name, None)


def checked_arguments(
    given: Iterable[tuple[str, str, Any]], parser: Parser, known: str
) -> dict[str, Any]:
    """Check arguments that come from a file or a JSON object, and return their values by name.

    Args:
        given: for each argument its location for messages, its name and its value.
        parser: defines the allowed arguments.
        known: description of the allowed names for messages.
    """
    actions = {a.dest: a for a in parser._actions if a.dest not in ("help", "config", "command")}
    values = {}
    for where, name, value in given:
        if name not in actions:
            shown_names = [n for n, a in actions.items() if a.help is not argparse.SUPPRESS]
            raise UsageError(
                f"{where}: unknown key {named(name)}{did_you_mean(name, shown_names)}. Known are {known}."
            )
        # An empty value keeps the default, and an unavailable argument may be switched off.
        if value is None or (value is False and isinstance(actions[name], Unavailable)):
            continue
        values[name] = _checked(f"{where}: {name}", value, actions[name])
    return values


def _checked(where: str, value: Any, action: argparse.Action) -> Any:
    """Convert a value of YAML or JSON to what the command line would give."""
    if isinstance(action, Unavailable):
        raise UsageError(f"{where}: {action.reason}.")
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise UsageError(f"{where} is {shown(value)}; allowed are true and false.")
        return value
    if action.nargs in ("+", "*") or isinstance(action, argparse._AppendAction):
        values = value if isinstance(value, list) else [value]
        return [_converted(where, item, action) for item in values]
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


# -- YAML files

MAX_BYTES = 1 << 16
MAX_DEPTH = 20
MAX_DIGITS = 400
"""Maximum characters of a number. A float ends at 309 digits, and Python reads integers of 4,300."""

_WORDS: dict[str, bool | None] = dict.fromkeys(("", "~", "null"))
_WORDS |= {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
# Of text in lower case. YAML 1.1 wants a dot in a number with an exponent; people write 1e-5.
_INTEGER = re.compile(r"[-+]?(0x[\da-f][\da-f_]*|0o[0-7][0-7_]*|0b[01][01_]*|\d[\d_]*)", re.ASCII)
_FLOAT = re.compile(r"[-+]?(\d[\d_]*(\.\d*)?|\.\d+)(e[-+]?\d+)?|[-+]?\.inf|\.nan", re.ASCII)


class Setting(NamedTuple):
    """A value of a YAML file, and the number of its line."""

    value: Any
    line: int


def read_yaml(path: Path) -> dict[str, Setting]:
    """Read the `name: value` lines of a YAML file of at most `MAX_BYTES`.

    Lists and maps may be nested up to `MAX_DEPTH`. Anchors and aliases, with which a short file can stand for
    gigabytes, and tags, which name types, are refused. Values other than null, booleans and numbers are text.

    Raises:
        UsageError: names the file, the line, and what is wrong there.
    """
    import yaml

    from afm_mlx.files import read_file

    try:
        content = read_file(path, MAX_BYTES, pipes=True)
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"the config file {path} can't be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        _refuse_yaml(path, line, f"byte 0x{content[error.start]:02x} is not UTF-8")
    if found := yaml.reader.Reader.NON_PRINTABLE.search(text):
        line = text.count("\n", 0, found.start()) + 1
        _refuse_yaml(path, line, f"the character {shown(found[0])} is not allowed")
    # libyaml, which is in PyYAML's wheels, reads thousands of brackets in milliseconds.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    reader = loader(text)
    try:
        _check_events(path, reader)
        root = yaml.compose(text, loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        _refuse_yaml(path, mark.line + 1, error.problem or error.context)
    except UsageError:
        raise
    except (ValueError, OverflowError):  # of `chr`, in the loader that is written in Python
        _refuse_yaml(path, reader.line + 1, "an escape stands for no character")
    if root is None or (isinstance(root, yaml.ScalarNode) and _yaml_value(path, root) is None):
        return {}
    if not isinstance(root, yaml.MappingNode):
        _refuse_yaml(path, root.start_mark.line + 1, "'name: value' lines are needed")
    return _yaml_map(path, root)


def _check_events(path: Path, reader: yaml.SafeLoader) -> None:
    """Raise `UsageError` for anchors, aliases, tags, deep nesting and a second document."""
    import yaml

    depth = documents = 0
    while reader.check_event():
        event = reader.get_event()
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            problem = "anchors (&) and aliases (*) are not taken; write the value out"
            _refuse_yaml(path, line, problem)
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                _refuse_yaml(path, line, "a second document begins; one is allowed")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent):
            if event.tag is not None:
                _refuse_yaml(path, line, f"the tag {shown(event.tag)} is not taken; leave it out")
            depth += isinstance(event, yaml.CollectionStartEvent)
            if depth > MAX_DEPTH:
                _refuse_yaml(path, line, f"lists and maps are nested deeper than {MAX_DEPTH}")


def _yaml_map(path: Path, node: yaml.MappingNode) -> dict[str, Setting]:
    import yaml

    found: dict[str, Setting] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            _refuse_yaml(path, line, "a name is needed before a colon, not a list or map")
        check_text(f"the config file {path}, line {line},", key.value)
        if key.value in found:
            first = found[key.value].line
            _refuse_yaml(path, line, f"{shown(key.value)} is there already, in line {first}")
        found[key.value] = Setting(_yaml_value(path, value), line)
    return found


def _yaml_value(path: Path, node: yaml.Node) -> Any:
    if node.id == "mapping":
        return {name: setting.value for name, setting in _yaml_map(path, node).items()}
    if node.id == "sequence":
        return [_yaml_value(path, item) for item in node.value]
    text, line = str(node.value), node.start_mark.line + 1
    check_text(f"the config file {path}, line {line},", text)
    lowered = text.lower()
    if node.style:  # in quotes, or a block of lines
        return text
    if lowered in _WORDS:
        return _WORDS[lowered]
    is_integer = _INTEGER.fullmatch(lowered)
    if not is_integer and not _FLOAT.fullmatch(lowered):
        return text
    if len(text) > MAX_DIGITS:
        _refuse_yaml(path, line, f"a number has {len(text):,} characters; allowed are {MAX_DIGITS}")
    digits = lowered.replace("_", "")
    if not is_integer:
        return float(digits.replace(".inf", "inf").replace(".nan", "nan"))
    # A leading zero has no special meaning since YAML 1.2.
    return int(digits, 0 if digits.lstrip("+-")[1:2] in ("x", "o", "b") else 10)


def _refuse_yaml(path: Path, line: int, problem: str) -> NoReturn:
    raise UsageError(f"the config file {path} is not valid YAML, line {line}: {problem}.")


# -- types of arguments


def boolean(text: str) -> bool:
    """Convert the text True, T, False or F, in any case, as mlx-lm's `--verbose` does."""
    lowered = text.lower()
    if lowered not in ("true", "t", "false", "f"):
        raise argparse.ArgumentTypeError(f"{shown(text)} is neither True nor False")
    return lowered in ("true", "t")


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """Return a converter of integers from `low` to `high`, by default `MAX_INTEGER`."""
    return _number(int, "an integer", low, high, MAX_INTEGER)


def number(low: float, high: float | None = None) -> Callable[[str], float]:
    """Return a converter of finite numbers from `low` to `high`, by default `MAX_NUMBER`."""
    return _number(float, "a number", low, high, MAX_NUMBER)


def _number(
    kind: type, name: str, low: float, high: float | None, highest: float
) -> Callable[[str], Any]:
    allowed = f"{low} or more" if high is None else f"{low} to {high}"

    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            problem = f"{shown(text)} is not {name}; allowed is {allowed}"
            raise argparse.ArgumentTypeError(problem) from None
        if not low <= value <= (highest if high is None else high):
            span = f"{low} to {highest}" if high is None and value > highest else allowed
            raise argparse.ArgumentTypeError(f"{named(text)} is out of range; allowed is {span}")
        return value

    return convert


def positive(high: float | None = None) -> Callable[[str], float]:
    """Return a converter of numbers above 0, up to `high`, by default `MAX_NUMBER`."""

    def convert(text: str) -> float:
        if (value := number(0, high)(text)) == 0:
            problem = f"{named(text)} is out of range; allowed is more than 0"
            raise argparse.ArgumentTypeError(problem)
        return value

    return convert


def count_or_all(text: str) -> int:
    """Convert a positive count, or -1 for all."""
    if (value := integer(-1)(text)) == 0:
        raise argparse.ArgumentTypeError("0 is out of range; allowed are 1 and more, or -1 for all")
    return value


def json_object(text: str) -> dict[str, Any]:
    """Convert the text of a JSON object."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
        check_text("it", value)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{shown(text)} can't be used as JSON: {error}") from None
    if not isinstance(value, dict):
        problem = f"{shown(text)} is not a JSON object, such as '{{\"key\": 1}}'"
        raise argparse.ArgumentTypeError(problem)
    return value
