"""The files of bundles; what is refused; and what an interrupt or a full disk leaves."""

import functools
import itertools
import json
import resource
import shutil
import sys

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.adapter_folder import load_adapter
from afm_mlx.checkpoint import weights as weights_module
from afm_mlx.checkpoint.fingerprint import folder_fingerprint
from afm_mlx.cli import main
from afm_mlx.converters.convert import convert
from afm_mlx.converters.coreai import bundle_writer
from afm_mlx.coreai.bundle import CoreAIBundle
from afm_mlx.errors import AFMError
from tests.converters.conftest import assert_failures_leave_nothing, listing
from tests.tools.cases import each
from tests.tools.cli import process
from tests.tools.exports import packable, rules_of


def convert_to(path, folder, **options):
    return convert(folder, path, **({"to": "coreai", "prompt_lengths": [8]} | options))


def test_the_layout_of_the_zoo(rng, write_model, tmp_path, capsys):
    """By the command line: what `CoreAILanguageModel` reads, and the signature that its engines want."""
    from coreai.authoring import AIModelAsset

    config = packable(rng, context_length=70)
    folder, path = write_model(config, rules_of("2 bits")), tmp_path / "tiny"
    for name in ("tokenizer.json", "chat_template.jinja"):
        (folder / name).write_text("{}")
    arguments = (
        f"convert --model {folder} --mlx-path {path} --to coreai --context 60 --adapter-rank 3"
    )
    assert main([*arguments.split(), "--prompt-lengths", "8", "5"]) == 0
    assert "MB of functions and weights" in capsys.readouterr().out
    metadata = json.loads((path / "metadata.json").read_text())
    assert metadata["metadata_version"] == "0.2"
    assert (metadata["kind"], metadata["name"]) == ("llm", "tiny")
    assert metadata["assets"] == {"main": "tiny.aimodel"}
    language = {"vocab_size": config.vocab_size, "max_context_length": 60}
    language |= {"tokenizer": "tiny", "embedded_tokenizer": True}
    assert metadata["language"] == language | {"function_map": {"main": ["main"]}}
    assert all(isinstance(value, str) for value in metadata["user_data"].values())
    assert (path / "tokenizer" / "tokenizer.json").is_file()
    summary = AIModelAsset.load(path / "tiny.aimodel").summary()
    names = [
        f"{name}{end}" for end in ("", "_adapter") for name in ("prompt_5", "prompt_8", "step")
    ]
    assert set(summary.function_names) == {*names, "main"}
    inputs = [name for name, _ in summary.function_inputs("main")]
    assert inputs[:2] == ["input_ids", "position_ids"]
    bundle = CoreAIBundle.read(path)
    assert bundle.config.context_length == 60
    assert bundle.fingerprint == folder_fingerprint(config, folder)
    assert (bundle.prompt_lengths, bundle.adapter_rank, bundle.dtype) == ((5, 8), 3, "float16")


def test_constants_are_packed_and_stored_once(rng, write_model, tmp_path):
    """However many functions there are: within 3 % of the folder's weights, without the program's text."""
    config = packable(rng, vocab_size=4096, hidden_dim=256, num_layers=2, num_kv_reuse_layers=1)
    folder = write_model(config, rules_of("2 bits"))
    sizes = []
    for lengths in ([8], [8, 9, 10, 11]):
        path = convert_to(tmp_path / f"tiny{len(lengths)}", folder, prompt_lengths=lengths)
        sizes.append((next(path.glob("*.aimodel")) / "main.mlirb").stat().st_size)
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert 0.97 * stored < sizes[0] < 1.03 * stored + 100_000
    assert sizes[1] < sizes[0] + 100_000


def test_what_fails_leaves_nothing_and_a_target_stays(rng, write_model, tmp_path, monkeypatch):
    folder = write_model(packable(rng), rules_of("2 bits"))
    before = listing(tmp_path)

    def fail(*_, **__):
        raise RuntimeError("no\nreason")

    with monkeypatch.context() as patch, pytest.raises(AFMError, match=r"be written \(no reason\)"):
        patch.setattr(bundle_writer.AIProgram, "save_asset", fail)
        convert_to(tmp_path / "tiny", folder)
    assert listing(tmp_path) == before
    make = functools.partial(convert_to, folder=folder)
    assert_failures_leave_nothing(make, tmp_path / "tiny", monkeypatch)


@pytest.mark.skipif(sys.platform != "linux", reason="needs posix_fallocate")
def test_a_full_disk(tmp_path):
    """As far as a limit of the size of files stands for it: one error, and nothing is left."""

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_400_000, 2_400_000))

    arguments = [
        "convert",
        "--to",
        "coreai",
        "--model",
        "afm-nano",
        "--mlx-path",
        tmp_path / "tiny",
    ]
    found = process(*arguments, preexec_fn=limit)
    assert found.returncode == 2
    assert "File too large" in found.stderr
    assert "Traceback" not in found.stderr
    assert [*tmp_path.iterdir()] == []


@each(
    ("options", "words"),
    [
        ({"prompt_lengths": [8, 101]}, "has 101; the model's context is 100 tokens"),
        ({"context": 101}, "--context is 101; the model's context is 100 tokens"),
        ({"context": 7}, "--prompt-lengths has 8; the model's context is 7 tokens"),
        ({"context": -1}, "--context is -1; it is 1 or more"),
        ({"adapter_rank": -2}, "--adapter-rank is -2; it is 1 or more"),
        ({"minimum_os": "26"}, "--minimum-os is '26'; this coreai-core knows 27"),
        ({"dtype": "bfloat16"}, "float16 and float32 are allowed"),
        ({"quantize": True}, "as the folder has them"),
        ({"ane": True}, "--ane is for Core ML packages"),
        (
            {"to": "coreml", "adapter_functions": ["a"]},
            "--adapter-functions is for Core AI bundles",
        ),
        ({"to": "coreml", "context": 5}, "--context is for Core AI bundles"),
        ({"to": "afm-mlx"}, "--prompt-lengths is for Core ML packages and Core AI bundles"),
    ],
)
def test_refusals(rng, tmp_path, refused_folder, options, words):
    with pytest.raises(AFMError, match=words):
        convert_to(tmp_path / "tiny", refused_folder, **options)
    with pytest.raises(AFMError, match="has the name of an asset"):
        convert_to(tmp_path / "tiny.aimodel", refused_folder)
    assert not (tmp_path / "tiny").exists()


@pytest.fixture
def refused_folder(rng, write_model):
    return write_model(packable(rng), rules_of("2 bits"))


def test_numbers_that_float16_cannot_hold(rng, write_model, tmp_path):
    folder = write_model(packable(rng), rules_of("4 bits"))
    weights = weights_module.load_weights(folder)
    name = "model.layers.0.mlp.up_proj.scales"
    weights[name] = weights[name] * 1e10
    mx.eval(weights)
    weights_module.save_weights(folder, weights)
    with pytest.raises(AFMError, match=r"up_proj holds NaN, infinity, or numbers that float16"):
        convert_to(tmp_path / "tiny", folder)
    convert_to(tmp_path / "tiny", folder, dtype="float32")


def test_an_adapter_file(rng, write_model, tmp_path, capsys):
    """By the command line; what is not the bundle's is refused."""
    config = packable(rng)
    folder = write_model(config, adapters=["a"])
    path = convert_to(tmp_path / "tiny", folder, adapter_rank=6)
    adapter = folder / "adapters" / "a"
    command = ["adapter", "convert", str(adapter), "--to", "coreai", "--model", str(path)]
    assert main(command) == 0
    file = path / "adapters" / "a.safetensors"
    assert f"{file}: " in capsys.readouterr().out
    from safetensors.numpy import load_file

    arrays, (tensors, plan) = load_file(file), load_adapter(adapter)
    name = "model.layers.0.mlp.down_proj.lora_b"
    found, wanted = arrays[f"{name}.0"], np.array(tensors[name]) * np.float32(plan.scale)
    np.testing.assert_allclose(found[:4], wanted, rtol=2e-3)
    assert not found[4:].any()
    assert main(command) == 2
    assert "exists already" in capsys.readouterr().err
    for rank, words in ((None, "takes no adapters"), (3, "has rank 4, and .* takes up to 3")):
        other = convert_to(tmp_path / f"other{rank}", folder, adapter_rank=rank)
        with pytest.raises(AFMError, match=words):
            write_for(adapter, other, tmp_path / "a.safetensors")


def test_adapters_with_functions_share_the_base_s_weights(rng, write_model, tmp_path):
    """An adapter adds its own arrays and the text of its functions."""
    config = packable(rng, vocab_size=4096, hidden_dim=256, num_layers=2, num_kv_reuse_layers=1)
    folder = write_model(config, rules_of("2 bits"), adapters=["a", "b"])
    sizes = []
    for adapters in ([], ["a"], ["a", "b"]):
        path = convert_to(
            tmp_path / f"tiny{len(adapters)}", folder, adapter_functions=adapters or None
        )
        assert CoreAIBundle.read(path).adapters == tuple(adapters)
        sizes.append((next(path.glob("*.aimodel")) / "main.mlirb").stat().st_size)
    tensors, _ = load_adapter(folder / "adapters" / "a")
    own = sum(2 * tensor.size for tensor in tensors.values())
    for one, other in itertools.pairwise(sizes):
        assert own < other - one < own + 100_000 < sizes[0]


def test_refused_adapters_for_functions(rng, write_model, tmp_path):
    folder = write_model(packable(rng), adapters=["a", "adapter", "a b"])
    copy = shutil.copytree(folder / "adapters" / "a", tmp_path / "a")
    other_case = shutil.copytree(copy, tmp_path / "A")
    config = copy / "adapter_config.json"
    for adapters, words in (
        (["a", other_case], "two adapters of the same name, if A and a are one letter"),
        (["nowhere"], "There is no adapter 'nowhere'"),
        (["a", copy], "two adapters of the same name"),
        (["adapter"], r"adapter can't be the name of functions: .* 'adapter' is taken"),
        (["a b"], "a b can't be the name of functions"),
    ):
        with pytest.raises(AFMError, match=words):
            convert_to(tmp_path / "tiny", folder, adapter_functions=adapters)
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"base_model_fingerprint": "0" * 16})
    )
    with pytest.raises(AFMError, match="0000000000000000"):
        convert_to(tmp_path / "tiny", folder, adapter_functions=[copy])
    assert not (tmp_path / "tiny").exists()


def write_for(adapter, bundle, output):
    from afm_mlx.converters.coreai.adapter_file import write_adapter_file

    write_adapter_file(adapter, CoreAIBundle.read(bundle), output)
