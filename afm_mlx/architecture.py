"""What a model consists of: the parameters of each kind of block, by their names in mlx-lm's `afm7`.

| path | what it is |
| --- | --- |
| `model.embedding` | (vocab_size, D), which is also the head |
| `model.layers.N` | a block that writes keys and values |
| `model.kv_reuse_layers.N` | a block that reuses those of the last writing block |
| `model.output_norm` | (D) |

`block_kinds` is the one table of this. Parameter counts, the shapes that files are checked against, the places
of adapters, the order of LoRA pairs in checkpoints, and estimates of memory are made from it. A test compares
it with the layers that `afm_mlx.model.model` builds. It stands beside the config, on the lowest floor, because
the config counts parameters, and because files are checked in `checkpoint`, which may not import `model`.

Source: `tamm` 0.2.0, state dicts of `AFMTextV7`; mlx-lm 0.32.2, `mlx_lm/models/afm7.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from afm_mlx.config import ModelConfig

KV_SCALES = ("quant_key_scale", "quant_value_scale")
"""Names of the static int8 scales in the attention of every block that writes keys and values."""


class Projection(NamedTuple):
    """Rows of a matrix that compute one thing, such as queries.

    Args:
        outputs: number of rows.
        rotary_heads: heads among the outputs that RoPE rotates; 0 where it rotates none.
    """

    outputs: int
    rotary_heads: int = 0


class Matrix(NamedTuple):
    """The weight of a linear layer.

    Args:
        name: path of the layer within its block, such as `mlp.up_proj`.
        inputs: number of columns.
        projections: what its rows compute, in order: three things in a fused layer, else one.
    """

    name: str
    inputs: int
    projections: tuple[Projection, ...]

    @property
    def outputs(self) -> int:
        """Number of rows."""
        return sum(projection.outputs for projection in self.projections)


class BlockKind(NamedTuple):
    """The parameters of one kind of block, and where its blocks are.

    Args:
        path: path of the list that holds the blocks, such as `model.layers`.
        num_blocks: number of blocks of this kind.
        matrices: linear layers of a block, in the order of tamm's state dicts.
        norms: number of weights of each norm, by its path within the block.
        scales: paths of the scalar parameters within the block.
    """

    path: str
    num_blocks: int
    matrices: tuple[Matrix, ...]
    norms: Mapping[str, int]
    scales: tuple[str, ...]


@functools.lru_cache(maxsize=16)
def block_kinds(config: ModelConfig) -> tuple[BlockKind, BlockKind]:
    """The two kinds of block: those that write keys and values, and those that reuse them."""
    width, ffn = config.hidden_dim, config.ffn_dim
    queries = Projection(width, config.num_heads)
    keys, values = Projection(config.kv_dim, config.num_kv_heads), Projection(config.kv_dim)
    matrices = (
        Matrix("self_attn.out_proj", width, (Projection(width),)),
        Matrix("mlp.gate_proj", width, (Projection(ffn),)),
        Matrix("mlp.up_proj", width, (Projection(ffn),)),
        Matrix("mlp.down_proj", ffn, (Projection(width),)),
    )
    norms = {
        "self_attn.q_norm": config.head_dim,
        "input_layernorm": width,
        "post_attention_layernorm": width,
    }
    scales = KV_SCALES if config.kv_bits is not None else ()
    return (
        BlockKind(
            "model.layers",
            config.num_kv_layers,
            (Matrix("self_attn.qkv_proj", width, (queries, keys, values)), *matrices),
            {**norms, "self_attn.k_norm": config.head_dim},
            tuple(f"self_attn.{scale}" for scale in scales),
        ),
        BlockKind(
            "model.kv_reuse_layers",
            config.num_kv_reuse_layers,
            (Matrix("self_attn.q_proj", width, (queries,)), *matrices),
            norms,
            (),
        ),
    )


def blocks(config: ModelConfig) -> Iterator[tuple[str, BlockKind]]:
    """Yield the path and the kind of every block, from the first to the last."""
    for kind in block_kinds(config):
        for index in range(kind.num_blocks):
            yield f"{kind.path}.{index}", kind


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters of an unquantized model."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embedding.weight": (config.vocab_size, config.hidden_dim)
    }
    for path, kind in blocks(config):
        for matrix in kind.matrices:
            shapes[f"{path}.{matrix.name}.weight"] = (matrix.outputs, matrix.inputs)
        for norm, size in kind.norms.items():
            shapes[f"{path}.{norm}.weight"] = (size,)
        for scale in kind.scales:
            shapes[f"{path}.{scale}"] = ()
    shapes["model.output_norm.weight"] = (config.hidden_dim,)
    return shapes
