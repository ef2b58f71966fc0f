"""The training loop, the same for full weights, LoRA adapters, and quantization-aware training.

    gradients of a step's micro-batches -> clipped -> optimizer -> average of weights (step.py)
    at the intervals of the options: a report; an evaluation, which keeps the best weights; a checkpoint

A run is a function of its seed, options and data: a resumed run takes the same steps as an uninterrupted one,
bit for bit on one machine's CPU. (A GPU sums the gradients of an embedding's row in any order, which changes
the last bits.) A step with a loss or gradient that is not finite changes no weight and ends the run with an
error that names the layer.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event as Flag
from typing import TypeAlias

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_map_with_path

from afm_mlx.errors import AFMError, CheckpointError, ConfigError, TrainingError
from afm_mlx.model.wired_memory import wired_memory
from afm_mlx.ranks import ALONE, RankLostError, Ranks
from afm_mlx.training.data.batches import AnyBatches
from afm_mlx.training.loop.gradient_checkpointing import Tree, recomputed_blocks
from afm_mlx.training.loop.losses import LOWER_IS_BETTER, Distillation, Loss
from afm_mlx.training.loop.mean_loss import (
    NO_WEIGHT,
    NOT_REPEATED,
    Means,
    find_non_finite,
    mean_loss,
    perplexity,
    random_key,
)
from afm_mlx.training.loop.optimizers import optimizer_of
from afm_mlx.training.loop.run_folder import TRAINABLE, RunFolder
from afm_mlx.training.loop.step import TrainingStep
from afm_mlx.training.loop.training_options import TrainingOptions


@dataclass(frozen=True)
class Resumed:
    """Event for `on_event`: the run continues from the checkpoint of `step`."""

    step: int


@dataclass(frozen=True)
class Stepped:
    """Event for `on_event`: step number `step`, from 1, has ended with the `loss` before its update."""

    step: int
    loss: float


@dataclass(frozen=True)
class Report:
    """Event for `on_event`: figures of training, which are also a line of metrics.jsonl."""

    step: int  # the last one, from 1
    loss: float  # weighted mean over the steps since the previous report
    learning_rate: float  # of the last step
    grad_norm: float  # global norm of the last step's gradient, before clipping
    tokens: int  # targets since step 1
    tokens_per_second: float  # since the previous report, without evaluation and saving
    peak_memory: int  # most bytes that MLX has held in this process
    metrics: dict[str, float] = field(default_factory=dict)
    """Means, as of the loss; with several ranks also "exchanges", their share of the steps' time."""


@dataclass(frozen=True)
class Validation:
    """Event for `on_event`: the result of an evaluation, which is also a line of metrics.jsonl.

    `step` is the last step before it, 0 before the first one. Only a cross-entropy has a perplexity. `metrics`
    are means, whose names begin with "valid_" in metrics.jsonl.
    """

    step: int
    valid_loss: float
    valid_perplexity: float | None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckpointSaved:
    """Event for `on_event`: the checkpoint of `step` was written to the folder `path`."""

    step: int
    path: Path


@dataclass(frozen=True)
class Preparing:
    """Event for `on_event`: `done` of `total` batches of what is computed once, before the first step."""

    what: str
    done: int
    total: int


@dataclass(frozen=True)
class Testing:
    """Event for `on_event`: the test split is about to be measured with the trained model, or with `what`."""

    __test__ = False  # not one of pytest's

    what: str | None


Event: TypeAlias = Preparing | Resumed | Stepped | Report | Validation | CheckpointSaved | Testing

OnEvent = Callable[[Event], None]
Stopping = Callable[[], AbstractContextManager[Flag]]
"""Makes a context with a flag, which signals set instead of interrupting the run."""


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended.

    Args:
        steps: number of steps, including steps before a resume.
        best_step: step after which the model had its final weights.
        best_loss: validation loss of the final weights; None without validation batches.
        best_metrics: metrics of that validation.
        stopped_early: True if `patience` ended the run.
        seconds: duration, including the time before a resume.
        tokens: number of targets that were trained on.
    """

    steps: int
    best_step: int
    best_loss: float | None
    stopped_early: bool
    seconds: float
    tokens: int
    best_metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class _Progress:
    """State of the loop in a checkpoint, besides arrays."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_step: int = 0
    best_loss: float | None = None
    best_metrics: dict[str, float] = field(default_factory=dict)
    evaluations_since_best: int = 0
    stopped_early: bool = False
    must_evaluate: bool = False  # True until the evaluation after this step has ended
    # Since the last report:
    loss: float = 0.0  # times weight
    weight: float = 0.0
    new_tokens: int = 0
    new_seconds: float = 0.0
    exchange_seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)  # sums


def train(
    model: nn.Module,
    loss: Loss,
    batches: AnyBatches,
    options: TrainingOptions,
    run: RunFolder,
    valid: AnyBatches | None = None,
    on_event: OnEvent | None = None,
    stopping: Stopping | None = None,
    ranks: Ranks = ALONE,
) -> RunOutcome:
    """Train a model's trainable parameters in place, from the newest checkpoint of `run` if it has one.

    No signal handler is installed: Ctrl-C interrupts at once, and the run can resume from its last checkpoint.
    With `stopping`, as on the command line, the run ends the step and writes a checkpoint before
    `KeyboardInterrupt`.

    Args:
        model: a model with trainable parameters; it is in eval mode afterwards.
        loss: sum of the weighted losses of a batch.
        batches: training data; step s (from 1) takes micro-batches (s - 1) * n to s * n - 1.
        options: settings of the loop.
        run: folder of checkpoints, best weights and metrics.
        valid: batches for evaluation; pass None for no evaluation.
        on_event: called with an `Event` at each resume, step, report, evaluation and checkpoint.
        stopping: entered around the loop, see `Stopping`; its flag may be set by any thread, of any rank.
        ranks: of this process, see `join_ranks`. All have the same arguments; only rank 0 uses the folder.

    Returns:
        The outcome. The model has the weights of the lowest validation loss, or the last weights without
        validation batches; with `ema_decay`, the averaged weights of that step.

    Raises:
        TrainingError: when a loss or gradient is not finite (names step and layer), when the disk is full, or
            when there is nothing to train.
        ConfigError: when `options.best_by` is no metric of the loss, or there are no validation batches.
        CheckpointError: when a checkpoint is damaged, or of another model.
        RankLostError: when another rank has ended; the last step is in a checkpoint.
    """
    if not tree_flatten(model.trainable_parameters()):
        raise TrainingError(
            "The model has no trainable parameter. Unfreeze the parameters to train, or add an adapter."
        )
    if valid is None and options.best_by != "loss":
        raise ConfigError(
            f"best_by is {options.best_by!r}, and there is no valid.jsonl to measure it on. Add one, or leave "
            "best_by out."
        )
    with ExitStack() as stack:
        stack.callback(model.eval)
        stack.enter_context(wired_memory(model))
        if options.grad_checkpoint:
            stack.enter_context(recomputed_blocks(model))
        flag = stack.enter_context(nullcontext(Flag()) if stopping is None else stopping())
        if on_event is None or not ranks.is_first:
            on_event = ignore_event
        batches = ranks.share(batches)
        trainer = _Trainer(model, loss, batches, options, run, valid, on_event, ranks)
        with trainer.steps_kept():
            return trainer.run_to_the_end(flag)


def ignore_event(event: Event) -> None:
    """Do nothing, for a run whose events nobody wants."""


@dataclass
class _Trainer:
    model: nn.Module
    loss: Loss
    batches: AnyBatches
    options: TrainingOptions
    run: RunFolder
    valid: AnyBatches | None
    on_event: OnEvent
    ranks: Ranks

    def __post_init__(self) -> None:
        options = self.options
        self.optimizer = optimizer_of(options, self.model)
        self.step = TrainingStep(
            self.model,
            self.loss,
            self.optimizer,
            options.clip_grad_norm,
            options.ema_decay,
            self.ranks,
        )
        self.progress = _Progress()
        self._grad_norm = 0.0  # norm of the last step's gradient
        self._started = 0.0

    def run_to_the_end(self, stop: Flag) -> RunOutcome:
        self._begin()
        options, progress = self.options, self.progress
        self._started = time.perf_counter() - progress.seconds
        if progress.step == 0 or progress.must_evaluate:
            self._evaluate()
        while progress.step < options.iters and not progress.stopped_early:
            self._take_step()
            step, is_last = progress.step, progress.step == options.iters
            if step % options.steps_per_report == 0 or is_last:
                self._report()
            if step % options.steps_per_eval == 0 or is_last:
                self._evaluate()
            is_stopped = self.ranks.any(stop.is_set())  # by any rank's signal
            stops = is_last or progress.stopped_early or is_stopped
            if step % options.save_every == 0 or stops:
                self._save()
            if is_stopped:
                stop.set()
                raise KeyboardInterrupt
        if self.valid is None:
            progress.best_step = progress.step
            with self._averaged_weights():
                self._save_best()
        if self.ranks.is_first:
            best = self.run.load_best()
            if best is None:
                raise CheckpointError(
                    f"{self.run.path} has lost its best weights. Start a new run in another folder."
                )
            weights, state = best
            progress.best_step, progress.best_loss = state["step"], state["valid_loss"]
            self.model.update(_filled(self.model.trainable_parameters(), weights, "best"))
        self.model.update(self.ranks.from_first(self.model.trainable_parameters()))
        return RunOutcome(
            steps=progress.step,
            best_step=progress.best_step,
            best_loss=progress.best_loss,
            stopped_early=progress.stopped_early,
            seconds=progress.seconds,
            tokens=progress.tokens,
            best_metrics=progress.best_metrics,
        )

    def _take_step(self) -> None:
        progress, ranks = self.progress, self.ranks
        if not ranks.is_first:  # other dropout than rank 0's, and the same after a resume
            mx.random.seed(_key(self.options.seed, ranks.rank, progress.step))
        key, exchanging = random_key(), ranks.seconds
        start, n = time.perf_counter(), self.options.grad_accumulation_steps
        batches = [self.batches(progress.step * n + i) for i in range(n)]
        self.model.train()
        result = self.step(batches)
        self.step.evaluate(result)
        loss, norm = result.loss.item(), result.grad_norm.item()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            mx.random.seed(key)  # the same dropout for the diagnosis
            cause = find_non_finite(self.model, self.loss, batches, self.step.gradients)
            # Only the ranks whose rows are to blame can tell.
            cause = min(ranks.gather(cause), key=(NOT_REPEATED, NO_WEIGHT).__contains__)
            options = self.options
            clip = options.clip_grad_norm
            raise TrainingError(
                f"Step {progress.step + 1} gave a loss of {loss:g} and a gradient of norm {norm:g}: {cause}. "
                f"No weight was changed by this step. {self.run.what_remains()} Try a lower learning rate "
                f"(now {options.learning_rate:g}), a longer warm-up (now {options.warmup_iters} steps), or a "
                f"lower clip_grad_norm ({'none yet' if clip is None else f'now {clip:g}'})."
            )
        progress.step += 1
        progress.loss += loss * result.weight.item()
        progress.weight += result.weight.item()
        for name, value in result.metrics.items():
            progress.metrics[name] = progress.metrics.get(name, 0.0) + value.item()
        progress.tokens += result.targets.item()
        progress.new_tokens += result.targets.item()
        progress.new_seconds += time.perf_counter() - start
        progress.exchange_seconds += ranks.seconds - exchanging
        self._grad_norm = norm
        kept = self.options.clear_cache_threshold
        if kept is not None and mx.get_cache_memory() > kept:
            mx.clear_cache()
        self.on_event(Stepped(progress.step, loss))

    def _report(self) -> None:
        progress = self.progress
        report = Report(
            step=progress.step,
            loss=progress.loss / progress.weight,
            learning_rate=self.optimizer.learning_rate.item(),
            grad_norm=self._grad_norm,
            tokens=progress.tokens,
            tokens_per_second=progress.new_tokens / progress.new_seconds,
            peak_memory=mx.get_peak_memory(),
            metrics={name: each / progress.weight for name, each in progress.metrics.items()},
        )
        if self.ranks.size > 1:
            report.metrics["exchanges"] = progress.exchange_seconds / progress.new_seconds
        progress.metrics = {}
        progress.loss = progress.weight = progress.new_seconds = progress.exchange_seconds = 0.0
        progress.new_tokens = 0
        self._publish(report)

    def _publish(self, line: Report | Validation) -> None:
        values = dataclasses.asdict(line)
        prefix = "valid_" if isinstance(line, Validation) else ""
        metrics = {f"{prefix}{name}": value for name, value in values.pop("metrics").items()}
        values = {name: value for name, value in values.items() if value is not None}
        if self.ranks.is_first:
            self.run.log(values | metrics)
        self.on_event(line)

    def _evaluate(self) -> None:
        if self.valid is None:
            return
        progress = self.progress
        progress.must_evaluate = True
        count = self.options.val_batches
        with self._averaged_weights():
            try:
                means = mean_loss(self.model, self.loss, self.valid, count, ranks=self.ranks)
            except TrainingError as error:
                raise TrainingError(
                    f"Validation after step {progress.step}: {error} {self.run.what_remains()} Try a lower "
                    f"learning rate (now {self.options.learning_rate:g})."
                ) from None
            is_best = self._is_best(means)
            if is_best:
                progress.best_step = progress.step
                progress.best_loss, progress.best_metrics = means.loss, means.metrics
                self._save_best()
        progress.must_evaluate = False
        progress.evaluations_since_best = 0 if is_best else progress.evaluations_since_best + 1
        progress.stopped_early = progress.evaluations_since_best == self.options.patience
        is_entropy = self.valid.unit == "tokens" and not isinstance(self.loss, Distillation)
        self._publish(
            Validation(
                progress.step,
                means.loss,
                perplexity(means.loss) if is_entropy else None,
                means.metrics,
            )
        )

    def _is_best(self, means: Means) -> bool:
        """Return True if no evaluation before was as good, by the metric `best_by`."""
        name, progress = self.options.best_by, self.progress
        values = {"loss": means.loss} | means.metrics
        if name not in values:
            raise ConfigError(f"best_by is {name!r}; allowed are {', '.join(values)}.")
        if progress.best_loss is None:
            return True
        best = ({"loss": progress.best_loss} | progress.best_metrics)[name]
        return values[name] < best if name in LOWER_IS_BETTER else values[name] > best

    @contextmanager
    def steps_kept(self) -> Iterator[None]:
        """Write a checkpoint of the last step, if it has none, when a reward or another rank fails."""
        try:
            yield
        except TrainingError:  # of the numbers, which would fail again
            raise
        except AFMError as error:
            if self.ranks.is_first and self.progress.step not in (0, *self.run.steps()):
                self._save()
            if isinstance(error, RankLostError) and self.ranks.is_first:
                raise RankLostError(
                    f"{error} {self.run.what_remains()} To continue, start all ranks again with --resume."
                ) from None
            raise

    @contextmanager
    def _averaged_weights(self) -> Iterator[None]:
        """Use the averaged weights inside the context, if there is an average."""
        if not self.step.average:
            yield
            return
        weights = self.model.trainable_parameters()
        self.model.update(tree_map(lambda w, a: a.astype(w.dtype), weights, self.step.average))
        try:
            yield
        finally:
            self.model.update(weights)

    def _save_best(self) -> None:
        weights = dict(tree_flatten(self.model.trainable_parameters()))
        state = {"step": self.progress.best_step, "valid_loss": self.progress.best_loss}
        if self.ranks.is_first:
            self.run.save_best(weights, state)

    def _begin(self) -> None:
        """Start from the seed, or from the newest checkpoint; other ranks start from rank 0's state."""
        ranks, optimizer, average = self.ranks, self.optimizer.state, self.step.average
        if ranks.is_first:
            self._begin_first()
        progress, self._grad_norm = ranks.gather(
            [dataclasses.asdict(self.progress), self._grad_norm]
        )[0]
        self.progress = _Progress(**progress)
        self.model.update(ranks.from_first(self.model.trainable_parameters()))
        optimizer.update(ranks.from_first(optimizer))
        average.update(ranks.from_first(average))

    def _begin_first(self) -> None:
        steps = self.run.steps()
        if not steps:
            mx.random.seed(self.options.seed)
            self.run.truncate_metrics(-1)
            return
        saved = self.run.load(steps[-1])
        optimizer, average = self.optimizer.state, self.step.average
        weights = saved.tensors.get(TRAINABLE, {})
        self.model.update(_filled(self.model.trainable_parameters(), weights, TRAINABLE))
        optimizer.update(_filled(optimizer, saved.tensors.get("optimizer", {}), "optimizer"))
        average.update(_filled(average, saved.tensors.get("ema", {}), "ema"))
        try:
            self.progress = _Progress(**saved.state["progress"])
            self._grad_norm = saved.state["grad_norm"]
            mx.random.seed(saved.state["random_key"])
        except (KeyError, TypeError) as error:
            fault = f"{self.run.checkpoint_path(steps[-1])} has a state of another kind: {error}."
            raise self.run.damaged(steps[-1], fault) from None
        self.run.truncate_metrics(self.progress.step, evaluated=not self.progress.must_evaluate)
        self.on_event(Resumed(self.progress.step))

    def _save(self) -> None:
        if not self.ranks.is_first:
            return
        progress = self.progress
        progress.seconds = time.perf_counter() - self._started
        tensors = {
            TRAINABLE: dict(tree_flatten(self.model.trainable_parameters())),
            "optimizer": dict(tree_flatten(self.optimizer.state)),
            "ema": dict(tree_flatten(self.step.average)),
        }
        state = {
            "progress": dataclasses.asdict(progress),
            "grad_norm": self._grad_norm,
            "random_key": random_key(),
        }
        path = self.run.save(progress.step, tensors, state)
        self.on_event(CheckpointSaved(progress.step, path))


def _key(*numbers: int) -> int:
    """Return a seed of MLX's generator that differs for different numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


def _filled(tree: Tree, tensors: dict[str, mx.array], what: str) -> Tree:
    """Return the tree with each array replaced by the one of its name in `tensors`; `what` is for errors."""
    wanted = dict(tree_flatten(tree))
    missing = [n for n, a in wanted.items() if n not in tensors or tensors[n].shape != a.shape]
    extra = tensors.keys() - wanted.keys()
    if missing or extra:
        raise CheckpointError(
            f"The run's {what} tensors don't fit this model: {len(missing)} are missing or of another "
            f"shape{f' ({missing[0]} first)' if missing else ''}, and {len(extra)} are left over. Resume with "
            "the model and options that the run was started with."
        )
    return tree_map_with_path(lambda name, a: tensors[name].astype(a.dtype), tree)
