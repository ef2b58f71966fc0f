"""Damaged and hostile Core ML packages: each is described rightly, or is one error."""

import copy
import json

import numpy as np
import pytest

from afm_mlx.coreml.package import CoreMLPackage
from tests.hostile.file_mutations import (
    NAMES,
    NUMBERS,
    changed_bytes,
    changed_json,
    pick,
    some_value,
)
from tests.hostile.folders import replaced
from tests.hostile.harness import Case, run_cases
from tests.tools.coreml import make_package
from tests.tools.tokenizers import train_tiny_spm

PATHS = ["../x", "/etc/passwd", "a/../../b", "..", "", ".", "com.apple.CoreML", "x" * 300, "\0"]
PATHS.append("é\u202e")


@pytest.fixture(scope="module")
def core_ml(tmp_path_factory):
    pytest.importorskip("coremltools", reason="pip install '.[coreml]'")
    place = tmp_path_factory.mktemp("coreml")
    spm = train_tiny_spm(place / "tokenizer.model", "bpe")
    return make_package(place, spm, np.random.default_rng(0))


def test_changed_packages_are_described_rightly_or_give_one_error(rng, core_ml):
    path = core_ml.package
    right = CoreMLPackage.read(path)
    manifest, (model,) = path / "Manifest.json", path.glob("Data/*/*.mlmodel")
    (weights,) = path.glob("Data/*/weights/weight.bin")

    def generate(rng):
        kind = rng.random()
        file = model if kind < 0.7 else manifest if kind < 0.9 else weights
        if file == manifest:
            content = _changed_manifest(rng, json.loads(manifest.read_text()))
        elif file == model and rng.random() < 0.8:
            content = _changed_spec(rng, model.read_bytes())
        else:
            content = changed_bytes(rng, file.read_bytes())

        def run():
            with replaced(file, content):
                package = CoreMLPackage.read(path)
            assert package.config.vocab_size == right.config.vocab_size
            assert set(package.adapters) <= {"", *right.adapters, *NAMES}
            assert all(0 < n <= right.config.context_length for n in package.prompt_lengths)
            assert package.arrangement in ("linear", "neural_engine")

        return Case(f"{file.relative_to(path)}: {content[:1500]!r}", run)

    run_cases(generate, rng, 0.04)


def _changed_manifest(rng: np.random.Generator, values: dict) -> bytes:
    values = copy.deepcopy(values)
    if rng.random() < 0.5:
        entries = values["itemInfoEntries"]
        entries[pick(rng, list(entries))]["path"] = pick(rng, [*PATHS, some_value(rng)])
        return json.dumps(values).encode()
    return changed_json(rng, values).encode(errors="replace")


def _changed_spec(rng: np.random.Generator, data: bytes) -> bytes:
    from coremltools.proto import Model_pb2

    spec = Model_pb2.Model()
    spec.ParseFromString(data)
    kind = int(rng.integers(4))
    if kind == 0:
        metadata = spec.description.metadata.userDefined
        values = json.loads(metadata["afm_config"])
        forms = [changed_json(rng, values), "[" * 100_000, json.dumps(some_value(rng))]
        key = pick(rng, ["afm_config", "afm_config", "arrangement", "adapters", "prompt_lengths"])
        metadata[key] = pick(rng, forms).encode(errors="replace").decode()
    elif kind == 1:
        value = pick(rng, list(_blobs(spec)))
        if rng.random() < 0.5:
            value.offset = pick(rng, [0, 1, 63, 64, 65, 2**32, 2**62, 2**63, 2**64 - 1, len(data)])
        else:
            name = pick(rng, [*PATHS, "weights", "weights/weight.bin", "model.mlmodel"])
            value.fileName = pick(rng, ["@model_path/", ""]) + name
    else:
        _change_message(rng, spec.description)
    return spec.SerializeToString()


def _blobs(spec):
    for function in spec.mlProgram.functions.values():
        for block in function.block_specializations.values():
            for operation in block.operations:
                for value in operation.attributes.values():
                    if value.WhichOneof("value") == "blobFileValue":
                        yield value.blobFileValue


def _change_message(rng: np.random.Generator, message) -> None:
    """Clear, repeat, drop or replace one field of a protobuf message or of one inside it."""
    fields = [field for field, _ in message.ListFields()]
    field = pick(rng, fields)
    value = getattr(message, field.name)
    is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
    if field.message_type is not None and not is_map and rng.random() < 0.85:
        inner = value if not hasattr(value, "__len__") else pick(rng, list(value))
        if inner.ListFields():
            _change_message(rng, inner)
            return
    if is_map or rng.random() < 0.3:
        message.ClearField(field.name)
    elif hasattr(value, "__delitem__"):
        if rng.random() < 0.5:
            del value[int(rng.integers(len(value)))]
        elif field.message_type is not None:
            value.append(pick(rng, list(value)))
        else:
            value[int(rng.integers(len(value)))] = _like(rng, value[0])
    elif field.message_type is None:
        setattr(message, field.name, _like(rng, value))
    else:
        message.ClearField(field.name)


def _like(rng: np.random.Generator, value):
    if isinstance(value, str):
        return pick(rng, [name for name in NAMES if name.isprintable()])
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return int(pick(rng, [n for n in NUMBERS if 0 <= n < 2**31]))
    return value
