"""Print a script with which a shell completes commands, flags, choices and files.

bash: `eval "$(afm-mlx completion bash)"` in ~/.bashrc.
zsh: the same in ~/.zshrc, after compinit; or a file `_afm-mlx` in a folder of $fpath.
fish: ~/.config/fish/completions/afm-mlx.fish.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from afm_mlx.cli.arguments import PROGRAM, Action, Argument, Command, Tables, add_arguments
from afm_mlx.loading.resolve import EMBEDDED_MODEL, resolve_model

SHELLS = ["bash", "zsh", "fish"]
_SHELL_HELP = (
    "the shell that reads the script: bash and zsh with eval in their rc file, fish in a file of "
    "~/.config/fish/completions"
)
ARGUMENTS: Tables = {"options": [Argument("shell", SHELLS, _SHELL_HELP)]}


def run(args: argparse.Namespace) -> None:
    import shtab

    print(shtab.complete(whole_parser(), shell=args.shell))


# What each shell runs to complete an adapter: the names in the folder of --model, then files.
_BASH = """
_afm_mlx_adapter_files() {
  local folder=@EMBEDDED@ i
  for ((i = 1; i + 1 < COMP_CWORD; i++)); do
    [[ ${COMP_WORDS[i]} == --model ]] && folder=${COMP_WORDS[i + 1]}
  done
  [[ -d $folder/adapters ]] && compgen -W "$(ls -- "$folder/adapters")" -- "$1"
  compgen -f -- "$1"
}
"""
_ZSH = """
_afm_mlx_adapter_files() {
  local folder=@EMBEDDED@ i
  for ((i = 1; i + 1 < CURRENT; i++)); do
    [[ ${words[i]} == --model ]] && folder=${words[i + 1]}
  done
  local -a names=($folder/adapters/*(N/:t))
  compadd -a names
  _files
}
"""
_FISH = """
function _afm_mlx_adapter_files
  set -l folder @EMBEDDED@
  set -l words (commandline -opc)
  if set -l place (contains -i -- --model $words); and test $place -lt (count $words)
    set folder $words[(math $place + 1)]
  end
  for path in $folder/adapters/*/
    basename $path
  end
  __fish_complete_path (commandline -ct)
end
"""


def _adapters_and_files() -> dict[str, Any]:
    """Return shtab's description of an argument that is an adapter's name or path."""
    embedded = shlex.quote(str(resolve_model(EMBEDDED_MODEL)))
    scripts = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
    preamble = {shell: text.replace("@EMBEDDED@", embedded) for shell, text in scripts.items()}
    name = "_afm_mlx_adapter_files"
    return {"bash": name, "zsh": name, "fish": f"({name})", "preamble": preamble}


def whole_parser() -> argparse.ArgumentParser:
    """Build one parser of all commands and their actions."""
    from afm_mlx.cli import COMMANDS, DESCRIPTION

    parser = argparse.ArgumentParser(prog=PROGRAM, description=DESCRIPTION)
    parser.add_argument("--version", action="store_true", help="show the version")
    children = parser.add_subparsers(metavar="COMMAND")
    for name, line in COMMANDS.items():
        _add_command(children, name, line, import_module(f"afm_mlx.cli.{name}"))
    return parser


def _add_command(commands: Any, name: str, line: str, command: Command) -> None:
    """Add a command, or a group of them, to argparse's object of subcommands."""
    from shtab import FILE

    parser = commands.add_parser(name, help=line, description=line)
    actions: Mapping[str, Action] = getattr(command, "ACTIONS", {})
    if actions:
        children = parser.add_subparsers(metavar="COMMAND")
        for child, action in actions.items():
            _add_command(children, child, action.summary, action)
        return
    add_arguments(parser, command)
    for argument in parser._actions:
        # Any text may be a path, or the name of a model or adapter.
        if argument.nargs != 0 and argument.type is None and argument.choices is None:
            by_name = argument.dest in ("adapter", "adapter_path", "mask") and name != "lora"
            argument.complete = _adapters_and_files() if by_name else FILE
