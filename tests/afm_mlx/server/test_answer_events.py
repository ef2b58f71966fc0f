"""Answers of clients that disconnect or read slowly, answers that fail, metrics, pings, and draft tokens."""

import contextlib
import json
import socket
import threading
import time
from dataclasses import replace

import openai
import pytest

from tests.afm_mlx.server.test_openai_chat import ANSWER, EVENT, EVENT_FORMAT, FORMAL, TOOLS, TRACK
from tests.tools.server import running_server, until

LONG = {"guided_regex": "[a-z ]{5000}", "max_tokens": 900}
CHAT = {"model": "afm-nano", "messages": [{"role": "user", "content": "Write."}]}


@pytest.fixture(scope="module")
def server():
    with running_server(
        max_batch=4, max_queue=4, timeout=20, send_timeout=1, send_buffer=4096
    ) as running:
        yield running


@pytest.fixture(autouse=True)
def free_server(server):
    """Wait for the requests of earlier tests to end."""
    until(lambda: is_free(server))


@pytest.fixture
def hold(monkeypatch):
    """Return a function that stops the engine until the event that it returns is set."""
    go = threading.Event()
    from afm_mlx.engine.engine import Engine

    step = Engine.step

    def slowly(self):
        go.wait(20)
        return step(self)

    def start():
        monkeypatch.setattr(Engine, "step", slowly)
        return go

    yield start
    go.set()


@pytest.fixture
def held(hold):
    return hold()


def sent(server, body, path="/v1/chat/completions"):
    """Send a request, and return the connection with its response unread."""
    content = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def is_free(server):
    return server.served.engine.rows == 0 and server.served.admission.active == 0


def test_rows_of_disconnected_clients_are_freed(server):
    for body in (
        {**CHAT, **LONG},
        {**CHAT, **LONG, "stream": True},
        {**CHAT, **LONG, "n": 3, "stream": True},
    ):
        for half_closed in (False, True):
            connection = sent(server, body)
            until(lambda: server.served.engine.rows > 0)
            connection.shutdown(socket.SHUT_WR) if half_closed else connection.close()
            began = time.monotonic()
            until(lambda: is_free(server))
            assert time.monotonic() - began < 1
            connection.close()
    numbers = {"type": "array", "items": {"type": "integer"}, "minItems": 400}
    format = {"type": "json_schema", "name": "numbers", "schema": numbers}
    for path, rows, body in (
        ("completions", 2, {"prompt": ["a", "b"], **LONG}),
        ("responses", 1, {"input": "Count", "text": {"format": format}}),
        (
            "messages",
            1,
            {
                **CHAT,
                "max_tokens": 900,
                "output_format": {k: format[k] for k in ("type", "schema")},
            },
        ),
    ):
        connection = sent(server, {"model": "afm-nano", **body}, f"/v1/{path}")
        until(lambda rows=rows: server.served.engine.rows == rows)
        connection.close()
        until(lambda: is_free(server))


def test_rows_are_freed_before_the_first_token(server, held):
    """While the engine is stopped, so that nothing of the prompt is computed."""
    for body in ({**CHAT, **LONG}, {**CHAT, **LONG, "stream": True}):
        connection = sent(server, body)
        until(lambda: server.served.admission.active == 1)
        connection.close()
        until(lambda: server.served.admission.active == 0)
    held.set()
    until(lambda: is_free(server))


def test_a_full_queue_is_a_429_with_retry_after(server, held, http):
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(sent(server, {**CHAT, "max_tokens": 2}))
        # Not `active`: a request that is prepared leaves its slot for a moment before its answer takes one.
        until(lambda: len(server.served.admission._running) == 8)
        refused = http.post("/v1/chat/completions", json=CHAT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
        assert http.get("/health").status_code == http.get("/ready").status_code == 200
        held.set()
        until(lambda: server.served.admission.active == 0)
    assert http.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_slow_readers_delay_nobody(server, http, caplog):
    many = {**CHAT, **LONG, "max_tokens": 400, "logprobs": True, "top_logprobs": 20}
    slow = sent(server, {**many, "stream": True})
    until(lambda: server.served.engine.rows == 1)
    assert http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 3}).status_code == 200
    until(lambda: is_free(server))  # the client counts as gone
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := slow.recv(1 << 16):
            received += part
    assert received.startswith(b"HTTP/1.1 200")
    assert b"[DONE]" not in received
    assert not caplog.records or caplog.records[-1].levelname != "ERROR"
    slow.close()


def test_a_failing_answer_fails_alone(server, client, http, monkeypatch, caplog):
    from afm_mlx.engine.engine import Engine

    step, failures = Engine.step, []

    def failing(self):
        if failures and self.rows_running:
            raise RuntimeError(failures.pop())
        return step(self)

    monkeypatch.setattr(Engine, "step", failing)
    chunks = client.chat.completions.create(**CHAT, stream=True, extra_body=LONG)
    next(chunks)
    failures.append("out of order")
    with pytest.raises(openai.APIError, match="its log says why"):
        list(chunks)
    failures.append("out of order")
    failed = http.post("/v1/chat/completions", json=CHAT)
    assert failed.status_code == 500
    assert "out of order" not in failed.text
    assert caplog.text.count("RuntimeError: out of order") >= 2
    assert failed.headers["x-request-id"] in caplog.text
    assert set(failed.json()["error"]) == {"message", "type", "param", "code"}
    assert failed.json()["error"]["type"] == "server_error"
    assert client.chat.completions.create(**CHAT).choices[0].finish_reason == "stop"
    assert is_free(server)


def test_an_answer_times_out(http, server, held, monkeypatch):
    monkeypatch.setattr(server.served, "options", replace(server.served.options, timeout=0.1))
    late = http.post("/v1/chat/completions", json=CHAT)
    assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
    assert server.served.admission.active == 0


def test_prompts_and_answers_are_logged_only_on_request(server, client, monkeypatch, caplog):
    caplog.set_level("INFO")
    said = client.chat.completions.create(**CHAT).choices[0].message.content
    assert CHAT["messages"][0]["content"] not in caplog.text
    options = replace(server.served.options, log_prompts=True)
    monkeypatch.setattr(server.served, "options", options)
    client.chat.completions.create(**CHAT)
    assert CHAT["messages"][0]["content"] in caplog.text
    assert said in caplog.text


def test_metrics_count_answers_and_tokens(server, http, client):
    client.chat.completions.create(**CHAT)  # its prompt is in the prefix cache
    before = metrics(http)
    answer = client.chat.completions.create(**CHAT, n=2)
    after = metrics(http)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    model = 'model_name="afm-nano"'
    usage = answer.usage
    assert grown[f"afm_mlx:generation_tokens_total{{{model}}}"] == usage.completion_tokens
    assert grown[f"afm_mlx:prompt_tokens_total{{{model}}}"] == usage.prompt_tokens
    cached = usage.prompt_tokens_details.cached_tokens
    assert grown[f"afm_mlx:prefix_cache_hits_total{{{model}}}"] == cached > 0
    assert grown[f'afm_mlx:request_success_total{{finished_reason="stop",{model}}}'] == 2
    for name in (
        "time_to_first_token_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
    ):
        assert grown[f"afm_mlx:{name}_count{{{model}}}"] == 2, name
    pairs = usage.completion_tokens - 2
    assert grown[f"afm_mlx:inter_token_latency_seconds_count{{{model}}}"] == pairs
    for name in ("num_requests_running", "num_requests_waiting"):
        assert after[f"afm_mlx:{name}{{{model}}}"] == 0
    chunks = client.chat.completions.create(**CHAT, stream=True, extra_body=LONG)
    next(chunks)
    assert metrics(http)[f"afm_mlx:num_requests_running{{{model}}}"] == 1
    chunks.close()
    until(lambda: is_free(server))
    aborted = f'afm_mlx:request_success_total{{finished_reason="abort",{model}}}'
    assert metrics(http)[aborted] - before.get(aborted, 0) == 1


def test_forced_tokens_are_not_first_tokens(server, http):
    """Forced tokens are sent while the request waits; the first sampled token comes later."""
    model = 'model_name="afm-nano"'
    names = ("num_requests_running", "num_requests_waiting", "time_to_first_token_seconds_count")
    names = [f"afm_mlx:{name}{{{model}}}" for name in names]
    schema = {"type": "object", "properties": {"a_long_name": {"type": "integer"}}}
    body = {**CHAT, "guided_json": {**schema, "required": ["a_long_name"]}, "stream": True}
    options = {"stream_options": {"include_usage": True}}
    began = metrics(http)
    with contextlib.ExitStack() as others:
        for _ in range(4):  # all of the batch
            others.enter_context(sent(server, {**CHAT, **LONG, "stream": True}))
        until(lambda: metrics(http).get(names[2], 0) == began.get(names[2], 0) + 4)
        before = metrics(http)
        with http.stream("POST", "/v1/chat/completions", json={**body, **options}) as stream:
            lines = (line for line in stream.iter_lines() if line.startswith("data: {"))
            chunks = (json.loads(line[6:]) for line in lines)
            next(chunks)
            assert next(chunks)["choices"][0]["delta"]["content"] == '{"a_long_name":'
            during = metrics(http)
            assert [during[name] - before.get(name, 0) for name in names] == [0, 1, 0]
            time.sleep(0.2)
            others.close()
            last = list(chunks)[-1]
    until(lambda: is_free(server))
    assert [metrics(http)[name] - before.get(name, 0) for name in names] == [-4, 0, 1]
    assert last["timings"]["first_token_ms"] > 200


@pytest.fixture
def quick_pings(server):
    """Send pings after 50 ms without an event."""
    state = server.app.state
    before = state.options
    state.options = replace(before, ping_interval=0.05)
    yield
    state.options = before


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
@pytest.mark.usefixtures("quick_pings")
def test_waiting_streams_send_pings(server, http, hold, path):
    held = hold()
    asked = {"prompt": "hi"} if path == "completions" else {"messages": CHAT["messages"]}
    asked = {"input": "hi"} if path == "responses" else asked
    limit = {"max_output_tokens": 2} if path == "responses" else {"max_tokens": 2}
    body = {"model": "afm-nano", **asked, **limit, "stream": True}
    ping = 'event: ping\ndata: {"type":"ping"}\n\n' if path == "messages" else ": ping\n\n"
    with http.stream("POST", f"/v1/{path}", json=body) as stream:
        assert stream.status_code == 200
        parts = stream.iter_text()
        waited = ""
        while waited.count(ping) < 3:
            waited += next(parts)
        assert waited == ping * waited.count(ping)
        held.set()
        rest = "".join(parts)
    assert '"error"' not in rest.replace('"error":null', "")
    end = {"responses": "response.incomplete", "messages": "message_stop"}.get(path, "[DONE]")
    assert end in rest
    until(lambda: is_free(server))


@pytest.mark.usefixtures("quick_pings")
def test_an_error_after_a_ping_is_an_event(server, http, hold, monkeypatch):
    monkeypatch.setattr(server.served, "options", replace(server.served.options, timeout=0.3))
    hold()
    late = http.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert late.status_code == 200
    assert late.text.startswith(": ping\n\n")
    assert json.loads(late.text.rpartition("data: ")[2])["error"]["code"] == "timeout"


def metrics(http):
    lines = [li for li in http.get("/metrics").text.splitlines() if not li.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


# -- draft tokens

DRAFTED = (
    {"messages": [{"role": "user", "content": FORMAL}]},
    {"messages": [{"role": "user", "content": EVENT}], "response_format": EVENT_FORMAT},
    {"messages": [{"role": "user", "content": TRACK}], "tools": TOOLS, "tool_choice": "required"},
    {"messages": [{"role": "user", "content": FORMAL}], "temperature": 1, "seed": 3, "n": 2},
    {"messages": [{"role": "user", "content": FORMAL}], "logprobs": True, "top_logprobs": 2},
    {"messages": [{"role": "user", "content": FORMAL}], "frequency_penalty": 1.5, "max_tokens": 20},
)


def content_of(answer):
    return [(c.message.content, c.message.tool_calls and [
        (call.function.name, call.function.arguments) for call in c.message.tool_calls
    ], c.finish_reason) for c in answer.choices]  # fmt: skip


def test_draft_tokens_change_no_answer_and_are_in_the_usage():
    with running_server() as server:
        assert not server.served.drafts
        client = server.openai()
        wanted = [
            content_of(client.chat.completions.create(model="afm-nano", **a)) for a in DRAFTED
        ]
        plain = client.chat.completions.create(model="afm-nano", **DRAFTED[0])
        assert plain.usage.completion_tokens_details is None
    with running_server(draft_model="afm-nano", num_draft_tokens=3, prompt_lookup=True) as server:
        client = server.openai()
        found = [client.chat.completions.create(model="afm-nano", **a) for a in DRAFTED]
        assert [content_of(answer) for answer in found] == wanted
        assert wanted[0][0][0] == ANSWER
        accepted = [a.usage.completion_tokens_details.accepted_prediction_tokens for a in found]
        rejected = [a.usage.completion_tokens_details.rejected_prediction_tokens for a in found]
        assert all(accepted)
        assert all(count >= 0 for count in rejected)
        text = client.completions.create(model="afm-nano", prompt=["a b", "c d"], max_tokens=9)
        details = text.usage.completion_tokens_details
        assert details.accepted_prediction_tokens + details.rejected_prediction_tokens > 0
        stream = client.chat.completions.create(
            model="afm-nano", stream=True, stream_options={"include_usage": True}, **DRAFTED[0]
        )
        *_, last = stream
        assert last.usage.completion_tokens_details.accepted_prediction_tokens > 0
        figures = server.http().get("/metrics").text
        assert 'afm_mlx:spec_decode_num_draft_tokens_total{model_name="afm-nano"}' in figures
        assert json.loads(found[1].choices[0].message.content)
