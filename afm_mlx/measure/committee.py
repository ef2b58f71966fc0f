"""Answers of several adapters to the same prompts, ranked by rewards: pairs and winners to train on.

    {"prompt": ... or "messages": [...], "tools"?: [...], and any keys that rewards look at}

Each member of the committee, an adapter or the base model, gives K answers to each prompt, all as rows of one
batch. Ranking is per prompt, not per member: the best of all answers is the winner, and with the worst one a
preference pair, as TRL has it. Prompts whose answers are all alike in reward have no pair.

Source: iTeC, in Apple's report on its foundation models (arXiv 2407.21075, section 4.3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np

from afm_mlx.engine.engine import Engine
from afm_mlx.engine.prefix_cache import PrefixCache
from afm_mlx.engine.request import Request, Sampler
from afm_mlx.errors import AFMError, ContextLengthError, DataError, IncompleteError, shown
from afm_mlx.guidance.answer_parts import read_answer, splitter_for
from afm_mlx.guidance.call_forms import AFM_CALLS, CallForm
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.guidance.thoughts import thought_form
from afm_mlx.jsonl import read_jsonl
from afm_mlx.measure.evaluation import answer_text, chat_request
from afm_mlx.measure.rewards import PASSES, Answered, Rewards, prompt_text
from afm_mlx.model.wired_memory import wired_memory
from afm_mlx.tokenizer.chat_messages import parse_tool_calls
from afm_mlx.tokenizer.protocol import Tokenizer
from afm_mlx.tokenizer.vocabulary import EXECUTABLE_END, EXECUTABLE_START

BASE = "base"
"""The member that is the model without an adapter."""
PREFIX_MEMORY = 1 << 30  # bytes
_CUT_OFF = (ContextLengthError, IncompleteError)


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

    A chat to train on is a prompt, too: the assistant's last message becomes the sample's "answer".

    Raises:
        DataError: names the file and the line.
    """
    found = []
    for where, record in read_jsonl(path):
        try:
            record = checked_prompt(_without_answer(record))
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        found.append((where, record))
        if len(found) == limit:
            break
    if not found:
        raise DataError(f"{path} holds no prompts.")
    return found


def _without_answer(record: object) -> object:
    """Return a chat to train on as a prompt, with the assistant's last message as its "answer"."""
    if not isinstance(record, dict) or "answer" in record:
        return record
    for name in ("prompt", "messages"):
        messages = record.get(name)
        if not isinstance(messages, list) or len(messages) < 2:
            continue
        last = messages[-1]
        if (
            isinstance(last, dict)
            and last.get("role") == "assistant"
            and isinstance(last.get("content"), str)
        ):
            return {**record, name: messages[:-1], "answer": last["content"]}
    return record


def checked_prompt(record: object) -> dict[str, Any]:
    """Return the record of a prompt; raise `DataError`, which does not name the line, for any other value."""
    keys = [k for k in ("prompt", "messages") if isinstance(record, dict) and k in record]
    value = record[keys[0]] if isinstance(record, dict) and len(keys) == 1 else None
    last = value[-1] if isinstance(value, list) and value else None
    is_chat = isinstance(last, dict) and all(isinstance(m, dict) for m in value or ())
    if not isinstance(record, dict) or not (is_chat or (isinstance(value, str) and value)):
        raise DataError(
            f"{shown(record)} is no prompt; an object is needed with either 'prompt', a text or a list of "
            "messages, or 'messages', and with any keys that rewards look at."
        )
    if isinstance(last, dict) and last.get("role") == "assistant":
        raise DataError(
            "the messages end with the assistant's. A prompt ends before it: give the right answer as "
            "'answer', for rewards."
        )
    return record


def messages_of(sample: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a sample's prompt, whose text is the only message of a chat."""
    value = sample.get("prompt", sample.get("messages"))
    return [{"role": "user", "content": value}] if isinstance(value, str) else list(value or ())


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
    begin: int = 0,
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
        begin: number of first prompts to leave out: of an earlier run, for example.
        batch_size: rows that run at the same time.
        engine_options: further options of `Engine`.

    Yields:
        For each prompt from `begin` on, K answers of the first member, then of the second, and so on.

    Raises:
        DataError: names the prompt that can't be answered.
    """
    thoughts = thought_form(tokenizer)
    shared = PrefixCache(PREFIX_MEMORY) if samples > 1 else None
    engine = Engine(model, tokenizer, max_batch=batch_size, prefix_cache=shared, **engine_options)
    rows: dict[int, tuple[int, int]] = {}  # prompt, and index of its answer
    forks: dict[
        int, tuple[int, int, Request]
    ] = {}  # prompt, member; computes the prompt for K rows
    texts: dict[int, list[str]] = {}
    tokens: dict[int, list[int]] = {}
    whole: dict[int, list[bool]] = {}
    splitters: dict[int, Any] = {}
    left: dict[int, int] = {}
    each = len(members) * samples

    def submit(index: int, request: Request) -> int:
        try:
            return engine.submit(request)
        except AFMError as error:
            raise DataError(f"{prompts[index][0]}: {error}") from None

    def submit_answers(index: int, member: int, request: Request) -> None:
        for k in range(samples):
            source = np.random.SeedSequence([seed, index, member, k])
            request.seed = int(source.generate_state(1, np.uint64)[0])
            row = submit(index, request)
            rows[row] = index, member * samples + k
            has_calls = prompts[index][1].get("tools") is not None
            splitters[row] = None if has_calls else splitter_for(None, (), thoughts, request.prompt)

    waiting = list(range(len(prompts) - 1, begin - 1, -1))
    next_out = begin
    with wired_memory(model):
        while waiting or rows or forks:
            while waiting and len(rows) + samples * len(forks) < batch_size:
                index = waiting.pop()
                texts[index], tokens[index] = [""] * each, [0] * each
                whole[index], left[index] = [True] * each, each
                for member, name in enumerate(members):
                    request = _request(tokenizer, *prompts[index], max_tokens, constraint, thoughts)
                    request.sampler, request.at_limit = sampler, at_limit
                    request.adapter = None if name == BASE else name
                    if samples > 1 and len(request.prompt) > 1:
                        fork = Request(request.prompt, 0, logprobs=False, adapter=request.adapter)
                        forks[submit(index, fork)] = index, member, request
                    else:
                        submit_answers(index, member, request)
            for response in engine.step():
                if response.row in forks:
                    if response.error is not None:
                        raise response.error
                    submit_answers(*forks.pop(response.row))
                    continue
                index, number = rows[response.row]
                if response.error is not None and not isinstance(response.error, _CUT_OFF):
                    raise response.error
                texts[index][number] += answer_text(splitters[response.row], response)
                tokens[index][number] += response.token >= 0
                if response.finish_reason is not None:
                    whole[index][number] = response.finish_reason == "stop"
                    left[index] -= 1
                    del rows[response.row], splitters[response.row]
            while left.get(next_out) == 0:
                del left[next_out]
                columns = texts.pop(next_out), tokens.pop(next_out), whole.pop(next_out)
                yield [
                    Candidate(members[number // samples], *values)
                    for number, values in enumerate(zip(*columns, strict=True))
                ]
                next_out += 1


def _request(
    tokenizer: Tokenizer,
    where: str,
    sample: Mapping[str, Any],
    max_tokens: int,
    constraint: Constraint | None,
    thoughts: Any,
) -> Request:
    try:
        if not tokenizer.has_chat_template:
            if not isinstance(text := sample.get("prompt"), str):
                raise DataError("the model has no chat template, and the prompt is no text.")
            ids = tokenizer.encode(text, add_special_tokens=True)
            return Request(ids, max_tokens, logprobs=False, constraint=constraint)
        messages, tools = messages_of(sample), sample.get("tools")
        return chat_request(tokenizer, messages, tools, max_tokens, constraint, thoughts)
    except AFMError as error:
        raise DataError(f"{where}: {error}") from None


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


def read_answers(path: Path) -> list[tuple[str, dict[str, Any], list[Candidate]]]:
    """Read prompts with answers that exist already: "file:line", sample and answers of each line.

    A line is a prompt as `load_prompts` takes it, with "answers": two or more texts, or objects with "answer"
    and, if known, "adapter" and "tokens".

    Raises:
        DataError: names the file and the line.
    """
    found = []
    for where, record in load_prompts(path):
        given = record.get("answers")
        items = [a if isinstance(a, dict) else {"answer": a} for a in given or ()]
        if not isinstance(given, list) or not all(isinstance(a.get("answer"), str) for a in items):
            raise DataError(
                f"{where}: 'answers' is {shown(given)}; a list of texts, or of {{\"answer\": ...}}, is needed."
            )
        if len(items) < 2:
            raise DataError(f"{where}: there are {len(items)} answers; a pair needs 2 at least.")
        answers = [
            Candidate(str(a.get("adapter", "all")), a["answer"], int(a.get("tokens") or 0))
            for a in items
        ]
        found.append((where, {k: v for k, v in record.items() if k != "answers"}, answers))
    return found
