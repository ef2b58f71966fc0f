"""Make a model smaller, by data: a task mask keeps the feed-forward channels that a task needs, and `--experts`
removes experts of a mixture.
"""

from __future__ import annotations

import argparse
import dataclasses
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from afm_mlx.cli import training_runs
from afm_mlx.cli.arguments import (
    MAX_NUMBER,
    Argument,
    UsageError,
    count_or_all,
    flag_of,
    integer,
    number,
    positive,
)
from afm_mlx.cli.output import print_json, progress_bar
from afm_mlx.cli.signals import deferred_signals
from afm_mlx.cli.training_runs import (
    LORA_PARAMETERS,
    Reporter,
    features_of,
    fields_given,
    recipe_of,
    run_advice,
    size,
    training_tables,
)

if TYPE_CHECKING:
    from afm_mlx.training.pruning.mask_training import RecoveryTraining
    from afm_mlx.training.pruning.prune import PruneResult

LEARNING_RATE = 1e-3
FULL_LEARNING_RATE = 1e-5
ALTERNATIVES = (
    *training_runs.ALTERNATIVES,
    ("ffn", "experts", "what is cut"),
    ("ffn", "target_bytes", "the kept share"),
    ("ffn", "target_tokens_per_second", "the kept share"),
    ("target_bytes", "target_tokens_per_second", "the kept share"),
)

# fmt: off
_OWN = [
    Argument("--save-path", None,
             "folder to make, which must not exist: a mask, which runs as an adapter (mask by default), or the "
             "model with fewer experts (pruned by default)"),
]
_CHANNELS = ("activation", "gradient", "learned", "predictor")
_EXPERTS = (
    "reap", "man", "msan", "ean", "eas", "eae", "eao", "frequency", "ecc", "evtc", "ets", "router", "ews",
    "ewn", "wsr", "egs", "egn", "ege", "ego", "random",
)
_MASK = [
    Argument("--ffn", positive(1),
             "kept share of the feed-forward channels, more than 0 and up to 1; 0.5 by default",
             metavar="SHARE"),
    Argument("--target-bytes", size,
             "keep the largest share with which a decode step reads at most this many bytes of weights, such "
             "as 570MB",
             metavar="SIZE"),
    Argument("--target-tokens-per-second", positive(MAX_NUMBER),
             "keep the largest share with which this machine generates one answer at this speed", metavar="N"),
    Argument("--criterion", [*_CHANNELS, *_EXPERTS],
             "activation, the default for masks: how far a channel moves its block's output on the task's "
             "prompts and answers; gradient: how far it moves the loss of the answers; learned: scores that "
             "are trained; predictor: channels that the model's own predictor (lora --fine-tune-type ifp) "
             "chooses for --task or for the prompts of --data. Of experts: reap, the default: gate times "
             "length of the outputs, as a mean over the expert's tokens; man and msan: length, and its square, "
             "without gates; ean, eas, eae, eao: by outputs; frequency, ecc, evtc, ets: by tokens; router: "
             "experts with short rows in the router stay; ews, ewn, wsr: by weights; egs, egn, ege, ego: by "
             "gradients; random. docs/masks.md has the formulas"),
    Argument("--group", integer(1),
             "neighbouring channels that are kept or cut together; 16 by default, which fills a word of 2-bit "
             "weights. Float models may have 1"),
    Argument("--shares", ["equal", "sensitivity"],
             "equal, by default: each block keeps the same share; sensitivity: blocks whose channels score "
             "higher keep more"),
    Argument("--task", None, "what the mask is for, as text; the mask keeps it", metavar="TEXT"),
    Argument("--score-batches", count_or_all,
             "batches from which channels are scored, or texts for experts; -1, by default, for all of the "
             "data"),
    Argument("--score-iters", integer(1), "steps that train the scores of --criterion learned; 200 by default"),
    Argument("--score-learning-rate", positive(),
             "highest learning rate of the steps of --score-iters; 0.05 by default"),
]
_FEWER = [
    Argument("--experts", number(0, 1),
             "kept share of the experts of each layer, in place of a mask: the result is a model folder",
             metavar="SHARE"),
    Argument("--drop", ["lowest", "highest"],
             "remove the experts with the lowest scores of --criterion, by default, or with the highest"),
    Argument("--rounds", integer(1),
             "remove experts in this many rounds, and score those that are left before each; 1 by default"),
]
_RECOVERY = [
    Argument("--recover", ["lora", "full"],
             "lora: train a LoRA adapter with which the cut model imitates the whole one, or --teacher; full, "
             "with --experts: train all weights after each round"),
    *LORA_PARAMETERS,
    Argument("--save-dtype", ["float16", "float32"], "type of the saved adapter's numbers; float16 by default"),
]
# fmt: on
ARGUMENTS = {
    **training_tables(f"{LEARNING_RATE:g}, or {FULL_LEARNING_RATE:g} with --recover full,", *_OWN),
    "mask": _MASK,
    "experts": _FEWER,
    "recovery": _RECOVERY,
}
_TRAINING = [row for table in ("training", "distillation", "run") for row in ARGUMENTS[table]]
_SCORES_ONLY = ("score_iters", "score_learning_rate")
_LENGTH = ("iters", "epochs", "learning_rate", "lr_schedule", "warmup_iters", "warmup_epochs")
"""Arguments of training that have others in their place for scores."""
_OF_EXPERTS = ("criterion", "score_batches", "recover")
"""Arguments of masks that `--experts` has, too."""


def run(args: argparse.Namespace) -> None:
    if args.experts is not None:
        _prune_experts(args)
        return
    args.save_path = args.save_path or "mask"
    if args.rounds or args.drop or args.criterion in _EXPERTS or args.recover == "full":
        raise UsageError(
            f"--rounds, --drop, --recover full and the criteria {', '.join(_EXPERTS)} need --experts SHARE. "
            "Add it, or leave them out."
        )
    if args.criterion == "predictor":
        _predict(args)
        return
    if args.plot is not None:
        raise UsageError(
            "--plot is for lora and qat; a recovery's metrics are in SAVE_PATH-run/recovery/metrics.jsonl."
        )
    _check_use(args)
    if args.teacher is None:
        args.teacher = "self"
    recipe = recipe_of(args, LEARNING_RATE)
    from afm_mlx.training.pruning.prune import Pruning, prune

    values = fields_given(args, Pruning)
    if args.ffn is not None:
        values["share"] = args.ffn
    pruning, path = Pruning(**values), Path(args.save_path)
    run_path = Path(f"{path}-run")
    if args.resume and not (run_path / "run.json").exists():
        raise UsageError(f"--resume: {run_path} holds no run. Leave it out to start one.")
    with (
        run_advice(args, run_path),
        progress_bar("scoring", "batch") as scoring,
        progress_bar("training", "step") as bar,
        ExitStack() as bars,
    ):
        reporter = Reporter(args, bar, bars)
        result = prune(
            recipe,
            path,
            pruning,
            _recovery(args),
            resume=args.resume,
            progress=scoring,
            on_plan=reporter.on_plan,
            on_event=reporter.on_event,
            stopping=deferred_signals,
        )
    _print(args, result)


def _predict(args: argparse.Namespace) -> None:
    """Make a mask by the model's own predictor, which sets the kept share and the group."""
    names = [row.name for row in (*_MASK, *_RECOVERY) if row.name not in ("criterion", "task")]
    if given := [flag_of(name) for name in (*names, "teacher") if getattr(args, name)]:
        raise UsageError(
            f"{', '.join(given)} would do nothing with --criterion predictor: the predictor sets the share "
            "and the groups. Leave it out."
        )
    if args.data is None and not args.task:
        raise UsageError(
            "--criterion predictor needs --task or --data, which say what the mask is for."
        )
    from afm_mlx.training.pruning.predicted_mask import predict_mask

    features = features_of(args)
    mask = predict_mask(
        args.model, args.save_path, task=args.task or "", data=args.data, features=features
    )
    if args.json:
        print_json({"model": str(args.model), "path": args.save_path, "share": mask.share})
        return
    print(
        f"Kept {mask.share:.1%} of {mask.ffn_dim:,} channels in each block, in groups of {mask.group}"
    )
    print(f"Saved to {args.save_path}")


def _prune_experts(args: argparse.Namespace) -> None:
    """Remove experts of a model, and report its size and perplexity."""
    args.save_path = args.save_path or "pruned"
    unused = [row for row in (*_MASK, *_RECOVERY[1:]) if row.name not in _OF_EXPERTS]
    given = [flag_of(row.name) for row in unused if getattr(args, row.name) is not None]
    given += [flag_of(name) for name in ("resume", "plot") if getattr(args, name)]
    given += [f"--criterion {args.criterion}"] if args.criterion in _CHANNELS else []
    given += ["--recover lora"] if args.recover == "lora" else []
    if given:
        raise UsageError(f"{', '.join(given)} can't be used with --experts. Leave it out.")
    _check_training(args, "--recover full")
    recipe = recipe_of(args, FULL_LEARNING_RATE)
    from afm_mlx.training.pruning.prune_experts import ExpertPruning, prune_experts

    values = {"criterion": args.criterion, "drop": args.drop, "rounds": args.rounds}
    values["score_texts"] = args.score_batches
    pruning = ExpertPruning(
        share=args.experts,
        seed=args.seed,
        train=args.recover == "full",
        **{name: value for name, value in values.items() if value is not None},
    )
    with (
        progress_bar("scoring", "text") as scoring,
        progress_bar("training", "step") as bar,
        ExitStack() as bars,
    ):
        reporter = Reporter(args, bar, bars)
        result = prune_experts(
            recipe,
            args.save_path,
            pruning,
            progress=scoring,
            on_stage=reporter.line,
            on_plan=reporter.on_plan,
            on_event=reporter.on_event,
            stopping=deferred_signals,
        )
    if args.json:
        facts = dataclasses.asdict(result) | {"model": str(args.model), "path": str(result.path)}
        kept = {name: ids.tolist() for name, ids in result.kept.items()}
        chosen = {"criterion": pruning.criterion, "drop": pruning.drop}
        print_json(facts | chosen | {"kept": kept})
        return
    share = result.experts_after / result.experts_before
    print(
        f"Kept {result.experts_after} of {result.experts_before} experts ({share:.1%}) in each of "
        f"{len(result.kept)} layers"
    )
    print(
        f"Weights: {result.bytes_after / 1e6:,.2f} of {result.bytes_before / 1e6:,.2f} MB, "
        f"{result.bytes_before / result.bytes_after:.2f}x fewer"
    )
    print(
        f"Perplexity: {result.perplexity_after:.3f}, {result.perplexity_before:.3f} before "
        f"({result.tokens:,} tokens of {args.data})"
    )
    print(f"Saved to {result.path}")


def _check_use(args: argparse.Namespace) -> None:
    """Raise `UsageError` for arguments of training that nothing would be trained by."""
    is_learned = args.criterion == "learned"
    if not is_learned:
        for name in _SCORES_ONLY:
            if getattr(args, name) is not None:
                raise UsageError(
                    f"{flag_of(name)} would do nothing with --criterion {args.criterion or 'activation'}; it "
                    "is for learned. Leave it out."
                )
    _check_training(args, "--recover lora", is_learned)


def _check_training(args: argparse.Namespace, recover: str, is_learned: bool = False) -> None:
    """Raise `UsageError` for arguments of training without `recover`, which would use them."""
    if args.recover is not None:
        return
    for row in [*_RECOVERY[1:], *_TRAINING]:
        value, used = getattr(args, row.name, None), row.name in ("seed", "resume")
        used = used or (is_learned and row in _TRAINING and row.name not in (*_LENGTH, "test"))
        if not used and value not in (None, False, row.options["default"]):
            raise UsageError(
                f"{flag_of(row.name)} without {recover} would do nothing. Add it, or leave this out."
            )


def _recovery(args: argparse.Namespace) -> RecoveryTraining | None:
    from afm_mlx.training.pruning.mask_training import RecoveryTraining

    if args.recover is None:
        return None
    own = {"keys": tuple(args.keys)} if args.keys else {}
    return RecoveryTraining(**fields_given(args, RecoveryTraining) | own)


def _print(args: argparse.Namespace, result: PruneResult) -> None:
    mask = result.mask
    if args.json:
        print_json(
            {
                "model": str(args.model),
                "data": str(args.data),
                "path": str(result.path),
                "criterion": mask.criterion,
                "group": mask.group,
                "share": mask.share,
                "block_shares": result.block_shares,
                "bytes_before": result.bytes_before,
                "bytes_after": result.bytes_after,
                "recovery_loss": None if result.outcome is None else result.outcome.best_loss,
            }
        )
        return
    least, most = min(result.block_shares), max(result.block_shares)
    blocks = "in each block" if least == most else f"{least:.1%} to {most:.1%} by block"
    print(f"Kept {mask.share:.1%} of {mask.ffn_dim:,} channels {blocks}, in groups of {mask.group}")
    ratio = result.bytes_before / result.bytes_after
    print(
        f"A decode step reads {result.bytes_after / 1e6:,.2f} of {result.bytes_before / 1e6:,.2f} MB of "
        f"weights, {ratio:.2f}x fewer"
    )
    if result.outcome is not None and result.outcome.best_loss is not None:
        outcome = result.outcome
        print(f"Best: Val loss {outcome.best_loss:.3f} after step {outcome.best_step}")
    print(f"Saved to {result.path}")
