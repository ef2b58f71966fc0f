"""How much faster a model decodes when tokens are guessed, beside the same prompts without guesses.

Random weights agree with no draft model, so a share of right guesses can be set: the answers are known from a
run before, and each guess is right with that probability. The draft model runs anyway, and its time counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from afm_mlx.engine.engine import Engine
from afm_mlx.engine.request import Request
from afm_mlx.engine.speculation.draft_model import DraftModel
from afm_mlx.engine.speculation.draft_tokens import Draft
from afm_mlx.engine.speculation.drafting import Speculation
from afm_mlx.measure.benchmark import NO_TEXT, Spread
from afm_mlx.model.model import Model

Answers = dict[tuple[int, ...], list[int]]


@dataclass(frozen=True)
class SpeculationResult:
    """What guesses bring.

    Args:
        rows: rows side by side.
        guesses: guesses per row and step on average, of the steps that had any.
        accepted: share of the guesses that were kept; behind a wrong one none is.
        plain: new tokens per second without guesses.
        guessed: new tokens per second with them.
        ratio: the second over the first, of neighbouring runs.
        equal: whether all answers were the same.
    """

    rows: int
    guesses: float
    accepted: float
    plain: Spread
    guessed: Spread
    ratio: Spread
    equal: bool


class SetAcceptance(DraftModel):
    """A draft model that runs, and whose guesses are replaced by ones that are right with a given probability.

    Args:
        model: the draft model.
        rate: that probability.
        rng: decides which guesses are right, and draws the wrong ones.
        prefill_step_size: see `DraftModel`.

    Attributes:
        answers: the right tokens, by prompt.
    """

    def __init__(
        self, model: Model, rate: float, rng: np.random.Generator, prefill_step_size: int = 128
    ):
        super().__init__(model, prefill_step_size)
        self.answers: Answers = {}
        self._rate, self._rng = rate, rng

    def next_tokens(self, guessing: dict[int, Draft]) -> list[int]:
        super().next_tokens(guessing)
        return [self._given(draft) for draft in guessing.values()]

    def _given(self, draft: Draft) -> int:
        answer = self.answers[tuple(draft.row.request.prompt)]
        place = len(draft.row.tokens) + len(draft.assumed)
        if place < len(answer) and self._rng.random() < self._rate:
            return answer[place]
        return int(self._rng.integers(self.model.args.vocab_size))


def run_speculation(
    model: Model,
    prompts: Sequence[Sequence[int]],
    speculation: Speculation,
    *,
    generated_tokens: int = 128,
    repetitions: int = 5,
    kv: str = "int8",
    on_run: Callable[[], None] | None = None,
) -> SpeculationResult:
    """Measure decoding with and without guesses, in turn, after a run of each that does not count.

    Args:
        model: the model.
        prompts: token ids of each row's prompt.
        speculation: how tokens are guessed. A `SetAcceptance` in it is told the answers.
        generated_tokens: new tokens of each row.
        repetitions: measured runs of each.
        kv: "int8" or "float" storage of keys and values.
        on_run: called after every run.

    Raises:
        RequestError: for what can't be speculated.
    """
    plain, guessed, equal, counts = [], [], True, (0, 0, 0)
    for repetition in range(1 + repetitions):
        answers, tokens_per_second, _ = _timed(model, prompts, None, generated_tokens, kv)
        if isinstance(speculation.draft_model, SetAcceptance):
            speculation.draft_model.answers |= answers
        if on_run:
            on_run()
        found, faster, counted = _timed(model, prompts, speculation, generated_tokens, kv)
        if on_run:
            on_run()
        equal = equal and found == answers
        if repetition:
            plain.append(tokens_per_second)
            guessed.append(faster)
            counts = tuple(map(sum, zip(counts, counted, strict=True)))  # type: ignore[assignment]
    proposed, accepted, rounds = counts
    return SpeculationResult(
        rows=len(prompts),
        guesses=proposed / max(1, rounds),
        accepted=accepted / max(1, proposed),
        plain=Spread.of(plain),
        guessed=Spread.of(guessed),
        ratio=Spread.of([b / a for a, b in zip(plain, guessed, strict=True)]),
        equal=equal,
    )


def _timed(
    model: Model,
    prompts: Sequence[Sequence[int]],
    speculation: Speculation | None,
    generated_tokens: int,
    kv: str,
) -> tuple[Answers, float, tuple[int, int, int]]:
    """Answers by prompt; tokens per second behind each row's first; guesses, right ones, and steps with any."""
    tokenizer: Any = SimpleNamespace(eos_token_ids=set(), detokenizer=NO_TEXT)
    engine = Engine(model, tokenizer, max_batch=len(prompts), kv=kv, speculation=speculation)
    rows = {
        engine.submit(Request(prompt, max_tokens=generated_tokens, logprobs=False)): tuple(prompt)
        for prompt in prompts
    }
    answers: Answers = {prompt: [] for prompt in rows.values()}
    start = 0.0
    proposed = accepted = rounds = before = 0
    while engine.busy:
        for response in engine.step():
            if response.error is not None:
                raise response.error
            answers[rows[response.row]].append(response.token)
            if response.draft_counts is not None:
                proposed += response.draft_counts.proposed
                accepted += response.draft_counts.accepted
                rounds += response.draft_counts.rounds
        if not start and all(answers.values()):
            start, before = time.perf_counter(), sum(map(len, answers.values()))
    seconds = time.perf_counter() - start
    tokens = sum(map(len, answers.values())) - before
    return answers, tokens / max(seconds, 1e-9), (proposed, accepted, rounds)
