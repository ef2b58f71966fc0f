import shutil

import pytest

from afm_mlx.loading.resolve import resolve_model
from tests.tools.cases import each
from tests.tools.server import running_server, until

ADAPTERS = resolve_model("afm-nano") / "adapters"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of adapters that requests may load, with a link out of it."""
    root = tmp_path_factory.mktemp("adapters")
    allowed = root / "allowed"
    shutil.copytree(ADAPTERS / "todo", allowed / "mine")
    shutil.copytree(ADAPTERS / "todo", root / "outside")
    (allowed / "link").symlink_to(root / "outside")
    (allowed / "empty").mkdir()
    return allowed


@pytest.fixture(scope="module")
def server(folder):
    with running_server(adapter_folders=(folder,)) as running:
        yield running


def test_an_adapter_is_loaded_pinned_and_deleted(http, client, folder):
    text = "List the to-dos: Good morning, I am Maria. A stranger from Porto logged in as me."
    messages = [{"role": "user", "content": text}]
    made = http.post("/v1/adapters", json={"name": "mine", "path": "mine", "pinned": True})
    assert made.status_code == 201, made.text
    assert made.json()["id"] == "afm-nano:mine"
    assert (made.json()["state"], made.json()["pinned"]) == ("resident", True)
    answer = client.chat.completions.create(model="afm-nano:mine", messages=messages)
    assert "- [ ] Lock the account" in answer.choices[0].message.content
    assert "afm-nano:mine" in [model.id for model in client.models.list()]
    listed = http.get("/v1/adapters").json()
    names = {each["name"] for each in listed["data"]}
    assert names == {"mine", "redact", "search", "todo", "triage"}
    assert listed["bytes"] > 0
    assert f'adapter_resident_bytes{{model_name="afm-nano"}} {float(listed["bytes"])}' in (
        http.get("/metrics").text
    )
    taken = http.post("/v1/adapters", json={"name": "mine", "path": str(folder / "mine")})
    assert (taken.status_code, taken.json()["error"]["code"]) == (409, "name_taken")
    for action, state, pinned in (
        ("unpin", "resident", False),
        ("unload", "registered", False),
        ("load", "resident", False),
        ("pin", "resident", True),
    ):
        changed = http.post(f"/v1/adapters/mine/{action}").json()
        assert (changed["state"], changed["pinned"]) == (state, pinned), action
    assert http.delete("/v1/adapters/mine").json()["deleted"]
    gone = http.post("/v1/chat/completions", json={"model": "afm-nano:mine", "messages": messages})
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
    for path in ("/v1/adapters/mine/pin", "/v1/adapters/mine/nothing"):
        assert http.post(path).status_code == 404
    assert http.delete("/v1/adapters/mine").status_code == 404


def test_an_adapter_in_use_stays(server, http, client, folder):
    shutil.copytree(ADAPTERS / "redact", folder / "busy")
    assert http.post("/v1/adapters", json={"name": "busy", "path": "busy"}).status_code == 201
    long = {"guided_regex": "[a-z ]{2000}"}
    messages = [{"role": "user", "content": "Count."}]
    chunks = client.chat.completions.create(
        model="afm-nano:busy", messages=messages, stream=True, extra_body=long, max_tokens=500
    )
    next(chunks)
    refused = http.delete("/v1/adapters/busy")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "adapter_in_use")
    chunks.close()
    until(lambda: server.served.engine.rows == 0)
    assert http.delete("/v1/adapters/busy").status_code == 200


def test_the_servers_own_adapters_cant_be_removed(http):
    for method, path in (("DELETE", "redact"), ("POST", "redact/unload")):
        refused = http.request(method, f"/v1/adapters/{path}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "adapter_stays")
    assert http.post("/v1/adapters/redact/load").json()["state"] == "resident"


def test_an_adapter_whose_files_were_deleted(server, http, client, folder):
    """An adapter in memory keeps working; once unloaded, only its requests fail."""
    messages = [{"role": "user", "content": "hi"}]

    def answer(model):
        body = {"model": model, "messages": messages, "max_tokens": 3}
        return http.post("/v1/chat/completions", json=body)

    shutil.copytree(ADAPTERS / "todo", folder / "brief")
    assert http.post("/v1/adapters", json={"name": "brief", "path": "brief"}).status_code == 201
    shutil.rmtree(folder / "brief")
    assert answer("afm-nano:brief").status_code == 200
    assert http.post("/v1/adapters/brief/unload").status_code == 200
    failed = answer("afm-nano:brief")
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "adapter_failed")
    assert http.post("/v1/adapters/brief/load").status_code == 500
    assert answer("afm-nano:todo").status_code == answer("afm-nano").status_code == 200
    assert http.delete("/v1/adapters/brief").status_code == 200


@each(
    "name, path, status, param",
    [
        ("new", "/etc/passwd", 403, "path"),
        ("new", "../outside", 403, "path"),
        ("new", "mine/../../outside", 403, "path"),
        ("new", "link", 403, "path"),
        ("new", ".", 403, "path"),
        ("new", "nothing", 403, "path"),
        ("new", "mine\0", 403, "path"),
        ("new", "x" * 5000, 403, "path"),
        ("new", "empty", 400, "path"),
        ("../new", "mine", 400, "name"),
        ("new:2", "mine", 400, "name"),
        ("new\n", "mine", 400, "name"),
        ("", "mine", 400, "name"),
        (".hidden", "mine", 400, "name"),
    ],
)  # fmt: skip
def test_paths_outside_the_folder_and_bad_names_are_refused(http, name, path, status, param):
    before = http.get("/v1/models").json()
    refused = http.post("/v1/adapters", json={"name": name, "path": path})
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)
    assert http.get("/v1/models").json() == before
