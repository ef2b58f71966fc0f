"""The weighted sum of adapters, as one adapter whose rank is the sum of their ranks.

    sum_i w_i s_i A_i B_i = s [A_1 A_2 ...] [f_1 B_1; f_2 B_2; ...],    s = max_i |w_i s_i|,  f_i = w_i s_i / s

The A_i are joined unchanged, and the B_i multiplied in float32. s is the sum's scale: no factor is over 1, and
float16 rounds nothing of the adapter whose factor is 1. Pools compute sums in this way when they load them
(`resident.open_sum`), and `compose` for files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import mlx.core as mx

from afm_mlx.adapters.adapter_folder import AdapterConfig, check_pairs, is_a
from afm_mlx.errors import CheckpointError, RequestError, named, shown
from afm_mlx.json_values import is_number

LoadedAdapter = tuple[Mapping[str, mx.array], AdapterConfig]
"""Tensors by their names in an adapter folder, and the config; see `load_adapter`."""

T = TypeVar("T")
"""A tensor, whether in memory or not."""


class Term(NamedTuple, Generic[T]):
    """One of the tensors that are joined, and its factor."""

    tensor: T
    factor: float


def weighted_sum(
    adapters: Sequence[tuple[Mapping[str, T], float]], weights: Sequence[float]
) -> tuple[float, dict[str, list[Term[T]]]]:
    """Return the scale of a sum and the terms of each of its tensors; no tensor is read.

    `adapters` has the tensors, by their names in an adapter folder, and the scale of each; `weights` its weight
    in the sum. A tensor has a term for every adapter that has the tensor, in the order of `adapters`.

    Raises:
        RequestError: for a weight that is not finite, or too large for the adapter's scale.
    """
    factors = [float(weight * scale) for weight, (_, scale) in zip(weights, adapters, strict=True)]
    for weight, factor in zip(weights, factors, strict=True):
        if not math.isfinite(weight):
            raise RequestError(
                f"A weight of an adapter is {shown(weight)}; it must be a finite number."
            )
        if not is_number(factor):
            raise RequestError(
                f"A weight of an adapter is {weight:g}, and {factor:g} with its scale, which float32 does not "
                "hold. Take a smaller one."
            )
    largest = max(map(abs, factors)) or 1.0
    terms: dict[str, list[Term[T]]] = {}
    for (tensors, _), factor in zip(adapters, factors, strict=True):
        for name, tensor in tensors.items():
            own = 1.0 if is_a(name) else factor / largest
            terms.setdefault(name, []).append(Term(tensor, own))
    return largest, terms


def compose(
    adapters: Sequence[LoadedAdapter], weights: Sequence[float], *, force: bool = False
) -> tuple[dict[str, mx.array], AdapterConfig]:
    """Return the weighted sum of adapters.

    Args:
        adapters: adapters of one base model, of any ranks and on any layers.
        weights: any finite numbers, not all 0; an adapter with 0 is left out.
        force: accept adapters of different bases, if their shapes fit.

    Returns:
        tensors, A (inputs, ranks) of the widest type among them and B (ranks, outputs) in float32, and their
        config. For a layer that some adapters leave out, their part is zeros, since a folder has one rank.

    Raises:
        RequestError: when there is no adapter, or not one finite weight for each, or all are 0.
        CheckpointError: when they belong to different models, or their shapes differ.
    """
    if not adapters or len(adapters) != len(weights):
        raise RequestError(
            f"{len(adapters)} adapters and {len(weights)} weights were given; each adapter has one weight."
        )
    for index, (tensors, config) in enumerate(adapters, 1):
        check_pairs(tensors, config, f"Adapter {index}")
    bases = [c.base_model_fingerprint for _, c in adapters if c.base_model_fingerprint is not None]
    other = next((base for base in bases if base != bases[0]), None)
    if other is not None and not force:
        raise CheckpointError(
            f"The adapters belong to different models, with the fingerprints {named(bases[0])} and "
            f"{named(other)}. "
            "Compose adapters of one model, or force it (--force) when you know that both fit."
        )
    used = [(adapter, weight) for adapter, weight in zip(adapters, weights, strict=True) if weight]
    if not used:
        listed = named(", ".join(f"{weight:g}" for weight in weights))
        raise RequestError(
            f"The weights are {listed}: no adapter is left. Give one of them another weight."
        )
    configs = [config for (_, config), _ in used]
    known: dict[str, mx.array] = {}  # the first tensor of each name
    for (tensors, _), _ in used:
        for name, tensor in tensors.items():
            one, other_width = _width(name, known.setdefault(name, tensor)), _width(name, tensor)
            if one != other_width:
                raise CheckpointError(
                    f"{named(name)} has {one} {'inputs' if is_a(name) else 'outputs'} in one adapter and "
                    f"{other_width} in another. They were made for different models."
                )

    def zeros(name: str, rank: int) -> mx.array:
        width = _width(name, known[name])
        return mx.zeros((width, rank) if is_a(name) else (rank, width), known[name].dtype)

    whole = []
    for (tensors, config), _ in used:
        completed = {
            n: tensors[n] if n in tensors else zeros(n, config.rank) for n in sorted(known)
        }
        whole.append((completed, config.scale))
    scale, terms = weighted_sum(whole, [weight for _, weight in used])
    joined = {}
    for name, each in terms.items():
        parts = [t if is_a(name) else t.astype(mx.float32) * factor for t, factor in each]
        joined[name] = mx.concatenate(parts, axis=1 if is_a(name) else 0)
    unknown = any(config.num_layers < 0 for config in configs)
    return joined, AdapterConfig(
        rank=sum(config.rank for config in configs),
        scale=scale,
        num_layers=-1 if unknown else max(config.num_layers for config in configs),
        keys=tuple(sorted({key for config in configs for key in config.keys})),
        base_model_fingerprint=bases[0] if bases and other is None else None,
    )


def _width(name: str, tensor: mx.array) -> int:
    """Return the number of inputs of an A, or of outputs of a B."""
    return tensor.shape[0 if is_a(name) else 1]
