"""A tiny model with its Core ML package, and an interpreter where Core ML would be."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from afm_mlx.config import ModelConfig
from afm_mlx.converters.convert import convert
from afm_mlx.loading.load import load_model
from tests.tools import adapters
from tests.tools.cli import CONFIG, write_folder

ADAPTER = "tone"
LENGTHS = (4, 12)
CONTEXT = 64


class Made(NamedTuple):
    folder: Path
    package: Path
    config: ModelConfig


def make_package(place: Path, spm: Path, rng: np.random.Generator) -> Made:
    """A model with an adapter, and its package, which computes in float32."""
    values = CONFIG.to_dict() | {"context_length": CONTEXT, "vocab_size": 300}
    config = ModelConfig.from_dict(values)
    folder = write_folder(place / "model", spm, rng, config)
    tensors = adapters.draw_tensors(load_model(folder), rng, 4, strength=4)
    adapters.write_folder(folder / "adapters" / ADAPTER, tensors)
    package = place / "tiny.mlpackage"
    convert(folder, package, to="coreml", dtype="float32", prompt_lengths=LENGTHS)
    return Made(folder, package, config)


class InterpretedPackage:
    """Stands for `CompiledPackage`: its functions run in the interpreter of tests/tools/mil, on any system."""

    def __init__(self, path: Path) -> None:
        self._package = _read(path)

    def load(self, names: Any, compute_units: str) -> list[Any]:
        return [self._package.function(name) for name in names]


@functools.lru_cache(maxsize=4)
def _read(path: Path) -> Any:
    from tests.tools.mil import Package

    return Package(path)


def edit_spec(package: Path, edit: Any) -> None:
    from coremltools.proto import Model_pb2

    (file,) = package.glob("Data/*/*.mlmodel")
    spec = Model_pb2.Model()
    spec.ParseFromString(file.read_bytes())
    edit(spec)
    file.write_bytes(spec.SerializeToString())


def set_config(spec: Any, **changes: Any) -> None:
    """Change what a package's metadata say of the model."""
    metadata = spec.description.metadata.userDefined
    metadata["afm_config"] = json.dumps(json.loads(metadata["afm_config"]) | changes)
