"""The toolkit's configs: tamm's defaults, and what can't be honoured is refused by its key."""

import json

import pytest
from tamm.adapters import LoRAModelAdapter
from tamm.models.afm_text import AFMTextV7

from afm_mlx.checkpoint.toolkit_config import LoRASpec, read_toolkit_config
from afm_mlx.config import PRESETS
from afm_mlx.errors import ConfigError
from tests.tools.cases import each

KV = {"__tamm_type__": "ao:KVQuantArchOptimizer"}
LORA = {"__tamm_type__": "adapters:LoRAModelAdapter"}
MODEL = {"__tamm_type__": "models:AFMTextV7Config"}


@pytest.fixture
def read(tmp_path):
    """A function that reads a config with these values."""

    def read(values):
        path = tmp_path / "base-model-config.json"
        path.write_text(json.dumps(MODEL | values))
        return read_toolkit_config(path)

    return read


@pytest.mark.parametrize("start", ["models", "module_configs", "tamm:models"])
def test_defaults_are_tamms(read, start):
    adapters = {"a": LORA | {"alpha": 16}, "b": LORA | {"rank": 4, "dropout_p": 0.5}}
    adapters["c"] = {"__tamm_type__": "adapters:Other"}
    kind = {"__tamm_type__": f"{start}:AFMTextV7Config"}
    config = read({**kind, "arch_optimizers": {"kv": KV}, "adapters": adapters})
    assert config.model == PRESETS["afm-3b"]
    rank = LoRAModelAdapter().rank
    assert config.adapters == {
        "a": LoRASpec(rank, 16.0, 0.0),
        "b": LoRASpec(4, 4.0, 0.5),
        "c": "adapters:Other",
    }
    assert config.adapters["a"].scale == 16 / rank
    defaults = AFMTextV7.Config()
    for field in ("vocab_size", "hidden_dim", "num_layers", "num_heads", "rope_theta"):
        assert getattr(config.model, field) == getattr(defaults, field)
    assert read({}).model.kv_bits is None


@each(
    ("values", "words"),
    [
        ({"__tamm_type__": "models:AFMParallelTrackMoEConfig"}, "AFMTextV7Config is the"),
        ({"attention_window": 3}, "unknown keys attention_window"),
        ({"num_heads": 5}, "hidden_dim is 2048 with 5 heads"),
        ({"hidden_dim": "64"}, "hidden_dim"),
        ({"adapters": ["a"]}, "adapters must be"),
        ({"adapters": {"a": 5}}, "adapters must be"),
        ({"adapters": {"a": LORA | {"rank": 0}}}, "adapter 'a': rank is 0"),
        ({"adapters": {"a": LORA | {"alpha": "2"}}}, "adapter 'a': alpha is '2'"),
        ({"adapters": {"a": LORA | {"dropout_p": -1}}}, "adapter 'a': dropout_p is -1"),
        ({"arch_optimizers": {"s": {"__tamm_type__": "ao:SVD"}}}, "'s' is 'ao:SVD'"),
        (
            {"arch_optimizers": {"kv": KV | {"skip_quantize_for_first_token": True}}},
            "'kv' sets skip_quantize_for_first_token",
        ),
    ],
)
def test_what_cannot_be_honoured_is_named(read, values, words):
    with pytest.raises(ConfigError, match=rf"base-model-config\.json.*{words}"):
        read(values)
