"""AFM in the comparison: 2-bit blocks and a 4-bit embedding, compared with llama's architecture in llama.cpp.

llama.cpp can't run AFM. It runs a model of as many blocks and of the same widths and heads, which differs:

- every block projects, stores and reads keys and values of its own; AFM's last blocks reuse others'
- a prompt runs through every block; AFM's runs through the blocks that write keys and values
- no norm of queries and keys; keys and values are float16

ONNX Runtime runs AFM's products, norms and SwiGLU, and no attention (`peer_onnx`).
"""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path

from afm_mlx.config import PRESETS, ModelConfig
from bench.peer_figures import afm_targets
from bench.peer_gguf import Shapes
from bench.peer_models import LLAMA, MLX_LM, LlamaFormat, PeerModel
from bench.peer_onnx import Sizes

FORMATS = (
    LlamaFormat("TQ2_0", "Q4_0"),
    LlamaFormat("Q2_0", "Q4_0"),
    LlamaFormat("Q2_K", "Q4_0"),
    LlamaFormat("Q2_K", "Q4_0", repack=False),
)


def afm_model(preset: str, layers: int | None = None) -> PeerModel:
    """Return a preset as a `PeerModel`, with `layers` blocks if given."""
    config = PRESETS[preset] if layers is None else shrunk(PRESETS[preset], layers)
    sizes = config.to_dict()
    for ours_only in ("model_type", "kv_bits", "context_length"):
        del sizes[ours_only]
    return PeerModel(
        preset,
        config.to_dict(),
        llama_shapes(config),
        FORMATS,
        partial(write_folder, config),
        lambda folder: ["--sizes", json.dumps(sizes)],
        partial(prompt_weights, config),
        afm_targets,
        onnx_sizes(config),
    )


def shrunk(config: ModelConfig, layers: int) -> ModelConfig:
    """Return the configuration with `layers` blocks, of which the same share reuses keys and values."""
    reuse = round(layers * config.num_kv_reuse_layers / config.num_layers)
    return dataclasses.replace(
        config, num_layers=layers, num_kv_reuse_layers=min(reuse, layers - 1)
    )


def llama_shapes(config: ModelConfig) -> Shapes:
    """Return the shapes of the most similar model that llama.cpp can run."""
    return Shapes(
        "llama",
        config.num_layers,
        config.hidden_dim,
        config.ffn_dim,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.vocab_size,
        config.context_length,
        config.rope_theta,
        config.rms_norm_eps,
    )


def onnx_sizes(config: ModelConfig) -> Sizes:
    """Return what ONNX Runtime's products follow from."""
    return Sizes(**{name: getattr(config, name) for name in Sizes._fields})


def write_folder(config: ModelConfig, folder: Path) -> None:
    """Write a model folder with random codes: 2-bit balanced rows, 4-bit embedding."""
    from mlx.utils import tree_flatten

    from afm_mlx.checkpoint.weights import save_weights
    from afm_mlx.measure.random_model import random_packed_model
    from afm_mlx.quantization.rule import AFM_EMBEDDING_RULE, AFM_RULE

    folder.mkdir(parents=True)
    model = random_packed_model(config)
    save_weights(folder, dict(tree_flatten(model.parameters())))
    quantization = AFM_RULE.to_dict() | {"model.embedding": AFM_EMBEDDING_RULE.to_dict()}
    values = config.to_dict() | {"quantization": quantization}
    (folder / "config.json").write_text(json.dumps(values, indent=4))


def prompt_weights(config: ModelConfig, peer: str) -> int:
    """Return the number of weights that the program named `peer` multiplies for a prompt token."""
    if peer.startswith(LLAMA):
        return llama_shapes(config).matrix_parameters
    d, kv = config.hidden_dim, config.num_kv_heads * config.head_dim
    writing = config.num_kv_layers * (2 * d * d + 2 * d * kv + 3 * d * config.ffn_dim)
    # mlx-lm runs all blocks on all prompt tokens but the last.
    reuse = config.num_kv_reuse_layers * (2 * d * d + 3 * d * config.ffn_dim)
    return writing + (reuse if peer == MLX_LM else 0)
