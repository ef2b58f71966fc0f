"""Listening, and coming to an end."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import httpx2
import openai
import pytest

from afm_mlx.errors import RequestError
from afm_mlx.server.run import bind
from afm_mlx.server.server_options import ServerOptions
from tests.tools.cli import ROOT
from tests.tools.server import running_server, until

CHAT = {"model": "afm-nano", "messages": [{"role": "user", "content": "Write."}]}
LONG = {"guided_regex": "[a-z ]{5000}", "max_tokens": 300}


@pytest.fixture
def started(tmp_path):
    """Start `afm-mlx server` in a process of its own; returns it and its address."""
    processes = []

    def start(*argv):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "afm_mlx", "server", "--port", "0", *argv]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes)
        processes.append(process)
        said = process.stdout.readline().split()
        assert said[:4] == ["afm-nano", "is", "served", "at"], process.stderr.read()
        return process, said[4]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_sigterm_lets_answers_finish(started):
    process, url = started("--grace", "20", "--log-level", "WARNING")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    with httpx2.Client(base_url=url) as http:
        assert http.get("/ready").status_code == 200
        chunks = client.chat.completions.create(**CHAT, stream=True, extra_body=LONG)
        next(chunks)
        process.send_signal(signal.SIGTERM)
        until(lambda: http.get("/ready").status_code == 503)
        assert http.get("/health").status_code == 200
        refused = http.post("/v1/chat/completions", json=CHAT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_stopping")
        assert int(refused.headers["retry-after"]) >= 1
        assert [c.choices[0].finish_reason for c in chunks][-1] == "length"
    _, said = process.communicate(timeout=20)
    assert (process.returncode, said) == (0, "")  # nothing was interrupted


def test_the_grace_ends_and_so_does_the_process(started):
    process, url = started("--grace", "0.2")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    chunks = client.chat.completions.create(
        **CHAT, stream=True, extra_body={**LONG, "max_tokens": 900}, logprobs=True, top_logprobs=20
    )
    next(chunks)
    process.send_signal(signal.SIGINT)
    with pytest.raises(openai.APIError, match="stopped"):
        list(chunks)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 130
    lines = said.splitlines()
    assert any('"POST /v1/chat/completions HTTP/1.1" 200' in line for line in lines)
    assert lines[-1] == "afm-mlx: interrupted"
    assert "Traceback" not in said
    assert "Write." not in said  # no prompts in the log


@pytest.mark.slow
def test_a_second_signal_ends_at_once(started):
    process, url = started()
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    chunks = client.chat.completions.create(
        **CHAT, stream=True, extra_body={**LONG, "max_tokens": 900}
    )
    next(chunks)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=5)
    assert process.returncode == 130


def test_another_process_finds_what_prompts_begin_with(tmp_path):
    """As it would be after a restart: the folder is all that the two have in common."""
    long = [{"role": "user", "content": "Sum up: " + "one two three " * 40}]
    cached = []
    for _ in range(2):
        with running_server(prompt_cache_folder=tmp_path / "prompts") as running:
            answer = running.openai().chat.completions.create(
                model="afm-nano", messages=long, max_tokens=2
            )
            cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == 0
    assert cached[1] >= 64


def test_a_unix_socket_is_this_users_alone(tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as killed:  # what a server that was killed has left
        killed.bind(str(path))
    with running_server(unix_socket=path) as running:
        assert path.stat().st_mode & 0o777 == 0o600
        transport = httpx2.HTTPTransport(uds=str(path))
        with httpx2.Client(transport=transport, base_url="http://any.name") as client:
            answer = client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 2})
            assert json.loads(answer.text)["usage"]["completion_tokens"] == 2
        with pytest.raises(RequestError, match="another server"):
            bind(ServerOptions(unix_socket=path))
        assert running.url.startswith("unix:")
    assert not path.exists()
    with running_server(unix_socket=path):
        path.unlink()
        other = socket.socket(socket.AF_UNIX)
        other.bind(str(path))
        other.listen()
    assert path.exists()  # by now another server's
    other.close()
    path.unlink()
    path.write_text("a file of somebody's")
    with pytest.raises(RequestError, match="can't listen"):
        bind(ServerOptions(unix_socket=path))
    assert path.read_text()


def test_sockets_of_other_programs_stay(tmp_path):
    """Neither one for datagrams nor one whose queue is full is taken for what a killed server has left."""
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(path))
        with pytest.raises(RequestError, match="another kind"):
            bind(ServerOptions(unix_socket=path))
        assert path.is_socket()
    path.unlink()
    with ExitStack() as opened:
        other = opened.enter_context(socket.socket(socket.AF_UNIX))
        other.bind(str(path))
        other.listen(0)
        waiting = opened.enter_context(socket.socket(socket.AF_UNIX))
        waiting.connect(str(path))
        with pytest.raises(RequestError, match="another server"):
            bind(ServerOptions(unix_socket=path))
        assert path.is_socket()
    path.unlink()
    with bind(ServerOptions(unix_socket=path)), pytest.raises(RequestError, match="another server"):
        bind(ServerOptions(unix_socket=path))  # the first one still loads its model
