"""What a training run is about to do: parameters, data, steps, and an estimate of its memory."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from afm_mlx.adapters.lora import lora_layers
from afm_mlx.checkpoint.stored_layers import quantization_of
from afm_mlx.kernels import BITS
from afm_mlx.quantization.packed_layers import PARTS, activation_dtype
from afm_mlx.training.loop.training_options import TrainingOptions
from afm_mlx.training.methods.data_splits import DataSplits
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.training_memory import estimate_memory


@dataclass(frozen=True)
class Plan:
    """What a training run is about to do, to be shown before it begins.

    Args:
        parameters: number of the model's parameters, LoRA's included; a packed matrix counts as the numbers
            that its codes stand for.
        trainable: number of trainable parameters.
        data: the splits of the data set.
        options: options of the loop, with all defaults filled in.
        memory: estimated bytes; None where there is no estimate.
    """

    parameters: int
    trainable: int
    data: DataSplits
    options: TrainingOptions
    memory: int | None

    @property
    def steps_per_epoch(self) -> float:
        return self.data.train.per_epoch / self.options.grad_accumulation_steps


def make_plan(
    model: nn.Module,
    source: ModelSource,
    kind: str,
    teacher: nn.Module | None,
    data: DataSplits,
    options: TrainingOptions,
) -> Plan:
    """Describe the training of a prepared model; `kind` is the method's."""
    trainable = sum(array.size for _, array in tree_flatten(model.trainable_parameters()))
    memory = None
    if source.is_afm:
        memory = _memory(model, source, kind, data, options)
        # A frozen model keeps nothing for a backward pass.
        memory += 0 if teacher is None else _nbytes(teacher)
    return Plan(_count(model), trainable, data, options, memory)


def _memory(
    model: nn.Module, source: ModelSource, kind: str, data: DataSplits, options: TrainingOptions
) -> int:
    batch = data.train(0)
    rows, length = batch.inputs.shape
    ranks = [layer.rank for layer in lora_layers(model).values()]
    bits = quantization_of(source.values, source.folder).get("bits")
    return estimate_memory(
        model.args,
        "full" if kind == "draft" else kind,
        batch_size=rows,
        length=length,
        rank=ranks[0] if ranks else 1,
        base_bits=bits if bits in BITS else None,
        dtype=activation_dtype(),
        grad_checkpoint=options.grad_checkpoint,
        ema=options.ema_decay is not None,
        accumulates=options.grad_accumulation_steps > 1,
        targets=batch.labels.size,
    ).total


def _nbytes(model: nn.Module) -> int:
    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


def _count(model: nn.Module) -> int:
    """Parameters of a model; of a packed matrix the numbers that it stands for, and not its scales."""
    packed = [m for m in model.modules() if m.get("weight", _FLOAT).dtype == mx.uint32]
    more = sum(m["weight"].size * 32 // m.bits for m in packed)
    less = sum(m[part].size for m in packed for part in PARTS if part in m)
    return more - less + sum(array.size for _, array in tree_flatten(model.parameters()))


_FLOAT = mx.array(0.0)
