"""Print a script with which a shell completes commands, flags, choices and files.

bash: `eval "$(afm-mlx completion bash)"` in ~/.bashrc.
zsh: the same in ~/.zshrc, after compinit; or a file `_afm-mlx` in a folder of $fpath.
fish: ~/.config/fish/completions/afm-mlx.fish.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from importlib import import_module

from afm_mlx.cli.argument_table import Argument
from afm_mlx.cli.parser import PROGRAM, add_arguments

SHELLS = ["bash", "zsh", "fish"]
ARGUMENTS: Mapping[str, Iterable[Argument]] = {
    "options": [
        Argument(
            "shell",
            SHELLS,
            "the shell that reads the script: bash and zsh with eval in their rc file, fish in a file of "
            "~/.config/fish/completions",
        )
    ]
}


def run(args: argparse.Namespace) -> None:
    import shtab

    print(shtab.complete(whole_parser(), shell=args.shell))


def whole_parser() -> argparse.ArgumentParser:
    """One parser with all commands and their actions, which otherwise exist one at a time."""
    from afm_mlx.cli import COMMANDS, DESCRIPTION

    parser = argparse.ArgumentParser(prog=PROGRAM, description=DESCRIPTION)
    parser.add_argument("--version", action="store_true", help="show the version")
    _add_commands(parser, COMMANDS, "afm_mlx.cli")
    return parser


def _add_commands(parser: argparse.ArgumentParser, commands: Mapping[str, str], room: str) -> None:
    from shtab import FILE

    children = parser.add_subparsers(metavar="COMMAND")
    for name, line in commands.items():
        command = import_module(f"{room}.{name}")
        child = children.add_parser(name, help=line, description=line)
        if actions := getattr(command, "ACTIONS", None):
            _add_commands(child, actions, f"{room}.{name}")
            continue
        add_arguments(child, command)
        for action in child._actions:
            # Any text may be a path, or the name of a model that is one.
            if action.nargs != 0 and action.type is None and action.choices is None:
                action.complete = FILE  # type: ignore[attr-defined]
