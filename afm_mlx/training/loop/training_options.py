"""Options of the training loop, and learning rates that warm up and decay."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.optimizers as optim

from afm_mlx.errors import ConfigError, shown

Schedule: TypeAlias = Callable[[mx.array], mx.array]
"""Maps the number of finished steps, () integer, to the learning rate of the next step."""

SCHEDULES = ("cosine", "constant")
MLX_SCHEDULES = ("cosine_decay", "exponential_decay", "linear_schedule", "step_decay")

_LARGEST = 1e30  # the largest number in a schedule; float32 ends at 3e38

BETAS, EPS = (0.9, 0.999), 1e-8
"""AdamW's defaults, as in PyTorch and MLX."""
MOMENTUM = 0.95
"""Muon's default, as in PyTorch and MLX."""
OPTIMIZERS = ("adamw", "muon")


def learning_rate_schedule(
    learning_rate: float,
    iters: int,
    warmup_iters: int = 0,
    schedule: str = "cosine",
    final_learning_rate: float = 0.0,
) -> Schedule:
    """Make a schedule of a linear warm-up followed by a half cosine, or a constant.

    With w = warmup_iters, step t = 0, 1, ... takes `learning_rate * (t + 1) / (w + 1)` while t < w; after that
    `final + (learning_rate - final) * (1 + cos(pi * (t - w) / (iters - w))) / 2`, or `learning_rate` for
    "constant".
    """
    after: Schedule
    if schedule == "constant":
        after = optim.linear_schedule(learning_rate, learning_rate, 1)
    else:
        after = optim.cosine_decay(learning_rate, iters - warmup_iters, final_learning_rate)
    if warmup_iters == 0:
        return after
    warmup = optim.linear_schedule(learning_rate / (warmup_iters + 1), learning_rate, warmup_iters)
    return optim.join_schedules([warmup, after], [warmup_iters])


def mlx_lm_schedule(values: Mapping[str, Any]) -> Schedule:
    """Make a schedule from the `lr_schedule` of mlx-lm's YAML files.

    `values` has the `name` of a function of `mlx.optimizers` (one of `MLX_SCHEDULES`) and its `arguments`, the
    learning rate first; where there is a linear warm-up, `warmup` steps from `warmup_init`.

    Raises `ConfigError`, which names what is missing, unknown, or can't be used.
    """
    unknown = set(values) - {"name", "arguments", "warmup", "warmup_init"}
    name: Any = values.get("name")
    arguments: Any = values.get("arguments")
    warmup, start = values.get("warmup", 0), values.get("warmup_init", 0.0)
    is_count = type(warmup) is int and 0 <= warmup < 2**31
    checks = (
        ("keys", sorted(values), not unknown, "name, arguments, warmup and warmup_init"),
        ("name", name, name in MLX_SCHEDULES, ", ".join(MLX_SCHEDULES)),
        ("arguments", arguments, _are_numbers(arguments), "a list of numbers, the rate first"),
        ("warmup", warmup, is_count, "whole numbers, 0 to 2**31 - 1"),
        ("warmup_init", start, _are_numbers([start]) and start >= 0, "numbers, 0 and more"),
    )
    for key, value, holds, allowed in checks:
        if not holds:
            raise ConfigError(f"lr_schedule: {key} is {shown(value)}; allowed are {allowed}.")
    try:
        after = getattr(optim, name)(*arguments)
    except (TypeError, ValueError) as error:
        reason = str(error).rstrip(".")
        raise ConfigError(f"lr_schedule: arguments are {shown(arguments)}, and {reason}.") from None
    if not warmup:
        return after
    before = optim.linear_schedule(start, arguments[0], warmup)
    return optim.join_schedules([before, after], [warmup + 1])


def _are_numbers(values: object) -> bool:
    return (
        isinstance(values, list | tuple)
        and bool(values)
        and all(type(value) in (int, float) and abs(value) <= _LARGEST for value in values)
    )


@dataclass(frozen=True)
class TrainingOptions:
    """Options of the training loop: length, learning rate, optimizer, and how often it reports and saves.

    Args:
        iters: number of steps.
        learning_rate: the highest learning rate, see `learning_rate_schedule`.
        warmup_iters: number of steps of linear warm-up.
        schedule: "cosine" or "constant", after the warm-up.
        final_learning_rate: learning rate at the end of a cosine.
        grad_accumulation_steps: number of micro-batches in a step.
        clip_grad_norm: largest global norm of a gradient; pass None for no limit.
        grad_checkpoint: recompute activations in the backward pass, see `gradient_checkpointing`.
        ema_decay: decay of an average of weights, which is evaluated and saved instead of the weights; pass
            None for no average.
        steps_per_report: steps between reports.
        steps_per_eval: steps between evaluations; one is before the first step and one after the last.
        val_batches: batches of an evaluation, -1 for all.
        save_every: steps between checkpoints; one is after the last step.
        best_by: what an evaluation is compared by: "loss" (lowest), or a metric of the loss, such as
            "accuracy" (highest) or "kl" (lowest, as `losses.LOWER_IS_BETTER` says).
        patience: number of evaluations without a new best after which the run stops; pass None to never stop
            early.
        seed: seed of the model's random numbers, such as dropout's.
        optimizer: "adamw", or "muon" for Muon on matrices and AdamW on the rest, see `optimizers.Muon`.
        weight_decay: decoupled weight decay, of all parameters.
        betas, eps: AdamW's decays of the moments, and the number added to the root of the second one.
        momentum: Muon's decay of the mean of gradients.
        lr_schedule: mlx-lm's description of a schedule, see `mlx_lm_schedule`; replaces
            `learning_rate`, `warmup_iters`, `schedule` and `final_learning_rate`.
        clear_cache_threshold: bytes of freed memory that MLX may keep for reuse; if it has more after a step,
            its cache is cleared. Pass None for MLX's own limit.

    Raises:
        ConfigError: names the option that is out of range.
    """

    iters: int
    learning_rate: float
    warmup_iters: int = 0
    schedule: str = "cosine"
    final_learning_rate: float = 0.0
    grad_accumulation_steps: int = 1
    clip_grad_norm: float | None = 1.0
    grad_checkpoint: bool = False
    ema_decay: float | None = None
    steps_per_report: int = 10
    steps_per_eval: int = 200
    val_batches: int = 25
    save_every: int = 100
    patience: int | None = None
    best_by: str = "loss"
    seed: int = 0
    optimizer: str = "adamw"
    weight_decay: float = 0.0
    betas: tuple[float, float] = BETAS
    eps: float = EPS
    momentum: float = MOMENTUM
    lr_schedule: Mapping[str, Any] | None = None
    clear_cache_threshold: int | None = None

    def __post_init__(self) -> None:
        counts = "iters grad_accumulation_steps steps_per_report steps_per_eval save_every".split()
        clip, decay, kept = self.clip_grad_norm, self.ema_decay, self.clear_cache_threshold
        checks = [
            *((name, getattr(self, name) >= 1, "1 and more") for name in counts),
            ("learning_rate", 0 < self.learning_rate < math.inf, "finite numbers over 0"),
            ("warmup_iters", 0 <= self.warmup_iters < self.iters, "0 and more, less than iters"),
            ("schedule", self.schedule in SCHEDULES, " and ".join(map(repr, SCHEDULES))),
            ("final_learning_rate", 0 <= self.final_learning_rate < math.inf, "0 and more"),
            ("clip_grad_norm", clip is None or clip > 0, "numbers over 0, and None"),
            ("ema_decay", decay is None or 0 < decay < 1, "numbers between 0 and 1, and None"),
            ("val_batches", self.val_batches == -1 or self.val_batches >= 1, "1 and more, and -1"),
            ("patience", self.patience is None or self.patience >= 1, "1 and more, and None"),
            ("seed", 0 <= self.seed < 2**64, "0 to 2**64 - 1"),
            ("optimizer", self.optimizer in OPTIMIZERS, " and ".join(map(repr, OPTIMIZERS))),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "0 and more"),
            ("betas", all(0 <= beta < 1 for beta in self.betas), "two numbers in [0, 1)"),
            ("eps", 0 < self.eps < math.inf, "numbers over 0"),
            ("momentum", 0 <= self.momentum < 1, "numbers in [0, 1)"),
            ("clear_cache_threshold", kept is None or kept >= 0, "0 and more, and None"),
        ]
        for name, is_right, allowed in checks:
            if not is_right:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; allowed are {allowed}.")
        if self.lr_schedule is not None:
            mlx_lm_schedule(self.lr_schedule)

    @property
    def rates(self) -> Schedule:
        """The learning rate's schedule."""
        if self.lr_schedule is not None:
            return mlx_lm_schedule(self.lr_schedule)
        return learning_rate_schedule(
            self.learning_rate,
            self.iters,
            self.warmup_iters,
            self.schedule,
            self.final_learning_rate,
        )
