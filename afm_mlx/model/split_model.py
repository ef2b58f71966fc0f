"""Models that one machine does not hold: every rank has a part of each matrix (tensor parallel).

Heads, the feed-forward's channels and an AFM model's vocabulary are split; norms are not. The outputs of the
products that follow are added up over ranks, twice in a block, and all ranks have the same hidden states. A zoo
model is split by its own method `shard`, in which our packed layers take the place of MLX's. Ranks of mlx-lm's
pipelines have different blocks and caches, so these don't run in step in the engine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import shard_inplace as mlx_shard_inplace
from mlx.utils import tree_flatten

from afm_mlx.config import ModelConfig
from afm_mlx.errors import AFMError, ConfigError, named
from afm_mlx.model.model import Model, is_afm
from afm_mlx.model.split_layers import Cut, keep_inputs, keep_outputs, keep_vocabulary
from afm_mlx.quantization.packed_layers import PackedExperts, PackedLinear
from afm_mlx.ranks import Ranks


class StoredRows(Protocol):
    """A parameter in a file, of which rows can be read without the rest."""

    @property
    def shape(self) -> Sequence[int]: ...
    def read_rows(self, ranges: Sequence[tuple[int, int]]) -> mx.array: ...


def split_model(model: Any, ranks: Ranks, stored: Mapping[str, StoredRows] | None = None) -> None:
    """Leave a rank's part in a model whose arrays are unread, and read it, a tensor at a time.

    Args:
        stored: the files' tensors by the names of the model's parameters, which hold the same numbers, cast at
            most. Where a rank has some rows of a tensor, it reads these rows only. Other parts are read by
            MLX, which reads the whole tensor.

    Raises:
        ConfigError: if the model can't be split over this number of ranks.
        CheckpointError: if a file ends within a tensor.
    """
    if ranks.group is None:
        return
    if is_afm(model):
        _split_afm(model, ranks.group)
    else:
        _split_zoo(model, ranks.group)
    for path, module in model.named_modules():
        for part, array in list(module.items()):
            found = (stored or {}).get(f"{path}.{part}" if path else part)
            if found is not None and (rows := _own_rows(module, part, array, found)) is not None:
                module[part] = rows.astype(array.dtype)
    for _, array in tree_flatten(model.parameters()):
        # All at once, MLX would read several whole tensors before it takes the parts.
        mx.eval(array)
        mx.clear_cache()
    model.ranks = ranks


def _own_rows(module: nn.Module, part: str, array: mx.array, stored: StoredRows) -> mx.array | None:
    """Read the rows that a rank has of a tensor; None if it has all, or parts of all."""
    cut: Cut | None = getattr(module, "cut", None) or getattr(module, "track_cut", None)
    is_converted = isinstance(module, PackedExperts) and part != "weight"
    if cut is None or cut.axis or not array.ndim or is_converted:
        return None
    rows, *others = stored.shape
    if [*array.shape[1:]] != others or array.shape[0] == rows:
        return None
    # A palette's tables and a table of experts have other numbers of rows than the layer has outputs or tracks.
    return stored.read_rows(
        [(start * rows // cut.whole, end * rows // cut.whole) for start, end in cut.ranges]
    )


def _split_afm(model: Model, group: mx.distributed.Group) -> None:
    config, size = model.args, group.size()
    if problem := split_problem(config, size):
        raise ConfigError(problem)
    widths = [config.hidden_dim, config.kv_dim, config.kv_dim]
    sections = list(pairwise(accumulate(widths, initial=0)))
    blocks = {id(block) for block in model.layers}
    for path, block in model.named_modules():
        if id(block) not in blocks:
            continue
        attention, mlp = block.self_attn, block.mlp
        if "qkv_proj" in attention:
            keep_outputs(attention.qkv_proj, _shares(sections, group), f"{path}.self_attn.qkv_proj")
            attention.kv_heads //= size
        else:
            keep_outputs(attention.q_proj, _shares(sections[:1], group), f"{path}.self_attn.q_proj")
        keep_inputs(attention.out_proj, group, f"{path}.self_attn.out_proj")
        for name in ("gate_proj", "up_proj"):
            keep_outputs(mlp[name], _shares([(0, config.ffn_dim)], group), f"{path}.mlp.{name}")
        keep_inputs(mlp.down_proj, group, f"{path}.mlp.down_proj")
    keep_vocabulary(model.model.embedding, group)
    model.kv_heads //= size


def split_problem(config: ModelConfig, size: int) -> str:
    """Return why an AFM model can't be split over `size` ranks; "" if it can."""
    for what, count in (
        ("heads of keys and values", config.num_kv_heads),
        ("feed-forward channels", config.ffn_dim),
    ):
        if count % size:
            return (
                f"The model has {count} {what}, which {size} ranks can't share equally. Start a number of "
                f"ranks that divides {count}."
            )
    return ""


def _shares(
    sections: Sequence[tuple[int, int]], group: mx.distributed.Group
) -> list[tuple[int, int]]:
    """Return a rank's share of each section of a layer's outputs."""
    rank, size = group.rank(), group.size()
    each = [(start, (end - start) // size) for start, end in sections]
    return [(start + rank * share, start + (rank + 1) * share) for start, share in each]


# -- models of mlx-lm


def _split_zoo(model: Any, group: mx.distributed.Group) -> None:
    size = group.size()
    kind = type(model).__module__.rpartition(".")[2]
    if not hasattr(model, "shard"):
        raise ConfigError(
            f"mlx-lm can't split the matrices of a {kind} model: its class has no method shard. Run it in one "
            "process."
        )
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(model.args, name, None)
        if isinstance(count, int) and count % size:
            raise ConfigError(
                f"The model's {name} is {count}, which {size} ranks can't share equally. Start a number of "
                f"ranks that divides {count}."
            )
    try:
        with _own_sharding(model):
            model.shard(group)
    except AFMError:
        raise
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"mlx-lm can't split this {kind} model over {size} ranks: {named(str(error))}."
        ) from None


@contextmanager
def _own_sharding(model: nn.Module) -> Iterator[None]:
    """Have `shard` of mlx-lm's models cut layers in place, packed ones too, and not make MLX's own.

    Experts are cut by MLX, which knows scales of groups alone; other packed experts are refused.
    """
    names = {id(module): name for name, module in model.named_modules()}

    def shard_linear(
        layer: Any,
        sharding: str,
        *,
        segments: int | list[int] = 1,
        group: mx.distributed.Group | None = None,
    ) -> Any:
        assert group is not None
        name = names.get(id(layer), "A layer")
        if sharding == "sharded-to-all":
            if segments != 1:
                raise ConfigError(f"{name} joins several inputs, which ranks can't share.")
            keep_inputs(layer, group, name)
            return layer
        rows = layer["weight"].shape[0]
        if isinstance(segments, int):
            ends = [rows * (i + 1) // segments for i in range(segments)]
        else:
            ends = [int(each * rows) if each < 1 else int(each) for each in segments] + [rows]
        sections = list(pairwise([0, *ends]))
        if uneven := [end - start for start, end in sections if (end - start) % group.size()]:
            raise ConfigError(f"{name} has {uneven[0]} outputs, which ranks can't share equally.")
        keep_outputs(layer, _shares(sections, group), name)
        return layer

    def shard_inplace(layer: Any, *args: Any, **options: Any) -> None:
        is_packed = isinstance(layer, PackedLinear | PackedExperts)
        if is_packed and (layer.mode == "palette" or layer["scales"].ndim < layer["weight"].ndim):
            raise ConfigError(
                f"{names.get(id(layer), 'A layer')} has no scales of groups, which ranks need to share it. "
                "Convert the model with --q-granularity group, or run it in one process."
            )
        mlx_shard_inplace(layer, *args, **options)

    theirs = [
        (vars(module), function.__name__, vars(module)[function.__name__], function)
        for name, module in list(sys.modules.items())
        for function in (shard_linear, shard_inplace)
        if name.startswith("mlx_lm.models.") and hasattr(module, function.__name__)
    ]
    for values, name, _, own in theirs:
        values[name] = own
    try:
        yield
    finally:
        for values, name, before, _ in theirs:
            values[name] = before
