"""Sockets, shutdown, and restarts of the server's process."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager

import httpx2
import openai
import pytest

from afm_mlx.errors import RequestError
from afm_mlx.loading.resolve import resolve_model
from afm_mlx.server.run import bind
from afm_mlx.server.server_options import ServerOptions
from tests.tools.cli import ROOT
from tests.tools.server import running_server, until

CHAT = {"model": "afm-nano", "messages": [{"role": "user", "content": "Write."}]}
LONG = {"guided_regex": "[a-z ]{5000}", "max_tokens": 300}


@pytest.fixture
def started(tmp_path):
    """Start `afm-mlx server`; return its process and address."""
    with ExitStack() as opened:

        def start(*argv, stderr=subprocess.PIPE):
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "afm_mlx", "server", "--port", "0", *map(str, argv)]
            pipes = {"stdout": subprocess.PIPE, "stderr": stderr, "text": True}
            process = subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes)
            opened.enter_context(process)
            opened.callback(process.kill)
            said = process.stdout.readline().split()
            assert said[-4:-1] == ["is", "served", "at"]
            return process, said[-1]

        yield start


def test_the_command_serves_a_folder_of_models(started, tmp_path):
    models = tmp_path / "models"
    models.mkdir()
    for name in ("a", "b"):
        (models / name).symlink_to(resolve_model("afm-nano"))
    room = "--memory", "4MB", "--prompt-cache-bytes", "1MB"  # for one of them
    process, url = started("--models-dir", models, *room, "--log-level", "INFO")
    with httpx2.Client(base_url=url, timeout=60) as http:

        def states():
            listed = http.get("/v1/models").json()["data"]
            return {each["id"]: each["state"] for each in listed if each["parent"] is None}

        assert states() == {"a": "unloaded", "b": "unloaded"}
        for name in ("a", "b:todo", "a"):
            body = {**CHAT, "model": name, "max_tokens": 3}
            assert http.post("/v1/chat/completions", json=body).status_code == 200
            assert states()[name[0]] == "loaded"
        assert sorted(states().values()) == ["loaded", "unloaded"]
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 0
    assert said.count("Loading the model") == 3
    assert said.count("Evicting the model") == 2


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


def test_the_process_ends_with_the_grace_period(started):
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


def test_a_unix_socket_is_this_users_alone(tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as killed:  # as a killed server leaves it
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
    path.write_text("another file")
    with pytest.raises(RequestError, match="can't listen"):
        bind(ServerOptions(unix_socket=path))
    assert path.read_text()


def test_sockets_of_other_programs_stay(tmp_path):
    """A datagram socket, and one with a full queue, are not mistaken for a killed server's."""
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


# -- processes

PROMPT = {"model": "afm-nano", "prompt": "hey Hana", "temperature": 0}
LONG_PROMPT = PROMPT | {"guided_regex": "[a-z ]{5000}", "max_tokens": 900, "stream": True}
SHORT = LONG_PROMPT | {"max_tokens": 40, "stream": False}


@contextmanager
def begun(http, body):
    """A stream's events after the first one."""
    with http.stream("POST", "/v1/completions", json=body) as stream:
        found = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {"))
        next(found)
        yield found


def test_a_killed_server_restarts_at_its_port_with_its_prefix_cache(started, tmp_path):
    folder = ["--prompt-cache-folder", tmp_path / "prompts", "--kv-bits", 16]
    long_prompt = SHORT | {"prompt": "Please redact this message about the account. " * 20}
    running, url = started(*folder)
    with httpx2.Client(base_url=url, timeout=60) as http:
        first = http.post("/v1/completions", json=long_prompt).json()
        until(lambda: len(list(folder[1].glob("*.prefix"))) >= 2)
        with begun(http, LONG_PROMPT) as events:
            running.send_signal(signal.SIGKILL)
            with pytest.raises(httpx2.HTTPError):
                list(events)
    damaged = sorted(folder[1].glob("*.prefix"), key=lambda path: path.stat().st_mtime)[-1]
    os.truncate(damaged, 1000)
    _, again_at = started(*folder, "--port", url.rpartition(":")[2])
    assert again_at == url
    with httpx2.Client(base_url=url, timeout=60) as http:
        again = http.post("/v1/completions", json=long_prompt).json()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
    assert again["choices"] == first["choices"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounts a small disk")
def test_a_full_disk_for_prompts_is_one_warning(started, tmp_path):
    folder, log = tmp_path / "disk", tmp_path / "log"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", folder])
    if mounted.returncode != 0:
        pytest.skip("this system lets nobody mount anything")
    try:
        with log.open("w") as errors:
            process, url = started("--prompt-cache-folder", folder, stderr=errors)
        with httpx2.Client(base_url=url, timeout=60) as http:
            for number in range(12):
                prompt = f"Message {number}: " + "please redact this message. " * 40
                answer = http.post("/v1/completions", json=SHORT | {"prompt": prompt})
                assert answer.json()["usage"]["completion_tokens"] == 40
            until(lambda: "No space left" in log.read_text())
        assert log.read_text().count("No space left") == 1
        assert "Traceback" not in log.read_text()
        process.kill()
        process.wait()  # it holds files of the disk
    finally:
        subprocess.run(["umount", folder], check=True)
