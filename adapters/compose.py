"""The weighted sum of adapters as one adapter of their ranks' sum.

    sum_i w_i s_i A_i B_i = [A_1 A_2 ...] [w_1 s_1 B_1; w_2 s_2 B_2; ...]

No number is approximated: A_i stand side by side as they are, and B_i are multiplied in float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import mlx.core as mx

from afm_mlx.adapters.files import AdapterConfig, check_pairs
from afm_mlx.errors import CheckpointError, RequestError

Adapter = tuple[Mapping[str, mx.array], AdapterConfig]


def compose(
    adapters: Sequence[Adapter], weights: Sequence[float], *, force: bool = False
) -> tuple[dict[str, mx.array], AdapterConfig]:
    """Add adapters up, each with a weight.

    Args:
        adapters: tensors and config of each, see `load_adapter`; of the same base model, and not necessarily of
            the same rank or on the same layers.
        weights: any finite numbers.
        force: add up adapters of different bases too, if their shapes fit.

    Returns:
        tensors, A (inputs, ranks) of the widest type among them and B (ranks, outputs) in float32, and a
        config of scale 1. A layer that some leave out has zeros in their place.

    Raises:
        RequestError: when there is no adapter, or not one finite weight for each.
        CheckpointError: when they belong to different models, or their shapes differ.
    """
    if not adapters or len(adapters) != len(weights):
        raise RequestError(
            f"{len(adapters)} adapters and {len(weights)} weights were given; each adapter has one weight."
        )
    for weight in weights:
        if not math.isfinite(weight):
            raise RequestError(f"A weight of an adapter is {weight}; it must be a finite number.")
    for index, (tensors, config) in enumerate(adapters, 1):
        check_pairs(tensors, config, f"Adapter {index}")
    fingerprint = _common_base([config for _, config in adapters], force)
    names = sorted({name for tensors, _ in adapters for name in tensors if ".lora_a" in name})
    rank = sum(config.rank for _, config in adapters)
    result: dict[str, mx.array] = {}
    for name in names:
        a, b = _side_by_side(adapters, weights, name)
        result |= {name: a, name.replace(".lora_a", ".lora_b"): b}
    configs = [config for _, config in adapters]
    unknown = any(config.num_layers < 0 for config in configs)
    return result, AdapterConfig(
        rank=rank,
        scale=1.0,
        num_layers=-1 if unknown else max(config.num_layers for config in configs),
        keys=tuple(sorted({key for config in configs for key in config.keys})),
        base_model_fingerprint=fingerprint,
    )


def _common_base(configs: Sequence[AdapterConfig], force: bool) -> str | None:
    known = [c.base_model_fingerprint for c in configs if c.base_model_fingerprint is not None]
    for other in known:
        if other != known[0] and not force:
            raise CheckpointError(
                f"The adapters belong to different models, with the fingerprints {known[0]} and {other}. "
                "Compose adapters of one model, or force it (--force) when you know that both fit."
            )
    return known[0] if len(set(known)) == 1 else None


def _side_by_side(
    adapters: Sequence[Adapter], weights: Sequence[float], name: str
) -> tuple[mx.array, mx.array]:
    """A (inputs, ranks) and B (ranks, outputs) of one pair of matrices; `name` is A's."""
    other = name.replace(".lora_a", ".lora_b")
    found = [(t[name], t[other]) for t, _ in adapters if name in t]
    inputs, outputs = found[0][0].shape[0], found[0][1].shape[1]
    for a, b in found:
        if (a.shape[0], b.shape[1]) != (inputs, outputs):
            raise CheckpointError(
                f"{name} maps {inputs} numbers to {outputs} in one adapter and {a.shape[0]} to {b.shape[1]} in "
                "another. They were made for different models."
            )
    a_parts, b_parts = [], []
    for (tensors, config), weight in zip(adapters, weights, strict=True):
        if name in tensors:
            a_parts.append(tensors[name])
            b_parts.append(tensors[other].astype(mx.float32) * (weight * config.scale))
        else:
            a_parts.append(mx.zeros((inputs, config.rank), found[0][0].dtype))
            b_parts.append(mx.zeros((config.rank, outputs)))
    return mx.concatenate(a_parts, axis=1), mx.concatenate(b_parts, axis=0)
