"""Thoughts before an answer: how a model writes them, and what holds an answer behind them.

| form | a thought |
| --- | --- |
| marks | `<think>\\nHm.\\n</think>\\n\\n`; Gemma 4's is `<|channel>thought\\nHm.<channel|>` |
| Harmony (GPT-OSS) | `<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant`, any number of them |

A chat template may begin the first thought in the prompt, see `ThoughtForm.is_begun`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from afm_mlx.guidance.constraint import Constraint, literal, named_grammars

HARMONY = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>")
FINAL = "<|channel|>final<|message|>"
"""Begins the answer itself in Harmony."""
_OTHER_MARKS = (
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<seed:think>", "</seed:think>"),
)
"""Marks that mlx-lm does not look for: Mistral's, Command A's and Seed-OSS's."""
IN_THOUGHT, OUTSIDE = -1, -2
_BIAS = 1e4
"""Makes a token certain, and leaves others possible where a grammar does not allow it: within a character."""
_LAG = 64
"""More tokens than are ever taken back, because they were drafts."""


@dataclass(frozen=True)
class ThoughtForm:
    """How a model writes thoughts.

    Args:
        start: text before a thought; it begins with a control token.
        end: text after a thought; it begins with a control token.
        start_ids, end_ids: both as tokens.
        ids: ids of control tokens by name.
        is_harmony: True for messages in channels.
        final_ids: Harmony's tokens between the last thought and an answer without calls.
    """

    start: str
    end: str
    start_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    ids: Mapping[str, int] = field(hash=False)
    is_harmony: bool = False
    final_ids: tuple[int, ...] = ()

    @property
    def start_name(self) -> str:
        """The control token that begins a thought."""
        return next(name for name in self.ids if self.start.startswith(name))

    @property
    def end_name(self) -> str:
        """The control token that ends a thought."""
        return next(name for name in self.ids if self.end.startswith(name))

    def is_begun(self, prompt: Sequence[int]) -> bool:
        """True if a prompt ends in a thought, which the answer goes on with."""
        last = {token: i for i, token in enumerate(prompt)}
        if self.is_harmony:
            at = last.get(self.ids["<|message|>"], -1)
            size = len(self.start_ids)
            return self.is_in_message(prompt) and self.start_ids == tuple(prompt[: at + 1][-size:])
        return last.get(self.start_ids[0], -1) > last.get(self.end_ids[0], -1)

    def is_in_message(self, prompt: Sequence[int]) -> bool:
        """True if a prompt ends within one of Harmony's messages, which the answer goes on with."""
        last = {token: i for i, token in enumerate(prompt)}
        edges = (last.get(self.ids[name], -1) for name in ("<|start|>", "<|end|>"))
        return last.get(self.ids["<|message|>"], -1) > max(edges)

    def closing_token(self, answer: Sequence[int], budget: int, is_begun: bool, end: Any) -> int:
        """Return the token that has to come next, because thoughts have used up `budget` tokens.

        Args:
            answer: the tokens so far.
            budget: maximum number of tokens in all thoughts.
            is_begun: True if the prompt has begun a thought.
            end: tokens that close a thought; the first of them occurs in none.

        Returns:
            `IN_THOUGHT` if a thought may go on, `OUTSIDE` if none is open.
        """
        used, at, size = 0, 0, len(self.start_ids)
        while True:
            if not is_begun:
                starts = (
                    i
                    for i in range(at, len(answer) - size + 1)
                    if answer[i] == self.start_ids[0]
                    and tuple(answer[i : i + size]) == self.start_ids
                )
                if (start := next(starts, None)) is None:
                    return OUTSIDE
                at = start + size
            stop = next((i for i in range(at, len(answer)) if answer[i] == end[0]), len(answer))
            used += stop - at
            rest = tuple(answer[stop:])
            if used >= budget and len(rest) < len(end) and rest == tuple(end[: len(rest)]):
                return int(end[len(rest)])
            if stop == len(answer):
                return IN_THOUGHT
            at, is_begun = stop, False


def thought_form(tokenizer: Any) -> ThoughtForm | None:
    """Return how a model writes thoughts; None for a model that has no marks for them."""
    names: Mapping[str, int] = getattr(tokenizer, "control_names", {})

    def encoded(text: str) -> tuple[int, ...]:
        if text in names:
            return (names[text],)
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    source = getattr(tokenizer, "template_source", "")
    if all(name in names for name in HARMONY) and "analysis" in source:
        start, end = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
        ids = {name: names[name] for name in HARMONY}
        return ThoughtForm(start, end, encoded(start), encoded(end), ids, True, encoded(FINAL))
    given = (
        getattr(tokenizer, "think_start", None) or "",
        getattr(tokenizer, "think_end", None) or "",
    )
    pairs = [pair for pair in (given, *_OTHER_MARKS) if all(pair)]
    for start, end in pairs:
        ids = {name: i for name, i in names.items() if name in start + end}
        if any(start.startswith(n) for n in ids) and any(end.startswith(n) for n in ids):
            return ThoughtForm(start, end, encoded(start), encoded(end), ids)
    return None


# -- constraints


def with_tokens(text: str, ids: Mapping[str, int]) -> str:
    """Write text as Lark: names of control tokens by their ids, the rest literally."""
    pattern = "|".join(map(re.escape, sorted(ids, key=len, reverse=True)))
    parts = re.split(f"({pattern})", text) if pattern else [text]
    written = [
        literal(part) if i % 2 == 0 else part if ids[part] < 0 else f"<[{ids[part]}]>"
        for i, part in enumerate(parts)
        if part
    ]
    return " ".join(written)


def after_thoughts(
    constraint: Constraint,
    form: ThoughtForm,
    *,
    is_begun: bool,
    may_think: bool = True,
    is_answer: bool = True,
) -> Constraint:
    """Allow thoughts before what a constraint allows, which holds for all that follows them.

    Args:
        constraint: of the answer without thoughts.
        form: how the model writes thoughts.
        is_begun: True if the prompt has begun a thought, which then has to end.
        may_think: False if no thought may begin.
        is_answer: True if the constraint is of a text; False if its grammar has Harmony's channels, too.
    """
    start, end = with_tokens(form.start, form.ids), with_tokens(form.end, form.ids)
    if form.is_harmony:
        begun = f"TEXT {end} " if is_begun else ""
        thoughts = begun + (f"({start} TEXT {end})*" if may_think else "")
        thoughts += f" {with_tokens(FINAL, form.ids)}" if is_answer else ""
    elif is_begun:
        thoughts = f"TEXT {end} /\\n{{0,2}}/"
    else:
        thoughts = f"({start} TEXT {end} /\\n{{0,2}}/)?" if may_think else ""
    if not thoughts:
        return constraint
    lines = [f"start: {thoughts} @behind_thoughts"]
    lines += [r"TEXT: /(.|\n)*/"] if "TEXT" in thoughts else []
    grammars = [{"lark_grammar": "\n".join(lines)}]
    grammars += named_grammars(constraint.grammar, "behind_thoughts")
    return Constraint(json.dumps({"grammars": grammars}), constraint.what, form.end_ids[0])


# -- logits processors


class ThoughtBudget:
    """Closes thoughts that have used up their tokens, with the model's own end: a logits processor.

    Args:
        form: how the model writes thoughts.
        budget: maximum number of tokens in all thoughts.
        prompt: the prompt's tokens.
        end: tokens that close a thought; the form's own end by default.
        seen: number of the prompt's last tokens that the processor is given; pass None for all.
    """

    def __init__(
        self,
        form: ThoughtForm,
        budget: int,
        prompt: Sequence[int],
        end: Sequence[int] = (),
        seen: int | None = None,
    ) -> None:
        self._form, self._budget, self._end = form, budget, tuple(end) or form.end_ids
        self._prompt_size = len(prompt) if seen is None else seen
        self._is_begun = form.is_begun(prompt)
        self._outside_at = -1  # number of tokens when it was first seen that no thought is open

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        size = tokens.shape[0] - self._prompt_size
        if size < self._budget or 0 <= self._outside_at < size - _LAG:
            return logits  # without waiting for the tokens
        answer: list[int] = tokens[self._prompt_size :].tolist()
        token = self._form.closing_token(answer, self._budget, self._is_begun, self._end)
        if token != OUTSIDE:
            self._outside_at = -1
        elif self._outside_at < 0:
            self._outside_at = size
        return logits if token < 0 else _preferring(logits, token, _BIAS)


class NoThoughts:
    """Keeps a model from beginning thoughts: a logits processor for forms with marks."""

    def __init__(self, form: ThoughtForm) -> None:
        self._tokens = form.start_ids[0], form.end_ids[0]

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        for token in self._tokens:
            logits = _preferring(logits, token, -_BIAS)
        return logits


def limits_of_thoughts(
    form: ThoughtForm,
    prompt: Sequence[int],
    budget: int | None,
    may_call: bool = False,
    seen: int | None = None,
) -> list[ThoughtBudget | NoThoughts]:
    """Make the logits processors of an answer whose thoughts have at most `budget` tokens: 0 for no thoughts.

    `may_call` is True if tools can be called behind the thoughts; `seen` as in `ThoughtBudget`.
    """
    if budget is None:
        return []
    if budget == 0 and not form.is_harmony:
        return [NoThoughts(form)]
    end = (*form.end_ids, *(() if may_call else form.final_ids))
    return [ThoughtBudget(form, budget, prompt, end, seen)]


def _preferring(logits: mx.array, token: int, bias: float) -> mx.array:
    is_token = mx.arange(logits.shape[-1]) == token
    return mx.where(is_token, logits + mx.array(bias, logits.dtype), logits)
