"""`--adapter-path`, where a model runs."""

import io
import json
import shutil
import sys

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.adapter_folder import load_adapter, save_adapter
from afm_mlx.adapters.attach import attach_adapter, detach_adapter
from afm_mlx.adapters.lora import add_lora, lora_tensors, save_lora
from afm_mlx.adapters.opening import OpenAdapter
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.checkpoint.safetensors_file import save_file
from afm_mlx.engine.generation import generate
from afm_mlx.loading.load import load
from tests.tools.cli import answer, lines


@pytest.fixture
def write(folder, tmp_path, rng):
    """Writes an adapter of the tiny model that changes what it says."""

    def write(name, rank=4):
        model, _ = load(folder)
        add_lora(model, rank, 0.5, seed=int(rng.integers(2**31)))
        drawn = {
            n: mx.array(rng.normal(0, 0.5, t.shape).astype(np.float32)) if ".lora_b" in n else t
            for n, t in lora_tensors(model).items()
        }
        model.load_weights(list(drawn.items()), strict=False)
        save_lora(model, tmp_path / name, folder)
        return tmp_path / name

    return write


@pytest.fixture
def adapter(write):
    return write("adapter")


def test_load_attaches(folder, adapter):
    tokens = mx.array([[1, 2, 3]])
    bare, adapted = load(folder)[0], load(folder, adapter_path=str(adapter))[0]
    plain, wanted = bare(tokens), attach_adapter(bare, adapter)(tokens)
    assert mx.array_equal(adapted(tokens), wanted)
    assert not mx.allclose(wanted, plain, atol=0.05)
    assert mx.array_equal(detach_adapter(adapted)(tokens), plain)


def test_commands_run_it(folder, adapter, run, tmp_path):
    data = lines(tmp_path / "texts.jsonl", {"text": "A list of names and what they are for."})
    found = {}
    for command, argv in {
        "generate": ("-p", "A list", "-m", 12),
        "perplexity": ("--data-path", data),
    }.items():
        outputs = []
        for options in ((), ("--adapter-path", adapter)):
            status, out, err = run(command, "--model", folder, *argv, "--json", *options)
            assert (status, err) == (0, "")
            outputs.append(json.loads(out))
        found[command] = outputs
    texts = [result["text"] for result in found["generate"]]
    assert texts[0] == answer(folder, "A list")
    assert texts[1] != texts[0]
    plain, adapted = (result["perplexity"] for result in found["perplexity"])
    assert plain != pytest.approx(adapted, rel=1e-3)


def test_a_prompt_cache_is_not_shared(folder, adapter, run, fails, tmp_path):
    argv = ("generate", "--model", folder, "-p", "A list", "-m", 3)
    cache = ("--prompt-cache-file", tmp_path / "cache.safetensors")
    assert run(*argv, *cache)[0] == 0
    assert run(*argv, *cache)[0] == 0
    assert "made with another adapter" in fails(*argv, *cache, "--adapter-path", adapter)


def test_another_model_s_adapter_is_one_line(adapter, fails):
    line = fails("generate", "--adapter-path", adapter, "-p", "x")  # the embedded model
    assert "was made for the model with fingerprint" in line
    assert "(--force)" in line
    assert "was made for another model" in fails(
        "generate", "--adapter-path", adapter, "-p", "x", "--force"
    ), "its shapes don't fit"


def test_another_model_s_adapter_can_be_forced(folder, adapter, run, rng):
    path = folder / "model.safetensors"
    weights = dict(mx.load(str(path)))
    mx.eval(weights)  # the file is about to be written
    name = str(rng.choice([n for n in weights if n.endswith("proj.weight")]))
    weights[name] = weights[name] + mx.array(1, weights[name].dtype)
    save_file(path, weights)
    argv = ("generate", "--model", folder, "--adapter-path", adapter, "-p", "A list", "-m", 3)
    assert run(*argv)[0] == 2
    status, out, err = run(*argv, "--force")
    assert (status, err) == (0, "")
    assert out


# -- several, in one chat


def scratch(folder, messages, adapter=None):
    """The answer of a model that has only this adapter, from nothing."""
    model, tokenizer = load(folder, adapter_path=adapter and str(adapter))
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return generate(model, tokenizer, prompt, max_tokens=8)


def test_a_chat_switches(folder, write, run, monkeypatch):
    """Each answer is that of the adapter that is switched on, after all that was said before."""
    paths = {name: write(name, rank) for name, rank in (("first", 3), ("second", 5))}
    turns = [None, "first", "second", "first", None]
    typed, messages, wanted = [], [], []
    for number, name in enumerate(turns):
        question = f"the list of {number}"
        typed += [f"/adapter {name or ''}", question]
        messages.append({"role": "user", "content": question})
        wanted.append(scratch(folder, messages, paths.get(name)))
        messages.append({"role": "assistant", "content": wanted[-1]})
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(typed).encode())))
    named = [f"{name}={path}" for name, path in paths.items()]
    status, out, err = run(
        "chat", "--model", folder, "-m", 8, "--adapter", named[0], "--adapter", named[1]
    )
    assert status == 0
    assert out == "".join(f"{answer}\n" for answer in wanted)
    assert [line for line in err.splitlines() if "Adapter:" in line] == [
        "Adapter: first.",
        "Adapter: second.",
        "Adapter: first.",
    ]
    assert err.count("No adapter; there are: first, second.") == 2


def test_a_chat_survives_an_adapter_that_can_not_be_loaded(folder, write, run, monkeypatch):
    path = write("gone")
    (path / "adapters.safetensors").write_bytes(b"x")
    typed = "/adapter gone\n/adapter unknown\nA list\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed.encode())))
    status, out, err = run("chat", "--model", folder, "-m", 8, "--adapter", f"gone={path}")
    assert status == 0
    assert out.strip() == scratch(folder, [{"role": "user", "content": "A list"}]).strip()
    assert "no whole safetensors file" in err
    assert "unknown" in err


def test_a_chat_survives_an_adapter_that_had_to_go_and_is_no_more(
    folder, write, run, monkeypatch, rng
):
    """The one before made room for one that turns out to be damaged, and is to be read again."""
    first, damaged = write("first"), write("damaged")
    with AdapterPool(load(folder)[0]) as pool:
        pool.register("first", first)
        nbytes = pool.load("first").nbytes
    tensors, config = load_adapter(damaged)
    mx.eval(tensors)  # the file is about to be written
    name = str(rng.choice(list(tensors)))
    save_adapter(damaged, tensors | {name: mx.full(tensors[name].shape, float("nan"))}, config)
    read = OpenAdapter.read

    def deletes(self):
        if self.source == str(damaged):
            shutil.rmtree(first)
        return read(self)

    monkeypatch.setattr(OpenAdapter, "read", deletes)
    typed = "/adapter first\n/adapter damaged\nA list\n/adapter\nA list\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed.encode())))
    memory = ("--adapter-memory", nbytes / 1e9)
    named = [f"{path.name}={path}" for path in (first, damaged)]
    status, out, err = run(
        "chat", "--model", folder, "-m", 8, *memory, "--adapter", named[0], "--adapter", named[1]
    )
    assert status == 0
    assert out == scratch(folder, [{"role": "user", "content": "A list"}]) + "\n"
    assert "NaN" in err
    assert "The question is left out" in err
    assert "moved or deleted" in err


def test_ctrl_c_stops_a_switch_and_not_the_chat(folder, write, run, say, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(AdapterPool, "load", interrupted)
    say(b"/adapter x\nA list\n")
    status, out, err = run("chat", "--model", folder, "-m", 8, "--adapter", f"x={write('x')}")
    assert status == 0
    assert out == scratch(folder, [{"role": "user", "content": "A list"}]) + "\n"
    assert "Stopped; the adapter is the one before." in err


def test_adapters_that_come_with_a_model(folder, write, run, fails):
    path = write("a")
    shutil.copytree(path, folder / "adapters" / "neat")
    argv = ("generate", "--model", folder, "-p", "A list", "-m", 8)
    status, out, err = run(*argv, "--adapter-path", "neat", "--json")
    assert (status, err) == (0, "")
    asked = [{"role": "user", "content": "A list"}]
    assert json.loads(out)["text"] == scratch(folder, asked, path) != scratch(folder, asked)
    assert "the model's own adapters are neat" in fails(*argv, "--adapter-path", "messy")


def test_a_path_wins_over_an_adapter_that_comes_with_the_model(
    folder, write, run, say, tmp_path, monkeypatch
):
    """In a chat too, where the latter has the same name."""
    shutil.copytree(write("one"), folder / "adapters" / "neat")
    path = write("neat", 3)
    monkeypatch.chdir(tmp_path)
    wanted = scratch(folder, [{"role": "user", "content": "A list"}], path)
    argv = ("--model", folder, "-m", 8, "--adapter-path", "neat")
    for more in ((), ("--adapter", f"neat={path}"), ("--adapter", "neat=./neat")):
        say(b"A list\n")
        status, out, _ = run("chat", *argv, *more)
        assert (status, out) == (0, wanted + "\n")
    status, out, _ = run("generate", *argv, "-p", "A list", "--json")
    assert json.loads(out)["text"] == wanted


def test_names_and_memory_are_checked(folder, adapter, fails):
    argv = ("chat", "--model", folder)
    assert "'x' is no NAME=PATH" in fails(*argv, "--adapter", "x")
    assert "There is no adapter 'nowhere': it is no path" in fails(*argv, "--adapter", "x=nowhere")
    assert "There is no adapter ''" in fails(*argv, "--adapter-path", "")
    twice = ("--adapter", f"x={adapter}", "--adapter", f"x={folder}")
    assert "--adapter gives x more than once" in fails(*argv, *twice)
    paths = ("--adapter-path", adapter, "--adapter", f"{adapter}={folder}")
    assert "--adapter gives that name to" in fails(*argv, *paths)
    assert "1e300 is out of range" in fails(*argv, "--adapter-memory", "1e300")
    assert "There is no adapter '~nobody/x'" in fails(*argv, "--adapter", "x=~nobody/x")
    for memory in ("0", "1e-12"):
        line = fails(*argv, "--adapter-memory", memory)
        assert f"argument --adapter-memory: '{memory}' holds no adapter" in line
    line = fails(*argv, "--adapter-path", adapter, "--adapter-memory", "0.000001")
    assert "1,000" in line
