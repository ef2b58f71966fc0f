"""Train the model with `tamm`, Apple's own PyTorch implementation, and save a toolkit-style checkpoint.

Notable choices:
- Muon for the matrices of the blocks, AdamW for the embedding and the norms; linear warm-up, then
  linear decay to zero.
- bf16 autocast and `torch.compile`; logits only where there is a loss.
- int8 keys and values from the first step: the ranges are what the observers saw while training.
- the shipped weights are the mean of two: those from before the further texts, and the last ones.
- exact match is measured by teacher forcing: greedy decoding writes the expected answer if and only if
  the most likely token is right at each of its positions.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tamm.ao
import tasks
import torch
from batches import TOKENS_PER_STEP, Batch, Batches
from tamm.models.afm_text import AFMTextV7
from tamm.preprocessors.instruct_lm.afm import AFMChatTemplateV6Preprocessor
from tamm.tokenizers.afm import AFMTokenizer
from tamm.utils import json as tamm_json
from torch.nn import functional as F

MODEL_ARGS = {
    "vocab_size": 4096,
    "hidden_dim": 256,
    "num_layers": 8,
    "num_kv_reuse_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "hidden_dim_scale_factor": 3.25,
    "rope_theta": 10000.0,
}
_MUON_LR, _ADAM_LR = 0.02, 3e-3
_WARM_UP_STEPS = 100
_CONSTANT_SHARE = 0.35  # of the steps, before the decay begins


@dataclass(frozen=True)
class Plan:
    """The settings of a training run, besides its data.

    Args:
        steps: optimizer steps, of `batches.TOKENS_PER_STEP` tokens each.
        seed: the seed of the weights.
        report_every: steps between two reports, each of which saves a checkpoint too.
        sizes: arguments of the model that differ from `MODEL_ARGS`.
        compiled: compile the training step, which takes minutes and makes steps faster.
    """

    steps: int
    seed: int
    report_every: int = 500
    threads: int = 2
    sizes: dict[str, Any] = field(default_factory=dict)
    compiled: bool = True


def model_config(**overrides: Any) -> AFMTextV7.Config:
    """Return the model's configuration in tamm's terms: AFM text v7 with int8 keys and values."""
    arch_optimizers = {"kv_quant": tamm.ao.KVQuantArchOptimizer()}
    return AFMTextV7.Config(**(MODEL_ARGS | overrides), arch_optimizers=arch_optimizers)


def train(
    out: Path, plan: Plan, batches: Batches, test_samples: list[dict[str, Any]], held_out: list[str]
) -> AFMTextV7:
    """Train, or resume what `out` holds, and leave the checkpoint there; returns the model in evaluation mode.

    `out` gains `train-log.jsonl` and `train-state.pt`, and in its folder `checkpoint`, next to the tokenizer,
    `base-model.pt` and `base-model-config.json`. Reports are on held-out chats, from `tasks.test_samples`, and
    docstrings.
    """
    torch.set_num_threads(plan.threads)
    torch.manual_seed(plan.seed)
    config = tamm_json.dumps(model_config(**plan.sizes), indent=2)
    (out / "checkpoint" / "base-model-config.json").write_text(config + "\n")
    # On a CPU, plain matrix products beat the fused attention kernel at these lengths.
    model = model_config(**plan.sizes, sdpa_implementation="basic").create_model()
    _zero_outputs(model)
    optimizers = _optimizers(model)
    step = _resume(out, model, optimizers)
    training_loss = _training_loss
    if plan.compiled:
        training_loss = torch.compile(_training_loss, dynamic=False)

    started, recent = time.perf_counter(), []
    while step < plan.steps:
        model.train()
        _set_learning_rates(optimizers, step, plan.steps)
        loss = training_loss(model, batches(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        recent.append(loss.item())
        step += 1
        if step % plan.report_every == 0 or step == plan.steps:
            report = {
                "step": step,
                "tokens": step * TOKENS_PER_STEP,
                "loss": sum(recent) / len(recent),
            }
            report["tokens_per_second"] = (
                len(recent) * TOKENS_PER_STEP / (time.perf_counter() - started)
            )
            report |= evaluate(model, batches.preprocessor, test_samples, held_out)
            _save(out, model, optimizers, step, report)
            started, recent = time.perf_counter(), []
    return model.eval()


def _training_loss(model: AFMTextV7, batch: Batch) -> torch.Tensor:
    """Return the weighted cross-entropy over the batch's target positions."""
    with torch.autocast("cpu", torch.bfloat16):
        output = model(batch.ids, segment_ids=batch.segments, mode="skip_output_layer")
        hidden = output.last_hidden_state.flatten(0, 1)[batch.positions]
        logits = hidden @ model.embedding.weight.T  # (targets, vocabulary)
    losses = F.cross_entropy(logits.float(), batch.labels, reduction="none", ignore_index=-100)
    return (losses * batch.weights).sum() / batch.weights.sum()


def _zero_outputs(model: AFMTextV7) -> None:
    """Start each block as the identity: its two output projections are zero."""
    for name, parameter in model.named_parameters():
        if name.endswith("output_transform.weight") and name.startswith("layers."):
            torch.nn.init.zeros_(parameter)


def _optimizers(model: AFMTextV7) -> list[torch.optim.Optimizer]:
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and name.startswith("layers.") else others).append(
            parameter
        )
    return [
        torch.optim.Muon(matrices, lr=_MUON_LR, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=_ADAM_LR, betas=(0.9, 0.98), weight_decay=0.01, fused=True),
    ]


def _set_learning_rates(optimizers: list[torch.optim.Optimizer], step: int, steps: int) -> None:
    constant = _CONSTANT_SHARE * steps
    decay = min(1.0, (steps - step) / (steps - constant))
    factor = min((step + 1) / _WARM_UP_STEPS, decay)
    for optimizer, base in zip(optimizers, (_MUON_LR, _ADAM_LR), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = base * factor


@torch.no_grad()
def evaluate(
    model: AFMTextV7,
    preprocessor: AFMChatTemplateV6Preprocessor,
    test_samples: list[dict[str, Any]],
    held_out: list[str],
) -> dict[str, Any]:
    """Measure exact match of greedy answers for each task, and the perplexity of `held_out`, in float32.

    Perplexity is per token, with the texts encoded as the tokenizer's end-of-sequence id and the text.
    """
    model.eval()
    tokenizer = preprocessor.tokenizer
    right, total = defaultdict(int), defaultdict(int)
    for sample in test_samples:
        prompt, _ = tasks.encode(preprocessor, sample, generate=True)
        answer = encode_answer(tokenizer, sample["answer"])
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        total[sample["task"]] += 1
        right[sample["task"]] += logits.argmax(-1).tolist() == answer
    losses = torch.cat(list(_text_losses(model, tokenizer, held_out)))
    return {
        "exact_match": {task: right[task] / total[task] for task in total},
        "perplexity": losses.mean().exp().item(),
    }


@torch.no_grad()
def greedy(model: AFMTextV7, prompt: list[int], count: int) -> list[int]:
    """Return the `count` tokens that follow `prompt` when each is the most likely one, in float32."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
    return ids[len(prompt) :]


def encode_answer(tokenizer: AFMTokenizer, answer: str) -> list[int]:
    """Return the tokens of an assistant's answer and the `<turn_end>` after it."""
    # Encoded behind a line break, as in a chat, so that no dummy prefix gets in.
    return [*tokenizer.encode("<n>" + answer)[2:], tokenizer.eot_id]


def _text_losses(
    model: AFMTextV7, tokenizer: AFMTokenizer, texts: list[str]
) -> Iterator[torch.Tensor]:
    for text in texts:
        ids = torch.tensor([[tokenizer.eos_id, *tokenizer.encode(text)[1:]]])
        yield F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")


def _resume(out: Path, model: AFMTextV7, optimizers: list[torch.optim.Optimizer]) -> int:
    """Load the last state in `out`, if any; return the number of steps that led to it."""
    path = out / "train-state.pt"
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return state["step"]


def _write(content: dict[str, Any], path: Path) -> None:
    # Renamed when complete: a reader never sees half a file.
    part = path.with_suffix(".part")
    torch.save(content, part)
    os.replace(part, path)


def _save(
    out: Path,
    model: AFMTextV7,
    optimizers: list[torch.optim.Optimizer],
    step: int,
    report: dict[str, Any],
) -> None:
    state = {
        "step": step,
        "model": model.state_dict(),
        "optimizers": [o.state_dict() for o in optimizers],
    }
    _write(state, out / "train-state.pt")
    _write(model.state_dict(), out / "checkpoint" / "base-model.pt")
    with (out / "train-log.jsonl").open("a") as log:
        log.write(json.dumps(report) + "\n")
    matches = " ".join(f"{task} {share:.2f}" for task, share in report["exact_match"].items())
    print(
        f"{time.strftime('%H:%M')} step {step} loss {report['loss']:.3f} "
        f"perplexity {report['perplexity']:.1f} {report['tokens_per_second']:.0f} tok/s | {matches}",
        flush=True,
    )
