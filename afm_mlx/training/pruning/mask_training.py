"""Training that makes or recovers a task mask: scores of groups by SoftTopK, and LoRA on the kept channels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from afm_mlx.adapters.adapter_folder import save_adapter
from afm_mlx.adapters.lora import lora_tensors
from afm_mlx.adapters.soft_top_k import to_channels, top_k_mask, training_mask
from afm_mlx.adapters.task_mask import TaskMask, apply_mask, expand_lora, feed_forwards, write_mask
from afm_mlx.checkpoint.fingerprint import folder_fingerprint
from afm_mlx.errors import AFMError
from afm_mlx.files import atomic_folder, refuse_existing
from afm_mlx.model.model import Model
from afm_mlx.training.data.batches import AnyBatches, Batches
from afm_mlx.training.methods.lora_training import SAVE_DTYPES, LoRATraining
from afm_mlx.training.methods.method import Method
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.pruning.channel_scores import GatedMLP, activation_scores
from afm_mlx.training.pruning.kept_groups import group_scores, kept_counts

TEMPERATURE = 0.5
"""Of SoftTopK, for scores that begin with a standard deviation of 1 in each block."""


class _SelectedMLP(GatedMLP):
    """A feed-forward that keeps `kept` groups of channels by trained scores: softly while it trains."""

    def __init__(self, mlp: nn.Module, scores: np.ndarray, kept: int, group: int):
        super().__init__(mlp)
        self.scores = mx.array(scores.astype(np.float32))
        self._kept, self._group = kept, group

    def gates(self) -> mx.array:
        if self.training:
            return to_channels(training_mask(self.scores, self._kept, TEMPERATURE), self._group)
        return to_channels(self.selected(), self._group)

    def selected(self) -> mx.array:
        """Return True for the kept groups, (groups,)."""
        return top_k_mask(self.scores, self._kept)


@dataclass(frozen=True)
class MaskTraining(Method):
    """Train one score for each group of feed-forward channels of a frozen model; save a task mask.

    Scores begin as the logarithms of the activation criterion's. With `shares` of "sensitivity", these also set
    how many groups each block keeps.

    Args:
        share, group, shares, task: see `prune.Pruning`.
        score_batches: batches of the pass before training; -1 for all.
    """

    share: float = 0.5
    group: int = 16
    shares: str = "equal"
    task: str = ""
    score_batches: int = -1
    kind = "mask"
    untrained_label = "by activations"
    may_imitate_itself = True

    def prepare(
        self, model: nn.Module, source: ModelSource, batches: AnyBatches, seed: int
    ) -> None:
        assert isinstance(batches, Batches)
        scores = group_scores(activation_scores(model, batches, self.score_batches), self.group)
        counts = kept_counts(scores, self.share, self.shares)
        logs = np.log(scores + 1e-12)
        logs = (logs - logs.mean(axis=1, keepdims=True)) / (logs.std(axis=1, keepdims=True) + 1e-12)
        model.freeze()
        for block, own, count in zip(model.layers, logs, counts, strict=True):
            block.mlp = _SelectedMLP(block.mlp, own, int(count), self.group)
            block.mlp.mlp.freeze()

    def manifest(self, model: nn.Module) -> dict[str, object]:
        return {name: getattr(self, name) for name in ("share", "group", "shares", "score_batches")}

    def save(
        self, path: Path, model: nn.Module, source: ModelSource, facts: Mapping[str, str]
    ) -> None:
        kept = np.stack([np.array(block.mlp.selected()) for block in model.layers])
        base = folder_fingerprint(model.args, source.folder)
        save_mask(path, TaskMask(kept, self.group, self.task, "learned", base))


@dataclass(frozen=True)
class RecoveryTraining(LoRATraining):
    """Train LoRA pairs on the channels that a task mask keeps; save the adapter, at full shapes, and the mask.

    The teacher is the whole model ("self") or another, such as the float model that it was packed from.

    Args:
        mask: the mask, which the student runs with from the start.
        card: text of the folder's README.md, before the facts of the run.
    """

    mask: TaskMask | None = None
    card: str = ""
    kind = "recovery"
    untrained_label = "with the mask alone"
    may_imitate_itself = True

    def default_run_path(self, path: Path) -> Path:
        return Path(f"{path}-run")

    def check_path(self, path: Path, run_path: Path, resume: bool) -> None:
        refuse_existing(path)

    @property
    def _mask(self) -> TaskMask:
        assert self.mask is not None
        return self.mask

    def prepare(
        self, model: nn.Module, source: ModelSource, batches: AnyBatches, seed: int
    ) -> None:
        apply_mask(model, self._mask)
        super().prepare(model, source, batches, seed)

    def manifest(self, model: nn.Module) -> dict[str, object]:
        return super().manifest(model) | {"mask": self._mask.fingerprint}

    def save(
        self, path: Path, model: nn.Module, source: ModelSource, facts: Mapping[str, str]
    ) -> None:
        # A masked model's blocks may have different widths; its whole shapes are the config's.
        tensors = expand_lora(lora_tensors(model), self._mask, feed_forwards(Model(model.args)))
        dtype = SAVE_DTYPES[self.save_dtype]
        saved = {name: array.astype(dtype) for name, array in tensors.items()}
        try:
            with atomic_folder(path) as folder:
                save_adapter(folder, saved, self.config(model, source))
                write_mask(folder, self._mask)
                _write_card(folder, self.card, facts)
        except OSError as error:
            raise AFMError(f"The folder {path} can't be written: {error}.") from None


def save_mask(path: Path, mask: TaskMask, card: str = "") -> None:
    """Write a mask's folder, whole or not at all, with a README.md if there is a text for it.

    Raises `AFMError` when `path` exists or can't be written.
    """
    try:
        with atomic_folder(path) as folder:
            write_mask(folder, mask)
            if card:
                _write_card(folder, card, {})
    except OSError as error:
        raise AFMError(f"The folder {path} can't be written: {error}.") from None


def _write_card(folder: Path, card: str, facts: Mapping[str, str]) -> None:
    """Write the README.md of a mask's folder: a text, and a table of facts by their labels."""
    rows = "".join(f"| {label} | {value} |\n" for label, value in facts.items())
    table = f"\n## Recovery\n\n| | |\n| --- | --- |\n{rows}" if rows else ""
    (folder / "README.md").write_text(card + table, encoding="utf-8")
