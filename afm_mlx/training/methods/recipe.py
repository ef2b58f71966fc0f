"""What every kind of training takes, and the data that it reads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from afm_mlx.errors import ConfigError, DataError
from afm_mlx.loading.resolve import EMBEDDED_MODEL
from afm_mlx.training.data.batches import ROW_MULTIPLE, Batches
from afm_mlx.training.data.samples import Sample, has_split, load_split
from afm_mlx.training.loop.losses import check_divergence
from afm_mlx.training.loop.training_options import TrainingOptions
from afm_mlx.training.methods.source import Source

MAX_WARMUP = 100  # steps, where a share is asked for
MAX_SEQ_LENGTH = 2048  # mlx-lm's default; less where the model's context is shorter
_SAMPLES_OF_A_ROW = 4  # of the mean length, where nobody says how long rows are


@dataclass(frozen=True)
class Recipe:
    """What every kind of training takes.

    Args:
        data: a folder with train.jsonl, and valid.jsonl and test.jsonl where there are any; or one file.
        options: of the loop; its seed is that of the shuffle and of new LoRA layers too.
        model: what training starts from: a folder, a hub id, the embedded model; or a draft model of random
            weights, `FreshSource.for_target(...)`.
        epochs: passes over the data, in the place of `options.iters`.
        steps_between: the fewest and the most steps that these epochs may become; None for any.
        warmup_share: of the steps, in the place of `options.warmup_iters`; 100 steps at most.
        warmup_epochs: likewise in passes over the data.
        batch_size: rows of a micro-batch.
        max_seq_length: the most tokens of a sample, and of a row. With None a sample may have 2,048, or the
            model's context if that is less, and a packed row takes some four samples.
        packing: put several samples into a row; None does where the model can keep them apart.
        prompt_weight: of the loss of what the assistant did not write.
        features: what the data calls "prompt", "completion", "messages" or "text", by these names.
        teacher: model to be imitated; "self" is `model` before quantization-aware training.
        teacher_adapter: folder of an adapter that the teacher runs with.
        force: run models with adapters that were made for others too, if their shapes fit.
        distillation_weight, distillation_temperature, divergence: see `losses.Distillation`.
        test: measure test.jsonl at the end, with what was trained and without.
        test_batches: how many of its batches, all when -1.
    """

    data: str | Path
    options: TrainingOptions
    model: str | Path | Source = EMBEDDED_MODEL
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
            raise ConfigError("warmup_share and warmup_epochs both say how long; leave one out.")
        if self.teacher_adapter is not None and self.teacher is None:
            raise ConfigError("teacher_adapter is given without a teacher to put it on; name both.")

    def settled(self, per_epoch: int) -> TrainingOptions:
        """The options, once the number of micro-batches in an epoch is known."""
        options = self.options
        if self.epochs is not None:
            steps = math.ceil(self.epochs * per_epoch / options.grad_accumulation_steps)
            if self.steps_between is not None:
                fewest, most = self.steps_between
                steps = min(max(steps, fewest), most)
            options = dataclasses.replace(options, iters=max(1, steps), warmup_iters=0)
            fixed = self.warmup_share is None and self.warmup_epochs is None
            if self.options.warmup_iters >= options.iters and fixed:
                raise ConfigError(
                    f"warmup_iters is {self.options.warmup_iters}, and the run has {options.iters} steps "
                    f"({options.iters * options.grad_accumulation_steps / per_epoch:.3g} epochs); allowed are "
                    "fewer than these. Train longer (--iters), or warm up for less."
                )
            if fixed:
                options = dataclasses.replace(options, warmup_iters=self.options.warmup_iters)
        if self.warmup_epochs is not None:
            warmup = math.ceil(self.warmup_epochs * per_epoch / options.grad_accumulation_steps)
            if warmup >= options.iters:
                raise ConfigError(
                    f"A warm-up of {self.warmup_epochs:g} epochs is {warmup} steps, and the run has "
                    f"{options.iters}; allowed are fewer than these. Train longer, or warm up for less "
                    "(--warmup-iters)."
                )
            options = dataclasses.replace(options, warmup_iters=warmup)
        if self.warmup_share is not None:
            warmup = min(MAX_WARMUP, int(self.warmup_share * options.iters))
            options = dataclasses.replace(options, warmup_iters=warmup)
        return options


@dataclass(frozen=True)
class Split:
    """Batches, and what they are made of.

    Args:
        batches: see there.
        samples, tokens: how many.
        targets: tokens that are predicted.
    """

    batches: Batches
    samples: int
    tokens: int
    targets: int


@dataclass(frozen=True)
class Data:
    """A data set; None for what has no file or is not asked for."""

    train: Split
    valid: Split | None
    test: Split | None


@dataclass(frozen=True)
class Plan:
    """What is about to happen, to be shown before it does.

    Args:
        parameters: of the model, LoRA's among them; a packed matrix counts as the numbers that it stands for.
        trainable: of those.
        data: that is trained on.
        options: of the loop, settled.
        memory: estimated bytes; None where there is no estimate.
    """

    parameters: int
    trainable: int
    data: Data
    options: TrainingOptions
    memory: int | None

    @property
    def steps_per_epoch(self) -> float:
        return self.data.train.batches.per_epoch / self.options.grad_accumulation_steps


def read_data(recipe: Recipe, source: Source) -> Data:
    """Read and tokenize all splits.

    Raises:
        DataError: names the lines that can't be used; or for a test, when the data is one file.
        ConfigError: for packed rows and a model that can't keep their samples apart.
    """
    if recipe.test and Path(recipe.data).is_file():
        raise DataError(
            f"{recipe.data} is one file, all of which is trained on; there is nothing to test. Put it into a "
            "folder as train.jsonl, with a test.jsonl beside it, or leave the test out."
        )
    return Data(
        read_split(recipe, source, "train"),
        read_split(recipe, source, "valid") if has_split(recipe.data, "valid") else None,
        read_split(recipe, source, "test") if recipe.test else None,
    )


def read_split(recipe: Recipe, source: Source, split: str) -> Split:
    """Read and tokenize "train", "valid" or "test"; raises as `read_data` does."""
    packed = source.is_afm if recipe.packing is None else recipe.packing
    if packed and not source.is_afm:
        raise ConfigError(
            "Several samples in a row need a mask that models of mlx-lm don't take. Leave packing out "
            "(--no-packing)."
        )
    # Positions start anew with each sample of a row, so only samples are bound by the context.
    limit = _sample_length(recipe, source)
    samples = load_split(
        recipe.data,
        split,
        source.tokenizer,
        max_seq_length=limit,
        prompt_weight=recipe.prompt_weight,
        features=recipe.features,
    )
    batches = Batches(
        samples,
        batch_size=recipe.batch_size,
        length=_row_length(samples, recipe, limit) if packed else recipe.max_seq_length or limit,
        packed=packed,
        seed=recipe.options.seed,
        shuffle=split == "train",
    )
    tokens = sum(len(sample.tokens) for sample in samples)
    targets = sum(int(np.count_nonzero(sample.weights)) for sample in samples)
    return Split(batches, len(samples), tokens, targets)


def _sample_length(recipe: Recipe, source: Source) -> int:
    """The most tokens of a sample."""
    length = MAX_SEQ_LENGTH if recipe.max_seq_length is None else recipe.max_seq_length
    contexts = [source.values.get("context_length")]
    if recipe.max_seq_length is None:  # in the words of models of the zoo, too
        contexts.append(source.values.get("max_position_embeddings"))
    return min([length, *(n for n in contexts if type(n) is int and n > 1)])


def _row_length(samples: Sequence[Sample], recipe: Recipe, limit: int) -> int:
    """Tokens of a packed row: no more than it takes to put all samples into one batch."""
    inputs = [len(sample.tokens) - 1 for sample in samples]
    longest, total = max([*inputs, 1]), sum(inputs)
    wanted = max(longest, math.ceil(total / recipe.batch_size))
    if recipe.max_seq_length is None:
        # Attention's memory grows with the square of a row, and four samples leave little room for padding.
        wanted = min(wanted, max(longest, math.ceil(_SAMPLES_OF_A_ROW * total / len(inputs))))
    return min(-(-wanted // ROW_MULTIPLE) * ROW_MULTIPLE, recipe.max_seq_length or limit)
