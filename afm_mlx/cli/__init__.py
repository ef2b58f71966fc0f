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

import errno
import io
import itertools
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, TextIO

from afm_mlx import processor
from afm_mlx.cli.signals import Terminated, handled_signals
from afm_mlx.errors import AFMError, bounded, reason_of

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

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
    with _watched_output():
        _show_what_the_terminal_can()
        status = _ended(argv)
        problem = "" if status else _output_problem()
        return _fail(f"error: {problem}", USAGE_ERROR) if problem else status


def _ended(argv: list[str]) -> int:
    """Run a command to its end, whatever that is, and return its exit status."""
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
    """Standard output that records the error of a failed write.

    `problem` is empty as long as all was written, or its reader has closed the pipe.
    """

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
    """Stands for the standard output that a process was started without."""

    def write(self, data: ReadableBuffer) -> int:
        self.problem = "it is closed"
        return memoryview(data).nbytes


@contextmanager
def _watched_output() -> Iterator[None]:
    """Let standard output be an `_Output` while the context is open; not what a caller put in its place."""
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
        # What it could not write goes with it: Python flushes once more at exit.
        with suppress(OSError):
            sys.stdout.flush()
        sys.stdout = stream


def _output_problem() -> str:
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if not isinstance(raw, _Output) or not raw.problem:
        return ""
    return (
        f"standard output can't be written: {raw.problem}. What was to be printed is lost; give the command a "
        "file with room for it, a pipe or a terminal."
    )


def _replace_missing_streams() -> None:
    """Read nothing from standard streams that the process was started without, and write nothing to them."""
    for name, mode in (("stdin", "r"), ("stderr", "w")):
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
    except Exception as error:
        if debug or not (problem := _problem(error)):
            raise
        return _fail(f"error: {problem}", USAGE_ERROR)


def _problem(error: Exception) -> str:
    """What the user can mend; empty for a defect of ours."""
    if isinstance(error, AFMError):
        return bounded(str(error))
    if _is_out_of_memory(error):
        cause = f" ({bounded(str(error))})" if str(error) else ""  # Python's own has no text
        return (
            f"there is not enough memory{cause}. Ask for fewer or shorter rows, a smaller rank or a smaller "
            "model."
        )
    from afm_mlx.installation import package_problem

    if problem := package_problem(error):
        return bounded(problem)
    return bounded(str(error)) if _is_for_the_user(error) else ""


def _command(argv: list[str]) -> tuple[str, ModuleType, list[str]]:
    """Name, module and arguments of a command, or of an action of one, such as `adapter info`."""
    from afm_mlx.cli.parser import chosen_command

    if argv[:1] == ["run"]:
        argv = _spelled_out(argv[1:])
    name, rest = chosen_command(PROGRAM, DESCRIPTION, COMMANDS, argv, RUN), argv[1:]
    processor.check()
    command = import_module(f"{__name__}.{name}")
    if actions := getattr(command, "ACTIONS", None):
        action = chosen_command(f"{PROGRAM} {name}", command.__doc__ or "", actions, rest)
        return f"{name} {action}", import_module(f"{__name__}.{name}.{action}"), rest[1:]
    return name, command, rest


def _spelled_out(argv: list[str]) -> list[str]:
    """Translate the arguments of `run`, a command of other runtimes, into those of `chat` or `generate`."""
    words = list(itertools.takewhile(lambda word: not word.startswith("-") or word == "-", argv))
    if not words:
        return ["chat", *argv]
    return ["generate" if words[1:] else "chat", "--model", *argv]


def _is_for_the_user(error: Exception) -> bool:
    """True if the user can mend the cause: it is the system's error about a file, or one of a setting."""
    if isinstance(error, OSError):
        return bool(error.filename)
    if not isinstance(error, ValueError):
        return False
    from afm_mlx.kernels.settings import SettingError  # and NumPy, which may not run here

    return isinstance(error, SettingError)


def _problem_of_the_process(error: OSError) -> str:
    """What is wrong around the process, where the system's error names no file; empty when nothing is found."""
    if error.filename:
        return ""
    if problem := _output_problem():
        return problem
    try:
        os.getcwd()
    except OSError as gone:
        return f"the current folder is gone ({reason_of(gone)}). Go to another one, and call this again."
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{reason_of(error)}. Make room, or write to another disk."
    if "temporary directory" in reason_of(error):
        return f"{reason_of(error)}. Let TMPDIR name a folder that can be written."
    return ""


def _is_out_of_memory(error: Exception) -> bool:
    # MLX raises RuntimeError: of its allocators, and of Metal's queue.
    words = ("Unable to allocate", "Attempting to allocate", "Insufficient Memory")
    if isinstance(error, RuntimeError):
        return any(word in str(error) for word in words)
    return isinstance(error, MemoryError)


def _with_advice(what: str, error: BaseException) -> str:
    """What ended a command, followed by the error's notes, which say how to go on."""
    return " ".join([f"{what}.", *notes]) if (notes := getattr(error, "__notes__", ())) else what


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning in one line, without the place in the source that Python would name."""
    with suppress(OSError):
        print(f"{PROGRAM}: warning: {' '.join(str(message).split())}", file=sys.stderr, flush=True)


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
