"""The adapter that training starts from: a folder, a file of mlx-lm's in one, or a file alone."""

import json
import shutil

import mlx.core as mx
import numpy as np
import pytest

from afm_mlx.adapters.adapter_folder import AdapterConfig, save_adapter
from afm_mlx.errors import AFMError, CheckpointError, ConfigError
from afm_mlx.training.methods.lora_training import read_initial
from tests.tools.compare import assert_same_tensors


@pytest.fixture
def tensors(rng):
    rank = int(rng.integers(1, 9))
    shapes = {"a.lora_a": (5, rank), "a.lora_b": (rank, 4), "b.lora_a.0": (6, rank),
              "b.lora_b.0": (rank, 2)}  # fmt: skip
    return {n: mx.array(rng.normal(size=s).astype(np.float32)) for n, s in shapes.items()}


@pytest.fixture
def folder(tensors, tmp_path):
    rank = tensors["a.lora_a"].shape[1]
    save_adapter(tmp_path / "adapter", tensors, AdapterConfig(rank, 2.5, 4))
    return tmp_path / "adapter"


@pytest.mark.parametrize("name", ["", "adapters.safetensors", "0000100_adapters.safetensors"])
def test_a_folder_and_a_file_in_it(folder, tensors, name):
    shutil.copy(folder / "adapters.safetensors", folder / "0000100_adapters.safetensors")
    found, config = read_initial(folder / name)
    assert_same_tensors(found, tensors)
    assert (config.rank, config.scale) == (tensors["a.lora_a"].shape[1], 2.5)


def test_a_file_alone_needs_a_scale(folder, tensors, tmp_path):
    file = shutil.copy(folder / "adapters.safetensors", tmp_path / "weights.safetensors")
    with pytest.raises(ConfigError, match=r"no adapter_config\.json beside .*--scale"):
        read_initial(file)
    found, config = read_initial(file, 0.25)
    assert_same_tensors(found, tensors)
    assert (config.rank, config.scale) == (tensors["a.lora_a"].shape[1], 0.25)


def test_files_that_are_no_adapter(folder, tensors, tmp_path):
    values = json.loads((folder / "adapter_config.json").read_text())
    values["lora_parameters"]["rank"] += 1
    (folder / "adapter_config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="they don't belong together"):
        read_initial(folder / "adapters.safetensors")
    with pytest.raises(AFMError, match="missing"):
        read_initial(tmp_path / "missing.safetensors")
    mixed = tensors | {"c.lora_a": mx.zeros((3, 20)), "c.lora_b": mx.zeros((20, 3))}
    for content, message in (
        (mixed, "one rank for all is needed"),
        ({"weight": mx.zeros((2, 2))}, "holds no LoRA pairs"),
    ):
        file = tmp_path / "other.safetensors"
        mx.save_safetensors(str(file), content)
        with pytest.raises(CheckpointError, match=message):
            read_initial(file, 1.0)
