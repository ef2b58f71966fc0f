"""`afm-mlx adapter`: adapters shown, converted, checked and added up."""

import json

import mlx.core as mx
import numpy as np
import pytest
import torch

from afm_mlx.adapters.adapter_folder import load_adapter, save_adapter
from afm_mlx.adapters.lora import add_lora, lora_tensors, save_lora
from afm_mlx.checkpoint.fingerprint import folder_fingerprint
from afm_mlx.config import ModelConfig
from afm_mlx.loading.load import load
from tests.tools.cli import CONFIG, write_folder


@pytest.fixture
def make_adapter(folder, tmp_path, rng):
    """A function that writes an adapter of the tiny model, in float16."""

    def make(name, rank=32, scale=0.5, **options):
        model, _ = load(folder)
        add_lora(model, rank, scale, seed=int(rng.integers(2**31)), **options)
        drawn = {
            n: mx.array(rng.normal(0, 0.1, t.shape)) if ".lora_b" in n else t
            for n, t in lora_tensors(model).items()
        }
        model.load_weights(list(drawn.items()), strict=False)
        save_lora(model, tmp_path / name, folder)
        tensors, config = load_adapter(tmp_path / name)
        half = {n: t.astype(mx.float16) for n, t in tensors.items()}
        mx.eval(half)
        save_adapter(tmp_path / name, half, config)
        return tmp_path / name

    return make


@pytest.fixture
def adapter(make_adapter):
    return make_adapter("adapter")


def fingerprint(folder):
    return folder_fingerprint(ModelConfig.from_file(folder / "config.json"), folder)


def done(run, *argv):
    status, out, err = run("adapter", *argv)
    assert (status, err) == (0, "")
    return out


def test_info(adapter, folder, run):
    facts = json.loads(done(run, "info", "--adapter-path", adapter, "--json"))
    tensors, _ = load_adapter(adapter)
    files = [adapter / "adapters.safetensors", adapter / "adapter_config.json"]
    assert facts == {
        "adapter": str(adapter),
        "format": "mlx-lm",
        "rank": 32,
        "alpha": 16,
        "scale": 0.5,
        "dropout": 0.0,
        "blocks": CONFIG.num_layers,
        "layers": 5 * CONFIG.num_layers,
        "pairs": 7 * CONFIG.num_kv_layers + 5 * CONFIG.num_kv_reuse_layers,
        "keys": sorted(
            [f"mlp.{n}_proj" for n in ("down", "gate", "up")]
            + [f"self_attn.{n}_proj" for n in ("out", "q", "qkv")]
        ),
        "parameters": sum(t.size for t in tensors.values()),
        "bytes": sum(file.stat().st_size for file in files),
        "stored_as": ["float16"],
        "base_model_fingerprint": fingerprint(folder),
    }
    text = done(run, "info", "--adapter-path", adapter)
    assert done(run, "info", adapter) == text
    assert fingerprint(folder) in text
    assert "rank" in text


def test_a_way_through_all_formats(adapter, folder, run, tmp_path):
    """mlx-lm, PEFT, the toolkit, Apple's package, and back: the same bytes."""
    steps = {
        "peft": tmp_path / "peft",
        "toolkit": tmp_path / "poet.pt",
        "fmadapter": tmp_path / "poet.fmadapter",
        "mlx-lm": tmp_path / "again",
    }
    source = adapter
    for kind, output in steps.items():
        out = done(
            run,
            *("convert", "--adapter-path", source, "--to", kind, "--output", output),
            *("--model", folder),
        )
        assert out.startswith(f"{output}: ")
        facts = json.loads(done(run, "info", "--adapter-path", output, "--model", folder, "--json"))
        assert (facts["format"], facts["rank"], facts["scale"]) == (kind, 32, 0.5)
        assert facts["base_model_fingerprint"] == fingerprint(folder)
        verdict = done(run, "verify", output, "--model", folder)
        assert verdict == f"{output} is a whole adapter of rank 32.\n"
        source = output
    assert facts["stored_as"] == ["float16"]
    wanted, config = load_adapter(adapter)
    found, found_config = load_adapter(steps["mlx-lm"])
    assert found_config == config
    assert sorted(found) == sorted(wanted)
    assert all(mx.array_equal(found[n], wanted[n]).item() for n in wanted)


def test_a_package(adapter, folder, run, tmp_path):
    texts = {"--author": "A. Uthor", "--description": "Writes poems", "--license": "MIT"}
    options = [part for pair in texts.items() for part in pair]
    done(
        run,
        *("convert", "--adapter-path", adapter, "--to", "fmadapter", "--model", folder),
        *("--output", tmp_path / "a.fmadapter", "--name", "poet", *options),
        *("--base-signature", "12ab" * 10),
    )
    show = ("info", "--adapter-path", tmp_path / "a.fmadapter", "--model", folder, "--json")
    package = json.loads(done(run, *show))["package"]
    assert package == {
        "name": "poet",
        "author": "A. Uthor",
        "description": "Writes poems",
        "license": "MIT",
        "base_signature": "12ab" * 10,
        "draft_token_count": 5,
        "draft_model": False,
    }
    # A package of a package keeps what is not set anew, and takes a draft model along.
    (tmp_path / "draft").mkdir()
    for name in ("draft.mil", "draft_weights.bin"):
        (tmp_path / "draft" / name).write_bytes(b"draft")
    done(
        run,
        *("convert", "--adapter-path", tmp_path / "a.fmadapter", "--to", "fmadapter"),
        *("--model", folder, "--output", tmp_path / "b.fmadapter", "--name", "bard"),
        *("--draft", tmp_path / "draft"),
    )
    show = ("info", "--adapter-path", tmp_path / "b.fmadapter", "--model", folder, "--json")
    assert json.loads(done(run, *show))["package"] == package | {
        "name": "bard",
        "draft_model": True,
    }


def test_another_base(adapter, tmp_path, spm_bpe, rng, run, fails):
    other = write_folder(tmp_path / "other", spm_bpe, rng)
    argv = ("adapter", "convert", "--adapter-path", adapter, "--to", "peft", "--model", other)
    argv = (*argv, "--output", tmp_path / "out")
    line = fails(*argv)
    mine = load_adapter(adapter)[1].base_model_fingerprint
    assert mine in line
    assert fingerprint(other) in line
    assert "--force" in line
    assert not (tmp_path / "out").exists()
    assert run(*argv, "--force")[0] == 0
    facts = json.loads(done(run, "info", "--adapter-path", tmp_path / "out", "--json"))
    assert facts["base_model_fingerprint"] == mine  # forcing does not make it this model's


def test_verify_lists_what_is_wrong(adapter, folder, run, tmp_path, spm_bpe, rng):
    tensors, config = load_adapter(adapter)
    names = sorted(tensors)
    first, second, third = (next(n for n in names if k in n) for k in ("down", "gate", "up"))
    changed = dict(tensors)
    changed[first] = tensors[first] * float("nan")
    changed[second] = tensors[second].astype(mx.float32) + 1e6
    changed[third] = mx.zeros((tensors[third].shape[0] + 1, 32))
    name = "model.layers.9.mlp.up_proj"
    changed |= {f"{name}.lora_a": mx.ones((32, 32)), f"{name}.lora_b": mx.ones((32, 8))}
    mx.eval(changed)
    save_adapter(tmp_path / "bad", changed, config)
    other = write_folder(tmp_path / "other", spm_bpe, rng)
    argv = ("adapter", "verify", "--adapter-path", tmp_path / "bad", "--model", other)
    status, out, err = run(*argv)
    assert status == 2
    wrong = [line.removeprefix("wrong: ") for line in out.splitlines() if line[:5] == "wrong"]
    for words in (
        f"{first} holds NaN",
        f"{second} has numbers up to 1",
        f"{third} is [{tensors[third].shape[0] + 1}, 32]",
        f"no layer for {name}.lora_a",
        f"no layer for {name}.lora_b",
        fingerprint(other),
    ):
        assert sum(words in line for line in wrong) == 1, words
    assert len(wrong) == 6
    assert "6 things wrong" in err
    status, out, err = run(*argv, "--json")
    assert status == 2
    found = json.loads(out)
    assert (found["ok"], found["problems"]) == (False, wrong)


def test_verify_says_more(adapter, folder, run, tmp_path):
    tensors, config = load_adapter(adapter)
    zeros = {n: mx.zeros_like(t) if ".lora_b" in n else t for n, t in tensors.items()}
    save_adapter(tmp_path / "zero", zeros, config)
    status, out, _ = run("adapter", "verify", "--adapter-path", tmp_path / "zero")
    assert status == 2
    assert "every B is zero" in out
    assert "no model was named" in out
    status, out, _ = run(
        *("adapter", "verify", "--adapter-path", adapter, "--base-signature", "12" * 20)
    )
    assert status == 2
    assert "only .fmadapter packages have a base signature" in out
    done(
        run,
        *("convert", "--adapter-path", adapter, "--to", "fmadapter", "--model", folder),
        *("--output", tmp_path / "a.fmadapter", "--base-signature", "34" * 20),
    )
    argv = ("--adapter-path", tmp_path / "a.fmadapter", "--model", folder, "--base-signature")
    assert "whole adapter" in done(run, "verify", *argv, "34" * 20)
    status, out, _ = run("adapter", "verify", *argv, "12" * 20)
    assert status == 2
    assert f"the base signature {'34' * 20}, not {'12' * 20}" in out
    (tmp_path / "a.fmadapter/adapter_weights.bin").write_bytes(b"short")
    status, out, err = run("adapter", "verify", *argv[:-1])
    assert status == 2
    assert "has 5 bytes" in out
    assert "1 thing wrong" in err


def test_compose(make_adapter, folder, run, tmp_path):
    one, other = make_adapter("one", 3, 0.5), make_adapter("other=2", 5, 2.0, num_layers=1)
    done(run, "compose", f"{one}=0.7", f"{other}=-0.3", "--output", tmp_path / "sum")
    tensors, config = load_adapter(tmp_path / "sum")
    assert (config.rank, config.scale) == (8, pytest.approx(0.6))
    assert config.base_model_fingerprint == fingerprint(folder)
    parts = [(load_adapter(path)[0], factor) for path, factor in ((one, 0.35), (other, -0.6))]
    for name in (n for n in tensors if ".lora_a" in n):
        b = name.replace("lora_a", "lora_b")
        wanted = sum(
            factor * np.array(t[name], np.float64) @ np.array(t[b], np.float64)
            for t, factor in parts
            if name in t
        )
        found = (
            config.scale * np.array(tensors[name], np.float64) @ np.array(tensors[b], np.float64)
        )
        np.testing.assert_allclose(found, wanted, atol=1e-6)
    out = done(
        run,
        *("compose", f"{one}=1", "--to", "peft", "--dtype", "float16", "--model", folder),
        *("--output", tmp_path / "peft"),
    )
    assert "rank 3, scale 0.5" in out
    with_nothing = done(run, "compose", f"{one}=1", f"{other}=0", "--output", tmp_path / "alone")
    assert "rank 3, scale 0.5" in with_nothing


def test_compose_to_a_package(make_adapter, folder, run, fails, tmp_path):
    """What the messages propose, compose has."""
    one, other = make_adapter("one", 20), make_adapter("other", 20)
    argv = ("compose", f"{one}=1", f"{other}=0.5", "--to", "fmadapter", "--model", folder)
    argv = (*argv, "--output", tmp_path / "my-sum.fmadapter")
    assert "take --name my_sum" in fails("adapter", *argv)
    assert "(--any-rank)" in fails("adapter", *argv, "--name", "my_sum")
    done(run, *argv, "--name", "my_sum", "--any-rank", "--author", "A. Uthor")
    show = ("info", "--adapter-path", tmp_path / "my-sum.fmadapter", "--model", folder, "--json")
    facts = json.loads(done(run, *show))
    assert (facts["rank"], facts["scale"]) == (40, 16 / 40)
    assert (facts["package"]["name"], facts["package"]["author"]) == ("my_sum", "A. Uthor")


REFUSED = [
    (("info",), "ADAPTER is missing"),
    (("info", "{adapter}", "--adapter-path", "{out}"), "two adapters were given"),
    (("convert", "--adapter-path", "{adapter}"), "--to is missing"),
    (("convert", "--adapter-path", "{adapter}", "--to", "peft"), "--output is missing"),
    (("convert", "{to}", "peft", "--name", "x"), "--name is for .fmadapter packages"),
    (("convert", "{to}", "peft", "--any-rank"), "--any-rank is for .fmadapter packages"),
    (("convert", "{to}", "mlx-lm", "--qkv", "split"), "--qkv is for PEFT folders"),
    (("convert", "{to}", "fmadapter", "--dtype", "float16"), "has a type of its own"),
    (("convert", "{to}", "fmadapter"), "name ends in .fmadapter"),
    (("convert", "{to}", "toolkit"), "are .pt files"),
    (("convert", "{to}", "mlx-lm", "--alpha", "3"), "has its own"),
    (("compose", "--output", "{out}"), "no adapter was named"),
    (("compose", "{adapter}"), "--output is missing"),
    (("compose", "{adapter}=1", "--output", "{out}", "--name", "x"), "--name is for .fmadapter"),
    (
        ("compose", "{adapter}=1", "--output", "{out}", "--qkv", "split"),
        "--qkv is for PEFT folders",
    ),
    (
        ("compose", "{adapter}=1", "--output", "{out}.pt", "--to", "toolkit", "--dtype", "float16"),
        "has a type of its own",
    ),
    (("compose", "{adapter}", "--output", "{out}"), "give PATH=WEIGHT"),
    (("compose", "{adapter}=nan", "--output", "{out}"), "give PATH=WEIGHT"),
    (("compose", "{out}=1", "--output", "{out}"), "There is no"),
    ((), "needs to know what to do: info, convert, verify, compose"),
    (("show",), "invalid choice: 'show'"),
]


def test_arguments_that_are_refused(adapter, fails, tmp_path):
    out = tmp_path / "out"
    for argv, words in REFUSED:
        filled = []
        for part in argv:
            if part == "{to}":
                filled += ["--adapter-path", adapter, "--output", out, "--to"]
            else:
                filled.append(part.format(adapter=adapter, out=out))
        assert words in fails("adapter", *filled), argv
        assert not out.exists()


def test_adapters_that_come_with_the_model_are_known_by_name(run, fails, tmp_path):
    """As `--adapter-path` knows them; the model is the embedded one."""
    facts = json.loads(done(run, "info", "todo", "--json"))
    assert facts["adapter"].endswith("afm-nano/adapters/todo")
    assert done(run, "verify", "todo").startswith("todo is a whole adapter")
    done(run, "compose", "todo=0.7", "redact=0.3", "--output", tmp_path / "both")
    assert load_adapter(tmp_path / "both")[1].rank == 2 * facts["rank"]
    # A toolkit's file has a place for every layer of the model, which is found.
    done(run, "convert", "todo", "--to", "toolkit", "--output", tmp_path / "todo.pt")
    assert "(did you mean todo?)" in fails("adapter", "info", "tood")
    assert "adapters are redact, todo, triage" in fails(
        "adapter", "compose", "x=1", "--output", "y"
    )


@pytest.mark.parametrize("key", ["model", "base_model_name_or_path", "base_model_fingerprint"])
def test_convert_finds_the_model_that_an_adapter_is_for(adapter, folder, run, tmp_path, key):
    """The toolkit's format needs it. What the config names comes before the embedded model."""
    source, wanted = adapter, fingerprint(folder)
    if key == "base_model_name_or_path":
        source = tmp_path / "peft"
        done(run, "convert", adapter, "--to", "peft", "--output", source)
    if key == "base_model_fingerprint":
        source = tmp_path / "copy"
        done(run, "compose", "todo=1", "--output", source)
        wanted = load_adapter(source)[1].base_model_fingerprint
    else:
        config = json.loads((source / "adapter_config.json").read_text())
        (source / "adapter_config.json").write_text(json.dumps(config | {key: str(folder)}))
    done(run, "convert", source, "--to", "toolkit", "--output", tmp_path / "a.pt")
    facts = json.loads((tmp_path / "a-config.json").read_text())
    assert wanted in json.dumps(facts)


def test_a_model_that_is_not_here_is_passed_over(adapter, run, tmp_path):
    config = json.loads((adapter / "adapter_config.json").read_text())
    for i, name in enumerate(["no/such", "a\0b", "\ud800", "x" * 5000, 5, None, "~nobody/x"]):
        (adapter / "adapter_config.json").write_text(json.dumps(config | {"model": name}))
        done(run, "convert", adapter, "--to", "peft", "--output", tmp_path / str(i))


def test_a_pt_file_without_alpha(adapter, folder, run, fails, tmp_path):
    done(
        run,
        *("convert", "--adapter-path", adapter, "--to", "toolkit", "--model", folder),
        *("--output", tmp_path / "a.pt"),
    )
    state = torch.load(tmp_path / "a.pt", weights_only=True)
    state = {n: t[:, :6].clone() if "a_tr" in n else t[:6].clone() for n, t in state.items()}
    torch.save(state, tmp_path / "b.pt")
    argv = ("adapter", "info", "--adapter-path", tmp_path / "b.pt", "--json")
    assert "no alpha" in fails(*argv)
    status, out, _ = run(*argv, "--alpha", 9)
    assert status == 0
    assert json.loads(out)["scale"] == 1.5
