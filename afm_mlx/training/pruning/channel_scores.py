"""Scores of feed-forward channels: what a task would lose without each.

With h = silu(gate(x)) * up(x), the channels of a block's feed-forward, and L, the loss of a task's answers:

    activation   score_c = mean over tokens |h_c| * ||W_down[:, c]|| / mean over tokens ||output||
    gradient     score_c = mean over samples |sum over tokens h_c dL/dh_c|

The first is how far the block's output moves without the channel, relative to its length; prompts and answers
count alike. The second is how far the loss moves, to first order: h_c dL/dh_c, summed over tokens, equals
w dL/dw summed over the channel's column of `down`. Both are sums over one pass of the data.

A block's channels exist for one batch at a time: activations are summed where they are computed, and gradients
are taken with blocks that are computed again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from afm_mlx.kernels import dispatch
from afm_mlx.model.fused_layers import Normed, project, swiglu
from afm_mlx.progress import Progress
from afm_mlx.quantization.packed_layers import PackedLinear
from afm_mlx.training.data.batches import Batch, Batches
from afm_mlx.training.data.embedded import embedded
from afm_mlx.training.loop.gradient_checkpointing import recomputed_blocks
from afm_mlx.training.loop.losses import CrossEntropy

M = TypeVar("M", bound=nn.Module)


class GatedMLP(nn.Module):
    """An AFM block's feed-forward with a factor for each channel: `x + down(gates * h)`."""

    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.mlp = mlp

    def gates(self) -> mx.array:
        """Return the factors, which broadcast to (B, L, channels)."""
        raise NotImplementedError

    def __call__(self, x: Normed) -> mx.array:
        h = swiglu(self.mlp.gate_proj, self.mlp.up_proj, x)
        return project(self.mlp.down_proj, h * self.gates().astype(h.dtype), x.x)


@contextmanager
def replaced_mlps(model: nn.Module, make: Callable[[nn.Module], M]) -> Iterator[list[M]]:
    """Replace the feed-forward of each block of an AFM model by `make(mlp)` inside the context."""
    blocks = list(model.layers)
    plain = [block.mlp for block in blocks]
    made = [make(mlp) for mlp in plain]
    try:
        for block, each in zip(blocks, made, strict=True):
            block.mlp = each
        dispatch.invalidate()
        yield made
    finally:
        for block, mlp in zip(blocks, plain, strict=True):
            block.mlp = mlp
        dispatch.invalidate()


# -- activation


class _ObservedMLP(nn.Module):
    """A feed-forward that sums |h_c| and the lengths of its outputs over the tokens of `counted`."""

    def __init__(self, mlp: nn.Module, counted: Callable[[], mx.array]):
        super().__init__()
        self.mlp = mlp
        self._counted = counted  # (B, L) of 1 and 0
        self.channels: np.ndarray | float = 0.0
        self.lengths = 0.0

    def __call__(self, x: Normed) -> mx.array:
        h = swiglu(self.mlp.gate_proj, self.mlp.up_proj, x)
        y = project(self.mlp.down_proj, h, x.x)
        weights = self._counted()
        channels = (mx.abs(h.astype(mx.float32)) * weights[..., None]).sum((0, 1))
        lengths = (mx.linalg.norm(y.astype(mx.float32), axis=-1) * weights).sum()
        mx.eval(channels, lengths, y)  # so that no other block's channels are in memory
        self.channels = self.channels + np.array(channels, np.float64)
        self.lengths += lengths.item()
        return y


def activation_scores(
    model: nn.Module, batches: Batches, count: int = -1, progress: Progress | None = None
) -> np.ndarray:
    """Return the scores (blocks, channels) float64 of the first `count` batches, or of one pass for -1.

    The model is an AFM model in eval mode, float or packed, and unchanged afterwards.
    """
    counted = mx.zeros((1, 1))
    total = _number(batches, count)
    with replaced_mlps(model, lambda mlp: _ObservedMLP(mlp, lambda: counted)) as observed:
        for index in range(total):
            batch = batches(index)
            counted = token_weights(batch)
            mx.eval(model.hidden_at(embedded(model, batch), batch.positions, batch.segments))
            if progress is not None:
                progress(index + 1, total)
    norms = (_column_norms(each.mlp.down_proj) for each in observed)
    scores = [
        each.channels * norm / each.lengths for each, norm in zip(observed, norms, strict=True)
    ]
    return np.stack(scores)


def token_weights(batch: Batch) -> mx.array:
    """Return 1 for each token of a sample and 0 for padding, (B, L) float32."""
    if batch.segments is not None:
        return (batch.segments > 0).astype(mx.float32)
    rows, length = batch.inputs.shape
    scored = np.array(batch.positions)[np.array(batch.weights) > 0]
    # A sample's last token is predicted, so the one before it is scored.
    ends = np.zeros(rows, np.int64)
    np.maximum.at(ends, scored // length, scored % length + 1)
    return mx.array(np.arange(length) < ends[:, None]).astype(mx.float32)


def _column_norms(layer: nn.Module) -> np.ndarray:
    weight = layer.dequantize() if isinstance(layer, PackedLinear) else layer.weight
    norms = mx.linalg.norm(weight.astype(mx.float32), axis=0)
    return np.array(norms, np.float64)


def _number(batches: Batches, count: int) -> int:
    return batches.per_epoch if count == -1 else min(count, batches.per_epoch)


# -- gradient


class _ScaledMLP(GatedMLP):
    """A feed-forward whose factors are 1 and have a gradient for each row of a batch."""

    def __init__(self, mlp: nn.Module, rows: int):
        super().__init__(mlp)
        self.factors = mx.ones((rows, 1, _channels(mlp)))

    def gates(self) -> mx.array:
        return self.factors


def _channels(mlp: nn.Module) -> int:
    layer = mlp.gate_proj
    return layer.packed.out_dims if isinstance(layer, PackedLinear) else layer.weight.shape[0]


def gradient_scores(
    model: nn.Module, batches: Batches, count: int = -1, progress: Progress | None = None
) -> np.ndarray:
    """Return the scores (blocks, channels) float64 of the first `count` batches, or of one pass for -1.

    Batches with one sample in each row keep samples apart. The model is an AFM model, float or packed; its
    parameters are frozen afterwards, and it is in eval mode.
    """
    loss, total = CrossEntropy(), _number(batches, count)
    sums: list[np.ndarray | float] = [0.0] * len(model.layers)
    model.freeze()
    with (
        replaced_mlps(model, lambda mlp: _ScaledMLP(mlp, batches.batch_size)) as scaled,
        recomputed_blocks(model),
    ):
        for mlp in scaled:
            mlp.mlp.freeze()
        model.train()
        try:
            for index in range(total):
                batch = batches(index)
                by_factor = nn.value_and_grad(model, lambda batch: loss(model, batch))
                gradients = _flat(by_factor(batch)[1])
                mx.eval(gradients)
                for block, gradient in enumerate(gradients):
                    sums[block] = sums[block] + np.abs(np.array(gradient, np.float64)).sum((0, 1))
                if progress is not None:
                    progress(index + 1, total)
        finally:
            model.eval()
    return np.stack(sums) / len(batches)


def _flat(gradients: dict) -> list[mx.array]:
    """Return the gradients of the blocks' factors in the order of `model.layers`."""
    inner = gradients["model"]
    blocks = [*inner["layers"], *inner.get("kv_reuse_layers", [])]
    return [block["mlp"]["factors"] for block in blocks]
