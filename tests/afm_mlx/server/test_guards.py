import pytest

from afm_mlx.errors import RequestError
from afm_mlx.server.options import ServerOptions
from afm_mlx.server.run import bind
from tests.tools.cases import each
from tests.tools.server import running_server

KEYS = ("first-key", "second-key")
CHAT = {"model": "afm-nano", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def server():
    with running_server(
        api_keys=KEYS,
        allowed_hosts=("model.example",),
        cors_origins=("https://chat.example",),
        max_body=2000,
        max_share=0.01,
    ) as running:
        yield running


@pytest.fixture
def send(http, server):
    """Send a request with a key and other headers; returns status and code."""

    def send(path="/v1/models", method="GET", key=KEYS[0], **headers):
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        if key is not None:
            given.setdefault("Authorization", f"Bearer {key}")
        response = http.request(method, path, headers=given)
        try:
            return response.status_code, response.json()["error"]["code"]
        except (KeyError, ValueError):
            return response.status_code, None

    return send


def test_every_key_opens_and_nothing_else(send, http):
    for key in KEYS:
        assert send(key=key) == (200, None)
        assert send(key=None, x_api_key=key) == (200, None)
    for wrong in ("first", "first-key2", "FIRST-KEY", "first-key,second-key"):
        assert send(key=wrong) == (401, "invalid_api_key"), wrong
    assert send(key=None) == (401, "invalid_api_key")
    assert send(key=None, Authorization=f"Basic {KEYS[0]}") == (401, "invalid_api_key")
    assert send(key=None, path="/metrics")[0] == 401
    for path in ("/health", "/ready"):
        assert send(key=None, path=path) == (200, None)
    anthropic = http.post("/v1/messages", json={})
    assert anthropic.json() == {
        "type": "error",
        "error": {"type": "authentication_error", "message": anthropic.json()["error"]["message"]},
        "request_id": anthropic.headers["request-id"],
    }


@each(
    "headers, status",
    [
        ({"Host": "localhost:1234"}, 200),
        ({"Host": "[::1]:80"}, 200),
        ({"Host": "MODEL.example."}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Host": "192.168.1.5"}, 403),
        ({"Host": "localhost@evil.example"}, 403),
        ({"Host": ""}, 403),
        ({"Host": "localhost", "Origin": "http://localhost"}, 200),
        ({"Host": "localhost:8080", "Origin": "http://localhost:8080"}, 200),
        ({"Host": "localhost:8080", "Origin": "http://localhost:9999"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://["}, 403),
        ({"Origin": "http://[::1"}, 403),
        ({"Origin": ""}, 403),
        ({"Origin": "https://chat.example"}, 200),
        ({"Origin": "http://chat.example"}, 403),
    ],
)
def test_pages_of_others_cant_use_the_server(send, headers, status):
    assert send(**headers)[0] == status


def test_what_browsers_are_told(http):
    asks = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    allowed = http.options("/v1/chat/completions", headers=asks)
    assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
    refused = http.options(
        "/v1/chat/completions", headers={**asks, "Origin": "https://evil.example"}
    )
    assert "access-control-allow-origin" not in refused.headers
    with running_server() as plain, plain.http() as other:
        asked = other.get("/v1/models", headers={"Origin": plain.url})
        assert asked.status_code == 200
        assert not [name for name in asked.headers if name.startswith("access-control")]


def test_an_address_of_others_needs_a_key():
    for host in ("0.0.0.0", "::"):
        with pytest.raises(RequestError, match="needs a key"):
            bind(ServerOptions(host=host, port=0))


def test_clients_are_apart(server, http):
    """Neither finds in the cache what the other has said, and neither takes all of the queue."""
    cached = []
    for key in (*KEYS, *KEYS):
        answer = server.openai(key).chat.completions.create(**CHAT)
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached[:2] == [0, 0]
    assert min(cached[2:]) > 0
    many = http.post("/v1/chat/completions", json={**CHAT, "n": 4}, headers={"x-api-key": KEYS[0]})
    assert (many.status_code, many.json()["error"]["code"]) == (429, "queue_full")
    assert int(many.headers["retry-after"]) >= 1
