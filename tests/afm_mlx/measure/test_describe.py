"""What is said of a model folder."""

import itertools
import json
import re
from types import SimpleNamespace

import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from afm_mlx.checkpoint.weights import save_weights
from afm_mlx.errors import ConfigError
from afm_mlx.loading.resolve import EMBEDDED_MODEL, resolve_model
from afm_mlx.measure import describe
from afm_mlx.tokenizer.tokenizer import save_tokenizer


def test_formats_of_a_packed_folder():
    facts = describe.describe_folder(resolve_model(EMBEDDED_MODEL))
    layers = {name: found["layers"] for name, found in facts["packed_layers"].items()}
    assert layers == {"4-bit balanced per row": 1, "2-bit balanced per row": 40}
    assert facts["weights"]["bits_per_weight"] < 2.5
    assert facts["kv_cache"]["bytes_per_token"]["int8"] == 1280


def test_a_tokenizer_s_files(spm_bpe, tmp_path):
    save_tokenizer(spm_bpe, tmp_path)
    facts = describe.describe_tokenizer(tmp_path)
    assert (facts["file"], facts["chat_template"]) == ("tokenizer.model", "chat_template.jinja")
    (tmp_path / "tokenizer.model").unlink()
    (tmp_path / "chat_template.jinja").unlink()
    facts = describe.describe_tokenizer(tmp_path)
    assert (facts["file"], facts["chat_template"]) == ("tokenizer.json", "AFM's (V6)")
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": "x"}))
    assert describe.describe_tokenizer(tmp_path)["chat_template"] == "tokenizer_config.json"


def test_packed_weights_are_counted_unpacked(tmp_path):
    layers = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(64, 96, bias=False))
    layers.layers[0] = layers.layers[0].to_quantized(32, 4)
    layers.layers[1] = layers.layers[1].to_quantized(64, 2)
    save_weights(tmp_path, dict(tree_flatten(layers.parameters())))
    config = tmp_path / "config.json"

    def parameters(bits):
        quantization = {"group_size": 32, "bits": 4, "layers.1": {"bits": bits}}
        config.write_text(json.dumps({"model_type": "llama", "quantization": quantization}))
        return describe.describe_folder(tmp_path)["weights"]["parameters"]

    assert parameters(2) == 64 * (32 + 96)
    with pytest.raises(ConfigError, match=f"^{re.escape(str(config))}: .*layers.1 has 33 bits"):
        parameters(33)


def test_the_speed_of_a_product_is_its_multiplications_and_additions_over_seconds(monkeypatch):
    clock = itertools.count(step=0.5)
    monkeypatch.setattr(describe, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert describe.measure_gflops() == 2 * 512**3 / 0.5 / 1e9
