"""Task masks with random channels, and models that compute what a mask should, in another way."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from afm_mlx.adapters.target_modules import replace_layers
from afm_mlx.adapters.task_mask import GROUP, TaskMask, feed_forwards
from afm_mlx.quantization.packed_layers import PackedLinear


def draw_mask(model, rng, share=0.5, group=GROUP, equal=False, **options):
    """A mask that keeps about that share; blocks keep different numbers of groups unless they are `equal`."""
    layers = feed_forwards(model)
    groups = layers[0].width // group
    kept = np.zeros((len(layers), groups), bool)
    for block, row in enumerate(kept):
        count = max(1, round(groups * share) + (0 if equal else (-1, 0, 1)[block % 3]))
        row[rng.choice(groups, count, replace=False)] = True
    return TaskMask(kept, group, **options)


def zero_channels(model, mask):
    """Make a model's feed-forwards float, with zeros in the columns of `down` that a mask cuts; return it."""
    replaced = []
    for each in feed_forwards(model):
        for target in (each.gate, each.up, each.down):
            linear = target.linear
            if isinstance(linear, PackedLinear):
                linear = linear.to_linear()
            elif isinstance(linear, nn.QuantizedLinear):
                weight = mx.dequantize(
                    linear.weight, linear.scales, linear.biases, linear.group_size, linear.bits
                )
                linear, bias = (
                    nn.Linear(*weight.shape[::-1], bias="bias" in linear),
                    linear.get("bias"),
                )
                linear.weight = weight.astype(mx.float32)
                if bias is not None:
                    linear.bias = bias
            if target is each.down:
                cut = mx.array(mask.channel_bits(each.block).astype(np.float32))
                linear.weight = linear.weight * cut
            replaced.append((target.path, linear))
    replace_layers(model, replaced)
    return model
