"""Bundles of mlx-lm's Llama and Qwen3, executed by Apple's runtime, against mlx-lm's own model."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model as load_of_mlx_lm

from afm_mlx.converters.convert import convert
from afm_mlx.converters.coreai.zoo_source import plan_zoo_bundle
from afm_mlx.coreai.bundle import CoreAIBundle, ZooConfig
from afm_mlx.coreai.coreai_model import CoreAIModel
from afm_mlx.errors import AFMError, ConfigError
from afm_mlx.loading.mlx_lm_models import load_mlx_lm_folder
from afm_mlx.loading.resolve import resolve_model
from afm_mlx.measure.coreai_report import examine_coreai
from tests.tools.cases import each
from tests.tools.compare import assert_close, error
from tests.tools.coreai import Executed, make_states
from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_model

VOCAB, LENGTH = 60, 6
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def write_zoo(folder, rng, kind, bits=None, **fixed):
    """A folder as mlx-lm writes it, with drawn norms, and its quantization with groups of 32."""
    model = zoo_model(kind, VOCAB, int(rng.integers(2**31)), **fixed)
    norms = [
        (name, mx.array(rng.uniform(0.5, 2, weight.shape), mx.float32))
        for name, weight in tree_flatten(model.parameters())
        if weight.ndim == 1
    ]
    model.load_weights(norms, strict=False)
    if bits:
        nn.quantize(model, 32, bits)
        fixed["quantization"] = {"group_size": 32, "bits": bits}
    write_zoo_folder(folder, kind, model, word_tokenizer_json(VOCAB), **fixed)
    return folder


@pytest.mark.parametrize(
    ("kind", "bits", "fixed"),
    [
        ("llama", None, {"rope_scaling": LLAMA3, "num_key_value_heads": 4}),
        ("llama", 4, {"tie_word_embeddings": False}),
        ("qwen3", None, {"head_dim": 16, "tie_word_embeddings": False}),
        ("qwen3", 4, {"rope_theta": 1e6, "num_hidden_layers": 3}),
    ],
)
def test_logits_are_mlx_lm_s(rng, tmp_path, kind, bits, fixed):
    """Prompts, with padding, steps, and `main`, in float32."""
    folder = write_zoo(tmp_path / "model", rng, kind, bits, **fixed)
    path = convert(
        folder,
        tmp_path / "tiny",
        to="coreai",
        dtype="float32",
        prompt_lengths=[LENGTH],
        context=30,
    )
    model, _ = load_of_mlx_lm(folder)
    tokens = rng.integers(0, VOCAB, 26).tolist()
    wanted = np.array(model(mx.array([tokens]), make_prompt_cache(model))[0])
    runner = CoreAIModel(path)
    runner.prefill(tokens[:9])
    found = [runner.logits(tokens[9:13]), *(runner.decode(token) for token in tokens[13:])]
    assert_close(np.stack(found), wanted[12:], 1e-4)
    with Executed(path) as executed:
        states = make_states(runner.config, np.float32, columns=28)
        for first, after in ((0, 9), (9, 26)):
            inputs = {
                "input_ids": np.array([tokens[first:after]], np.int32),
                "position_ids": np.arange(after, dtype=np.int32)[None],
            }
            logits = executed.call("main", inputs, states)[0]
            assert_close(logits, wanted[first:after], 1e-4)


def test_balanced_codes_and_float16(rng, tmp_path):
    """A folder that this package packed, in float16."""
    floats = write_zoo(tmp_path / "float", rng, "qwen3", hidden_size=64)
    folder = convert(floats, tmp_path / "model", quantize=True, q_bits=2, q_mode="balanced")
    path = convert(folder, tmp_path / "tiny", to="coreai", prompt_lengths=[LENGTH], context=30)
    model = load_mlx_lm_folder(folder)[0]
    tokens = rng.integers(0, VOCAB, 5).tolist()
    wanted = np.array(model(mx.array([tokens]))[0, -1])
    assert error(CoreAIModel(path).logits(tokens), wanted) < 3e-2
    with pytest.raises(AFMError, match="takes no adapters: it was made of a model of mlx-lm"):
        CoreAIBundle.read(path).check_takes_adapters()
    with pytest.raises(AFMError, match=r"and .*afm-nano is an AFM model's folder"):
        examine_coreai(path, resolve_model("afm-nano"))


def test_the_default_context(rng, tmp_path):
    for number, (most, wanted) in enumerate(((256, 256), (5000, 4096))):
        folder = write_zoo(
            tmp_path / str(number), rng, "llama", max_position_embeddings=most, num_hidden_layers=1
        )
        assert plan_zoo_bundle(folder).config.context_length == wanted
        assert plan_zoo_bundle(folder, context=most).config.context_length == most


@each(
    ("change", "words"),
    [
        ({"hidden_dim": 0}, "hidden_dim is 0; a size of 1 or more"),
        ({"num_heads": True}, "num_heads is True"),
        ({"num_heads": 3}, "heads can't share keys evenly"),
        ({"head_dim": 7}, "or have an odd width"),
        ({"rms_norm_eps": "1"}, "rms_norm_eps is '1'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"more": 1}, "the keys .* are needed, and no others"),
    ],
)
def test_sizes(change, words):
    right = ZooConfig(60, 30, 32, 2, 4, 2, 8, 1e-5)
    assert ZooConfig.from_dict(right.to_dict()) == right
    with pytest.raises(ConfigError, match=words):
        ZooConfig.from_dict(right.to_dict() | change)


def test_refusals(rng, tmp_path):
    llama = write_zoo(tmp_path / "llama", rng, "llama")
    options = {"to": "coreai", "prompt_lengths": [LENGTH]}
    for number, (kind, fixed, more, words) in enumerate(
        (
            (
                "gemma3_text",
                {},
                {},
                "a model of type 'gemma3_text'; Core AI bundles are made of AFM",
            ),
            ("llama", {"attention_bias": True}, {}, "self_attn.o_proj has biases"),
            ("llama", {"rope_traditional": True}, {}, "rotates neighbouring dimensions"),
            (
                "llama",
                {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8},
                {},
                "sliding window",
            ),
            (
                "qwen3",
                {"bits": 3},
                {},
                "has 3 bits of the mode affine; Core AI bundles can have 2, 4 or 8 bits",
            ),
            ("llama", {}, {"context": 257}, "the model's context is 256 tokens"),
            ("llama", {}, {"adapter_rank": 4}, "no functions with adapters"),
            ("llama", {}, {"adapter_functions": ["a"]}, "no functions with adapters"),
            ("llama", {}, {"to": "coreml"}, "a Core ML package is made of an AFM model's folder"),
        )
    ):
        own = fixed or kind != "llama"
        folder = write_zoo(tmp_path / str(number), rng, kind, **fixed) if own else llama
        output = tmp_path / ("tiny.mlpackage" if "to" in more else "tiny")
        with pytest.raises(AFMError, match=words):
            convert(folder, output, **(options | more))
        assert not output.exists()
