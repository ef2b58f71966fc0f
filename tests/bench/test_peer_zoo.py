"""Zoo models: one folder that this package and mlx-lm load, and the same shapes for llama.cpp."""

import sys

import mlx.core as mx
import mlx_lm.utils
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.rope_utils import Llama3RoPE

from afm_mlx.quantization.packed_layers import PackedEmbedding, PackedLinear
from bench.peer_models import MLX_LM
from bench.peer_ours import load, weight_bytes
from bench.peer_protocol import Peer
from bench.peer_zoo import CONFIGS, llama_shapes, rope_factors, write_folder, zoo_model
from tests.tools.cases import each
from tests.tools.compare import assert_close


@each("name", CONFIGS)
def test_the_folder_is_mlx_lms_and_runs_packed(tmp_path, rng, zoo_sizes, name):
    config = CONFIGS[name] | zoo_sizes
    write_folder(config, tmp_path / name)
    shapes = llama_shapes(config)
    ours, seconds = load(tmp_path / name)
    theirs, _ = mlx_lm.utils.load_model(tmp_path / name)
    assert seconds > 0
    packed = [m for m in ours.modules() if isinstance(m, PackedLinear | PackedEmbedding)]
    assert {(m.bits, m.group_size) for m in packed} == {(4, 64)}
    weights = sum(m.packed.in_dims * m.packed.out_dims for m in packed)
    assert weights == shapes.matrix_parameters + shapes.vocab_size * shapes.hidden_dim
    assert weight_bytes(ours) >= weights // 2
    stored = dict(tree_flatten(theirs.parameters()))
    assert {str(a.dtype) for a in stored.values()} == {"mlx.core.uint32", "mlx.core.bfloat16"}
    theirs.set_dtype(mx.float32)
    tokens = mx.array(rng.integers(0, config["vocab_size"], (1, 5)))
    logits = np.array(theirs(tokens))
    assert 0.3 < logits.std() < 3
    assert_close(ours(tokens), mx.array(logits), 1e-2)


@pytest.mark.usefixtures("no_torch")
def test_mlx_lm_is_measured_on_the_same_folder(tmp_path, zoo_sizes):
    write_folder(CONFIGS["qwen3-4b"] | zoo_sizes, tmp_path / "zoo")
    arguments = zoo_model("qwen3-4b").mlx_lm_arguments(tmp_path / "zoo")
    peer = Peer(MLX_LM, [sys.executable, "-m", "bench.peer_mlx_lm", *arguments], threads=1)
    try:
        stored = (tmp_path / "zoo" / "model.safetensors").stat().st_size
        assert peer.hello["weight_bytes"] > stored  # its floats are float32
        assert peer.hello["load_seconds"] > 0
        assert peer.measure("prefill", tokens=2)["tokens_per_second"] > 0
        assert peer.measure("decode", tokens=2, rows=1, depth=2)["tokens_per_second"] > 0
    finally:
        peer.close()


@each(
    "name, parameters",
    [
        ("qwen3-4b", 4022468096),
        ("qwen3-0.6b", 596049920),
        ("llama-3.2-1b", 1235814400),
    ],
)
def test_zoo_models_have_the_published_sizes(name, parameters):
    shapes = zoo_model(name).shapes
    norms = shapes.num_layers * sum(shapes.norms.values()) + shapes.hidden_dim
    embedding = shapes.vocab_size * shapes.hidden_dim
    assert shapes.matrix_parameters + embedding + norms == parameters
    assert zoo_model(name, 3).shapes.num_layers == 3


def test_llama_cpp_is_given_the_frequencies_of_mlx_lm():
    config = CONFIGS["llama-3.2-1b"]
    scaled = Llama3RoPE(64, base=config["rope_theta"], scaling_config=config["rope_scaling"])
    factors = np.array(rope_factors(config))
    periods = config["rope_theta"] ** (np.arange(0, 64, 2) / 64)
    assert np.allclose(factors * periods, np.array(scaled._freqs), rtol=1e-5)
    assert (factors[0], factors[-1]) == (1, 32)
    assert len(set(factors)) > 3  # some are in between
    assert rope_factors(CONFIGS["qwen3-4b"]) is None
