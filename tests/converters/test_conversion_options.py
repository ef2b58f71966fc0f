"""The options of `convert`: what they say of each layer, and which contradict each other."""

from pathlib import Path

import pytest

from afm_mlx.config import ModelConfig
from afm_mlx.converters.conversion_options import ConversionOptions
from afm_mlx.errors import AFMError
from afm_mlx.quantization.rule import QuantizationRule
from tests.tools.cases import each

SIZES = {"vocab_size": 64, "hidden_dim": 64, "num_heads": 4, "num_kv_heads": 2, "rope_theta": 1e4}
CONFIG = ModelConfig(**SIZES, num_layers=16, num_kv_reuse_layers=6, hidden_dim_scale_factor=3.0)
NARROW = ModelConfig(**SIZES, num_layers=1, num_kv_reuse_layers=0, hidden_dim_scale_factor=3.1)


def rules(config=CONFIG, quantize=True, **options):
    chosen = ConversionOptions(quantize=quantize, **options)
    chosen.check()
    return chosen.afm_rules(config)


@each(
    ("options", "layer", "embedding"),
    [
        ({}, (2, "balanced", "row"), (4, "balanced", "row")),
        ({"q_mode": "affine"}, (4, "affine", "group", 64), (4, "affine", "group", 64)),
        ({"q_mode": "palette", "q_bits": 2}, (2, "palette", "group", 16), (4, "palette", "group")),
        ({"q_bits": 8, "q_granularity": "tensor"}, (8, "balanced", "tensor"), None),
        ({"q_group_size": 32, "q_embedding_bits": 2}, (2, "balanced", "group", 32), None),
        ({"q_embedding_granularity": "tensor"}, (2,), (4, "balanced", "tensor")),
        (
            {"q_embedding_bits": 8, "q_embedding_mode": "affine", "q_embedding_granularity": "row"},
            (2,),
            (8, "affine", "row"),
        ),
    ],
)
def test_the_rules_of_layers_and_of_the_embedding(options, layer, embedding):
    found = rules(**options)
    assert found["model.layers.3.mlp.up_proj"] == QuantizationRule(*layer)
    assert found["model.embedding"] == QuantizationRule(*(embedding or layer))


def test_a_recipe_gives_more_bits_to_layers_that_suffer():
    found = rules(quant_predicate="mixed_2_8")
    assert found["model.embedding"].bits == 4
    more = {path for path, rule in found.items() if rule.bits == 8}
    blocks = {f"model.layers.{i}" for i in (0, 1, 4, 7)}
    blocks |= {f"model.kv_reuse_layers.{i}" for i in (0, 3, 4, 5)}  # blocks 10, 13, 14 and 15
    assert more == {f"{b}.mlp.down_proj" for b in blocks} | {
        f"{b}.self_attn.qkv_proj" for b in blocks if ".layers." in b
    }


def test_a_predicate_decides():
    own = {"bits": 4, "mode": "affine", "group_size": 32}
    found = rules(quant_predicate=lambda path, module: own if ".mlp." in path else False)
    assert len(found) == 3 * CONFIG.num_layers
    assert set(found.values()) == {QuantizationRule(4, "affine", "group", 32)}


@each(
    ("options", "words"),
    [
        ({"dtype": "int8"}, "float16, bfloat16, float32"),
        ({"to": "gguf"}, "afm-mlx, mlx-lm"),
        ({"quantize": False, "q_bits": 4}, "--q-bits without -q"),
        ({"quantize": False, "target_bpw": 3.5}, "--target-bpw without -q"),
        ({"dequantize": True}, "choose one"),
        ({"q_bits": 4, "quant_predicate": "mixed_2_4"}, "--quant-predicate both"),
        ({"q_bits": 4, "target_bpw": 3.5}, "--q-bits and --target-bpw both"),
        ({"data": "text.txt"}, "--data without --target-bpw"),
        ({"q_bits": 3}, "bits is 3; allowed are 2, 4, 8"),
        ({"q_mode": "mxfp4"}, "mode is 'mxfp4'"),
        ({"q_embedding_bits": 6}, "bits is 6"),
        ({"q_embedding_mode": "mxfp4"}, "mode is 'mxfp4'"),
        ({"q_granularity": "row", "q_group_size": 64}, "only groups have a size"),
        ({"q_group_size": 48}, r"model\..* has 64 inputs, which groups of 48"),
        ({"quant_predicate": "mixed_2_6"}, "layers of 3 or 6 bits, or is none.* mixed_4_8"),
        ({"quant_predicate": "mixed_3_6", "target_bpw": 3}, "'mixed_3_6' does not go with"),
        ({"quant_predicate": lambda path, module: {"bit": 3}}, r"model\..*: unknown keys bit"),
    ],
)
def test_options_that_cannot_be_met(options, words):
    with pytest.raises(AFMError, match=words):
        rules(**options)


def test_a_layer_that_cannot_be_packed_is_named():
    with pytest.raises(AFMError, match=r"down_proj has 198 inputs, which can't be packed in 2"):
        rules(NARROW)


@each(
    ("options", "packed", "words"),
    [
        ({"quantize": True}, True, "quantized already"),
        ({"dtype": "float16"}, True, "no other dtype"),
        ({"dequantize": True}, False, "nothing to dequantize"),
    ],
)
def test_folders_that_cannot_become_what_is_asked_for(options, packed, words):
    options = ConversionOptions(**options)
    options.check_source(Path("model"), not packed)
    with pytest.raises(AFMError, match=f"^model is .*{words}"):
        options.check_source(Path("model"), packed)
