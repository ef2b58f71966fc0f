"""Instruction-Following Pruning on afm-nano's data: a wide model that runs with a mask, against dense ones.

    python examples/masks/ifp.py --out DIR --steps 2400 --seed 0 [--scale small] [--wide]

Trains from random weights, on the same batches in the same order, in two stages:

- `dense`: a model of the size that runs; `--wide` adds one of the size that is stored (4x the feed-forward).
- `ifp`: the wide model with a predictor that keeps a quarter of its channels, the dense model's number; masks
  come from the chunk before in the first stage, and from the prompt in the second.

Then it measures exact answers to the embedded model's held-out chats, by teacher forcing: greedy decoding
writes an answer if and only if the most likely token is right at each of its positions. The masks of `ifp` are
chosen for each prompt; for each task, from a description or from the mean scores of training prompts; or drawn
at random. `report.json`, `accuracy.png` and `overlap.png` in DIR hold the results. Run it again to resume.

Needs `pip install ".[tamm,train]"` in the repository.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import afm_mlx  # noqa: F401  before mlx.core, for its matrix products

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mask_plots import plot_accuracy, plot_overlap

from afm_mlx import load
from afm_mlx.adapters.mask_predictor import MaskPredictor
from afm_mlx.adapters.soft_top_k import top_k_mask
from afm_mlx.config import PRESETS
from afm_mlx.loading.load import load_predictor
from afm_mlx.model.model import Model
from afm_mlx.training import FullTraining, IFPTraining, Recipe, TrainingOptions
from afm_mlx.training.data.mask_batches import STAGES
from afm_mlx.training.loop.masked_loss import add_masks, masked
from afm_mlx.training.methods.method import Method, save_model_folder
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.train import train_by

sys.path.insert(0, str(Path(__file__).parents[1] / "nano"))
import docstrings
import tasks
from values import Values
from write_data import draw_lines

WIDER = 4  # times the dense feed-forward
SCALES: dict[str, dict[str, Any]] = {
    "nano": {"hidden_dim": 256, "num_layers": 8, "num_kv_reuse_layers": 3, "group": 16},
    "small": {"hidden_dim": 128, "num_layers": 4, "num_kv_reuse_layers": 1, "group": 4},
}
ROW = 256
VALID_LINES = 40
DESCRIPTIONS = {
    "extract_event": "You are an expert in events. Fill in the event as JSON.",
    "call_tool": "You are an expert in tools. Call the right tool with its arguments.",
    "summarize_thread": "You are an expert in summaries. Summarize the thread in one line.",
    "rewrite_tone": "You are an expert in tone. Make this message formal or friendly.",
    "suggest_reply": "You are an expert in replies. Suggest a short reply to the message.",
    "tag_topics": "You are an expert in topics. Tag the topics of the text.",
    "answer_from_tool": "You are an expert in tools. Answer from the result of the tool.",
}
PROMPTS_OF_A_TASK = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of all results")
    parser.add_argument("--steps", type=int, default=2400, help="steps, of both stages together")
    parser.add_argument("--rows", type=int, default=16, help=f"rows of {ROW} tokens in a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", choices=SCALES, default="nano")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--chunk", type=int, default=64, help="tokens of a chunk")
    parser.add_argument("--limit", type=int, default=50, help="measured chats of each task")
    parser.add_argument("--soft", action="store_true", help="the paper's soft masks in training")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--wide", action="store_true", help="train the dense wide model, too")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    write_data(args)
    names = ["dense", "ifp", *(["dense-wide"] if args.wide else [])]
    for name in names:
        train_both_stages(name, args)
    report = measure(names, args)
    (args.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    plot_accuracy(report["accuracy"], args.out / "accuracy.png")
    plot_overlap(report["overlap"], report["overlap_of_blocks"], args.out / "overlap.png")
    print(json.dumps({k: v for k, v in report.items() if k != "overlap"}, indent=2))


def write_data(args: argparse.Namespace) -> None:
    """Write the lines of both stages: chats and texts, then chats alone."""
    texts = docstrings.gather()
    # A line has some 108 tokens; each stage sees its data once.
    count = args.steps * args.rows * ROW // 2 // 108 + 400
    for index, stage in enumerate(STAGES):
        folder = args.out / f"data-{stage}"
        if (folder / "valid.jsonl").exists():
            continue
        folder.mkdir(exist_ok=True)
        train, valid = draw_lines(
            texts.docstrings + texts.further, args.seed + index, count * (1 + index), VALID_LINES
        )
        for name, lines in (("train", train), ("valid", valid)):
            if stage == "prompt":
                lines = [line for line in lines if "messages" in line]
            kept = lines[:count]
            text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in kept)
            (folder / f"{name}.jsonl").write_text(text)


def train_both_stages(name: str, args: argparse.Namespace) -> None:
    """Train a model in both stages; what exists is left alone, and an interrupted run goes on."""
    folder = args.out / name / "start"
    if not folder.exists():
        write_random_model(folder, args, wide=name != "dense")
    for stage in STAGES:
        path = args.out / name / stage
        if path.exists():
            folder = path
            continue
        steps = args.steps // 2
        options = TrainingOptions(
            iters=steps,
            learning_rate=args.learning_rate,
            warmup_iters=min(100, steps // 10),
            betas=(0.9, 0.98),
            weight_decay=0.01,
            clip_grad_norm=1.0,
            steps_per_report=50,
            steps_per_eval=max(steps // 2, 1),
            save_every=200,
            seed=args.seed,
        )
        recipe = Recipe(
            args.out / f"data-{stage}",
            options,
            folder,
            batch_size=args.rows,
            max_seq_length=2 * ROW,
            prompt_weight=1.0 if stage == "chunk" else 0.0,
        )
        run = args.out / name / f"{stage}-run"
        method = method_of(name, stage, args)
        print(f"{name}, stage {stage}", flush=True)
        train_by(method, recipe, path, run_path=run, resume=run.exists(), on_event=print_event)
        folder = path


def method_of(name: str, stage: str, args: argparse.Namespace) -> Method:
    if name != "ifp":
        return FullTraining()
    new: dict[str, Any] = {}
    if stage == STAGES[0]:
        group = SCALES[args.scale]["group"]
        new = {"ffn": 1 / WIDER, "group": group, "binary": not args.soft}
        new["temperature"] = args.temperature
    return IFPTraining(stage=stage, chunk_size=args.chunk, **new)


def print_event(event: object) -> None:
    if type(event).__name__ in ("Report", "Validation", "Resumed"):
        print(event, flush=True)


def write_random_model(folder: Path, args: argparse.Namespace, wide: bool) -> None:
    """Write a model folder with random weights, whose blocks begin as the identity."""
    source = ModelSource.open("afm-nano")
    sizes = {key: value for key, value in SCALES[args.scale].items() if key != "group"}
    sizes["hidden_dim_scale_factor"] = 3.25 * (WIDER if wide else 1)
    config = dataclasses.replace(PRESETS["afm-nano"], kv_bits=None, **sizes)
    mx.random.seed(args.seed)
    model = Model(config)
    # An embedding that is also the head starts small, as in GPT-2.
    model.model.embedding.weight = mx.random.normal((config.vocab_size, config.hidden_dim)) * 0.02
    for block in model.layers:
        for layer in (block.self_attn.out_proj, block.mlp.down_proj):
            layer.weight = mx.zeros_like(layer.weight)
    values = config.to_dict() | {"eos_token_id": source.values["eos_token_id"]}
    save_model_folder(folder, model, values, source, what="Random weights.", facts={})


# -- what is measured


def measure(names: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Measure the share of exact answers of each task, in all ways, and the overlap of masks."""
    samples = read_samples(args.limit)
    report: dict[str, Any] = {
        "arguments": {key: str(value) for key, value in vars(args).items()},
        "accuracy": {},
    }
    for name in names:
        folder = args.out / name / STAGES[-1]
        model, tokenizer = load(folder)
        encoded = [encode(sample, tokenizer) for sample in samples]
        if name != "ifp":
            report["accuracy"][name] = exact_share(model, samples, encoded, None)
            continue
        predictor = load_predictor(folder, model.args)
        add_masks(model)
        model.eval()
        scores = [scores_of(predictor, prompt) for prompt, _ in encoded]
        ways = {"ifp, per prompt": scores}
        by_prompts = prompt_scores(predictor, tokenizer, args.seed)
        for way, of_task in (
            ("ifp, per task by prompts", by_prompts),
            ("ifp, per task by description", description_scores(predictor, tokenizer)),
        ):
            ways[way] = [of_task[sample["task"]] for sample in samples]
        mx.random.seed(args.seed)
        ways["ifp, random mask"] = [mx.random.normal(each.shape) for each in scores]
        others = list(DESCRIPTIONS)
        ways["ifp, another task's mask"] = [
            by_prompts[others[(others.index(sample["task"]) + 1) % len(others)]]
            for sample in samples
        ]
        for way, chosen in ways.items():
            masks = [top_k_mask(each, predictor.config.kept_groups) for each in chosen]
            report["accuracy"][way] = exact_share(model, samples, encoded, masks)
        hard = np.array(mx.stack([predictor.masks(each) for each in scores]))
        report |= overlaps(hard, [sample["task"] for sample in samples])
    return report


def read_samples(limit: int) -> list[dict[str, Any]]:
    """Read held-out chats of the embedded model, `limit` of each task; their values never occur in training."""
    path = ModelSource.open("afm-nano").folder / "evaluation.jsonl"
    of_tasks: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in path.read_text().splitlines():
        sample = json.loads(line)
        of_tasks[sample["task"]].append(sample)
    return [sample for samples in of_tasks.values() for sample in samples[:limit]]


def encode(sample: dict[str, Any], tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the tokens of the prompt, and of the answer with the end of its turn."""
    options = {"tools": sample.get("tools"), "tokenize": True}
    prompt = tokenizer.apply_chat_template(
        sample["messages"], add_generation_prompt=True, **options
    )
    answer = {"role": "assistant", "content": sample["answer"]}
    whole = tokenizer.apply_chat_template([*sample["messages"], answer], **options)
    end = next(i for i, t in enumerate(whole) if i >= len(prompt) and t in tokenizer.eos_token_ids)
    return list(prompt), list(whole[len(prompt) : end + 1])


def exact_share(
    model: Any,
    samples: list[dict[str, Any]],
    encoded: list[tuple[list[int], list[int]]],
    masks: list[mx.array] | None,
) -> dict[str, float]:
    """Return the share of exact answers of each task, with a mask (blocks, groups) for each chat or without.

    "mean" is the mean of tasks; "loss" is the mean cross-entropy of answers' tokens, in nats.
    """
    right: dict[str, list[bool]] = defaultdict(list)
    losses: list[float] = []
    for index, (sample, (prompt, answer)) in enumerate(zip(samples, encoded, strict=True)):
        tokens = mx.array([prompt + answer[:-1]])
        if masks is None:
            logits = model(tokens)
        else:
            mask = masks[index][None].astype(mx.float32)
            with masked(model, mask, mx.zeros(tokens.shape, mx.int32)):
                logits = model(tokens)
        logits = logits[0, len(prompt) - 1 :]
        right[sample["task"]].append(mx.argmax(logits, axis=-1).tolist() == answer)
        losses += nn.losses.cross_entropy(logits, mx.array(answer)).tolist()
    shares = {task: sum(each) / len(each) for task, each in right.items()}
    return shares | {"mean": sum(shares.values()) / len(shares), "loss": float(np.mean(losses))}


def scores_of(predictor: MaskPredictor, prompt: list[int]) -> mx.array:
    scores = predictor(mx.array([prompt]), mx.array([len(prompt)]))[0]
    mx.eval(scores)
    return scores


def description_scores(predictor: MaskPredictor, tokenizer: Any) -> dict[str, mx.array]:
    found = {}
    for task, text in DESCRIPTIONS.items():
        messages = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
        found[task] = scores_of(predictor, list(prompt))
    return found


def prompt_scores(predictor: MaskPredictor, tokenizer: Any, seed: int) -> dict[str, mx.array]:
    """Return the mean scores of training prompts of each task."""
    found = {}
    for task in DESCRIPTIONS:
        values = Values(random.Random(f"masks-{seed}-{task}"), "train")
        scores = []
        for _ in range(PROMPTS_OF_A_TASK):
            sample = tasks.draw_sample(task, values)
            messages = sample["messages"][:-1]
            options = {"tools": sample.get("tools"), "add_generation_prompt": True}
            prompt = tokenizer.apply_chat_template(messages, tokenize=True, **options)
            scores.append(scores_of(predictor, list(prompt)))
        found[task] = mx.stack(scores).mean(0)
    return found


def overlaps(hard: np.ndarray, of_tasks: list[str]) -> dict[str, Any]:
    """Return the mean overlap of masks (N, blocks, groups) for each pair of tasks, and within and across."""
    flat = hard.astype(np.float32)
    kept = flat[0, 0].sum()
    names = list(dict.fromkeys(of_tasks))
    tasks_of = np.array([names.index(task) for task in of_tasks])
    is_other = ~np.eye(len(flat), dtype=bool)
    within = (tasks_of[:, None] == tasks_of) & is_other
    across = tasks_of[:, None] != tasks_of
    of_blocks, total = [], np.zeros((len(flat), len(flat)))
    for block in range(flat.shape[1]):
        common = flat[:, block] @ flat[:, block].T / kept
        total += common / flat.shape[1]
        of_blocks.append(
            {"within": float(common[within].mean()), "across": float(common[across].mean())}
        )
    matrix = [
        [
            float(total[(tasks_of[:, None] == a) & (tasks_of == b) & is_other].mean())
            for b in range(len(names))
        ]
        for a in range(len(names))
    ]
    return {
        "overlap": {"tasks": names, "matrix": matrix},
        "overlap_of_blocks": of_blocks,
        "overlap_within": float(total[within].mean()),
        "overlap_across": float(total[across].mean()),
        "kept_share": float(kept / flat.shape[2]),
    }


if __name__ == "__main__":
    main()
