"""Answers that a model samples while it is trained, with their rewards: batches for policy objectives.

    {"prompt": ... or "messages": [...], "tools"?: [...], and any keys that rewards look at}

Each batch has K answers to each of P prompts. They are sampled in one batch of the engine, which computes each
prompt once, by a copy of the model that shares its packed weights (`adapters.active.serving_copy`) and runs
with the adapter's numbers of that step. So answers depend only on the seed, the batch's number and the weights.

In training, a row of an AFM model holds a prompt and all its answers, which see the prompt and not each other:
the prompt's tokens are computed once, and not K times. Models of mlx-lm have a row for each answer.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from afm_mlx.adapters.active import hand_over, serving_copy
from afm_mlx.adapters.lora import lora_layers
from afm_mlx.checkpoint.safetensors_file import save_file
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.prefix_cache import PrefixCache
from afm_mlx.engine.request import CUT_OFF, Request
from afm_mlx.engine.samplers import COLDEST, make_sampler
from afm_mlx.errors import CheckpointError, DataError
from afm_mlx.files import atomic_write
from afm_mlx.guidance.answer_parts import AnySplitter, splitter_for
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.guidance.thoughts import thought_form
from afm_mlx.measure.committee import PROMPT_FORM, prompt_of, prompt_request
from afm_mlx.measure.evaluation import answer_text
from afm_mlx.measure.rewards import Answered, Rewards, prompt_text
from afm_mlx.model.wired_memory import wired_memory
from afm_mlx.tokenizer.protocol import Tokenizer
from afm_mlx.training.data.rounding import round_up
from afm_mlx.training.data.samples import read_records

WIDTH_MULTIPLE, TARGET_MULTIPLE, ANSWER_MULTIPLE = 16, 64, 8
_PREFIXES = 1 << 30  # bytes of the prompts' keys and values during one batch of rollouts


@dataclass(frozen=True)
class Prompt:
    """A prompt as a request; its text and the sample, for rewards; `where` is "file:line"."""

    request: Request
    text: str
    sample: dict[str, Any]
    where: str

    @property
    def tokens(self) -> Sequence[int]:
        return self.request.prompt


def load_prompts(
    path: str | Path,
    split: str,
    tokenizer: Tokenizer,
    most: int,
    max_completion_tokens: int = 256,
    constraint: Constraint | None = None,
) -> list[Prompt]:
    """Read a split of a data set of prompts, in the files that `samples.load_split` takes.

    `committee.prompt_of` has the forms of a line, and `committee.prompt_request` says how a prompt is encoded.

    Args:
        path, split: as for `samples.load_split`.
        tokenizer: the model's.
        most: most tokens of a prompt.
        max_completion_tokens: most tokens of an answer.
        constraint: what answers must look like; pass None for any text.

    Raises:
        DataError: names the first lines that can't be used, with reasons.
    """
    thoughts = thought_form(tokenizer)

    def parse(record: object, where: str) -> list[Prompt]:
        sample = prompt_of(record)
        request = prompt_request(tokenizer, sample, max_completion_tokens, constraint, thoughts)
        if not 0 < len(request.prompt) <= most:
            raise DataError(f"a prompt of {len(request.prompt)} tokens; 1 to {most} are allowed.")
        return [Prompt(request, prompt_text(sample), sample, where)]

    return read_records(path, split, parse, PROMPT_FORM)


@dataclass
class Answer:
    """A sampled answer of n tokens, the end token included.

    Args:
        splitter: finds thoughts, which are no part of the text; None if there are none.
        tokens: their ids.
        text: the text, without an end token's.
        logprobs: of each token, when it was drawn; 0 without a sampler.
        chosen: of each token, False if the constraint allowed no other.
        is_whole: False if the answer was cut off.
    """

    splitter: AnySplitter | None = None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    chosen: list[bool] = field(default_factory=list)
    is_whole: bool = True


class Answerer:
    """Answers prompts with a model in training as it is now.

    Args:
        model: a model with LoRA layers; or without, which answers with the adapter that is attached, if any.
        tokenizer: the model's.
        temperature: of sampling, over 0.
    """

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, temperature: float = 1.0):
        self._model, self._tokenizer = model, tokenizer
        self._served = serving_copy(model) if lora_layers(model) else model
        self._temperature = max(temperature, COLDEST)
        self._thoughts = thought_form(tokenizer)

    def __call__(
        self, prompts: Sequence[Prompt], seeds: Sequence[Sequence[int]] | None = None
    ) -> list[Answer]:
        """Answer each prompt once for each of its seeds, or by the most likely tokens without seeds.

        Returns the answers to the first prompt, then to the second one, and so on.
        """
        if self._served is not self._model:
            hand_over(self._model, self._served)
        counts = [1] * len(prompts) if seeds is None else list(map(len, seeds))
        prefixes = PrefixCache(_PREFIXES) if max(counts) > 1 else None
        engine = Engine(self._served, self._tokenizer, max_batch=sum(counts), prefix_cache=prefixes)
        sampler = None if seeds is None else make_sampler(self._temperature)
        rows: dict[int, Answer] = {}
        with wired_memory(self._served):
            if prefixes is not None:  # each prompt once, for all its answers
                for prompt in prompts:
                    engine.submit(Request(prompt.tokens, 0, logprobs=False))
                for response in engine.run():
                    if response.error is not None:
                        raise response.error
            for i, prompt in enumerate(prompts):
                has_calls = prompt.sample.get("tools") is not None
                for seed in [None] if seeds is None else seeds[i]:
                    request = dataclasses.replace(
                        prompt.request, sampler=sampler, seed=seed, logprobs=sampler is not None
                    )
                    thoughts = None if has_calls else self._thoughts
                    splitter = splitter_for(None, (), thoughts, prompt.tokens)
                    rows[engine.submit(request)] = Answer(splitter)
            while engine.busy:
                self._read(engine, rows)
        return list(rows.values())

    def _read(self, engine: Engine, rows: dict[int, Answer]) -> None:
        """Take one step of the engine, and append its tokens to their answers."""
        responses = engine.step()
        drawn = [r for r in responses if r.logprobs is not None and r.token >= 0]
        logprobs = dict.fromkeys((r.row for r in responses), 0.0)
        if drawn:
            table = mx.stack([r.logprobs for r in drawn]) / self._temperature
            tokens = mx.array([r.token for r in drawn])[:, None]
            found = mx.take_along_axis(table, tokens, axis=1)[:, 0] - mx.logsumexp(table, axis=1)
            logprobs |= zip((r.row for r in drawn), found.tolist(), strict=True)
        for response in responses:
            answer = rows[response.row]
            answer.text += answer_text(answer.splitter, response)
            if response.token >= 0:
                answer.tokens.append(response.token)
                answer.logprobs.append(0.0 if response.is_forced else logprobs[response.row])
                answer.chosen.append(not response.is_forced)
            if response.error is None:
                answer.is_whole = response.finish_reason != "length"
            elif isinstance(response.error, CUT_OFF):
                answer.is_whole = False
            else:
                raise response.error


class RolloutBatch(NamedTuple):
    """A batch of A answers, K to each of A / K prompts, with T targets; M is the longest answer's tokens.

    Args:
        inputs: (B, L) int32: in each row a prompt and its answers, or a prompt and one answer; 0 where padded.
        segments, shared: as `model.attention.row_positions` takes them; None if a row has one answer.
        positions: (T,) int32: indices into the flat (B * L) of tokens whose successor is an answer's.
        labels: (T,) int32: the answers' tokens. Padding is 0 in both arrays.
        grid: (A, M) int32: index into T of each token of an answer; 0 where padded.
        counted: (A, M) float32: 1 for the tokens that the policy chose, 0 for forced ones and padding.
        sampled: (A, M) float32: log-probabilities with which the engine drew the tokens.
        old: (A, M) float32: log-probabilities of the training graph when the answers were sampled; None if the
            answers serve one update only.
        reference: (A, M) float32: log-probabilities of the reference; None if nothing needs them.
        rewards: (A, R) float32: each reward; reward: (A,), their weighted sum.
        lengths: (A,) float32: tokens of each answer; cut_off: (A,) float32, 1 if it was cut off.
        weights: (A,) float32: ones.
    """

    inputs: mx.array
    segments: mx.array | None
    shared: mx.array | None
    positions: mx.array
    labels: mx.array
    grid: mx.array
    counted: mx.array
    sampled: mx.array
    old: mx.array | None
    reference: mx.array | None
    rewards: mx.array
    reward: mx.array
    lengths: mx.array
    cut_off: mx.array
    weights: mx.array


class AnswerBatch(NamedTuple):
    """The most likely answers to A prompts: the fields of `RolloutBatch` of the same names."""

    rewards: mx.array
    reward: mx.array
    lengths: mx.array
    cut_off: mx.array
    weights: mx.array


Logprobs = Callable[[RolloutBatch], mx.array]
"""Maps a batch to the log-probabilities (A, M) of its answers' tokens, of a model in training mode."""


@dataclass
class Rollouts:
    """Batches of rollouts by their number, once `answerer` and `rewards` are given.

    Args:
        prompts: one at least.
        batch_size: P, most prompts of a batch. The prompts of an epoch are spread evenly over its batches.
        group_size: K, answers to a prompt; pass None for one answer of the most likely tokens (`AnswerBatch`).
        micro_batches: number of consecutive batches that make one update.
        updates: number of consecutive updates that a batch of answers serves.
        longest_answer: most tokens of an answer.
        mask_truncated_completions: leave answers that were cut off out of the loss.
        one_row: put the answers to a prompt into one row.
        seed: seed of the shuffle and of the answers.
        answerer: samples the answers, for which a model is needed.
        rewards: of an answer.
        policy, reference: log-probabilities of the model as it is now, and of the reference; pass None where
            they are not needed.
        folder: folder that keeps the rollouts; pass None to keep none.

    Attributes:
        per_epoch: number of batches in an epoch; each counts as often as it is trained on.
        n_tokens: number of tokens of all prompts.
    """

    prompts: Sequence[Prompt]
    batch_size: int
    group_size: int | None
    longest_answer: int
    micro_batches: int = 1
    updates: int = 1
    mask_truncated_completions: bool = False
    one_row: bool = True
    seed: int = 0
    answerer: Answerer | None = None
    rewards: Rewards | None = None
    policy: Logprobs | None = None
    reference: Logprobs | None = None
    folder: Path | None = None

    packed = False
    unit = "answers"
    """What is trained on."""

    def __post_init__(self) -> None:
        self.n_tokens = sum(len(prompt.tokens) for prompt in self.prompts)
        self._batches = -(-len(self.prompts) // self.batch_size)
        self.per_epoch = self._batches * self.updates
        self._kept: dict[int, tuple[int, RolloutBatch]] = {}  # by the number in an update

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self.prompts)

    @property
    def summary(self) -> str:
        """The numbers of prompts and tokens, for people."""
        return f"{len(self):,} prompts, {self.n_tokens:,} tokens"

    @property
    def layout(self) -> str:
        """The answers of a batch, for people."""
        prompts = min(self.batch_size, len(self))
        return (
            f"{prompts} prompts, {self.group_size or 1} answers each, of up to "
            f"{self.longest_answer:,} tokens"
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Most rows, tokens of a row and targets of a batch."""
        prompts, answers = min(self.batch_size, len(self)), self.group_size or 1
        longest = max(len(prompt.tokens) for prompt in self.prompts)
        targets = prompts * answers * self.longest_answer
        if self.one_row:
            return prompts, longest + answers * self.longest_answer, targets
        return prompts * answers, longest + self.longest_answer, targets

    @cached_property
    def fingerprint(self) -> str:
        """Digest, in hex, that is equal for equal prompts and samples in an equal order."""
        samples = [(list(prompt.tokens), prompt.sample) for prompt in self.prompts]
        values = (self.batch_size, self.group_size, self.micro_batches, self.seed, samples)
        return sha256(json.dumps(values).encode()).hexdigest()

    def __call__(self, step: int) -> RolloutBatch | AnswerBatch:
        """Return micro-batch number `step`, counted from 0; sampled now, unless an update before used it.

        Raises:
            RewardError: if a reward raises, or is no finite number; names the sample.
        """
        if self.group_size is None:
            chosen, answers = self._sample(step, None)
            return AnswerBatch._make(self._scored(chosen, answers))
        update, part = divmod(step, self.micro_batches)
        number = update // self.updates * self.micro_batches + part
        known = self._kept.get(part)
        if update % self.updates == 0:
            batch = self._roll_out(number, update)
        elif known is not None and known[0] == number:
            batch = known[1]
        else:  # the run was resumed
            batch = self._restored(number)
        if self.updates > 1:
            self._kept[part] = number, batch
        return batch

    def _roll_out(self, number: int, update: int) -> RolloutBatch:
        """Sample a batch of answers now, and write it to the folder."""
        assert self.group_size is not None
        chosen, answers = self._sample(number, self.group_size)
        batch = self._batch(chosen, answers, self._scored(chosen, answers))
        if self.reference is not None:
            batch = batch._replace(reference=self.reference(batch))
        if self.updates > 1 and self.policy is not None:
            batch = batch._replace(old=self.policy(batch))
        mx.eval(batch)
        if self.folder is not None:
            self._write(number, update, chosen, answers, batch)
        return batch

    def _sample(self, number: int, count: int | None) -> tuple[list[Prompt], list[Answer]]:
        """Return a batch's prompts, and `count` answers to each, or the most likely answers for None."""
        assert self.answerer is not None
        epoch, index = divmod(number, self._batches)
        order = np.arange(len(self))
        if count is not None:
            order = np.random.default_rng([self.seed, 3, epoch]).permutation(order)
        numbers = np.array_split(order, self._batches)[index].tolist()
        chosen = [self.prompts[i] for i in numbers]
        seeds = None
        if count is not None:
            sources = [np.random.SeedSequence([self.seed, 4, number, i]) for i in numbers]
            seeds = [each.generate_state(count, np.uint64).tolist() for each in sources]
        return chosen, self.answerer(chosen, seeds)

    def _scored(self, chosen: Sequence[Prompt], answers: Sequence[Answer]) -> list[mx.array]:
        """Return the arrays of `AnswerBatch` for the answers to prompts."""
        count = len(answers) // len(chosen)
        answered = [
            Answered(
                chosen[i // count].text, a.text, chosen[i // count].sample, chosen[i // count].where
            )
            for i, a in enumerate(answers)
        ]
        assert self.rewards is not None
        table = self.rewards.table(answered)
        columns = [
            table,
            table @ np.array(self.rewards.weights),
            np.array([len(answer.tokens) for answer in answers]),
            np.array([not answer.is_whole for answer in answers]),
            np.ones(len(answers)),
        ]
        return [mx.array(column.astype(np.float32)) for column in columns]

    def _batch(
        self, chosen: Sequence[Prompt], answers: Sequence[Answer], scored: Sequence[mx.array]
    ) -> RolloutBatch:
        """Lay out the answers to prompts for training."""
        count = len(answers) // len(chosen)
        groups = [answers[i : i + count] for i in range(0, len(answers), count)]
        if not self.one_row:
            chosen = [prompt for prompt in chosen for _ in range(count)]
            groups = [[answer] for answer in answers]
        # The last token of an answer is no input, and its first one is predicted by the prompt's last.
        widths = [
            len(p.tokens) + sum(len(a.tokens) - 1 for a in group)
            for p, group in zip(chosen, groups, strict=True)
        ]
        width = round_up(max(widths), WIDTH_MULTIPLE)
        longest = round_up(max(len(a.tokens) for a in answers), ANSWER_MULTIPLE)
        targets = round_up(sum(len(a.tokens) for a in answers), TARGET_MULTIPLE)
        inputs, segments = np.zeros((2, len(chosen), width), np.int32)
        positions, labels = np.zeros((2, targets), np.int32)
        grid = np.zeros((len(answers), longest), np.int32)
        counted, sampled = np.zeros((2, len(answers), longest), np.float32)
        row, done = 0, 0
        for line, (prompt, group) in enumerate(zip(chosen, groups, strict=True)):
            end = len(prompt.tokens)
            inputs[line, :end], segments[line, :end] = prompt.tokens, 1
            for number, answer in enumerate(group, start=2):
                n = len(answer.tokens)
                inputs[line, end : end + n - 1] = answer.tokens[:-1]
                segments[line, end : end + n - 1] = number
                places = [len(prompt.tokens) - 1, *range(end, end + n - 1)]
                positions[done : done + n] = line * width + np.array(places)
                labels[done : done + n] = answer.tokens
                grid[row, :n] = np.arange(done, done + n)
                if answer.is_whole or not self.mask_truncated_completions:
                    counted[row, :n] = answer.chosen
                sampled[row, :n] = answer.logprobs
                row, done, end = row + 1, done + n, end + n - 1
        shared = np.array([len(prompt.tokens) for prompt in chosen], np.int32)
        tokens = [mx.array(each) for each in (positions, labels, grid, counted, sampled)]
        rows = [mx.array(each) if self.one_row else None for each in (segments, shared)]
        return RolloutBatch._make([mx.array(inputs), *rows, *tokens, None, None, *scored])

    # -- the folder

    def _path(self, number: int, suffix: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{number + 1:07d}.{suffix}"

    def _write(
        self,
        number: int,
        update: int,
        chosen: Sequence[Prompt],
        answers: Sequence[Answer],
        batch: RolloutBatch,
    ) -> None:
        """Write a batch's prompts, answers and rewards for people, and its arrays if it is needed again."""
        assert self.folder is not None
        assert self.rewards is not None
        self.folder.mkdir(exist_ok=True)
        count = len(answers) // len(chosen)
        table, totals = batch.rewards.tolist(), batch.reward.tolist()
        lines = []
        for i, prompt in enumerate(chosen):
            rows = range(i * count, (i + 1) * count)
            found = [
                {
                    "answer": answers[row].text,
                    "reward": totals[row],
                    "rewards": dict(zip(self.rewards.names, table[row], strict=True)),
                    "tokens": len(answers[row].tokens),
                    "is_whole": answers[row].is_whole,
                }
                for row in rows
            ]
            record = {"step": update + 1, "prompt": prompt.text, "where": prompt.where}
            lines.append(json.dumps({**record, "answers": found}, ensure_ascii=False) + "\n")
        with atomic_write(self._path(number, "jsonl")) as path:
            path.write_text("".join(lines), encoding="utf-8")
        if self.updates > 1:
            arrays = {k: v for k, v in batch._asdict().items() if v is not None}
            with atomic_write(self._path(number, "safetensors")) as path:
                save_file(path, arrays)

    def _restored(self, number: int) -> RolloutBatch:
        """Read a batch's arrays, which an update before the resume has used, too."""
        path = self._path(number, "safetensors")
        try:
            arrays = mx.load(str(path))
            missing: dict[str, Any] = dict.fromkeys(RolloutBatch._fields)
            return RolloutBatch(**(missing | arrays))
        except (OSError, RuntimeError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"The rollouts {path} can't be read ({error}). Start a new run in another folder."
            ) from None
