"""The mean loss and metrics of a model over batches, and the origin of a number that is not finite."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from afm_mlx.errors import TrainingError
from afm_mlx.ranks import ALONE, Ranks
from afm_mlx.training.data.batches import AnyBatch, AnyBatches
from afm_mlx.training.loop.gradient_checkpointing import Tree
from afm_mlx.training.loop.losses import Loss, SplitMetrics, loss_and_metrics
from afm_mlx.training.loop.step import random_key

NO_WEIGHT = "no target of the batch has a weight"
NOT_REPEATED = "it did not come back when the step was computed again, uncompiled"

_GREAT = 1e18  # squares of such numbers overflow float32


class Means(NamedTuple):
    """Weighted means over batches, and the number of targets that have a weight."""

    loss: float
    metrics: dict[str, float]
    targets: int


def mean_loss(
    model: nn.Module,
    loss: Loss,
    batches: AnyBatches,
    count: int = -1,
    progress: Callable[[int, int], None] | None = None,
    ranks: Ranks = ALONE,
) -> Means:
    """Return means of a loss and its metrics over the first `count` batches, or all for -1, without dropout.

    The model is in eval mode afterwards. `progress` is called with the numbers of finished and of all batches.
    Several `ranks` split each batch, and have the same result.

    Raises `TrainingError` when the loss is not finite; the error names the batch and the layer.
    """
    batches = ranks.share(batches)
    model.eval()
    total, weight, targets = 0.0, 0.0, 0
    sums: dict[str, float] = defaultdict(float)
    n = batches.per_epoch if count == -1 else min(count, batches.per_epoch)
    for index in range(n):
        batch = batches(index)
        found, metrics = loss_and_metrics(loss, model, batch)
        mx.eval(found, metrics)
        value = found.item()
        if not math.isfinite(value):
            cause = find_non_finite(model, loss, [batch])
            raise TrainingError(f"The loss of batch {index} is {value:g}: {cause}.")
        total += value
        weight += batch.weights.sum().item()
        targets += int((batch.weights > 0).sum().item())
        for name, each in metrics.items():
            sums[name] += each.item()
        if progress is not None:
            progress(index + 1, n)
    total, weight, targets, *values = ranks.numbers(total, weight, targets, *sums.values()).sum(
        axis=0
    )
    means = {name: each / weight for name, each in zip(sums, map(float, values), strict=True)}
    if isinstance(loss, SplitMetrics):
        means |= loss.split_metrics(model, batches, count)
    return Means(float(total / weight), means, int(targets))


def perplexity(loss: float) -> float:
    """Return `exp(loss)` of a mean cross-entropy in nats; infinity if that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def find_non_finite(
    model: nn.Module,
    loss: Loss,
    batches: Sequence[AnyBatch],
    gradients: Callable[[AnyBatch, mx.array], tuple[object, Tree]] | None = None,
) -> str:
    """Return the origin of the first number that is NaN or infinite, as a clause for an error.

    The batches run again, uncompiled, with the weights and in the mode that gave the number. The parameters are
    searched first, then each layer's output, the loss, and the gradients, if `TrainingStep.gradients` is given.
    A clause is "the output of layers.3.mlp.down_proj is not finite (12 NaN of 4096 numbers)".
    """
    for name, parameter in tree_flatten(model.parameters()):
        if text := _not_finite(parameter):
            return f"the parameter {name} is not finite ({text})"
    weight = sum((batch.weights.sum() for batch in batches), mx.array(0.0))
    if weight.item() == 0:
        return NO_WEIGHT
    for batch in batches:
        key = random_key()
        with _watched(model) as calls:
            value = loss_and_metrics(loss, model, batch)[0]
            mx.eval(value)
        mx.random.seed(key)  # the gradients, and the next batch, have the step's dropout
        order = [name for name, _, _ in calls]
        for name, text, reason in calls:
            if text:
                return f"the output of {name} is not finite ({text}{reason})"
        if text := _not_finite(value):
            return f"the loss is not finite ({text}), and every layer's output is"
        if gradients is not None and (text := _bad_gradient(gradients(batch, weight)[1], order)):
            return text
    return NOT_REPEATED


def _bad_gradient(gradients: Tree, order: list[str]) -> str:
    """Return which parameter nearest to the loss has a gradient that is not finite; empty if none has."""
    index = {name: i for i, name in enumerate(order)}

    def index_of(name: str) -> int:
        # Parameters may be in a layer's lists (`lora_a.0`): remove parts until the name is a layer's.
        while name and name not in index:
            name = name.rpartition(".")[0]
        return index.get(name, -1)

    flat = tree_flatten(gradients)
    bad = {name: text for name, gradient in flat if (text := _not_finite(gradient))}
    if bad:
        # Gradients flow from the last layer to the first, so the last bad one comes first.
        name = max(bad, key=index_of)
        others = f", and so are the gradients of {len(bad) - 1} parameters before it"
        return f"the gradient of {name} is not finite ({bad[name]}){others * (len(bad) > 1)}"
    largest = {name: mx.abs(gradient).max().item() for name, gradient in flat if gradient.size}
    name = max(largest, key=largest.__getitem__, default="")
    if name and largest[name] > _GREAT:
        return f"the norm of the gradient overflows; its largest number is {largest[name]:.1e}, in {name}"
    return ""


@contextmanager
def _watched(model: nn.Module) -> Iterator[list[tuple[str, str, str]]]:
    """Record each layer call when it ends: the layer's name, a count of non-finite numbers, and a hint."""
    calls: list[tuple[str, str, str]] = []
    names = {id(module): name or "the model" for name, module in model.named_modules()}
    kinds = [(module, type(module)) for module in {id(m): m for m in model.modules()}.values()]

    def watching(kind: type) -> type:
        def call(self: nn.Module, *args: object, **kwargs: object) -> object:
            output = kind.__call__(self, *args, **kwargs)
            text, reason = _not_finite(*_arrays(output)), ""
            if text:
                came_in = _arrays((args, kwargs))
                largest = max((mx.abs(x).max().item() for x in came_in), default=0.0)
                reason = f"; the largest number that came in is {largest:.1e}"
            calls.append((names[id(self)], text, reason))
            return output

        return type(kind.__name__, (kind,), {"__call__": call})

    try:
        for module, kind in kinds:
            module.__class__ = watching(kind)
        yield calls
    finally:
        for module, kind in kinds:
            module.__class__ = kind


def _arrays(tree: object) -> list[mx.array]:
    """Return the floating-point arrays in a layer's arguments or output."""
    leaves = (leaf for _, leaf in tree_flatten(tree) if isinstance(leaf, mx.array))
    return [leaf for leaf in leaves if mx.issubdtype(leaf.dtype, mx.floating) and leaf.size]


def _not_finite(*arrays: mx.array) -> str:
    """Return the counts of NaN and infinities as text; empty if there are none."""
    arrays = tuple(a for a in arrays if mx.issubdtype(a.dtype, mx.floating))
    size = sum(array.size for array in arrays)
    nan = sum(int(mx.isnan(array).sum().item()) for array in arrays)
    infinite = sum(int(mx.isinf(array).sum().item()) for array in arrays)
    counts = [f"{count} {name}" for count, name in ((nan, "NaN"), (infinite, "infinite")) if count]
    return f"{' and '.join(counts)} of {size} numbers" if counts else ""
