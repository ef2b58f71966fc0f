"""The loss of a model whose feed-forwards run with masks from its own predictor.

Gradients reach the predictor through the masks: `down(h * m)` for the hidden channels h of each token and the
mask m of the prompt that the token belongs to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn

from afm_mlx.adapters.mask_predictor import MaskPredictor
from afm_mlx.adapters.target_modules import replace_layers, target_modules
from afm_mlx.model.fused_layers import LinearWrapper
from afm_mlx.training.data.mask_batches import MaskBatch
from afm_mlx.training.loop.gradient_checkpointing import PER_CALL
from afm_mlx.training.loop.losses import Loss, Metrics, loss_and_metrics

PREDICTOR = "mask_predictor"
"""Key of the predictor in a model that trains with one."""


class MaskedDown(LinearWrapper):
    """A feed-forward's `down` layer, `linear(x * m)`, with each token's mask; without one outside `masked`."""

    def __call__(self, x: mx.array) -> mx.array:
        """Map hidden channels (B, L, F) to (B, L, D)."""
        if PER_CALL not in self:
            return self.linear(x)
        of_prompts, mask_of = self[PER_CALL]
        masks = of_prompts.astype(x.dtype)[mask_of]  # (B, L, groups)
        grouped = x.reshape(*masks.shape, -1)
        return self.linear((grouped * masks[..., None]).reshape(x.shape))


def add_masks(model: nn.Module) -> None:
    """Wrap the `down` layer of each block's feed-forward in a `MaskedDown`, in place."""
    found = [each for each in target_modules(model) if each.path.endswith(".down_proj")]
    replace_layers(model, [(each.path, MaskedDown(each.linear)) for each in found])


@contextmanager
def masked(model: nn.Module, masks: mx.array, mask_of: mx.array) -> Iterator[None]:
    """Run a model with masks (M, blocks, groups) in the context, by the index of each token's, (B, L)."""
    layers = [block.mlp.down_proj for block in model.layers]
    try:
        for index, layer in enumerate(layers):
            layer[PER_CALL] = [masks[:, index], mask_of]
        yield
    finally:
        for layer in layers:
            layer.pop(PER_CALL, None)


class MaskedLoss:
    """A loss of tokens, with the masks that the model's predictor chooses from each batch's prompts.

    In training mode the masks are `MaskPredictor.training_masks`, otherwise ones and zeros. Metrics: `overlap`,
    the share of channels that two prompts of a batch have in common, over all pairs and blocks (of random masks
    it is the kept share); and `soft_share`, the mean of the soft numbers of kept channels: the nearer to 1, the
    less changes where masks become ones and zeros.
    """

    def __init__(self, loss: Loss):
        self.loss = loss

    def __call__(self, model: nn.Module, batch: MaskBatch) -> tuple[mx.array, Metrics]:
        predictor: MaskPredictor = model[PREDICTOR]
        scores = predictor(batch.prompts, batch.lengths)
        hard = predictor.masks(mx.stop_gradient(scores)).astype(mx.float32)
        masks = predictor.training_masks(scores) if model.training else hard
        with masked(model, masks, batch.mask_of):
            loss, metrics = loss_and_metrics(self.loss, model, batch.batch)
        weight = batch.weights.sum()
        soft = mx.stop_gradient(predictor.soft(scores))
        count, is_prompt = batch.is_prompt.sum(), batch.is_prompt[:, None, None]
        kept_soft = mx.where(is_prompt, soft * hard, 0).sum() / mx.where(is_prompt, hard, 0).sum()
        metrics = metrics | {"soft_share": weight * kept_soft}
        return loss, metrics | {"overlap": weight * _overlap(hard * is_prompt, count)}


def _overlap(hard: mx.array, count: mx.array) -> mx.array:
    """Return the mean share of common channels over all pairs of `count` masks; 1 for a single one."""
    together = hard.sum(0)  # (blocks, groups): how many masks keep a group
    kept, pairs = together.sum(), count * (count - 1)
    common = (together * (together - 1)).sum() * count
    return mx.where(pairs > 0, common / mx.maximum(pairs * kept, 1), 1.0)
