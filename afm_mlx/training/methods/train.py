"""Training by a method: the calls `train_full`, `train_lora`, `train_preferences`, and others.

`train_by` does the work for all methods: read the data, load the model, let the method prepare it, train it in
a run folder from which it can resume, and let the method save the best weights.

A recovery adapter is `train_lora` on a packed model with the float model as the teacher
(arXiv 2407.21075, section 5.1).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypedDict, Unpack

import mlx.nn as nn

from afm_mlx import threads
from afm_mlx.adapters.active import attach_adapter
from afm_mlx.adapters.adapter_folder import load_adapter
from afm_mlx.checkpoint.fingerprint import arrays_fingerprint
from afm_mlx.errors import ConfigError, TrainingError
from afm_mlx.loading.missing_kernels import warn_if_slow
from afm_mlx.ranks import ALONE, Ranks, join_ranks
from afm_mlx.training.data.batches import AnyBatches
from afm_mlx.training.loop.losses import AcceptanceRate, CrossEntropy, Loss
from afm_mlx.training.loop.mean_loss import mean_loss, perplexity
from afm_mlx.training.loop.run_folder import RunFolder
from afm_mlx.training.loop.trainer import (
    Event,
    RunOutcome,
    Stopping,
    Testing,
    ignore_event,
    train,
)
from afm_mlx.training.loop.training_options import TrainingOptions
from afm_mlx.training.methods.contrastive_training import ContrastiveTraining
from afm_mlx.training.methods.ifp_training import IFPTraining
from afm_mlx.training.methods.image_inputs import check_teacher, with_image_inputs
from afm_mlx.training.methods.lora_training import LoRATraining
from afm_mlx.training.methods.method import (
    WITHOUT_ADAPTER,
    DraftTraining,
    FullTraining,
    Method,
    QATTraining,
)
from afm_mlx.training.methods.model_source import ModelSource, open_as_teacher
from afm_mlx.training.methods.preference_training import PreferenceTraining
from afm_mlx.training.methods.recipe import (
    DataSplits,
    Plan,
    Recipe,
    make_plan,
    read_data,
)
from afm_mlx.training.methods.training_memory import check_fits


@dataclass(frozen=True)
class TrainingResult:
    """The result of a finished training.

    `test` holds the scores of the test split before and after training; None without a test.
    """

    path: Path
    run_path: Path
    outcome: RunOutcome
    test: Scores | None

    @property
    def test_loss(self) -> float | None:
        """Loss of the trained model on the test split: of tokens, the cross-entropy in nats per token."""
        return self.test.trained.loss if self.test and self.test.trained else None

    @property
    def test_perplexity(self) -> float | None:
        """`exp(test_loss)` of tokens; None where something else is scored."""
        score = self.test and self.test.trained
        return score.perplexity if score and score.unit == "tokens" else None


class RunArguments(TypedDict, total=False):
    """The arguments of `train_by` that all calls pass on."""

    run_path: str | Path | None
    resume: bool
    on_plan: Callable[[Plan], None] | None
    on_event: Callable[[Event], None] | None
    stopping: Stopping | None


def train_full(
    recipe: Recipe,
    save_path: str | Path,
    method: FullTraining | None = None,
    **options: Unpack[RunArguments],
) -> TrainingResult:
    """Train float weights, all by default, and save a model folder. Other arguments: see `train_by`."""
    return train_by(method or FullTraining(), recipe, save_path, **options)


def train_ifp(
    recipe: Recipe,
    save_path: str | Path,
    method: IFPTraining | None = None,
    **options: Unpack[RunArguments],
) -> TrainingResult:
    """Train a model with the predictor of its masks, and save its folder. Other arguments: see `train_by`."""
    return train_by(method or IFPTraining(), recipe, save_path, **options)


def train_lora(
    recipe: Recipe,
    adapter_path: str | Path,
    method: LoRATraining | None = None,
    **options: Unpack[RunArguments],
) -> TrainingResult:
    """Train LoRA pairs on a frozen model, and save an adapter folder. Other arguments: see `train_by`."""
    return train_by(method or LoRATraining(), recipe, adapter_path, **options)


def train_contrastive(
    recipe: Recipe,
    adapter_path: str | Path,
    method: ContrastiveTraining | None = None,
    **options: Unpack[RunArguments],
) -> TrainingResult:
    """Train LoRA pairs for embeddings, and save an adapter folder. Other arguments: see `train_by`."""
    return train_by(method or ContrastiveTraining(), recipe, adapter_path, **options)


def train_preferences(
    recipe: Recipe,
    adapter_path: str | Path,
    method: PreferenceTraining | None = None,
    **options: Unpack[RunArguments],
) -> TrainingResult:
    """Train LoRA pairs by preferences, and save an adapter folder. Other arguments: see `train_by`."""
    return train_by(method or PreferenceTraining(), recipe, adapter_path, **options)


def train_qat(
    recipe: Recipe,
    save_path: str | Path,
    method: QATTraining | None = None,
    **options: Unpack[RunArguments],
) -> TrainingResult:
    """Train weights that are rounded to a grid, and save them packed. Other arguments: see `train_by`."""
    return train_by(method or QATTraining(), recipe, save_path, **options)


def train_draft(
    recipe: Recipe,
    save_path: str | Path,
    method: DraftTraining | None = None,
    **options: Unpack[RunArguments],
) -> TrainingResult:
    """Train a draft model for the recipe's teacher, and save its folder. Other arguments: see `train_by`."""
    return train_by(method or DraftTraining(), recipe, save_path, **options)


def train_by(
    method: Method,
    recipe: Recipe,
    path: str | Path,
    *,
    run_path: str | Path | None = None,
    resume: bool = False,
    on_plan: Callable[[Plan], None] | None = None,
    on_event: Callable[[Event], None] | None = None,
    stopping: Stopping | None = None,
) -> TrainingResult:
    """Train a model and save the result.

    Args:
        method: which weights to train, and what to save.
        recipe: model, data, and the loop's options.
        path: folder to make for the result.
        run_path: folder of checkpoints and metrics; pass None for `<path>-run`, or `<path>/run` of an adapter.
        resume: resume the run in `run_path`, which was started with the same arguments.
        on_plan: called with the `Plan` of the run before training starts.
        on_event: called with each `Event` of the loop, with `Preparing` while something is computed once, and
            with `Testing` before each test.
        stopping: see `trainer.train`.

    Raises:
        AFMError: for an argument, data, a model or a run that can't be used.
    """
    threads.check_process()
    ranks = join_ranks()
    if on_event is None or not ranks.is_first:
        on_event = ignore_event
    path = Path(path)
    run_path = Path(run_path or method.default_run_path(path))
    # Check what can be checked before a model is loaded; opening `run_path` checks it again.
    if ranks.is_first:
        method.check_path(path, run_path, resume)
        RunFolder(run_path).check(resume=resume)
    source = ModelSource.open(recipe.model)
    method.check(recipe, source)
    teacher_source = open_teacher(recipe, source, method.may_imitate_itself)
    data = read_data(recipe, source, method.read_split)
    options = method.with_defaults(recipe.loop_options(data.train.per_epoch))
    for split in (data.train, data.valid, data.test):
        if split is not None:
            ranks.share(split)  # raises if it can't be split
    settings = _manifest(recipe, data, options)
    test_data = (data.test and data.test.fingerprint, recipe.test_batches)
    ranks.check_alike(settings | {"resume": resume, "test_data": test_data})

    model = source.load()
    warn_if_slow(model, "validation")  # training itself has no kernels
    manifest: dict[str, object] = {
        "kind": method.kind,
        "model": source.name,
        "model_weights": source.fingerprint(model),
    }
    teacher = None if teacher_source is None else load_teacher(recipe, teacher_source, source)
    if teacher is not None:
        check_teacher(data, teacher.model)
    loss = method.make_loss(recipe, teacher and teacher.model)
    method.prepare(model, source, data.train, options.seed)
    plan = make_plan(model, source, method.kind, teacher and teacher.model, data, options, ranks)
    check_fits(plan.memory)
    manifest |= {} if teacher is None else teacher.manifest
    manifest |= method.manifest(model) | settings
    ranks.check_alike(manifest)

    def test(label: str | None) -> SplitScore | None:
        if data.test is None:
            return None
        on_event(Testing(label))
        target = teacher.model if teacher and method.measures_acceptance else None
        loss = method.test_loss()
        return measure_split(model, data.test, recipe.test_batches, target, loss=loss, ranks=ranks)

    with _opened(run_path, manifest, resume, ranks) as run:
        if on_plan is not None and ranks.is_first:
            on_plan(plan)
        data = with_image_inputs(model, data, on_event, teacher and teacher.model)
        data = method.complete_data(model, source, data, run, on_event)
        with method.as_untrained(model):
            untrained = test(method.untrained_label)
        outcome = train(
            model, loss, data.train, options, run, data.valid, on_event, stopping, ranks
        )
        method.round_as_saved(model)
        trained = test(None)
        scores = Scores(untrained, trained, method.untrained_label) if untrained else None
        if ranks.is_first:
            method.save(
                path, model, source, _facts(recipe, data, options, outcome, teacher, scores)
            )
        ranks.any(False)  # no rank ends before the result is saved
    return TrainingResult(path, run_path, outcome, scores)


def _opened(path: Path, manifest: dict[str, object], resume: bool, ranks: Ranks) -> RunFolder:
    """Open the run's folder, which only rank 0 reads and writes."""
    if not ranks.is_first:
        return RunFolder(path)
    return (RunFolder.open if resume else RunFolder.create)(path, manifest)


def _manifest(recipe: Recipe, data: DataSplits, options: TrainingOptions) -> dict[str, object]:
    """Return by name the settings, and the fingerprints of the data, that must not change as a run resumes."""
    names = ["batch_size", "max_seq_length", "prompt_weight"]
    if recipe.teacher is not None:
        names += ["distillation_weight", "distillation_temperature", "divergence"]
    values = dataclasses.asdict(options) | {name: getattr(recipe, name) for name in names}
    for name in ("steps_per_report", "save_every", "clear_cache_threshold"):
        del values[name]  # it changes no number
    if options.optimizer == "adamw":  # as in the manifests of runs that knew no other optimizer
        del values["optimizer"], values["momentum"]
    return values | {
        "packing": data.train.packed,
        "data": data.train.fingerprint,
        "valid_data": data.valid.fingerprint if data.valid else None,
    }


def _facts(
    recipe: Recipe,
    data: DataSplits,
    options: TrainingOptions,
    outcome: RunOutcome,
    teacher: Teacher | None,
    scores: Scores | None,
) -> dict[str, str]:
    """Return the facts for the model card's table, by their labels."""
    rows = recipe.batch_size * options.grad_accumulation_steps
    rate = f"{options.learning_rate:g}, warm-up of {options.warmup_iters} steps, {options.schedule}"
    if options.lr_schedule is not None:
        rate = json.dumps(dict(options.lr_schedule))
    kept = f"after step {outcome.best_step}"
    if options.ema_decay is not None:
        kept = f"averaged with decay {options.ema_decay:g}, {kept}"
    facts = {
        "data": f"{len(data.train):,} samples, {data.train.n_tokens:,} tokens",
        "steps": f"{outcome.steps:,} of {rows} rows, {outcome.tokens:,} predicted {data.train.unit}",
        "learning rate": rate,
        "optimizer": {"adamw": "AdamW", "muon": "Muon for matrices, AdamW for the rest"}[
            options.optimizer
        ],
        "weights": kept,
    }
    if teacher is not None:
        facts["teacher"] = (
            f"{teacher.name}, {recipe.divergence} divergence of weight "
            f"{recipe.distillation_weight:g}, temperature {recipe.distillation_temperature:g}"
        )
    if outcome.best_loss is not None:
        facts["validation loss"] = f"{outcome.best_loss:.4f}"
    if scores is not None and scores.trained is not None:
        facts["test cross-entropy"] = f"{scores.trained.loss:.4f} nats a token"
        facts[f"test cross-entropy, {scores.label}"] = f"{scores.untrained.loss:.4f}"
        if scores.trained.acceptance is not None:
            facts["proposals that the target keeps"] = f"{scores.trained.acceptance:.1%}"
    return facts


class Teacher(NamedTuple):
    """A loaded teacher, its name for the card, and facts that must not change when a run resumes."""

    model: nn.Module
    name: str
    manifest: dict[str, object]


def open_teacher(
    recipe: Recipe, student: ModelSource, may_imitate_itself: bool
) -> ModelSource | None:
    """Find the teacher of a recipe, if it has one, without loading it; "self" is the untrained student.

    Raises `ConfigError` when student and teacher are the same model, unless `may_imitate_itself`; `AFMError`
    when there is no such model.
    """
    if recipe.teacher is None:
        return None
    teacher = student if str(recipe.teacher) == "self" else open_as_teacher(recipe.teacher)
    is_same = recipe.teacher_adapter is None and teacher.is_same(student)
    if is_same and not may_imitate_itself:
        raise ConfigError(
            f"The teacher {recipe.teacher} is the very model that is trained: there is nothing to learn from "
            "it. A packed model learns from the float model that it was made from."
        )
    return teacher


def load_teacher(recipe: Recipe, source: ModelSource, student: ModelSource) -> Teacher:
    """Load the teacher from `source`, with the recipe's `teacher_adapter` if it has one.

    Raises `ConfigError` when the student has another vocabulary, `AFMError` when teacher or adapter can't be
    loaded.
    """
    if not source.is_same(student):
        pieces, other_pieces = (each.tokenizer.get_vocab() for each in (source, student))
        rows, other_rows = (each.values.get("vocab_size") for each in (source, student))
        fault = ""
        if pieces != other_pieces:
            fault = f"{len(pieces)} and {len(other_pieces)} pieces"
        elif rows != other_rows:
            fault = f"{rows} and {other_rows} rows of the embedding"
        if fault:
            raise ConfigError(
                f"The teacher {source.name} and {student.name} have different vocabularies ({fault}): its "
                f"predictions can't be imitated. A teacher is the model that {student.name} was made from, or "
                "that it drafts for."
            )
    model, name = source.load(), source.name
    warn_if_slow(model, "the teacher")
    manifest: dict[str, object] = {"teacher": name, "teacher_weights": source.fingerprint(model)}
    adapter = recipe.teacher_adapter
    if adapter is not None:
        tensors, config = load_adapter(adapter)
        attach_adapter(model, adapter, base_folder=source.folder, force=recipe.force)
        manifest["teacher_adapter"] = arrays_fingerprint(config.scale, tensors)
        name += f" with the adapter {Path(adapter).resolve().name}"
    return Teacher(model, name, manifest)


@dataclass(frozen=True)
class SplitScore:
    """Scores of a model on a split of the data.

    Args:
        loss: weighted mean loss of what is scored: of tokens, the cross-entropy in nats.
        count: number of scored tokens, or of another `unit`.
        acceptance: share of a draft model's tokens that its target accepts, see `losses.AcceptanceRate`; None
            for other models.
        metrics: means of the loss's metrics, by their names.
        unit: what is scored, such as "tokens" or "pairs".
    """

    loss: float
    count: int
    acceptance: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    unit: str = "tokens"

    @property
    def perplexity(self) -> float:
        """`exp(loss)`."""
        return perplexity(self.loss)

    def to_dict(self) -> dict[str, object]:
        """Return JSON values; leaves out what was not measured."""
        if self.unit != "tokens":
            return {"loss": self.loss, **self.metrics, self.unit: self.count}
        values: dict[str, object] = {
            "loss": self.loss,
            "perplexity": self.perplexity,
            "tokens": self.count,
        }
        return values if self.acceptance is None else values | {"acceptance": self.acceptance}


@dataclass(frozen=True)
class Scores:
    """Two scores on the same batches.

    Args:
        untrained: the base without an adapter, or the model before training.
        trained: the adapted or trained model; None if there is none.
        label: label of `untrained`, such as "without the adapter".
    """

    untrained: SplitScore
    trained: SplitScore | None
    label: str


def measure_split(
    model: nn.Module,
    batches: AnyBatches,
    count: int = -1,
    teacher: nn.Module | None = None,
    progress: Callable[[int, int], None] | None = None,
    loss: Loss | None = None,
    ranks: Ranks = ALONE,
) -> SplitScore:
    """Measure how well a model predicts the first `count` batches, or all for -1.

    The model is in eval mode afterwards. `teacher` is a draft model's target, to measure the acceptance.
    `progress` is called with the numbers of finished and of all batches. `loss` is the cross-entropy by
    default. Several `ranks` split each batch, and have the same result.

    Raises `TrainingError` when the loss is not finite; the error names the batch and the layer.
    """
    loss = loss or CrossEntropy()
    means = mean_loss(model, loss, batches, count, progress, ranks)
    kept = None
    if teacher is not None:
        kept = mean_loss(model, AcceptanceRate(teacher), batches, count, ranks=ranks).loss
    return SplitScore(means.loss, means.targets, kept, means.metrics, batches.unit)


def measure_adapter(
    recipe: Recipe,
    adapter_path: str | Path | None,
    method: Method | None = None,
    *,
    on_data: Callable[[AnyBatches], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Scores:
    """Measure test.jsonl without and with an adapter, without training; ranks split its batches.

    Args:
        recipe: model, data, and the batches' sizes.
        adapter_path: see `load_adapter`; pass None to measure only the base.
        method: reads the data and says what to measure; `LoRATraining` by default.
        on_data: called with the batches of the test split before measuring starts.
        progress: called after each batch of a measurement, and of what is computed once for it, with the
            numbers of finished and of all batches.

    Raises:
        AFMError: for data, a model or an adapter that can't be used.
    """
    if adapter_path is not None:
        if not Path(adapter_path).exists():
            raise TrainingError(
                f"There is no adapter {adapter_path} to test. Name one (--adapter-path), or train one first "
                "(--train)."
            )
        load_adapter(adapter_path)  # raises before a model is loaded
    ranks, source = join_ranks(), ModelSource.open(recipe.model)
    method = method or LoRATraining()
    batches = method.read_split(recipe, source, "test")
    ranks.share(batches)  # raises if it can't be split
    if on_data is not None and ranks.is_first:
        on_data(batches)
    model = source.load()
    warn_if_slow(model)
    batches = method.complete_test(model, source, batches, progress)
    measure = partial(
        measure_split,
        model,
        batches,
        recipe.test_batches,
        progress=progress,
        loss=method.test_loss(),
        ranks=ranks,
    )
    untrained, trained = measure(), None
    if adapter_path is not None:
        attach_adapter(model, adapter_path, base_folder=source.folder, force=recipe.force)
        trained = measure()
    return Scores(untrained, trained, WITHOUT_ADAPTER)
