"""Watch the experts of a mixture while it reads texts: sums over each expert's tokens.

All sums come from one pass over the texts. Outputs exist for one block and one text at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from afm_mlx.errors import ConfigError
from afm_mlx.progress import Progress
from afm_mlx.quantization.quantize_model import replace_modules
from afm_mlx.training.pruning.expert_layers import ExpertLayer

_PROBE = 1024.0
"""Length of the outputs that replace the experts' to find gates: a power of two, far above other terms."""


@dataclass
class ExpertSums:
    """Sums over the tokens of each expert, float64; the attributes' first axis counts the table's experts.

    Only `count` and what is in `wanted` are computed. y are an expert's outputs, and g the router's weights.

    Attributes:
        wanted: names of attributes.
        count: (experts,) number of tokens.
        norm, square, gated, total: (experts,) of ||y||, ||y||^2, g ||y||, and of the numbers of y.
        outputs, squares, directions: (experts, outputs) of y_j, y_j^2 and y_j / ||y||.
        outliers: (experts,) number of y_j that are outside of `bounds`.
        pairs: (experts, experts) number of tokens that two experts share.
        seen: (experts, token ids) whether an expert had a token with this id.
        bounds: (2, experts) lowest and highest y_j that is no outlier.
        k: number of experts that a token has.
    """

    wanted: Collection[str] = ()
    count: Any = 0.0
    norm: Any = 0.0
    square: Any = 0.0
    gated: Any = 0.0
    total: Any = 0.0
    outputs: Any = 0.0
    squares: Any = 0.0
    directions: Any = 0.0
    outliers: Any = 0.0
    pairs: Any = 0.0
    seen: Any = False
    bounds: np.ndarray | None = None
    k: int = 0

    def add(
        self,
        experts: int,
        ids: mx.array,
        y: mx.array,
        gates: mx.array | None = None,
        tokens: np.ndarray | None = None,
    ) -> None:
        """Add outputs y (..., k, outputs) of experts ids (..., k), with gates (..., k), for tokens (...)."""
        self.k = ids.shape[-1]
        chosen, y = ids.reshape(-1), y.astype(mx.float32).reshape(-1, y.shape[-1])
        square = mx.square(y).sum(axis=-1)
        norm = mx.sqrt(square)
        values = {
            "count": lambda: mx.ones_like(norm),
            "norm": lambda: norm,
            "square": lambda: square,
            "gated": lambda: norm if gates is None else norm * gates.reshape(-1),
            "total": lambda: y.sum(axis=-1),
            "outputs": lambda: y,
            "squares": lambda: mx.square(y),
            "directions": lambda: y / mx.maximum(norm, 1e-30)[:, None],
            "outliers": lambda: self._outliers(chosen, y),
        }
        for name, compute in values.items():
            if name == "count" or name in self.wanted:
                added = compute()
                sums = mx.zeros((experts, *added.shape[1:])).at[chosen].add(added)
                setattr(self, name, getattr(self, name) + np.array(sums, np.float64))
        rows = np.array(ids).reshape(-1, self.k)
        if "pairs" in self.wanted:
            shared = np.zeros((experts, experts))
            np.add.at(shared, (rows[:, :, None], rows[:, None, :]), 1)
            self.pairs = self.pairs + shared
        if "seen" in self.wanted:
            assert tokens is not None
            seen = np.zeros((experts, int(tokens.max()) + 1), bool)
            seen[rows, tokens.reshape(-1, 1)] = True
            self.seen = _joined(self.seen, seen)

    def _outliers(self, chosen: mx.array, y: mx.array) -> mx.array:
        assert self.bounds is not None
        low, high = (mx.array(each.astype(np.float32))[chosen][:, None] for each in self.bounds)
        return ((y < low) | (y > high)).astype(mx.float32).sum(axis=-1)


def _joined(one: Any, other: np.ndarray) -> np.ndarray:
    """Return `one | other` of arrays (experts, n) whose n differ."""
    if one is False:
        return other
    short, long = sorted((one, other), key=lambda each: each.shape[1])
    long = long.copy()
    long[:, : short.shape[1]] |= short
    return long


class _ObservedExperts(nn.Module):
    """Experts that keep their last indices and outputs, or return given outputs in place of their own."""

    def __init__(self, experts: nn.Module):
        super().__init__()
        self.experts = experts
        self.calls: list[tuple[mx.array, mx.array]] = []
        self.given: mx.array | None = None

    def __call__(self, x: mx.array, indices: mx.array, *args: Any, **options: Any) -> mx.array:
        if self.given is not None:
            return self.given
        y = self.experts(x, indices, *args, **options)
        self.calls.append((indices, y))
        return y


@dataclass
class _Observer:
    """Takes sums of one layer, whenever its block has been computed."""

    layer: ExpertLayer
    inner: _ObservedExperts
    sums: ExpertSums
    text: np.ndarray = field(default_factory=lambda: np.zeros(0, int))

    def observe(self, block: nn.Module, args: Any, options: Any) -> mx.array:
        result = block(*args, **options)
        calls = self.inner.calls
        self.inner.calls = []
        for indices, y in calls:
            with_gates = "gated" in self.sums.wanted
            gates = self._gates(block, args, options, y, result) if with_gates else None
            tokens = self._tokens(indices) if "seen" in self.sums.wanted else None
            self.sums.add(self.layer.experts * self.layer.groups, indices, y, gates, tokens)
        mx.eval(result)  # so that no other block's outputs are in memory
        return result

    def _tokens(self, indices: mx.array) -> np.ndarray:
        """Return the token ids of indices (..., k), whose last axes are the text's tokens."""
        repeats, rest = divmod(indices.size // indices.shape[-1], len(self.text))
        if rest or not repeats:
            raise ConfigError(
                f"{self.layer.path} computes experts for a part of a text's tokens, which evtc and ets can't "
                "tell apart. Choose another criterion."
            )
        return np.tile(self.text, repeats)

    def _gates(
        self, block: nn.Module, args: Any, options: Any, y: mx.array, result: mx.array
    ) -> mx.array:
        """Return the weights (..., k) with which the block sums its experts' outputs, whatever the router.

        The block is computed without its experts, twice: with outputs of zero, and with output j of a token
        nonzero in number j alone, where the weight of expert j then is.
        """
        k, outputs = y.shape[-2:]
        try:
            self.inner.given = mx.zeros_like(y)
            base = block(*args, **options).reshape(-1, outputs).astype(mx.float32)
            self.inner.given = mx.broadcast_to(_PROBE * mx.eye(k, outputs, dtype=y.dtype), y.shape)
            probed = block(*args, **options).reshape(-1, outputs).astype(mx.float32)
        except ValueError:
            raise self._no_gates() from None
        finally:
            self.inner.given = None
        gates = (probed - base)[:, :k] / _PROBE
        flat = y.reshape(-1, k, outputs).astype(mx.float32)
        if gates.shape[0] != flat.shape[0]:
            raise self._no_gates()
        again = base + (gates[..., None] * flat).sum(axis=-2)
        wanted = result.reshape(-1, outputs).astype(mx.float32)
        tolerance = 1e-3 if result.dtype == mx.float32 else 5e-2
        if not mx.all(mx.abs(again - wanted) <= tolerance * mx.abs(wanted).max()).item():
            raise self._no_gates()
        return gates

    def _no_gates(self) -> ConfigError:
        return ConfigError(
            f"The outputs of {self.layer.path} are not summed with one weight each, which the criterion reap "
            "needs. Choose man, msan or ean."
        )


class _ObservedBlock(nn.Module):
    """The module that calls experts, followed by its observer."""

    def __init__(self, block: nn.Module, observer: _Observer):
        super().__init__()
        self.block = block
        self._observer = observer

    def __call__(self, *args: Any, **options: Any) -> mx.array:
        return self._observer.observe(self.block, args, options)


@contextmanager
def _observed(
    model: nn.Module, layers: Sequence[ExpertLayer], sums: Sequence[ExpertSums]
) -> Iterator[list[_Observer]]:
    """Observe a model's experts inside the context."""
    modules, observers = dict(model.named_modules()), []
    replaced: list[tuple[str, nn.Module]] = []
    for layer, own in zip(layers, sums, strict=True):
        inner = _ObservedExperts(modules[layer.path])
        observers.append(_Observer(layer, inner, own))
        replaced.append((layer.path, inner))
    parents = [layer.path.rpartition(".")[0] for layer in layers]
    owners = [(path, modules[path]) for path in parents]
    try:
        replace_modules(model, replaced)
        replace_modules(
            model,
            [
                (path, _ObservedBlock(owner, observer))
                for (path, owner), observer in zip(owners, observers, strict=True)
            ],
        )
        yield observers
    finally:
        replace_modules(model, owners)
        replace_modules(model, [(layer.path, modules[layer.path]) for layer in layers])


def observe_experts(
    model: nn.Module,
    layers: Sequence[ExpertLayer],
    texts: Sequence[Sequence[int]],
    wanted: Collection[str] = (),
    *,
    bounds: Sequence[np.ndarray] | None = None,
    progress: Progress | None = None,
) -> list[ExpertSums]:
    """Compute texts of token ids one after the other, and return the sums of each layer's experts.

    Args:
        model: a model in eval mode, float or packed; it is unchanged afterwards.
        layers: the model's layers with experts.
        texts: token ids of each text.
        wanted: names of sums, in addition to `count`.
        bounds: (2, experts) of each layer, see `ExpertSums`; needed for `outliers`.
        progress: called with the numbers of texts done and in all.

    Raises:
        ConfigError: if `gated` is wanted and the routers' weights can't be found, because a block's output is
            no weighted sum; if `seen` is wanted and a block computes experts for some tokens only.
    """
    sums = [ExpertSums(wanted) for _ in layers]
    for own, each in zip(sums, bounds or (), strict=False):
        own.bounds = each
    with _observed(model, layers, sums) as observers:
        for done, text in enumerate(texts, start=1):
            for observer in observers:
                observer.text = np.array(text)
            model(mx.array([list(text)]))  # each block is computed by its observer; no logits are
            if progress is not None:
                progress(done, len(texts))
    return sums
