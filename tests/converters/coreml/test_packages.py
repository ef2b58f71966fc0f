"""The files of packages, read by coremltools; what is refused; and what an interrupt leaves."""

import dataclasses
import functools
import json
import os
import shutil
import sys
import weakref

import coremltools
import mlx.core as mx
import numpy as np
import pytest
from coremltools.converters.mil.frontend.milproto.load import load as load_program
from coremltools.proto import FeatureTypes_pb2

from afm_mlx.checkpoint.weights import load_weights, save_weights
from afm_mlx.cli import main
from afm_mlx.config import blocks
from afm_mlx.converters.conversion_options import prompt_lengths
from afm_mlx.converters.convert import convert
from afm_mlx.converters.coreml import package_writer as package_module
from afm_mlx.converters.coreml.compression import Constants
from afm_mlx.converters.graph_source import half_split_rows
from afm_mlx.errors import AFMError
from afm_mlx.loading.load import load_model
from tests.converters.conftest import assert_failures_leave_nothing, edit_config, listing
from tests.tools.adapters import write_folder
from tests.tools.cases import each
from tests.tools.compare import assert_within
from tests.tools.exports import PACKINGS, packable, rules_of


def convert_to(path, folder, **options):
    return convert(folder, path, **({"to": "coreml", "prompt_lengths": [8]} | options))


def program_of(package):
    spec = coremltools.models.MLModel(str(package), skip_model_load=True).get_spec()
    weights = str(next(package.glob("Data/*/weights")))
    return load_program(spec, spec.specificationVersion, weights)


def matrices(function):
    """What each product of a function multiplies with, (rows, K), by coremltools' own decompression."""
    for operation in function.operations:
        if operation.op_type not in ("linear", "conv"):
            continue
        made_by = operation.weight.op
        numbers = operation.weight.val
        if made_by.op_type.startswith("constexpr_"):
            numbers = made_by.materialized_val_inference()
        (user,) = operation.outputs[0].child_ops or [None]
        scales = 1.0
        if user is not None and user.op_type == "mul" and user.y.val is not None:
            scales = user.y.val.reshape(-1, 1)
        yield numbers.reshape(numbers.shape[:2]) * scales


@pytest.mark.parametrize(("ane", "packings"), [(False, [*PACKINGS]), (True, [*PACKINGS][:3])])
def test_coremltools_reads_the_weights_that_the_model_has(
    rng, write_model, tmp_path, ane, packings
):
    """To float32's last bits: codes, tables, scales and the order of rows are all in these numbers."""
    rules = [rule for name in packings for rule in rules_of(name)]
    config = packable(rng, num_layers=4, num_kv_reuse_layers=1)
    folder = write_model(config, rules)
    path = convert_to(tmp_path / "m.mlpackage", folder, ane=ane, dtype="float32")
    program, model = program_of(path), load_model(folder)
    layers = {name: m for name, m in model.named_modules() if hasattr(m, "dequantize")}
    places = {
        f"{block}.{matrix.name}": matrix
        for block, kind in blocks(config)
        for matrix in kind.matrices
    }
    found = list(matrices(program.functions["decode"]))
    for name, numbers in zip([*places, "model.embedding"], found, strict=True):
        wanted = np.array(layers[name].dequantize(mx.float32))
        if name.endswith((".qkv_proj", ".q_proj")):
            wanted = wanted[half_split_rows(places[name], config.head_dim)]
        assert_within(numbers, wanted, 1e-5 * np.abs(wanted).max(), name)
    writing = 5 * config.num_kv_layers - 4  # the last writing block has nothing but keys and values
    for one, other in zip(matrices(program.functions["prefill"]), found[:writing], strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_a_package_says_of_itself(rng, write_model, tmp_path, capsys):
    """By the command line, with what it prints; and no constant is in memory together with another."""
    config = packable(rng, context_length=70)
    folder = write_model(config, rules_of("2 bits"), adapters=["a", "b"])
    path = tmp_path / "m.mlpackage"
    arguments = f"convert --model {folder} --mlx-path {path} --to coreml --ane".split()
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{path}: 0.")
    assert out.endswith("MB of program\n")
    assert "Torch" not in err
    spec = coremltools.models.MLModel(str(path), skip_model_load=True).get_spec()
    assert spec.specificationVersion == coremltools.target.iOS18
    functions = {f.name: f for f in spec.description.functions}
    suffixes = ("", "_a", "_b")
    assert [*functions] == [f"{name}{end}" for end in suffixes for name in ("prefill", "decode")]
    assert spec.description.defaultFunctionName == "decode"
    shape = [config.num_kv_layers, config.num_kv_heads, 70, config.head_dim]
    for name, function in functions.items():
        inputs = {i.name: list(i.type.multiArrayType.shape) for i in function.input}
        assert inputs == {"tokens": [1, 32 if name.startswith("prefill") else 1], "position": [1]}
        states = {s.name: s.type.stateType.arrayType for s in function.state}
        shapes = {name: list(state.shape) for name, state in states.items()}
        assert shapes == {"keys": shape, "values": shape}
        assert all(s.dataType == FeatureTypes_pb2.ArrayFeatureType.FLOAT16 for s in states.values())
    about = dict(spec.description.metadata.userDefined)
    assert json.loads(about["afm_config"]) == config.to_dict()
    assert (about["prompt_lengths"], about["adapters"]) == ("[32]", '["a", "b"]')


def test_memory_holds_one_constant_at_a_time(rng, write_model, tmp_path, monkeypatch):
    config, alive, largest = packable(rng, vocab_size=4096, hidden_dim=128), [], []
    folder = write_model(config, rules_of("2 bits"), adapters=["a"])
    add = Constants.add

    def watched(constants, constant):
        def read():
            array = constant.read()
            assert [a.shape for a in map(weakref.ref.__call__, alive) if a is not None] == []
            if array.nbytes > 1 << 13:  # not scales, which the program keeps
                alive.append(weakref.ref(array))
            largest.append(array.nbytes)
            return array

        return add(constants, dataclasses.replace(constant, read=read))

    monkeypatch.setattr(Constants, "add", watched)
    calls = []
    convert_to(tmp_path / "m.mlpackage", folder, progress=lambda *done: calls.append(done))
    assert len(alive) > 10
    assert max(largest) == 4096 * 128
    assert calls == sorted(calls)
    assert calls[-1][0] == calls[-1][1]


@each(
    ("context", "ane", "wanted"),
    [
        (600, False, (64, 512)),
        (511, False, (64,)),
        (40, False, (40,)),
        (600, True, (32,)),
        (31, True, (31,)),
    ],
)
def test_default_prompt_lengths(context, ane, wanted):
    """A write to a state of more than 32 tokens keeps a program off the Neural Engine (Anemll#27)."""
    assert prompt_lengths(None, context, ane) == wanted


def test_equal_constants_are_stored_once(rng, write_model, tmp_path):
    folder = write_model(packable(rng), adapters=["a", "b"])
    shutil.rmtree(folder / "adapters" / "b")
    one = convert_to(tmp_path / "one.mlpackage", folder)
    shutil.copytree(folder / "adapters" / "a", folder / "adapters" / "b")
    two = convert_to(tmp_path / "two.mlpackage", folder)
    assert package_module.package_size(one)[0] == package_module.package_size(two)[0]
    # Both names lead to the same numbers.
    functions = program_of(two).functions
    both = (matrices(functions[f"decode_{name}"]) for name in "ab")
    for mine, other in zip(*both, strict=True):
        np.testing.assert_array_equal(mine, other)


def test_two_conversions_of_a_model_are_equal_to_the_byte(rng, write_model, tmp_path):
    folder = write_model(packable(rng), adapters=["a"])
    one, two = (convert_to(tmp_path / f"{name}.mlpackage", folder) for name in ("one", "two"))
    files = [path.relative_to(one) for path in sorted(one.rglob("*")) if path.is_file()]
    assert len(files) == 3
    for file in files:
        assert (one / file).read_bytes() == (two / file).read_bytes(), file


def test_everybody_whom_the_umask_allows_may_read_a_package(rng, write_model, tmp_path):
    folder = write_model(packable(rng))
    before = os.umask(0o027)
    try:
        path = convert_to(tmp_path / "m.mlpackage", folder)
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in path.rglob("*") if file.is_file()}
    assert modes == dict.fromkeys(("Manifest.json", "model.mlmodel", "weight.bin"), 0o640)


def test_what_fails_leaves_nothing_and_a_target_stays(rng, write_model, tmp_path, monkeypatch):
    folder, path = write_model(packable(rng), rules_of("2 bits")), tmp_path / "m.mlpackage"
    before = listing(tmp_path)
    # What the library has no way to say: the end of the file was lost when it was closed.
    with monkeypatch.context() as patch, pytest.raises(AFMError, match="it is cut off"):
        patch.setattr(package_module, "_RECORD_BYTES", 1 << 20)
        convert_to(path, folder)
    assert listing(tmp_path) == before
    assert_failures_leave_nothing(functools.partial(convert_to, folder=folder), path, monkeypatch)


@each(
    ("options", "words"),
    [
        ({"prompt_lengths": [8, 101]}, "has 101; the model's context is 100 tokens"),
        ({"prompt_lengths": []}, "one number of tokens or more"),
        ({"prompt_lengths": [0]}, "each 1 or more"),
        ({"dtype": "bfloat16"}, "Core ML has no bfloat16"),
        ({"quantize": True}, "as the folder has them"),
        ({"dequantize": True}, "as the folder has them"),
        ({"to": "afm-mlx", "ane": True}, "--ane is for Core ML"),
        ({"to": "mlx-lm"}, "--prompt-lengths is for Core ML"),
        ({"ane": True}, r"model\.embedding is packed to 2 bits with a scale per group"),
    ],
)
def test_refusals_come_before_the_import_of_coremltools(
    rng, tmp_path, refused_folder, monkeypatch, options, words
):
    def imported():
        raise AssertionError("coremltools is imported, which takes seconds")

    monkeypatch.setattr(sys.modules[convert.__module__], "import_coremltools", imported)
    path = tmp_path / "m.mlpackage"
    with pytest.raises(AFMError, match=words):
        convert_to(path, refused_folder, **options)
    assert not path.exists()


@pytest.fixture
def refused_folder(rng, write_model):
    return write_model(packable(rng), rules_of("scales behind tables"))


def test_folders_that_become_no_package(rng, write_model, tmp_path, monkeypatch):
    folder = write_model(packable(rng, kv_bits=None), adapters=["a"])

    def refused(words, **options):
        with pytest.raises(AFMError, match=words):
            convert_to(tmp_path / "m.mlpackage", folder, **options)
        assert not (tmp_path / "m.mlpackage").exists()

    weights = load_weights(folder)
    mx.eval(weights)
    for name, ane in (("model.output_norm.weight", True), ("model.embedding.weight", False)):
        save_weights(folder, {**weights, name: 1e6 * weights[name]})
        refused(r"model\.\w+.* numbers that float16 can't hold", ane=ane)
    save_weights(folder, weights)
    adapter = folder / "adapters" / "a"
    shapes = {"lora_a": (32, 4), "lora_b": (4, 128)}
    names = {f"model.layers.0.mlp.up_proj.{name}": shape for name, shape in shapes.items()}
    write_folder(adapter, {name: np.zeros(shape, np.float16) for name, shape in names.items()})
    refused("The adapter was made for another model")
    shutil.rmtree(adapter)
    with monkeypatch.context() as patch:
        for name in [n for n in sys.modules if n.startswith("afm_mlx.converters.coreml.")]:
            patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, "coremltools", None)
        refused(r"pip install .*\[coreml\]")
    path, own = "model.layers.0.mlp.up_proj", {"bits": 3, "group_size": 32, "mode": "affine"}
    parts = mx.quantize(weights[f"{path}.weight"], bits=3, group_size=32)
    names = [f"{path}.{name}" for name in ("weight", "scales", "biases")]
    save_weights(folder, weights | dict(zip(names, parts, strict=True)))
    edit_config(folder, quantization={path: own, **own}, quantization_config={path: own, **own})
    refused(rf"{path}.* 'bits': 3.*convert -d")
    with pytest.raises(AFMError, match=r"ends with \.mlpackage, and .*/m does not"):
        convert_to(tmp_path / "m", folder)
    edit_config(folder, model_type="llama")
    refused("is a model of type 'llama'")
    (folder / "base-model.pt").touch()
    refused("is a toolkit checkpoint")
