"""docs/sessions.md and examples/fm as they stand: every block runs, and prints what is shown behind it."""

import ast
import asyncio
import contextlib
import inspect
import io
import re
import sys
from pathlib import Path

import pytest

from tests.test_readme import blocks, run

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "sessions.md").read_text()


def shown(block):
    """What the comments of a block say that it prints; those behind code are none of these."""
    return [line[2:] for line in block.splitlines() if line.startswith("# ")]


def test_every_block_prints_what_it_shows(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("AFM_MLX_MODEL", raising=False)
    names = {"__name__": "page"}

    async def page():
        for block in blocks(PAGE, "python"):
            code = compile(block, "sessions.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                result = eval(code, names)
                if inspect.iscoroutine(result):
                    await result
            assert printed.getvalue().splitlines() == shown(block), block

    asyncio.run(page())


@pytest.mark.slow
def test_the_examples_run(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (command,) = re.findall(r"^\$ (.*)$", PAGE, re.M)
    assert "Film Lecture by Hana" in run(["/bin/sh", "-c", command], tmp_path)
    printed = run([sys.executable, "examples/fm/call_tool.py"], tmp_path)
    assert 'track_order({"order": "L5526"})' in printed
    assert "Hitton" in printed
