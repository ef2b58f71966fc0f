"""README.md and docs/tour.md as they stand: the commands in their order, and the Python.

The fast tests parse every command and follow its paths; the slow ones run them all.
"""

import itertools
import os
import re
import shlex
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from afm_mlx.cli import COMMANDS, _command
from afm_mlx.cli.arguments import parse
from afm_mlx.loading.resolve import EMBEDDED_MODEL

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
TOUR, OWN = (ROOT / "docs" / "tour.md").read_text().split("## Your own checkpoint")
IGNORED = (ROOT / ".gitignore").read_text().splitlines()
YOURS = "path/to/"  # files that only the reader has

READS = ("model", "teacher", "data", "data_path", "initial_adapter", "adapter")
WRITES = {
    "convert": "mlx_path",
    "qat": "save_path",
    "lora": "adapter_path",
    "prune": "save_path",
    "adapter convert": "output",
    "adapter compose": "output",
}


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.S | re.M)


def commands(text):
    lines = "".join(blocks(text, "console")).splitlines()
    return [line[2:].split("  #")[0].rstrip() for line in lines if line.startswith("$ ")]


def words_of(command):
    lexer = shlex.shlex(command.partition(">")[0], posix=True, punctuation_chars="|")
    lexer.whitespace_split = True
    return [list(words) for bar, words in itertools.groupby(lexer, "|".__eq__) if not bar]


def follow(commands):
    """What the commands write, one after the other.

    Raises:
        AssertionError: when one reads what none before it made, or writes what is there or what git would see.
        UsageError: for a flag or a value that the command does not take.
    """
    made = set()
    for command in commands:
        reads, writes = [], re.findall(r"> (\S+)$|^mkdir (\S+)$", command)
        writes = list(filter(None, itertools.chain(*writes)))
        for program, *words in words_of(command):
            if program != "afm-mlx":
                assert program in ("echo", "head", "make", "mkdir", "python")
                reads += [word for word in words if Path(word).suffix in (".py", ".jsonl")]
                continue
            name, module, rest = _command(words)
            given = vars(parse(name, module, rest))
            written = WRITES.get(name)
            writes += [given[written]] if written else []
            reads += [given.get(key) for key in (*READS, "adapter_path") if key != written]
            if name == "adapter compose":
                reads += [each.rpartition("=")[0] for each in given["adapters"]]
        for path in filter(None, reads):
            there = path in made or path == EMBEDDED_MODEL or (ROOT / path).exists()
            assert there or path.startswith(YOURS), f"{command}: nothing made {path}"
        for path in writes:
            assert path not in made, f"{command}: {path} is there already"
            top = Path(path).parts[0]
            assert any(fnmatch(f"/{top}", line.rstrip("/")) for line in IGNORED), path
            assert str(Path(path).parent) in (".", *made)
        made.update(writes)
    return made


def test_every_command_parses_and_reads_what_an_earlier_one_made():
    made = follow([*commands(TOUR), *commands(OWN.split("## Serve")[0])])
    assert {"my-model-2bit", "both", "afm-3b-2bit"} <= made
    for broken in (
        "afm-mlx generate --model nowhere",
        "head -n 1 nowhere.jsonl > my-x",
        "mkdir docs",
    ):
        with pytest.raises(AssertionError):
            follow([broken])


def test_commands_that_need_a_checkpoint_come_after_those_that_need_none():
    assert YOURS not in "".join(commands(TOUR))


def test_every_command_of_the_program_is_shown():
    shown = {
        words[1] for c in commands(TOUR + OWN) for words in words_of(c) if words[0] == "afm-mlx"
    }
    assert shown == set(COMMANDS)


def test_the_python_compiles_and_names_what_the_commands_made():
    (first,), (second,) = blocks(README, "python"), blocks(TOUR, "python")
    for block in (first, second):
        compile(block, "README.md", "exec")
    named = re.findall(r"(?:load|register)\(.*?\"([^\"]+)\"\)", second)
    assert len(named) == 3
    assert set(named) <= follow(commands(TOUR))


def run(command, folder, given=""):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=folder, env=environment, input=given, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.slow
def test_all_of_it_runs(tmp_path):
    for name in ("examples", "afm_mlx"):
        (tmp_path / name).symlink_to(ROOT / name)
    for command in commands(TOUR):
        run(["/bin/sh", "-c", command], tmp_path, "/exit\n")
    for python in blocks(README + TOUR, "python"):
        run([sys.executable, "-c", python], tmp_path)


@pytest.mark.slow
def test_the_chat_answers_as_shown(tmp_path):
    (block,) = [b for b in blocks(README, "console") if "\n>> " in b]
    command, *lines = block.splitlines()
    said = "".join(f"{line[3:]}\n" for line in lines if line.startswith(">> "))
    got = run(["/bin/sh", "-c", command[2:]], tmp_path, f"{said}/exit\n")
    for line in lines:
        assert line.startswith(">> ") or line in got
