"""Descriptions of packages, whole and damaged."""

import json
import os
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


def manifest(values):
    text = values if isinstance(values, str) else json.dumps(values)
    return lambda package: (package / "Manifest.json").write_text(text)


def rooted(place):
    return manifest({"rootModelIdentifier": "x", "itemInfoEntries": {"x": {"path": place}}})


def pipe_for_the_model(package):
    (file,) = package.glob("Data/*/*.mlmodel")
    file.unlink()
    os.mkfifo(file)


def functions(spec):
    return spec.description.functions


def set_metadata(spec, **values):
    for key, value in values.items():
        spec.description.metadata.userDefined[key] = value


def bracket_metadata(spec):
    set_metadata(spec, afm_config="[" * 100_000)


def reshape_tokens(spec, length):
    functions(spec)[0].input[0].type.multiArrayType.enumeratedShapes.shapes[1].shape[1] = length


def set_blob(spec, **values):
    for block in spec.mlProgram.functions["prefill"].block_specializations.values():
        for operation in block.operations:
            for value in operation.attributes.values():
                if value.WhichOneof("value") == "blobFileValue":
                    for key, other in values.items():
                        setattr(value.blobFileValue, key, other)
                    return


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
        (edited(lambda s: set_config(s, context_length=32)), "keys of prefill is"),
        (edited(lambda s: set_config(s, color=1)), "afm_config in .*color"),
        (manifest({}), "names no root model"),
        (manifest([]), "names no root model"),
        (
            manifest({"rootModelIdentifier": "x", "itemInfoEntries": {"y": {}}}),
            "names no root model",
        ),
        (manifest("[" * 100_000), "can't be read: its Manifest.json is no JSON"),
        (manifest("5" * 5_000), "can't be read: its Manifest.json is no JSON"),
        (manifest(" " * (2 << 20)), "more than the 1,048,576 bytes"),
        (rooted("../../../etc/passwd"), r"'../../../etc/passwd', which is no path inside it"),
        (rooted("/etc/passwd"), "which is no path inside it"),
        (rooted(5), "which is no path inside it"),
        (rooted("com.apple.CoreML"), "it is a folder, and a file is needed"),
        (pipe_for_the_model, "it is a pipe, and a file is needed"),
        (edited(bracket_metadata), "has no afm_config"),
        (edited(lambda s: functions(s)[2].input[0].type.Clear()), r"prefill_tone takes .* \[\]"),
        (edited(lambda s: functions(s)[1].input[1].type.Clear()), r"position of decode is \[\]"),
        (edited(lambda s: functions(s)[3].state[1].type.Clear()), r"values of decode_tone is \[\]"),
        (
            edited(lambda s: functions(s)[3].output[0].type.Clear()),
            r"logits of decode_tone is \[\]",
        ),
        (edited(lambda s: reshape_tokens(s, 2**62)), r"shape \[1, 4611686018427387904\].*1 to 64"),
        (edited(lambda s: reshape_tokens(s, -4)), r"shape \[1, -4\]"),
        (edited(lambda s: functions(s).pop(2)), "has no function prefill_tone"),
        (edited(lambda s: functions(s).append(functions(s)[0])), "two of its functions"),
        (edited(lambda s: set_metadata(s, arrangement="x" * 5000)), "its arrangement is 'xxx"),
        (edited(lambda s: set_blob(s, offset=2**63)), "9,223,372,036,854,775,808 is beyond"),
        (edited(lambda s: set_blob(s, offset=2**64 - 1)), "is beyond"),
        (edited(lambda s: set_blob(s, offset=65)), "The file is damaged"),
        (
            edited(lambda s: set_blob(s, fileName="@model_path/../model.mlmodel")),
            "no path inside it",
        ),
        (edited(lambda s: set_blob(s, fileName="/etc/passwd")), "which is no path inside it"),
        (edited(lambda s: set_blob(s, fileName="@model_path/")), "which is no path inside it"),
    ],
)
def test_damage(core_ml, tmp_path, damage, words):
    package = tmp_path / "damaged.mlpackage"
    shutil.rmtree(package, ignore_errors=True)
    shutil.copytree(core_ml.package, package)
    damage(package)
    with pytest.raises(AFMError, match=words):
        CoreMLPackage.read(package)
