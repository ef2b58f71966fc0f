"""Train the draft model that comes with the embedded model, pack it and measure it.

    python examples/nano/draft.py --source nano --seed 0

Needs `tamm`, `torch` and `sentencepiece`, and nothing that the other scripts make. In `nano/draft`:

    checkpoint/  float weights, as `train.py` trains them: on the stream of chats and texts that the target read
    float/       the same, converted
    data/        chats and texts for the next step
    packed/      the weights on their 4-bit grid, trained to say what the packed target says: the reverse
                 divergence, as in Apple's toolkit
    model/       what ships: weights, config and card
    quality.*    how often the target takes what it proposes

What exists is left as it is, and what was interrupted goes on. To make a part again, remove its folder and what
comes behind it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import docstrings
import draft_quality
import tasks
import write_data
from batches import Batches
from train import Plan, train
from train_tokenizer import load_tokenizer

from afm_mlx import cli
from afm_mlx.config import read_config_json
from afm_mlx.files import atomic_folder, atomic_write
from afm_mlx.loading.resolve import EMBEDDED_MODEL, resolve_model
from afm_mlx.measure.describe import describe_stored_weights

SIZES = {
    "hidden_dim": 128,
    "num_layers": 2,
    "num_kv_reuse_layers": 0,
    "num_heads": 4,
    "num_kv_heads": 2,
    "hidden_dim_scale_factor": 3.0,
}
STEPS, PACKING_STEPS = 1500, 200  # of 4,096 tokens, and of 16 samples
_SAMPLES, _VALID_SAMPLES = 3_200, 100
_REPORT_SAMPLES, _REPORT_TEXTS = 10, 20

# Four bits: rounded to them without training, a draft agreed with its target on 86 % of the tokens, in float on
# 88 %, and rounded to 2 bits on 64 %. Its steps take no longer.
_PACKING = (
    "qat --model {float} --teacher {target} --distillation-divergence reverse --data {data} "
    "--save-path {packed} --bits 4 --embedding-bits 4 --q-granularity row --seed {seed} --iters {iters} "
    "--learning-rate 1e-3 --warmup-iters 25 --ema-decay 0.98 --batch-size 16 --no-packing "
    "--max-seq-length 512 --val-batches -1 --steps-per-eval 100 --save-every 50"
)
_CARD = Path(__file__).with_name("draft_card_template.md")
_OF_TARGET = ("context_length", "eos_token_id")


def main(argv: Sequence[str] | None = None) -> int:
    """Make what is missing, print the table, and return the exit status of the first command that fails."""
    args = _parser().parse_args(argv)
    out, target = args.source / "draft", resolve_model(args.target)
    out.mkdir(parents=True, exist_ok=True)
    read(out, target, args)
    write_lines(out / "data", args.seed, args.samples)
    folders = {name: out / name for name in ("checkpoint", "float", "data", "packed")}
    values = {**folders, "target": target, "seed": args.seed, "iters": args.packing_steps}
    for made, command in (
        ("float", "convert --model {checkpoint} --mlx-path {float}"),
        ("packed", _PACKING),
    ):
        status = run(folders[made], [word.format(**values) for word in shlex.split(command)])
        if status:
            return status
    figures = measured(out, target, args.limit)
    package(out, target, figures)
    print(f"\n{draft_quality.markdown(figures)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, required=True, help="folder of the model's training")
    parser.add_argument(
        "--target", default=EMBEDDED_MODEL, help="the packed model that it drafts for"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, data and batches")
    parser.add_argument("--steps", type=int, default=STEPS, help="of 4,096 tokens, in float")
    parser.add_argument(
        "--packing-steps", type=int, default=PACKING_STEPS, help="of 16 samples, on the grid"
    )
    parser.add_argument("--samples", type=int, default=_SAMPLES, help="lines of data to draft from")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of PyTorch")
    parser.add_argument(
        "--limit", type=int, help="held-out prompts per task that are measured; all"
    )
    return parser


def read(out: Path, target: Path, args: argparse.Namespace) -> None:
    """Train float weights on what the target was trained on, as it was, unless that is done."""
    checkpoint, state = out / "checkpoint", out / "train-state.pt"
    if (out / "float").is_dir():
        print(f"{checkpoint} exists")
        return
    checkpoint.mkdir(exist_ok=True)
    for file in target.glob("tokenizer*"):
        shutil.copy(file, checkpoint)
    texts = docstrings.gather()
    batches = Batches(load_tokenizer(target), texts, args.seed)
    samples = tasks.test_samples(args.seed, _REPORT_SAMPLES)
    print(f"\n{'Going on with' if state.exists() else 'Training'} {checkpoint}", flush=True)
    plan = Plan(args.steps, args.seed, min(200, args.steps), args.threads, SIZES, compiled=False)
    train(out, plan, batches, samples, texts.held_out[:_REPORT_TEXTS])


def write_lines(folder: Path, seed: int, samples: int) -> None:
    """Write the data folder of the training on the grid, unless it is there."""
    if folder.is_dir():
        return
    texts = docstrings.gather()
    splits = write_data.draw_lines(
        texts.docstrings + texts.further, seed, samples, min(_VALID_SAMPLES, samples)
    )
    with atomic_folder(folder) as made:
        for name, lines in zip(("train", "valid"), splits, strict=True):
            content = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
            (made / f"{name}.jsonl").write_text(content)


def run(place: Path, argv: list[str]) -> int:
    """Run a command of `afm-mlx` unless `place`, which it makes, is there; return its exit status."""
    if (place / "config.json").is_file():
        print(f"{place} exists", flush=True)
        return 0
    if (place.with_name(f"{place.name}-run") / "run.json").is_file():
        argv = [*argv, "--resume"]
    print(f"\n$ afm-mlx {shlex.join(argv)}", flush=True)
    return cli.main(argv)


def measured(out: Path, target: Path, limit: int | None) -> draft_quality.Figures:
    """Return the figures of the packed weights; they are measured once."""
    path = out / "quality.json"
    if not path.is_file():
        figures = draft_quality.measure(out / "packed", target, limit)
        with atomic_write(path) as part:
            part.write_text(json.dumps(figures, indent=2) + "\n")
        with atomic_write(out / "quality.md") as part:
            part.write_text(draft_quality.markdown(figures))
    return json.loads(path.read_text())


def package(out: Path, target: Path, figures: draft_quality.Figures) -> None:
    """Make the folder that ships, unless it is there; it goes into its target's, and has its tokenizer."""
    folder = out / "model"
    if folder.is_dir():
        return
    values = read_config_json(out / "packed" / "config.json")
    of_target = read_config_json(target / "config.json")
    values |= {name: of_target[name] for name in _OF_TARGET}
    with atomic_folder(folder) as made:
        for file in (out / "packed").glob("*.safetensors*"):
            shutil.copy(file, made)
        (made / "config.json").write_text(json.dumps(values, indent=4, sort_keys=True) + "\n")
        (made / "README.md").write_text(_card(made, values, figures))


def _card(folder: Path, values: dict[str, Any], figures: draft_quality.Figures) -> str:
    weights = describe_stored_weights(folder)
    facts = {
        "LAYERS": values["num_layers"],
        "WIDTH": values["hidden_dim"],
        "HEADS": values["num_heads"],
        "KV_HEADS": values["num_kv_heads"],
        "MILLIONS": f"{weights['parameters'] / 1e6:.1f}",
        "KILOBYTES": round(weights["bytes"] / 1e3),
        "AGREEMENT": f"{figures['all']['agreement']:.0%}",
        "ACCEPTANCE": f"{figures['all']['acceptance']:.0%}",
        "PER_STEP": f"{figures['all']['tokens per step']['draft']['4']:.1f}",
    }
    text = _CARD.read_text()
    for name, value in facts.items():
        text = text.replace(f"@{name}@", str(value))
    return text


if __name__ == "__main__":
    sys.exit(main())
