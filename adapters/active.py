"""The adapters and task masks that a model runs with: one for each row of a batch, or one for all rows.

    attach_adapter(model, "path/to/adapter")  # for all rows, until `detach_adapter`

    active = bind(model)
    with active.using(BatchAdapters.of([first, None, second])):
        logits = model(tokens, cache)  # three rows

Activating an adapter changes the arrays that the layers pass to their kernels, and nothing else. These arrays
are inputs of a traced decode step, which is traced again only for adapters of another rank or on other layers,
and for masks that keep other numbers of channels.

If rows have different masks, each feed-forward is computed for the rows of one mask at a time; everything else
is computed for all rows.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from afm_mlx.adapters.adapter_folder import embedding_use
from afm_mlx.adapters.lora import lora_layers, lora_tensors
from afm_mlx.adapters.resident import Base, ResidentAdapter, build_resident, open_masked
from afm_mlx.adapters.target_modules import (
    TargetModule,
    replace_layers,
    target_modules,
    target_shapes,
    unwrap_layers,
)
from afm_mlx.adapters.task_mask import feed_forwards
from afm_mlx.checkpoint.fingerprint import arrays_fingerprint
from afm_mlx.errors import RequestError
from afm_mlx.kernels import MAX_ADAPTERS, LowRank, Part
from afm_mlx.model.fused_layers import ACTIVE, AdaptedLinear, AdaptedStack, LinearWrapper
from afm_mlx.model.model import is_afm
from afm_mlx.quantization.packed_layers import LayerAdapters, PackedLinear

_NO_PART = Part(0, 0, 0)


class MaskRows(NamedTuple):
    """The rows of a batch that have the same task mask."""

    resident: ResidentAdapter | None  # one with the mask; None for rows without a mask
    # (rows,) int32, indices into the batch; None if all rows of any batch have the mask
    rows: mx.array | None
    slots: tuple[int, ...]  # indices into `BatchAdapters.residents` of the adapters with the mask

    @property
    def layout(self) -> str:
        """Text that is equal for rows that can share a traced step."""
        count = "all" if self.rows is None else str(self.rows.size)
        kept = "whole" if self.resident is None else str(self.resident.layout)
        return f"{kept}:{count}:{','.join(map(str, self.slots))}"


@dataclass(frozen=True, eq=False)
class BatchAdapters:
    """The adapters of a batch's rows, in the form that kernels read."""

    residents: tuple[ResidentAdapter, ...]  # distinct ones
    scales: mx.array  # (adapters,) float32, alpha / rank of each
    # (B,) int32, each row's index into `residents`, -1 for none; None if all rows of any batch use the first
    slots: mx.array | None
    # several if rows differ in their masks; none if no row has one
    masks: tuple[MaskRows, ...] = ()

    @classmethod
    def of(cls, rows: Sequence[ResidentAdapter | None]) -> BatchAdapters:
        """Return adapters for a batch whose row i uses `rows[i]`, or none; up to `MAX_ADAPTERS` may differ."""
        # Batches with the same layouts, and as many rows of a mask, share a trace in any order of rows.
        distinct = {id(row): row for row in rows if row is not None}.values()
        counts = Counter(map(_mask_fingerprint, rows))
        residents = tuple(sorted(distinct, key=lambda r: (r.layout, counts[_mask_fingerprint(r)])))
        if len(residents) > MAX_ADAPTERS:
            raise RequestError(
                f"A batch has {len(residents)} different adapters; at most {MAX_ADAPTERS} run side by side."
            )
        index = {id(resident): slot for slot, resident in enumerate(residents)}
        slots = [-1 if row is None else index[id(row)] for row in rows]
        scales = mx.array(np.array([resident.scale for resident in residents], np.float32))
        return cls(
            residents, scales, mx.array(np.array(slots, np.int32)), _mask_rows(rows, residents)
        )

    @classmethod
    def everywhere(cls, resident: ResidentAdapter) -> BatchAdapters:
        """Return adapters for a batch of any number of rows, all of which use one adapter."""
        masks = () if resident.mask is None else (MaskRows(resident, None, (0,)),)
        return cls((resident,), mx.array([resident.scale], mx.float32), None, masks)

    @property
    def layout(self) -> str:
        """Text that is equal for batches that can share a traced step."""
        kind = "all" if self.slots is None else "rows"
        layouts = [str(resident.layout) for resident in self.residents]
        return " ".join([kind, *layouts, *(f"mask {each.layout}" for each in self.masks)])

    @cached_property
    def slot_arrays(self) -> dict[str, Any]:
        """Arrays for rows that differ in their adapters: rows of each slot, and the way back."""
        slots = np.array(self.slots)
        rows = [np.flatnonzero(slots == slot) for slot in self.slots_in_use]
        return {
            "slot_rows": [mx.array(each.astype(np.int32)) for each in rows],
            "slot_order": mx.array(np.argsort(np.concatenate(rows)).astype(np.int32)),
        }

    @cached_property
    def slots_in_use(self) -> list[int]:
        """The distinct slots of rows, ascending; -1 is of rows without an adapter."""
        return [0] if self.slots is None else sorted(set(self.slots.tolist()))

    @cached_property
    def mask_arrays(self) -> dict[str, Any]:
        """Arrays for rows that differ in their masks: rows and slots of each mask, and the way back."""
        rows = [each.rows for each in self.masks if each.rows is not None]
        order = np.argsort(np.concatenate([np.array(each) for each in rows]))
        slots = np.array(self.slots)
        return {
            "mask_rows": rows,
            "mask_order": mx.array(order.astype(np.int32)),
            "mask_slots": [mx.array(slots[np.array(each)]) for each in rows],
        }


def _mask_fingerprint(row: ResidentAdapter | None) -> str:
    """Return the fingerprint of a row's mask; empty without one."""
    return "" if row is None or row.mask is None else row.mask.fingerprint


def _mask_rows(
    rows: Sequence[ResidentAdapter | None], residents: Sequence[ResidentAdapter]
) -> tuple[MaskRows, ...]:
    """Return the rows of each mask, in the order of layouts; nothing if no row has a mask."""
    found: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        found.setdefault(_mask_fingerprint(row), []).append(index)
    if set(found) == {""}:
        return ()
    made = [
        MaskRows(
            rows[each[0]] if mask else None,
            None if len(found) == 1 else mx.array(np.array(each, np.int32)),
            tuple(
                slot
                for slot, resident in enumerate(residents)
                if _mask_fingerprint(resident) == mask
            ),
        )
        for mask, each in found.items()
    ]
    return tuple(sorted(made, key=lambda group: group.layout))


class ActiveAdapters(dict[str, Any]):
    """The adapters of the current batch, which the layers of a model look up.

    The items are the adapters' arrays. The object is part of the model's state, so MLX's transformations see
    the arrays.
    """

    def __init__(self, has_stacks: bool = False) -> None:
        super().__init__()
        self.has_stacks = has_stacks  # whether adapters change stacks of matrices
        self.batch: BatchAdapters | None = None
        self._group = 0  # index of the mask whose rows are computed
        self._slot: int | None = None  # of the rows that are computed; None if they may differ
        self._cut: frozenset[str] = frozenset()  # paths of the layers that masks cut

    @property
    def layout(self) -> str:
        """Text that is equal for batches that can share a traced step; empty without adapters."""
        return "" if self.batch is None else self.batch.layout

    def set(self, batch: BatchAdapters | None) -> None:
        """Use a batch's adapters from now on, or none."""
        self.batch = batch if batch is not None and batch.residents else None
        self.clear()
        if self.batch is not None:
            self["numbers"] = [resident.numbers for resident in self.batch.residents]
            self["scales"] = self.batch.scales
            if self.batch.slots is not None:
                self["slots"] = self.batch.slots
            if self.batch.masks:
                self["masks"] = [
                    {} if each.resident is None else each.resident.masked
                    for each in self.batch.masks
                ]
            if len(self.batch.masks) > 1:
                self.update(self.batch.mask_arrays)
            if self.has_stacks and len(self.batch.slots_in_use) > 1:
                self.update(self.batch.slot_arrays)

    @contextlib.contextmanager
    def using(self, batch: BatchAdapters | None) -> Iterator[None]:
        """Use a batch's adapters inside the context, and the previous ones after it."""
        before = self.batch
        self.set(batch)
        try:
            yield
        finally:
            self.set(before)

    def bind_feed_forwards(self, model: nn.Module) -> None:
        """Make a model's feed-forwards compute by mask; raise `RequestError` if masks can't cut them."""
        layers, modules = feed_forwards(model), dict(model.named_modules())
        self._cut = frozenset(target.path for each in layers for target in each.targets)
        for each in layers:
            module = modules[each.path]
            module.by_mask = self.by_mask
            if not is_afm(model):
                kind: Any = type(module)
                module.__class__ = _by_mask_class(kind)

    def by_mask(self, compute: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
        """Return `compute(x)` for x (B, ...), computed for the rows of one mask at a time."""
        if self.get("mask_rows") is None:
            return compute(x)
        self._check_rows(x.shape[0])
        results = []
        try:
            for group, rows in enumerate(self["mask_rows"]):
                self._group = group
                results.append(compute(x[rows]))
        finally:
            self._group = 0
        return mx.concatenate(results)[self["mask_order"]]

    def by_slot(self, compute: Callable[..., mx.array], *arrays: mx.array) -> mx.array:
        """Return `compute(*arrays)`, whose second axis is of rows, computed for rows of one adapter at a time.

        For experts: they sort tokens, after which nobody knows whose rows they are of.
        """
        if self.batch is None:
            return compute(*arrays)
        results, slots, rows = [], self.batch.slots_in_use, self.get("slot_rows")
        try:
            for index, slot in enumerate(slots):
                self._slot = slot
                own = arrays if rows is None else [mx.take(a, rows[index], axis=1) for a in arrays]
                results.append(compute(*own))
        finally:
            self._slot = None
        if rows is None:
            return results[0]
        return mx.take(mx.concatenate(results, axis=1), self["slot_order"], axis=1)

    def mask_of(self, path: str) -> Mapping[str, mx.array] | None:
        """Return the parameters of a layer under the mask of the rows that are computed; None without one."""
        masks = self.get("masks")
        found: Mapping[str, mx.array] | None = (
            None if masks is None else masks[self._group].get(path)
        )
        return found

    def of_layer(self, target: TargetModule) -> LayerAdapters:
        """Return a function from a batch's number of rows to the target's `LowRank`, or to None without one."""
        widths = [width for _, width in target.part_shapes.values()]
        return partial(self._low_rank, target.path, tuple(accumulate(widths)))

    def of_stack(self, target: TargetModule) -> Callable[[], LowRank | None]:
        """Return a function to the `LowRank` of a stack's target, or to None without one."""
        assert target.sections is not None
        return partial(self._low_rank_of_stack, target.path, target.sections)

    def _low_rank_of_stack(self, path: str, sections: tuple[int, ...]) -> LowRank | None:
        if self.batch is None:
            return None
        parts = tuple(r.parts.get(path, _NO_PART) for r in self.batch.residents)
        slots = self.get("slots")
        if self._slot is not None:
            parts = tuple(p if i == self._slot else _NO_PART for i, p in enumerate(parts))
            slots = mx.array([self._slot])
        if not any(part.rank for part in parts):
            return None
        slots = _first_slots(1) if slots is None else slots
        return LowRank(tuple(self["numbers"]), parts, self["scales"], slots, sections)

    def _low_rank(self, path: str, sections: tuple[int, ...], batch: int) -> LowRank | None:
        if self.batch is None:
            return None
        residents, masks, slots = self.batch.residents, self.batch.masks, self.get("slots")
        is_cut = path in self._cut and masks
        parts = tuple(r.parts.get(path, _NO_PART) for r in residents)
        if is_cut:
            # Adapters of other masks have other shapes here, and none of the rows that are computed.
            own = masks[self._group].slots
            parts = tuple(part if i in own else _NO_PART for i, part in enumerate(parts))
        if not any(part.rank for part in parts):
            return None
        if is_cut and (taken := self.mask_of(path)) is not None:
            sections = taken["weight"].shape[:1]
        if slots is None:
            slots = _first_slots(batch)
        elif is_cut and len(masks) > 1:
            slots = self["mask_slots"][self._group]
        else:
            self._check_rows(batch)
        return LowRank(tuple(self["numbers"]), parts, self["scales"], slots, sections)

    def _check_rows(self, batch: int) -> None:
        rows = self["slots"].shape[0]
        if rows != batch:
            raise RequestError(f"Adapters were given for {rows} rows, and the batch has {batch}.")


@cache
def _by_mask_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class whose instances compute what a zoo model's feed-forward does, by mask."""

    def call(self: Any, x: mx.array) -> mx.array:
        return self.by_mask(partial(kind.__call__, self), x)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def bind(model: nn.Module) -> ActiveAdapters:
    """Make a model's layers look up their adapters in the model's one `ActiveAdapters`, and return it.

    Packed layers look up adapters themselves; other linear layers are wrapped (`afm_mlx.model.fused_layers`).
    Raises `RequestError` when no block has a linear layer, or the model has LoRA layers.
    """
    found = active_adapters(model)
    if found is not None:
        return found
    targets = target_modules(model)
    active = ActiveAdapters(any(target.is_stack for target in targets))
    if not targets:
        raise RequestError("No block of this model has a linear layer that can carry an adapter.")
    if any(isinstance(target.layer, LinearWrapper) for target in targets):
        raise RequestError(
            "The model has LoRA layers, which are for training. Save them (save_lora) and take them off "
            "(detach_adapter), or load the model again."
        )
    with contextlib.suppress(RequestError):  # what loads a mask says why the model takes none
        active.bind_feed_forwards(model)
    wrapped: list[tuple[str, nn.Module]] = []
    for module in model.modules() if active.has_stacks else ():
        if hasattr(module, "by_slot"):
            module.by_slot = active.by_slot
    for target in targets:
        if target.is_stack:
            wrapped.append((target.path, AdaptedStack(target.layer, active.of_stack(target))))
            continue
        adapters, mask = active.of_layer(target), partial(active.mask_of, target.path)
        if isinstance(target.layer, PackedLinear):
            target.layer.adapters, target.layer.mask = adapters, mask
        else:
            wrapped.append((target.path, AdaptedLinear(target.layer, adapters, mask)))
    replace_layers(model, wrapped)
    model[ACTIVE] = active
    return active


def unbind(model: nn.Module) -> None:
    """Undo `bind`: layers look up no adapters, and wrappers are removed."""
    if model.pop(ACTIVE, None) is None:
        return
    unwrap_layers(model)
    for target in target_modules(model):
        if isinstance(target.layer, PackedLinear):
            target.layer.adapters = target.layer.mask = None
    for module in model.modules():
        if getattr(module, "by_slot", None) is not None:
            module.by_slot = None
        if module.__dict__.pop("by_mask", None) is not None and not is_afm(model):
            module.__class__ = type(module).__base__


def active_adapters(model: nn.Module) -> ActiveAdapters | None:
    """Return the `ActiveAdapters` of a model; None if `bind` was not called."""
    return model.get(ACTIVE)


@cache
def _first_slots(batch: int) -> mx.array:
    """Return the slots of rows that all use the first adapter; made on the host, outside the graph."""
    return mx.array(np.zeros(batch, np.int32))


# -- one adapter for all rows


def attach_adapter(
    model: nn.Module,
    path: str | Path | None,
    *,
    mask: str | Path | None = None,
    base_folder: str | Path | None = None,
    force: bool = False,
) -> nn.Module:
    """Run a model with an adapter for all rows, instead of any adapter that it has.

    Args:
        model: a model in eval mode.
        path: path of an adapter of any format; see `open_adapter`. None for `mask` alone.
        mask: folder of a task mask that the adapter runs with.
        base_folder: folder that the model was loaded from; see `Base.of`.
        force: accept an adapter that was made for another model, if its shapes fit.

    Returns:
        The model.

    Raises:
        CheckpointError: when the adapter belongs to another model, or does not fit.
    """
    resident = open_masked(path, mask, Base.of(model, base_folder, force)).read()
    if active_adapters(model) is None:
        unwrap_layers(model)  # removes LoRA layers
    bind(model).set(BatchAdapters.everywhere(resident))
    model.embedding_use = None if path is None else embedding_use(path)
    return model


def detach_adapter(model: nn.Module) -> nn.Module:
    """Remove the adapter and all layer wrappers from a model, and return the model."""
    unbind(model)
    unwrap_layers(model)
    model.embedding_use = None
    return model


def serving_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model with LoRA layers for the engine; `hand_over` gives it the adapter's numbers.

    The copy shares all arrays of the base, so it takes no memory for them.
    """
    served = copy.deepcopy(model)  # copies of MLX's arrays share their memory
    unwrap_layers(served)
    bind(served)
    return served.eval()


def hand_over(model: nn.Module, served: nn.Module) -> None:
    """Run `served`, the `serving_copy` of a model, with the numbers that the model's LoRA layers have now.

    Raises `CheckpointError` if a number is not finite, or too large for float16, in which adapters run.
    """
    scale = next(iter(lora_layers(model).values())).scale
    tensors, shapes = lora_tensors(model), target_shapes(served)
    resident = build_resident(tensors, scale, shapes, "The adapter in training")
    bind(served).set(BatchAdapters.everywhere(resident))


def attach_random_adapters(
    model: nn.Module, rank: int, seed: int = 0, count: int = 1, rows: int = 1
) -> nn.Module:
    """Run a model with `count` random adapters on every linear layer of its blocks, for benchmarks; return it.

    If there is one, all rows of any batch use it; several take turns among the `rows` of a batch. Raises
    `RequestError` when no block has a linear layer that can carry one.
    """
    active, shapes = bind(model), target_shapes(model)
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
    """Return the float16 tensors of a random adapter on all target modules, by their names in files."""
    rng, tensors = np.random.default_rng(seed), {}
    for target in target_modules(model):
        for end, (inputs, outputs) in target.shapes.items():
            a = rng.standard_normal((inputs, rank), dtype=np.float32) * inputs**-0.5
            # B is small, so that a random model's activations stay in their range.
            b = rng.standard_normal((rank, outputs), dtype=np.float32) * rank**-0.5 * 0.01
            tensors[f"{target.path}.lora_a{end}"] = a.astype(np.float16)
            tensors[f"{target.path}.lora_b{end}"] = b.astype(np.float16)
    return tensors


def adapter_arrays(model: nn.Module) -> dict[str, mx.array]:
    """Return the arrays of the adapters that a model runs or trains with, by name; empty without one."""
    arrays = lora_tensors(model)
    active = active_adapters(model)
    if active is not None and active.batch is not None:
        residents = active.batch.residents
        arrays |= {f"adapter.{i}": resident.numbers for i, resident in enumerate(residents)}
        arrays |= {
            f"adapter.{i}.{path}.{name}": array
            for i, resident in enumerate(residents)
            for path, parameters in resident.masked.items()
            for name, array in parameters.items()
        }
    return arrays


def unread_bytes(model: nn.Module) -> int:
    """Return the bytes of parameters that no row reads, because every row has a mask that replaces them."""
    active = active_adapters(model)
    if active is None or active.batch is None or not active.batch.masks:
        return 0
    if any(each.resident is None for each in active.batch.masks):
        return 0
    replaced = active.batch.residents[0].masked
    linears = {target.path: target.linear for target in target_modules(model)}
    return sum(linears[path][name].nbytes for path, names in replaced.items() for name in names)


def adapter_fingerprint(model: nn.Module) -> str | None:
    """Return the fingerprint of the adapter that a model runs or trains with; None without one."""
    active = active_adapters(model)
    if active is not None and active.batch is not None:
        return " ".join(resident.fingerprint for resident in active.batch.residents)
    arrays = lora_tensors(model)
    if not arrays:
        return None
    scales = {path: layer.scale for path, layer in lora_layers(model).items()}
    return arrays_fingerprint(scales, arrays)
