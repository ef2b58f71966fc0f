"""Answers of several adapters to the same prompts, ranked by rewards: pairs and winners to train on.

    {"prompt": ... or "messages": [...], "tools"?: [...], and any keys that rewards look at}

Each member of the committee, an adapter or the base model, gives K answers to each prompt, all as rows of one
batch. Ranking is per prompt, not per member: the best of all answers is the winner, and with the worst one a
preference pair, as TRL has it. Prompts whose answers are all alike in reward have no pair.

Source: iTeC, in Apple's report on its foundation models (arXiv 2407.21075, section 4.3).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np

from afm_mlx.engine.engine import Engine
from afm_mlx.engine.prefix_cache import PrefixCache
from afm_mlx.engine.request import CUT_OFF, Request, Sampler, TokenResponse
from afm_mlx.errors import AFMError, DataError, shown
from afm_mlx.guidance.answer_parts import AnySplitter, read_answer, splitter_for
from afm_mlx.guidance.call_forms import AFM_CALLS, CallForm
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.guidance.thoughts import ThoughtForm, thought_form
from afm_mlx.jsonl import parse_records
from afm_mlx.measure.evaluation import answer_text, chat_request
from afm_mlx.measure.rewards import PASSES, Answered, Rewards, messages_of, prompt_text
from afm_mlx.model.wired_memory import wired_memory
from afm_mlx.tokenizer.chat_messages import parse_tool_calls
from afm_mlx.tokenizer.protocol import Tokenizer
from afm_mlx.tokenizer.vocabulary import EXECUTABLE_END, EXECUTABLE_START

BASE = "base"
"""The member that is the model without an adapter."""
PREFIX_MEMORY = 1 << 30  # bytes
PROMPT_FORM = '{"prompt": ...} or {"messages": [...]}, with any keys that rewards look at'


@dataclass(frozen=True)
class Candidate:
    """An answer to a prompt; `is_whole` is False if it was cut off."""

    member: str
    answer: str
    tokens: int
    is_whole: bool = True


@dataclass(frozen=True)
class Ranked:
    """The answers to one prompt with their rewards, and the check of each: 1 or more passes."""

    sample: Mapping[str, Any]
    where: str
    candidates: Sequence[Candidate]
    rewards: np.ndarray
    checks: np.ndarray

    def winner(self) -> int | None:
        """Return the index of the best whole answer that passes the check, the first of equals, or None."""
        whole = np.array([each.is_whole for each in self.candidates])
        passing = np.flatnonzero((self.checks >= PASSES) & whole)
        return int(passing[self.rewards[passing].argmax()]) if passing.size else None

    def pair(self) -> tuple[int, int] | None:
        """Return the indices of the best answer that passes and the worst one; None if there are no two.

        If some answers pass the check and others fail, the worst is one that fails.
        """
        best = self.winner()
        if best is None:
            return None
        failing = np.flatnonzero(self.checks < PASSES)
        if failing.size:
            return best, int(failing[self.rewards[failing].argmin()])
        worst = int(self.rewards.argmin())
        return (best, worst) if self.rewards[worst] < self.rewards[best] else None


@dataclass(frozen=True)
class MemberFigures:
    """What one member's answers are like, over all prompts.

    Args:
        reward: mean reward.
        best: mean reward of its best answer to each prompt.
        wins: share of prompts whose best answer it gave; a tie of m members counts 1/m for each.
        tokens: mean length of an answer.
        alike: share of prompts to which all of its answers have one reward.
    """

    reward: float
    best: float
    wins: float
    tokens: float
    alike: float


def load_prompts(path: Path, limit: int | None = None) -> list[tuple[str, dict[str, Any]]]:
    """Read the "file:line" and the record of each prompt of a data file.

    Raises:
        DataError: names the first lines that can't be used; see `prompt_of`.
    """
    return parse_records(
        path, lambda record, where: [(where, prompt_of(record))], PROMPT_FORM, limit
    )


def prompt_of(record: object) -> dict[str, Any]:
    """Return the sample of a record of a prompt, or of a chat to train on.

    Of such a chat, the assistant's last message becomes the sample's "answer".

    Raises:
        DataError: for any other value; it does not name the line.
    """
    keys = [k for k in ("prompt", "messages") if isinstance(record, dict) and k in record]
    value = record[keys[0]] if isinstance(record, dict) and len(keys) == 1 else None
    last = value[-1] if isinstance(value, list) and value else None
    is_chat = isinstance(last, dict) and all(isinstance(m, dict) for m in value or ())
    if not isinstance(record, dict) or not (is_chat or (isinstance(value, str) and value)):
        raise DataError(
            f"{shown(record)} is no prompt; an object is needed with either 'prompt', a text or a list of "
            "messages, or 'messages', and with any keys that rewards look at."
        )
    if not isinstance(last, dict) or last.get("role") != "assistant":
        return record
    answer = last.get("content")
    if "answer" in record or len(value or ()) < 2 or not isinstance(answer, str):
        raise DataError(
            "the messages end with the assistant's. A prompt ends before it: give the right answer as "
            "'answer', for rewards."
        )
    return {**record, keys[0]: messages_of(record)[:-1], "answer": answer}


def prompt_request(
    tokenizer: Tokenizer,
    sample: Mapping[str, Any],
    max_tokens: int,
    constraint: Constraint | None,
    thoughts: ThoughtForm | None,
) -> Request:
    """Make the request of an answer to a sample's prompt, without thoughts.

    A text is the only message of a chat, or goes on if the model has no chat template. `thoughts` is how the
    model writes thoughts.

    Raises:
        DataError: for messages without a chat template.
        AFMError: for messages, tools or a constraint that can't be used.
    """
    if tokenizer.has_chat_template:
        chat = messages_of(sample), sample.get("tools")
        return chat_request(tokenizer, *chat, max_tokens, constraint, thoughts)
    if not isinstance(text := sample.get("prompt"), str):
        raise DataError("the model has no chat template, and the prompt is no text.")
    ids = tokenizer.encode(text, add_special_tokens=True)
    return Request(ids, max_tokens, logprobs=False, constraint=constraint)


@dataclass
class _Sampled:
    """A member's answer that is sampled: its request, and what has come so far."""

    member: str
    where: str
    request: Request
    splitter: AnySplitter | None
    text: str = ""
    tokens: int = 0
    finish_reason: str | None = None

    def take(self, response: TokenResponse) -> None:
        """Append a response; raise its error unless the answer is only cut off."""
        if response.error is not None and not isinstance(response.error, CUT_OFF):
            raise response.error
        self.text += answer_text(self.splitter, response)
        self.tokens += response.token >= 0
        self.finish_reason = response.finish_reason

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.member, self.text, self.tokens, self.finish_reason == "stop")


def sample_answers(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompts: Sequence[tuple[str, Mapping[str, Any]]],
    members: Sequence[str],
    samples: int,
    *,
    max_tokens: int = 256,
    sampler: Sampler | None = None,
    seed: int = 0,
    constraint: Constraint | None = None,
    at_limit: str = "error",
    chosen: Sequence[int] | None = None,
    batch_size: int = 16,
    **engine_options: Any,
) -> Iterator[list[Candidate]]:
    """Sample each member's answers to each prompt, and yield the answers to one prompt after the other.

    Args:
        model, tokenizer: what `load` returns; without a chat template, prompts are texts that go on.
        prompts: what `load_prompts` returns.
        members: names of adapters in the pool `adapters` (an engine option), and `BASE`.
        samples: K, answers of each member to each prompt.
        max_tokens, sampler, constraint, at_limit: as for `Request`.
        seed: answers depend on it, on the numbers of prompt, member and sample, and on nothing else.
        chosen: numbers of the prompts to answer, in that order; all by default.
        batch_size: rows that run at the same time.
        engine_options: further options of `Engine`.

    Yields:
        For each chosen prompt, K answers of the first member, then of the second, and so on.

    Raises:
        DataError: names the prompt that can't be answered.
    """
    thoughts = thought_form(tokenizer)

    def asked(index: int) -> list[_Sampled]:
        """Make the requests of all answers to a prompt."""
        where, sample = prompts[index]
        try:
            request = prompt_request(tokenizer, sample, max_tokens, constraint, thoughts)
        except AFMError as error:
            raise DataError(f"{where}: {error}") from None
        splits = None if sample.get("tools") is not None else thoughts
        found = []
        for member, k in product(range(len(members)), range(samples)):
            name, source = members[member], np.random.SeedSequence([seed, index, member, k])
            drawn = int(source.generate_state(1, np.uint64)[0])
            adapter = None if name == BASE else name
            splitter = splitter_for(None, (), splits, request.prompt)
            own = replace(request, sampler=sampler, at_limit=at_limit, adapter=adapter, seed=drawn)
            found.append(_Sampled(name, where, own, splitter))
        return found

    shared = PrefixCache(PREFIX_MEMORY) if samples > 1 else None
    engine = Engine(model, tokenizer, max_batch=batch_size, prefix_cache=shared, **engine_options)
    numbers = range(len(prompts)) if chosen is None else chosen
    with wired_memory(model):
        for answers in _answered(engine, map(asked, numbers), samples):
            yield [each.candidate for each in answers]


def _answered(
    engine: Engine, asked: Iterator[list[_Sampled]], samples: int
) -> Iterator[list[_Sampled]]:
    """Run the requests of all prompts, each K of one member together, and yield each prompt's at their end."""
    rows: dict[int, _Sampled] = {}
    forks: dict[int, list[_Sampled]] = {}  # rows that compute a prompt for K answers
    pending: deque[list[_Sampled]] = deque()

    def submit(answer: _Sampled, request: Request) -> int:
        try:
            return engine.submit(request)
        except AFMError as error:
            raise DataError(f"{answer.where}: {error}") from None

    has_more = True
    while has_more or pending:
        while has_more and len(rows) + samples * len(forks) < engine.max_batch:
            if (answers := next(asked, None)) is None:
                has_more = False
                break
            pending.append(answers)
            for i in range(0, len(answers), samples):
                group = answers[i : i + samples]
                request = group[0].request
                if samples > 1 and len(request.prompt) > 1:
                    fork = Request(request.prompt, 0, logprobs=False, adapter=request.adapter)
                    forks[submit(group[0], fork)] = group
                else:
                    rows |= {submit(each, each.request): each for each in group}
        for response in engine.step():
            if response.row in forks:
                if response.error is not None:
                    raise response.error
                group = forks.pop(response.row)
                rows |= {submit(each, each.request): each for each in group}
                continue
            rows[response.row].take(response)
            if response.finish_reason is not None:
                del rows[response.row]
        while pending and all(each.finish_reason is not None for each in pending[0]):
            yield pending.popleft()


def rank(
    where: str,
    sample: Mapping[str, Any],
    candidates: Sequence[Candidate],
    rewards: Rewards | None,
    check: Rewards | None,
) -> Ranked:
    """Compute the rewards of the answers to a prompt; without rewards, the check is the reward.

    Raises:
        RewardError: as `Rewards.table` does.
    """
    text = prompt_text(sample)
    answered = [Answered(text, each.answer, sample, where) for each in candidates]
    checks = np.full(len(candidates), PASSES) if check is None else check.totals(answered)
    totals = checks if rewards is None else rewards.totals(answered)
    return Ranked(sample, where, candidates, totals, checks)


def pair_record(ranked: Ranked, form: CallForm = AFM_CALLS) -> dict[str, Any] | None:
    """Return the preference pair of a prompt's answers in TRL's form; None without one.

    A prompt that is a text has texts as answers, and one that is messages has a list with one message. Calls
    of a sample's tools, which the model writes in `form`, are `tool_calls` of the message.
    """
    pair = ranked.pair()
    if pair is None:
        return None
    sample, (best, worst) = ranked.sample, pair
    answers = {
        "chosen": ranked.candidates[best].answer,
        "rejected": ranked.candidates[worst].answer,
    }
    if isinstance(sample.get("prompt"), str) and not sample.get("tools"):
        return {"prompt": sample["prompt"], **answers}
    tools = {"tools": sample["tools"]} if sample.get("tools") else {}
    found = {name: [_message(answer, sample, form)] for name, answer in answers.items()}
    return {"prompt": messages_of(sample), **found, **tools}


def winner_record(ranked: Ranked, form: CallForm = AFM_CALLS) -> dict[str, Any] | None:
    """Return the best answer to a prompt as a chat or completion to train on; None if none passes."""
    index = ranked.winner()
    if index is None:
        return None
    sample, answer = ranked.sample, ranked.candidates[index].answer
    if isinstance(sample.get("prompt"), str) and not sample.get("tools"):
        return {"prompt": sample["prompt"], "completion": answer}
    tools = {"tools": sample["tools"]} if sample.get("tools") else {}
    return {"messages": [*messages_of(sample), _message(answer, sample, form)], **tools}


def _message(answer: str, sample: Mapping[str, Any], form: CallForm) -> dict[str, Any]:
    if tools := sample.get("tools"):
        try:
            if form.name == AFM_CALLS.name:  # without ids
                said, start, rest = answer.partition(EXECUTABLE_START)
                calls = parse_tool_calls(rest.removesuffix(EXECUTABLE_END)) if start else []
            else:
                said, calls = read_answer(form, answer, tools)
        except (ValueError, RecursionError):  # what should be a call is text
            calls = []
        if calls:
            functions = [{"type": "function", "function": call} for call in calls]
            return {"role": "assistant", "content": said, "tool_calls": functions}
    return {"role": "assistant", "content": answer}


def member_figures(ranked: Sequence[Ranked]) -> dict[str, MemberFigures]:
    """Return the figures of each member, in the order of its first answer."""
    members = dict.fromkeys(each.member for one in ranked for each in one.candidates)
    rows: dict[str, list[tuple[float, float, float, float, bool]]] = {name: [] for name in members}
    for one in ranked:
        best = one.rewards.max()
        tops = {c.member for c, r in zip(one.candidates, one.rewards, strict=True) if r == best}
        for name in members:
            own = [i for i, each in enumerate(one.candidates) if each.member == name]
            if not own:
                continue
            rewards = one.rewards[own]
            tokens = float(np.mean([one.candidates[i].tokens for i in own]))
            wins = (name in tops) / len(tops)
            alike = bool((rewards == rewards[0]).all())
            rows[name].append((rewards.mean(), rewards.max(), wins, tokens, alike))
    return {
        name: MemberFigures(*(float(x) for x in np.array(found, float).mean(axis=0)))
        for name, found in rows.items()
    }


def read_answers(
    path: Path, limit: int | None = None
) -> list[tuple[str, dict[str, Any], list[Candidate]]]:
    """Read prompts with answers that exist already: "file:line", sample and answers of each line.

    A line is a prompt as `load_prompts` takes it, with "answers": two or more texts, or objects with "answer"
    and, if known, "adapter", "tokens", and "is_whole": false for an answer that was cut off.

    Raises:
        DataError: names the first lines that can't be used.
    """

    def parse(record: object, where: str) -> list[tuple[str, dict[str, Any], list[Candidate]]]:
        sample = prompt_of(record)
        given = sample.get("answers")
        listed = given if isinstance(given, list) else [None]
        items: list[dict[str, Any]] = [a if isinstance(a, dict) else {"answer": a} for a in listed]
        if not all(isinstance(a.get("answer"), str) for a in items):
            raise DataError(
                f"'answers' is {shown(given)}; a list of texts, or of {{\"answer\": ...}}, is needed."
            )
        if len(items) < 2:
            raise DataError(f"there are {len(items)} answers; a pair needs 2 at least.")
        answers = [
            Candidate(
                str(a.get("adapter", "all")),
                a["answer"],
                n if isinstance(n := a.get("tokens"), int) else 0,
                a.get("is_whole") is not False,
            )
            for a in items
        ]
        return [(where, {k: v for k, v in sample.items() if k != "answers"}, answers)]

    return parse_records(path, parse, f"{PROMPT_FORM}, and with 'answers'", limit)
