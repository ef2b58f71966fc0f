"""The server as a process of its own: killed, started again, told to stop, and without a port."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress

import httpx2
import pytest

from tests.tools.cli import ROOT, process
from tests.tools.server import until

PROMPT = {"model": "afm-nano", "prompt": "hey Hana", "temperature": 0}
LONG = PROMPT | {"guided_regex": "[a-z ]{5000}", "max_tokens": 900, "stream": True}
SHORT = LONG | {"max_tokens": 40, "stream": False}


@contextmanager
def server(*options):
    """A server's process and a client of it."""
    command = [sys.executable, "-m", "afm_mlx", "server", *map(str, options)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
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


def test_a_killed_server_comes_back_at_its_port():
    with server("--port", 0) as (running, http):
        port = http.base_url.port
        used = process("server", "--port", port, timeout=60)
        assert used.returncode == 2
        assert used.stderr.startswith(
            f"afm-mlx: error: The server can't listen at 127.0.0.1, port {port}: "
        )
        assert len(used.stderr.splitlines()) == 1
        with begun(http, LONG) as events:
            running.send_signal(signal.SIGKILL)
            with pytest.raises(httpx2.HTTPError):
                list(events)
    with server("--port", port) as (_, http):
        again = http.post("/v1/completions", json=SHORT)
        assert again.json()["usage"]["completion_tokens"] == 40


def test_a_server_that_is_told_to_stop_finishes_what_it_has_begun():
    with server("--port", 0, "--grace", 60) as (running, http), begun(http, LONG) as events:
        running.send_signal(signal.SIGTERM)
        with suppress(httpx2.ConnectError):  # its socket may be closed already
            while (refused := http.post("/v1/completions", json=SHORT)).status_code == 200:
                pass
            assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        assert list(events)[-1]["choices"][0]["finish_reason"] == "length"
        assert running.wait(30) == 143


def test_answers_that_outlast_the_grace_end_with_an_error():
    with server("--port", 0, "--grace", 0) as (running, http), begun(http, LONG) as events:
        running.send_signal(signal.SIGTERM)
        assert list(events)[-1]["error"]["code"] == "server_stopping"
        assert running.wait(30) == 143


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts the files of another process")
def test_ten_thousand_connections_that_are_left_open_do_no_harm():
    """The server keeps as many as it was told to, and everybody who asks is answered."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    with server("--port", 0, "--max-connections", 300) as (running, http):
        assert http.post("/v1/completions", json=SHORT).status_code == 200
        before = open_files(running)
        opened = []
        with begun(http, LONG) as events:
            for number in range(10_000):
                opened.append(socket.create_connection(("127.0.0.1", http.base_url.port), 20))
                if number % 3 == 0:
                    opened[-1].sendall(b"POST /v1/completions HTTP/1.1\r\nHost: local")
                if number % 2500 == 0:
                    assert http.post("/v1/completions", json=SHORT).status_code == 200
            assert open_files(running) - before <= 301
            assert list(events)[-1]["choices"][0]["finish_reason"] == "length"
        for connection in opened:
            connection.close()
        until(lambda: open_files(running) <= before)
        assert http.post("/v1/completions", json=SHORT).status_code == 200


def open_files(running):
    return len(os.listdir(f"/proc/{running.pid}/fd"))
