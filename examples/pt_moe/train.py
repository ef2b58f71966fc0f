"""A small parallel-track mixture of experts on afm-nano's data, against a dense model of equal active size.

    python examples/pt_moe/train.py --out DIR --steps 1000 --seed 0

Trains both from random weights by Muon, on the same batches in the same order, and packs the mixture in 4 bits.
Measures exact answers to the embedded model's held-out chats of seven tasks, by teacher forcing. `report.json`
in DIR has their shares, the mean loss of answers' tokens in nats, and the entropy of the experts' load.
`pt-moe.png` is drawn from the run's metrics. Run it again to resume.

Needs `pip install ".[tamm,train]"` in the repository.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import afm_mlx  # noqa: F401  before mlx.core, for its matrix products

# isort: split
import mlx.core as mx
from mlx.utils import tree_flatten

from afm_mlx import load
from afm_mlx.config import PRESETS
from afm_mlx.converters.convert import convert
from afm_mlx.files import atomic_write
from afm_mlx.model import parallel_tracks
from afm_mlx.model.model import Model
from afm_mlx.track_config import TRACK_PRESETS
from afm_mlx.training import FullTraining, Recipe, TrainingOptions, plot_metrics
from afm_mlx.training.methods.method import save_model_folder
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.train import train_by

sys.path.insert(0, str(Path(__file__).parents[1] / "adapters"))
sys.path.insert(0, str(Path(__file__).parents[1] / "nano"))
sys.path.insert(0, str(Path(__file__).parents[1] / "masks"))
import inbox
from ifp import answers, encode, print_event, read_samples
from write_data import draw_lines

TRACKS = TRACK_PRESETS["pt-moe-tiny"]
# The same number of weights for each token, within 1 %.
DENSE = dataclasses.replace(PRESETS["afm-nano"], num_layers=5, num_kv_reuse_layers=0, kv_bits=None)
NAMES = ("pt-moe", "dense")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of all results")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=16, help="chats in a step, of some 112 tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument(
        "--only", nargs="+", choices=NAMES, default=NAMES, help="models to train in this process"
    )
    parser.add_argument("--limit", type=int, default=50, help="measured chats of each task")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    write_data(args.out / "data", args.steps * args.rows, args.seed)
    for name in args.only:
        train(name, args)
    if not all((args.out / name).exists() for name in NAMES):
        return
    plot_metrics(args.out / "pt-moe-run" / "metrics.jsonl", args.out / "pt-moe.png")
    packed = args.out / "pt-moe-4bit"
    if not packed.exists():
        convert(args.out / "pt-moe", packed, quantize=True, q_bits=4)
    report = measure(args)
    (args.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


def write_data(folder: Path, chats: int, seed: int) -> None:
    """Write chats of the seven tasks that the embedded model learned, and 200 others for validation."""
    if (folder / "valid.jsonl").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in zip(("train", "valid"), draw_lines([], seed, chats, 200), strict=True):
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        with atomic_write(folder / f"{name}.jsonl") as path:  # another process may do the same
            path.write_text(text)


def train(name: str, args: argparse.Namespace) -> None:
    """Train one of the models; what exists is left alone, and an interrupted run goes on."""
    start, path = args.out / f"{name}-start", args.out / name
    if path.exists():
        return
    if not start.exists():
        write_random_model(name, start, args.seed)
    options = TrainingOptions(
        iters=args.steps,
        learning_rate=args.learning_rate,
        warmup_iters=min(100, args.steps // 10),
        optimizer="muon",
        betas=(0.9, 0.98),
        weight_decay=0.01,
        clip_grad_norm=1.0,
        steps_per_report=20,
        steps_per_eval=max(args.steps // 4, 1),
        save_every=max(args.steps // 20, 1),
        seed=args.seed,
    )
    recipe = Recipe(
        args.out / "data",
        options,
        start,
        batch_size=args.rows,
        max_seq_length=512,
        packing=False,
        prompt_weight=0.1,
    )
    run = args.out / f"{name}-run"
    print(name, flush=True)
    train_by(FullTraining(), recipe, path, run_path=run, resume=run.exists(), on_event=print_event)


def write_random_model(name: str, folder: Path, seed: int) -> None:
    """Write a model folder with random weights, whose blocks begin as the identity."""
    source = ModelSource.open("afm-nano")
    mx.random.seed(seed)
    model: Any = parallel_tracks.Model(TRACKS) if name == "pt-moe" else Model(DENSE)
    config, weights = model.args, []
    for key, array in tree_flatten(model.parameters()):
        if key.endswith(("out_proj.weight", "down_proj.weight")):
            array = mx.zeros_like(array)
        elif "embed" in key:  # it is also the head, and starts small, as in GPT-2
            array = mx.random.normal(array.shape) * 0.02
        weights.append((key, array))
    model.load_weights(weights)
    values = config.to_dict() | {"eos_token_id": source.values["eos_token_id"]}
    save_model_folder(folder, model, values, source, what="Random weights.", facts={})


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure both models and the packed one; read the experts' load in the validation."""
    return {
        "arguments": {key: str(value) for key, value in vars(args).items()},
        "active_parameters": {
            "pt-moe": TRACKS.num_active_parameters,
            "dense": DENSE.num_parameters,
        },
        "load_entropy": last_load_entropy(args.out),
        **measure_folders({name: args.out / name for name in (*NAMES, "pt-moe-4bit")}, args.limit),
    }


def last_load_entropy(out: Path) -> float:
    """Return the entropy of the experts' load in the last validation, over the largest possible."""
    lines = (out / "pt-moe-run" / "metrics.jsonl").read_text().splitlines()
    loads = [json.loads(line).get("valid_load_entropy") for line in lines]
    return [load for load in loads if load is not None][-1]


def measure_folders(folders: dict[str, Path], limit: int) -> dict[str, Any]:
    """Measure exact answers to held-out chats, and the loss of answers' tokens, of each task and model."""
    samples = [sample for sample in read_samples(limit) if sample["task"] not in inbox.TASKS]
    accuracy, nats = {}, {}
    for name, folder in folders.items():
        model, tokenizer = load(folder)
        encoded = [encode(sample, tokenizer) for sample in samples]
        accuracy[name], nats[name] = answers(model, samples, encoded, None)
    return {"accuracy": accuracy, "nats": nats}


if __name__ == "__main__":
    main()
