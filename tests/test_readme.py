"""README.md as it stands: its commands in their order, on what those before them made, and its Python.

The fast tests parse every command and follow its paths; the slow one runs them all.
"""

import os
import re
import shlex
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from afm_mlx.cli import COMMANDS, _command
from afm_mlx.cli.parser import parse
from afm_mlx.loading.resolve import EMBEDDED_MODEL

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
RUN = "On the command line"
OWN = "Your own checkpoint"
IGNORED = (ROOT / ".gitignore").read_text().splitlines()
YOURS = "path/to/"  # what a reader has and README has not

READS = ("model", "teacher", "data", "data_path", "initial_adapter", "adapter")
WRITES = {
    "convert": "mlx_path",
    "qat": "save_path",
    "lora": "adapter_path",
    "adapter convert": "output",
    "adapter compose": "output",
}


def section(title):
    return re.search(rf"^## {title}\n(.*?)(?=^## )", README, re.S | re.M)[1]


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.S | re.M)


def commands(text):
    """Lines after a `$`, without comments."""
    lines = "".join(blocks(text, "console")).splitlines()
    return [line[2:].split("  #")[0].rstrip() for line in lines if line.startswith("$ ")]


def stages(command):
    """Words of the programs in a pipe, and of what the last one is redirected to."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="|>")
    lexer.whitespace_split = True
    found = [[]]
    for word in lexer:
        if word in ("|", ">"):
            found.append([])
        else:
            found[-1].append(word)
    written = found.pop()[0] if ">" in command else None
    return found, written


def is_ignored(path):
    """Whether git ignores it in this folder: a reader's files, made by the README, change nothing here."""
    name = Path(path).parts[0]
    return any(fnmatch(name, line.strip("/")) for line in IGNORED if line.startswith("/"))


def follow(command, made):
    """Note in `made` what a command writes.

    Raises:
        AssertionError: when it reads what nothing made, or writes what there is or what git would see.
        UsageError: for a flag or a value that the command does not take.
    """
    programs, written = stages(command)
    writes = {written} - {None}
    for program, *words in programs:
        reads = []
        if program == "afm-mlx":
            name, module, rest = _command(words)
            given = vars(parse(name, module, rest))
            reads = [given.get(key) for key in READS]
            if name == "adapter compose":
                reads += [each.rpartition("=")[0] for each in given["adapters"]]
            if name in WRITES:
                writes.add(given[WRITES[name]])
            else:
                reads.append(given.get("adapter_path"))
        elif program == "mkdir":
            writes.add(words[0])
        elif program == "head":
            reads = words[-1:]
        elif program == "python":
            reads = words[:1]
        else:
            assert program in ("echo", "make")
        for path in filter(None, reads):
            there = path in made or path == EMBEDDED_MODEL or (ROOT / path).exists()
            assert there or path.startswith(YOURS), f"{command}: nothing made {path}"
    for path in writes:
        assert path not in made, f"{command}: {path} is there already"
        assert is_ignored(path), f"{command}: .gitignore does not know {path}"
        assert str(Path(path).parent) in (".", *made)
    made |= writes


def test_every_command_parses_and_reads_what_an_earlier_one_made():
    made = set()
    for command in [*commands(section(RUN)), *commands(section(OWN))]:
        follow(command, made)
    assert {"my-model-2bit", "both", "afm-3b-2bit"} <= made


def test_what_is_not_there_is_noticed():
    for command in [
        "afm-mlx generate --model nowhere",
        "afm-mlx generate --adapter-path nowhere",
        "afm-mlx adapter compose nowhere=0.7 --output both",
        "afm-mlx convert --model afm-nano --mlx-path docs -d",
        "head -n 1 nowhere > there",
        "mkdir docs",
    ]:
        with pytest.raises(AssertionError):
            follow(command, set())


def test_commands_that_need_a_checkpoint_come_after_those_that_need_none():
    assert README.index(f"## {RUN}") < README.index(f"## {OWN}")
    assert YOURS not in "".join(commands(section(RUN)))


def test_every_command_of_the_program_is_shown():
    shown = {words[1] for c in commands(README) for words in stages(c)[0] if words[0] == "afm-mlx"}
    assert shown == set(COMMANDS)


def test_the_python_compiles_and_names_what_the_commands_made():
    first, second = blocks(README, "python")
    compile(first, "README.md", "exec")
    compile(second, "README.md", "exec")
    made = set()
    for command in commands(section(RUN)):
        follow(command, made)
    named = re.findall(r"(?:load|register)\(.*?\"([^\"]+)\"\)", second)
    assert len(named) == 3
    assert set(named) <= made


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
    for command in commands(section(RUN)):
        run(["/bin/sh", "-c", command], tmp_path, "/exit\n")
    for python in blocks(README, "python"):
        run([sys.executable, "-c", python], tmp_path)


@pytest.mark.slow
def test_the_chat_answers_as_shown(tmp_path):
    (block,) = [b for b in blocks(README, "console") if "\n>> " in b]
    command, *lines = block.splitlines()
    said = "".join(f"{line[3:]}\n" for line in lines if line.startswith(">> "))
    got = run(["/bin/sh", "-c", command[2:]], tmp_path, f"{said}/exit\n")
    for line in lines:
        assert line.startswith(">> ") or line in got
