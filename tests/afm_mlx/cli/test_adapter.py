"""`afm-mlx adapter`: adapters shown, converted, checked and added up."""

import json
import shlex

import mlx.core as mx
import pytest

from afm_mlx.adapters.adapter_folder import load_adapter, save_adapter
from tests.tools.cli import CONFIG, write_folder
from tests.tools.compare import assert_same_tensors


@pytest.fixture
def adapter(make_adapter):
    return make_adapter("adapter", rank=32)


@pytest.fixture
def convert(done, folder):
    """Convert an adapter of the tiny model; returns what `adapter info` says of the result."""

    def convert(source, kind, output, *options):
        argv = ("convert", source, "--to", kind, "--output", output, *options)
        out = done("adapter", *argv, "--model", folder)
        assert out.startswith(f"{output}: ")
        return json.loads(done("adapter", "info", output, "--model", folder, "--json"))

    return convert


def test_info(adapter, fingerprint, done):
    facts = json.loads(done("adapter", "info", adapter, "--json"))
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
        "keys": [f"mlp.{n}_proj" for n in ("down", "gate", "up")]
        + [f"self_attn.{n}_proj" for n in ("out", "q", "qkv")],
        "parameters": sum(t.size for t in tensors.values()),
        "bytes": sum(file.stat().st_size for file in files),
        "stored_as": ["float16"],
        "base_model_fingerprint": fingerprint,
    }
    text = done("adapter", "info", "--adapter-path", adapter)
    assert text == done("adapter", "info", adapter)
    assert f"base model fingerprint  {fingerprint}\n" in text


def test_a_way_through_all_formats(adapter, folder, fingerprint, done, convert, tmp_path):
    """mlx-lm, PEFT, the toolkit, Apple's package, and back: the same numbers."""
    source = adapter
    for kind, name in {
        "peft": "peft",
        "toolkit": "poet.pt",
        "fmadapter": "poet.fmadapter",
        "mlx-lm": "again",
    }.items():
        facts = convert(source, kind, tmp_path / name)
        assert (facts["format"], facts["rank"], facts["scale"]) == (kind, 32, 0.5)
        assert facts["base_model_fingerprint"] == fingerprint
        source = tmp_path / name
        verdict = done("adapter", "verify", source, "--model", folder)
        assert verdict == f"{source} is a whole adapter of rank 32.\n"
    assert facts["stored_as"] == ["float16"]
    (wanted, config), (found, found_config) = load_adapter(adapter), load_adapter(source)
    assert (found_config.rank, found_config.scale) == (config.rank, config.scale)
    assert_same_tensors(found, wanted)


def test_a_package(adapter, convert, tmp_path):
    own = ("--author", "A. Uthor", "--description", "Writes poems", "--license", "MIT")
    own = (*own, "--name", "poet", "--base-signature", "12ab" * 10)
    package = convert(adapter, "fmadapter", tmp_path / "a.fmadapter", *own)["package"]
    assert package == {
        "name": "poet",
        "author": "A. Uthor",
        "description": "Writes poems",
        "license": "MIT",
        "base_signature": "12ab" * 10,
        "draft_token_count": 5,
        "draft_model": False,
    }
    # A package of a package keeps what is not set again, and its draft model.
    draft = tmp_path / "draft"
    draft.mkdir()
    for name in ("draft.mil", "draft_weights.bin"):
        (draft / name).write_bytes(b"draft")
    own = ("--name", "bard", "--draft", draft)
    again = convert(tmp_path / "a.fmadapter", "fmadapter", tmp_path / "b.fmadapter", *own)
    assert again["package"] == package | {"name": "bard", "draft_model": True}
    own = ("--name", "bard", "--draft", "none")
    again = convert(tmp_path / "b.fmadapter", "fmadapter", tmp_path / "c.fmadapter", *own)
    assert again["package"] == package | {"name": "bard"}


def test_another_base(adapter, fingerprint, tmp_path, spm_bpe, rng, done, fails):
    other, out = write_folder(tmp_path / "other", spm_bpe, rng), tmp_path / "out"
    argv = ("adapter", "convert", adapter, "--to", "peft", "--model", other, "--output", out)
    line = fails(*argv)
    assert fingerprint in line
    assert "--force" in line
    assert not out.exists()
    done(*argv, "--force")
    facts = json.loads(done("adapter", "info", out, "--json"))
    assert facts["base_model_fingerprint"] == fingerprint  # forcing does not make it this model's


def test_verify_lists_what_is_wrong(adapter, run, tmp_path, spm_bpe, rng):
    tensors, config = load_adapter(adapter)
    first, second, third = (
        next(n for n in sorted(tensors) if k in n) for k in ("down", "gate", "up")
    )
    nowhere = "model.layers.9.mlp.up_proj"
    changed = tensors | {
        first: tensors[first] * float("nan"),
        second: tensors[second].astype(mx.float32) + 1e6,
        third: mx.zeros((tensors[third].shape[0] + 1, 32)),
        f"{nowhere}.lora_a": mx.ones((32, 32)),
        f"{nowhere}.lora_b": mx.ones((32, 8)),
    }
    mx.eval(changed)
    save_adapter(tmp_path / "bad", changed, config)
    other = write_folder(tmp_path / "other", spm_bpe, rng)
    argv = ("adapter", "verify", tmp_path / "bad", "--model", other)
    status, out, err = run(*argv)
    wrong = [line.removeprefix("wrong: ") for line in out.splitlines() if line[:5] == "wrong"]
    assert status == 2
    assert "6 things wrong" in err
    for words in (
        f"{first} holds NaN",
        f"{second} has numbers up to 1",
        f"{third} is [{tensors[third].shape[0] + 1}, 32]",
        f"no layer for {nowhere}.lora_a",
        f"no layer for {nowhere}.lora_b",
        "fingerprint",
    ):
        assert sum(words in line for line in wrong) == 1, words
    status, out, _ = run(*argv, "--json")
    found = json.loads(out)
    assert (status, found["ok"], found["problems"]) == (2, False, wrong)


def test_verify_says_more(adapter, run, done, convert, tmp_path, folder):
    def wrong(*argv):
        status, out, err = run("adapter", "verify", *argv)
        assert status == 2
        assert "1 thing wrong" in err
        return out

    tensors, config = load_adapter(adapter)
    zeros = {n: mx.zeros_like(t) if ".lora_b" in n else t for n, t in tensors.items()}
    save_adapter(tmp_path / "zero", zeros, config)
    out = wrong(tmp_path / "zero")
    assert "every B is zero" in out
    assert "note: no model was named" in out
    signature, package = "34" * 20, tmp_path / "a.fmadapter"
    only = "only .fmadapter packages have a base signature"
    assert only in wrong(adapter, "--base-signature", signature)
    convert(adapter, "fmadapter", package, "--base-signature", signature)
    argv = (package, "--model", folder, "--base-signature")
    assert "whole adapter" in done("adapter", "verify", *argv, signature)
    assert f"the base signature {signature}, not {'12' * 20}" in wrong(*argv, "12" * 20)
    (package / "adapter_weights.bin").write_bytes(b"short")
    assert "has 5 bytes" in wrong(*argv, signature)


def test_compose(make_adapter, folder, fingerprint, done, tmp_path):
    one, other = make_adapter("one", 3, 0.5), make_adapter("other=2", 5, 2.0, keys="kv_reuse")
    done("adapter", "compose", f"{one}=0.7", f"{other}=-0.3", "--output", tmp_path / "sum")
    tensors, config = load_adapter(tmp_path / "sum")
    assert (config.rank, config.scale) == (8, pytest.approx(0.6))
    assert config.base_model_fingerprint == fingerprint
    assert tensors.keys() == load_adapter(one)[0].keys()
    as_peft = ("--to", "peft", "--dtype", "float32", "--qkv", "split", "--model", folder)
    argv = (f"{one}=1", f"{other}=0", *as_peft, "--output", tmp_path / "peft")
    assert "rank 3, scale 0.5" in done("adapter", "compose", *argv)
    facts = json.loads(done("adapter", "info", tmp_path / "peft", "--json"))
    assert facts["stored_as"] == ["float32"]
    assert "self_attn.k_proj" in (tmp_path / "peft/adapter_config.json").read_text()


def test_compose_to_a_package(make_adapter, folder, done, fails, tmp_path):
    """What the messages propose, compose has."""
    one, other = make_adapter("one", 20), make_adapter("other", 20)
    out = tmp_path / "my-sum.fmadapter"
    argv = ("adapter", "compose", f"{one}=1", f"{other}=0.5", "--to", "fmadapter")
    argv = (*argv, "--model", folder, "--output", out)
    assert "take --name my_sum" in fails(*argv)
    assert "(--any-rank)" in fails(*argv, "--name", "my_sum")
    done(*argv, "--name", "my_sum", "--any-rank", "--author", "A. Uthor")
    facts = json.loads(done("adapter", "info", out, "--model", folder, "--json"))
    assert (facts["rank"], facts["scale"]) == (40, 16 / 40)
    assert (facts["package"]["name"], facts["package"]["author"]) == ("my_sum", "A. Uthor")


REFUSED = {
    "show": "invalid choice: 'show'",
    "info": "ADAPTER is missing",
    "info {adapter} --adapter-path {out}": "two adapters were given",
    "info {adapter} --alpha -1": "allowed is 0 or more",
    "convert {adapter}": "--to is missing",
    "convert {adapter} --to peft": "--output is missing",
    "convert {to} peft --name x": "--name is for .fmadapter packages",
    "convert {to} peft --any-rank": "--any-rank is for .fmadapter packages",
    "convert {to} mlx-lm --qkv split": "--qkv is for PEFT folders",
    "convert {to} fmadapter --dtype float16": "has a type of its own",
    "convert {to} fmadapter": "name ends in .fmadapter",
    "convert {to} toolkit": "are .pt files",
    "convert {to} mlx-lm --alpha 3": "has its own",
    "compose --output {out}": "no adapter was named",
    "compose {adapter}": "--output is missing",
    "compose {adapter}=1 --output {out} --name x": "--name is for .fmadapter",
    "compose {adapter} --output {out}": "give PATH=WEIGHT",
    "compose =1 --output {out}": "give PATH=WEIGHT",
    "compose {adapter}=nan --output {out}": "give PATH=WEIGHT",
    "compose {out}=1 --output {out}": "There is no",
}


def test_arguments_that_are_refused(adapter, fails, tmp_path):
    out = tmp_path / "out"
    places = {"adapter": adapter, "out": out, "to": f"{adapter} --output {out} --to"}
    for line, words in REFUSED.items():
        assert words in fails("adapter", *shlex.split(line.format(**places))), line
        assert not out.exists()


def test_adapters_that_come_with_the_model_are_known_by_name(done, fails, tmp_path):
    """The model is the embedded one."""
    facts = json.loads(done("adapter", "info", "todo", "--json"))
    assert facts["adapter"].endswith("afm-nano/adapters/todo")
    assert done("adapter", "verify", "todo").startswith("todo is a whole adapter")
    done("adapter", "compose", "todo=0.7", "redact=0.3", "--output", tmp_path / "both")
    assert load_adapter(tmp_path / "both")[1].rank == 2 * facts["rank"]
    assert "(did you mean todo?)" in fails("adapter", "info", "tood")
    others = fails("adapter", "compose", "x=1", "--output", "y")
    assert "adapters are redact, search, todo, triage" in others


@pytest.mark.parametrize("key", ["model", "base_model_name_or_path", "base_model_fingerprint"])
def test_convert_finds_the_model_that_an_adapter_is_for(
    adapter, folder, fingerprint, done, tmp_path, key
):
    """The toolkit's format needs it. What the config names comes before the embedded model."""
    source, wanted = adapter, fingerprint
    if key == "base_model_name_or_path":
        source = tmp_path / "peft"
        done("adapter", "convert", adapter, "--to", "peft", "--output", source)
    if key == "base_model_fingerprint":
        source = tmp_path / "copy"
        done("adapter", "compose", "todo=1", "--output", source)
        wanted = load_adapter(source)[1].base_model_fingerprint
    else:
        config = json.loads((source / "adapter_config.json").read_text())
        (source / "adapter_config.json").write_text(json.dumps(config | {key: str(folder)}))
    done("adapter", "convert", source, "--to", "toolkit", "--output", tmp_path / "a.pt")
    assert wanted in (tmp_path / "a-config.json").read_text()


def test_a_model_that_is_not_here_is_passed_over(adapter, done, tmp_path):
    config = json.loads((adapter / "adapter_config.json").read_text())
    for i, name in enumerate(["no/such", "a\0b", "\ud800", "x" * 5000, 5, None, "~nobody/x"]):
        (adapter / "adapter_config.json").write_text(json.dumps(config | {"model": name}))
        done("adapter", "convert", adapter, "--to", "peft", "--output", tmp_path / str(i))


def test_a_pt_file_without_alpha(make_adapter, convert, done, fails, tmp_path):
    convert(make_adapter("small", rank=6), "toolkit", tmp_path / "a.pt")
    (tmp_path / "a.pt").rename(tmp_path / "b.pt")  # the alpha is in the config next to a.pt
    argv = ("adapter", "info", tmp_path / "b.pt", "--json")
    assert "no alpha" in fails(*argv)
    assert json.loads(done(*argv, "--alpha", 9))["scale"] == 1.5
