"""Scores of experts: what the model loses without each. Experts with the lowest scores are removed.

With X_p, the n_p tokens that a router sends to expert p, y_t, the expert's output for token t, and g_t, the
router's weight for it:

    reap        mean over X_p of g_t ||y_t||       arXiv 2510.13999
    man         mean over X_p of ||y_t||           arXiv 2606.15716
    msan        mean over X_p of ||y_t||^2         arXiv 2606.15716
    ean         sum over j of sqrt(sum over X_p of y_tj^2)    arXiv 2504.05586, "min EAN"
    frequency   n_p
    router      -||row p of the router||, without data        arXiv 2504.05586, "max RWN"
    random      drawn from a seed

An expert without tokens has the score 0 of `reap`, `man`, `msan`, `ean` and `frequency`.

All sums come from one pass over the text. Outputs exist for one block and one text at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from afm_mlx.adapters.target_modules import linear_weight
from afm_mlx.errors import ConfigError
from afm_mlx.progress import Progress
from afm_mlx.quantization.quantize_model import replace_modules
from afm_mlx.training.pruning.expert_layers import ExpertLayer

OBSERVED = ("reap", "man", "msan", "ean", "frequency")
CRITERIA = (*OBSERVED, "router", "random")
_PROBE = 1024.0
"""Length of the outputs that replace the experts' to find gates: a power of two, far above other terms."""


@dataclass
class ExpertSums:
    """Sums over the tokens of each expert, float64; the attributes' first axis counts the table's experts.

    Attributes:
        count, norm, square, gated: (experts,) of 1, ||y||, ||y||^2 and g ||y||.
        squares: (experts, outputs) of y_j^2.
        k: number of experts that a token has.
    """

    count: Any = 0.0
    norm: Any = 0.0
    square: Any = 0.0
    gated: Any = 0.0
    squares: Any = 0.0
    k: int = 0

    def add(self, experts: int, ids: mx.array, y: mx.array, gates: mx.array | None) -> None:
        """Add outputs y (..., k, outputs) of experts ids (..., k) with gates (..., k)."""
        self.k = ids.shape[-1]
        chosen, y = ids.reshape(-1), y.astype(mx.float32).reshape(-1, y.shape[-1])
        squares = mx.square(y)
        square = squares.sum(axis=-1)
        norm = mx.sqrt(square)
        gated = norm if gates is None else norm * gates.reshape(-1)
        for name, values in (
            ("count", mx.ones_like(norm)),
            ("norm", norm),
            ("square", square),
            ("gated", gated),
            ("squares", squares),
        ):
            sums = mx.zeros((experts, *values.shape[1:])).at[chosen].add(values)
            setattr(self, name, getattr(self, name) + np.array(sums, np.float64))

    def scores(self, criterion: str) -> np.ndarray:
        """Return the scores (experts,) of one of `OBSERVED`."""
        if criterion == "frequency":
            return self.count
        if criterion == "ean":
            return np.sqrt(self.squares).sum(axis=-1)
        sums = {"reap": self.gated, "man": self.norm, "msan": self.square}[criterion]
        return sums / np.maximum(self.count, 1)


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
    with_gates: bool
    sums: ExpertSums = field(default_factory=ExpertSums)

    def observe(self, block: nn.Module, args: Any, options: Any) -> mx.array:
        result = block(*args, **options)
        calls = self.inner.calls
        self.inner.calls = []
        for indices, y in calls:
            gates = self._gates(block, args, options, y, result) if self.with_gates else None
            self.sums.add(self.layer.experts * self.layer.groups, indices, y, gates)
        mx.eval(result)  # so that no other block's outputs are in memory
        return result

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
    model: nn.Module, layers: Sequence[ExpertLayer], with_gates: bool
) -> Iterator[list[_Observer]]:
    """Observe a model's experts inside the context."""
    modules, observers = dict(model.named_modules()), []
    replaced: list[tuple[str, nn.Module]] = []
    for layer in layers:
        inner = _ObservedExperts(modules[layer.path])
        observers.append(_Observer(layer, inner, with_gates))
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
    *,
    with_gates: bool = True,
    progress: Progress | None = None,
) -> list[ExpertSums]:
    """Compute texts of token ids one after the other, and return the sums of each layer's experts.

    Args:
        model: a model in eval mode, float or packed; it is unchanged afterwards.
        layers: the model's layers with experts.
        texts: token ids of each text.
        with_gates: find the routers' weights, too, without which `gated` equals `norm`.
        progress: called with the numbers of texts done and in all.

    Raises:
        ConfigError: if the routers' weights can't be found, because a block's output is no weighted sum.
    """
    with _observed(model, layers, with_gates) as observers:
        for done, text in enumerate(texts, start=1):
            model(mx.array([list(text)]))  # each block is computed by its observer; no logits are
            if progress is not None:
                progress(done, len(texts))
    return [observer.sums for observer in observers]


def router_scores(model: nn.Module, layer: ExpertLayer) -> np.ndarray:
    """Return the scores (groups * experts,) of the criterion "router"."""
    modules = dict(model.named_modules())
    for name in layer.routers:
        path, _, own = name.rpartition(".")
        module = modules.get(path)
        if own != "weight" or module is None:
            continue
        norms = mx.linalg.norm(linear_weight(module), axis=-1)
        return -np.array(norms, np.float64).reshape(-1)
    raise ConfigError(
        f"The block of {layer.path} has no router with a matrix; choose another criterion."
    )


def kept_experts(
    scores: np.ndarray, layer: ExpertLayer, number: int, sections: int = 1
) -> np.ndarray:
    """Return the indices (groups, number) of the experts of each router with the highest scores, ascending.

    Of equal scores, the lower indices stay. A router that chooses among `sections` of its experts first keeps
    the same number in each.

    Args:
        scores: (groups * experts,) scores.
        layer: the layer.
        number: kept experts of each router, a multiple of `sections`.
        sections: number of equal sections of a router's experts.
    """
    rows = scores.reshape(layer.groups * sections, -1)
    best = np.argsort(-rows, axis=1, kind="stable")[:, : number // sections]
    firsts = np.arange(sections) * (layer.experts // sections)
    inside = np.sort(best, axis=1) + np.tile(firsts, layer.groups)[:, None]
    return inside.reshape(layer.groups, number)
