"""The recipe of a training run: model, data and options, the batches read from the data, and the plan."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from afm_mlx.adapters.lora import lora_layers
from afm_mlx.checkpoint.stored_layers import quantization_of
from afm_mlx.errors import ConfigError, DataError
from afm_mlx.kernels import BITS
from afm_mlx.loading.resolve import EMBEDDED_MODEL
from afm_mlx.quantization.packed_layers import PARTS, activation_dtype
from afm_mlx.ranks import ALONE, Ranks
from afm_mlx.training.data.batches import (
    ROW_MULTIPLE,
    SAMPLES_OF_A_ROW,
    AnyBatches,
    Batches,
)
from afm_mlx.training.data.mask_batches import MaskBatches
from afm_mlx.training.data.rounding import round_up
from afm_mlx.training.data.samples import Sample, has_split, load_split
from afm_mlx.training.loop.losses import check_divergence
from afm_mlx.training.loop.masked_loss import PREDICTOR
from afm_mlx.training.loop.training_options import TrainingOptions
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.training_memory import estimate_memory, predictor_memory

MAX_WARMUP = 100  # steps, for `warmup_share`


@dataclass(frozen=True)
class Recipe:
    """The arguments of a training run that all methods have: model, data, options, and a teacher.

    Args:
        data: a folder with train.jsonl, and optionally valid.jsonl and test.jsonl; or one file.
        options: options of the loop; their seed also draws the shuffle and new LoRA layers.
        model: the model to start from: a folder, a hub id, the embedded model's name; or a draft model of
            random weights, `FreshSource.for_target(...)`.
        epochs: passes over the data; replaces `options.iters`.
        steps_between: minimum and maximum number of steps that `epochs` is converted to; pass None for no
            limits.
        warmup_share: share of the steps that warm up, but no more than 100 steps; replaces
            `options.warmup_iters`.
        warmup_epochs: passes over the data that warm up; replaces `options.warmup_iters`.
        batch_size: rows of a micro-batch.
        max_seq_length: most tokens of a sample, and of a row. None allows a sample 2,048, or the model's
            context if that is less, and a packed row about four samples.
        packing: put several samples into a row; by default if the model can keep them apart.
        prompt_weight: loss weight of tokens that the assistant did not write.
        features: maps "prompt", "completion", "messages" or "text" to the key that the data uses for it.
        teacher: model to imitate; "self" for `model` as it is before quantization-aware training.
        teacher_adapter: folder of an adapter that the teacher runs with.
        force: accept adapters that were made for other models, if their shapes fit.
        distillation_weight, distillation_temperature, divergence: see `losses.Distillation`.
        test: measure test.jsonl before and after training.
        test_batches: number of measured batches, -1 for all.
    """

    data: str | Path
    options: TrainingOptions
    model: str | Path | ModelSource = EMBEDDED_MODEL
    epochs: float | None = None
    steps_between: tuple[int, int] | None = None
    warmup_share: float | None = None
    warmup_epochs: float | None = None
    batch_size: int = 4
    max_seq_length: int | None = None
    packing: bool | None = None
    prompt_weight: float = 0.0
    features: Mapping[str, str] = field(default_factory=dict)
    teacher: str | Path | None = None
    distillation_weight: float = 1.0
    distillation_temperature: float = 1.0
    teacher_adapter: str | Path | None = None
    force: bool = False
    divergence: str = "forward"
    test: bool = False
    test_batches: int = -1

    def __post_init__(self) -> None:
        check_divergence(self.divergence)
        if self.warmup_share is not None and self.warmup_epochs is not None:
            raise ConfigError("warmup_share and warmup_epochs both set the warm-up; leave one out.")
        if self.teacher_adapter is not None and self.teacher is None:
            raise ConfigError("teacher_adapter is given without a teacher to put it on; name both.")

    def loop_options(self, per_epoch: int) -> TrainingOptions:
        """Return the loop's options, with epochs and shares converted to steps of `per_epoch` micro-batches.

        Raises `ConfigError` when the warm-up is as long as the run.
        """
        options, iters, warmup = self.options, self.options.iters, self.options.warmup_iters
        micro_batches = options.grad_accumulation_steps  # of a step
        fault = f"warmup_iters is {warmup}"
        if self.epochs is not None:
            iters = max(1, math.ceil(self.epochs * per_epoch / micro_batches))
            if self.steps_between is not None:
                fewest, most = self.steps_between
                iters = min(max(iters, fewest), most)
        if self.warmup_epochs is not None:
            warmup = math.ceil(self.warmup_epochs * per_epoch / micro_batches)
            fault = f"A warm-up of {self.warmup_epochs:g} epochs is {warmup} steps"
        elif self.warmup_share is not None:
            warmup = min(MAX_WARMUP, int(self.warmup_share * iters))
        if warmup >= iters:
            raise ConfigError(
                f"{fault}, and the run has {iters} steps ({iters * micro_batches / per_epoch:.3g} epochs); "
                "allowed are fewer than these. Train longer (--iters), or warm up for less (--warmup-iters)."
            )
        return dataclasses.replace(options, iters=iters, warmup_iters=warmup)


MAX_SEQ_LENGTH = 2048  # mlx-lm's default; less where the model's context is shorter


@dataclass(frozen=True)
class DataSplits:
    """A data set; a split is None if it has no file or is not needed."""

    train: AnyBatches
    valid: AnyBatches | None
    test: AnyBatches | None


ReadSplit: TypeAlias = Callable[[Recipe, ModelSource, str], AnyBatches]
"""Reads and tokenizes a split, as `read_split` does."""


def read_data(recipe: Recipe, source: ModelSource, read: ReadSplit | None = None) -> DataSplits:
    """Read and tokenize all splits that a recipe needs, each by `read`, which is `read_split` by default.

    Raises `DataError`, which names the lines that can't be used, or says that one file has no test; and
    `ConfigError` for packed rows and a model that can't keep samples apart.
    """
    if recipe.test and Path(recipe.data).is_file():
        raise DataError(
            f"{recipe.data} is one file, all of which is trained on; there is nothing to test. Put it into a "
            "folder as train.jsonl, with a test.jsonl, or leave the test out."
        )
    read = read or read_split
    return DataSplits(
        read(recipe, source, "train"),
        read(recipe, source, "valid") if has_split(recipe.data, "valid") else None,
        read(recipe, source, "test") if recipe.test else None,
    )


def max_sample_length(recipe: Recipe, source: ModelSource) -> int:
    """Return the most tokens of a sample: the recipe's, or mlx-lm's default, within the model's context."""
    # Positions restart with each sample of a row, so the model's context limits samples, not rows.
    contexts = [source.values.get("context_length")]
    if recipe.max_seq_length is None:  # mlx-lm's models have another key
        contexts.append(source.values.get("max_position_embeddings"))
    limit = MAX_SEQ_LENGTH if recipe.max_seq_length is None else recipe.max_seq_length
    return min([limit, *(n for n in contexts if type(n) is int and n > 1)])


def is_packed(recipe: Recipe, source: ModelSource) -> bool:
    """Return True if a row holds several samples; raise `ConfigError` if the model can't keep them apart."""
    packed = source.is_afm if recipe.packing is None else recipe.packing
    if packed and not source.is_afm:
        raise ConfigError(
            "Several samples in a row need a mask that models of mlx-lm don't take. Leave packing out "
            "(--no-packing)."
        )
    return packed


def read_split(recipe: Recipe, source: ModelSource, split: str) -> Batches:
    """Read and tokenize the split "train", "valid" or "test"; raises as `read_data` does."""
    samples, options = read_batches(recipe, source, split)
    return Batches(samples, **options)


class BatchOptions(TypedDict):
    """The arguments of `Batches` that follow from a recipe and its data."""

    batch_size: int
    length: int
    packed: bool
    seed: int
    shuffle: bool


def read_batches(
    recipe: Recipe, source: ModelSource, split: str
) -> tuple[list[Sample], BatchOptions]:
    """Read and tokenize a split, as `read_split` does; return its samples, and how to lay them out."""
    packed = is_packed(recipe, source)
    limit = max_sample_length(recipe, source)
    samples = load_split(
        recipe.data,
        split,
        source.tokenizer,
        max_seq_length=limit,
        prompt_weight=recipe.prompt_weight,
        features=recipe.features,
    )
    length = recipe.max_seq_length or limit
    if packed:  # no longer than it takes to put all samples into one batch
        inputs = [len(sample.tokens) - 1 for sample in samples]
        longest, total = max([*inputs, 1]), sum(inputs)
        wanted = max(longest, math.ceil(total / recipe.batch_size))
        if recipe.max_seq_length is None:
            # Attention's memory grows with the square of a row, and four samples need little padding.
            wanted = min(wanted, max(longest, math.ceil(SAMPLES_OF_A_ROW * total / len(inputs))))
        length = min(round_up(wanted, ROW_MULTIPLE), length)
    return samples, BatchOptions(
        batch_size=recipe.batch_size,
        length=length,
        packed=packed,
        seed=recipe.options.seed,
        shuffle=split == "train",
    )


@dataclass(frozen=True)
class Plan:
    """The size of a training run, to be shown before it begins."""

    parameters: int  # the model's, LoRA's included; each code of a packed matrix counts as one
    trainable: int  # parameters
    data: DataSplits
    options: TrainingOptions
    memory: int | None  # estimated bytes of each rank; None for models of mlx-lm
    ranks: int = 1  # which split each batch

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
    ranks: Ranks = ALONE,
) -> Plan:
    """Return the plan for training a prepared model; `kind` is `Method.kind`."""
    trainable = sum(array.size for _, array in tree_flatten(model.trainable_parameters()))
    parameters = sum(array.size for _, array in tree_flatten(model.parameters()))
    for module in model.modules():
        if "weight" in module and module["weight"].dtype == mx.uint32:
            # The codes of a packed matrix count as parameters, and its scales don't.
            parameters += module["weight"].size * 32 // module.bits
            parameters -= sum(module[part].size for part in PARTS if part in module)
    memory = None
    if source.is_afm:
        rows, length, targets = ranks.share(data.train).shape
        lora_ranks = [layer.rank for layer in lora_layers(model).values()]
        bits = quantization_of(source.values, source.folder).get("bits")
        loop: dict[str, Any] = {
            "dtype": activation_dtype(),
            "ema": options.ema_decay is not None,
            "accumulates": options.grad_accumulation_steps > 1 or ranks.size > 1,
            "muon": options.optimizer == "muon",
        }
        estimate = estimate_memory(
            model.args,
            "lora" if lora_ranks else {"draft": "full"}.get(kind, kind),
            batch_size=rows,
            length=length,
            rank=lora_ranks[0] if lora_ranks else 1,
            base_bits=bits if bits in BITS else None,
            grad_checkpoint=options.grad_checkpoint,
            targets=targets,
            **loop,
        )
        if PREDICTOR in model:
            assert isinstance(data.train, MaskBatches)
            predictor = model[PREDICTOR]
            prompts, width = data.train.prompts_shape
            head = predictor.w1.size + predictor.w2.size
            estimate += predictor_memory(
                predictor.body.args, head, prompts=prompts, length=width, **loop
            )
        memory = estimate.total
        # A frozen model keeps nothing for a backward pass.
        frozen = {} if teacher is None else teacher.parameters()
        memory += sum(array.nbytes for _, array in tree_flatten(frozen))
    return Plan(parameters, trainable, data, options, memory, ranks.size)
