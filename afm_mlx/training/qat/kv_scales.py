"""Calibration: static int8 scales of keys and values, from their ranges on training data."""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx
import numpy as np

from afm_mlx.errors import ConfigError, DataError
from afm_mlx.model.attention import float_heads, row_positions
from afm_mlx.model.fused_layers import Normed, project
from afm_mlx.model.model import Model, is_afm
from afm_mlx.training.data.batches import Batch
from afm_mlx.training.data.embedded import embedded

_TINY = 2.0**-126


def calibrate_kv_scales(model: Model, batches: Iterable[Batch], momentum: float = 0.9) -> Model:
    """Set the int8 scales of every writing block from the ranges of keys and values on batches, in place.

    `scale = max(low / -128, high / 127)`, where low and high are moving averages, over batches, of the least
    and the greatest key (value) before quantization: `average += (1 - momentum) * (seen - average)`, starting
    at the first batch. Each block's input is computed with the scales that the blocks before it have by then.
    Padding is ignored, and in rows of one sample all tokens after the last target.

    Args:
        model: a float, quantization-aware or packed model. Scales are added to one without (`kv_bits` null):
            `model.args.kv_bits` is 8 afterwards, and its config.json must have that too.
        batches: about a dozen are enough; of more than `1 / (1 - momentum)`, the first hardly count.
        momentum: weight of the average so far, in [0, 1).

    Returns:
        the model, in its previous mode.

    Raises:
        ConfigError: for a model of another architecture, or a momentum out of range.
        DataError: for no batches.

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
    """Run the writing blocks on a batch, set each block's scales, and return the updated ranges.

    `ranges` is the average of each block so far, (2, 2): keys and values, low and high; None at the first
    batch, whose weight in the average is else `share`.
    """
    if batch.segments is not None:
        used = batch.segments != 0
    else:  # padding and unscored tokens follow a row's last target
        rows, length = batch.inputs.shape
        scored = np.array(batch.positions)[np.array(batch.weights) > 0]
        last = np.full(rows, -1)
        np.maximum.at(last, scored // length, scored % length)
        used = mx.array(np.arange(length) <= last[:, None])
    used = used[:, None, :, None]
    positions = row_positions(batch.inputs, batch.segments)
    h, averages = model.embed(embedded(model, batch)), []
    for block, average in zip(model.model.layers, ranges, strict=True):
        attention = block.self_attn
        qkv = project(attention.qkv_proj, Normed(h, block.input_layernorm))
        _, *both = float_heads(qkv, positions.offset, attention.head_options())
        floats = [x.astype(mx.float32) for x in both]  # (B, num_kv_heads, L, head_dim), unquantized
        low = [mx.where(used, x, mx.inf).min() for x in floats]
        high = [mx.where(used, x, -mx.inf).max() for x in floats]
        seen = mx.array([low, high]).T
        average = seen if average is None else average + share * (seen - average)
        averages.append(average)
        scales = mx.maximum(mx.maximum(average[:, 0] / -128, average[:, 1] / 127), _TINY)
        attention.quant_key_scale, attention.quant_value_scale = scales[0], scales[1]
        h, _ = block(h, positions, None)
    return averages
