"""Static int8 scales of keys and values, from the ranges of a model's own keys and values."""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx
import numpy as np

from afm_mlx.errors import ConfigError, DataError
from afm_mlx.model.attention import Positions, float_heads, row_positions
from afm_mlx.model.fused_layers import Normed, project
from afm_mlx.model.model import Model, WritingBlock, is_afm
from afm_mlx.training.data.batches import Batch

_TINY = 2.0**-126


def calibrate_kv_scales(model: Model, batches: Iterable[Batch], momentum: float = 0.9) -> Model:
    """Set the int8 scales of every block that writes keys and values, in place.

    `scale = max(low / -128, high / 127)`, where low and high are moving averages over batches of the least and
    the greatest key (value) before quantization; `average += (1 - momentum) * (seen - average)`, from the first
    batch's. A block sees what the blocks before it give with the scales that they have by then. Padding, and in
    rows of one sample what lies behind the last target, counts for nothing.

    Args:
        model: float, training on grids, or packed. One without scales (`kv_bits` null) gets them:
            `model.args.kv_bits` is 8 afterwards, which its config.json has to say too.
        batches: some dozen are enough; more than `1 / (1 - momentum)` forget the first.
        momentum: share of the average that a batch leaves as it was, in [0, 1).

    Returns:
        the model, in the mode that it was in.

    Raises:
        ConfigError: for a model of another architecture, or a momentum out of range.
        DataError: when there is no batch.

    Source: tamm 0.2.0, `tamm/ao/layers/fake_quantize.py`, `SimpleEMAMinMaxObserver`.
    """
    if not is_afm(model):
        raise ConfigError(
            f"{type(model).__name__} has no int8 scales of keys and values; models of the AFM architecture do."
        )
    if not 0 <= momentum < 1:
        raise ConfigError(f"momentum is {momentum}; allowed is 0 up to, but not including, 1.")
    if not model.args.kv_bits:
        model.add_kv_scales()
    training = model.training
    model.eval()
    ranges: list[mx.array | None] = [None] * len(model.model.layers)
    for batch in batches:
        ranges = _observe(model, batch, ranges, 1 - momentum)
        mx.eval(model.parameters(), ranges)
    if ranges[0] is None:
        raise DataError(
            "No batch to calibrate the int8 scales of keys and values by; give one at least."
        )
    return model.train(training)


def _observe(
    model: Model, batch: Batch, ranges: list[mx.array | None], share: float
) -> list[mx.array | None]:
    """Run the writing blocks, each with its new scales; returns ranges (2, 2): keys, values; low, high."""
    positions, used = row_positions(batch.inputs, batch.segments), _used(batch)
    h, averages = model.model.embedding(batch.inputs), []
    for block, average in zip(model.model.layers, ranges, strict=True):
        seen = mx.stack([_range(x, used) for x in _keys_and_values(block, h, positions)])
        average = seen if average is None else average + share * (seen - average)
        averages.append(average)
        scales = mx.maximum(mx.maximum(average[:, 0] / -128, average[:, 1] / 127), _TINY)
        block.self_attn.quant_key_scale, block.self_attn.quant_value_scale = scales[0], scales[1]
        h, _ = block(h, positions, None)
    return averages


def _keys_and_values(
    block: WritingBlock, h: mx.array, positions: Positions
) -> tuple[mx.array, mx.array]:
    """Keys and values of a block for its input (B, L, D), (B, num_kv_heads, L, head_dim) each, unquantized."""
    attention = block.self_attn
    qkv = project(attention.qkv_proj, Normed(h, block.input_layernorm))
    _, keys, values = float_heads(qkv, positions.offset, attention.head_options())
    return keys, values


def _used(batch: Batch) -> mx.array:
    """Which tokens are no padding, (B, 1, L, 1) booleans."""
    if batch.segments is not None:
        used = batch.segments != 0
    else:
        rows, length = batch.inputs.shape
        # Padding has no target, and is all that lies behind a row's last one, but for unscored tokens.
        scored = np.array(batch.positions)[np.array(batch.weights) > 0]
        last = np.full(rows, -1)
        np.maximum.at(last, scored // length, scored % length)
        used = mx.array(np.arange(length) <= last[:, None])
    return used[:, None, :, None]


def _range(x: mx.array, used: mx.array) -> mx.array:
    """(2,) float32: least and greatest number of the tokens in use, (B, 1, L, 1)."""
    x = x.astype(mx.float32)
    return mx.stack([mx.where(used, x, mx.inf).min(), mx.where(used, x, -mx.inf).max()])
