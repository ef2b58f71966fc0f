"""Models of mlx-lm's zoo in the comparison, in 4 bits, which all programs run."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

from bench.peer_figures import zoo_targets
from bench.peer_gguf import Shapes
from bench.peer_models import LlamaFormat, PeerModel

# Source: config.json of Qwen/Qwen3-4B and Qwen/Qwen3-0.6B, and of meta-llama/Llama-3.2-1B.
_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-4b": _QWEN3
    | {
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
    },
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
}

FORMATS = (
    LlamaFormat("Q4_0", "Q4_0"),
    LlamaFormat("Q4_0", "Q4_0", repack=False),
    LlamaFormat("Q4_K", "Q4_K"),
)


def zoo_model(name: str, layers: int | None = None) -> PeerModel:
    """Return a model of `CONFIGS`, with `layers` blocks if given."""
    config = dict(CONFIGS[name])
    if layers is not None:
        config["num_hidden_layers"] = layers
    shapes = llama_shapes(config)
    return PeerModel(
        name,
        config,
        shapes,
        FORMATS,
        partial(write_folder, config),
        lambda folder: ["--folder", str(folder)],
        lambda peer: shapes.matrix_parameters,
        zoo_targets,
    )


def llama_shapes(config: dict[str, Any]) -> Shapes:
    """Return llama.cpp's shapes of the same model."""
    return Shapes(
        config["model_type"],
        config["num_hidden_layers"],
        config["hidden_size"],
        config["intermediate_size"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
        config["vocab_size"],
        config["max_position_embeddings"],
        config["rope_theta"],
        config["rms_norm_eps"],
        rope_factors(config),
    )


def rope_factors(config: dict[str, Any]) -> tuple[float, ...] | None:
    """Return what llama.cpp divides the frequencies of RoPE by, each pair of a head's; None for no scaling.

    Source: `Llama3RoPE` in `mlx_lm/models/rope_utils.py`, and `LlamaModel` in llama.cpp's
    `convert_hf_to_gguf.py`.
    """
    scaling = config.get("rope_scaling")
    if scaling is None:
        return None
    assert scaling["rope_type"] == "llama3"
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    factors = []
    for pair in range(config["head_dim"] // 2):
        period = 2 * math.pi * config["rope_theta"] ** (2 * pair / config["head_dim"])
        # Turns of this pair within the context that the model was first trained on.
        turns = scaling["original_max_position_embeddings"] / period
        smooth = min(max((turns - low) / (high - low), 0), 1)
        factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return tuple(factors)


def write_folder(config: dict[str, Any], folder: Path) -> None:
    """Write a folder as mlx-lm's `convert -q` does, with random codes: floats are bfloat16, no tokenizer."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes

    from afm_mlx.checkpoint.weights import save_weights
    from afm_mlx.measure.random_model import fill_with_random_codes
    from afm_mlx.quantization.rule import QuantizationRule

    folder.mkdir(parents=True)
    architecture, arguments = _get_classes(config)
    model = architecture(arguments.from_dict(config))
    rule = QuantizationRule(4, "affine", "group", 64)
    fill_with_random_codes(model, rule, rule)
    tensors = dict(tree_flatten(model.parameters()))
    stored = {n: t if t.dtype == mx.uint32 else t.astype(mx.bfloat16) for n, t in tensors.items()}
    save_weights(folder, stored)
    values = config | {"quantization": rule.to_dict()}
    (folder / "config.json").write_text(json.dumps(values, indent=4))
