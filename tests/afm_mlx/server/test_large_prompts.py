"""Prompts of a megabyte: each is refused or answered, and nobody else has to wait for it."""

import threading
import time

import pytest

from tests.tools.server import running_server

MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def server():
    with running_server() as running:
        yield running


def test_prompts_of_a_megabyte_are_refused_while_others_are_answered(server, client):
    refused = []

    def send(path, body):
        with server.http() as http:
            response = http.post(path, json={"model": "afm-nano", "max_tokens": 3, **body})
            refused.append((response.status_code, response.json()["error"]["code"]))

    texts = ("word " * (MEGABYTE // 5), "x" * MEGABYTE, "\U0001f600" * (MEGABYTE // 4))
    asked = [("/v1/completions", {"prompt": text}) for text in texts]
    asked += [("/v1/completions", {"prompt": [5] * (MEGABYTE // 3)})]
    asked += [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]})
        for text in texts
    ]
    asked += [("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}] * 10_000})]
    chunks = client.completions.create(
        model="afm-nano", prompt="a", stream=True, max_tokens=500,
        extra_body={"guided_regex": "[a-z ]{5000}"},
    )  # fmt: skip
    next(chunks)
    threads = [threading.Thread(target=send, args=each) for each in asked]
    for thread in threads:
        thread.start()
    came, last = [], time.monotonic()
    for _ in chunks:
        came.append(time.monotonic() - last)
        last = time.monotonic()
    for thread in threads:
        thread.join()
    assert refused == [(400, "context_length_exceeded")] * len(asked)
    assert len(came) > 300
    assert max(came) < 2
