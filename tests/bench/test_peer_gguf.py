"""Files for llama.cpp: random blocks of every format, and the tensors and keys that it reads."""

import struct

import numpy as np
import pytest

from bench.peer_gguf import FORMATS, NEWER, Shapes, quantized_bytes, random_blocks, write_gguf
from tests.tools.cases import each

gguf = pytest.importorskip("gguf", reason="the extra `bench` is not installed")


def dequantize(format, blocks):
    if format != "Q2_0":
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[format])
    # ggml-common.h's block_q2_0: a float16 scale and 64 codes, each less 1, the first in the lowest bits.
    block = blocks.reshape(-1, 18)
    codes = block[:, 2:, None] >> np.array([0, 2, 4, 6], dtype=np.uint8) & 3
    values = (codes.reshape(-1, 64) - 1.0) * block[:, :2].copy().view("<f2")
    return values.reshape(len(blocks), -1)


@each("format", FORMATS)
def test_random_blocks_are_weights_of_a_fresh_model(format, rng):
    rows, inputs = 64, 256 * int(rng.integers(1, 4))
    blocks = random_blocks(format, rows, inputs, rng)
    assert blocks.nbytes == quantized_bytes(format, rows, inputs)
    values = dequantize(format, blocks)
    assert values.shape == (rows, inputs)
    assert 0.6 < values.std() * inputs**0.5 < 1.6
    assert abs(values.mean()) < 0.5 * values.std()
    assert len(np.unique(values[0])) >= 4
    with pytest.raises(
        ValueError, match=rf"{format} stores \d+ weights in a block, which 72 inputs"
    ):
        random_blocks(format, 3, 72, rng)


@each(
    ("architecture", "body", "embedding"),
    [
        ("llama", "TQ2_0", "Q4_0"),
        ("llama", "Q2_K", "Q4_0"),
        ("llama", "Q4_0", "Q4_0"),
        ("qwen3", "Q4_0", "Q4_0"),
        ("qwen3", "Q4_K", "Q4_K"),
    ],
)
def test_the_file_holds_what_its_architecture_reads(architecture, body, embedding, rng, tmp_path):
    heads, kv_heads = 4, int(rng.choice([1, 2, 4]))
    factors = (1.0, 2.0, *[32.0] * 62) if body == "Q4_0" else None
    shapes = Shapes(architecture, 2, 256, 512, heads, kv_heads, 128, 32, 99, 1e4, 1e-6, factors)
    path = tmp_path / f"{architecture}-{body}.gguf"
    write_gguf(path, shapes, body, embedding)
    reader = gguf.GGUFReader(path)
    tensors = {t.name: t for t in reader.tensors}
    # All that gguf knows this architecture to have, but a head of its own and scales of RoPE.
    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    known = {gguf.TENSOR_NAMES[t] for t in gguf.MODEL_TENSORS[kind]}
    wanted = {n.format(bid=b) for n in known for b in range(2) if "_exps" not in n}
    left_out = {"output"} | {n for n in wanted if "gate_inp" in n or "rot_embd" in n}
    found = {n.removesuffix(".weight") for n in tensors}
    assert found - {"rope_freqs"} == wanted - left_out - {"rope_freqs"}
    frequencies = tensors.pop("rope_freqs.weight", None)
    assert (frequencies is None) == (factors is None)
    if frequencies is not None:
        assert tuple(frequencies.data) == factors
    assert {t.tensor_type.name for n, t in tensors.items() if "norm" in n} == {"F32"}
    matrices = {name: t for name, t in tensors.items() if "norm" not in name}
    assert matrices.pop("token_embd.weight").tensor_type.name == embedding
    assert {t.tensor_type.name for t in matrices.values()} == {body}
    assert list(matrices["blk.1.attn_q.weight"].shape) == [256, heads * 128]
    assert list(matrices["blk.1.attn_k.weight"].shape) == [256, kv_heads * 128]
    assert sum(int(t.n_elements) for t in matrices.values()) == shapes.matrix_parameters
    for key, value in (("head_count_kv", kv_heads), ("key_length", 128), ("value_length", 128)):
        assert reader.get_field(f"{architecture}.attention.{key}").contents() == value


@each("format", NEWER)
def test_types_that_gguf_does_not_know_are_written_by_number(format, tmp_path):
    shapes = Shapes("llama", 1, 256, 512, 4, 2, 128, 32, 99, 1e4, 1e-6)
    write_gguf(tmp_path / "model.gguf", shapes, format, "Q4_0")
    content = (tmp_path / "model.gguf").read_bytes()
    for name, (rows, inputs) in shapes.matrices.items():
        name = f"blk.0.{name}.weight".encode()
        declared = struct.pack("<QIQQI", len(name), 2, inputs, rows, NEWER[format])
        assert declared[:8] + name + declared[8:] in content
    matrices = sum(quantized_bytes(format, *shape) for shape in shapes.matrices.values())
    embedding = quantized_bytes("Q4_0", shapes.vocab_size, shapes.hidden_dim)
    assert 0 < len(content) - matrices - embedding < 8192  # the header, and the norms
