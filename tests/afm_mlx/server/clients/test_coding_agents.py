"""Coding agents from npm with their defaults: an empty home and environment, and a dummy key.

Each runs two commands in its shell, answers, and continues the conversation in a second process. The model is
AFM's, or shaped as Qwen3 and thinks before each answer. Ollama's client from npm holds the same conversation
as the programs of `test_python_clients.py`.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.tools.scripted_server import MODEL, scripted_server

THOUGHT = "Hm. I wonder."
QUESTIONS = ("Say what the shell says.", "Once more.")
SECONDS = 300


def codex_files(home, work, url):
    folder = home / ".codex"
    folder.mkdir()
    (folder / "config.toml").write_text(f"""
model = "{MODEL}"
model_provider = "afm"
[model_providers.afm]
name = "afm"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "KEY"
""")


def opencode_files(home, work, url):
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "afm",
        "options": {"baseURL": f"{url}/v1", "apiKey": "dummy"},
        "models": {MODEL: {"name": MODEL}},
    }
    settings = {
        "model": f"afm/{MODEL}",
        "provider": {"afm": provider},
        "autoupdate": False,
        "share": "disabled",
        "permission": "allow",
    }
    (work / "opencode.json").write_text(json.dumps(settings))


def claude_files(home, work, url):
    pass  # its settings are in the environment


CODEX = ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
AGENTS = {
    "codex": {"package": "@openai/codex", "first": [*CODEX, QUESTIONS[0]], "second": [*CODEX, "resume",
     "--last", QUESTIONS[1]], "files": codex_files, "environment": lambda url: {"KEY": "dummy"},
     "tool": ("exec_command", "cmd", {}), "ignored": {"client_metadata", "reasoning.summary",
     "tools[namespace]", "tools[web_search]"}},
    "claude": {"package": "@anthropic-ai/claude-code", "first": ["claude", "--allowedTools", "Bash", "-p",
     QUESTIONS[0]], "second": ["claude", "--allowedTools", "Bash", "--continue", "-p", QUESTIONS[1]],
     "files": claude_files, "environment": lambda url: {"ANTHROPIC_BASE_URL": url,
     "ANTHROPIC_API_KEY": "dummy", "ANTHROPIC_MODEL": MODEL, "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
     "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}, "tool": ("Bash", "command",
     {"description": "Says it"}), "ignored": {"thinking", "context_management", "output_config.effort",
     "metadata"}},
    "opencode": {"package": "opencode-ai", "first": ["opencode", "run", QUESTIONS[0]],
     "second": ["opencode", "run", "--continue", QUESTIONS[1]], "files": opencode_files,
     "environment": lambda url: {}, "tool": ("bash", "command", {"description": "Says it"}),
     "ignored": set()},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", [None, "qwen3"], ids=["afm", "qwen3"])
@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_works_with_its_defaults(name, family, tmp_path, caplog):
    agent = AGENTS[name]
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not on the PATH: npm install -g {agent['package']}")
    tool, argument, more = agent["tool"]

    def shell(sum):
        return [(tool, {argument: f"echo sum-$(({sum}))", **more})]

    steps = (shell("40 + 2"), shell("50 + 3"), "That was it.", shell("60 + 4"), "That was all.")
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    with (
        caplog.at_level("INFO", "afm_mlx.server"),
        scripted_server(*steps, context=65536, family=family, thought=THOUGHT) as (
            server,
            script,
        ),
    ):
        agent["files"](home, work, server.url)
        environment = {"PATH": os.environ["PATH"], "HOME": str(home)}
        environment |= agent["environment"](server.url)
        said = []
        for turn in ("first", "second"):
            done = subprocess.run(
                agent[turn],
                env=environment,
                cwd=work,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
            assert done.returncode == 0, (turn, done.stdout[-2000:], done.stderr[-2000:])
            said.append(done.stdout)
        assert "request_errors_total{" not in server.http().get("/metrics").text
    assert "That was it." in said[0]
    assert "That was all." in said[1]
    # The commands ran, and the model was shown their output.
    turns = (r"<turn_start> tool\s(.*?)<turn_end>", r"<tool_response>\n(.*?)\n</tool_response>")
    results = re.findall(turns[family is not None], script.prompts[-1], re.S)
    assert [re.findall("sum-[0-9]+", result) for result in results] == [
        ["sum-42"],
        ["sum-53"],
        ["sum-64"],
    ]
    if family is not None:  # its template shows the thoughts of a turn until the turn ends
        assert script.prompts[-1].count(THOUGHT) == 1
    named = {
        field
        for record in caplog.records
        if (found := re.search("of no effect here: (.*)", record.message))
        for field in found[1].split(", ")
    }
    ignored = agent["ignored"]
    if family is not None:  # a model that thinks takes them
        ignored = ignored - {"thinking", "output_config.effort"}
    assert ignored <= named, named


@pytest.mark.slow
@pytest.mark.parametrize("family", [None, "qwen3"], ids=["afm", "qwen3"])
def test_ollamas_client_from_npm(family, tmp_path):
    npm = shutil.which("npm")
    root = subprocess.run([npm, "root", "-g"], capture_output=True, text=True) if npm else None
    modules = Path(os.environ.get("NODE_PATH") or (root.stdout.strip() if root else ""))
    if not (modules / "ollama").is_dir():
        pytest.skip("there is no client: npm install -g ollama")
    steps = ([("weather", {"city": city}) for city in ("Rome", "Oslo")], "Rome is warmer.")
    steps += ([("weather", {"city": "Lima"})], "Lima is warm.")
    with scripted_server(*steps, family=family) as (server, script):
        done = subprocess.run(
            ["node", Path(__file__).parent / "ollama_program.cjs", server.url],
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "NODE_PATH": str(modules)},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == {"said": "Lima is warm.", "asked": ["Rome", "Oslo", "Lima"]}
    assert "Rome is warm" in script.prompts[-1]
