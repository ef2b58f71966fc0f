"""llama.cpp's model: random blocks of every format, and a file with the same matrices as AFM's."""

import numpy as np
import pytest
from mlx.utils import tree_flatten

from afm_mlx.model.model import Model
from bench.peer_gguf import (
    FORMATS,
    matrix_parameters,
    matrix_shapes,
    quantized_bytes,
    random_blocks,
    write_gguf,
)
from tests.tools.cases import each

gguf = pytest.importorskip("gguf", reason="the extra `bench` is not installed")


@each("format", FORMATS)
def test_random_blocks_are_weights_of_a_fresh_model(format, rng):
    rows, inputs = 64, 256 * int(rng.integers(1, 4))
    blocks = random_blocks(format, rows, inputs, rng)
    assert blocks.nbytes == quantized_bytes(format, rows, inputs)
    values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[format])
    assert values.shape == (rows, inputs)
    assert 0.6 < values.std() * inputs**0.5 < 1.6
    assert len(np.unique(values[0])) >= 4
    with pytest.raises(
        ValueError, match=rf"{format} stores \d+ weights in a block, which 72 inputs"
    ):
        random_blocks(format, 3, 72, rng)


@pytest.mark.parametrize("body", ["TQ2_0", "Q2_K"])
def test_the_file_holds_the_same_matrices(body, config, tmp_path):
    write_gguf(tmp_path / "model.gguf", config, body)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    tensors = {t.name: t for t in reader.tensors}
    matrices = {name: t for name, t in tensors.items() if "norm" not in name}
    assert {t.tensor_type.name for n, t in tensors.items() if "norm" in n} == {"F32"}
    assert matrices.pop("token_embd.weight").tensor_type.name == "Q4_0"
    assert {t.tensor_type.name for t in matrices.values()} == {body}
    for name, (rows, inputs) in matrix_shapes(config).items():
        for block in range(config.num_layers):
            assert list(matrices[f"blk.{block}.{name}.weight"].shape) == [inputs, rows]
    stored = sum(int(t.n_elements) for t in matrices.values())
    assert stored == matrix_parameters(config)
    # Those of the AFM model, and a key and a value projection in each block that has none.
    arrays = tree_flatten(Model(config).parameters())
    blocks = sum(a.size for name, a in arrays if a.ndim == 2 and "layers" in name)
    width = config.num_kv_heads * config.head_dim
    assert stored == blocks + config.num_kv_reuse_layers * 2 * config.hidden_dim * width
    assert reader.get_field("llama.attention.head_count_kv").contents() == config.num_kv_heads
