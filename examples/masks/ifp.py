"""Instruction-Following Pruning from the embedded model: a wide model with masks, against the dense one.

    python examples/masks/ifp.py --out DIR --steps 400 --rows 2 --seed 0 [--wide]

The paper continues from a pre-trained dense model, and so does this script, with afm-nano in float numbers:

- `dense`: afm-nano itself; `--wide` adds `dense-wide`, the wide model with all of its channels.
- `ifp`: the wide model, with a predictor that keeps a quarter of its channels, which is afm-nano's number. The
  first quarter are afm-nano's own channels. The others begin as noisy copies whose `down` is zero, so that they
  add nothing yet. The predictor begins with afm-nano's draft model, and with scores that prefer channels which
  afm-nano uses much; about a quarter of the channels that it keeps for a prompt are new.

All are trained on the same batches in the same order: on afm-nano's data, and on chats of three tasks that
afm-nano doesn't know (`examples/adapters/inbox.py`). There are two stages: masks from the chunk before, and
masks from the prompt.

Then it measures exact answers to held-out chats, by teacher forcing: greedy decoding writes an answer if and
only if the most likely token is right at each of its positions. The masks of `ifp` are chosen for each prompt;
for each task, from a description or from the mean scores of training prompts; or drawn at random.
`report.json`, `accuracy.png` and `overlap.png` in DIR hold the results. Run it again to resume.

Needs `pip install ".[tamm,train]"` in the repository.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "nano"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "adapters"))

import afm_mlx  # isort: skip

import docstrings
import inbox
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import tasks
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from mlx.utils import tree_flatten
from values import Values
from write_data import TEXT_SHARE

from afm_mlx.adapters.mask_predictor import (
    PREDICTOR_FOLDER,
    MaskPredictor,
    PredictorConfig,
    write_head,
)
from afm_mlx.adapters.soft_top_k import top_k_mask
from afm_mlx.adapters.task_mask import GROUP
from afm_mlx.checkpoint.folder_texts import write_config
from afm_mlx.checkpoint.weights import save_weights
from afm_mlx.config import KV_SCALES
from afm_mlx.loading.load import load_predictor
from afm_mlx.model.model import Model
from afm_mlx.quantization.quantize_model import dequantize_model
from afm_mlx.training import FullTraining, IFPTraining, Recipe, TrainingOptions
from afm_mlx.training.data.mask_batches import STAGES
from afm_mlx.training.loop.masked_loss import add_masks, masked
from afm_mlx.training.methods.method import Method, save_model_folder
from afm_mlx.training.methods.model_source import ModelSource
from afm_mlx.training.methods.recipe import read_split
from afm_mlx.training.methods.train import train_by
from afm_mlx.training.pruning.channel_scores import activation_scores
from afm_mlx.training.pruning.kept_groups import group_scores

MODEL = "afm-nano"
WIDER = 4  # times the dense feed-forward
ROW = 512  # tokens of a row
CHAT = 108  # tokens of a line of data, on average
VALID_LINES = 40
NEW_SHARE = 0.6  # of chats: tasks that afm-nano doesn't know
NOISE = 1.0  # of new channels, over the deviation of the channels that they copy
NEW_SCORE = -1.4  # of new channels, in deviations of the old channels' scores from the mean
PROMPT_DEVIATION = 0.5  # of a channel's scores for different prompts, in the same unit
DESCRIPTIONS = {
    "redact": "You are an expert in privacy. Redact the message.",
    "todo": "You are an expert in planning. List the to-dos of the message.",
    "triage": "You are an expert in support. Triage the message.",
    "extract_event": "You are an expert in events. Fill in the event as JSON.",
    "call_tool": "You are an expert in tools. Call the right tool with its arguments.",
    "summarize_thread": "You are an expert in summaries. Summarize the thread in one line.",
    "rewrite_tone": "You are an expert in tone. Make this message formal or friendly.",
    "suggest_reply": "You are an expert in replies. Suggest a short reply to the message.",
    "tag_topics": "You are an expert in topics. Tag the topics of the text.",
    "answer_from_tool": "You are an expert in tools. Answer from the result of the tool.",
}
PROMPTS_OF_A_TASK = 16
PROMPTS_OF_START = 128
NEW, KNOWN = "mean of new tasks", "mean of known tasks"
Line = dict[str, Any]
Encoded = tuple[list[int], list[int]]
"""Tokens of a prompt, and of its answer."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of all results")
    parser.add_argument("--steps", type=int, default=400, help="steps, of both stages together")
    parser.add_argument("--rows", type=int, default=2, help=f"rows of {ROW} tokens in a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
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


# -- data


def write_data(args: argparse.Namespace) -> None:
    """Write the lines of both stages, each of which sees its data once: chats and texts, then chats alone."""
    found = docstrings.gather()
    texts = found.docstrings + found.further
    random.Random(args.seed).shuffle(texts)
    count = args.steps // 2 * args.rows * ROW // CHAT + args.rows * ROW // CHAT
    for stage in STAGES:
        folder = args.out / f"data-{stage}"
        if (folder / "valid.jsonl").exists():
            continue
        folder.mkdir(exist_ok=True)
        # Their texts are the last ones, which training doesn't reach unless it repeats all.
        for name, lines, own in (("train", count, texts), ("valid", VALID_LINES, texts[::-1])):
            share = TEXT_SHARE if stage == "chunk" else 0.0
            drawn: list[Line] = [{"text": text} for text in islice(cycle(own), int(share * lines))]
            chats = draw_chats(f"{name}-{stage}-{args.seed}")
            drawn += islice(chats, lines - len(drawn))
            random.Random(args.seed).shuffle(drawn)
            text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in drawn)
            (folder / f"{name}.jsonl").write_text(text)


def draw_chats(seed: str) -> Iterator[Line]:
    """Yield training chats without end, of tasks that afm-nano knows and of tasks that it doesn't know."""
    values = Values(random.Random(seed), "train")
    while True:
        if values.rng.random() < NEW_SHARE:
            yield {"messages": new_chat(values.rng.choice(list(inbox.TASKS)), values)}
        else:
            sample = tasks.draw_sample(tasks.draw_task(values.rng), values)
            yield {key: value for key, value in sample.items() if key != "task"}


def new_chat(task: str, values: Values) -> list[dict[str, Any]]:
    return inbox.turn(task, inbox.draw_inquiry(values))


# -- models


def train_both_stages(name: str, args: argparse.Namespace) -> None:
    """Train a model in both stages; what exists is left alone, and an interrupted run goes on."""
    folder = args.out / name / "start"
    if not folder.exists():
        write_start(folder, name, args)
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
            steps_per_report=25,
            steps_per_eval=max(steps // 4, 1),
            save_every=50,
            seed=args.seed,
        )
        recipe = Recipe(
            args.out / f"data-{stage}",
            options,
            folder,
            batch_size=args.rows,
            max_seq_length=ROW,
            prompt_weight=1.0 if stage == "chunk" else 0.0,
        )
        run = args.out / name / f"{stage}-run"
        method = method_of(name, stage, args)
        print(f"{name}, stage {stage}", flush=True)
        train_by(method, recipe, path, run_path=run, resume=run.exists(), on_event=print_event)
        folder = path


def method_of(name: str, stage: str, args: argparse.Namespace) -> Method:
    return IFPTraining(stage=stage, chunk_size=args.chunk) if name == "ifp" else FullTraining()


def print_event(event: object) -> None:
    if type(event).__name__ in ("Report", "Validation", "Resumed"):
        print(event, flush=True)


def write_start(folder: Path, name: str, args: argparse.Namespace) -> None:
    """Write the folder of a model before training: afm-nano in floats, or the wide model made from it."""
    source = ModelSource.open(MODEL)
    dense = float_model(source)
    if name == "dense":
        save_start(folder, dense, source)
        return
    factor = dense.args.hidden_dim_scale_factor * WIDER
    model = Model(dataclasses.replace(dense.args, hidden_dim_scale_factor=factor))
    mx.random.seed(args.seed)
    wide = dict(tree_flatten(dense.parameters()))
    for key, weight in wide.items():
        if key.endswith(("gate_proj.weight", "up_proj.weight")):
            copies = [weight]
            for _ in range(WIDER - 1):
                noise = mx.random.normal(weight.shape) * weight.std() * NOISE
                channels = mx.random.permutation(len(weight))
                copies.append((weight[channels] + noise) / (1 + NOISE**2) ** 0.5)
            wide[key] = mx.concatenate(copies)
        elif key.endswith("down_proj.weight"):
            zeros = mx.zeros_like(weight)
            wide[key] = mx.concatenate([weight, *[zeros] * (WIDER - 1)], axis=1)
    model.load_weights(list(wide.items()))
    mx.eval(model.parameters())
    if name != "ifp":
        save_start(folder, model, source)
        return
    predictor = first_predictor(dense, source, args)

    def add(made: Path) -> None:
        own = made / PREDICTOR_FOLDER
        own.mkdir()
        save_weights(own, dict(tree_flatten(predictor.body.parameters())))
        write_config(own, predictor.body.args.to_dict())
        write_head(own, predictor)

    save_start(folder, model, source, add)


def float_model(source: ModelSource) -> Model:
    """Load a packed model as one of float weights, with float keys and values."""
    loaded = dequantize_model(source.load())
    model = Model(dataclasses.replace(loaded.args, kv_bits=None))
    weights = tree_flatten(loaded.parameters())
    model.load_weights([(key, array) for key, array in weights if not key.endswith(KV_SCALES)])
    mx.eval(model.parameters())
    return model.eval()


def save_start(folder: Path, model: Model, source: ModelSource, add: Any = None) -> None:
    values = model.args.to_dict() | {"eos_token_id": source.values["eos_token_id"]}
    save_model_folder(folder, model, values, source, what="Before training.", facts={}, add=add)


def first_predictor(dense: Model, source: ModelSource, args: argparse.Namespace) -> MaskPredictor:
    """Return a predictor whose scores begin near the logarithms of the dense channels' scores by activation.

    W1's first row maps each state to about 1, so that W2's first column holds each channel's mean score. The
    other rows are random, and map the mean state to 0: they give each prompt scores that differ a little.
    """
    recipe = Recipe(
        args.out / f"data-{STAGES[-1]}",
        TrainingOptions(iters=1, learning_rate=1.0, seed=args.seed),
        source.folder,
        batch_size=4,
        packing=False,
    )
    activations = activation_scores(dense, read_split(recipe, source, "train"), 16)
    old = np.log(group_scores(activations, GROUP))
    old = (old - old.mean(axis=1, keepdims=True)) / old.std(axis=1, keepdims=True)
    blocks, groups = old.shape
    new = np.full((blocks, groups * (WIDER - 1)), NEW_SCORE)
    config = PredictorConfig(
        blocks,
        dense.args.ffn_dim * WIDER,
        dense.args.ffn_dim,
        temperature=args.temperature,
        binary=not args.soft,
    )
    body = float_model(ModelSource.open(source.folder / "draft"))
    predictor = MaskPredictor(body, config, args.seed)
    states = prompt_states(body, source.tokenizer, args.seed)
    mean = states.mean(axis=0)
    # What maps each state to about 1: masks of both stages begin alike, though their prompts end differently.
    gram = states.T @ states / len(states)
    constant = np.linalg.solve(gram + 1e-3 * np.trace(gram) / len(gram) * np.eye(len(gram)), mean)
    w1 = np.array(predictor.w1, np.float64)
    w1 -= (w1 @ mean)[:, None] * constant
    w1[0] = constant
    w2 = np.array(predictor.w2, np.float64)
    w2 *= PROMPT_DEVIATION / (states @ w1[1:].T @ w2[:, 1:].T).std(axis=0).mean()
    w2[:, 0] = np.concatenate([old, new], axis=1).reshape(-1)
    predictor.w1, predictor.w2 = (mx.array(each.astype(np.float32)) for each in (w1, w2))
    return predictor


def prompt_states(body: Model, tokenizer: Any, seed: int) -> np.ndarray:
    """Return the predictor's states (N, D) at the ends of prompts, and at three places within each."""
    rng, states = random.Random(seed), []
    for line in islice(draw_chats(f"prompts-{seed}"), PROMPTS_OF_START):
        prompt = encode_prompt(line, tokenizer)
        lengths = [len(prompt), *(rng.randint(16, len(prompt)) for _ in range(3))]
        tokens = mx.array([prompt] * len(lengths))
        states.append(body.final_norm(body.hidden_last(tokens, mx.array(lengths))))
    return np.array(mx.concatenate(states), np.float64)


# -- what is measured


def measure(names: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Measure exact answers and the loss of answers for each task, in all ways, and the overlap of masks."""
    samples = read_samples(args.limit)
    of_samples = [sample["task"] for sample in samples]
    arguments = {key: str(value) for key, value in vars(args).items()}
    report: dict[str, Any] = {"arguments": arguments, "accuracy": {}, "nats": {}}

    def add(way: str, model: Any, encoded: list[Encoded], masks: list[mx.array] | None) -> None:
        report["accuracy"][way], report["nats"][way] = answers(model, samples, encoded, masks)
        print(way, report["accuracy"][way], report["nats"][way], flush=True)

    for name, stage in [("dense", "start"), *((name, STAGES[-1]) for name in names)]:
        folder = args.out / name / stage
        model, tokenizer = afm_mlx.load(folder)
        encoded = [encode(sample, tokenizer) for sample in samples]
        if name != "ifp":
            add(f"{name}, before training" if stage == "start" else name, model, encoded, None)
            continue
        predictor = load_predictor(folder, model.args)
        add_masks(model)
        model.eval()
        own = [scores_of(predictor, prompt) for prompt, _ in encoded]
        by_prompts = prompt_scores(predictor, tokenizer, args.seed)
        by_text = description_scores(predictor, tokenizer)
        everywhere = mx.stack(list(by_prompts.values())).mean(0)
        order = list(DESCRIPTIONS)
        other = dict(zip(order, order[len(order) // 2 :] + order, strict=False))
        mx.random.seed(args.seed)
        for way, chosen in (
            ("per prompt", own),
            ("per task, by prompts", [by_prompts[task] for task in of_samples]),
            ("per task, by description", [by_text[task] for task in of_samples]),
            ("one mask for all tasks", [everywhere] * len(samples)),
            ("another task's mask", [by_prompts[other[task]] for task in of_samples]),
            ("random masks", [mx.random.normal(each.shape) for each in own]),
        ):
            masks = [top_k_mask(each, predictor.config.kept_groups) for each in chosen]
            add(f"ifp, {way}", model, encoded, masks)
        hard = np.array(mx.stack([predictor.masks(each) for each in own]))
        report |= overlaps(hard, of_samples)
        report["new_channels"] = float(hard[..., hard.shape[-1] // WIDER :].sum() / hard.sum())
    return report


def read_samples(limit: int) -> list[dict[str, Any]]:
    """Return held-out chats, `limit` of each task; their values never occur in training."""
    path = ModelSource.open(MODEL).folder / "evaluation.jsonl"
    of_tasks: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for task in inbox.TASKS:
        of_tasks[task] = inbox.test_examples(task, 1, limit)
    for line in path.read_text().splitlines():
        sample = json.loads(line)
        of_tasks[sample["task"]].append(sample)
    return [sample for samples in of_tasks.values() for sample in samples[:limit]]


def encode(sample: dict[str, Any], tokenizer: Any) -> Encoded:
    """Return the tokens of the prompt, and of the answer with the end of its turn."""
    prompt = encode_prompt(sample, tokenizer)
    answer: Line = {"role": "assistant", "content": sample["answer"]}
    start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
    if sample["answer"].startswith(start):
        # In a message's text, the markers of calls would be plain text.
        calls = tokenizer.tool_parser(sample["answer"].removeprefix(start).removesuffix(end))
        answer = {"role": "assistant", "tool_calls": [{"function": call} for call in calls]}
    whole = tokenizer.apply_chat_template(
        [*sample["messages"], answer], tools=sample.get("tools"), tokenize=True
    )
    end = next(i for i, t in enumerate(whole) if i >= len(prompt) and t in tokenizer.eos_token_ids)
    return prompt, list(whole[len(prompt) : end + 1])


def encode_prompt(sample: dict[str, Any], tokenizer: Any) -> list[int]:
    """Return the tokens of a chat's prompt; an answer at its end is left out."""
    messages = sample["messages"]
    if messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    options = {"tools": sample.get("tools"), "add_generation_prompt": True, "tokenize": True}
    return list(tokenizer.apply_chat_template(messages, **options))


def answers(
    model: Any,
    samples: list[dict[str, Any]],
    encoded: list[Encoded],
    masks: list[mx.array] | None,
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the share of exact answers, and the mean loss of answers' tokens in nats, of each task.

    `masks` has a mask (blocks, groups) for each chat; None runs the whole model. Both results also have the
    means of new and of known tasks, of those that there are.
    """
    right: dict[str, list[bool]] = defaultdict(list)
    losses: dict[str, list[float]] = defaultdict(list)
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
        losses[sample["task"]] += nn.losses.cross_entropy(logits, mx.array(answer)).tolist()
    return _with_means(right), _with_means(losses)


def _with_means(found: dict[str, Any]) -> dict[str, float]:
    means = {task: float(np.mean(each)) for task, each in found.items()}
    of_kinds: dict[str, list[float]] = defaultdict(list)
    for task, mean in means.items():
        of_kinds[NEW if task in inbox.TASKS else KNOWN].append(mean)
    return means | {kind: float(np.mean(each)) for kind, each in of_kinds.items()}


def scores_of(predictor: MaskPredictor, prompt: list[int]) -> mx.array:
    scores = predictor(mx.array([prompt]), mx.array([len(prompt)]))[0]
    mx.eval(scores)
    return scores


def description_scores(predictor: MaskPredictor, tokenizer: Any) -> dict[str, mx.array]:
    chats = {task: [{"role": "user", "content": text}] for task, text in DESCRIPTIONS.items()}
    return {
        task: scores_of(predictor, encode_prompt({"messages": messages}, tokenizer))
        for task, messages in chats.items()
    }


def prompt_scores(predictor: MaskPredictor, tokenizer: Any, seed: int) -> dict[str, mx.array]:
    """Return the mean scores of training prompts of each task."""
    found = {}
    for task in DESCRIPTIONS:
        values = Values(random.Random(f"masks-{seed}-{task}"), "train")
        scores = []
        for _ in range(PROMPTS_OF_A_TASK):
            if task in inbox.TASKS:
                sample: Line = {"messages": new_chat(task, values)}
            else:
                sample = tasks.draw_sample(task, values)
            scores.append(scores_of(predictor, encode_prompt(sample, tokenizer)))
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


# -- figures


def plot_accuracy(accuracy: dict[str, dict[str, float]], path: Path) -> None:
    """Draw the mean shares of exact answers of each way as bars: of new and of known tasks."""
    figure = Figure(figsize=(8.0, 1.2 + 0.55 * len(accuracy)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    rows = np.arange(len(accuracy))
    for offset, kind, color in ((-0.2, NEW, "#0072B2"), (0.2, KNOWN, "#999999")):
        widths = [100 * shares[kind] for shares in accuracy.values()]
        bars = axes.barh(rows + offset, widths, height=0.38, color=color, label=kind)
        axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
    axes.set_yticks(rows, list(accuracy))
    axes.invert_yaxis()
    axes.set(xlim=(0, 110), xlabel="exact answers, %")
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=150, format="png")


def plot_overlap(overlap: dict[str, Any], of_blocks: list[dict[str, float]], path: Path) -> None:
    """Draw the overlap of masks for each pair of tasks, and by block within and across tasks."""
    figure = Figure(figsize=(11.0, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    names, matrix = overlap["tasks"], overlap["matrix"]
    image = left.imshow(matrix, cmap="viridis")
    left.set_xticks(range(len(names)), names, rotation=40, ha="right")
    left.set_yticks(range(len(names)), names)
    for y, row in enumerate(matrix):
        for x, value in enumerate(row):
            left.text(x, y, f"{value:.2f}", ha="center", va="center", color="white", fontsize=7)
    figure.colorbar(image, ax=left, label="common channels of two prompts' masks")
    for name, color in (("within", "#0072B2"), ("across", "#E69F00")):
        right.plot([block[name] for block in of_blocks], "o-", color=color, label=f"{name} tasks")
    right.set_xlabel("block")
    right.set_ylabel("common channels of two prompts' masks")
    right.set_xticks(range(len(of_blocks)))
    right.legend(frameon=False)
    figure.savefig(path, dpi=150, format="png")


if __name__ == "__main__":
    main()
