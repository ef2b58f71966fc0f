"""Pipes, devices, sockets, folders and files of any size where a file is expected: one error, soon."""

import contextlib
import io
import os
import shutil
import socket
import sys
from unittest import mock

import mlx.core as mx
import pytest

from afm_mlx import files
from afm_mlx.adapters.active import attach_adapter, detach_adapter
from afm_mlx.adapters.adapter_folder import AdapterConfig
from afm_mlx.adapters.formats import FORMATS, write_adapter
from afm_mlx.checkpoint.fingerprint import base_model_fingerprint
from afm_mlx.cli import main, server
from afm_mlx.cli.arguments import parse
from afm_mlx.engine.prompt_cache import save_prompt_cache
from afm_mlx.loading.load import load
from tests.hostile.file_mutations import pick
from tests.hostile.folders import CONFIG
from tests.hostile.harness import Case, run_cases
from tests.tools.adapters import draw_tensors
from tests.tools.cli import lines, write_folder
from tests.tools.models import random_model
from tests.tools.tokenizers import train_tiny_spm

KINDS = ["pipe", "zeros", "noise", "null", "socket", "folder", "sparse", "loop", "nowhere", "empty"]
ENDS = {"toolkit": ".pt", "fmadapter": ".fmadapter"}


def put(kind, path):
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(path.parent):
            server.bind(path.name)  # by a short name: addresses have a hundred bytes
    elif kind == "folder":
        path.mkdir()
    elif kind in ("sparse", "empty"):
        with path.open("wb") as file:
            file.truncate((1 << 40) * (kind == "sparse"))
    else:
        targets = {"zeros": "/dev/zero", "noise": "/dev/urandom", "null": "/dev/null"}
        targets["loop"] = path.name
        path.symlink_to(targets.get(kind, "nothing-here"))


@contextlib.contextmanager
def replaced(path, kind):
    aside = path.with_name("aside")
    path.rename(aside)
    try:
        put(kind, path)
        yield
    finally:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        aside.rename(path)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(files, "PIPE_PAUSE", 0.02)


@pytest.fixture(scope="module")
def spm(tmp_path_factory):
    return train_tiny_spm(tmp_path_factory.mktemp("bpe") / "tokenizer.model", "bpe")


def test_any_file_of_a_model_or_an_adapter(rng, impatient, spm, tmp_path):
    folder = write_folder(tmp_path / "model", spm, rng)
    hub = tmp_path / "hub"
    shutil.copytree(folder, hub)
    (hub / "tokenizer.model").unlink()
    model = random_model(CONFIG, rng)
    tensors = {name: mx.array(t) for name, t in draw_tensors(model, rng, rank=4).items()}
    config = AdapterConfig(4, 0.5, -1, base_model_fingerprint=base_model_fingerprint(model))
    adapters = {}
    for kind in FORMATS:
        path = tmp_path / f"{kind.replace('-', '_')}{ENDS.get(kind, '')}"
        write_adapter(path, tensors, config, kind, model_config=CONFIG)
        adapters[path] = sorted(path.iterdir()) if path.is_dir() else [path]

    def use(path):
        if path in adapters:
            try:
                attach_adapter(model, path)
            finally:
                detach_adapter(model)
        else:
            load(path)

    places = adapters | {path: sorted(path.iterdir()) for path in (folder, hub)}

    def generate(rng):
        path, kind = pick(rng, list(places)), pick(rng, KINDS)
        file = pick(rng, places[path])

        def run():
            with replaced(file, kind):
                use(path)

        return Case(f"{file.relative_to(tmp_path)} is {kind}", run)

    run_cases(generate, rng, 0.03)


def test_any_file_that_a_user_names(rng, impatient, spm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = str(write_folder(tmp_path / "model", spm, rng))
    (tmp_path / "data").mkdir()
    loaded, _ = load(model)
    cache = loaded.make_cache()
    loaded.prefill(mx.array([[1, 2, 3]]), cache)
    save_prompt_cache(tmp_path / "cache.safetensors", cache, loaded)
    for name in ("train", "valid", "test"):
        lines(tmp_path / "data" / f"{name}.jsonl", *[{"prompt": "a", "completion": "b"}] * 3)
    for name in ("schema.json", "g.lark", "g.gbnf", "c.yaml", "keys", "text.txt", "types.py"):
        (tmp_path / name).write_text("{}")
    generate_ = ["generate", "--model", model, "-p", "a", "-m", "2"]
    lora = ["lora", "--model", model, "--train", "--iters", "1", "--batch-size", "1"]
    lora += ["--adapter-path", "new"]
    ways = [
        ("schema.json", [*generate_, "--json-schema", "schema.json"]),
        ("types.py", [*generate_, "--json-schema", "types.py:A"]),
        ("g.lark", [*generate_, "--grammar", "g.lark"]),
        ("g.gbnf", [*generate_, "--grammar", "g.gbnf"]),
        ("cache.safetensors", [*generate_, "--prompt-cache-file", "cache.safetensors"]),
        ("c.yaml", ["lora", "-c", "c.yaml"]),
        ("keys", ["server", "--model", model, "--api-key-file", "keys"]),
        ("data/train.jsonl", [*lora, "--data", "data"]),
        ("data/valid.jsonl", [*lora, "--data", "data"]),
        ("data/train.jsonl", [*lora, "--data", "data/train.jsonl"]),
        ("data/test.jsonl", ["evaluate", "--model", model, "--data", "data/test.jsonl"]),
        ("data/test.jsonl", ["perplexity", "--model", model, "--data-path", "data"]),
        ("text.txt", ["perplexity", "--model", model, "--data-path", "text.txt"]),
    ]
    monkeypatch.setattr("afm_mlx.cli.lora.run_training", lambda *args: None)

    def draw(rng):
        name, argv = pick(rng, ways)
        kind = pick(rng, KINDS)

        def run():
            with replaced(tmp_path / name, kind):
                _run(argv)

        return Case(f"{name} is {kind} for {argv}", run)

    run_cases(draw, rng, 0.02)


def _run(argv):
    if argv[0] == "server":  # which would go on to serve
        server._keys(parse("server", server, argv[1:]), "api", server.KEY_VARIABLE)
        return
    out, err, nothing = (io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(3))
    stdin = mock.patch.object(sys, "stdin", nothing)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), stdin:
        status = main(argv)
    err.seek(0)
    text = err.read()
    assert status in (0, 2)
    assert status == 0 or text.splitlines()[-1].startswith("afm-mlx: error: ")
