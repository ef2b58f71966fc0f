"""What every method of training takes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from afm_mlx.errors import ConfigError
from afm_mlx.loading.resolve import EMBEDDED_MODEL
from afm_mlx.training.loop.losses import check_divergence
from afm_mlx.training.loop.training_options import TrainingOptions
from afm_mlx.training.methods.model_source import ModelSource

MAX_WARMUP = 100  # steps, where a share is asked for


@dataclass(frozen=True)
class Recipe:
    """What every method of training takes: model, data, the loop's options, and a teacher.

    Args:
        data: a folder with train.jsonl, and valid.jsonl and test.jsonl where there are any; or one file.
        options: options of the loop; their seed also draws the shuffle and new LoRA layers.
        model: what training starts from: a folder, a hub id, the embedded model; or a draft model of random
            weights, `FreshSource.for_target(...)`.
        epochs: passes over the data; replaces `options.iters`.
        steps_between: the fewest and the most steps that `epochs` may become; None for any.
        warmup_share: share of the steps, 100 at most, that warm up; replaces `options.warmup_iters`.
        warmup_epochs: passes over the data that warm up; replaces `options.warmup_iters`.
        batch_size: rows of a micro-batch.
        max_seq_length: the most tokens of a sample, and of a row. With None a sample may have 2,048, or the
            model's context if that is less, and a packed row takes some four samples.
        packing: put several samples into a row; None for True where the model can keep them apart.
        prompt_weight: weight of the loss of tokens that the assistant did not write.
        features: the data's keys for "prompt", "completion", "messages" or "text", by these names.
        teacher: model to imitate; "self" is `model` before quantization-aware training.
        teacher_adapter: folder of an adapter that the teacher runs with.
        force: run models with adapters that were made for other models too, if their shapes fit.
        distillation_weight, distillation_temperature, divergence: see `losses.Distillation`.
        test: measure test.jsonl, before training and after.
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
            raise ConfigError("warmup_share and warmup_epochs both say how long; leave one out.")
        if self.teacher_adapter is not None and self.teacher is None:
            raise ConfigError("teacher_adapter is given without a teacher to put it on; name both.")

    def loop_options(self, per_epoch: int) -> TrainingOptions:
        """The loop's options, with epochs and shares as steps.

        Args:
            per_epoch: micro-batches of an epoch.

        Raises:
            ConfigError: when the warm-up is as long as the run.
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
