"""A GGUF file with the matrix shapes of an AFM model, for llama.cpp, which can't run AFM itself.

The architecture is llama's, with as many blocks, the same widths and heads, and the tied 4-bit embedding.
How it differs from AFM, and by how much, is counted by `matrix_parameters`:

- every block projects, stores and reads keys and values of its own; AFM's last blocks reuse others'
- a prompt runs through every block; AFM's runs through the blocks that write keys and values
- no norm of queries and keys; keys and values are float16

Weights are random codes under scales that keep activations in a trained model's range.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

# Bytes and weights of a block; and where its float16 scales lie, as (offset, what multiplies the unit).
FORMATS: dict[str, tuple[int, int, dict[int, float]]] = {
    # codes less 1, times d
    "TQ2_0": (66, 256, {64: 0.9}),
    # codes times d and a 4-bit scale, less dmin times a 4-bit minimum
    "Q2_K": (84, 256, {80: 0.5 / 7.5, 82: 0.75 / 7.5}),
    # codes less 8, times d
    "Q4_0": (18, 32, {0: 0.22}),
}


def quantized_bytes(format: str, rows: int, inputs: int) -> int:
    """Bytes of a matrix in one of llama.cpp's formats."""
    block_bytes, block_weights, _ = FORMATS[format]
    return rows * inputs // block_weights * block_bytes


def random_blocks(format: str, rows: int, inputs: int, rng: np.random.Generator) -> np.ndarray:
    """Random codes with fitting scales, (rows, bytes of a row) uint8.

    Raises:
        ValueError: when a row does not fill whole blocks.
    """
    block_bytes, block_weights, scales = FORMATS[format]
    if inputs % block_weights:
        raise ValueError(
            f"{format} stores {block_weights} weights in a block, which {inputs} inputs don't fill."
        )
    count = rows * inputs // block_weights
    blocks = rng.integers(0, 256, (count, block_bytes), dtype=np.uint8)
    for offset, factor in scales.items():
        scale = np.full(count, factor * inputs**-0.5, dtype="<f2")
        blocks[:, offset : offset + 2] = scale.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def matrix_shapes(config: Any) -> dict[str, tuple[int, int]]:
    """(rows, inputs) of a block's matrices by llama.cpp's names, for an AFM `ModelConfig`."""
    d, kv, ffn = config.hidden_dim, config.num_kv_heads * config.head_dim, config.ffn_dim
    return {
        "attn_q": (d, d),
        "attn_k": (kv, d),
        "attn_v": (kv, d),
        "attn_output": (d, d),
        "ffn_gate": (ffn, d),
        "ffn_up": (ffn, d),
        "ffn_down": (d, ffn),
    }


def matrix_parameters(config: Any) -> int:
    """Weights of all blocks' matrices in the llama architecture; the embedding not counted."""
    return config.num_layers * sum(r * k for r, k in matrix_shapes(config).values())


def write_gguf(path: Path, config: Any, body: str, embedding: str = "Q4_0", seed: int = 0) -> None:
    """Write the model.

    Args:
        path: of the file.
        config: an AFM `ModelConfig`.
        body: format of the blocks' matrices, a key of `FORMATS`.
        embedding: format of the embedding, which is the head too.
        seed: of the codes.
    """
    import gguf

    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.hidden_dim)
    writer.add_feed_forward_length(config.ffn_dim)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")

    def matrix(name: str, format: str, rows: int, inputs: int) -> None:
        kind = gguf.GGMLQuantizationType[format]
        writer.add_tensor(name, random_blocks(format, rows, inputs, rng), raw_dtype=kind)

    def norm(name: str) -> None:
        writer.add_tensor(name, np.ones(config.hidden_dim, dtype=np.float32))

    matrix("token_embd.weight", embedding, config.vocab_size, config.hidden_dim)
    norm("output_norm.weight")
    for block in range(config.num_layers):
        norm(f"blk.{block}.attn_norm.weight")
        norm(f"blk.{block}.ffn_norm.weight")
        for name, (rows, inputs) in matrix_shapes(config).items():
            matrix(f"blk.{block}.{name}.weight", body, rows, inputs)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
