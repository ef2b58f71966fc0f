"""One step of training as one graph: gradients, clipping, the optimizer, and the average of weights.

`mx.compile` compiles the step; with accumulation, a micro-step and the update. On a CPU it compiles nothing
(`kernels.replay`): operations run one by one, with the same results up to rounding. `MLX_DISABLE_COMPILE=1`
turns it off everywhere.

- There is no weight decay by default, as in Apple's quantization-aware training (arXiv 2507.13575).
- The average of weights has no bias: after t steps it is `sum_i d^(t-i) w_i / sum_i d^(t-i)` for i = 1 .. t.
  The initial weights are not in the sum; before the first step they are the average.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_map

from afm_mlx.kernels.replay import keep_compiler_out
from afm_mlx.ranks import ALONE, Ranks
from afm_mlx.training.data.batches import AnyBatch
from afm_mlx.training.loop.gradient_checkpointing import Tree
from afm_mlx.training.loop.lean_layers import lean_layers
from afm_mlx.training.loop.losses import Loss, Metrics, loss_and_metrics
from afm_mlx.training.loop.optimizers import AdamW


def averaged(average: Tree, weights: Tree, decay: float, steps: mx.array) -> Tree:
    """Return the next exponential moving average, without bias.

    `average + (1 - d) / (1 - d^t) * (weights - average)`

    `weights` are those after step t = `steps` (() integer, from 1); both trees are float32. `average` has no
    effect for t = 1.
    """
    # 1 - d^t by expm1: for d near 1 the difference itself has few bits left in float32.
    share = (1 - decay) / -mx.expm1(steps.astype(mx.float32) * math.log(decay))
    return tree_map(lambda a, w: a + share * (w - a), average, weights)


class StepResult(NamedTuple):
    """Results of a step, () arrays. If loss or norm is not finite, nothing was updated."""

    loss: mx.array  # weighted mean loss of the targets, before the update
    grad_norm: mx.array  # before clipping
    weight: mx.array  # sum of the targets' weights
    targets: mx.array  # number of targets that have a weight
    metrics: Metrics  # sums over the step's batches, before the update


class TrainingStep:
    """A training step, which updates a model's trainable parameters in place.

    The gradient is of `sum of losses / sum of weights` over all micro-batches, so that accumulation changes
    only the memory. A step whose loss or gradient is not finite changes nothing; the graph contains this
    choice. `optimizer` is initialised here. `max_norm` is the largest global norm of the gradient. With several
    `ranks`, the micro-batches are a rank's, and sums are over all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: AdamW,
        max_norm: float | None = None,
        ema_decay: float | None = None,
        ranks: Ranks = ALONE,
    ):
        keep_compiler_out()
        self.model = model
        self.loss = loss
        self.optimizer = optimizer
        self.max_norm = math.inf if max_norm is None else max_norm
        self.ema_decay = ema_decay
        self.ranks = ranks
        parameters = model.trainable_parameters()
        optimizer.init(parameters)
        self.average: Tree = {}  # (float32) of weights; changed in place, as `mx.compile` wants it
        if ema_decay is not None:
            self.average.update(tree_map(lambda p: p.astype(mx.float32), parameters))
        state = [model.state, optimizer.state, self.average]
        generator = [mx.random.state]
        self._whole = mx.compile(self._whole_step, state + generator, state + generator)
        self._micro = mx.compile(self._micro_step, [model.state, *generator], generator)
        self._update = mx.compile(self._apply, state, state)

    def __call__(self, batches: Sequence[AnyBatch]) -> StepResult:
        """Take one step on its micro-batches; with a single one, the result is not evaluated yet."""
        before, key, ranks = self.model.parameters(), random_key(), self.ranks
        weight = sum((batch.weights.sum() for batch in batches[1:]), batches[0].weights.sum())
        targets = sum((batch.weights != 0).sum() for batch in batches)
        self._kind = type(batches[0])
        # Compiled functions take no None.
        arrays = [{k: v for k, v in batch._asdict().items() if v is not None} for batch in batches]
        try:
            if ranks.size > 1:
                # A rank's mean, so that the mean of all ranks' gradients is the whole batch's.
                of_all = ranks.numbers(weight.item(), targets.item()).sum(axis=0).tolist()
                weight, targets = mx.array(of_all[0] / ranks.size), mx.array(int(of_all[1]))
            elif len(batches) == 1:
                (loss, metrics), norm = self._whole(arrays[0], weight)
                return StepResult(loss, norm, weight, targets, metrics)
            loss, metrics = mx.array(0.0), {}
            gradients = tree_map(
                lambda p: mx.zeros(p.shape, mx.float32), self.model.trainable_parameters()
            )
            for batch in arrays:
                (part, found), gradients = self._micro(batch, weight, gradients)
                loss = loss + part
                metrics = {name: value + metrics.get(name, 0) for name, value in found.items()}
                mx.eval(loss, metrics, gradients)  # one micro-batch's activations at a time
            loss, metrics, gradients = ranks.average((loss, metrics, gradients))
            metrics = {name: value * ranks.size for name, value in metrics.items()}
            norm = self._update(loss, gradients)
            return StepResult(loss, norm, weight * ranks.size, targets, metrics)
        except BaseException:
            # A trace that ends early leaves traced arrays in the model and in MLX's generator.
            self.model.update(before)
            mx.random.seed(key)
            raise

    def evaluate(self, result: StepResult) -> None:
        """Evaluate a step's result and all that it changed: graphs must not grow over steps."""
        mx.eval(result, self.model.state, self.optimizer.state, self.average, mx.random.state)

    def gradients(self, batch: AnyBatch, weight: mx.array) -> tuple[tuple[mx.array, Metrics], Tree]:
        """Return the batch's loss divided by `weight`, its metrics, and the gradients of what is trainable."""
        parameters = self.model.trainable_parameters()

        def scaled(parameters: Tree) -> tuple[mx.array, Metrics]:
            self.model.update(parameters)
            loss, metrics = loss_and_metrics(self.loss, self.model, batch)
            return loss.astype(mx.float32) / weight, metrics

        with lean_layers(self.model):
            found, gradients = mx.value_and_grad(scaled)(parameters)
        self.model.update(parameters)  # the model holds traced arrays
        return found, gradients

    def _whole_step(
        self, arrays: dict[str, Any], weight: mx.array
    ) -> tuple[tuple[mx.array, Metrics], mx.array]:
        found, gradients = self.gradients(self._batch(arrays), weight)
        return found, self._apply(found[0], gradients)

    def _micro_step(
        self, arrays: dict[str, Any], weight: mx.array, accumulated: Tree
    ) -> tuple[tuple[mx.array, Metrics], Tree]:
        found, gradients = self.gradients(self._batch(arrays), weight)
        return found, tree_map(lambda a, g: a + g.astype(mx.float32), accumulated, gradients)

    def _apply(self, loss: mx.array, gradients: Tree) -> mx.array:
        """Update weights, optimizer and average if loss and gradient are finite; return the gradient's norm."""
        optimizer, before = self.optimizer, self.model.trainable_parameters()
        # A copy of the containers: the optimizer replaces arrays in its own.
        state_before = tree_map(lambda a: a, optimizer.state)
        gradients = tree_map(lambda g: g.astype(mx.float32), gradients)
        gradients, norm = optim.clip_grad_norm(gradients, self.max_norm)
        after = optimizer.apply_gradients(gradients, before)
        is_finite = mx.isfinite(loss) & mx.isfinite(norm)

        def chosen(new: Tree, old: Tree) -> Tree:
            return tree_map(lambda n, o: mx.where(is_finite, n, o), new, old)

        self.model.update(chosen(after, before))
        if self.ema_decay is not None:
            weights = optimizer.exact(after)
            average = averaged(self.average, weights, self.ema_decay, optimizer.step)
            self.average.update(chosen(average, self.average))
        optimizer.state.update(chosen(optimizer.state, state_before))
        return norm

    def _batch(self, arrays: dict[str, Any]) -> AnyBatch:
        """Make a batch from its arrays by name; those that are None are missing."""
        missing: dict[str, Any] = dict.fromkeys(self._kind._fields)
        return self._kind(**(missing | arrays))


def random_key() -> int:
    """Return the seed that restores MLX's random generator to its present state."""
    high, low = mx.random.state[0].tolist()
    return high << 32 | low
