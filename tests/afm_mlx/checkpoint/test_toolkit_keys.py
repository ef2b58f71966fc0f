"""Every key of a toolkit checkpoint becomes one tensor, and unknown ones are refused by name."""

import numpy as np
import pytest

from afm_mlx.architecture import parameter_shapes
from afm_mlx.checkpoint.toolkit_keys import map_keys
from afm_mlx.config import PRESETS
from afm_mlx.errors import CheckpointError
from tests.tools.cases import each
from tests.tools.models import tamm_3b_state


def test_every_key_of_the_3b_model_is_used_once():
    state = tamm_3b_state()
    assert len(state) == 1326
    keys = map_keys(state, "the 3B model")
    ranges = [key for pair in keys.kv_ranges.values() for key in pair.values()]
    adapter = list(keys.adapters["base_adapter"].values())
    used = [*keys.weights.values(), *ranges, *adapter, keys.tied_head]
    assert sorted(used) == sorted(state)
    assert len(adapter) == 700

    shapes = parameter_shapes(PRESETS["afm-3b"])
    assert sorted([*keys.weights, *keys.kv_ranges]) == sorted(shapes)
    for name, key in keys.weights.items():
        assert tuple(state[key].shape) == shapes[name]
    total = sum(np.prod(s, dtype=int) for n, s in shapes.items() if not n.endswith("_scale"))
    assert total == PRESETS["afm-3b"].num_parameters == 3_111_368_064


LAYER = "layers.segment_0.layer_0"
LORA = "adapters.a.lora_0.a_transpose"


@each(
    ("keys", "words"),
    [
        ([f"{LAYER}.attention.bias"], f"1 unknown tensors: {LAYER}.attention.bias. They"),
        ([f"x{i}" for i in range(8)], "8 unknown tensors: x0, x1, x2, x3, x4 and 3 more"),
        # The fused layer's pairs are numbered, and no other's.
        ([f"{LAYER}.attention.output_transform.{LORA}"], "unknown"),
        ([f"{LAYER}.attention.qkv_transform.{LORA.replace('lora_0.', '')}"], "unknown"),
        (["embedding.weight", "model.embedding.weight"], "both mean model.embedding.weight"),
    ],
)
def test_keys_that_are_unknown_or_mean_the_same_are_named(keys, words):
    with pytest.raises(CheckpointError, match=f"here: .*{words}"):
        map_keys(keys, "here")
