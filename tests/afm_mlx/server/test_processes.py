"""The server as a process of its own: without a port, killed and started again, and full of connections."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager

import httpx2
import pytest

from tests.tools.cli import ROOT
from tests.tools.server import until

PROMPT = {"model": "afm-nano", "prompt": "hey Hana", "temperature": 0}
LONG = PROMPT | {"guided_regex": "[a-z ]{5000}", "max_tokens": 900, "stream": True}
SHORT = LONG | {"max_tokens": 40, "stream": False}


@contextmanager
def server(*options, stderr=None):
    """A server's process and a client of it."""
    command = [sys.executable, "-m", "afm_mlx", "server", *map(str, options)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment
    )
    try:
        address = running.stdout.readline().split()[-1]
        with httpx2.Client(base_url=address, timeout=60) as http:
            yield running, http
    finally:
        running.kill()
        running.wait()
        running.stdout.close()


@contextmanager
def begun(http, body):
    """The events of a stream whose first has come."""
    with http.stream("POST", "/v1/completions", json=body) as stream:
        found = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {"))
        next(found)
        yield found


def test_a_killed_server_comes_back_at_its_port_with_its_prompts(tmp_path):
    folder = ["--prompt-cache-folder", tmp_path / "prompts", "--kv-bits", 16]
    long_prompt = SHORT | {"prompt": "Please redact this message about the account. " * 20}
    with server("--port", 0, *folder) as (running, http):
        port = http.base_url.port
        first = http.post("/v1/completions", json=long_prompt).json()
        until(lambda: len(list(folder[1].glob("*.prefix"))) >= 2)
        with begun(http, LONG) as events:
            running.send_signal(signal.SIGKILL)
            with pytest.raises(httpx2.HTTPError):
                list(events)
    damaged = sorted(folder[1].glob("*.prefix"), key=lambda path: path.stat().st_mtime)[-1]
    os.truncate(damaged, 1000)
    with server("--port", port, *folder) as (_, http):
        again = http.post("/v1/completions", json=long_prompt).json()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
    assert again["choices"] == first["choices"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounts a small disk")
def test_a_full_disk_for_prompts_is_told_once_and_nothing_else(tmp_path):
    folder, log = tmp_path / "disk", tmp_path / "log"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", folder])
    if mounted.returncode != 0:
        pytest.skip("this system lets nobody mount anything")
    try:
        options = ("--port", 0, "--prompt-cache-folder", folder)
        with log.open("w") as errors, server(*options, stderr=errors) as (_, http):
            for number in range(12):
                prompt = f"Message {number}: " + "please redact this message. " * 40
                answer = http.post("/v1/completions", json=SHORT | {"prompt": prompt})
                assert answer.json()["usage"]["completion_tokens"] == 40
            until(lambda: "No space left" in log.read_text())
        assert log.read_text().count("No space left") == 1
        assert "Traceback" not in log.read_text()
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts the files of another process")
def test_ten_thousand_connections_that_are_left_open_do_no_harm():
    """The server keeps as many as it was told to, and everybody who asks is answered."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 10_500
    try:  # mlx-lm lowers both limits of a process that imports it
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, max(needed, hard)))
    except ValueError:
        pytest.skip(f"this system lets a process open {hard} files, and {needed} are needed")
    with ExitStack() as opened, server("--port", 0, "--max-connections", 300) as (running, http):
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        assert http.post("/v1/completions", json=SHORT).status_code == 200
        before = open_files(running)
        url, address = http.base_url.join("/v1/completions"), ("127.0.0.1", http.base_url.port)
        with begun(http, LONG) as events:
            for number in range(10_000):
                connection = opened.enter_context(socket.create_connection(address, 20))
                if number % 3 == 0:
                    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: local")
                # By a connection of its own: those that are open without a request are closed.
                if number % 2500 == 0:
                    assert httpx2.post(url, json=SHORT, timeout=60).status_code == 200
            until(lambda: open_files(running) - before <= 301)
            assert list(events)[-1]["choices"][0]["finish_reason"] == "length"
        opened.close()
        until(lambda: open_files(running) <= before)


def open_files(running):
    return len(os.listdir(f"/proc/{running.pid}/fd"))
