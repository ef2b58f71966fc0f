"""Task masks from a task's data: `prune` scores channels, keeps the best groups, and may train an adapter.

A mask of one pass is written at once. A mask that is trained, or recovered by an adapter, has the folder
`<path>-run`, from which the same call resumes:

    run.json        the settings, which must not change
    mask/           the mask, once it is made
    scores/         the run that trains scores (criterion "learned")
    recovery/       the run that trains the adapter
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from afm_mlx import threads
from afm_mlx.adapters.task_mask import GROUP, MaskBase, TaskMask, read_mask
from afm_mlx.checkpoint.fingerprint import folder_fingerprint
from afm_mlx.config import ModelConfig
from afm_mlx.errors import ConfigError, shown
from afm_mlx.files import refuse_existing
from afm_mlx.loading.missing_kernels import warn_if_slow
from afm_mlx.measure.benchmark import BenchmarkCase, run_case
from afm_mlx.progress import Progress
from afm_mlx.ranks import refuse_ranks
from afm_mlx.training.data.batches import Batches
from afm_mlx.training.loop.run_folder import RunFolder
from afm_mlx.training.loop.trainer import Event, RunOutcome, Stopping
from afm_mlx.training.methods.method import Method
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.recipe import Plan, Recipe, read_split
from afm_mlx.training.methods.train import RunArguments, train_by
from afm_mlx.training.pruning.channel_scores import activation_scores, gradient_scores
from afm_mlx.training.pruning.kept_groups import (
    SHARES,
    group_scores,
    kept_counts,
    kept_groups,
    share_for_bytes,
    share_for_speed,
    step_bytes,
)
from afm_mlx.training.pruning.mask_training import MaskTraining, RecoveryTraining, save_mask

CRITERIA = ("activation", "gradient", "learned")
_KEPT_SHARE = "share"  # name of the kept tensor


@dataclass(frozen=True)
class Pruning:
    """How a mask is made.

    Args:
        share: kept share of the feed-forward channels of all blocks, in (0, 1].
        group: number of neighbouring channels that are kept or cut together.
        criterion: "activation" or "gradient", see `channel_scores`; or "learned", see `MaskTraining`.
        shares: "equal", or "sensitivity": blocks whose groups score higher keep more, see `kept_counts`.
        task: what the mask is for, as text.
        score_batches: batches of the pass that scores channels, -1 for all of the data.
        score_iters, score_learning_rate: steps of the criterion "learned", and their highest learning rate.
        target_bytes: choose the share so that a decode step reads at most this many bytes of weights.
        target_tokens_per_second: choose the share by the speed of generating one answer on this machine.

    Raises:
        ConfigError: for a value that is not allowed.
    """

    share: float = 0.5
    group: int = GROUP
    criterion: str = "activation"
    shares: str = "equal"
    task: str = ""
    score_batches: int = -1
    score_iters: int = 200
    score_learning_rate: float = 0.05
    target_bytes: int | None = None
    target_tokens_per_second: float | None = None

    def __post_init__(self) -> None:
        for name, holds, allowed in (
            ("share", 0 < self.share <= 1, "more than 0, up to 1"),
            ("group", type(self.group) is int and self.group >= 1, "1 or more, 16 as a rule"),
            ("criterion", self.criterion in CRITERIA, ", ".join(CRITERIA)),
            ("shares", self.shares in SHARES, ", ".join(SHARES)),
            (
                "score_batches",
                self.score_batches == -1 or self.score_batches >= 1,
                "1 or more, or -1",
            ),
        ):
            if not holds:
                raise ConfigError(f"{name} is {shown(getattr(self, name))}; allowed: {allowed}.")
        if self.target_bytes is not None and self.target_tokens_per_second is not None:
            raise ConfigError(
                "target_bytes and target_tokens_per_second both choose the share; leave one out."
            )

    @property
    def has_target(self) -> bool:
        return self.target_bytes is not None or self.target_tokens_per_second is not None


@dataclass(frozen=True)
class PruneResult:
    """A mask that was made, where it is, and what a decode step reads.

    `bytes_before` and `bytes_after` are weights without adapters; `outcome` is the recovery's, None without.
    """

    path: Path
    mask: TaskMask
    bytes_before: int
    bytes_after: int
    outcome: RunOutcome | None

    @property
    def block_shares(self) -> list[float]:
        """The kept share of each block."""
        return [float(share) for share in self.mask.kept.mean(axis=1)]


def prune(
    recipe: Recipe,
    path: str | Path,
    pruning: Pruning | None = None,
    recovery: RecoveryTraining | None = None,
    *,
    resume: bool = False,
    progress: Progress | None = None,
    on_plan: Callable[[Plan], None] | None = None,
    on_event: Callable[[Event], None] | None = None,
    stopping: Stopping | None = None,
) -> PruneResult:
    """Make a task mask for an AFM model, float or packed, and save it as a folder that runs like an adapter.

    Args:
        recipe: the model, and the task's data; how to train, for a recovery and the criterion "learned". Its
            teacher is "self", the whole model, by default.
        path: folder to make, whole or not at all.
        pruning: how the mask is made.
        recovery: trains an adapter for the kept channels (its `mask` and `card` are set here); None for a mask
            alone.
        resume: resume an interrupted run.
        progress: called with the numbers of finished and of all batches of the pass that scores channels.
        on_plan, on_event, stopping: see `train_by`.

    Raises:
        AFMError: for an argument, data, a model or a run that can't be used.
    """
    threads.check_process()
    refuse_ranks("A mask")
    path, pruning = Path(path), pruning or Pruning()
    refuse_existing(path)
    source = ModelSource.open(recipe.model)
    _check_model(source, pruning.group)
    recipe = dataclasses.replace(recipe, teacher=recipe.teacher or "self")
    batches = read_split(dataclasses.replace(recipe, packing=False), source, "train")
    is_learned = pruning.criterion == "learned"
    run_path = Path(f"{path}-run")
    has_run = is_learned or recovery is not None
    if resume and not has_run:
        raise ConfigError(
            "A mask of one pass has no run to resume; leave resume out, and the pass is made again."
        )
    inside, rest, weights = _describe(source, pruning.group)
    run, outcome = None, None
    if has_run:
        manifest = dataclasses.asdict(pruning) | {
            "kind": "prune",
            "model": source.name,
            "model_weights": weights,
            "data": batches.fingerprint,
            "seed": recipe.options.seed,
            "recovery": recovery is not None,
        }
        run = (RunFolder.open if resume else RunFolder.create)(run_path, manifest)
    hooks: RunArguments = {"on_plan": on_plan, "on_event": on_event, "stopping": stopping}
    with run or nullcontext():
        made = run_path / "mask"
        if run is None or not made.exists():
            pruning = _with_share(pruning, source, run)
            if is_learned:
                _train_mask(recipe, pruning, made, run_path / "scores", hooks)
            else:
                mask = make_mask(source, batches, pruning, progress)
                if run is not None:
                    save_mask(made, mask)
        if run is not None:
            mask = read_mask(made)
        before, after = inside + rest, round(inside * mask.share) + rest
        card = _card(path.name, source, mask, batches, pruning, recipe, before, after)
        if recovery is None:
            save_mask(path, mask, card)
        else:
            recovery = dataclasses.replace(recovery, mask=mask, card=card)
            outcome = _train(recovery, recipe, path, run_path / "recovery", hooks)
    return PruneResult(path, mask, before, after, outcome)


def make_mask(
    source: ModelSource, batches: Batches, pruning: Pruning, progress: Progress | None = None
) -> TaskMask:
    """Return the mask of "activation" or "gradient", by one pass over batches of one sample in a row."""
    model = source.load()
    warn_if_slow(model)
    find = {"activation": activation_scores, "gradient": gradient_scores}[pruning.criterion]
    scores = group_scores(find(model, batches, pruning.score_batches, progress), pruning.group)
    kept = kept_groups(scores, kept_counts(scores, pruning.share, pruning.shares))
    base = folder_fingerprint(model.args, source.folder)
    return TaskMask(kept, pruning.group, pruning.task, pruning.criterion, base)


def _train_mask(
    recipe: Recipe, pruning: Pruning, path: Path, run_path: Path, hooks: RunArguments
) -> None:
    """Train a mask's scores, from where a run has ended, and write the mask to `path`."""
    values = dataclasses.asdict(pruning)
    fields = dataclasses.fields(MaskTraining)
    options = dataclasses.replace(
        recipe.options,
        iters=pruning.score_iters,
        learning_rate=pruning.score_learning_rate,
        lr_schedule=None,
        warmup_iters=0,
        # Often enough that a good step is kept.
        steps_per_eval=max(1, min(recipe.options.steps_per_eval, pruning.score_iters // 5)),
    )
    steps = dataclasses.replace(
        recipe, options=options, epochs=None, warmup_share=None, warmup_epochs=None, test=False
    )
    _train(MaskTraining(**{f.name: values[f.name] for f in fields}), steps, path, run_path, hooks)


def _train(
    method: Method, recipe: Recipe, path: Path, run_path: Path, hooks: RunArguments
) -> RunOutcome:
    """Train by a method, from where a run in `run_path` has ended, if there is one."""
    is_begun = (run_path / "run.json").exists()
    arguments: RunArguments = {**hooks, "run_path": run_path, "resume": is_begun}
    return train_by(method, recipe, path, **arguments).outcome


def _describe(source: ModelSource, group: int) -> tuple[int, int, str]:
    """Return `step_bytes` of a model, and the fingerprint of its weights; the model is not kept.

    Raises `CheckpointError` when groups of this size cut a packed word, or a group of scales.
    """
    model = source.load()
    base = MaskBase.of(model)
    every_second = np.zeros((len(base.layers), base.layers[0].width // group), bool)
    every_second[:, ::2] = True
    base.plan(TaskMask(every_second, group))
    return *step_bytes(model), source.fingerprint(model)


def _check_model(source: ModelSource, group: int) -> None:
    """Raise `ConfigError` unless the model is an AFM model whose feed-forward holds whole groups."""
    if not source.is_afm:
        raise ConfigError(
            f"{source.folder} is no AFM model, and masks are made only for AFM models. Choose an AFM model."
        )
    width = ModelConfig.from_dict(source.values, str(source.folder / "config.json")).ffn_dim
    if width % group:
        allowed = [n for n in (1, 2, 4, 8, 16, 32, 64, 128) if width % n == 0]
        raise ConfigError(
            f"group is {group}, which does not divide the {width:,} channels of a feed-forward; allowed are "
            f"divisors, such as {', '.join(map(str, allowed))}."
        )


def _with_share(pruning: Pruning, source: ModelSource, run: RunFolder | None) -> Pruning:
    """Replace the share by the one that the target asks for; a run keeps it, because speeds vary."""
    if not pruning.has_target:
        return pruning
    key = str((pruning.target_bytes, pruning.target_tokens_per_second, pruning.group))
    kept = run.kept(_KEPT_SHARE, key) if run is not None else None
    if kept is not None:
        return dataclasses.replace(pruning, share=kept[_KEPT_SHARE].item())
    if pruning.target_bytes is not None:
        share = share_for_bytes(source.load(), pruning.target_bytes, pruning.group)
    else:
        assert pruning.target_tokens_per_second is not None
        target = pruning.target_tokens_per_second
        share = share_for_speed(source.load(), target, pruning.group, generation_speed)
    if run is not None:
        run.keep(_KEPT_SHARE, {_KEPT_SHARE: mx.array(share)}, key)
    return dataclasses.replace(pruning, share=share)


def generation_speed(model: nn.Module) -> float:
    """Return the tokens per second of generating one answer, the median of five runs of 64 tokens."""
    case = BenchmarkCase(prompt_tokens=32, generated_tokens=64)
    return run_case(model, case, repetitions=5).decode.median


def _card(
    name: str,
    source: ModelSource,
    mask: TaskMask,
    batches: Batches,
    pruning: Pruning,
    recipe: Recipe,
    before: int,
    after: int,
) -> str:
    """Return the text of the folder's README.md: what was kept, by what, from what."""
    how = f"{pruning.criterion}, {pruning.shares} shares, seed {recipe.options.seed}"
    shares = "\n".join(
        f"| {block} | {width:,} | {width / mask.ffn_dim:.1%} |"
        for block, width in enumerate(mask.widths)
    )
    return (
        f"# {name}\n\nA task mask for {source.name}: the feed-forward channels that a task needs. It runs "
        f"as an adapter does.\n\n| | |\n| --- | --- |\n| task | {mask.task or 'not described'} |\n"
        f"| data | {len(batches):,} samples, {batches.n_tokens:,} tokens |\n| criterion | {how} |\n"
        f"| kept | {mask.share:.1%} of {mask.ffn_dim:,} channels in {mask.blocks} blocks, groups of "
        f"{mask.group} |\n| weights that a decode step reads | {after:,} of {before:,} bytes |\n\n"
        f"## What each block keeps\n\n| block | channels | share |\n| ---: | ---: | ---: |\n{shares}\n"
    )
