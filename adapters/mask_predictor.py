"""The predictor of Instruction-Following Pruning: from a prompt's tokens to the channels that it needs.

    z = W2 (W1 h)         h (D,): the state of the prompt's last token in a small language model
                          W1 (rank, D), W2 (blocks * groups, rank), no activation between

The masks of all blocks follow from the scores z (blocks, groups): `soft_top_k` in training, the `kept` largest
at inference. A model folder holds its predictor in the folder `predictor`: the small model's own folder, with
`mask_head.safetensors` (W1, W2) and `mask_predictor.json` (`PredictorConfig`) next to its weights.

Source: arXiv 2501.02086, section 3, and its authors' code (github.com/hbr690188270/IFPruning). The small model
is pre-trained there; its sizes here (`small_model`), groups of channels and `binary` masks are ours.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from afm_mlx.adapters.soft_top_k import soft_top_k, top_k_mask, training_mask
from afm_mlx.adapters.task_mask import GROUP, TaskMask
from afm_mlx.checkpoint.finite import check_finite
from afm_mlx.checkpoint.safetensors_file import load_stored, read_header, save_file
from afm_mlx.config import ModelConfig, read_config_json
from afm_mlx.errors import CheckpointError, ConfigError, RequestError, named, shown
from afm_mlx.model.model import Model

PREDICTOR_FOLDER = "predictor"
CONFIG_NAME = "mask_predictor.json"
HEAD_NAME = "mask_head.safetensors"
RANK = 128
_LAST_SCALE = 1e-2  # of W2's first numbers: a variance of 1e-4


@dataclass(frozen=True)
class PredictorConfig:
    """Sizes of a predictor's masks, and how they are made.

    Args:
        blocks: blocks of the model, each of which has a mask.
        ffn_dim: channels of a block's feed-forward.
        kept: number of channels that a block runs with; a multiple of `group`.
        group: neighbouring channels that are kept or cut together; divides `ffn_dim`.
        rank: rows of W1.
        temperature: T of `soft_top_k`.
        binary: train with masks of zeros and ones, through which the soft numbers' gradient passes
            (straight-through); otherwise with the soft numbers themselves, as in the paper.

    Raises:
        ConfigError: for values out of range.
    """

    blocks: int
    ffn_dim: int
    kept: int
    group: int = GROUP
    rank: int = RANK
    temperature: float = 1.0
    binary: bool = False

    def __post_init__(self) -> None:
        for name in ("blocks", "ffn_dim", "kept", "group", "rank"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= 1 << 24:
                raise ConfigError(f"{name} is {shown(value)}; a number of 1 or more is needed.")
        if self.ffn_dim % self.group or self.kept % self.group or self.kept > self.ffn_dim:
            raise ConfigError(
                f"{self.kept} of {self.ffn_dim} channels in groups of {self.group} can't be kept; both numbers "
                "must be multiples of the group, and the first no more than the second."
            )
        temperature = self.temperature
        if type(temperature) not in (int, float) or not 0 < temperature < float("inf"):
            raise ConfigError(f"temperature is {shown(temperature)}; a positive number is needed.")
        if type(self.binary) is not bool:
            raise ConfigError(f"binary is {shown(self.binary)}; true or false is needed.")

    @property
    def groups(self) -> int:
        """Groups of a block, kept or cut."""
        return self.ffn_dim // self.group

    @property
    def kept_groups(self) -> int:
        return self.kept // self.group


class MaskPredictor(nn.Module):
    """Scores of all blocks' groups of channels, from prompts.

    Args:
        body: a language model of the vocabulary of the model that is pruned.
        config: sizes of the masks.
        seed: draws W1 and W2.
    """

    def __init__(self, body: Model, config: PredictorConfig, seed: int = 0):
        super().__init__()
        self.config = config
        self.body = body
        first, last = mx.random.split(mx.random.key(seed))
        dim, outputs = body.args.hidden_dim, config.blocks * config.groups
        self.w1 = mx.random.normal((config.rank, dim), scale=dim**-0.5, key=first)
        self.w2 = mx.random.normal((outputs, config.rank), scale=_LAST_SCALE, key=last)

    def __call__(self, prompts: mx.array, lengths: mx.array) -> mx.array:
        """Map M prompts, tokens (M, P) padded on the right, to scores (M, blocks, groups) in float32."""
        h = self.body.final_norm(self.body.hidden_last(prompts, lengths)).astype(mx.float32)
        scores = (h @ self.w1.T) @ self.w2.T
        return scores.reshape(-1, self.config.blocks, self.config.groups)

    def soft(self, scores: mx.array) -> mx.array:
        """Return SoftTopK of scores, (M, blocks, groups) float32, with the sum `kept_groups` in each block."""
        return soft_top_k(scores, self.config.kept_groups, self.config.temperature)

    def training_masks(self, scores: mx.array) -> mx.array:
        """Return the masks of scores in training, (M, blocks, groups) float32; see `PredictorConfig.binary`."""
        soft = training_mask(scores, self.config.kept_groups, self.config.temperature)
        return soft + mx.stop_gradient((soft > 0) - soft) if self.config.binary else soft

    def masks(self, scores: mx.array) -> mx.array:
        """Return the masks of scores at inference, (M, blocks, groups) bool."""
        return top_k_mask(scores, self.config.kept_groups)

    def task_mask(
        self,
        prompts: Sequence[Sequence[int] | np.ndarray],
        task: str = "",
        base_model_fingerprint: str | None = None,
    ) -> TaskMask:
        """Return the mask of the highest mean scores over prompts, each a sequence of tokens.

        One prompt's mask is the one that it runs with. `task` and the fingerprint are kept with the mask.

        Raises `RequestError` for no prompts, or one without tokens.
        """
        if not prompts or not all(map(len, prompts)):
            raise RequestError(
                "A mask can't be chosen for a prompt without tokens. Give the predictor a text."
            )
        total = mx.zeros((self.config.blocks, self.config.groups))
        for prompt in prompts:
            tokens = mx.array(np.asarray(prompt, np.int32)[None])
            total = total + self(tokens, mx.array([tokens.shape[1]]))[0]
            mx.eval(total)
        kept = np.array(self.masks(total))
        return TaskMask(kept, self.config.group, task, "predictor", base_model_fingerprint)


def small_model(config: ModelConfig) -> ModelConfig:
    """Return the sizes of a new predictor's body: two blocks of half the model's width, in floats."""
    width = max(config.hidden_dim // 2 // (2 * config.num_heads), 1) * 2 * config.num_heads
    return dataclasses.replace(
        config,
        hidden_dim=width,
        num_layers=2,
        num_kv_reuse_layers=0,
        hidden_dim_scale_factor=ModelConfig.hidden_dim_scale_factor,
        kv_bits=None,
        vision_config=None,
    )


def has_predictor(folder: str | Path) -> bool:
    """True if a model folder has a predictor of its masks."""
    return (Path(folder) / PREDICTOR_FOLDER / CONFIG_NAME).is_file()


def write_head(folder: Path, predictor: MaskPredictor) -> None:
    """Write W1, W2 and the config into the folder of the predictor's body."""
    save_file(folder / HEAD_NAME, {"w1": predictor.w1, "w2": predictor.w2})
    text = json.dumps(dataclasses.asdict(predictor.config), indent=4)
    (folder / CONFIG_NAME).write_text(text + "\n", encoding="utf-8")


def read_predictor_config(folder: Path) -> PredictorConfig:
    """Read the config from a predictor's folder; raise `ConfigError` if a key is missing, unknown or wrong."""
    path = folder / CONFIG_NAME
    values: dict[str, Any] = read_config_json(path)
    names = {field.name for field in dataclasses.fields(PredictorConfig)}
    if differing := sorted(names ^ set(values)):
        raise ConfigError(
            f"{path}: {named(', '.join(differing))} {'is' if len(differing) == 1 else 'are'} missing or "
            f"unknown. The keys are {', '.join(sorted(names))}."
        )
    try:
        return PredictorConfig(**values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def read_head(folder: Path, body: Model, model: ModelConfig) -> MaskPredictor:
    """Read a predictor for a model from its folder, with its loaded body.

    Raises:
        ConfigError: when the config can't be used, or is for a model of other sizes or another vocabulary.
        CheckpointError: when the head's file is missing, damaged, of other shapes, or not finite.
    """
    config, path = read_predictor_config(folder), folder / HEAD_NAME
    for name, own, needed in (
        ("blocks", config.blocks, model.num_layers),
        ("ffn_dim", config.ffn_dim, model.ffn_dim),
        ("vocab_size", body.args.vocab_size, model.vocab_size),
    ):
        if own != needed:
            raise ConfigError(
                f"The predictor {folder} has {name} {own}, and the model {needed}: it is for another model. "
                "Copy the whole folder of the model that it was trained with."
            )
    predictor = MaskPredictor(body, config)
    wanted = {"w1": predictor.w1, "w2": predictor.w2}
    stored = read_header(path)
    for name in sorted(wanted | stored):
        found = [list(each[name].shape) for each in (stored, wanted) if name in each]
        if len(found) != 2 or found[0] != found[1]:
            raise CheckpointError(
                f"{path}: {named(name)} doesn't fit {CONFIG_NAME}, which needs "
                f"{', '.join(f'{n} {list(a.shape)}' for n, a in wanted.items())}. Copy the folder again."
            )
    tensors = {name: array.astype(mx.float32) for name, array in load_stored(stored).items()}
    check_finite(tensors, path)
    predictor.w1, predictor.w2 = tensors["w1"], tensors["w2"]
    return predictor.eval()
