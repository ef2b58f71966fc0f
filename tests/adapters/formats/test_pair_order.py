"""Which blocks of a model an adapter's names mean."""

from afm_mlx.adapters.formats.pair_order import num_layers_of
from afm_mlx.config import PRESETS


def test_blocks_are_counted_from_the_first_that_is_adapted():
    config = PRESETS["afm-3b"]  # 35 blocks that write keys and values, and 21 that reuse them
    writing, reusing = (
        "model.layers.30.mlp.up_proj.lora_a",
        "model.kv_reuse_layers.1.mlp.up_proj.lora_a",
    )
    assert num_layers_of([reusing], config) == 56 - 36
    assert num_layers_of([reusing, writing], config) == 56 - 30
    assert num_layers_of([writing], None) == -1
