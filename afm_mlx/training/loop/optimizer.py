"""AdamW in float32, learning rates that warm up and decay, and an average of weights.

Notable choices:

- All arithmetic is float32. A step of 1e-5 times a weight of 16 bits vanishes in its rounding (bfloat16 keeps
  8 bits), and so does the running mean of squares at beta2 = 0.999. A parameter of 16 bits has a float32 master
  copy in the optimizer's state, and the model gets it rounded.
- No weight decay by default, as in Apple's quantization-aware training (arXiv 2507.13575).
- The average of weights is free of bias from the first step on: after t steps it is
  `sum_i d^(t-i) w_i / sum_i d^(t-i)` for i = 1 .. t. The start weights are not among them; before the first
  step they are the average.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_map

from afm_mlx.errors import ConfigError, shown

Tree: TypeAlias = Any
"""Nested dictionaries and lists of arrays, as `nn.Module.parameters` gives them."""

Schedule: TypeAlias = Callable[[mx.array], mx.array]
"""Maps the number of steps done, () integer, to the learning rate of the next step."""

SCHEDULES = ("cosine", "constant")
MLX_SCHEDULES = ("cosine_decay", "exponential_decay", "linear_schedule", "step_decay")

_LARGEST = 1e30  # the largest number in a schedule; float32 ends at 3e38

BETAS, EPS = (0.9, 0.999), 1e-8
"""AdamW's defaults, as in PyTorch and MLX."""


def learning_rate_schedule(
    learning_rate: float,
    iters: int,
    warmup_iters: int = 0,
    schedule: str = "cosine",
    final_learning_rate: float = 0.0,
) -> Schedule:
    """Linear warm-up, then a half cosine, or a constant.

    With w = warmup_iters, step t = 0, 1, ... takes `learning_rate * (t + 1) / (w + 1)` while t < w; after that
    `final + (learning_rate - final) * (1 + cos(pi * (t - w) / (iters - w))) / 2`.

    Args:
        learning_rate: the highest learning rate.
        iters: steps of the whole run.
        warmup_iters: w, less than `iters`.
        schedule: "cosine", or "constant" after the warm-up.
        final_learning_rate: learning rate at the end of the cosine.
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
    """A learning rate as mlx-lm's YAML files describe it, under `lr_schedule`.

    Args:
        values: `name` of a function of `mlx.optimizers` (one of `MLX_SCHEDULES`) and its `arguments`, the
            learning rate first; where there is a linear warm-up, `warmup` steps from `warmup_init`.

    Raises:
        ConfigError: names what is missing, unknown, or can't be used.
    """
    unknown = set(values) - {"name", "arguments", "warmup", "warmup_init"}
    name: Any = values.get("name")
    arguments: Any = values.get("arguments")
    warmup, start = values.get("warmup", 0), values.get("warmup_init", 0.0)
    checks = (
        ("keys", sorted(values), not unknown, "name, arguments, warmup and warmup_init"),
        ("name", name, name in MLX_SCHEDULES, ", ".join(MLX_SCHEDULES)),
        ("arguments", arguments, _are_numbers(arguments), "a list of numbers, the rate first"),
        (
            "warmup",
            warmup,
            type(warmup) is int and 0 <= warmup < 2**31,
            "whole numbers, 0 to 2**31 - 1",
        ),
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


def _are_numbers(values: Any) -> bool:
    return (
        isinstance(values, list | tuple)
        and bool(values)
        and all(type(value) in (int, float) and abs(value) <= _LARGEST for value in values)
    )


class AdamW(optim.AdamW):
    """`mlx.optimizers.AdamW` with bias correction, in float32 whatever the parameters are.

    A parameter of another type has its float32 copy under "master" in the state, where the update happens;
    4 bytes a parameter on top of the 8 of both moments.

    Args:
        learning_rate: a number or a schedule.
        weight_decay: decay of all parameters.
        betas: decays of the moments.
        eps: added to the root of the second moment.
    """

    def __init__(
        self,
        learning_rate: float | Schedule,
        weight_decay: float = 0.0,
        betas: Sequence[float] = BETAS,
        eps: float = EPS,
    ):
        super().__init__(learning_rate, list(betas), eps, weight_decay, bias_correction=True)

    def init_single(self, parameter: mx.array, state: dict[str, mx.array]) -> None:
        super().init_single(parameter.astype(mx.float32), state)
        if parameter.dtype != mx.float32:
            state["master"] = parameter.astype(mx.float32)

    def apply_single(
        self, gradient: mx.array, parameter: mx.array, state: dict[str, mx.array]
    ) -> mx.array:
        exact = super().apply_single(
            gradient.astype(mx.float32), state.get("master", parameter), state
        )
        if "master" in state:
            state["master"] = exact
        return exact.astype(parameter.dtype)

    def exact(self, parameters: Tree) -> Tree:
        """The parameters in float32: the master copies where there are any."""
        return tree_map(lambda p, state: state.get("master", p), parameters, self.state)


def averaged(average: Tree, weights: Tree, decay: float, steps: mx.array) -> Tree:
    """The next exponential moving average, free of bias.

    `average + (1 - d) / (1 - d^t) * (weights - average)`

    Args:
        average: float32; has no effect where t is 1.
        weights: the weights after step t, float32.
        decay: d in (0, 1).
        steps: t, () integer, 1 after the first step.
    """
    # 1 - d^t by expm1: for d near 1 the difference itself has few bits left in float32.
    share = (1 - decay) / -mx.expm1(steps.astype(mx.float32) * math.log(decay))
    return tree_map(lambda a, w: a + share * (w - a), average, weights)
