"""Adapters that run: packed layers get them into their kernels, other layers are wrapped.

One adapter serves all rows. Its arrays are inputs of a traced decode step, so another adapter of the same
rank may take its place between two steps, and nothing is traced anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from afm_mlx.adapters.files import AdapterConfig, load_adapter
from afm_mlx.adapters.lora import (
    LoRALinear,
    Pair,
    Place,
    has_attached,
    lora_tensors,
    pairs_by_layer,
    places,
)
from afm_mlx.config import ModelConfig
from afm_mlx.errors import CheckpointError, RequestError
from afm_mlx.fingerprint import arrays_fingerprint, base_model_fingerprint, folder_fingerprint
from afm_mlx.kernels import dispatch
from afm_mlx.kernels.cpu.memory import prefer_huge_pages
from afm_mlx.packed import PackedLinear, activation_dtype
from afm_mlx.quantization import replace_modules


def attach_adapter(
    model: nn.Module,
    folder: str | Path,
    *,
    base_folder: str | Path | None = None,
    force: bool = False,
) -> nn.Module:
    """Have a model run with an adapter, in the place of the one that it has.

    Args:
        model: in eval mode.
        folder: see `load_adapter`.
        base_folder: that the model was loaded from. Its fingerprint counts too, since that of the arrays in
            memory depends on the type that the device computes in.
        force: take an adapter that was made for another model, if its shapes fit.

    Returns:
        The model.

    Raises:
        CheckpointError: when the adapter belongs to another model, or does not fit.
    """
    tensors, config = load_adapter(folder)
    if not force:
        check_base(model, config, folder, base_folder)
    pairs = pairs_by_layer(tensors, model, folder)
    attach_pairs(
        model,
        ((place, pairs[place.path]) for place in places(model) if place.path in pairs),
        config.rank,
        config.scale,
    )
    return model


def check_base(
    model: nn.Module,
    config: AdapterConfig,
    source: str | Path,
    base_folder: str | Path | None = None,
) -> None:
    """Compare an adapter's fingerprint with the model's; folders without one, and zoo models, pass.

    Raises:
        CheckpointError: shows both.
    """
    wanted = config.base_model_fingerprint
    if wanted is None or not isinstance(getattr(model, "args", None), ModelConfig):
        return
    if base_folder is not None and folder_fingerprint(model.args, base_folder) == wanted:
        return
    found = base_model_fingerprint(model)
    if found != wanted:
        raise CheckpointError(
            f"The adapter {source} was made for the model with fingerprint {wanted}, and this one has {found}. "
            "Take the model that it was trained on, or train an adapter for this one."
        )


def attach_pairs(
    model: nn.Module,
    pairs: Iterable[tuple[Place, list[Pair | None]]],
    rank: int,
    scale: float,
) -> None:
    """Put an adapter on the given layers, and take any other off all layers.

    Args:
        model: in eval mode.
        pairs: a layer, and A (K, rank) and B (rank, N_i) of each of its sections, None for one without.
        rank: of every pair.
        scale: alpha / rank.
    """
    bare = {place.path for place in places(model)}
    wrapped: list[tuple[str, nn.Module]] = []
    for place, of_sections in pairs:
        bare.discard(place.path)
        whole = [
            pair or (mx.zeros((inputs, rank)), mx.zeros((rank, outputs)))
            for pair, (inputs, outputs) in zip(of_sections, place.shapes.values(), strict=True)
        ]
        if isinstance(place.linear, PackedLinear):
            _attach(place, whole, scale)
            if place.layer is not place.linear:
                wrapped.append((place.path, place.linear))
        else:
            wrapped.append((place.path, _wrapped(place, whole, scale)))
    for place in places(model):
        if place.path in bare:
            if has_attached(place.linear):
                place.linear.detach()
            if place.layer is not place.linear:
                wrapped.append((place.path, place.linear))
    if wrapped:
        replace_modules(model, wrapped)
        dispatch.invalidate()


def _attach(place: Place, pairs: list[Pair], scale: float) -> None:
    a = mx.concatenate([a.T for a, _ in pairs])[None]
    b = mx.concatenate([(scale * b.astype(mx.float32)).astype(b.dtype).T for _, b in pairs])[None]
    # A CPU reads any type at its own width; Metal's kernels read that of the activations.
    if dispatch.device() == "gpu":
        a, b = a.astype(activation_dtype()), b.astype(activation_dtype())
    a, b = mx.contiguous(a), mx.contiguous(b)
    mx.eval(a, b)
    prefer_huge_pages([a, b])
    place.linear.attach(a, b, place.sections or (b.shape[1],))


def _wrapped(place: Place, pairs: list[Pair], scale: float) -> LoRALinear:
    rank, trainable = pairs[0][0].shape[1], list(place.linear.trainable_parameters())
    # With a key of its own: the random A is replaced, and the caller's random numbers must not depend on it.
    key = mx.random.key(0)
    layer = LoRALinear(place.linear, rank, scale, sections=place.sections, key=key)
    a, b = ([pair[side].astype(activation_dtype()) for pair in pairs] for side in (0, 1))
    mx.eval(a, b)
    layer.lora_a, layer.lora_b = (a[0], b[0]) if place.sections is None else (a, b)
    layer.freeze()
    if trainable:  # only training an adapter freezes its base
        place.linear.unfreeze(recurse=False, keys=trainable)
    return layer.eval()


def detach_adapter(model: nn.Module) -> nn.Module:
    """The model as it was before: adapters off, LoRA layers replaced by what they wrap."""
    attach_pairs(model, (), 0, 1.0)
    return model


def attach_random_adapter(model: nn.Module, rank: int, seed: int = 0) -> nn.Module:
    """A random adapter of 16-bit numbers on every linear layer of every block, for benchmarks.

    Raises:
        RequestError: when no block has a linear layer that can carry one.
    """
    rng = np.random.default_rng(seed)
    found = places(model)
    if not found:
        raise RequestError("No block of this model has a linear layer that can carry an adapter.")

    def draw(rows: int, columns: int) -> mx.array:
        numbers = rng.standard_normal((rows, columns), dtype=np.float32) * rows**-0.5
        return mx.array(numbers).astype(mx.float16)

    # B is small, so that a random model's activations stay in their range.
    attach_pairs(
        model,
        ((p, [(draw(k, rank), 0.01 * draw(rank, n)) for k, n in p.shapes.values()]) for p in found),
        rank,
        scale=1.0,
    )
    return model


def adapter_arrays(model: nn.Module) -> dict[str, mx.array]:
    """The numbers of the adapter that a model runs or trains with, by layer; empty without one."""
    arrays = lora_tensors(model)
    for place in places(model):
        if has_attached(place.linear):
            attached = place.linear.low_rank(1)
            arrays |= {f"{place.path}.a": attached.a, f"{place.path}.b": attached.b}
    return arrays


def adapter_fingerprint(model: nn.Module) -> str | None:
    """What tells the adapter of a model from any other; None when it has none.

    It is that of the adapter as this model holds it: over a float and over a packed base one folder gives two.
    """
    arrays = adapter_arrays(model)
    if not arrays:
        return None
    scales = {p.path: p.layer.scale for p in places(model) if isinstance(p.layer, LoRALinear)}
    return arrays_fingerprint(scales, arrays)
