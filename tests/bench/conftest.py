"""Architectures that every format of the benchmarks can hold."""

import os

import pytest

from tests.tools.models import random_config


@pytest.fixture
def config(rng):
    """Widths that every format's blocks divide, and at least one block that reuses keys and values."""
    layers = int(rng.integers(2, 5))
    sizes = {"hidden_dim": 256, "num_heads": 4, "num_kv_heads": 2, "hidden_dim_scale_factor": 3.0}
    reuse = int(rng.integers(1, layers))
    return random_config(rng, **sizes, num_layers=layers, num_kv_reuse_layers=reuse)


@pytest.fixture
def zoo_sizes(rng):
    """Sizes of a small model of the zoo, which every format's blocks divide."""
    return {
        "hidden_size": 256,
        "num_hidden_layers": int(rng.integers(1, 4)),
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": int(rng.choice([1, 2])),
        "head_dim": 128,
        "vocab_size": 64,
    }


@pytest.fixture
def no_torch(tmp_path, monkeypatch):
    """Peers have no torch, which transformers would import: a second for each of them."""
    folder = tmp_path / "no-torch"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    paths = filter(None, (str(folder), os.environ.get("PYTHONPATH")))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
