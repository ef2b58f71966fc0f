"""One adapter for all rows: `attach_adapter` puts it on a model, and `detach_adapter` takes it off."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from afm_mlx.adapters.active import BatchAdapters, active_adapters, bind, unbind
from afm_mlx.adapters.layer_places import place_shapes, places, unwrap_layers
from afm_mlx.adapters.lora import LoRALinear, lora_tensors
from afm_mlx.adapters.opening import Base, open_adapter
from afm_mlx.adapters.resident import build_resident
from afm_mlx.checkpoint.fingerprint import arrays_fingerprint


def attach_adapter(
    model: nn.Module,
    path: str | Path,
    *,
    base_folder: str | Path | None = None,
    force: bool = False,
) -> nn.Module:
    """Have a model run with an adapter for all rows, in the place of the one that it has.

    Args:
        model: a model in eval mode.
        path: path of an adapter of any format; see `open_adapter`.
        base_folder: folder that the model was loaded from. Its fingerprint counts too, since that of the arrays
            in memory depends on the type that the device computes in.
        force: take an adapter that was made for another model, if its shapes fit.

    Returns:
        The model.

    Raises:
        CheckpointError: when the adapter belongs to another model, or does not fit.
    """
    resident = open_adapter(Path(path), Base.of(model, base_folder, force)).read()
    if active_adapters(model) is None:
        unwrap_layers(model)  # takes LoRA layers off
    bind(model).set(BatchAdapters.everywhere(resident))
    return model


def detach_adapter(model: nn.Module) -> nn.Module:
    """Take the adapter off, put wrapped layers back in place of their wrappers, and return the model."""
    unbind(model)
    unwrap_layers(model)
    return model


def attach_random_adapters(
    model: nn.Module, rank: int, seed: int = 0, count: int = 1, rows: int = 1
) -> nn.Module:
    """Put random adapters on every linear layer of every block, for benchmarks, and return the model.

    Args:
        model: a model in eval mode.
        rank: columns of A and rows of B.
        seed: seed of the random numbers.
        count: number of adapters; a single one serves all rows of any batch.
        rows: rows of a batch, which take several adapters in turn.

    Raises:
        RequestError: when no block has a linear layer that can carry one.
    """
    active, shapes = bind(model), place_shapes(model)
    residents = [
        build_resident(random_adapter(model, rank, seed + i), 1.0, shapes, "a random adapter")
        for i in range(count)
    ]
    if count == 1:
        active.set(BatchAdapters.everywhere(residents[0]))
    else:
        active.set(BatchAdapters.of([residents[row % count] for row in range(rows)]))
    return model


def random_adapter(model: nn.Module, rank: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Tensors of a random adapter on every linear layer of every block, float16, by their names in files."""
    rng, tensors = np.random.default_rng(seed), {}
    for place in places(model):
        for end, (inputs, outputs) in place.shapes.items():
            a = rng.standard_normal((inputs, rank), dtype=np.float32) * inputs**-0.5
            # B is small, so that a random model's activations stay in their range.
            b = rng.standard_normal((rank, outputs), dtype=np.float32) * rank**-0.5 * 0.01
            tensors[f"{place.path}.lora_a{end}"] = a.astype(np.float16)
            tensors[f"{place.path}.lora_b{end}"] = b.astype(np.float16)
    return tensors


def adapter_arrays(model: nn.Module) -> dict[str, mx.array]:
    """The numbers of the adapters that a model runs or trains with, by name; empty without one."""
    arrays = lora_tensors(model)
    active = active_adapters(model)
    if active is not None and active.batch is not None:
        residents = active.batch.residents
        arrays |= {f"adapter.{i}": resident.numbers for i, resident in enumerate(residents)}
    return arrays


def adapter_fingerprint(model: nn.Module) -> str | None:
    """Fingerprint of the adapter that a model runs or trains with; None when it has none."""
    active = active_adapters(model)
    if active is not None and active.batch is not None:
        return " ".join(resident.fingerprint for resident in active.batch.residents)
    arrays = lora_tensors(model)
    if not arrays:
        return None
    scales = {p.path: p.layer.scale for p in places(model) if isinstance(p.layer, LoRALinear)}
    return arrays_fingerprint(scales, arrays)
