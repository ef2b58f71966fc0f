"""Scores of experts: what the model loses without each.

X_p are the n_p tokens that a router sends to expert p, y_t the expert's output for token t, g_t the router's
weight for it, W_p the expert's matrices, and G_p their gradient of the cross-entropy of the texts.

| criterion | score | MC-Suite |
| --- | --- | --- |
| `reap` | mean over X_p of g_t norm(y_t) | |
| `man`, `msan` | mean over X_p of norm(y_t), of norm(y_t)^2 | |
| `ean` | sum over j of sqrt(sum over X_p of y_tj^2) | EAN |
| `eas` | sum over q of the mean cosine of an output of p and one of q | EAS |
| `eae` | sum over j of log std over X_p of y_tj | EAE |
| `eao` | number of y_tj outside of mean +- 3 std of all y_tj of p | EAO |
| `frequency` | n_p | EUF |
| `ecc` | how long p stays, when of the two experts with the fewest common tokens the less used goes | ECC |
| `evtc` | number of different token ids in X_p | EVTC |
| `ets` | as `ecc`, by the number of token ids that are in both X_p and X_q | ETS |
| `router` | -norm(row p of the router) | max RWN |
| `ews` | sum over q of the cosine of W_p and W_q | EWS |
| `ewn` | norm(W_p) | EWN |
| `wsr` | stable rank of each matrix in W_p, summed: norm(W)^2 / (largest singular value)^2 | WSR |
| `egs` | sum over q of the cosine of G_p and G_q | EGS |
| `egn` | sum over the rows of matrices in G_p of their norm | EGN |
| `ege` | sum over the rows of matrices in G_p of log std | EGE |
| `ego` | numbers in G_p outside of mean +- 3 std | EGO |
| `random` | drawn from a seed | |

q are the other experts of the same router. The experts with the lowest scores are removed, or the highest. By
criteria of outputs and tokens, an expert without tokens goes first.

Source: REAP, arXiv 2510.13999; MAN and MSAN, arXiv 2606.15716; MC-Suite, arXiv 2504.05586, which found that the
lowest EAN and EGE, and the highest ETS and RWN, are the best to remove.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from afm_mlx.adapters.target_modules import linear_weight
from afm_mlx.errors import ConfigError
from afm_mlx.progress import Progress
from afm_mlx.training.pruning.expert_layers import ExpertLayer
from afm_mlx.training.pruning.expert_observer import ExpertSums, observe_experts

OBSERVED = {  # the sums that each needs in addition to `count`
    "reap": ("gated",),
    "man": ("norm",),
    "msan": ("square",),
    "ean": ("squares",),
    "eas": ("directions",),
    "eae": ("outputs", "squares"),
    "eao": ("outliers",),
    "frequency": (),
    "ecc": ("pairs",),
    "evtc": ("seen",),
    "ets": ("seen",),
}
WEIGHTS = ("ews", "ewn", "wsr")
GRADIENTS = ("egs", "egn", "ege", "ego")
CRITERIA = (*OBSERVED, "router", *WEIGHTS, *GRADIENTS, "random")
"""Names of criteria."""
DROPS = ("lowest", "highest")
"""Which scores' experts are removed."""

_OUTLIER = 3.0  # standard deviations


def expert_scores(
    model: nn.Module,
    layers: Sequence[ExpertLayer],
    texts: Sequence[Sequence[int]],
    criterion: str,
    *,
    drop: str = "lowest",
    seed: Sequence[int] = (0,),
    progress: Progress | None = None,
) -> list[np.ndarray]:
    """Score the experts of each layer; the ones to remove have the lowest numbers.

    Args:
        model: a model in eval mode, float or packed. Criteria of gradients freeze its parameters; all else is
            unchanged afterwards.
        layers: the model's layers with experts.
        texts: token ids of each text.
        criterion: one of `CRITERIA`.
        drop: "lowest" for the criterion's scores, "highest" for minus these.
        seed: of the criterion "random".
        progress: called with the numbers of texts done and in all, of each pass.

    Returns:
        (groups * experts,) float64 for each layer.

    Raises:
        ConfigError: if the criterion needs what the model has not: routers' weights, gradients of experts.
    """
    is_high = drop == "highest"
    if criterion in OBSERVED:
        sums = _observe(model, layers, texts, criterion, progress)
        return [
            _observed_scores(own, layer, criterion, is_high)
            for own, layer in zip(sums, layers, strict=True)
        ]
    if criterion in GRADIENTS:
        scores = gradient_scores(model, layers, texts, criterion, progress)
    elif criterion in WEIGHTS:
        scores = [weight_scores(model, layer, criterion) for layer in layers]
    elif criterion == "router":
        scores = [router_scores(model, layer) for layer in layers]
    else:
        rng = np.random.default_rng(list(seed))
        scores = [rng.random(layer.groups * layer.experts) for layer in layers]
    return [-own if is_high else own for own in scores]


# -- by outputs and use


def _observe(
    model: nn.Module,
    layers: Sequence[ExpertLayer],
    texts: Sequence[Sequence[int]],
    criterion: str,
    progress: Progress | None,
) -> list[ExpertSums]:
    bounds = None
    if criterion == "eao":
        first = observe_experts(model, layers, texts, ("total", "squares"), progress=progress)
        bounds = [_bounds(sums) for sums in first]
    wanted = OBSERVED[criterion]
    return observe_experts(model, layers, texts, wanted, bounds=bounds, progress=progress)


def _bounds(sums: ExpertSums) -> np.ndarray:
    """Return the numbers (2, experts) between which an expert's outputs are no outliers."""
    size = np.maximum(sums.count, 1) * sums.squares.shape[1]
    mean = sums.total / size
    std = np.sqrt(np.maximum(sums.squares.sum(axis=-1) / size - mean**2, 0))
    return np.stack([mean - _OUTLIER * std, mean + _OUTLIER * std])


def _observed_scores(
    sums: ExpertSums, layer: ExpertLayer, criterion: str, is_high: bool
) -> np.ndarray:
    """Return the scores (groups * experts,) of one of `OBSERVED`, the lowest of which are to remove."""
    count = np.maximum(sums.count, 1)
    if criterion in ("ecc", "ets"):
        shared = sums.pairs if criterion == "ecc" else _common(sums.seen)
        groups = zip(_blocks(shared, layer), sums.count.reshape(layer.groups, -1), strict=True)
        scores = np.concatenate([_lasting(own, used, is_high) for own, used in groups])
    else:
        found = {
            "reap": lambda: sums.gated / count,
            "man": lambda: sums.norm / count,
            "msan": lambda: sums.square / count,
            "ean": lambda: np.sqrt(sums.squares).sum(axis=-1),
            "eas": lambda: _similarity(sums.directions / count[:, None], layer),
            "eae": lambda: _log_std(sums.outputs / count[:, None], sums.squares / count[:, None]),
            "eao": lambda: sums.outliers,
            "frequency": lambda: sums.count,
            "evtc": lambda: sums.seen.sum(axis=-1),
        }[criterion]()
        scores = -found if is_high else found
    return np.where(sums.count > 0, scores, -np.inf)


def _common(seen: np.ndarray) -> np.ndarray:
    """Return (experts, experts) numbers of token ids that two experts have seen."""
    return seen.astype(np.float64) @ seen.T


def _blocks(pairs: np.ndarray, layer: ExpertLayer) -> Iterator[np.ndarray]:
    """Yield the (experts, experts) of each router of a matrix of all pairs."""
    for first in range(0, len(pairs), layer.experts):
        yield pairs[first : first + layer.experts, first : first + layer.experts]


def _similarity(vectors: np.ndarray, layer: ExpertLayer) -> np.ndarray:
    """Return the sum over the other experts of a router of the products of vectors (experts, n)."""
    blocks = _blocks(vectors @ vectors.T, layer)
    return np.concatenate([block.sum(axis=1) - np.diag(block) for block in blocks])


def _log_std(mean: np.ndarray, square: np.ndarray) -> np.ndarray:
    """Return the sum over the last axis of log std; minus infinity if one is constant."""
    # A difference below the rounding errors of its terms is no variance.
    variance = square - mean**2
    variance = np.where(variance > 1e-12 * square, variance, 0)
    with np.errstate(divide="ignore"):
        return 0.5 * np.log(variance).sum(axis=-1)


def _lasting(shared: np.ndarray, used: np.ndarray, is_high: bool) -> np.ndarray:
    """Return when each expert goes: of the pair with the fewest or the most in common, the less used one.

    Of equal pairs the first goes first, and of equally used experts the second of the pair.
    """
    experts, last = len(used), np.full(len(used), float(len(used)))
    left = list(range(experts))
    for time in range(experts - 1):
        pairs = [(p, q) for i, p in enumerate(left) for q in left[i + 1 :]]
        values = np.array([shared[pair] for pair in pairs])
        p, q = pairs[int(values.argmax() if is_high else values.argmin())]
        gone = p if used[p] < used[q] else q
        last[gone] = time
        left.remove(gone)
    return last


# -- by weights


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


def weight_scores(model: nn.Module, layer: ExpertLayer, criterion: str) -> np.ndarray:
    """Return the scores (groups * experts,) of "ews", "ewn" or "wsr"."""
    modules, count = dict(model.named_modules()), layer.groups * layer.experts
    weights = (linear_weight(modules[path]) for path in _stacks(modules, layer))
    matrices = (np.array(each).reshape(count, -1, each.shape[-1]) for each in weights)
    if criterion == "wsr":
        return sum((_stable_ranks(matrix) for matrix in matrices), np.zeros(count))
    products = _products(matrices, count)
    if criterion == "ewn":
        return np.sqrt(np.diag(products))
    return _cosines(products, layer)


def _stacks(modules: dict[str, nn.Module], layer: ExpertLayer) -> Iterator[str]:
    """Yield the paths of an expert layer's stacks of matrices."""
    for name in layer.axes:
        path = name.removesuffix(".weight")
        if name.startswith(f"{layer.path}.") and path != name and path in modules:
            yield path


def _products(matrices: Iterator[np.ndarray], count: int) -> np.ndarray:
    """Return the (experts, experts) products of all numbers of two experts, float64."""
    products = np.zeros((count, count))
    for matrix in matrices:
        flat = matrix.reshape(count, -1).astype(np.float64)
        products += flat @ flat.T
    return products


def _cosines(products: np.ndarray, layer: ExpertLayer) -> np.ndarray:
    """Return the sum over the other experts of a router of cosines, by the products of vectors."""
    norms = np.sqrt(np.maximum(np.diag(products), 1e-300))
    cosines = products / norms / norms[:, None]
    return np.concatenate([b.sum(axis=1) - np.diag(b) for b in _blocks(cosines, layer)])


def _stable_ranks(matrices: np.ndarray) -> np.ndarray:
    """Return the stable rank of each matrix (experts, outputs, inputs); 0 for a matrix of zeros."""
    found = []
    for matrix in matrices.astype(np.float64):
        gram = matrix @ matrix.T if matrix.shape[0] < matrix.shape[1] else matrix.T @ matrix
        largest = np.linalg.eigvalsh(gram)[-1]
        found.append(np.trace(gram) / largest if largest > 0 else 0.0)
    return np.array(found)


# -- by gradients


def gradient_scores(
    model: nn.Module,
    layers: Sequence[ExpertLayer],
    texts: Sequence[Sequence[int]],
    criterion: str,
    progress: Progress | None = None,
) -> list[np.ndarray]:
    """Return the scores (groups * experts,) of "egs", "egn", "ege" or "ego" for each layer.

    Gradients are of the summed cross-entropy of all texts' tokens. Memory holds one gradient of all experts.
    The model's parameters are frozen afterwards, and it is in eval mode.

    Raises:
        ConfigError: if experts are packed, which have no gradient.
    """
    modules = dict(model.named_modules())
    paths = [list(_stacks(modules, layer)) for layer in layers]
    model.freeze()
    for path in (each for own in paths for each in own):
        if "scales" in modules[path] or modules[path].weight.dtype == mx.uint32:
            raise ConfigError(
                f"{path} is packed, and has no gradient. Score the float model, or choose another criterion."
            )
        modules[path].unfreeze(keys=["weight"], recurse=False)
    gradients = _gradients(model, texts, progress)
    return [
        _gradient_scores([gradients[path] for path in own], layer, criterion)
        for own, layer in zip(paths, layers, strict=True)
    ]


def _gradients(
    model: nn.Module, texts: Sequence[Sequence[int]], progress: Progress | None
) -> dict[str, mx.array]:
    """Return the summed gradients of a model's trainable matrices by the path of their layers."""

    def loss(tokens: mx.array) -> mx.array:
        logits = model(tokens[:, :-1]).astype(mx.float32)
        return nn.losses.cross_entropy(logits, tokens[:, 1:], reduction="sum")

    total: dict[str, mx.array] = {}
    model.train()
    try:
        for done, text in enumerate(texts, start=1):
            found = nn.value_and_grad(model, loss)(mx.array([list(text)]))[1]
            for name, gradient in tree_flatten(found):
                path = name.removesuffix(".weight")
                gradient = gradient.astype(mx.float32)
                total[path] = total[path] + gradient if path in total else gradient
            mx.eval(total)
            if progress is not None:
                progress(done, len(texts))
    finally:
        model.eval()
    return total


def _gradient_scores(
    gradients: Sequence[mx.array], layer: ExpertLayer, criterion: str
) -> np.ndarray:
    """Return the scores of one layer, by the gradients of its stacks of matrices."""
    count = layer.groups * layer.experts
    matrices = [np.array(each).reshape(count, -1, each.shape[-1]) for each in gradients]
    if criterion == "egs":
        return _cosines(_products(iter(matrices), count), layer)
    if criterion == "ego":
        flat = np.concatenate([each.reshape(count, -1) for each in matrices], axis=1)
        flat = flat.astype(np.float64)
        distance = np.abs(flat - flat.mean(axis=1, keepdims=True))
        return (distance > _OUTLIER * flat.std(axis=1, keepdims=True)).sum(axis=1).astype(float)
    scores = np.zeros(count)
    for matrix in matrices:
        squares = np.square(matrix, dtype=np.float64)
        if criterion == "egn":
            scores += np.sqrt(squares.sum(axis=-1)).sum(axis=-1)
        else:
            scores += _log_std(matrix.mean(axis=-1, dtype=np.float64), squares.mean(axis=-1))
    return scores


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
