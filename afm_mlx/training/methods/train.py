"""One call for each kind of training: all weights, LoRA adapters, or weights on a grid.

All share one way: the data is read first, then the model; a method makes it trainable; the loop
trains it, in a run folder that it can be resumed from; the method saves the best weights.

| call | trains | saves |
| --- | --- | --- |
| `train_full` | float weights | a model folder |
| `train_lora` | LoRA pairs on a frozen model, float or packed | an adapter folder |
| `train_qat` | float weights that are seen through their grid | a packed model folder |
| `train_draft` | float weights of a draft model, to say what its target would | a model folder |

A recovery adapter is `train_lora` on a packed model with the float model as the teacher
(arXiv 2407.21075, section 5.1).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from afm_mlx.adapters.adapter_folder import CONFIG_NAME, TENSORS_NAME, load_adapter
from afm_mlx.adapters.attach import attach_adapter
from afm_mlx.adapters.lora import lora_layers
from afm_mlx.checkpoint.fingerprint import arrays_fingerprint
from afm_mlx.checkpoint.stored_layers import quantization_of
from afm_mlx.errors import ConfigError, TrainingError
from afm_mlx.files import refuse_existing
from afm_mlx.kernels import BITS
from afm_mlx.quantization.packed_layers import PARTS, activation_dtype
from afm_mlx.training.loop.events import Event, Testing
from afm_mlx.training.loop.losses import CrossEntropy, Distillation, Loss
from afm_mlx.training.loop.run_folder import RunFolder
from afm_mlx.training.loop.trainer import Outcome, Stopping, train
from afm_mlx.training.loop.training_options import TrainingOptions
from afm_mlx.training.methods.methods import (
    DraftTraining,
    FullTraining,
    LoRATraining,
    Method,
    QATTraining,
)
from afm_mlx.training.methods.recipe import Data, Plan, Recipe, read_data
from afm_mlx.training.methods.scores import Score, Scores, measure
from afm_mlx.training.methods.source import Source, open_teacher
from afm_mlx.training.methods.training_memory import check_fits, estimate_memory


@dataclass(frozen=True)
class Result:
    """A training that came to its end.

    Args:
        path: of the folder that was saved.
        run_path: of the run's checkpoints and metrics.
        outcome: of the loop.
        test: of the test split, with what was trained and without; None where it was not asked for.
    """

    path: Path
    run_path: Path
    outcome: Outcome
    test: Scores | None

    @property
    def test_loss(self) -> float | None:
        """Of what was trained: cross-entropy, in nats a token."""
        return self.test.trained.loss if self.test and self.test.trained else None

    @property
    def test_perplexity(self) -> float | None:
        return self.test.trained.perplexity if self.test and self.test.trained else None


# -- one call each


def train_full(
    recipe: Recipe, save_path: str | Path, method: FullTraining | None = None, **options: Any
) -> Result:
    """Train float weights, and save a model folder.

    Args:
        recipe: model, data, and the loop's options.
        save_path: folder to make; it must not exist.
        method: which weights; all by default.
        options: of `train_by`, but `run_path` may be left out: it is `<save_path>-run` then.

    Raises:
        AFMError: what is wrong with an argument, the data, the model or the run.
    """
    return _into_model_folder(recipe, method or FullTraining(), Path(save_path), **options)


def train_qat(
    recipe: Recipe, save_path: str | Path, method: QATTraining | None = None, **options: Any
) -> Result:
    """Train weights that are seen through their grid, pack them, and save a model folder.

    Args:
        recipe: model, data, and the loop's options.
        save_path: folder to make; it must not exist.
        method: the grids; 2 bits, one scale per matrix, and a 4-bit embedding by default.
        options: see `train_full`.

    Raises:
        AFMError: what is wrong with an argument, the data, the model or the run.
    """
    return _into_model_folder(recipe, method or QATTraining(), Path(save_path), **options)


def train_lora(
    recipe: Recipe, adapter_path: str | Path, method: LoRATraining | None = None, **options: Any
) -> Result:
    """Train LoRA layers on a frozen model, and save an adapter folder.

    Args:
        recipe: model, data, and the loop's options.
        adapter_path: folder of the adapter; its run is `<adapter_path>/run`, if not said otherwise.
        method: rank, scale and layers; rank 16 and scale 0.5 on all linear layers by default.
        options: see `train_full`.

    Raises:
        AFMError: what is wrong with an argument, the data, the model or the run.
    """
    path = Path(adapter_path)
    options["run_path"] = options.get("run_path") or path / "run"
    taken = [name for name in (TENSORS_NAME, CONFIG_NAME) if (path / name).exists()]
    if taken and not options.get("resume"):
        if CONFIG_NAME not in taken:  # its run was killed while it saved, and may go on
            RunFolder(Path(options["run_path"])).check(resume=False)
        raise TrainingError(
            f"{path} holds an adapter already ({taken[0]}). Choose another folder, or move it away first."
        )
    return train_by(method or LoRATraining(), recipe, path, **options)


def train_draft(
    recipe: Recipe, save_path: str | Path, method: DraftTraining | None = None, **options: Any
) -> Result:
    """Train a draft model for speculative decoding, and save a model folder.

    The target, `recipe.teacher` with `recipe.teacher_adapter`, is frozen. Apple's toolkit trains by the reverse
    divergence, which the recipe has to say: `divergence="reverse"`.

    Args:
        recipe: the draft model, its target as the teacher, data, and the loop's options.
        save_path: folder to make; it must not exist.
        method: which weights; all by default.
        options: see `train_full`.

    Raises:
        AFMError: what is wrong with an argument, the data, a model or the run.
    """
    if recipe.teacher is None:
        raise ConfigError(
            "A draft model learns from the model that it drafts for, and there is no teacher. Name it "
            "(--teacher)."
        )
    return _into_model_folder(recipe, method or DraftTraining(), Path(save_path), **options)


def _into_model_folder(recipe: Recipe, method: Method, path: Path, **options: Any) -> Result:
    refuse_existing(path)
    options["run_path"] = options.get("run_path") or path.with_name(f"{path.name}-run")
    return train_by(method, recipe, path, **options)


def train_by(
    method: Method,
    recipe: Recipe,
    path: Path,
    *,
    run_path: str | Path,
    resume: bool = False,
    on_plan: Callable[[Plan], None] | None = None,
    on_event: Callable[[Event], None] | None = None,
    stopping: Stopping | None = None,
) -> Result:
    """The way that all methods share.

    Args:
        method: what is trained.
        recipe: model, data, and the loop's options.
        path: folder of what is saved.
        run_path: folder of checkpoints and metrics.
        resume: go on with the run that is there, which was started with the same arguments.
        on_plan: called before training starts.
        on_event: called by the loop.
        stopping: see `trainer.train`.

    Raises:
        AFMError: what is wrong with an argument, the data, the model or the run.
    """
    # Again when the run is opened; this is before any model is loaded.
    RunFolder(Path(run_path)).check(resume=resume)
    source = Source.open(recipe.model)
    method.check(source)
    teacher = _teacher_of(recipe, source, method)
    data = read_data(recipe, source)
    options = method.settled(recipe.settled(data.train.batches.per_epoch))
    model = source.load()
    manifest = {
        "kind": method.kind,
        "model": source.name,
        "model_weights": source.fingerprint(model),
    }
    loss, taught = _loss_of(recipe, source, teacher, manifest)
    method.prepare(model, source, data, options.seed)
    check_fits(_plan(model, source, method, taught, data, options).memory)
    manifest |= method.manifest(model) | _manifest(recipe, data, options)
    with (RunFolder.open if resume else RunFolder.create)(run_path, manifest) as run:
        if on_plan is not None:
            on_plan(_plan(model, source, method, taught, data, options))
        judge = taught if method.kind == "draft" else None
        score = partial(_score, model, data, recipe, judge, on_event)
        with method.as_untrained(model):
            untrained = score(method.untrained)
        valid = data.valid.batches if data.valid else None
        outcome = train(model, loss, data.train.batches, options, run, valid, on_event, stopping)
        method.finish(model)
        trained = score(None)
        scores = None if untrained is None else Scores(untrained, trained, method.untrained)
        facts = _facts(recipe, data, options, outcome, teacher, scores, method)
        method.save(path, model, source, facts)
    return Result(path, Path(run_path), outcome, scores)


def _score(
    model: nn.Module,
    data: Data,
    recipe: Recipe,
    judge: nn.Module | None,
    on_event: Callable[[Event], None] | None,
    what: str | None,
) -> Score | None:
    """Measure the test split, where there is one; `what` says with what, see `Testing`."""
    if data.test is None:
        return None
    if on_event is not None:
        on_event(Testing(what))
    return measure(model, data.test.batches, recipe.test_batches, judge)


def _teacher_of(recipe: Recipe, source: Source, method: Method) -> Source | None:
    if recipe.teacher is None:
        return None
    teacher = open_teacher(recipe.teacher, source)
    is_same = recipe.teacher_adapter is None and teacher.is_same(source)
    if method.kind != "qat" and is_same:
        raise ConfigError(
            f"The teacher {recipe.teacher} is the very model that is trained: there is nothing to learn from "
            "it. A packed model learns from the float model that it was made of."
        )
    return teacher


def _loss_of(
    recipe: Recipe, student: Source, teacher: Source | None, manifest: dict[str, Any]
) -> tuple[Loss, nn.Module | None]:
    """What is trained by, and the teacher with its adapter; `manifest` gets what a run keeps of it."""
    if teacher is None:
        return CrossEntropy(), None
    model = teacher.load_teacher(student)
    manifest |= {"teacher": teacher.name, "teacher_weights": teacher.fingerprint(model)}
    if recipe.teacher_adapter is not None:
        tensors, config = load_adapter(recipe.teacher_adapter)
        attach_adapter(
            model, recipe.teacher_adapter, base_folder=teacher.folder, force=recipe.force
        )
        manifest["teacher_adapter"] = arrays_fingerprint(config.scale, tensors)
    loss = Distillation(
        model, recipe.distillation_weight, recipe.distillation_temperature, recipe.divergence
    )
    return loss, model


_NOT_IN_MANIFEST = ("steps_per_report", "save_every", "clear_cache_threshold")  # change no number


def _manifest(recipe: Recipe, data: Data, options: TrainingOptions) -> dict[str, Any]:
    """What a run must keep when it resumes, by the names of the arguments."""
    values = dataclasses.asdict(options)
    values |= {
        name: getattr(recipe, name) for name in ("batch_size", "max_seq_length", "prompt_weight")
    }
    if recipe.teacher is not None:
        values["distillation_weight"] = recipe.distillation_weight
        values["distillation_temperature"] = recipe.distillation_temperature
        values["divergence"] = recipe.divergence
    values["packing"] = data.train.batches.packed
    values["data"] = data.train.batches.fingerprint
    values["valid_data"] = data.valid.batches.fingerprint if data.valid else None
    return {key: value for key, value in values.items() if key not in _NOT_IN_MANIFEST}


def _plan(
    model: nn.Module,
    source: Source,
    method: Method,
    teacher: nn.Module | None,
    data: Data,
    options: TrainingOptions,
) -> Plan:
    trainable = sum(array.size for _, array in tree_flatten(model.trainable_parameters()))
    memory = None
    if source.is_afm:
        memory = _memory(model, source, method, data, options)
        # A frozen model keeps nothing for a backward pass.
        memory += 0 if teacher is None else _nbytes(teacher)
    return Plan(_count(model), trainable, data, options, memory)


def _memory(
    model: nn.Module, source: Source, method: Method, data: Data, options: TrainingOptions
) -> int:
    batch = data.train.batches(0)
    rows, length = batch.inputs.shape
    ranks = [layer.rank for layer in lora_layers(model).values()]
    bits = quantization_of(source.values, source.folder).get("bits")
    return estimate_memory(
        model.args,
        "full" if method.kind == "draft" else method.kind,
        batch_size=rows,
        length=length,
        rank=ranks[0] if ranks else 1,
        base_bits=bits if bits in BITS else None,
        dtype=activation_dtype(),
        grad_checkpoint=options.grad_checkpoint,
        ema=options.ema_decay is not None,
        accumulates=options.grad_accumulation_steps > 1,
        targets=batch.labels.size,
    ).total


def _nbytes(model: nn.Module) -> int:
    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


def _count(model: nn.Module) -> int:
    """Parameters of a model; of a packed matrix the numbers that it stands for, and not its scales."""
    packed = [m for m in model.modules() if m.get("weight", _FLOAT).dtype == mx.uint32]
    more = sum(m["weight"].size * 32 // m.bits for m in packed)
    less = sum(m[part].size for m in packed for part in PARTS if part in m)
    return more - less + sum(array.size for _, array in tree_flatten(model.parameters()))


_FLOAT = mx.array(0.0)


def _facts(
    recipe: Recipe,
    data: Data,
    options: TrainingOptions,
    outcome: Outcome,
    teacher: Source | None,
    scores: Scores | None,
    method: Method,
) -> dict[str, str]:
    """Rows for the card."""
    rows = recipe.batch_size * options.grad_accumulation_steps
    rate = f"{options.learning_rate:g}, warm-up of {options.warmup_iters} steps, {options.schedule}"
    if options.lr_schedule is not None:
        rate = json.dumps(dict(options.lr_schedule))
    kept = f"after step {outcome.best_step}"
    if options.ema_decay is not None:
        kept = f"averaged with decay {options.ema_decay:g}, {kept}"
    facts = {
        "data": f"{data.train.samples:,} samples, {data.train.tokens:,} tokens",
        "steps": f"{outcome.steps:,} of {rows} rows, {outcome.tokens:,} predicted tokens",
        "learning rate": rate,
        "weights": kept,
    }
    if teacher is not None:
        adapter = recipe.teacher_adapter
        adapted = "" if adapter is None else f" with the adapter {Path(adapter).resolve().name}"
        facts["teacher"] = (
            f"{teacher.name}{adapted}, {recipe.divergence} divergence of weight "
            f"{recipe.distillation_weight:g}, temperature {recipe.distillation_temperature:g}"
        )
    if outcome.best_loss is not None:
        facts["validation loss"] = f"{outcome.best_loss:.4f}"
    if scores is not None and scores.trained is not None:
        facts["test cross-entropy"] = f"{scores.trained.loss:.4f} nats a token"
        facts[f"test cross-entropy, {method.untrained}"] = f"{scores.untrained.loss:.4f}"
        if scores.trained.acceptance is not None:
            facts["proposals that the target keeps"] = f"{scores.trained.acceptance:.1%}"
    return facts
