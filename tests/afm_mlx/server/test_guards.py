import json
import shutil

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from afm_mlx.errors import RequestError
from afm_mlx.loading.resolve import resolve_model
from afm_mlx.server.guards import Guards
from afm_mlx.server.run import bind
from afm_mlx.server.server_options import ServerOptions
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


def test_only_known_keys_are_accepted(send, http):
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
)  # fmt: skip
def test_hosts_and_origins_of_other_sites_are_refused(send, headers, status):
    assert send(**headers)[0] == status


def test_cors_headers(http):
    asks = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    allowed = http.options("/v1/chat/completions", headers=asks)
    assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
    refused = http.options(
        "/v1/chat/completions", headers={**asks, "Origin": "https://evil.example"}
    )
    assert "access-control-allow-origin" not in refused.headers
    taken = http.get("/v1/models", headers={"Origin": "https://chat.example"})
    exposed = taken.headers["access-control-expose-headers"].split(", ")
    assert {"x-request-id", "x-afm-ignored"} <= set(exposed)
    with running_server() as plain, plain.http() as other:
        asked = other.get("/v1/models", headers={"Origin": plain.url})
        assert asked.status_code == 200
        assert not [name for name in asked.headers if name.startswith("access-control")]


def test_a_public_address_needs_a_key():
    for host in ("0.0.0.0", "::"):
        with pytest.raises(RequestError, match="needs a key"):
            bind(ServerOptions(host=host, port=0))


def test_clients_are_apart(server, http):
    """Clients share neither prefix cache entries nor all of the queue."""
    cached = []
    for key in (*KEYS, *KEYS):
        answer = server.openai(key).chat.completions.create(**CHAT)
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached[:2] == [0, 0]
    assert min(cached[2:]) > 0
    many = http.post("/v1/chat/completions", json={**CHAT, "n": 4}, headers={"x-api-key": KEYS[0]})
    assert (many.status_code, many.json()["error"]["code"]) == (429, "queue_full")
    assert int(many.headers["retry-after"]) >= 1


def test_only_an_admin_key_changes_what_others_use(tmp_path):
    """Only an admin key reads metrics and the adapters' folders, too."""
    shutil.copytree(resolve_model("afm-nano") / "adapters" / "todo", tmp_path / "mine")
    changes = [
        ("POST", "/v1/adapters", {"name": "mine", "path": "mine"}),
        *(
            ("POST", f"/v1/adapters/mine/{each}", None)
            for each in ("pin", "unpin", "unload", "load")
        ),
        ("DELETE", "/v1/adapters/mine", None),
    ]
    options = {"api_keys": KEYS, "admin_keys": ("the-admins",), "adapter_folders": (tmp_path,)}
    with running_server(**options) as running, running.http() as http:

        def send(key, method, path, body=None):
            return http.request(method, path, json=body, headers={"x-api-key": key})

        for method, path, body in [*changes, ("GET", "/metrics", None)]:
            refused = send(KEYS[0], method, path, body)
            reported = (refused.status_code, refused.json()["error"]["code"])
            assert reported == (403, "admin_key_needed"), path
        answer = send("the-admins", "POST", "/v1/chat/completions", CHAT)
        assert answer.json()["usage"]["completion_tokens"] == 2
        for method, path, body in changes[:-1]:
            assert send("the-admins", method, path, body).status_code in (200, 201), path
        plain = send(KEYS[0], "GET", "/v1/adapters").json()
        assert set(plain) == {"object", "data"}
        assert set(plain["data"][0]) == {"id", "object", "name", "state", "bytes", "rank", "pinned"}
        whole = send("the-admins", "GET", "/v1/adapters").json()
        assert {"rows", "waiting", "source"} < set(whole["data"][0])
        assert str(tmp_path) not in json.dumps(whole)
        assert send("the-admins", *changes[-1][:2]).status_code == 200
        assert send("the-admins", "GET", "/metrics").status_code == 200


def test_an_admin_key_alone_leaves_this_machine_open():
    with running_server(admin_keys=("the-admins",)) as running, running.http() as http:
        assert running.openai("none").chat.completions.create(**CHAT).usage.completion_tokens == 2
        assert http.get("/metrics").status_code == 403
        assert http.get("/metrics", headers={"x-api-key": "wrong"}).status_code == 403
        assert http.get("/metrics", headers={"x-api-key": "the-admins"}).status_code == 200
    with bind(ServerOptions(host="0.0.0.0", port=0, admin_keys=("the-admins",))) as listening:
        assert listening.getsockname()[1]
    routes = [Route("/", lambda request: Response())]
    options = ServerOptions(host="0.0.0.0", admin_keys=("the-admins",))
    app = Starlette(routes=routes, middleware=[Middleware(Guards, options=options)])
    with TestClient(app, "http://localhost") as public:
        assert public.get("/v1/models").status_code == 401
        assert public.get("/v1/models", headers={"x-api-key": "the-admins"}).status_code == 404
