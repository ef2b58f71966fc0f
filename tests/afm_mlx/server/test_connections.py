"""Raw connections: pipelining, chunks, malformed and oversized requests, idle connections."""

import json
import socket
import time

import pytest

from tests.tools.server import running_server, until

CHAT = {"model": "afm-nano", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def server():
    with running_server(
        max_body=100_000, idle_timeout=1.5, body_timeout=0.5, max_connections=40
    ) as running:
        yield running


@pytest.fixture
def connect(server):
    """Open raw connections."""
    opened = []

    def connect(data=b""):
        opened.append(socket.create_connection(("127.0.0.1", server.port), timeout=20))
        opened[-1].sendall(data)
        return opened[-1]

    yield connect
    for each in opened:
        each.close()


def request(body=CHAT, *lines, path="/v1/chat/completions", version="1.1", length=True):
    """A request's bytes."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = [f"POST {path} HTTP/{version}", "Host: localhost", *lines]
    if length:
        given.append(f"Content-Length: {len(content)}")
    return "\r\n".join([*given, "", ""]).encode() + content


def read_response(connection):
    """Status, headers and body of one response."""
    file = connection.makefile("rb")
    status = int(file.readline().split()[1])
    headers = {}
    while line := file.readline().strip():
        name, _, value = line.decode().partition(":")
        headers[name.lower()] = value.strip()
    if "content-length" in headers:
        return status, headers, file.read(int(headers["content-length"]))
    return status, headers, file.read()


def is_closed(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_one_connection_serves_many_requests(connect):
    connection = connect()
    for _ in range(3):
        connection.sendall(request())
        status, _, body = read_response(connection)
        assert (status, json.loads(body)["object"]) == (200, "chat.completion")
    # Sent at once, they are answered in their order.
    pipelined = connect(request() + request({**CHAT, "model": "no"}) + request())
    file = pipelined.makefile("rb")
    answers = []
    for _ in range(3):
        answers.append(int(file.readline().split()[1]))
        length = 0
        while line := file.readline().strip():
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        file.read(length)
    assert answers == [200, 404, 200]


def test_older_and_chunked_requests(connect):
    old = connect(request(version="1.0"))
    assert read_response(old)[0] == 200
    assert is_closed(old)
    content = json.dumps(CHAT).encode()
    chunks = b"".join(
        b"%x\r\n%s\r\n" % (len(content[i : i + 7]), content[i : i + 7])
        for i in range(0, len(content), 7)
    )
    chunked = connect(request(b"", "Transfer-Encoding: chunked", length=False))
    chunked.sendall(chunks + b"0\r\n\r\n")
    assert read_response(chunked)[0] == 200
    slow = connect()
    for byte in request():
        slow.sendall(bytes([byte]))
    assert read_response(slow)[0] == 200


def test_a_client_that_sends_a_whole_body_first_gets_the_413(connect):
    body = b"x" * (8 << 20)  # more than sockets hold
    for head in (
        request(b"", f"Content-Length: {len(body)}", length=False),
        request(b"", "Transfer-Encoding: chunked", length=False) + b"%x\r\n" % len(body),
    ):
        connection = connect(head)
        connection.sendall(body)
        assert read_response(connection)[0] == 413
        connection.shutdown(socket.SHUT_WR)
        assert is_closed(connection)


def test_oversized_and_malformed_requests_are_refused(connect, server):
    announced = connect(request(b"", "Content-Length: 10000000000", length=False))
    status, headers, body = read_response(announced)
    assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_large")
    assert headers["connection"] == "close"
    expecting = connect(
        request(b"", "Content-Length: 200000", "Expect: 100-continue", length=False)
    )
    assert read_response(expecting)[0] == 413
    endless = connect(request(b"", "Transfer-Encoding: chunked", length=False))
    with pytest.raises(OSError):
        for _ in range(10_000):
            endless.sendall(b"2000\r\n" + b"x" * 0x2000 + b"\r\n")
    for data in (
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * (1 << 20) + b"\r\n\r\n",
        b"GET /" + b"y" * (1 << 20) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /v1/models HTTP/1.1\r\n\r\n",
        request(b"{}", "Content-Length: 2", "Content-Length: 30", length=False),
        request(b"{}", "Content-Length: -1", length=False),
        request(b"{}", "Content-Length: 2, 30", length=False),
        request(b"0\r\n\r\n", "Transfer-Encoding: chunked, identity", length=False),
    ):
        connection = connect()
        try:
            connection.sendall(data)
            status, _, body = read_response(connection)
        except OSError:  # closed before all was sent
            continue
        assert status in (400, 501), data[:60]
        assert b"Traceback" not in body
    assert read_response(connect(request()))[0] == 200


def test_two_lengths_of_one_body_smuggle_nothing(connect):
    """A second request in the body is not answered, whichever length a proxy uses."""
    hidden = b"POST /v1/nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
    connection = connect(
        request(
            b"0\r\n\r\n" + hidden,
            "Transfer-Encoding: chunked",
            f"Content-Length: {5 + len(hidden)}",
            length=False,
        )
    )
    received = b""
    while part := connection.recv(65536):
        received += part
    assert received.startswith(b"HTTP/1.1 400 ")
    assert received.count(b"HTTP/1.1 ") == 1


def test_connections_without_requests_are_closed(connect, server):
    silent, halfway = connect(), connect(request()[:30])
    began = time.monotonic()
    assert is_closed(silent)
    assert is_closed(halfway)
    assert 0.5 < time.monotonic() - began < 5
    late = connect(request(b"", "Content-Length: 50", length=False))
    status, _, body = read_response(late)
    assert (status, b"did not come" in body) == (408, True)


def test_many_idle_connections_do_no_harm(connect, server):
    busy = connect(request({**CHAT, "stream": True, "max_tokens": 400}))
    assert busy.recv(10)
    began = time.monotonic()
    idle = [connect() for _ in range(200)]
    assert read_response(connect(request()))[0] == 200
    until(lambda: sum(map(_is_gone, idle)) >= 160)
    assert time.monotonic() - began < 1.4  # so they had to go, and have not run out of time


def _is_gone(connection):
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
