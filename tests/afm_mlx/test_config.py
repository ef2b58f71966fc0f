"""The architecture's description: sizes that are known, and everything that is refused."""

import json

import pytest
from mlx.utils import tree_flatten

from afm_mlx.config import PRESETS, ModelConfig, parameter_shapes
from afm_mlx.errors import ConfigError
from afm_mlx.model.model import Model
from tests.tools.cases import each

GOOD = {"model_type": "afm7", "vocab_size": 100, "hidden_dim": 32, "num_layers": 4}
GOOD |= {"num_kv_reuse_layers": 1, "num_heads": 4, "num_kv_heads": 2, "rope_theta": 500000.0}


def test_presets_have_the_published_sizes():
    base = PRESETS["afm-3b"]
    assert base.num_parameters == 3_111_368_064  # of tamm 0.2.0's AFMTextV7 by default
    assert base.kv_values_per_token == 17_920
    assert PRESETS["afm-3b-draft"].num_parameters == 48_765_952
    assert (base.num_kv_layers, base.num_kv_reuse_layers) == (35, 21)
    assert (base.head_dim, base.ffn_dim) == (128, 6656)
    first = PRESETS["afm-2024"]
    embedding = first.vocab_size * first.hidden_dim
    assert round(embedding / 1e9, 2) == 0.15
    assert round((first.num_parameters - embedding) / 1e9, 2) == 2.58
    assert (first.head_dim, first.num_kv_layers, first.num_kv_reuse_layers) == (128, 26, 0)
    nano = PRESETS["afm-nano"]
    assert (nano.num_kv_layers, nano.num_kv_reuse_layers, nano.hidden_dim) == (5, 3, 256)


def test_the_feed_forward_width_is_rounded_as_tamm_rounds_it():
    """mlx-lm cuts it down: 30 * 3.25 = 97.5 gives 97 there."""
    config = ModelConfig.from_dict(GOOD | {"hidden_dim": 30, "num_heads": 3, "num_kv_heads": 1})
    assert config.ffn_dim == 98


def test_round_trip_through_config_json(tmp_path):
    for preset in PRESETS:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(PRESETS[preset].to_dict()))
        assert ModelConfig.from_file(path) == PRESETS[preset]


def test_keys_of_mlx_lm_and_of_quantization_are_known():
    config = ModelConfig.from_dict(
        GOOD | {"quantization": {"bits": 4}, "quantization_config": {}, "eos_token_id": 2}
    )
    assert (config.kv_bits, config.context_length) == (8, 4096)


@each(
    ("change", "message"),
    [
        ({"rope_theta": None}, "missing keys rope_theta"),  # (m): mlx-lm assumes 50000
        ({"num_heads": None, "vocab_size": None}, "missing keys num_heads, vocab_size"),
        ({"n_heads": 4, "zeta": 1}, "unknown keys n_heads, zeta. Known are context_length"),
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"num_kv_reuse_layers": 4}, "num_kv_reuse_layers is 4; allowed is 0 to 3"),
        ({"num_kv_reuse_layers": -1}, "num_kv_reuse_layers is -1"),
        ({"num_kv_heads": 3}, "num_kv_heads is 3; allowed is a divisor of num_heads"),
        ({"num_heads": 5}, "hidden_dim is 32 with 5 heads"),
        ({"num_heads": 32}, "RoPE rotates pairs"),
        ({"hidden_dim": 0}, "hidden_dim is 0; allowed is 1 to 131,072"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0; allowed is 1 to 1e+30"),
        ({"rope_theta": 1e-300}, "rope_theta is 1e-300"),  # frequencies that float32 has not
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"rope_theta": 10**5000}, "rope_theta is a int too large to be shown"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; allowed is 1e-30 to 1"),
        ({"rms_norm_eps": 1e-300}, "rms_norm_eps is 1e-300"),
        ({"num_layers": 20000}, "num_layers is 20000; allowed is 1 to 1,024"),
        ({"vocab_size": 1 << 31}, "vocab_size is 2147483648; allowed is 1 to 16,777,216"),
        ({"context_length": 10**5000}, "context_length is a int too large to be shown"),
        ({"num_kv_reuse_layers": 10**5000}, "num_kv_reuse_layers is a int too large"),
        ({"hidden_dim_scale_factor": 1e308}, "hidden_dim_scale_factor is 1e+308 with hidden_dim"),
        ({"hidden_dim_scale_factor": 1e-9}, "hidden_dim_scale_factor is 1e-09"),
        ({"x" * 5000: 1}, "unknown keys 'xxx"),
        ({"vocab_size": "100"}, "vocab_size is '100', and must be of type int"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"kv_bits": 4}, "kv_bits is 4; allowed is 8 or null"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
    ],
)
def test_contradictions_are_named(change, message):
    values = {k: v for k, v in (GOOD | change).items() if v is not None}
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(values, source="here/config.json")
    assert message in str(caught.value)
    assert str(caught.value).startswith("here/config.json")
    assert len(str(caught.value)) < 600


@each("content", [b"", b"{", b"[1]", b"\xff"])
def test_files_that_are_no_json_object(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.from_file(tmp_path / "config.json")


# -- parameters


@pytest.mark.parametrize("name", PRESETS)
def test_parameter_shapes_are_the_models(name):
    config = PRESETS[name]
    # Arrays are lazy: nothing of the 3B model takes memory here.
    parameters = dict(tree_flatten(Model(config).parameters()))
    assert parameter_shapes(config) == {k: tuple(v.shape) for k, v in parameters.items()}
