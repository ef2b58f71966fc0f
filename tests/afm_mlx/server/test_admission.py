"""Side work of requests: it delays nobody else, and is limited."""

import json
import socket
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import httpx2
import pytest
from msgspec import Meta, Struct

from afm_mlx.guidance.constraint import Constraint
from afm_mlx.server import bodies, generation_request, tokenization
from afm_mlx.server.request_fields import REQUESTS
from afm_mlx.server.tokenization import DetokenizeRequest, TokenizeRequest
from tests.tools.server import running_server, until

CHAT = {"model": "afm-nano", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
TOOLS = [{"type": "function", "function": {"name": "now"}}]
REGEX = {"model": "afm-nano", "prompt": "a", "max_tokens": 1, "guided_regex": "a|b"}
MEGABYTE = 1 << 20
PADDING = " " * (1 << 17)  # makes a body large, and is nothing else


@pytest.fixture(scope="module")
def server():
    with running_server(max_batch=4, max_queue=20) as running:
        yield running


@pytest.fixture
def stuck(monkeypatch):
    """Make a function wait for the returned event, which is set at the end of the test."""
    go = threading.Event()

    def stick(owner, name, applies=lambda *args: True):
        function = getattr(owner, name)

        def slow(*args, **options):
            if applies(*args):
                go.wait(30)
            return function(*args, **options)

        monkeypatch.setattr(owner, name, slow)
        return go

    yield stick
    go.set()


@pytest.fixture
def send(server):
    """Send a request several times at once; return futures of the responses."""
    with ThreadPoolExecutor(40) as pool:

        def once(path, body, padding):
            with server.http() as http:
                return http.post(path, content=json.dumps(body) + padding)

        yield lambda count, *request: [pool.submit(once, *request) for _ in range(count)]


@pytest.mark.parametrize(
    ("owner", "name", "path", "body", "places"),
    [
        (tokenization, "_tokens", "/tokenize", {"prompt": "a"}, 4),
        (bodies, "decoded", "/detokenize", {"tokens": [5]}, 4),
        (Constraint, "regex", "/v1/completions", REGEX, 24),
        (
            generation_request,
            "tool_call_constraint",
            "/v1/chat/completions",
            {**CHAT, "tools": TOOLS},
            24,
        ),
    ],
)
def test_a_chat_never_waits_for_other_requests_side_work(
    server, http, stuck, send, owner, name, path, body, places
):
    """Requests over the limits are refused; the limit for large bodies is low.

    Between two parts of its work a request holds no place, so that a later one may get ahead of it.
    """
    is_large = places == 4
    go = stuck(owner, name, lambda *args: owner is not bodies or len(args[0]) > len(PADDING))
    request = (path, body, PADDING if is_large else "")
    begun = places if is_large else 8
    futures = send(begun, *request)
    places_taken = server.served.admission
    until(lambda: places_taken.active == begun)
    assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
    until(lambda: places_taken.active == begun)  # the chat has given its place back
    futures += send(places - begun + 2, *request)
    until(lambda: sum(future.done() for future in futures) == 2)
    refused = [future.result() for future in futures if future.done()]
    until(lambda: places_taken.active == places)
    assert [each.status_code for each in refused] == [429, 429]
    assert {each.json()["error"]["code"] for each in refused} == {"queue_full"}
    assert all(int(each.headers["retry-after"]) >= 1 for each in refused)
    go.set()
    assert Counter(future.result().status_code for future in futures) == {200: places, 429: 2}
    until(lambda: places_taken.active == 0)


def test_side_work_of_disconnected_clients_is_not_begun(server, stuck, send):
    begun = []
    go = stuck(tokenization, "_tokens", lambda *args: begun.append(1) or True)
    futures = send(1, "/tokenize", {"prompt": "a"}, PADDING)
    until(lambda: begun == [1])
    with server.http() as http, pytest.raises(httpx2.TimeoutException):
        http.post("/tokenize", content='{"prompt": "a"}' + PADDING, timeout=0.5)
    until(lambda: server.served.admission.active == 1)
    go.set()
    assert futures[0].result().status_code == 200
    until(lambda: server.served.admission.active == 0)
    assert begun == [1]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "word " * (MEGABYTE // 5)}),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * MEGABYTE}]}),
        ("/detokenize", {"tokens": [5] * (MEGABYTE // 3)}),
        ("/v1/completions", {"model": "afm-nano", "prompt": [5] * (MEGABYTE // 3)}),
        ("/v1/completions", {"model": "afm-nano", "prompt": "\U0001f600" * (MEGABYTE // 4)}),
        (
            "/v1/chat/completions",
            {**CHAT, "messages": [{"role": "user", "content": "hi " * 9}] * 16_000},
        ),
    ],
)
def test_prompts_over_the_context_are_refused_before_they_are_encoded(
    server, http, monkeypatch, path, body
):
    def fail(*args, **options):
        raise AssertionError("the prompt was encoded")

    for name in ("encode", "decode", "apply_chat_template"):
        monkeypatch.setattr(server.served.tokenizer, name, fail)
    refused = http.post(path, json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (
        400,
        "context_length_exceeded",
    )


def test_many_answers_under_a_large_grammar_are_refused(http):
    texts = [f"choice {number} of {'many' * 60}" for number in range(1000)]
    body = {"model": "afm-nano", "prompt": "a", "guided_choice": texts, "max_tokens": 1}
    assert http.post("/v1/completions", json=body).status_code == 200
    refused = http.post("/v1/completions", json={**body, "n": 20})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")


def test_large_bodies_are_decoded_like_small_ones(rng):
    """Large bodies are decoded element by element."""

    def draw(depth):
        kind = rng.integers(9 if depth else 6)
        if kind < 6:
            return [None, True, int(rng.integers(-9, 10**9)), 1.5e300, -0.25, 'a,"b\\[{é'][kind]
        if kind == 6:
            return {f" {key}": draw(depth - 1) for key in range(rng.integers(5))}
        return [draw(depth - 1) for _ in range(rng.integers(5))]

    for _ in range(10):
        value = {"text": "x" * (1 << 17), "drawn": [draw(4) for _ in range(300)]}
        for made in (value, {"deep": [[[[[value]]]]]}, {"ids": [[7, -3] * (1 << 15)], "not": [[]]}):
            content = json.dumps(made).encode()
            assert bodies.decoded(content) == made
    for content in (
        b'{"a": [' + b"1," * (1 << 17) + b"x]}",
        b"[" * (1 << 20),
        b"[[1]" + b" " * (1 << 17),
    ):
        with pytest.raises(bodies.ApiError, match="can't be read as JSON"):
            bodies.decoded(content)
    for padding in ("", PADDING):
        with pytest.raises(bodies.ApiError, match="it has a string that is no UTF-8"):
            bodies.decoded(b'{"a": "\xff"}' + padding.encode())
    for padding, says in (("", r"a\[0\] is NaN or infinite"), (PADDING, "'1e400' is too large")):
        with pytest.raises(bodies.ApiError, match=says):
            bodies.decoded(b'{"a": [1e400]}' + padding.encode())


def test_every_list_of_a_request_has_a_length(http):
    unbounded = []

    def walk(annotation, place, is_bounded=False):
        origin = get_origin(annotation)
        if origin is Annotated:
            limits = [each for each in annotation.__metadata__ if isinstance(each, Meta)]
            walk(annotation.__origin__, place, any(each.max_length for each in limits))
        elif origin in (Union, UnionType):
            for part in get_args(annotation):
                walk(part, place)
        elif origin is list:
            if not is_bounded:
                unbounded.append(place)
            walk(get_args(annotation)[0], f"{place}[]")
        elif origin is dict and get_args(annotation)[1] is not Any and not is_bounded:
            unbounded.append(place)
        elif isinstance(annotation, type) and issubclass(annotation, Struct):
            for name, hint in get_type_hints(annotation, include_extras=True).items():
                if not name.startswith("__"):
                    walk(hint, f"{place}.{name}")

    for kind in (*REQUESTS, TokenizeRequest, DetokenizeRequest):
        walk(kind, kind.__name__)
    assert not unbounded
    message = CHAT["messages"][0]
    for path, body, param in (
        ("/v1/chat/completions", {**CHAT, "messages": [message] * 20_000}, "messages"),
        ("/v1/chat/completions", {**CHAT, "stop": ["a"] * 17}, "stop"),
        ("/v1/chat/completions", {**CHAT, "tools": TOOLS * 1025}, "tools"),
        ("/v1/chat/completions", {**CHAT, "guided_choice": ["a"] * 5000}, "guided_choice"),
        ("/v1/responses", {"model": "afm-nano", "input": [message] * 20_000}, "input"),
        ("/v1/messages", {**CHAT, "messages": [message] * 20_000}, None),
        ("/detokenize", {"tokens": [1] * (MEGABYTE + 1)}, "tokens"),
    ):
        refused = http.post(path, json=body)
        assert refused.status_code == 400, path
        assert refused.json()["error"].get("param") == param
        assert "length <=" in refused.json()["error"]["message"]


def test_slow_bodies_have_limited_memory():
    """Up to 16 bodies of the maximum size are in memory; further ones are refused."""
    size = 100_000
    head = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n"
    with ExitStack() as opened:
        server = opened.enter_context(running_server(max_body=size))
        http = opened.enter_context(server.http())
        with ExitStack() as slow:
            for _ in range(16):
                connection = slow.enter_context(
                    socket.create_connection(("127.0.0.1", server.port))
                )
                connection.sendall(head.encode() + b" " * (size - 1))
            until(lambda: http.post("/tokenize", json={"prompt": "a word"}).status_code == 429)
            assert http.get("/health").status_code == 200
        until(lambda: http.post("/tokenize", json={"prompt": "a word"}).status_code == 200)
