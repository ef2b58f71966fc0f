"""Arguments that `lora` and `qat` share; `training_recipe.py` says what becomes of them."""

from __future__ import annotations

import argparse
import re

from afm_mlx.cli import options
from afm_mlx.cli.output import add_json
from afm_mlx.cli.parser import MAX_ROWS, integer, json_object, number
from afm_mlx.errors import named, shown
from afm_mlx.loading.resolve import EMBEDDED_MODEL

MAX_EPOCHS, MAX_SIZE = 10**6, 10**15  # the latter in bytes
EPOCHS, STEPS_BETWEEN = 3, (100, 1000)
"""How long to train where nobody says: passes over the data, and the fewest and the most steps of these."""

FEATURES = ("prompt", "completion", "chat", "text")  # what mlx-lm's YAML files may rename

ALTERNATIVES = (
    ("iters", "epochs", "how long to train"),
    ("warmup_iters", "warmup_epochs", "how long to warm up"),
    *(
        (name, "lr_schedule", "what the learning rate does")
        for name in ("warmup_iters", "warmup_epochs", "schedule", "final_learning_rate")
    ),
)
"""Two arguments that say the same thing, and what they say; see `parser.parse`."""


def add_training(parser: argparse.ArgumentParser, learning_rate: str) -> None:
    """The arguments of data, loop and teacher.

    Args:
        parser: of a command.
        learning_rate: what `--learning-rate` is by default, in words.
    """
    parser.add_argument(
        "--model",
        default=EMBEDDED_MODEL,
        help="model folder, hub id, or the name of the embedded model",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="take an adapter that was made for another model, if its shapes fit",
    )
    parser.add_argument(
        "--data",
        metavar="PATH",
        help="a folder with train.jsonl, and valid.jsonl and test.jsonl where there are any; or one .jsonl "
        'file. Lines are {"messages"}, {"prompt", "completion"}, {"text"}, or a list of messages',
    )
    _add_data(parser)
    _add_loop(parser, learning_rate)
    _add_teacher(parser)
    _add_run(parser)
    add_json(parser)
    for reason, *names in (
        (
            "nothing is sent to wandb or swanlab; metrics go to metrics.jsonl in the run's folder, and --plot "
            "draws them",
            "--report-to",
        ),
        ("it names a project for --report-to, which is not available", "--project-name"),
        ("data sets of the hub are not fetched; --data takes files", "--hf-dataset"),
    ):
        options.add_unavailable(parser, reason, *names)
    options.add_unavailable(
        parser, "code in a model's folder is not run here", "--trust-remote-code", nargs=0
    )


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument(
        "--batch-size", type=integer(1, MAX_ROWS), help="rows of a batch; 4 by default"
    )
    group.add_argument(
        "--max-seq-length",
        type=integer(2),
        help="the most tokens of a sample, and of a row; longer texts are cut, longer chats an error. By "
        "default 2048, or the model's context if that is less, and packed rows of some four samples",
    )
    group.add_argument(
        "--packing",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="put several samples into a row, which don't see each other; the default for AFM models",
    )
    group.add_argument(
        "--mask-prompt",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="train on what the assistant wrote only",
    )
    group.add_argument(
        "--prompt-weight",
        type=number(0),
        help="of the loss of all other tokens; 0, and 1 with --no-mask-prompt",
    )
    for name in FEATURES:
        key = "messages" if name == "chat" else name
        group.add_argument(
            f"--{name}-feature", metavar="KEY", help=f"what the data calls {key!r}, as in mlx-lm"
        )


def _add_loop(parser: argparse.ArgumentParser, learning_rate: str) -> None:
    group = parser.add_argument_group("training")
    group.add_argument(
        "--iters",
        type=integer(1),
        help=f"steps; by default {EPOCHS} passes over the data, but {STEPS_BETWEEN[0]} steps at least and "
        f"{STEPS_BETWEEN[1]} at most",
    )
    group.add_argument(
        "--epochs", type=number(0, MAX_EPOCHS), help="passes over the data, instead of --iters"
    )
    group.add_argument(
        "--learning-rate", type=number(0), help=f"the highest; {learning_rate} by default"
    )
    group.add_argument(
        "--warmup-iters",
        type=integer(0),
        help="steps of linear warm-up; by default 5%% of all, 100 at most",
    )
    group.add_argument(
        "--warmup-epochs", type=number(0, MAX_EPOCHS), help="likewise, in passes over the data"
    )
    group.add_argument(
        "--schedule",
        choices=["cosine", "constant"],
        help="what the learning rate does after that; cosine by default, constant for draft models",
    )
    group.add_argument(
        "--final-learning-rate", type=number(0), help="at the end of the cosine; 0 by default"
    )
    group.add_argument(
        "--lr-schedule",
        type=json_object,
        help="the learning rate in mlx-lm's words: name, arguments, warmup and warmup_init in one object",
    )
    group.add_argument(
        "--grad-accumulation-steps",
        type=integer(1),
        help="batches that make one step; 1 by default",
    )
    group.add_argument(
        "--grad-checkpoint",
        action="store_true",
        help="compute each block twice instead of keeping its activations, to use less memory",
    )
    group.add_argument(
        "--clip-grad-norm", type=number(0), help="the most it may be, 1 by default; 0 for any"
    )
    group.add_argument("--weight-decay", type=number(0), help="of AdamW; 0 by default")
    group.add_argument(
        "--optimizer",
        choices=["adamw", "adam"],
        default="adamw",
        help="adam is AdamW without weight decay; there are no others",
    )
    group.add_argument(
        "--optimizer-config",
        type=json_object,
        help='its betas, eps and weight_decay, by its name as in mlx-lm: {"adamw": {"betas": [0.9, 0.95]}}',
    )
    group.add_argument(
        "--clear-cache-threshold",
        type=size,
        metavar="SIZE",
        help="memory, such as 2GB, that MLX may keep for reuse between steps; its own limit by default",
    )
    group.add_argument("--seed", type=integer(0, options.MAX_SEED), default=0)


def _add_teacher(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("distillation")
    group.add_argument("--teacher", metavar="MODEL", help="model whose predictions to imitate")
    group.add_argument(
        "--teacher-adapter", metavar="FOLDER", help="adapter that the teacher runs with"
    )
    group.add_argument(
        "--distillation-weight",
        type=number(0, 1),
        help="of the distance from the teacher; the rest is that of the data's cross-entropy. 1 by default",
    )
    group.add_argument(
        "--distillation-temperature",
        type=number(1e-3),
        help="above 1, the teacher's unlikely tokens count more; 1 by default",
    )
    group.add_argument(
        "--distillation-divergence",
        choices=["forward", "reverse"],
        help="forward, KL(teacher || model), by default; reverse, KL(model || teacher), for draft models",
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("run")
    group.add_argument(
        "--resume",
        action="store_true",
        help="go on with a run that was interrupted, with the arguments that it was started with",
    )
    group.add_argument(
        "--val-batches", type=integer(-1), default=25, help="batches of an evaluation; -1 for all"
    )
    group.add_argument("--steps-per-report", type=integer(1), default=10)
    group.add_argument("--steps-per-eval", type=integer(1), default=200)
    group.add_argument(
        "--save-every", type=integer(1), default=100, help="steps between checkpoints"
    )
    group.add_argument(
        "--patience",
        type=integer(1),
        help="stop after this many evaluations without a better one; the best weights are kept anyway",
    )
    group.add_argument(
        "--ema-decay",
        type=number(0, 0.999999),
        help="keep an average of the weights with this decay; 0 for none",
    )
    group.add_argument(
        "--test",
        action="store_true",
        help="measure the loss on test.jsonl at the end, with what was trained and without",
    )
    group.add_argument(
        "--test-batches",
        type=integer(-1),
        default=-1,
        help="batches of test.jsonl that are measured; -1 for all",
    )
    group.add_argument(
        "--plot", metavar="FILE.png", help="draw losses and learning rate (needs matplotlib)"
    )


def size(text: str) -> int:
    """Bytes: a number, or one with M, MB, G or GB behind it."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([MG]B?)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is no size; allowed are such as 0, 500MB and 2GB"
        )
    unit = (match[2] or "").upper()[:1]
    nbytes = float(match[1]) * {"": 1, "M": 10**6, "G": 10**9}[unit]
    if nbytes > MAX_SIZE:
        raise argparse.ArgumentTypeError(f"{named(text)} is too much; allowed is up to 1000000GB")
    return int(nbytes)
