"""The command line `afm-mlx`, which `python -m afm_mlx` is too.

Each command is a module with tables of `ARGUMENTS` and `run(args)`, or a module with several such `ACTIONS`. It
is imported when it is chosen, and imports MLX when it runs: help and usage errors come at once.

Exit status: 0 done, 1 if `doctor` found a fault, 2 for an error that the user can fix (one line on stderr),
130 after Ctrl-C, 143 after SIGTERM and 129 after SIGHUP (one line each) if something was left undone. A
server that let all answers finish was not interrupted, and exits with 0. Any other exception is a defect of
afm-mlx and keeps its traceback.
"""

from __future__ import annotations

import errno
import io
import itertools
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, TextIO

from afm_mlx import processor
from afm_mlx.cli.signals import Terminated, handled_signals
from afm_mlx.errors import AFMError, bounded, reason_of

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from afm_mlx.cli.arguments import Action, Command

PROGRAM = "afm-mlx"
DESCRIPTION = "Run Apple's on-device foundation-model architecture (AFM) locally, with MLX."
COMMANDS = {
    "generate": "continue a prompt",
    "chat": "talk with a model, turn by turn",
    "server": "serve a model to programs that speak OpenAI's, Anthropic's or Ollama's API",
    "convert": "make a model folder from a checkpoint or another folder",
    "lora": "train an adapter, or all float weights",
    "qat": "train a model for 2- or 4-bit weights (quantization-aware training)",
    "prune": "write a task mask of the feed-forward channels that a task needs, or remove experts",
    "sample": "sample answers from several adapters, and write the best for training",
    "adapter": "info, convert, verify, compose: show, convert, check or add up adapters",
    "bench": "measure tokens per second, memory, and the share of the memory bandwidth",
    "info": "show a model's sizes and format, and which kernels would run it here",
    "doctor": "test every kernel on this machine, and write a report",
    "embed": "compute vectors of texts",
    "perplexity": "measure how well a model predicts a text",
    "evaluate": "measure how many tasks of a test set a model solves",
    "completion": "print a completion script for bash, zsh or fish",
}
RUN = "afm-mlx run [MODEL] starts a chat; afm-mlx run MODEL TEXT generates one answer.\n"
USAGE_ERROR, INTERRUPTED = 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    Args:
        argv: arguments without the program's name; by default the process's.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    for name, mode in (("stdin", "r"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the process was started without it
            nothing = io.TextIOWrapper(io.FileIO(os.devnull, mode), encoding="utf-8")
            setattr(sys, name, nothing)
    with _watched_output():
        # A model may write any character, and a file's name may have invalid bytes: print ? for them.
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # a caller may have replaced it
                stream.reconfigure(errors="replace")
        status = _ended(argv)
        problem = "" if status else _output_problem()
        return _fail(f"error: {problem}", USAGE_ERROR) if problem else status


def _ended(argv: list[str]) -> int:
    """Run a command to its end, an interrupt or an error of the system; return the exit status."""
    try:
        with handled_signals(), warnings.catch_warnings():
            warnings.showwarning = _show_warning
            status = _run(argv)
            sys.stdout.flush()
        return status
    except BrokenPipeError:
        _discard(sys.stdout)  # the reader, such as `head`, has closed the pipe
        return 0
    except OSError as error:
        if problem := _problem_of_the_process(error):
            return _fail(f"error: {problem}", USAGE_ERROR)
        raise
    except KeyboardInterrupt as interrupt:
        return _fail(_with_advice("interrupted", interrupt), INTERRUPTED)
    except Terminated as stopped:
        return _fail(_with_advice(str(stopped), stopped), stopped.status)


class _Output(io.FileIO):
    """Standard output that records why a write failed, unless the reader closed the pipe."""

    problem = ""

    def write(self, data: ReadableBuffer) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            self.problem = reason_of(error)
            raise


class _NoOutput(_Output):
    """Standard output of a process that was started without one."""

    def write(self, data: ReadableBuffer) -> int:
        self.problem = "it is closed"
        return memoryview(data).nbytes


@contextmanager
def _watched_output() -> Iterator[None]:
    """Replace the process's standard output by an `_Output`; a caller's own `sys.stdout` stays."""
    stream = sys.stdout
    if stream is None:
        raw: _Output = _NoOutput(os.devnull, "w")
    elif stream is sys.__stdout__ and isinstance(stream, io.TextIOWrapper):
        stream.flush()
        raw = _Output(stream.fileno(), "w", closefd=False)
    else:
        yield
        return
    encoding = "utf-8" if stream is None else stream.encoding
    is_direct = stream is not None and (stream.line_buffering or stream.write_through)
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), encoding, line_buffering=is_direct)
    try:
        yield
    finally:
        # Drop what could not be written: Python flushes once more at exit.
        with suppress(OSError):
            sys.stdout.flush()
        sys.stdout = stream


def _output_problem() -> str:
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if not isinstance(raw, _Output) or not raw.problem:
        return ""
    return (
        f"standard output can't be written: {raw.problem}. The output is lost; give the command a file "
        "with room for it, a pipe or a terminal."
    )


def _run(argv: list[str]) -> int:
    from afm_mlx.cli.arguments import UsageError, parse, with_flags

    debug, names = False, list[str]()
    try:
        name, command, rest = _command(argv)
        args = parse(name, command, rest)
        debug, names = args.debug, list(vars(args))
        return command.run(args) or 0
    except SystemExit as done:  # --help, --version
        return int(done.code or 0)
    except UsageError as error:
        return _fail(f"error: {error}", USAGE_ERROR)
    except Exception as error:
        is_ours = isinstance(error, AFMError)
        problem = with_flags(error, names) if is_ours else _problem_of_others(error)
        if debug or not problem:
            raise
        return _fail(f"error: {bounded(problem)}", USAGE_ERROR)


def _problem_of_others(error: Exception) -> str:
    """Return what the user can fix about an error of Python or a library; empty for a defect of afm-mlx."""
    # MLX's allocators and Metal's queue raise RuntimeError.
    words = ("Unable to allocate", "Attempting to allocate", "Insufficient Memory")
    is_full = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    if is_full or isinstance(error, MemoryError):
        cause = f" ({bounded(str(error))})" if str(error) else ""  # MemoryError has no text
        return (
            f"there is not enough memory{cause}. Use fewer or shorter rows, a smaller rank or a smaller "
            "model."
        )
    from afm_mlx.installation import package_problem

    if problem := package_problem(error):
        return problem
    if isinstance(error, OSError):
        return str(error) if error.filename else ""
    if not isinstance(error, ValueError):
        return ""
    from afm_mlx.kernels.settings import SettingError  # imports NumPy, which may not run here

    return str(error) if isinstance(error, SettingError) else ""


def _command(argv: list[str]) -> tuple[str, Command, list[str]]:
    """Return a command's name, such as `adapter info`, the command, and its arguments, from `argv`."""
    from afm_mlx.cli.arguments import chosen_command

    if argv[:1] == ["run"]:  # as other runtimes have it
        texts = itertools.takewhile(lambda word: not word.startswith("-") or word == "-", argv[1:])
        spelled = {0: ["chat"], 1: ["chat", "--model"]}.get(len([*texts]), ["generate", "--model"])
        argv = spelled + argv[1:]
    name, rest = chosen_command(PROGRAM, DESCRIPTION, COMMANDS, argv, RUN), argv[1:]
    processor.check()
    command = import_module(f"{__name__}.{name}")
    if actions := getattr(command, "ACTIONS", None):
        summaries = {action: actions[action].summary for action in actions}
        action = chosen_command(f"{PROGRAM} {name}", command.__doc__ or "", summaries, rest)
        return f"{name} {action}", actions[action], rest[1:]
    return name, command, rest


def find_commands(name: str) -> dict[str, Command]:
    """Import the module of a command; return the command, or its actions, by name, such as `adapter info`."""
    command = import_module(f"{__name__}.{name}")
    actions: dict[str, Action] = getattr(command, "ACTIONS", {})
    return {f"{name} {action}": actions[action] for action in actions} or {name: command}


def _problem_of_the_process(error: OSError) -> str:
    """Return what is wrong around the process if an error names no file; empty if unknown."""
    if error.filename:
        return ""
    if problem := _output_problem():
        return problem
    try:
        os.getcwd()
    except OSError as gone:
        return (
            f"the current folder is gone ({reason_of(gone)}). Change to another one, and try again."
        )
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{reason_of(error)}. Free disk space, or write to another disk."
    if "temporary directory" in reason_of(error):
        return f"{reason_of(error)}. Set TMPDIR to a folder that can be written."
    return ""


def _with_advice(what: str, error: BaseException) -> str:
    """Return what ended a command, followed by the error's notes, which say how to go on."""
    return " ".join([f"{what}.", *notes]) if (notes := getattr(error, "__notes__", ())) else what


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning on one line, without the source line that Python would name."""
    with suppress(OSError):
        print(f"{PROGRAM}: warning: {' '.join(str(message).split())}", file=sys.stderr, flush=True)


def _fail(message: str, status: int) -> int:
    try:
        sys.stdout.flush()
    except OSError:  # the terminal is closed, say
        _discard(sys.stdout)
    try:
        print(f"{PROGRAM}{_rank()}: {' '.join(message.split())}", file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr)
    return status


def _rank() -> str:
    """Return which of several processes this is, for messages; empty for one that nothing launched."""
    rank = os.environ.get("MLX_RANK", "")
    return f" (rank {rank})" if rank.isdecimal() else ""


def _discard(stream: TextIO) -> None:
    # Python flushes once more at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
