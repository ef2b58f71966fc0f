"""How often a draft model, and prompt look-up, say what the target says next.

The target answers the held-out chats and continues the beginnings of held-out docstrings, greedily and by
drawing at a temperature of 1. Along its own answers, a draft's most likely token is compared with the target's
at every position, and the steps of speculative decoding are counted: a step takes as many of k proposed tokens
as agree with the answer, and one token of the target's own.

As long as its proposals are taken, a draft sees what the target wrote. So one pass over the whole answer tells
what it would propose at any position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import afm_mlx  # isort: skip

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from afm_mlx.engine.engine import Engine
from afm_mlx.engine.request import Request
from afm_mlx.engine.samplers import make_sampler
from afm_mlx.jsonl import read_jsonl
from afm_mlx.loading.load import load_draft

DRAFT_LENGTHS = (2, 4, 8)
TEXTS = "docstrings"
_TEXT_PROMPT, _TEXT_ANSWER, _ANSWER = 48, 64, 200
_LOOK_UP = (3, 2)  # tokens that are looked up, the more the better

Figures = dict[str, Any]
Propose = Callable[[int], Sequence[int]]
"""What is proposed behind the first n tokens of prompt and answer, at most the longest of DRAFT_LENGTHS."""


@dataclass(frozen=True)
class Answer:
    """An answer of the target: its task, and token ids of the prompt and of the answer."""

    task: str
    prompt: list[int]
    tokens: list[int]


def target_answers(folder: Path, limit: int | None = None, sampled: bool = False) -> list[Answer]:
    """Return a model's answers to its own test data, to `limit` prompts of each task, greedy or `sampled`."""
    model, tokenizer = afm_mlx.load(folder)
    prompts: dict[str, list[list[int]]] = {}
    for _, line in read_jsonl(folder / "evaluation.jsonl"):
        prompt = tokenizer.apply_chat_template(
            line["messages"], tools=line.get("tools"), add_generation_prompt=True
        )
        prompts.setdefault(line["task"], []).append(prompt)
    for _, line in read_jsonl(folder / "heldout.jsonl"):
        text = tokenizer.encode(line["text"], add_special_tokens=True)
        if len(text) > _TEXT_PROMPT:
            prompts.setdefault(TEXTS, []).append(text[:_TEXT_PROMPT])
    engine = Engine(model, tokenizer, max_batch=16)
    sampler = make_sampler(temp=1.0) if sampled else None
    answers: dict[int, Answer] = {}
    for task, chosen in prompts.items():
        for index, prompt in enumerate(chosen[:limit]):
            length = _TEXT_ANSWER if task == TEXTS else _ANSWER
            request = Request(prompt, length, sampler, seed=index, logprobs=False)
            answers[engine.submit(request)] = Answer(task, prompt, [])
    for response in engine.run():
        answers[response.row].tokens.append(response.token)
    return list(answers.values())


# -- what is proposed


def draft_choices(draft: nn.Module, answer: Answer) -> np.ndarray:
    """Return the draft's most likely token at every position of the answer, (tokens,)."""
    return np.array(mx.argmax(_logits(draft, answer), axis=-1))


def _logits(model: nn.Module, answer: Answer) -> mx.array:
    """Return logits (tokens, vocab_size) float32 at the positions that predict the answer."""
    ids = mx.array([[*answer.prompt, *answer.tokens[:-1]]])
    return model(ids)[0, len(answer.prompt) - 1 :].astype(mx.float32)


def looked_up(tokens: Sequence[int], count: int) -> list[int]:
    """Return up to `count` tokens after the last earlier occurrence of the last 3 tokens, else the last 2."""
    for width in _LOOK_UP:
        wanted = list(tokens[-width:])
        for start in range(len(tokens) - width - 1, -1, -1):
            if tokens[start : start + width] == wanted:
                return list(tokens[start + width : start + width + count])
    return []


# -- what is taken


@dataclass(frozen=True)
class Steps:
    """Steps of the target that an answer takes with proposals of k tokens, and how many of these it takes."""

    steps: int
    proposed: int
    taken: int


def count_steps(answer: Answer, propose: Propose, k: int) -> Steps:
    """Decode an answer with proposals of up to k tokens; each step adds a token of the target's own."""
    tokens, at = answer.tokens, 0
    steps = proposed = taken = 0
    while at < len(tokens):
        proposal = propose(at)[: min(k, len(tokens) - at - 1)]
        agree = 0
        while agree < len(proposal) and proposal[agree] == tokens[at + agree]:
            agree += 1
        steps, proposed, taken = steps + 1, proposed + len(proposal), taken + agree
        at += agree + 1
    return Steps(steps, proposed, taken)


def proposals(answer: Answer, choices: np.ndarray) -> dict[str, Propose]:
    """Return the ways to propose: the draft's `choices`, look-up, and both, the draft where that finds none."""
    text, chosen = [*answer.prompt, *answer.tokens], choices.tolist()

    def look_up(at: int) -> list[int]:
        return looked_up(text[: len(answer.prompt) + at], max(DRAFT_LENGTHS))

    return {
        "draft": lambda at: chosen[at:],
        "look-up": look_up,
        "look-up, else draft": lambda at: look_up(at) or chosen[at:],
    }


# -- figures


def measure(draft: Path, target: Path, limit: int | None = None) -> Figures:
    """Measure a draft model with its target, by task, and for all chats.

    Returns `positions`; `agreement` of the greedy tokens; `acceptance`, the share of proposals that
    speculative sampling keeps at a temperature of 1, along drawn answers; and `tokens per step` by way of
    proposing and k.
    """
    model, tokenizer = afm_mlx.load(target)
    drafting = load_draft(draft, model, tokenizer)
    answers = target_answers(target, limit)
    choices = [draft_choices(drafting, answer) for answer in answers]
    kept: dict[str, list[float]] = {}
    for answer in target_answers(target, limit, sampled=True):
        kept.setdefault(answer.task, []).extend(_kept(drafting, model, answer))
    tasks = list(dict.fromkeys(answer.task for answer in answers))
    kept["all"] = [share for task in tasks if task != TEXTS for share in kept[task]]
    figures = {}
    for task in [*tasks, "all"]:
        pairs = [p for p in zip(answers, choices, strict=True) if _belongs(p[0].task, task)]
        figures[task] = _of_task(pairs) | {"acceptance": float(np.mean(kept[task]))}
    return figures


def _belongs(task: str, group: str) -> bool:
    return task == group or (group == "all" and task != TEXTS)


def _kept(draft: nn.Module, model: nn.Module, answer: Answer) -> list[float]:
    """Return sum min(draft, target) at each position of a drawn answer."""
    ours, theirs = (mx.softmax(_logits(each, answer), axis=-1) for each in (draft, model))
    return mx.minimum(ours, theirs).sum(axis=-1).tolist()


def _of_task(pairs: list[tuple[Answer, np.ndarray]]) -> Figures:
    positions = sum(len(answer.tokens) for answer, _ in pairs)
    agree = sum(int((choices == np.array(answer.tokens)).sum()) for answer, choices in pairs)
    per_step: dict[str, dict[str, float]] = {}
    for k in DRAFT_LENGTHS:
        counted: dict[str, list[Steps]] = {}
        for answer, choices in pairs:
            for way, propose in proposals(answer, choices).items():
                counted.setdefault(way, []).append(count_steps(answer, propose, k))
        for way, all_steps in counted.items():
            steps = sum(each.steps for each in all_steps)
            per_step.setdefault(way, {})[str(k)] = positions / steps
    return {"positions": positions, "agreement": agree / positions, "tokens per step": per_step}


def markdown(figures: Figures) -> str:
    """Return the figures as a table: agreement, proposals that are kept at 1, and tokens per step by k."""
    ways = ("draft", "look-up")
    heads = [f"{way}, {k}" for way in ways for k in DRAFT_LENGTHS]
    lines = [
        f"| | tokens | agree | kept | {' | '.join(heads)} |",
        "| --- |" + " ---: |" * (len(heads) + 3),
    ]
    for task, row in figures.items():
        cells = [f"{row['positions']:,}", f"{row['agreement']:.1%}", f"{row['acceptance']:.1%}"]
        cells += [
            f"{row['tokens per step'][way][str(k)]:.2f}" for way in ways for k in DRAFT_LENGTHS
        ]
        lines.append(f"| {'all chats' if task == 'all' else f'`{task}`'} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
