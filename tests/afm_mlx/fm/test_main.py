"""`python -m afm_mlx.fm` runs scripts for Apple's SDK; sessions continue in another process."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from afm_mlx.fm.__main__ import stand_in

ROOT = Path(__file__).parents[3]

SCRIPT = """
import asyncio, json, os, signal, sys
import apple_fm_sdk as fm
from apple_fm_sdk.generation_guide import guide
import neighbour

PROMPTS = ["Make this formal:\\nhey Hana, can't make it to the Film Lecture", "Hi", "What can you do?"]

async def main(path, kill):
    try:
        with open(path) as file:
            transcript = await fm.Transcript.from_dict(json.load(file))
        session = fm.LanguageModelSession.from_transcript(transcript)
    except FileNotFoundError:
        session = fm.LanguageModelSession("Be brief.")
    while len(entries := (await session.transcript.to_dict())["transcript"]["entries"]) < 7:
        answer = await session.respond(PROMPTS[len(entries) // 2])
        with open(path + ".new", "w") as file:
            json.dump(await session.transcript.to_dict(), file)
        os.replace(path + ".new", path)
        if kill and len(entries) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
    print(answer)

asyncio.run(main(sys.argv[1], len(sys.argv) > 2))
"""


def run(*words, cwd, input=""):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "afm_mlx.fm", *map(str, words)]
    how = {"cwd": cwd, "env": environment, "input": input, "timeout": 240}
    return subprocess.run(command, **how, capture_output=True, text=True)


def test_a_killed_process_goes_on_from_its_transcript_with_the_same_answer(tmp_path):
    script = tmp_path / "scripts" / "talk.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    (script.parent / "neighbour.py").write_text("")
    whole = run(script, "whole.json", cwd=tmp_path)
    assert (whole.returncode, whole.stderr) == (0, "")
    killed = run(script, "cut.json", "kill", cwd=tmp_path)
    assert killed.returncode == -signal.SIGKILL
    entries = json.loads((tmp_path / "cut.json").read_text())["transcript"]["entries"]
    assert len(entries) == 5
    resumed = run(script, "cut.json", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout == whole.stdout != ""


def test_scripts_end_as_they_say_and_what_is_none_is_a_usage_error(tmp_path):
    for words, status, message in (([], 2, "usage:"), (["nowhere.py"], 2, "There is no script")):
        done = run(*words, cwd=tmp_path)
        assert done.returncode == status
        assert message in done.stderr
    (tmp_path / "leaves.py").write_text("import sys; print(input()); sys.exit(int(sys.argv[1]))")
    (tmp_path / "fails.py").write_text("1 / 0")
    for words, status, message in (
        (["."], 2, "There is no script"),
        (["leaves.py", 5], 5, ""),
        (["fails.py"], 1, "ZeroDivisionError"),
    ):
        done = run(*words, cwd=tmp_path, input="Hi\n")
        assert (done.returncode, done.stdout) == (status, "Hi\n" if status == 5 else "")
        assert message in done.stderr
    helped = run("--help", cwd=tmp_path)
    assert (helped.returncode, helped.stdout[:6]) == (0, "usage:")


def test_another_package_of_that_name_is_not_replaced(monkeypatch):
    monkeypatch.setitem(sys.modules, "apple_fm_sdk", object())
    with pytest.raises(RuntimeError, match=r"Call stand_in\(\) first"):
        stand_in()
