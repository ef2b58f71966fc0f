"""Bundles and adapter files that were cut, edited, or made for another model: each is one clear error."""

import hashlib
import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from afm_mlx.coreai import CoreAIModel
from afm_mlx.coreai.adapter_file import read_adapter_arrays
from afm_mlx.coreai.bundle import FACTS, CoreAIBundle, ZooConfig
from afm_mlx.errors import AFMError
from tests.tools.cases import each
from tests.tools.coreai import OWN


@pytest.fixture
def bundle(core_ai, tmp_path):
    return shutil.copytree(core_ai.bundle, tmp_path / "tiny")


def edited(file, **changes):
    """Change a metadata file's values; `facts` changes the facts in it, and None removes a value."""
    values = json.loads(file.read_text())
    holder = values.get("user_data") or values.get("creatorDefinedMetadata") or {}
    if facts := changes.pop("facts", None):
        holder[FACTS] = json.dumps(json.loads(holder[FACTS]) | facts)
    file.write_text(json.dumps(values | changes))


def cut(bundle):
    program = bundle / "tiny.aimodel" / "main.mlirb"
    program.write_bytes(program.read_bytes()[:-100])


def flip(bundle):
    program = bundle / "tiny.aimodel" / "main.mlirb"
    content = bytearray(program.read_bytes())
    content[len(content) // 2] ^= 1
    program.write_bytes(content)


def rehash(bundle):
    flip(bundle)
    program = bundle / "tiny.aimodel" / "main.mlirb"
    program.with_name("main.hash").write_bytes(hashlib.sha256(program.read_bytes()).digest())


def both(bundle, facts):
    for file in (bundle / "metadata.json", bundle / "tiny.aimodel" / "metadata.json"):
        edited(file, facts=facts)


@each(
    ("damage", "words"),
    [
        (cut, "of another bundle: metadata.json has another checksum"),
        (flip, "another checksum than its main.hash"),
        (rehash, "of another bundle: metadata.json has another checksum"),
        (lambda b: (b / "tiny.aimodel" / "main.mlirb").unlink(), "can't be read"),
        (lambda b: (b / "metadata.json").unlink(), "is no bundle: metadata.json is missing"),
        (lambda b: (b / "metadata.json").write_text("{"), "is no JSON"),
        (lambda b: (b / "metadata.json").write_text("[" * 9999), "is no JSON"),
        (lambda b: (b / "metadata.json").write_text("3"), "no JSON object"),
        (lambda b: shutil.rmtree(b / "tiny.aimodel"), "can't be read"),
        (lambda b: (b / "tiny.aimodel" / "main.hash").unlink(), "can't be read"),
        (lambda b: edited(b / "metadata.json", kind="vlm"), "'vlm' and of version '0.2'"),
        (lambda b: edited(b / "metadata.json", metadata_version=1), "of version 1"),
        (lambda b: edited(b / "metadata.json", assets={"main": "../x.aimodel"}), "names the asset"),
        (lambda b: edited(b / "metadata.json", assets=3), "names the asset None"),
        (lambda b: edited(b / "metadata.json", user_data={}), "don't say which model"),
        (lambda b: edited(b / "metadata.json", facts={"more": 1}), "don't say which model"),
        (lambda b: edited(b / "metadata.json", facts={"dtype": "float16"}), "different models"),
        (lambda b: edited(b / "metadata.json", language={"vocab_size": 7}), "other sizes"),
        (lambda b: both(b, {"prompt_lengths": [4, 41]}), "its prompt lengths are"),
        (lambda b: both(b, {"prompt_lengths": 4}), "its prompt lengths are 4"),
        (lambda b: both(b, {"adapter_rank": True}), "its adapter rank is True"),
        (lambda b: both(b, {"adapters": ["../x"]}), "its adapters are"),
        (lambda b: both(b, {"adapters": {"a": 1}}), "its adapters are"),
        (lambda b: both(b, {"dtype": "int8"}), "its type is 'int8'"),
        (lambda b: both(b, {"config": {"hidden_dim": 8}}), "missing keys"),
    ],
)
def test_damage(core_ai, tmp_path_factory, damage, words):
    bundle = shutil.copytree(core_ai.bundle, tmp_path_factory.mktemp("damaged") / "tiny")
    damage(bundle)
    with pytest.raises(AFMError, match=words) as raised:
        CoreAIBundle.read(bundle)
    assert "\n" not in str(raised.value)


def test_what_is_no_bundle(core_ai, tmp_path):
    for path, words in (
        (core_ai.bundle / "tiny.aimodel", "is an asset; name the bundle"),
        (
            core_ai.bundle / "adapters" / OWN,
            "Name the bundle itself, and give 'formal' as the adapter",
        ),
        (core_ai.folder, "is no bundle: metadata.json is missing"),
        (tmp_path / "nowhere", "is no bundle"),
    ):
        with pytest.raises(AFMError, match=words):
            CoreAIBundle.read(path)


def test_functions_that_the_description_does_not_mean(bundle):
    """A description that was changed in both places, so that nothing but the functions contradicts it."""
    values = json.loads((bundle / "metadata.json").read_text())
    config = json.loads(values["user_data"][FACTS])["config"]
    both(bundle, {"prompt_lengths": [4, 13]})
    with pytest.raises(AFMError, match=r"Core AI can't run .*prompt_13"):
        CoreAIModel(bundle).prefill([1] * 13)
    most = dict.fromkeys(("num_kv_layers", "num_heads", "num_kv_heads"), 2**31 - 1)
    zoo = ZooConfig(config["vocab_size"], 40, 32, 2, 4, 2, 8, 1e-5).to_dict() | most
    for wrong in (config | {"num_kv_heads": 1}, zoo):  # the second one's states have 1.5e21 numbers
        both(bundle, {"config": wrong})
        with pytest.raises(AFMError, match="step takes other arrays than the bundle's config says"):
            CoreAIModel(bundle)


def test_an_adapter_is_refused_before_anything_is_compiled(bundle, monkeypatch):
    monkeypatch.setattr("afm_mlx.coreai.coreai_model._Runtime", None)
    both(bundle, {"adapter_rank": 3})
    with pytest.raises(AFMError, match=r"has the rank '4', and .* takes 3"):
        CoreAIModel(bundle, bundle / "adapters" / "tone.safetensors")


def test_adapters(core_ai, tmp_path):
    bundle, file = CoreAIBundle.read(core_ai.bundle), tmp_path / "a.safetensors"
    arrays = load_file(core_ai.adapter)
    right = {"base_model_fingerprint": bundle.fingerprint, "rank": "4"}
    name = next(iter(arrays))
    nan = {name: np.full_like(arrays[name], np.nan)}
    short = {name: arrays[name][:, :1].copy()}
    for content, metadata, words in (
        (arrays, {}, "made for a model with the fingerprint None"),
        (arrays, right | {"base_model_fingerprint": "0"}, "with the fingerprint '0'"),
        (arrays, right | {"rank": "5"}, "has the rank '5'"),
        ({n: a for n, a in arrays.items() if n != name}, right, f"other arrays .* such as {name}"),
        (arrays | {"x": arrays[name]}, right, "such as x"),
        (arrays | nan, right, "holds NaN"),
        (arrays | short, right, "takes floats"),
        (arrays | {name: arrays[name].astype(np.int32)}, right, "is int32"),
    ):
        save_file(content, file, metadata)
        with pytest.raises(AFMError, match=words):
            read_adapter_arrays(file, bundle)
    content = core_ai.adapter.read_bytes()
    for wrong in (content[:-10], content[:100], b"", b"\xff" * 50):
        file.write_bytes(wrong)
        with pytest.raises(AFMError, match="can't be read as an adapter"):
            read_adapter_arrays(file, bundle)
    words = f"missing, or no regular file, and the adapters with functions in .* are {OWN}\\."
    with pytest.raises(AFMError, match=words):
        read_adapter_arrays(tmp_path / "nowhere", bundle)
