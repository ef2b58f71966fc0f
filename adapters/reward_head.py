"""The reward head: a reward of an answer, and its grades, from the hidden state of the answer's last token.

    reward(h) = w . h                                   h = output of the final norm, (D,) float32
    grades(h) = W2 silu(W1 h + b1) + b2                 for each graded axis, logits of 3 levels

The head stands next to the LoRA pairs of an adapter, in a file of its own in the adapter's folder, since it is
no LoRA pair and other programs read the pairs without it.

Source: AFM report (arXiv 2407.21075, section 4.3 and appendix); the width of the MLPs is unpublished.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from afm_mlx.adapters.adapter_folder import AdapterConfig, LoRATensor, RewardUse
from afm_mlx.checkpoint.finite import check_finite
from afm_mlx.checkpoint.safetensors_file import load_stored, read_header, save_file
from afm_mlx.errors import AFMError, CheckpointError, named
from afm_mlx.files import atomic_write

HEAD_NAME = "reward_head.safetensors"
LEVELS = 3
"""Grades of an axis: 0, 1 and 2, from worst to best."""

NO_GRADE = -1
"""Stands for the grade of an axis that an answer is not graded for."""

WIDTH = 128
"""Hidden width of an axis's MLP."""


class RewardHead(nn.Module):
    """A linear reward, and an MLP for each graded axis; see the module's formula.

    The reward's weights begin as zeros, so that all rewards are equal before training.

    Args:
        dim: D, the width of the model's hidden states.
        use: the graded axes.
        seed: of the random numbers in the MLPs.
    """

    def __init__(self, dim: int, use: RewardUse, seed: int = 0):
        super().__init__()
        keys = iter(mx.random.split(mx.random.key(seed), 2 * len(use.grades) + 1))
        self.reward = mx.zeros((dim,))
        self.grades = {axis: _mlp(dim, next(keys), next(keys)) for axis in use.grades}

    def __call__(self, states: mx.array) -> tuple[mx.array, dict[str, mx.array]]:
        """Map hidden states (B, D) to rewards (B,), and to logits (B, 3) of each axis by its name."""
        states = states.astype(mx.float32)
        return states @ self.reward, {axis: mlp(states) for axis, mlp in self.grades.items()}


def _mlp(dim: int, first: mx.array, second: mx.array) -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(dim, WIDTH), nn.SiLU(), nn.Linear(WIDTH, LEVELS))
    for layer, key in ((layers.layers[0], first), (layers.layers[2], second)):
        outputs, inputs = layer.weight.shape
        layer.weight = mx.random.normal((outputs, inputs), scale=inputs**-0.5, key=key)
        layer.bias = mx.zeros((outputs,))
    return layers


def save_reward_head(folder: str | Path, head: RewardHead) -> None:
    """Write the head's file into an adapter's folder, in float32, whole or not at all."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / HEAD_NAME) as path:
            save_file(path, dict(sorted(tree_flatten(head.parameters()))))
    except OSError as error:
        raise AFMError(f"The reward head in {folder} can't be written: {error}.") from None


def load_reward_head(folder: str | Path, config: AdapterConfig) -> RewardHead:
    """Read the reward head of an adapter's folder with this config.

    Raises:
        CheckpointError: if the adapter has no reward head, or its file is missing or damaged, has other tensors
            than the config says, or holds NaN or infinity.
    """
    folder = Path(folder)
    if config.reward is None:
        raise CheckpointError(
            f"{folder} is no reward adapter: its config has no reward. Train one: afm-mlx lora --objective "
            "reward."
        )
    stored = read_header(folder / HEAD_NAME)
    # Without such a tensor, the comparison of names or shapes fails.
    size = stored["reward"].shape if "reward" in stored else ()
    head = RewardHead(size[0] if len(size) == 1 else 1, config.reward)
    wanted = {name: _kind(array) for name, array in tree_flatten(head.parameters())}
    found = {name: _kind(tensor) for name, tensor in stored.items()}
    differing = (n for n in sorted(wanted | found, reverse=True) if wanted.get(n) != found.get(n))
    if (name := next(differing, None)) is not None:
        raise CheckpointError(
            f"{folder / HEAD_NAME} doesn't fit the config's reward: {named(name)} is "
            f"{found.get(name, 'missing')}, and {wanted.get(name, 'nothing')} is needed."
        )
    tensors = load_stored(stored)
    check_finite(tensors, folder / HEAD_NAME)
    head.load_weights(list(tensors.items()))
    return head


def _kind(array: LoRATensor) -> str:
    return f"{list(array.shape)} {str(array.dtype).removeprefix('mlx.core.')}"


def head_dim(head: RewardHead) -> int:
    """Return the width of the hidden states that a head maps."""
    return int(head.reward.shape[0])
