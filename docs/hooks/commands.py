"""Generate a page for each command from its parser."""

from __future__ import annotations

import argparse

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from afm_mlx.cli import COMMANDS, PROGRAM, find_commands
from afm_mlx.cli.arguments import Action, Command, Unavailable, command_parser


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, line in COMMANDS.items():
        page = f"# {PROGRAM} {name}\n\n{_sentence(line)}\n\n{_arguments_of(name)}"
        files.append(File.generated(config, f"commands/{name}.md", content=page))
    return files


def _arguments_of(name: str) -> str:
    parts = []
    for full_name, command in find_commands(name).items():
        if isinstance(command, Action):
            inner = _tables(full_name, command, level=3)
            title = f"## {PROGRAM} {full_name}\n\n{_sentence(command.summary)}"
            parts.append(f"{title}\n\n{inner}")
        else:
            parts.append(_tables(full_name, command))
    return "\n".join(parts)


def _tables(name: str, command: Command, level: int = 2) -> str:
    """Render the arguments of one command, grouped as in its --help."""
    parser = command_parser(name, command)
    lines: list[str] = []
    for group in parser._action_groups:
        shown = [a for a in group._group_actions if a.help != argparse.SUPPRESS]
        if shown:
            lines += ["#" * level + f" {(group.title or '').capitalize()}", ""]
            lines += ["| argument | |", "| --- | --- |", *(_row(parser, a) for a in shown), ""]
    refused = [a for a in parser._actions if isinstance(a, Unavailable)]
    if refused:
        lines += ["#" * level + " Refused", "", "| mlx-lm's argument | why |", "| --- | --- |"]
        lines += [f"| {_code(', '.join(a.option_strings))} | {_cell(a.reason)} |" for a in refused]
    return "\n".join(lines) + "\n"


def _row(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    formatter = parser._get_formatter()
    value = formatter._format_args(action, action.dest.upper()) if action.nargs != 0 else ""
    if action.option_strings:
        named = f"{', '.join(action.option_strings)} {value}".strip()
    else:
        named = value
    return f"| {_code(named)} | {_cell(formatter._expand_help(action))} |"


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


def _cell(text: str) -> str:
    for character in "\\|<*_`[":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())


def _sentence(line: str) -> str:
    return f"{line[:1].upper()}{line[1:]}."
