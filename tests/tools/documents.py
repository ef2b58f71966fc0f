"""The blocks of a page, and a reader who runs them one after the other in a folder of their own.

A block of `python` shows what it prints in the block of `text` behind it, or in lines that begin with `# `; a
command of a `console` block in the lines below it. A block behind a line with a file's name only is that file.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import io
import itertools
import os
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from afm_mlx.cli import _command, main
from afm_mlx.cli.arguments import parse

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^(?:`([\w.]+)`:\n\n)?( *)```(\w*)\n(.*?)^\2```$", re.S | re.M)
LANGUAGES = ("console", "python", "text")


@dataclass(frozen=True)
class Block:
    """A fenced block: a `file` of this name, or code with its `output`, the block of text right behind it."""

    language: str
    text: str
    file: str | None = None
    output: str | None = None


def page_blocks(text: str) -> list[Block]:
    """All blocks of a page but those that are another's output."""
    found: list[Block] = []
    end = 0
    for fence in _FENCE.finditer(text):
        file, _, language, content = fence.groups()
        content = textwrap.dedent(content)
        follows = found and found[-1].language == "python" and not text[end : fence.start()].strip()
        if language == "text" and follows:
            found[-1] = Block("python", found[-1].text, output=content)
        else:
            found.append(Block(language, content, file))
        end = fence.end()
    return found


def commands_of(block: Block) -> Iterator[tuple[str, str]]:
    """The commands of a console block, without comments, each with what it is said to print."""
    for part in re.split(r"^\$ ", block.text.replace("\\\n", " "), flags=re.M)[1:]:
        line, _, output = part.partition("\n")
        yield line.split("  #")[0].rstrip(), output


class Reader:
    """Runs the blocks of a page in the current folder.

    Args:
        captured: pytest's `capsys`.
        not_run: why commands and code that hold a text can't run here, by that text. Commands of ours are
            parsed all the same, and code is compiled.
        replace: texts that are others here, such as a server's address.
    """

    def __init__(
        self,
        captured: Any,
        not_run: Mapping[str, str],
        replace: Callable[[str], str] = lambda text: text,
    ):
        self._captured = captured
        self._not_run = not_run
        self._replace = replace
        self._names: dict[str, Any] = {"__name__": "page"}
        self.used: set[str] = set()

    def read(self, text: str) -> None:
        """Run a page; raise for a block that fails, or prints something else than it shows."""
        with asyncio.Runner() as loop:
            for block in page_blocks(text):
                assert block.language in LANGUAGES, f"a block of {block.language!r}:\n{block.text}"
                if block.file:
                    Path(block.file).write_text(block.text)
                elif block.language == "python":
                    self._run_python(block, loop)
                elif block.language == "console":
                    for command, output in commands_of(block):
                        self._run_command(command, output)

    def _is_left_out(self, text: str) -> bool:
        reasons = [part for part in self._not_run if part in text]
        self.used.update(reasons)
        return bool(reasons)

    def _run_python(self, block: Block, loop: asyncio.Runner) -> None:
        code = compile(
            self._replace(block.text), "page", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, True
        )
        if self._is_left_out(block.text):
            return
        result = eval(code, self._names)
        if inspect.iscoroutine(result):
            loop.run(result)
        comments = [line[2:] for line in block.text.splitlines() if line.startswith("# ")]
        shown = comments if block.output is None else block.output.splitlines()
        assert self._printed().splitlines() == shown, block.text

    def _run_command(self, command: str, output: str) -> None:
        *before, last = programs_of(command)
        if self._is_left_out(command):
            for words in (*before, last):
                if words[0] == "afm-mlx":
                    name, module, rest = _command(words[1:])
                    parse(name, module, rest)
            return
        line = last[: last.index(">")] if ">" in last else last
        given = ""
        if before:
            piped = command.rpartition(" | ")[0]
            given = subprocess.run(
                piped, shell=True, capture_output=True, text=True, check=True
            ).stdout
        if line[0] == "afm-mlx":
            stdin = io.TextIOWrapper(io.BytesIO(given.encode()), encoding="utf-8")
            with mock.patch.object(sys, "stdin", stdin):
                assert main(line[1:]) == 0, f"{command}: {self._captured.readouterr().err}"
            printed = self._printed()
        elif line[0] == "python":
            _run_script(line[1:])
            printed = self._printed()
        else:
            words = self._replace(shlex.join(line))
            done = subprocess.run(
                words, shell=True, input=given, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{command}: {done.stderr}"
            printed = done.stdout
        if line != last:
            Path(last[-1]).write_text(printed)
        elif output.strip():
            assert printed == output, command

    def _printed(self) -> str:
        return self._captured.readouterr().out


def programs_of(command: str) -> list[list[str]]:
    """Words of the programs in a pipe."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|")
    lexer.whitespace_split, lexer.commenters = True, ""
    is_pipe = "|".__eq__
    return [list(words) for pipe, words in itertools.groupby(lexer, is_pipe) if not pipe]


def _run_script(words: list[str]) -> None:
    """What `python WORDS` does, in this process: it has MLX and the model's code already."""
    argv, path, modules = sys.argv, list(sys.path), set(sys.modules)
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
            runpy.run_path(words[0], run_name="__main__")
    finally:
        sys.argv, sys.path[:] = argv, path
        for name in set(sys.modules) - modules:  # stands in for Apple's SDK
            if name.partition(".")[0] == "apple_fm_sdk":
                del sys.modules[name]
