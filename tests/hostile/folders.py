"""Tiny model folders that hostile tests change, and what a model must still do if it loads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from afm_mlx.checkpoint.weights import save_weights
from afm_mlx.config import ModelConfig
from afm_mlx.loading.load import load_model
from afm_mlx.model.model import Model
from afm_mlx.quantization.quantize_model import quantize_model
from afm_mlx.quantization.rule import QuantizationRule
from tests.tools.models import random_model

_SIZES = {"vocab_size": 48, "hidden_dim": 32, "num_layers": 2, "num_kv_reuse_layers": 1}
_SIZES |= {"num_heads": 4, "num_kv_heads": 2, "context_length": 128}
CONFIG = ModelConfig(**_SIZES, rope_theta=10000.0, hidden_dim_scale_factor=2.0)
TOKENS = mx.array([[1, 7, 3]])
MODERATE = 1e4
"""Finite weights up to this give finite logits; what larger ones overflow is seen where requests end."""


class Folder(NamedTuple):
    """A model folder as it was: its path, its model, and the model's logits."""

    path: Path
    model: Model
    right: mx.array

    @property
    def values(self) -> dict:
        return json.loads((self.path / "config.json").read_text())


def write_folders(place: Path, rng: np.random.Generator) -> dict[str, Folder]:
    rules = {"packed": QuantizationRule(2), "affine": QuantizationRule(4, "affine", "group", 32)}
    rules |= {"palette": QuantizationRule(4, "palette", "tensor")}
    folders = {}
    for name in ("float", "halves", *rules):
        model, values = random_model(CONFIG, rng), CONFIG.to_dict()
        if name in rules:
            model, values = quantize_model(model, values, rules[name])
        arrays, options = dict(tree_flatten(model.parameters())), {}
        if name == "halves":
            scales = {n: a for n, a in arrays.items() if "quant_" in n}
            arrays = {n: a.astype(mx.bfloat16) for n, a in arrays.items()} | scales
            options = {"max_shard_bytes": 1 << 14}
        path = place / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps(values))
        save_weights(path, arrays, **options)
        model = load_model(path)
        folders[name] = Folder(path, model, logits(model))
    return folders


@contextmanager
def replaced(path: Path, content: bytes | None) -> Iterator[None]:
    whole = path.read_bytes()
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(whole)


def logits(model: Model) -> mx.array:
    return model(TOKENS, model.make_cache())


def check_loads_right(folder: Folder) -> None:
    """Load a folder that was changed. If it loads, its numbers must be good, and the right ones where nothing
    that matters was changed.
    """
    model = load_model(folder.path)
    now = logits(model)
    arrays = dict(tree_flatten(model.parameters()))
    before = dict(tree_flatten(folder.model.parameters()))
    floats = [a for a in arrays.values() if mx.issubdtype(a.dtype, mx.floating)]
    largest = float(mx.stack([mx.abs(a).max() for a in floats]).max())
    assert np.isfinite(largest)
    if largest <= MODERATE:
        assert mx.isfinite(now).all().item(), "logits that are not finite"
    unchanged = all(mx.array_equal(arrays[name], before[name]).item() for name in before)
    if unchanged and model.args == folder.model.args:
        assert mx.array_equal(now, folder.right).item(), "other logits from the same weights"
