"""The arguments that `lora` and `qat` share: tables.

An argument with the name of a field of `Recipe`, `TrainingOptions` or a method's class fills that field;
`training_recipe.py` says what becomes of the others. One that is not given is None here wherever a preset may
have a say, and the field's default is what counts then.
"""

from __future__ import annotations

import argparse
import re

from afm_mlx.cli import options
from afm_mlx.cli.argument_table import FLAG, SWITCH, Argument, Tables, unavailable
from afm_mlx.cli.parser import MAX_ROWS, count_or_all, integer, json_object, number, positive
from afm_mlx.errors import named, shown

MAX_EPOCHS, MAX_SIZE = 10**6, 10**15  # the latter in bytes
EPOCHS, STEPS_BETWEEN = 3, (100, 1000)
"""How long to train by default: passes over the data, and the fewest and the most steps that they may take."""

FEATURES = ("prompt", "completion", "chat", "text")  # what mlx-lm's YAML files may rename

ALTERNATIVES = (
    ("iters", "epochs", "how long to train"),
    ("warmup_iters", "warmup_epochs", "how long to warm up"),
    *(
        (name, "lr_schedule", "what the learning rate does")
        for name in ("warmup_iters", "warmup_epochs", "schedule", "final_learning_rate")
    ),
)
"""Pairs of arguments that say the same thing, and what they say; see `parser.parse`."""


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


# fmt: off
DISTILLATION = [
    Argument("--teacher", None, "model whose predictions to imitate", metavar="MODEL"),
    Argument("--teacher-adapter", None, "adapter that the teacher runs with", metavar="FOLDER"),
    Argument("--distillation-weight", number(0, 1),
             "weight of the distance from the teacher, 1 by default; the data's cross-entropy has the rest"),
    Argument("--distillation-temperature", number(1e-3),
             "temperature of the predictions: above 1, the teacher's unlikely tokens count more; 1 by default"),
    Argument("--distillation-divergence", ["forward", "reverse"],
             "forward, KL(teacher || model), by default; reverse, KL(model || teacher), for draft models"),
]


def training_tables(learning_rate: str, *own: Argument) -> Tables:
    """The tables of `lora` and `qat`.

    Args:
        learning_rate: what `--learning-rate` is by default, in words.
        own: the command's own arguments without a title.
    """
    return {
        "options": [
            *own,
            options.MODEL,
            Argument("--force", FLAG, "take an adapter that was made for another model, if its shapes fit"),
            Argument("--data", None,
                     "a folder with train.jsonl, and valid.jsonl and test.jsonl where there are any; or one "
                     '.jsonl file; .json, .csv and .gz are read, too. Lines are {"messages"}, {"prompt", '
                     '"completion"}, {"text"}, a list of messages, or records of ShareGPT or Alpaca',
                     metavar="PATH"),
            options.JSON,
            unavailable("--report-to",
                        "nothing is sent to wandb or swanlab; metrics go to metrics.jsonl in the run's folder, "
                        "and --plot draws them"),
            unavailable("--project-name", "it names a project for --report-to, which is not available"),
            unavailable("--hf-dataset", "data sets of the hub are not fetched; --data takes files"),
            unavailable("--trust-remote-code", "code in a model's folder is not run here", nargs=0),
        ],
        "data": [
            Argument("--batch-size", integer(1, MAX_ROWS), "rows of a batch; 4 by default"),
            Argument("--max-seq-length", integer(2),
                     "the most tokens of a sample, and of a row; longer texts are cut, longer chats an error. "
                     "By default 2048, or the model's context if that is less, and packed rows of some four "
                     "samples"),
            Argument("--packing", SWITCH,
                     "put several samples into a row, which don't see each other; the default for AFM models"),
            Argument("--mask-prompt", SWITCH, "train on what the assistant wrote only", True),
            Argument("--prompt-weight", number(0),
                     "weight of the loss of tokens that the assistant did not write; by default 0, and 1 with "
                     "--no-mask-prompt"),
            *(Argument(f"--{name}-feature", None,
                       f"what the data calls {'messages' if name == 'chat' else name!r}, as in mlx-lm",
                       metavar="KEY")
              for name in FEATURES),
        ],
        "training": [
            Argument("--iters", integer(1),
                     f"steps; by default {EPOCHS} passes over the data, but {STEPS_BETWEEN[0]} steps at least "
                     f"and {STEPS_BETWEEN[1]} at most"),
            Argument("--epochs", positive(MAX_EPOCHS), "passes over the data, instead of --iters"),
            Argument("--learning-rate", positive(), f"the highest learning rate; {learning_rate} by default"),
            Argument("--warmup-iters", integer(0),
                     "steps of linear warm-up; by default 5%% of all, 100 at most"),
            Argument("--warmup-epochs", number(0, MAX_EPOCHS),
                     "passes over the data of linear warm-up, instead of --warmup-iters"),
            Argument("--schedule", ["cosine", "constant"],
                     "what the learning rate does after the warm-up; cosine by default, constant for draft "
                     "models"),
            Argument("--final-learning-rate", number(0),
                     "learning rate at the end of the cosine; 0 by default"),
            Argument("--lr-schedule", json_object,
                     "the learning rate in mlx-lm's words: name, arguments, warmup and warmup_init in one "
                     "object"),
            Argument("--grad-accumulation-steps", integer(1), "batches that make one step; 1 by default"),
            Argument("--grad-checkpoint", FLAG,
                     "compute each block twice instead of keeping its activations, to use less memory"),
            Argument("--clip-grad-norm", number(0),
                     "the most that a gradient's norm may be, 1 by default; 0 for any"),
            Argument("--weight-decay", number(0), "weight decay of AdamW; 0 by default"),
            Argument("--optimizer", ["adamw", "adam"],
                     "adam is AdamW without weight decay; there are no others", "adamw"),
            Argument("--optimizer-config", json_object,
                     "betas, eps and weight_decay of an optimizer, by its name as in mlx-lm: "
                     '{"adamw": {"betas": [0.9, 0.95]}}'),
            Argument("--clear-cache-threshold", size,
                     "memory, such as 2GB, that MLX may keep for reuse between steps; MLX's own limit by "
                     "default",
                     metavar="SIZE"),
            Argument("--seed", integer(0, options.MAX_SEED), "seed of the random numbers", 0),
        ],
        "distillation": DISTILLATION,
        "run": [
            Argument("--resume", FLAG,
                     "go on with a run that was interrupted, with the arguments that it was started with"),
            Argument("--val-batches", count_or_all, "batches of an evaluation; -1 for all", 25),
            Argument("--steps-per-report", integer(1), "steps between reports", 10),
            Argument("--steps-per-eval", integer(1), "steps between evaluations on valid.jsonl", 200),
            Argument("--save-every", integer(1), "steps between checkpoints", 100),
            Argument("--patience", integer(1),
                     "stop after this many evaluations without a better one; the best weights are kept "
                     "anyway"),
            Argument("--ema-decay", number(0, 0.999999),
                     "keep an average of the weights with this decay; 0 for none"),
            Argument("--test", FLAG,
                     "measure the loss on test.jsonl at the end, with what was trained and without"),
            Argument("--test-batches", count_or_all, "batches of test.jsonl that are measured; -1 for all", -1),
            Argument("--plot", None, "draw losses and learning rate (needs matplotlib)", metavar="FILE.png"),
        ],
    }
# fmt: on
