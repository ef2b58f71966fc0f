"""What the peers run: their names, their models with random weights, and how each is started."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from afm_mlx.config import ModelConfig
from bench.peer_gguf import matrix_parameters, write_gguf

EXACT, INT8, MLX_LM = "afm-mlx exact", "afm-mlx int8", "mlx-lm"
LLAMA = "llama.cpp"
HERE = Path(__file__).parent


def shrunk(config: ModelConfig, layers: int) -> ModelConfig:
    """The same model with fewer blocks, as large a share of them reusing keys and values."""
    reuse = round(layers * config.num_kv_reuse_layers / config.num_layers)
    return dataclasses.replace(
        config, num_layers=layers, num_kv_reuse_layers=min(reuse, layers - 1)
    )


def write_folder(folder: Path, config: ModelConfig) -> None:
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


def commands(
    config: ModelConfig, folder: Path, threads: int, capacity: int, llama_python: str | None
) -> dict[str, list[str]]:
    """How to start every peer; writes the model of each that is missing.

    Args:
        folder: holds the models.
        capacity: tokens that llama.cpp's cache has place for.
        llama_python: a Python that has llama-cpp-python; None leaves llama.cpp out.
    """
    ours = folder / "afm-mlx"
    if not ours.exists():
        write_folder(ours, config)
    start = [sys.executable, "-m", "bench.peer_ours", "--folder", str(ours), "--activation-bits"]
    found = {EXACT: [*start, "16"], INT8: [*start, "8"]}
    if llama_python is not None:
        for body, repack in (("TQ2_0", True), ("Q2_K", True), ("Q2_K", False)):
            path = folder / f"{body}.gguf"
            if not path.exists():
                write_gguf(path, config, body)
            name = f"{LLAMA} {body}" + ("" if repack else ", not repacked")
            options = ["--threads", str(threads), "--capacity", str(capacity)]
            options += [] if repack else ["--no-repack"]
            worker = str(HERE / "peer_llama.py")
            found[name] = [llama_python, worker, "--model", str(path), *options]
    sizes = config.to_dict()
    for ours_only in ("model_type", "kv_bits", "context_length"):
        del sizes[ours_only]
    found[MLX_LM] = [sys.executable, "-m", "bench.peer_mlx_lm", "--sizes", json.dumps(sizes)]
    return found


def matrix_flops(config: ModelConfig, peer: str) -> float:
    """Operations of the matrix products for one prompt token."""
    if peer.startswith(LLAMA):
        return 2 * matrix_parameters(config)
    d, kv = config.hidden_dim, config.num_kv_heads * config.head_dim
    writing = config.num_kv_layers * (2 * d * d + 2 * d * kv + 3 * d * config.ffn_dim)
    # mlx-lm runs all blocks on all prompt tokens but the last.
    reuse = config.num_kv_reuse_layers * (2 * d * d + 3 * d * config.ffn_dim)
    return 2 * (writing + (reuse if peer == MLX_LM else 0))
