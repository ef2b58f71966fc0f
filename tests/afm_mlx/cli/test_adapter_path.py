"""`--adapter-path`, where a model runs."""

import json
import shutil
from unittest.mock import Mock

import mlx.core as mx
import pytest

from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.checkpoint.safetensors_file import save_file
from afm_mlx.engine.generation import generate
from afm_mlx.loading.load import load
from tests.tools.cli import lines

LIST = [{"role": "user", "content": "A list"}]


@pytest.fixture
def adapter(make_adapter):
    return make_adapter("adapter")


@pytest.fixture
def scratch(folder):
    """The answer of a model that has only this adapter, from nothing."""

    def scratch(adapter=None, messages=LIST):
        model, tokenizer = load(folder, adapter_path=adapter and str(adapter))
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return generate(model, tokenizer, prompt, max_tokens=12)

    return scratch


def test_commands_run_it(folder, adapter, scratch, done, fails, tmp_path):
    argv = ("generate", "--model", folder, "-p", "A list", "-m", 12, "--json", "--adapter-path")
    shutil.copytree(adapter, folder / "adapters" / "neat")
    for named in (adapter, "neat"):
        assert json.loads(done(*argv, named))["text"] == scratch(adapter) != scratch()
    assert "the model's own adapters are neat" in fails(*argv, "messy")
    data = lines(tmp_path / "texts.jsonl", {"text": "A list of names and what they are for."})
    argv = ("perplexity", "--model", folder, "--data-path", data, "--json")
    facts = [json.loads(done(*argv, *more)) for more in ((), ("--adapter-path", adapter))]
    assert facts[0]["perplexity"] != pytest.approx(facts[1]["perplexity"], rel=1e-3)


def test_another_model_s_adapter_is_one_line_and_can_be_forced(folder, adapter, done, fails, rng):
    argv = ("generate", "--adapter-path", adapter, "-p", "A list", "-m", 3)
    embedded = fails(*argv)
    assert "was made for the model with fingerprint" in embedded
    assert "(--force)" in embedded
    assert "was made for another model" in fails(*argv, "--force"), "its shapes don't fit"
    path = folder / "model.safetensors"
    weights = dict(mx.load(str(path)))
    mx.eval(weights)  # the file is about to be written
    name = str(rng.choice([n for n in weights if n.endswith("proj.weight")]))
    weights[name] = weights[name] + mx.array(1, weights[name].dtype)
    save_file(path, weights)
    fails(*argv, "--model", folder)
    assert done(*argv, "--model", folder, "--force")


def test_a_chat_switches(make_adapter, scratch, chat):
    """Each answer comes from the active adapter, after the whole conversation."""
    paths = {name: make_adapter(name, rank) for name, rank in (("first", 3), ("second", 5))}
    typed, messages, wanted = [], [], []
    for number, name in enumerate([None, "first", "second", "first", None]):
        question = f"the list of {number}"
        typed += [f"/adapter {name or ''}", question]
        messages.append({"role": "user", "content": question})
        wanted.append(scratch(paths.get(name), messages))
        messages.append({"role": "assistant", "content": wanted[-1]})
    own = [part for name, path in paths.items() for part in ("--adapter", f"{name}={path}")]
    out, notes = chat(*typed, flags=own)
    assert out == "".join(f"{answer}\n" for answer in wanted)
    none = "No adapter; there are: first, second."
    assert notes == [none, "Adapter: first.", "Adapter: second.", "Adapter: first.", none]


def test_a_chat_survives_an_adapter_that_can_not_be_loaded(make_adapter, scratch, chat):
    path = make_adapter("gone")
    (path / "adapters.safetensors").write_bytes(b"x")
    typed = ("/adapter gone", "/adapter unknown", "A list")
    out, notes = chat(*typed, flags=["--adapter", f"gone={path}"])
    assert out == scratch() + "\n"
    assert "no whole safetensors file" in notes[0]
    assert "unknown" in notes[1]


def test_ctrl_c_stops_a_switch_and_not_the_chat(adapter, scratch, chat, monkeypatch):
    monkeypatch.setattr(AdapterPool, "load", Mock(side_effect=KeyboardInterrupt))
    out, notes = chat("/adapter x", "A list", flags=["--adapter", f"x={adapter}"])
    assert out == scratch() + "\n"
    assert notes == ["Stopped; the adapter is the one before."]


def test_a_path_wins_over_an_adapter_that_comes_with_the_model(
    folder, make_adapter, scratch, chat, tmp_path, monkeypatch
):
    shutil.copytree(make_adapter("one"), folder / "adapters" / "neat")
    path = make_adapter("neat", 3)
    monkeypatch.chdir(tmp_path)
    wanted = scratch(path)
    for more in ((), ("--adapter", f"neat={path}"), ("--adapter", "neat=./neat")):
        assert chat("A list", flags=["--adapter-path", "neat", *more])[0] == wanted + "\n"


def test_names_and_memory_are_checked(folder, adapter, fails):
    for argv, says in [
        (("--adapter", "x"), "'x' is not NAME=PATH"),
        (("--adapter", "x=nowhere"), "There is no adapter 'nowhere': it is no path"),
        (("--adapter", "x=~nobody/x"), "There is no adapter '~nobody/x'"),
        (("--adapter-path", ""), "There is no adapter ''"),
        (
            ("--adapter", f"x={adapter}", "--adapter", f"x={folder}"),
            "--adapter gives x more than once",
        ),
        (
            ("--adapter-path", adapter, "--adapter", f"{adapter}={folder}"),
            "--adapter gives that name to",
        ),
        (("--adapter-memory", "1e300"), "1e300 is out of range"),
        (("--adapter-memory", "0"), "'0' is too little for an adapter"),
        (("--adapter-memory", "1e-12"), "'1e-12' is too little for an adapter"),
        (("--adapter-path", adapter, "--adapter-memory", "0.000001"), "1,000"),
    ]:
        assert says in fails("chat", "--model", folder, *argv)
