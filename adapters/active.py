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
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from afm_mlx.adapters.places import LinearWrapper, Place, places
from afm_mlx.adapters.resident import ResidentAdapter
from afm_mlx.config import ModelConfig
from afm_mlx.errors import RequestError
from afm_mlx.kernels import MAX_ADAPTERS, LowRank, Part, dispatch
from afm_mlx.kernels.reference import low_rank_product
from afm_mlx.quantization.packed_layers import PackedLinear
from afm_mlx.quantization.quantize import replace_modules

_NO_PART = Part(0, 0, 0)


@dataclass(frozen=True, eq=False)
class BatchAdapters:
    """The adapters of a batch's rows, as the kernels take them.

    Args:
        residents: each once.
        scales: (adapters,) float32.
        slots: (B,) int32, index of each row's adapter, -1 for none; None when all rows of any batch use the
            first one.
    """

    residents: tuple[ResidentAdapter, ...]
    scales: mx.array
    slots: mx.array | None

    @classmethod
    def of(cls, rows: Sequence[ResidentAdapter | None]) -> BatchAdapters:
        """Of a batch whose rows use these adapters.

        Raises:
            RequestError: for more than `MAX_ADAPTERS` different ones.
        """
        # In the order of layouts, so that the order of rows makes no other trace.
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
        """One adapter for all rows, however many there are."""
        return cls((resident,), _scales((resident,)), None)

    @property
    def layout(self) -> str:
        """Equal for batches that one trace serves."""
        kind = "all" if self.slots is None else "rows"
        return " ".join([kind, *(str(resident.layout) for resident in self.residents)])


def _scales(residents: Sequence[ResidentAdapter]) -> mx.array:
    return mx.array(np.array([resident.scale for resident in residents], np.float32))


class ActiveAdapters:
    """What all layers of a model ask for the adapters of the batch at hand.

    `arrays` holds them in a form that MLX's transformations see: it is part of the model's state.
    """

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {}
        self.batch: BatchAdapters | None = None

    @property
    def layout(self) -> str:
        """What a trace depends on besides the arrays' shapes."""
        return "" if self.batch is None else self.batch.layout

    def set(self, batch: BatchAdapters | None) -> None:
        """Use these adapters from now on; None for none."""
        self.batch = batch if batch is not None and batch.residents else None
        self.arrays.clear()
        if self.batch is not None:
            self.arrays["numbers"] = [resident.numbers for resident in self.batch.residents]
            self.arrays["scales"] = self.batch.scales
            if self.batch.slots is not None:
                self.arrays["slots"] = self.batch.slots

    @contextlib.contextmanager
    def using(self, batch: BatchAdapters | None) -> Iterator[None]:
        """Use these adapters while a step's graph is made, and then the ones before."""
        before = self.batch
        self.set(batch)
        try:
            yield
        finally:
            self.set(before)

    def low_rank(self, path: str, sections: tuple[int, ...], batch: int) -> LowRank | None:
        """What a layer adds to the products of a batch's rows; None for nothing."""
        if self.batch is None:
            return None
        parts = tuple(r.parts.get(path, _NO_PART) for r in self.batch.residents)
        if not any(part.rank for part in parts):
            return None
        slots = self.arrays.get("slots")
        if slots is None:
            slots = _first_slots(batch)
        elif slots.shape != (batch,):
            raise RequestError(
                f"The adapters are those of {slots.shape[0]} rows, and the batch has {batch}."
            )
        numbers = tuple(self.arrays["numbers"])
        return LowRank(numbers, parts, self.arrays["scales"], slots, sections)


class AdapterPlace:
    """A layer's link to its model's adapters."""

    def __init__(self, active: ActiveAdapters, place: Place):
        self._active = active
        self._path = place.path
        outputs = sum(width for _, width in place.shapes.values())
        self._sections = place.sections or (outputs,)

    def low_rank(self, batch: int) -> LowRank | None:
        """See `ActiveAdapters.low_rank`."""
        return self._active.low_rank(self._path, self._sections, batch)


class AdaptedLinear(LinearWrapper):
    """`linear(x)` plus what the active adapters add: for models whose blocks know nothing of adapters."""

    def __init__(self, linear: nn.Module, place: AdapterPlace):
        super().__init__()
        self.linear = linear
        self._place = place
        self.train(linear.training)

    def __call__(self, x: mx.array) -> mx.array:
        """(B, ..., K) to (B, ..., N) in the dtype that `linear` gives."""
        y, low_rank = self.linear(x), self._place.low_rank(x.shape[0])
        return y if low_rank is None else y + low_rank_product(x, low_rank).astype(y.dtype)


def bind(model: nn.Module) -> ActiveAdapters:
    """Link a model's layers with an `ActiveAdapters`, the same one every time.

    Blocks of an AFM model ask for it themselves (`afm_mlx.model.fused_layers`); in any other model, linear layers
    that aren't packed are wrapped.

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
    is_afm = isinstance(getattr(model, "args", None), ModelConfig)
    for place in here:
        if is_afm or isinstance(place.linear, PackedLinear):
            set_adapter_place(place.linear, AdapterPlace(active, place))
    if not is_afm:
        others = [place for place in here if not isinstance(place.linear, PackedLinear)]
        wrapped = [(p.path, AdaptedLinear(p.linear, AdapterPlace(active, p))) for p in others]
        replace_modules(model, wrapped)
        dispatch.invalidate()
    object.__setattr__(model, "active_adapters", active)
    model["_adapter_arrays"] = active.arrays  # a name with an underscore is state, and no parameter
    return active


def unbind(model: nn.Module) -> None:
    """Undo `bind`."""
    if active_adapters(model) is None:
        return
    here = places(model)
    for place in here:
        set_adapter_place(place.linear, None)
    wrapped = [(p.path, p.linear) for p in here if isinstance(p.layer, AdaptedLinear)]
    if wrapped:
        replace_modules(model, wrapped)
        dispatch.invalidate()
    object.__setattr__(model, "active_adapters", None)
    model.pop("_adapter_arrays", None)


def active_adapters(model: nn.Module) -> ActiveAdapters | None:
    """What `bind` has made; None when it was not called."""
    return getattr(model, "active_adapters", None)


def set_adapter_place(layer: nn.Module, place: AdapterPlace | None) -> None:
    """Have a layer add a place's adapters; it is neither a parameter nor a submodule."""
    object.__setattr__(layer, "adapter_place", place)


_SLOTS: dict[int, mx.array] = {}


def _first_slots(batch: int) -> mx.array:
    """Every row uses the first adapter. Made on the host: no operation in the graph."""
    if batch not in _SLOTS:
        _SLOTS[batch] = mx.array(np.zeros(batch, np.int32))
    return _SLOTS[batch]
