"""Train a LoRA adapter, all float weights, or a draft model; with a teacher, restore a packed model's
quality.
"""

from __future__ import annotations

import argparse
import dataclasses
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from afm_mlx import config
from afm_mlx.cli import model_options, training_runs
from afm_mlx.cli.arguments import (
    FLAG,
    MAX_ROWS,
    SWITCH,
    Argument,
    Parser,
    UsageError,
    add_tables,
    checked_arguments,
    drop_alternatives,
    flag_of,
    integer,
    json_object,
    number,
    positive,
)
from afm_mlx.cli.generate import CONSTRAINT, answer_constraint
from afm_mlx.cli.output import print_json, progress_bar
from afm_mlx.cli.training_runs import (
    LORA_PARAMETERS,
    TRAIN_PARTS,
    data_line,
    fields_given,
    fill,
    optimizer_settings,
    print_scores,
    recipe_of,
    run_training,
    scores_dict,
    training_tables,
)
from afm_mlx.loading.resolve import EMBEDDED_MODEL

if TYPE_CHECKING:
    from afm_mlx.training.data.batches import AnyBatches
    from afm_mlx.training.methods.lora_training import LoRATraining
    from afm_mlx.training.methods.recipe import Recipe

PREFERENCE_RATE = 1e-4
LEARNING_RATES = {"lora": 1e-3, "full": 1e-5, "draft": 1e-3, "ifp": 1e-5}
ADAPTER_FOLDER = "adapters"  # mlx-lm's default
PAIRS = 32
"""Default batch size of contrastive training."""

_REFERENCE = ("beta", "reference_adapter")
_CONTRASTIVE_NAMES = (
    "pool",
    "instruction",
    "temperature",
    "dimensions",
    "both_directions",
    "chunk_rows",
)
_FORMS = ("json_schema", "regex", "choices", "grammar")
_ROLLOUTS = (
    *_REFERENCE,
    "rewards",
    "reward_weights",
    "group_size",
    "max_completion_tokens",
    "temperature",
    "mask_truncated_completions",
    *_FORMS,
)
_CLIPPED = ("epsilon", "epsilon_high", "loss_type")
_OBJECTIVES: dict[str, tuple[str, ...]] = {
    "next-token": (),
    "contrastive": _CONTRASTIVE_NAMES,
    "dpo": (*_REFERENCE, "label_smoothing"),
    "ipo": _REFERENCE,
    "hinge": _REFERENCE,
    "dpop": (*_REFERENCE, "delta"),
    "orpo": ("beta",),
    "simpo": ("beta", "simpo_gamma"),
    "kto": (*_REFERENCE, "desirable_weight", "undesirable_weight"),
    "reward": ("grade_weight",),
    "grpo": (*_ROLLOUTS, *_CLIPPED, "updates_per_rollout"),
    "rloo": _ROLLOUTS,
    "mdloo": (*_ROLLOUTS, "gamma", "updates_per_rollout"),
}
"""Names of the arguments that only some objectives have, by the objective."""

_PREFERENCES = ("dpo", "ipo", "hinge", "dpop", "orpo", "simpo", "kto")
_POLICIES = ("grpo", "rloo", "mdloo")
PROMPTS = 8
"""Default number of prompts of a batch of rollouts."""

DRAFT_PRESETS = [name for name in config.PRESETS if name.endswith("-draft")]

PRESETS: dict[str, dict[str, Any]] = {
    "toolkit": {
        "rank": 32,
        "alpha": 16.0,
        "learning_rate": 1e-3,
        "epochs": 2.0,
        "warmup_epochs": 1.0,
        "schedule": "cosine",
        "final_learning_rate": 0.0,
        "batch_size": 4,
        "packing": False,  # so that a batch is four samples, and an epoch as many steps as there
        "grad_accumulation_steps": 1,
        "clip_grad_norm": 1.0,
        "weight_decay": 1e-2,
    }
}
"""Values of arguments that neither the command line nor a file sets; they override the defaults."""

_LORA_ALTERNATIVES = (
    ("alpha", "scale", "how strong the adapter is"),
    ("initial_adapter", "resume_adapter_file", "where to start"),
)
ALTERNATIVES = (
    *training_runs.ALTERNATIVES,
    *_LORA_ALTERNATIVES,
    *((one, other, "what answers must look like") for one, other in combinations(_FORMS, 2)),
)

# fmt: off
_ADAPTER_PATH = Argument(
    "--adapter-path", None,
    f"folder of the adapter, {ADAPTER_FOLDER} by default; checkpoints and logs are in its subfolder run")
_KIND = [
    Argument("--train", FLAG,
             "train: needed with --test only, which alone measures an adapter"),
    Argument("--fine-tune-type", list(LEARNING_RATES),
             "lora trains an adapter, full all float weights, draft a model that proposes tokens to --teacher "
             "for speculative decoding, ifp all float weights together with a predictor that chooses the "
             "feed-forward channels for each prompt",
             "lora"),
    Argument("--objective", list(_OBJECTIVES),
             "contrastive trains an adapter for embeddings: lines are {\"query\", \"positive\", "
             "\"negative\": [...]}, and vectors of a query and its positive become alike; a batch is "
             f"{PAIRS} pairs by default. dpo, ipo, hinge, dpop, orpo and simpo train by preferences: lines are "
             "{\"prompt\", \"chosen\", \"rejected\"}; kto takes these and {\"prompt\", \"completion\", "
             "\"label\"}; a batch is 4 pairs, or 4 answers for kto, by default. reward trains a reward model: "
             "lines are {\"prompt\", \"chosen\", \"rejected\", \"strength\"?, \"grades\"?}. grpo, rloo and "
             "mdloo train by --rewards of answers that the model samples: lines are {\"prompt\" or "
             "\"messages\"} with any keys that rewards look at, and a batch is "
             f"{PROMPTS} prompts by default",
             "next-token"),
    Argument("--preset", list(PRESETS),
             "toolkit has the settings of Apple's adapter training toolkit: rank 32, alpha 16, 2 epochs, the "
             "first of them warm-up to a rate of 1e-3, then a cosine to 0, batches of 4 samples, gradients "
             "clipped to 1, weight decay 0.01; other arguments override it"),
    _ADAPTER_PATH,
    Argument("--save-path", None,
             "model folder that full, draft and ifp training make; checkpoints and logs are in SAVE_PATH-run"),
    Argument("--draft-preset", DRAFT_PRESETS,
             "start a draft model of these sizes from random weights (by --seed), with the teacher's "
             "tokenizer, instead of --model"),
    Argument("--num-layers", integer(-1), "blocks that are trained, counted from the last; -1 for all", -1),
    TRAIN_PARTS,
]
_LORA = [
    *LORA_PARAMETERS,
    Argument("--alpha", number(0), "scale * rank, instead of --scale"),
    Argument("--lora-parameters", json_object,
             "rank, scale, dropout and keys in one object, as in mlx-lm's YAML files"),
    Argument("--initial-adapter", None,
             "adapter to start from, such as a recovery adapter; it sets rank, scale and layers",
             metavar="FOLDER"),
    Argument("--resume-adapter-file", None,
             "mlx-lm's name of --initial-adapter; an adapter's folder, or a .safetensors file in it. (To go "
             "on with a run, use --resume.)",
             metavar="PATH"),
    Argument("--save-dtype", ["float16", "float32"],
             "type of the saved adapter's numbers; float16 by default. Training is in float32 either way"),
]
_CONTRASTIVE = [
    Argument("--pool", ["last", "mean"],
             "vector of a text: the state of its last token, by default, or the mean of all"),
    Argument("--instruction", None,
             "what queries look for, written before each; the adapter keeps it", metavar="TEXT"),
    Argument("--temperature", positive(100),
             "for contrastive, what similarities are divided by: lower, near misses count more; 0.05 by "
             "default. For grpo, rloo and mdloo the temperature of the answers; 1 by default"),
    Argument("--dimensions", integer(1),
             "lengths of the vectors' beginnings that are trained to be of use alone (Matryoshka); the "
             "model's width and its halves down to 64 by default",
             nargs="+", metavar="N"),
    Argument("--both-directions", SWITCH, "also find the query of each positive; off by default"),
    Argument("--chunk-rows", integer(1, MAX_ROWS),
             "texts whose activations are in memory at a time, so that large batches fit; by default all, "
             "which takes less time"),
]
_PREFERENCE = [
    Argument("--beta", number(0, 1e6),
             "how strongly preferences or rewards count against the distance from the reference: higher stays "
             "closer; 0.1 by default, 2 for simpo, and 0.04 for grpo, rloo and mdloo, which also take 0. For "
             "orpo it is the weight of the preference's part"),
    Argument("--label-smoothing", number(0, 0.499),
             "share of preferences that are wrong, for pairs whose line has no strength; 0 by default"),
    Argument("--reference-adapter", None,
             "adapter that the reference runs with; by default the reference is the model without an adapter",
             metavar="FOLDER"),
    Argument("--delta", number(0), "weight of dpop's penalty for less likely chosen answers; 50 by default"),
    Argument("--simpo-gamma", number(0), "margin that simpo aims at; 1 by default"),
    Argument("--desirable-weight", number(0), "weight of kto's good answers; 1 by default"),
    Argument("--undesirable-weight", number(0), "weight of kto's other answers; 1 by default"),
]
_POLICY = [
    *model_options.REWARDS,
    Argument("--group-size", integer(2),
             "answers to a prompt, which are compared with each other; 8 by default"),
    Argument("--max-completion-tokens", integer(1), "maximum tokens of an answer; 256 by default"),
    Argument("--json-schema", None,
             "answers are JSON values of this schema: a file, or a type, module:Class or "
             "path/to/file.py:Class, whose code is run. Prompts stay as they are",
             metavar="FILE.json|TYPE"),
    *(row for row in CONSTRAINT if row.name in _FORMS[1:]),
    Argument("--mask-truncated-completions", SWITCH,
             "leave answers that were cut off out of the loss; off by default"),
    Argument("--updates-per-rollout", integer(1),
             "steps that a batch of answers serves; 1 by default, and 4 for mdloo"),
    Argument("--epsilon", positive(0.999),
             "how far grpo's ratio of probabilities may go below 1; 0.2 by default"),
    Argument("--epsilon-high", positive(1e6), "how far it may go above 1; as --epsilon by default"),
    Argument("--loss-type", ["grpo", "bnpo", "dr_grpo"],
             "what grpo divides the sum over an answer's tokens by: their number, by default; the mean number "
             "of the batch; or --max-completion-tokens"),
    Argument("--gamma", number(0),
             "weight of mdloo's distance from the policy that gave the answers; 0.1 by default"),
]
_IFP = [
    Argument("--ifp-stage", ["chunk", "prompt"],
             "text from which a mask is chosen: chunk, for continued pre-training: the chunk before; prompt, "
             "by default: a chat's first prompt"),
    Argument("--chunk-size", integer(1), "tokens of a chunk; 256 by default"),
    Argument("--ffn", positive(1),
             "share of the feed-forward channels that each block keeps; 0.5 by default", metavar="SHARE"),
    Argument("--group", integer(1), "neighbouring channels that are kept or cut together; 16 by default"),
    Argument("--predictor", None,
             "small model with the same vocabulary from which a new predictor starts, such as a draft model; "
             "by default the predictor starts from two blocks of random weights, by --seed",
             metavar="FOLDER"),
    Argument("--predictor-rank", integer(1), "width of the predictor's head; 128 by default"),
    Argument("--mask-temperature", positive(),
             "temperature of the masks in training: a lower one brings their numbers nearer to 0 and 1; 1 by "
             "default"),
    Argument("--binary-masks", SWITCH,
             "train with masks of zeros and ones; off by default, for soft numbers as in the paper"),
]
_REWARD = [
    Argument("--grade-weight", number(0),
             "weight of the loss of graded answers, next to the loss of their order; 0.1 by default"),
]
# fmt: on
_RATES = (
    "1e-3 for lora and draft, as in Apple's toolkit, 1e-4 for preferences and rewards, and 1e-5 for full "
    "and ifp"
)
ARGUMENTS = {
    **training_tables(_RATES, *_KIND),
    "LoRA": _LORA,
    "contrastive": _CONTRASTIVE,
    "preferences": _PREFERENCE,
    "answers that the model samples": _POLICY,
    "reward model": _REWARD,
    "Instruction-Following Pruning": _IFP,
}


def run(args: argparse.Namespace) -> None:
    kind = args.fine_tune_type
    if args.draft_preset is not None and kind != "draft":
        raise UsageError("--draft-preset is for --fine-tune-type draft; leave it out.")
    if kind != "ifp" and (given := [r.name for r in _IFP if getattr(args, r.name) is not None]):
        flags = ", ".join(map(flag_of, given))
        raise UsageError(f"{flags} would do nothing with --fine-tune-type {kind}; leave it out.")
    if kind == "lora":
        parser = Parser()
        add_tables(parser, {"options": LORA_PARAMETERS})
        parameters = [("--lora-parameters", *item) for item in (args.lora_parameters or {}).items()]
        known = ", ".join(row.name for row in LORA_PARAMETERS)
        values = checked_arguments(parameters, parser, known)
        drop_alternatives(values, args, _LORA_ALTERNATIVES)
        fill(args, values)
    _check_objective(args)
    if args.test and not (args.train or args.resume):
        _test_adapter(args)
        return
    if kind != "lora":
        _check_model_arguments(args)
    _fill_from_preset(args)
    if kind == "draft":
        schedule = None if args.lr_schedule is not None else "constant"
        fill(args, {"schedule": schedule, "distillation_divergence": "reverse"})
    by_answers = (*_PREFERENCES, *_POLICIES)
    rate = PREFERENCE_RATE if args.objective in by_answers else LEARNING_RATES[kind]
    recipe = recipe_of(args, rate)
    if kind == "lora":
        _train_adapter(args, recipe)
        return
    from afm_mlx.training.methods.ifp_training import IFPTraining
    from afm_mlx.training.methods.method import DraftTraining, FullTraining
    from afm_mlx.training.methods.model_source import FreshSource

    method = FullTraining(**fields_given(args, FullTraining))
    if kind == "ifp":
        names = {
            "stage": args.ifp_stage,
            "rank": args.predictor_rank,
            "temperature": args.mask_temperature,
            "binary": args.binary_masks,
        }
        own = {name: value for name, value in names.items() if value is not None}
        # `--rank` and `--temperature` are other things, and refused here.
        method = IFPTraining(**fields_given(args, IFPTraining) | own)
    if kind == "draft":
        method = DraftTraining(**fields_given(args, DraftTraining))
        if args.draft_preset is not None:
            fresh = FreshSource.for_target(args.teacher, args.draft_preset, args.seed)
            recipe = dataclasses.replace(recipe, model=fresh)
            args.model = args.draft_preset  # what is shown
    run_training(args, method, recipe, Path(args.save_path))


def _fill_from_preset(args: argparse.Namespace) -> None:
    """Set arguments that are not given, nor an alternative to them, to the preset's values."""
    if args.preset is None:
        return
    values = dict(PRESETS[args.preset])
    if args.fine_tune_type in ("full", "ifp"):
        raise UsageError(f"--preset {args.preset} is for lora and draft; leave it out.")
    if args.fine_tune_type == "draft":
        # The toolkit trains draft models with a linear warm-up, then a constant rate.
        values |= {"rank": None, "alpha": None, "schedule": "constant"}
    drop_alternatives(values, args, ALTERNATIVES)
    if args.initial_adapter or args.resume_adapter_file:  # which has a rank and a scale
        values |= {"rank": None, "alpha": None}
    if args.optimizer == "adam" or "weight_decay" in optimizer_settings(args):
        values["weight_decay"] = None
    fill(args, values)


def _train_adapter(args: argparse.Namespace, recipe: Recipe) -> None:
    from afm_mlx.training.methods.lora_training import RANK

    if args.save_path is not None:
        raise UsageError("--save-path is for full, draft and ifp; an adapter is --adapter-path.")
    if args.adapter_path == "":
        raise UsageError("--adapter-path is empty; a trained adapter needs a folder.")
    initial = args.initial_adapter or args.resume_adapter_file
    own = {"initial_adapter": initial, "keys": args.keys and tuple(args.keys)}
    if args.alpha is not None:
        if args.rank is None and initial is not None:
            raise UsageError("--alpha needs --rank, too; with --initial-adapter leave it out.")
        own["scale"] = args.alpha / (args.rank or RANK)
    run_training(args, _method_of(args, **own), recipe, Path(args.adapter_path or ADAPTER_FOLDER))


def _check_objective(args: argparse.Namespace) -> None:
    """Raise `UsageError` for arguments that the objective can't use; fill in its defaults."""
    objective = args.objective
    for name in dict.fromkeys(name for names in _OBJECTIVES.values() for name in names):
        if getattr(args, name) is not None and name not in _OBJECTIVES[objective]:
            takers = [other for other, names in _OBJECTIVES.items() if name in names]
            raise UsageError(
                f"{flag_of(name)} would do nothing with --objective {objective}; it is for "
                f"{', '.join(takers)}. Leave it out, or choose one of these."
            )
    if objective == "next-token":
        return
    for flag, is_given in (
        (f"--fine-tune-type {args.fine_tune_type}", args.fine_tune_type != "lora"),
        (f"--preset {args.preset}", args.preset is not None),
        ("--no-mask-prompt", not args.mask_prompt),
    ):
        if is_given:
            raise UsageError(f"{flag} is of no use with --objective {objective}; leave it out.")
    if objective == "contrastive":
        fill(args, {"batch_size": PAIRS})
    if objective in _PREFERENCES and args.beta == 0:
        raise UsageError("--beta: 0 is out of range; allowed is more than 0.")
    if objective in _POLICIES:
        fill(args, {"batch_size": PROMPTS})
        if args.rewards is None:
            raise UsageError(f"--rewards is missing: what --objective {objective} trains by.")


def _method_of(args: argparse.Namespace, **own: Any) -> LoRATraining:
    """Return the objective's method, of the arguments that are named like its fields, and `own` fields."""
    from afm_mlx.training.methods.lora_training import LoRATraining

    kind: type[LoRATraining] = LoRATraining
    if args.objective == "contrastive":
        from afm_mlx.training.methods.contrastive_training import ContrastiveTraining

        kind = ContrastiveTraining
        own |= {"pooling": args.pool, "dimensions": args.dimensions and tuple(args.dimensions)}
    elif args.objective in _PREFERENCES:
        from afm_mlx.training.loop.preference_losses import PreferenceLoss
        from afm_mlx.training.methods.preference_training import PreferenceTraining

        kind, own["loss"] = PreferenceTraining, PreferenceLoss(**fields_given(args, PreferenceLoss))
    elif args.objective == "reward":
        from afm_mlx.training.methods.reward_training import RewardTraining

        kind = RewardTraining
    elif args.objective in _POLICIES:
        from afm_mlx.training.methods.policy_training import PolicyTraining

        args.at_limit = "error"  # which only marks the answer as cut off
        kind, form = PolicyTraining, answer_constraint(args)
        own |= {"rewards": tuple(args.rewards), "constraint": form and form.constraint}
        own["reward_weights"] = args.reward_weights and tuple(args.reward_weights)
    return kind(**fields_given(args, kind) | own)


def _check_model_arguments(args: argparse.Namespace) -> None:
    """Raise `UsageError` for arguments that full, draft or ifp training can't use, or needs and lacks."""
    kind = args.fine_tune_type
    given = [row.name for row in (_ADAPTER_PATH, *_LORA) if getattr(args, row.name) is not None]
    if given:
        flags = ", ".join(map(flag_of, given))
        raise UsageError(f"{flags} would do nothing with --fine-tune-type {kind}; leave it out.")
    if args.save_path is None:
        raise UsageError(f"--save-path is missing: the model folder that {kind} training makes.")
    if kind == "draft" and args.teacher is None:
        raise UsageError("--teacher is missing: the model that the draft model proposes tokens to.")
    has_folder = args.model != EMBEDDED_MODEL
    if kind == "draft" and has_folder == (args.draft_preset is not None):
        fault = "both are given, choose one" if has_folder else "name one"
        raise UsageError(
            "Draft training starts from a float model folder (--model FOLDER) or from random weights "
            f"(--draft-preset {DRAFT_PRESETS[0]}); {fault}."
        )


def _test_adapter(args: argparse.Namespace) -> None:
    """Measure an existing adapter without training, as mlx-lm does with `--test` alone."""
    if args.fine_tune_type != "lora":
        raise UsageError(
            "--test alone measures an adapter. Add --train to train first; afm-mlx perplexity measures model "
            "folders."
        )
    if args.teacher is not None:
        raise UsageError("--teacher would do nothing with --test alone; add --train to train.")
    recipe = recipe_of(args, LEARNING_RATES["lora"])
    from afm_mlx.ranks import join_ranks
    from afm_mlx.training.methods.train import measure_adapter

    path = ADAPTER_FOLDER if args.adapter_path is None else args.adapter_path
    own = {}
    if args.objective in ("contrastive", "reward") and path and Path(path).exists():
        # A missing adapter is an error of `measure_adapter`.
        own["initial_adapter"] = path
    method = _method_of(args, **own)

    def on_data(data: AnyBatches) -> None:
        if not args.json:
            print(f"Testing {path or 'the model'}; nothing is trained without --train")
            print(data_line("Test", data))

    is_first = join_ranks().is_first
    with progress_bar("testing", "batch", is_first) as bar:
        scores = measure_adapter(recipe, path or None, method, on_data=on_data, progress=bar)
    if not is_first:
        return
    if args.json:
        facts = {"model": str(args.model), "data": str(args.data), "adapter_path": path or None}
        print_json(facts | {"test": scores_dict(scores)})
    else:
        print_scores(scores)
