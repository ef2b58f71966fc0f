"""A path, the embedded model's name, or a hub id of two words; and what the hub's models come as."""

import contextlib
import hashlib
import io
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import WeakFileLock
from huggingface_hub.utils import _http as http_utils

from afm_mlx.errors import AFMError
from afm_mlx.loading import resolve
from tests.tools.cases import each, until
from tests.tools.hub_server import COMMIT, Hub


def test_a_folder_comes_before_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(resolve, "_download", lambda name, revision: (name, revision))
    assert resolve.resolve_model("owner/name", revision="r") == ("owner/name", "r")
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert str(resolve.resolve_model("owner/name")) == "owner/name"
    for name in resolve.EMBEDDED_MODELS:
        assert (resolve.resolve_model(name) / "config.json").is_file()


def test_what_is_no_model(tmp_path, monkeypatch):
    monkeypatch.setattr(resolve, "_download", lambda name, revision: pytest.fail("downloads"))
    for name in ("missing", "a/b/c", "./owner/name", "/owner", "~/name"):
        with pytest.raises(AFMError, match=f"There is no folder {name}. Give a model folder"):
            resolve.resolve_model(name)
    (tmp_path / "model.pt").touch()
    with pytest.raises(AFMError, match="is a file; a model is a folder"):
        resolve.resolve_model(tmp_path / "model.pt")


WEIGHTS = bytes(range(256)) * 400
MODEL = {"config.json": b"{}", "model.safetensors": WEIGHTS, "tokenizer.json": b"t" * 3000}
LARGE_FILES = ["model.safetensors", "tokenizer.json"]
OTHER_FORMS = {
    name: name.encode() * 500
    for name in (
        *(
            "pytorch_model.bin",
            "consolidated.safetensors",
            "model.gguf",
            "original/model.safetensors",
        ),
        *("original/consolidated.00.pth", "onnx/model.onnx", "metal/model.bin"),
    )
}


@pytest.fixture
def serve(monkeypatch, tmp_path):
    """Start hubs that huggingface_hub asks from now on; its cache is empty."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(resolve, "_WAIT", 0)
    with contextlib.ExitStack() as stack:

        def start(files=MODEL, **options):
            hub = stack.enter_context(Hub(files, **options))
            url = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
            resolve._download.cache_clear()
            monkeypatch.setattr(constants, "ENDPOINT", hub.url)
            monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
            return hub

        yield start


def stored(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def parts(tmp_path):
    return list(tmp_path.rglob("*.incomplete"))


def test_a_model_is_fetched_once_and_only_what_it_needs(serve, monkeypatch):
    small = {"chat_template.jinja": b"x", "merges.txt": b"y", "original/params.json": b"{}"}
    model = MODEL | {"adapters/a/adapters.safetensors": b"a" * 2000}
    hub = serve(model | OTHER_FORMS | small | {"README.md": b"r", "modeling.py": b"p"})
    folder = resolve.resolve_model("owner/name")
    del small["original/params.json"]
    assert stored(folder) == model | small
    assert sorted(name for name, _ in hub.got) == ["adapters/a/adapters.safetensors", *LARGE_FILES]
    hub.got.clear()
    resolve._download.cache_clear()
    assert resolve.resolve_model("owner/name") == folder
    assert resolve.resolve_model("owner/name", COMMIT) == folder
    assert not hub.got
    resolve._download.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve.resolve_model("owner/name") == folder


def test_connections_that_break_off_are_replaced(serve, tmp_path):
    hub = serve(drops=[40_000, 0, 0, 0, 30_000])
    folder = resolve.resolve_model("owner/name")
    assert stored(folder) == MODEL
    starts = [0, 40_000, 40_000, 40_000, 40_000, 70_000]
    assert [r for n, r in hub.got if n == "model.safetensors"] == [f"bytes={n}-" for n in starts]
    assert not parts(tmp_path)


def test_a_hub_that_ignores_ranges_is_asked_for_all_again(serve):
    hub = serve(drops=[40_000], ranges=False)
    assert stored(resolve.resolve_model("owner/name")) == MODEL
    assert hub.got[:2] == [("model.safetensors", f"bytes={n}-") for n in (0, 40_000)]


@each(
    "options",
    [
        {"drops": [40_000] * resolve._TRIES, "ranges": False},  # each time from the beginning
        {"drops": [40_000, *[0] * resolve._TRIES], "is_short": True},
    ],
)
def test_answers_that_bring_nothing_more_end(options, serve):
    serve(**options)
    with pytest.raises(AFMError, match=r"the same command continues it\.$"):
        resolve.resolve_model("owner/name")


def test_a_token_is_shown_to_the_hub_alone(serve, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    cdn = serve()
    hub = serve(cdn=cdn)
    assert stored(resolve.resolve_model("owner/name")) == MODEL
    assert hub.tokens == ["Bearer hf_secret"] * 2
    assert cdn.tokens == [None] * 2


def test_a_later_run_continues(serve, tmp_path):
    hub = serve(drops=[40_000, *[0] * resolve._TRIES])
    with pytest.raises(AFMError, match=r"can't be reached: .*the same command continues it\.$"):
        resolve.resolve_model("owner/name")
    (part,) = parts(tmp_path)
    assert part.read_bytes() == WEIGHTS[:40_000]
    hub.got.clear()
    assert stored(resolve.resolve_model("owner/name")) == MODEL
    assert hub.got[0] == ("model.safetensors", "bytes=40000-")


def test_what_is_damaged_is_removed(serve, tmp_path):
    hub = serve(drops=[4000, *[0] * resolve._TRIES])
    with pytest.raises(AFMError):
        resolve.resolve_model("owner/name")
    (part,) = parts(tmp_path)
    part.write_bytes(b"?" * 4000)
    with pytest.raises(AFMError, match="was damaged, and is removed: run the command again"):
        resolve.resolve_model("owner/name")
    assert not parts(tmp_path)
    assert stored(resolve.resolve_model("owner/name")) == MODEL
    assert hub.got[-2:] == [("model.safetensors", "bytes=0-"), ("tokenizer.json", "bytes=0-")]


@each("content", [b"{}", WEIGHTS])
def test_names_that_lead_out_of_the_folder_are_refused(content, serve, tmp_path):
    serve(MODEL | {"../../evil.json": content})
    with pytest.raises(AFMError, match=r"owner/name can't be stored: Invalid filename .*evil"):
        resolve.resolve_model("owner/name")
    assert not list(tmp_path.rglob("*evil*"))


def test_what_another_process_fetches_is_waited_for(serve, tmp_path):
    hub = serve()
    blob = (
        tmp_path / "cache" / "models--owner--name" / "blobs" / hashlib.sha256(WEIGHTS).hexdigest()
    )
    lock = tmp_path / "cache" / ".locks" / "models--owner--name" / f"{blob.name}.lock"
    lock.parent.mkdir(parents=True)
    with ThreadPoolExecutor() as pool:
        with WeakFileLock(lock):
            folder = pool.submit(resolve.resolve_model, "owner/name")
            until(blob.parent.exists)
            blob.write_bytes(WEIGHTS)
        assert stored(folder.result()) == MODEL
    assert [name for name, _ in hub.got] == ["tokenizer.json"]


@each(
    "errors, message",
    [
        (
            {"/resolve/": (403, "GatedRepo")},
            "owner/name is gated: accept its terms on http.*/owner/name, then",
        ),
        (
            {"/api/": (401, "RepoNotFound")},
            "no folder owner/name, and no public model of this name on the hub",
        ),
        ({"/api/": (404, "RevisionNotFound")}, "owner/name has no revision 'v2' on the hub"),
        ({"/api/": (503, "")}, "The hub answered 503 for owner/name: try again later"),
        ({"/resolve/": (429, "")}, "The hub answered 429 for owner/name: try again later"),
        ({"config.json": (404, "EntryNotFound")}, "The hub answered 404 for owner/name"),
        ({"/resolve/": (401, "")}, "The hub refused the token with which owner/name was asked for"),
    ],
)
def test_why_a_model_can_not_be_fetched(errors, message, serve, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / message[:20]))
    serve(errors=errors)
    revision = "v2" if "v2" in message else None
    with pytest.raises(AFMError, match=message) as caught:
        resolve.resolve_model("owner/name", revision)
    assert "\n" not in str(caught.value)


def test_no_network(serve, monkeypatch, tmp_path):
    hub = serve()
    hub.__exit__()
    with pytest.raises(
        AFMError, match=r"owner/name is not on this machine, .* can't be reached: .*refused"
    ):
        resolve.resolve_model("owner/name")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        AFMError, match="or not all of it, and HF_HUB_OFFLINE=1 forbids fetching it"
    ):
        resolve.resolve_model("owner/name")
    with pytest.raises(AFMError, match="There is no folder 'a b/c', and it is no hub id"):
        resolve.resolve_model("a b/c")


def test_an_incomplete_model_is_not_used_offline(serve, monkeypatch):
    serve(errors={"config.json": (503, "")})
    monkeypatch.setattr(http_utils.time, "sleep", lambda seconds: None)
    with pytest.raises(AFMError, match="answered 503"):
        resolve.resolve_model("owner/name")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(AFMError, match="or not all of it, and HF_HUB_OFFLINE=1 forbids"):
        resolve.resolve_model("owner/name")


@each(
    "files, has",
    [
        (OTHER_FORMS | {"config.json": b"{}"}, ".bin, .gguf, .json, .onnx, .pth, .safetensors"),
        ({"model.safetensors": WEIGHTS}, ".safetensors"),
        ({"README.md": b""}, "of no kind"),
    ],
)
def test_repositories_without_a_model_are_refused_before_anything_is_fetched(files, has, serve):
    hub = serve(files)
    with pytest.raises(
        AFMError, match=rf"needs config.json and model\*.safetensors, and has files {has}\."
    ):
        resolve.resolve_model("owner/name")
    assert not hub.got


def test_a_full_disk(serve, monkeypatch):
    hub = serve()
    free = shutil._ntuple_diskusage(10**6, 10**6, 50_000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: free)
        with pytest.raises(
            AFMError, match=r"needs 0.0 GB of disk, and .*cache has 0.0 GB free. Free some"
        ):
            resolve.resolve_model("owner/name")
    assert not hub.got
    with monkeypatch.context() as patch:
        patch.setattr(resolve, "_part", lambda blob: Path("/dev/full"))
        with pytest.raises(
            AFMError, match=r"The disk is full: owner/name does not fit into .*cache"
        ):
            resolve.resolve_model("owner/name")
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", "/dev/null/cache")
        with pytest.raises(AFMError, match="can't be stored in /dev/null/cache: Not a directory"):
            resolve.resolve_model("owner/name")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_a_bar_or_lines(serve, tmp_path, monkeypatch):
    hub = serve(drops=[40_000, *[0] * resolve._TRIES])
    with pytest.raises(AFMError):
        resolve.resolve_model("owner/name")
    monkeypatch.setattr(resolve, "_LINE_SECONDS", 0)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    resolve.resolve_model("owner/name")
    first, *_, last = sys.stderr.getvalue().splitlines()
    assert first.startswith("owner/name: 40.0k of 105k (38 %), ")
    assert last.startswith("owner/name: 105k of 105k (100 %), ")
    resolve._download.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "again"))
    monkeypatch.setattr(sys, "stderr", Terminal())
    resolve.resolve_model("owner/name")
    assert "\rowner/name: 100%|" in sys.stderr.getvalue()
    assert len(hub.got) == 1 + resolve._TRIES + 2 + 2


def test_an_interrupted_command_continues(tmp_path):
    """The whole way: afm-nano from a slow hub, Ctrl-C, the same command again."""
    source = resolve.resolve_model("afm-nano")
    files = {path.name: path.read_bytes() for path in source.iterdir() if path.is_file()}
    with Hub(files, delay=0.002) as hub:
        variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-m", "afm_mlx", "info", "--model", "owner/name"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        first = subprocess.Popen(command, env=os.environ | variables, **pipes)
        until(lambda: any(part.stat().st_size > 100_000 for part in parts(tmp_path)))
        first.send_signal(signal.SIGINT)
        _, error = first.communicate()
        assert first.returncode == 130, error
        assert "Traceback" not in error
        (part,) = parts(tmp_path)
        kept, hub.delay = part.stat().st_size, 0
        hub.got.clear()
        again = subprocess.run(command, env=os.environ | variables, **pipes)
    assert again.returncode == 0, again.stderr
    assert "owner/name: " in again.stderr
    assert f"bytes={kept}-" in dict(hub.got).values()
