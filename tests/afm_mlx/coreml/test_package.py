"""Descriptions of packages, whole and damaged."""

import shutil

import pytest

from afm_mlx.coreml.package import CoreMLPackage
from afm_mlx.errors import AFMError
from tests.tools.cases import each
from tests.tools.coreml import ADAPTER, LENGTHS, edit_spec, set_config


def test_a_package(core_ml):
    package = CoreMLPackage.read(core_ml.package)
    assert package.config == core_ml.config
    assert (package.arrangement, package.prompt_lengths) == ("linear", LENGTHS)
    assert package.adapters == (ADAPTER,)
    assert package.function_names() == ("prefill", "decode")
    assert package.function_names(ADAPTER) == ("prefill_tone", "decode_tone")


def weights(package):
    (file,) = package.glob("Data/*/weights/weight.bin")
    return file


def cut(package):
    data = weights(package).read_bytes()
    weights(package).write_bytes(data[: len(data) // 2])


def cut_the_last_number(package):
    file = weights(package)
    file.write_bytes(file.read_bytes()[:-64])


def overwrite(package):
    weights(package).write_bytes(bytes(weights(package).stat().st_size))


def edited(edit):
    return lambda package: edit_spec(package, edit)


def rename_decode(spec):
    next(f for f in spec.description.functions if f.name == "decode").name = "infer"


def rename_input(spec):
    spec.description.functions[0].input[0].name = "ids"


@each(
    "damage, words",
    [
        (shutil.rmtree, "is no folder; a Core ML package is a folder NAME.mlpackage"),
        (lambda p: (p / "Manifest.json").unlink(), "has no Manifest.json"),
        (lambda p: (p / "Manifest.json").write_text("{"), "can't be read"),
        (lambda p: next(p.glob("Data/*/*.mlmodel")).write_bytes(b"\x00" * 9), "can't be read"),
        (lambda p: next(p.glob("Data/*/*.mlmodel")).unlink(), "can't be read"),
        (lambda p: weights(p).unlink(), "weight.bin is missing"),
        (cut, "cut off"),
        (cut_the_last_number, "It is cut off: copy it again"),
        (overwrite, "The file is damaged"),
        (edited(lambda s: s.mlProgram.Clear() or s.ClearField("mlProgram")), "of the kind None"),
        (edited(rename_decode), "has no function decode; it has .*'infer'"),
        (edited(rename_input), r"takes \['ids', 'position'\]"),
        (edited(lambda s: s.description.metadata.Clear()), "has no afm_config"),
        (edited(lambda s: set_config(s, vocab_size=400)), r"logits of decode is \[1, 300\].*400"),
        (edited(lambda s: set_config(s, context_length=32)), "keys of decode is"),
        (edited(lambda s: set_config(s, color=1)), "afm_config in .*color"),
    ],
)
def test_damage(core_ml, tmp_path, damage, words):
    package = tmp_path / "damaged.mlpackage"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(core_ml.package, package)
    damage(package)
    with pytest.raises(AFMError, match=words):
        CoreMLPackage.read(package)
