"""Which adapters a model adds, and to which rows of a batch.

    active = bind(model)
    with active.using(BatchAdapters.of([first, None, second])):
        logits = model(tokens, cache)  # three rows

Activating an adapter changes the arrays that the layers hand to their kernels, and nothing else. They are
inputs of a traced decode step, which is traced anew only for adapters that lie differently in their arrays:
of another rank, or on other layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from afm_mlx.adapters.layer_places import Place, places, replace_layers, unwrap_layers
from afm_mlx.adapters.resident import ResidentAdapter
from afm_mlx.errors import RequestError
from afm_mlx.kernels import MAX_ADAPTERS, LowRank, Part
from afm_mlx.model.fused_layers import ACTIVE, AdaptedLinear, LinearWrapper
from afm_mlx.quantization.packed_layers import LayerAdapters, PackedLinear

_NO_PART = Part(0, 0, 0)


@dataclass(frozen=True, eq=False)
class BatchAdapters:
    """The adapters of a batch's rows, as the kernels take them.

    Args:
        residents: the different adapters, each once.
        scales: (adapters,) float32, alpha / rank of each.
        slots: (B,) int32, index of each row's adapter, -1 for none; None when all rows of any batch use the
            first one.
    """

    residents: tuple[ResidentAdapter, ...]
    scales: mx.array
    slots: mx.array | None

    @classmethod
    def of(cls, rows: Sequence[ResidentAdapter | None]) -> BatchAdapters:
        """Make a batch from the adapter of each row, None for a row without one.

        Raises:
            RequestError: for more than `MAX_ADAPTERS` different ones.
        """
        # Sorted by layout: batches whose rows have the same layouts in another order share a trace.
        distinct = {id(row): row for row in rows if row is not None}.values()
        residents = tuple(sorted(distinct, key=lambda resident: resident.layout))
        if len(residents) > MAX_ADAPTERS:
            raise RequestError(
                f"A batch has {len(residents)} different adapters; at most {MAX_ADAPTERS} run side by side."
            )
        index = {id(resident): slot for slot, resident in enumerate(residents)}
        slots = [-1 if row is None else index[id(row)] for row in rows]
        return cls(residents, _scales(residents), mx.array(np.array(slots, np.int32)))

    @classmethod
    def everywhere(cls, resident: ResidentAdapter) -> BatchAdapters:
        """Make a batch in which all rows, however many there are, use one adapter."""
        return cls((resident,), _scales((resident,)), None)

    @property
    def layout(self) -> str:
        """Text that is equal for batches that can share a trace."""
        kind = "all" if self.slots is None else "rows"
        return " ".join([kind, *(str(resident.layout) for resident in self.residents)])


def _scales(residents: Sequence[ResidentAdapter]) -> mx.array:
    return mx.array(np.array([resident.scale for resident in residents], np.float32))


class ActiveAdapters(dict[str, Any]):
    """The adapters of the batch at hand, which the layers of a model ask for.

    Its items are their arrays. It lies in the model's state, where MLX's transformations see them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.batch: BatchAdapters | None = None

    @property
    def layout(self) -> str:
        """Text that a trace depends on besides the arrays' shapes."""
        return "" if self.batch is None else self.batch.layout

    def set(self, batch: BatchAdapters | None) -> None:
        """Use these adapters from now on; None for none."""
        self.batch = batch if batch is not None and batch.residents else None
        self.clear()
        if self.batch is not None:
            self["numbers"] = [resident.numbers for resident in self.batch.residents]
            self["scales"] = self.batch.scales
            if self.batch.slots is not None:
                self["slots"] = self.batch.slots

    @contextlib.contextmanager
    def using(self, batch: BatchAdapters | None) -> Iterator[None]:
        """Use these adapters while a step's graph is made, and afterwards those from before."""
        before = self.batch
        self.set(batch)
        try:
            yield
        finally:
            self.set(before)

    def of_layer(self, place: Place) -> LayerAdapters:
        """Return the function that the layer at a place calls for its adapters."""
        outputs = sum(width for _, width in place.shapes.values())
        return partial(self._low_rank, place.path, place.sections or (outputs,))

    def _low_rank(self, path: str, sections: tuple[int, ...], batch: int) -> LowRank | None:
        if self.batch is None:
            return None
        parts = tuple(r.parts.get(path, _NO_PART) for r in self.batch.residents)
        if not any(part.rank for part in parts):
            return None
        slots = self.get("slots")
        if slots is None:
            slots = _first_slots(batch)
        elif slots.shape != (batch,):
            raise RequestError(
                f"The adapters are those of {slots.shape[0]} rows, and the batch has {batch}."
            )
        return LowRank(tuple(self["numbers"]), parts, self["scales"], slots, sections)


def bind(model: nn.Module) -> ActiveAdapters:
    """Have a model's layers ask an `ActiveAdapters` for adapters, and return it: the same one every time.

    Packed layers do so themselves; other linear layers are wrapped (`afm_mlx.model.fused_layers`).

    Raises:
        RequestError: when no block has a linear layer, or the model has LoRA layers, which would hide them.
    """
    found = active_adapters(model)
    if found is not None:
        return found
    active, here = ActiveAdapters(), places(model)
    if not here:
        raise RequestError("No block of this model has a linear layer that can carry an adapter.")
    if any(isinstance(place.layer, LinearWrapper) for place in here):
        raise RequestError(
            "The model has LoRA layers, which are for training. Save them (save_lora) and take them off "
            "(detach_adapter), or load the model anew."
        )
    wrapped: list[tuple[str, nn.Module]] = []
    for place in here:
        adapters = active.of_layer(place)
        if isinstance(place.layer, PackedLinear):
            place.layer.adapters = adapters
        else:
            wrapped.append((place.path, AdaptedLinear(place.layer, adapters)))
    replace_layers(model, wrapped)
    model[ACTIVE] = active
    return active


def unbind(model: nn.Module) -> None:
    """Undo `bind`."""
    if model.pop(ACTIVE, None) is None:
        return
    unwrap_layers(model)
    for place in places(model):
        if isinstance(place.layer, PackedLinear):
            place.layer.adapters = None


def active_adapters(model: nn.Module) -> ActiveAdapters | None:
    """The `ActiveAdapters` of a model; None when `bind` was not called."""
    return model.get(ACTIVE)


@cache
def _first_slots(batch: int) -> mx.array:
    """Slots of rows that all use the first adapter. Made on the host: no operation in the graph."""
    return mx.array(np.zeros(batch, np.int32))
