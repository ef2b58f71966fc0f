"""docs/guided.md and docs/speculation.md as they stand: files, Python and commands, with what they print."""

import re
import shlex
from pathlib import Path

import pytest

from afm_mlx.cli import main
from tests.test_readme import blocks

DOCS = Path(__file__).parent.parent / "docs"
GUIDE = (DOCS / "guided.md").read_text()
FILES = r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```\n"


@pytest.fixture
def files(tmp_path, monkeypatch):
    """What the page shows as files, in the current folder."""
    for name, content in re.findall(FILES, GUIDE, re.S | re.M):
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize("page", ["guided.md", "speculation.md"])
def test_the_python_prints_what_is_shown(files, capsys, page):
    text = re.sub(FILES, "", (DOCS / page).read_text(), flags=re.S | re.M)
    shown = re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", text, re.S | re.M)
    assert len(shown) == text.count("```python\n")
    names = {"__name__": "guide"}
    for code, output in shown:
        exec(compile(code, page, "exec"), names)
        got = capsys.readouterr().out
        assert got == output or (got and not output), code


def test_the_commands_print_what_is_shown(files, capsys):
    (block,) = blocks(GUIDE, "console")
    commands = block.split("$ afm-mlx ")[1:]
    assert len(commands) == block.count("$")
    for each in commands:
        command, _, output = each.partition("\n")
        assert main(shlex.split(command)) == 0
        got = capsys.readouterr().out
        assert got == output or (got and not output), command
