"""Optimizers whose arithmetic is float32 for weights of any type: AdamW, and Muon for matrices.

A step of 1e-5 times a weight of 16 bits vanishes in its rounding. Weights of other types have a float32 master
copy in the optimizer's state, which is rounded for the model.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map

from afm_mlx.quantization.packed_layers import is_experts
from afm_mlx.training.loop.gradient_checkpointing import Tree
from afm_mlx.training.loop.training_options import BETAS, EPS, MOMENTUM, Schedule, TrainingOptions

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of one iteration, a x + b x^3 + c x^5, of singular values (Jordan et al. 2024, "Muon")."""
_ITERATIONS = 5
_ADAM_RMS = 0.2
"""Root mean square of AdamW's typical update (Liu et al. 2025, arXiv 2502.16982, section 2.2)."""


class AdamW(optim.AdamW):
    """`mlx.optimizers.AdamW` with bias correction, in float32 for parameters of any type.

    For parameters of other types, the state holds a float32 copy, "master", which is what is updated: 4 bytes
    per parameter in addition to the 8 bytes of both moments.
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
        exact = self.next_weights(
            gradient.astype(mx.float32), state.get("master", parameter), state
        )
        if "master" in state:
            state["master"] = exact
        return exact.astype(parameter.dtype)

    def next_weights(
        self, gradient: mx.array, weights: mx.array, state: dict[str, mx.array]
    ) -> mx.array:
        """Return the next weights of a parameter, float32 as gradient and weights are; update its state."""
        return super().apply_single(gradient, weights, state)

    def exact(self, parameters: Tree) -> Tree:
        """Return the parameters in float32: the master copies, where there are any."""
        return tree_map(lambda p, state: state.get("master", p), parameters, self.state)


class Muon(AdamW):
    """Muon for matrices, AdamW for all other parameters, at one learning rate.

    A matrix (rows, columns) moves along its momentum, made orthogonal:

        w <- w * (1 - rate * decay) - rate * 0.2 * sqrt(max(rows, columns)) * orthogonal(momentum)

    The factor gives the update the size that AdamW's has, so that a rate that suits AdamW suits both
    (arXiv 2502.16982, equation 4). The momentum is Nesterov's. The state of a float32
    matrix has 4 bytes per weight; AdamW's has 8.

    Args:
        learning_rate, weight_decay: of all parameters.
        betas, eps: of AdamW.
        matrices: names of the parameters that are matrices (rows, columns) or stacks of them (..., rows,
            columns), as in `hidden_matrices`.
        momentum: decay of the mean of gradients.
    """

    def __init__(
        self,
        learning_rate: float | Schedule,
        weight_decay: float = 0.0,
        betas: Sequence[float] = BETAS,
        eps: float = EPS,
        *,
        matrices: Collection[str],
        momentum: float = MOMENTUM,
    ):
        super().__init__(learning_rate, weight_decay, betas, eps)
        self.matrices, self.momentum = matrices, momentum

    def init(self, parameters: Tree) -> None:
        super().init(parameters)
        for name, state in tree_flatten(self.state, is_leaf=_is_moments):
            if name in self.matrices:
                state["momentum"] = state.pop("m")
                del state["v"]

    def next_weights(
        self, gradient: mx.array, weights: mx.array, state: dict[str, mx.array]
    ) -> mx.array:
        if "momentum" not in state:
            return super().next_weights(gradient, weights, state)
        mean = state["momentum"] = _moving_average(gradient, state["momentum"], self.momentum)
        direction = orthogonalized(_moving_average(gradient, mean, self.momentum))
        size = _ADAM_RMS * math.sqrt(max(weights.shape[-2:]))
        rate = self.learning_rate
        return weights * (1 - rate * self.weight_decay) - rate * size * direction


def _is_moments(node: object) -> bool:
    return isinstance(node, dict) and isinstance(node.get("m"), mx.array)


def _moving_average(new: mx.array, old: mx.array, decay: float) -> mx.array:
    return old * decay + new * (1 - decay)


def orthogonalized(matrices: mx.array) -> mx.array:
    """Bring the singular values of matrices near 1, and keep their singular vectors.

    Args:
        matrices: float32 (..., rows, columns). A matrix of zeros stays one.

    Returns:
        (..., rows, columns). Five Newton-Schulz iterations bring singular values of 5 % of the matrix's norm
        and more to between 0.6 and 1.25, and lift smaller ones less.
    """
    x = matrices
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.swapaxes(-1, -2)
    x = x / (mx.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7)
    a, b, c = _NEWTON_SCHULZ
    for _ in range(_ITERATIONS):
        square = x @ x.swapaxes(-1, -2)
        x = a * x + (b * square + c * square @ square) @ x
    return x.swapaxes(-1, -2) if is_tall else x


def hidden_matrices(model: nn.Module) -> set[str]:
    """Return the names of the trainable parameters that Muon suits: matrices that map hidden states.

    They are weights of linear layers, of stacks of them, and of LoRA pairs. Embeddings, an untied head
    (`lm_head`, or a linear layer to the vocabulary), convolutions, norms and biases are none.
    """
    names = set()
    vocabulary = getattr(getattr(model, "args", None), "vocab_size", None)
    for path, module in model.named_modules():
        if "lm_head" in path.split("."):
            continue
        if isinstance(module, nn.Linear) and module.weight.shape[0] == vocabulary:
            continue
        is_on_grid = "clip" in module and not hasattr(module, "as_linear")  # of training.qat
        is_linear = isinstance(module, nn.Linear) or is_experts(module) or is_on_grid
        found = {"weight"} if is_linear else {"lora_a", "lora_b"}
        own = {key: value for key, value in module.trainable_parameters().items() if key in found}
        names |= {f"{path}.{name}".lstrip(".") for name, _ in tree_flatten(own)}
    return names


def optimizer_of(options: TrainingOptions, model: nn.Module) -> AdamW:
    """Return the optimizer that the options name, for the model's trainable parameters."""
    settings = (options.rates, options.weight_decay, options.betas, options.eps)
    if options.optimizer == "muon":
        return Muon(*settings, matrices=hidden_matrices(model), momentum=options.momentum)
    return AdamW(*settings)
