"""The command line `afm-mlx`, which `python -m afm_mlx` is too.

Each command is a module with tables of `ARGUMENTS` and `run(args)`, or a package of such modules with their
names in `ACTIONS`. It is imported when it is chosen, and it imports MLX when it runs: help and usage errors
come at once.

Exit status: 0 done, 1 when `doctor` found a fault, 2 for what the user got wrong (one line on stderr),
130 after Ctrl-C, 143 after SIGTERM and 129 after SIGHUP (one line each) when something was left undone: a
server that has let all answers finish was not interrupted, and has 0. Whatever else is raised is a defect of
ours and keeps its traceback.
"""

from __future__ import annotations

import io
import itertools
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import TextIO

from afm_mlx.cli.signals import Terminated, handled_signals
from afm_mlx.errors import AFMError, bounded

PROGRAM = "afm-mlx"
DESCRIPTION = "Run Apple's on-device foundation-model architecture (AFM) locally, with MLX."
COMMANDS = {
    "generate": "continue a prompt",
    "chat": "talk with a model, turn by turn",
    "server": "serve a model to programs that speak OpenAI's or Anthropic's API",
    "convert": "make a model folder of a checkpoint or of another folder",
    "lora": "train an adapter, or all float weights",
    "qat": "train weights that keep their quality in 2 or 4 bits",
    "adapter": "show, convert, check and add up adapters",
    "bench": "measure tokens per second, memory, and the share of the memory's speed",
    "info": "show what a model is, and what would run it here",
    "doctor": "test every kernel on this machine, and write a report",
    "perplexity": "measure how well a model predicts a text",
    "evaluate": "measure how many tasks of a test set a model solves",
    "completion": "print a script that completes commands in a shell",
}
RUN = "afm-mlx run [MODEL [TEXT]] is chat with a model; with TEXT, generate.\n"
USAGE_ERROR, INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    Args:
        argv: arguments without the program's name; those of the process by default.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    _replace_missing_streams()
    _show_what_the_terminal_can()
    try:
        with handled_signals():
            status = _run(argv)
            sys.stdout.flush()
        return status
    except BrokenPipeError:
        _discard(sys.stdout)  # the reader, such as `head`, has closed the pipe
        return 0
    except KeyboardInterrupt as interrupt:
        return _fail(_with_advice("interrupted", interrupt), INTERRUPTED)
    except Terminated as stopped:
        return _fail(_with_advice(str(stopped), stopped), stopped.status)


def _replace_missing_streams() -> None:
    """Read nothing from standard streams that the process was started without, and write nothing to them."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nothing = io.TextIOWrapper(io.FileIO(os.devnull, mode), encoding="utf-8")
            setattr(sys, name, nothing)


def _run(argv: list[str]) -> int:
    from afm_mlx.cli.parser import UsageError, parse

    debug = False
    try:
        name, command, rest = _command(argv)
        args = parse(name, command, rest)
        debug = args.debug
        return command.run(args) or 0
    except SystemExit as done:  # --help, --version
        return int(done.code or 0)
    except UsageError as error:
        return _fail(f"error: {error}", USAGE_ERROR)
    except (AFMError, OSError, ValueError) as error:
        if debug or not _is_for_the_user(error):
            raise
        return _fail(f"error: {bounded(str(error))}", USAGE_ERROR)
    except (MemoryError, RuntimeError) as error:
        if debug or not _is_out_of_memory(error):
            raise
        return _fail(
            f"error: there is not enough memory ({bounded(str(error))}). Ask for fewer or shorter rows, "
            "a smaller rank or a smaller model.",
            USAGE_ERROR,
        )


def _command(argv: list[str]) -> tuple[str, ModuleType, list[str]]:
    """Name, module and arguments of a command, or of an action of one, such as `adapter info`."""
    from afm_mlx.cli.parser import chosen_command

    if argv[:1] == ["run"]:
        argv = _spelled_out(argv[1:])
    name, rest = chosen_command(PROGRAM, DESCRIPTION, COMMANDS, argv, RUN), argv[1:]
    command = import_module(f"{__name__}.{name}")
    if actions := getattr(command, "ACTIONS", None):
        action = chosen_command(f"{PROGRAM} {name}", command.__doc__ or "", actions, rest)
        return f"{name} {action}", import_module(f"{__name__}.{name}.{action}"), rest[1:]
    return name, command, rest


def _spelled_out(argv: list[str]) -> list[str]:
    """Return the arguments of `chat` or `generate` that those of `run` stand for, as other runtimes have it."""
    words = list(itertools.takewhile(lambda word: not word.startswith("-") or word == "-", argv))
    if not words:
        return ["chat", *argv]
    return ["generate" if words[1:] else "chat", "--model", *argv]


def _is_for_the_user(error: Exception) -> bool:
    """Whether the user can mend the cause: it is one of our errors, or the system's about a file."""
    from afm_mlx.kernels.errors import SettingError

    if isinstance(error, OSError):
        return bool(error.filename)
    return isinstance(error, (AFMError, SettingError))


def _is_out_of_memory(error: Exception) -> bool:
    # MLX raises RuntimeError: of its allocators, and of Metal's queue.
    words = ("Unable to allocate", "Attempting to allocate", "Insufficient Memory")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def _with_advice(what: str, error: BaseException) -> str:
    """What ended a command, followed by the error's notes, which say how to go on."""
    return " ".join([f"{what}.", *notes]) if (notes := getattr(error, "__notes__", ())) else what


def _fail(message: str, status: int) -> int:
    try:
        sys.stdout.flush()
    except OSError:  # the terminal is closed, say
        _discard(sys.stdout)
    try:
        print(f"{PROGRAM}: {' '.join(message.split())}", file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr)
    return status


def _discard(stream: TextIO) -> None:
    # Python flushes once more at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _show_what_the_terminal_can() -> None:
    # A model may write any character, and a file's name may have half of one; one that the terminal lacks is no
    # reason to stop.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(
            stream, io.TextIOWrapper
        ):  # a caller may have put another stream in its place
            stream.reconfigure(errors="replace")
