"""Small model folders with random weights, float and packed, and their packages."""

import itertools
import json

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from afm_mlx.checkpoint.weights import save_weights
from afm_mlx.config import MODEL_TYPE
from afm_mlx.quantization.quantize_model import quantize_model
from afm_mlx.quantization.rule import QuantizationRule
from tests.tools.adapters import draw_tensors, write_folder
from tests.tools.models import random_config, random_model

pytest.importorskip("coremltools.libmilstoragepython", reason="pip install '.[coreml]'")


def packable(rng, **fixed):
    """Random sizes of which groups and words of codes are whole."""
    sizes = {"vocab_size": 96, "hidden_dim": 64, "num_layers": 3, "context_length": 100}
    sizes |= {"num_heads": int(rng.choice([2, 4, 8])), "num_kv_heads": int(rng.choice([1, 2]))}
    sizes |= {"num_kv_reuse_layers": int(rng.integers(0, 3))}
    sizes |= {"hidden_dim_scale_factor": float(rng.choice([2.0, 3.0]))}
    return random_config(rng, **(sizes | fixed))


PACKINGS = {
    "2 bits": ((2, "balanced"), (4, "balanced")),
    "4 bits": ((4, "balanced"), (8, "balanced", "tensor")),
    "all that the Neural Engine loads": (
        (2, "balanced"),
        (4, "balanced", "group", 32),
        (8, "balanced", "row"),
        (4, "affine"),
        (2, "affine", "tensor"),
        (8, "affine", "row"),
        (2, "palette"),
        (4, "palette", "row"),
        (2, "palette", "tensor"),
        (8, "balanced", "group", 32),
        (2, "balanced", "tensor"),
        (4, "palette", "group", 32),
    ),
    "scales behind tables": ((2, "balanced", "group", 32), (2, "affine"), (2, "affine", "row")),
}
"""Rules of layers, by what they are about; the embedding has the last one."""


def rules_of(name):
    return [QuantizationRule(*rule) for rule in PACKINGS[name]]


@pytest.fixture
def write_model(rng, tmp_path):
    def write(config, rules=(), adapters=()):
        """Layers take the rules in turn; the last one is the embedding's. Without rules it is a float model."""
        model, folder = random_model(config, rng), tmp_path / "model"
        folder.mkdir()
        for path in adapters:
            write_folder(folder / "adapters" / path, draw_tensors(model, rng, 4))
        values = {"model_type": MODEL_TYPE, **config.to_dict()}
        if rules:
            turns = itertools.cycle(rules)

            def choose(path, module):
                return True if path == "model.embedding" else next(turns)

            model, values = quantize_model(model, values, rules[0], rules[-1], choose)
        save_weights(folder, dict(tree_flatten(model.parameters())))
        mx.eval(model.parameters())
        (folder / "config.json").write_text(json.dumps(values))
        return folder

    return write
