"""GGUF files with random weights, for llama.cpp: any model of its `llama` or `qwen3` architecture.

Weights are random codes under scales that keep activations in a trained model's range; norms are 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# Bytes and weights of a block; and where its float16 scales lie, as (offset, what multiplies the unit).
FORMATS: dict[str, tuple[int, int, dict[int, float]]] = {
    # codes less 1, times d
    "Q2_0": (18, 64, {0: 0.9}),
    # codes less 1, times d
    "TQ2_0": (66, 256, {64: 0.9}),
    # codes times d and a 4-bit scale, less dmin times a 4-bit minimum
    "Q2_K": (84, 256, {80: 0.5 / 7.5, 82: 0.75 / 7.5}),
    # codes less 8, times d
    "Q4_0": (18, 32, {0: 0.22}),
    # codes times d and a 6-bit scale, less dmin times a 6-bit minimum
    "Q4_K": (144, 256, {0: 1 / 258, 2: 7.5 / 258}),
}

# Numbers of types in GGUF files that gguf 0.19, the newest on PyPI, doesn't know yet.
NEWER = {"Q2_0": 42}


@dataclass(frozen=True)
class Shapes:
    """A model as llama.cpp has it, with a tied embedding.

    Args:
        architecture: "llama", or "qwen3", which has a norm of queries and keys besides.
        num_layers: blocks, each with keys and values of its own.
        hidden_dim, ffn_dim: widths.
        num_heads, num_kv_heads, head_dim: numbers of query heads and of key heads, and a head's width.
        vocab_size: rows of the embedding.
        context_length: maximum tokens of the context, as the file declares them.
        rope_theta, rms_norm_eps: constants of RoPE and of the norms.
        rope_factors: divide the frequencies of RoPE, one for each pair of a head; None for none.
    """

    architecture: str
    num_layers: int
    hidden_dim: int
    ffn_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rope_theta: float
    rms_norm_eps: float
    rope_factors: tuple[float, ...] | None = None

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Mapping from llama.cpp's name of each matrix of a block to (rows, inputs)."""
        d, ffn = self.hidden_dim, self.ffn_dim
        queries, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "attn_q": (queries, d),
            "attn_k": (kv, d),
            "attn_v": (kv, d),
            "attn_output": (d, queries),
            "ffn_gate": (ffn, d),
            "ffn_up": (ffn, d),
            "ffn_down": (d, ffn),
        }

    @property
    def norms(self) -> dict[str, int]:
        """Mapping from llama.cpp's name of each norm of a block to its width."""
        norms = {"attn_norm": self.hidden_dim, "ffn_norm": self.hidden_dim}
        if self.architecture == "qwen3":
            norms |= {"attn_q_norm": self.head_dim, "attn_k_norm": self.head_dim}
        return norms

    @property
    def matrix_parameters(self) -> int:
        """Number of weights in all blocks' matrices, without the embedding."""
        return self.num_layers * sum(rows * inputs for rows, inputs in self.matrices.values())


def quantized_bytes(format: str, rows: int, inputs: int) -> int:
    """Return the bytes of a matrix of (rows, inputs) in one of llama.cpp's formats."""
    block_bytes, block_weights, _ = FORMATS[format]
    return rows * inputs // block_weights * block_bytes


def random_blocks(format: str, rows: int, inputs: int, rng: np.random.Generator) -> np.ndarray:
    """Make a matrix of random codes with fitting scales in a format: (rows, bytes of a row) uint8.

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


def write_gguf(
    path: Path,
    shapes: Shapes,
    body: str,
    embedding: str,
    seed: int = 0,
    vocabulary: bytes | None = None,
) -> None:
    """Write a model with random codes to a GGUF file.

    Args:
        path: the file to write.
        shapes: shapes of the model.
        body: format of the blocks' matrices, a key of `FORMATS`.
        embedding: format of the embedding, which is the head too.
        seed: seed of the random codes.
        vocabulary: a `tokenizer.model` of SentencePiece's; pass None for a model without token texts.
    """
    import gguf

    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, shapes.architecture)
    writer.add_block_count(shapes.num_layers)
    writer.add_context_length(shapes.context_length)
    writer.add_embedding_length(shapes.hidden_dim)
    writer.add_feed_forward_length(shapes.ffn_dim)
    writer.add_head_count(shapes.num_heads)
    writer.add_head_count_kv(shapes.num_kv_heads)
    writer.add_key_length(shapes.head_dim)
    writer.add_value_length(shapes.head_dim)
    writer.add_rope_dimension_count(shapes.head_dim)
    writer.add_rope_freq_base(shapes.rope_theta)
    writer.add_layer_norm_rms_eps(shapes.rms_norm_eps)
    writer.add_vocab_size(shapes.vocab_size)
    if vocabulary is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        _add_vocabulary(writer, vocabulary)

    def matrix(name: str, format: str, rows: int, inputs: int) -> None:
        kind: Any = NEWER.get(format) or gguf.GGMLQuantizationType[format]
        block_bytes, block_weights, _ = FORMATS[format]
        gguf.GGML_QUANT_SIZES.setdefault(kind, (block_weights, block_bytes))
        writer.add_tensor(name, random_blocks(format, rows, inputs, rng), raw_dtype=kind)

    def norm(name: str, width: int) -> None:
        writer.add_tensor(name, np.ones(width, dtype=np.float32))

    matrix("token_embd.weight", embedding, shapes.vocab_size, shapes.hidden_dim)
    norm("output_norm.weight", shapes.hidden_dim)
    if shapes.rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(shapes.rope_factors, np.float32))
    for block in range(shapes.num_layers):
        for name, width in shapes.norms.items():
            norm(f"blk.{block}.{name}.weight", width)
        for name, (rows, inputs) in shapes.matrices.items():
            matrix(f"blk.{block}.{name}.weight", body, rows, inputs)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: Any, vocabulary: bytes) -> None:
    """Add the pieces of a SentencePiece model to the file, with their types and scores."""
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto.FromString(vocabulary)  # type: ignore[attr-defined]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([piece.piece.encode() for piece in model.pieces])
    writer.add_token_scores([piece.score for piece in model.pieces])
    writer.add_token_types([piece.type for piece in model.pieces])
    writer.add_unk_token_id(model.trainer_spec.unk_id)
    writer.add_eos_token_id(model.trainer_spec.eos_id)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(True)
