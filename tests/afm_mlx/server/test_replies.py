"""Errors name what clients can fix, and neither the server's files nor the texts of exceptions."""

import json
import shutil

import pytest

from afm_mlx.loading.resolve import resolve_model
from afm_mlx.tokenizer.chat_template import ChatTemplate
from tests.tools.server import running_server, until

CHAT = {"model": "afm-nano", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A model's folder, and a folder of adapters, one of them damaged."""
    root = tmp_path_factory.mktemp("secret place")
    shutil.copytree(resolve_model("afm-nano"), root / "afm-nano")
    shutil.copytree(root / "afm-nano" / "adapters" / "todo", root / "adapters" / "mine")
    shutil.copytree(root / "adapters" / "mine", root / "adapters" / "damaged")
    for weights in (root / "adapters" / "damaged").glob("*.safetensors"):
        weights.write_bytes(b"no weights")
    (root / "link").symlink_to(root / "adapters")
    return root


@pytest.fixture(scope="module")
def server(places):
    with running_server(source=places / "afm-nano", adapter_folders=(places / "link",)) as running:
        yield running


def test_no_error_names_a_folder_of_the_server(server, http, places, monkeypatch):
    def send(method, path, body=None):
        response = http.request(method, path, json=body)
        assert "secret place" not in response.text, path
        return response

    assert "afm-nano" in send("POST", "/detokenize", {"tokens": [10**6]}).json()["error"]["message"]
    for path in ("nothing", "damaged", "damaged/../..", str(places / "afm-nano")):
        assert send("POST", "/v1/adapters", {"name": "new", "path": path}).status_code in (400, 403)
    assert send("POST", "/v1/adapters", {"name": "mine", "path": "mine"}).status_code == 201
    assert "mine" in send("GET", "/v1/adapters").text
    assert send("POST", "/v1/adapters/mine/unload").status_code == 200
    shutil.rmtree(places / "adapters" / "mine")
    failed = send("POST", "/v1/chat/completions", {**CHAT, "model": "afm-nano:mine"})
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "adapter_failed")
    assert send("POST", "/v1/adapters/mine/load").status_code == 500
    send("GET", "/v1/adapters")
    path = str(places / "afm-nano" / "chat_template.jinja")
    template = ChatTemplate("{{ raise_exception('not today') }}", path)
    monkeypatch.setattr(server.served.tokenizer, "_chat_template", template)
    for route, more in (("chat/completions", {}), ("messages", {}), ("responses", {"input": "hi"})):
        body = {"model": "afm-nano", **more} if more else CHAT
        for asked in (body, {**body, "stream": True}):
            refused = send("POST", f"/v1/{route}", asked)
            assert refused.status_code == 400
            assert "not today" in refused.json()["error"]["message"]  # the template's own reason
            assert "afm-nano/chat_template.jinja" in refused.json()["error"]["message"]


def test_texts_of_exceptions_stay_in_the_log(server, http, places, monkeypatch, caplog):
    def fail(*args, **options):
        raise OSError(f"[Errno 5] Input/output error: {places}")

    monkeypatch.setattr(server.served.tokenizer, "apply_chat_template", fail)
    monkeypatch.setattr(server.served.tokenizer, "encode", fail)
    for path, body in (
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "stream": True}),
        ("/v1/completions", {"model": "afm-nano", "prompt": "hi"}),
        ("/v1/messages", CHAT),
        ("/v1/messages", {**CHAT, "stream": True}),
        ("/v1/responses", {"model": "afm-nano", "input": "hi"}),
        ("/tokenize", {"prompt": "hi"}),
    ):
        caplog.clear()
        failed = http.post(path, json=body)
        assert failed.status_code == 500
        assert (
            failed.headers["connection"] == "close"
        )  # uvicorn closes it: the next request needs another
        error = failed.json()["error"]
        assert "its log says why" in error["message"]
        assert "Errno" not in json.dumps(error)
        until(lambda: "Errno 5" in caplog.text)
        assert failed.headers["x-request-id"] in caplog.text
