"""Preferences: JSONL with better and worse answers to token ids, and batches of them.

    {"prompt": ..., "chosen": ..., "rejected": ..., "strength"?: ..., "grades"?: ..., "tools"?: [...]}
    {"prompt": ..., "completion": ..., "label": true, "tools"?: [...]}

These are TRL's forms. A prompt is a text or a list of messages, which may also be named "messages"; an answer
is a text, or a list with the assistant's message. Lists of messages may hold the prompt, too: messages that
both answers begin with are the prompt (TRL's "implicit prompt"). Other keys are ignored.

An answer is the last turn of its chat, with the token that ends the turn. The prompt's tokens are the ones
that the chats of both answers begin with, so that both answers follow the same tokens. Where a chat is longer
than `max_seq_length`, its prompt is cut from the left, of a pair for both answers alike; answers are not cut.

Like `batches.Batches`, a batch depends only on the seed and its number.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import mlx.core as mx
import numpy as np

from afm_mlx.engine.image_features import PlacedImage
from afm_mlx.errors import ConfigError, DataError, shown
from afm_mlx.tokenizer.protocol import Tokenizer
from afm_mlx.training.data.batch_images import BatchImages, SampleImages
from afm_mlx.training.data.batches import (
    ROW_MULTIPLE,
    SAMPLES_OF_A_ROW,
    TARGET_MULTIPLE,
    check_rows,
    sorted_by_length,
)
from afm_mlx.training.data.rounding import round_up
from afm_mlx.training.data.samples import folder_of, read_chat, read_records

PAIR_FORM = '{"prompt": ..., "chosen": ..., "rejected": ...}'
ANSWER_FORM = '{"prompt": ..., "completion": ..., "label": true or false}'

STRENGTHS = {
    "significantly better": 0.95,
    "better": 0.85,
    "slightly better": 0.75,
    "negligibly better": 0.65,
}
"""Probability that the chosen answer is the better one, by the name of a preference's strength.

Source: the soft labels of Apple's reward model (arXiv 2407.21075, section 4.2).
"""


# -- records


@dataclass(frozen=True, eq=False)
class PreferencePair:
    """Two answers to a prompt, of which one is better.

    Args:
        prompt: (P,) int32, P of 1 or more.
        chosen, rejected: (N,) int32, N of 1 or more: different answers, with the tokens that end their turns.
        where: "file:line", for messages.
        strength: probability that the chosen answer is the better one, 0.5 to 1; None where it is not given.
        grades: the record's "grades", unchecked; None without.
        cut: tokens that were cut from the prompt.
        images: the prompt's images, with the places of their tokens.
    """

    prompt: np.ndarray
    chosen: np.ndarray
    rejected: np.ndarray
    where: str
    strength: float | None = None
    grades: Any = None
    cut: int = 0
    images: Sequence[PlacedImage] = ()


@dataclass(frozen=True, eq=False)
class LabeledAnswer:
    """An answer (N,) int32 to a prompt (P,) int32, and whether it is a good one; see `PreferencePair`."""

    prompt: np.ndarray
    answer: np.ndarray
    is_good: bool
    where: str
    cut: int = 0
    images: Sequence[PlacedImage] = ()


def load_preferences(
    path: str | Path, split: str, tokenizer: Tokenizer, max_seq_length: int
) -> list[PreferencePair]:
    """Read and tokenize a split of pairs of answers, in the files that `samples.load_split` takes.

    Raises `DataError`, which names the first lines that can't be used, with reasons.
    """

    def parse(record: object, where: str) -> list[PreferencePair]:
        return [_pair(_mapping(record), where, encode)]

    encode = partial(_encoded, tokenizer, max_seq_length, folder_of(path))
    return read_records(path, split, parse, PAIR_FORM)


def load_labeled_answers(
    path: str | Path, split: str, tokenizer: Tokenizer, max_seq_length: int
) -> list[LabeledAnswer]:
    """Read and tokenize a split of answers with labels, as `load_preferences` does.

    A pair's chosen answer is a good one, and its rejected answer is not.
    """

    def parse(record: object, where: str) -> list[LabeledAnswer]:
        given = _mapping(record)
        if "chosen" in given or "rejected" in given:
            pair = _pair(given, where, encode)
            return [
                LabeledAnswer(pair.prompt, answer, is_good, where, pair.cut, pair.images)
                for answer, is_good in ((pair.chosen, True), (pair.rejected, False))
            ]
        _check_keys(given, ("completion", "label"), f"{ANSWER_FORM}, or {PAIR_FORM}")
        label = given["label"]
        if label not in (True, False):
            raise DataError(f"'label' is {shown(label)}; allowed are true and false.")
        prompt, (answer,), cut, images = encode(given, ("completion",))
        return [LabeledAnswer(prompt, answer, bool(label), where, cut, images)]

    encode = partial(_encoded, tokenizer, max_seq_length, folder_of(path))
    return read_records(path, split, parse, f"{ANSWER_FORM} or {PAIR_FORM}")


_Encoded: TypeAlias = tuple[np.ndarray, list[np.ndarray], int, list[PlacedImage]]


def _pair(record: Mapping[str, Any], where: str, encode: Callable[..., _Encoded]) -> PreferencePair:
    _check_keys(record, ("chosen", "rejected"), PAIR_FORM)
    prompt, (chosen, rejected), cut, images = encode(record, ("chosen", "rejected"))
    if np.array_equal(chosen, rejected):
        raise DataError("'chosen' and 'rejected' are the same answer. Remove the line.")
    strength = _strength(record.get("strength"))
    grades = record.get("grades")
    return PreferencePair(prompt, chosen, rejected, where, strength, grades, cut, images)


def _mapping(record: object) -> Mapping[str, Any]:
    if not isinstance(record, Mapping):
        raise DataError(f"this is a JSON {type(record).__name__}; an object is needed.")
    return record


def _check_keys(record: Mapping[str, Any], wanted: Sequence[str], form: str) -> None:
    missing = [repr(key) for key in wanted if key not in record]
    if missing:
        raise DataError(
            f"the line lacks {' and '.join(missing)}; it has the keys {', '.join(record) or 'none'}. A line is "
            f"{form}."
        )


def _strength(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, str) and value in STRENGTHS:
        return STRENGTHS[value]
    if type(value) in (int, float) and 0.5 <= value <= 1:
        return float(value)
    names = ", ".join(map(repr, STRENGTHS))
    raise DataError(
        f"'strength' is {shown(value)}; allowed are {names}, and probabilities that the chosen answer is the "
        "better one, from 0.5 to 1."
    )


def _encoded(
    tokenizer: Tokenizer,
    max_seq_length: int,
    folder: Path,
    record: Mapping[str, Any],
    names: Sequence[str],
) -> _Encoded:
    """Return the tokens of a record's prompt and of its answers, tokens that were cut, and the images."""
    chats, spans = [], []
    placed: list[PlacedImage] = []  # of each chat alike: answers have none
    for messages in _chats(record, names):
        tokens, weights, placed = read_chat(messages, record.get("tools"), tokenizer, folder)
        # The last turn: the tokens with a weight, back to the first token without.
        end = int(np.flatnonzero(weights)[-1]) + 1
        start = int(np.flatnonzero(weights[:end] == 0)[-1]) + 1
        chats.append(tokens)
        spans.append((start, end))
    # A token of both the prompt's end and an answer's begin is the answer's, then, of the other answer, too.
    border = min(start for start, _ in spans)
    prompt = chats[0][:border]
    if not all(np.array_equal(prompt, tokens[:border]) for tokens in chats):
        raise DataError(
            "the model's chat template renders the prompt differently for the two answers, so they can't be "
            "compared. Use a template without that."
        )
    answers = [tokens[border:end] for tokens, (_, end) in zip(chats, spans, strict=True)]
    kept = max_seq_length - max(map(len, answers))
    if kept < 1:
        raise DataError(
            f"an answer of {max(map(len, answers))} tokens, and max_seq_length is {max_seq_length}, which must "
            "leave room for a token of the prompt. Answers are not cut: shorten it, or raise max_seq_length."
        )
    if placed and border > kept:
        raise DataError(
            f"a prompt with images of {border} tokens, of which max_seq_length leaves {kept}. Prompts with "
            "images are not cut: shorten it, or raise max_seq_length."
        )
    return prompt[-kept:], answers, max(0, border - kept), placed


def _chats(record: Mapping[str, Any], names: Sequence[str]) -> list[list[Any]]:
    """Return for each answer the chat that ends with it; the chats differ in their last message only."""
    prompt = record["prompt"] if "prompt" in record else record.get("messages")
    chats = []
    for name in names:
        answer = record[name]
        if isinstance(answer, str):
            answer = [{"role": "assistant", "content": answer}]
        elif not isinstance(answer, list) or not all(isinstance(each, Mapping) for each in answer):
            raise DataError(f"{name!r} is {shown(answer)}; a text or a list of messages is needed.")
        chats.append(answer)
    # A list that doesn't begin with the assistant's message holds the prompt.
    if all(chat and chat[0].get("role") == "assistant" for chat in chats):
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, list):
            fault = "is missing" if prompt is None else f"is {shown(prompt)}"
            raise DataError(f"'prompt' {fault}; a text or a list of messages is needed.")
        chats = [[*prompt, *chat] for chat in chats]
    elif "prompt" in record and isinstance(prompt, list):
        chats = [[*prompt, *chat] for chat in chats]
    before = [chat[:-1] for chat in chats]
    if any(each != before[0] for each in before):
        raise DataError(
            f"{' and '.join(map(repr, names))} differ before their last messages; an answer is one message, "
            "and both follow the same prompt. Cut both after the first message that differs."
        )
    return chats


# -- batches


class PreferenceBatch(NamedTuple):
    """A batch of P pairs, or of P labelled answers: N answers with T targets in B rows of L tokens.

    Args:
        inputs, segments, positions, labels: see `batches.Batch`.
        answers: (T,) int32: index of each target's answer; N for padding. Of pairs, N is 2 P: the chosen
            answers come first, then the rejected ones in the same order. Of labelled answers, N is P.
        numbers: (T,) int32: index of each target in `PreferenceBatches.n_scored`; `n_scored` for padding.
        lengths: (N,) float32: tokens of each answer.
        weights: (P,) float32: ones; 0 of a rank's sample that only keeps its batch from being empty.
        strengths: (P,) float32: see `PreferencePair`; None for labelled answers.
        is_good: (P,) bool: labels; None for pairs.
        good_share: () float32, over 0 and under 1: share of good answers in the data set; None for pairs.
        mismatched: the arrays `inputs` to `reference`, by name, for the same prompts with answers to others;
            None for pairs.
        reference: (T,) float32: the reference's log-probability of each target; None without a reference.
        images: see `batch_images`; None where no sample has an image.
    """

    inputs: mx.array
    segments: mx.array | None
    positions: mx.array
    labels: mx.array
    answers: mx.array
    numbers: mx.array
    lengths: mx.array
    weights: mx.array
    strengths: mx.array | None = None
    is_good: mx.array | None = None
    good_share: mx.array | None = None
    mismatched: dict[str, Any] | None = None
    reference: mx.array | None = None
    images: BatchImages | None = None


def mismatched_answers(batch: PreferenceBatch) -> PreferenceBatch:
    """Return the batch's prompts with answers to other prompts, as a batch of labelled answers."""
    assert batch.mismatched is not None
    return PreferenceBatch(**{"segments": None, "weights": batch.weights} | batch.mismatched)


PreferenceSamples: TypeAlias = Sequence[PreferencePair] | Sequence[LabeledAnswer]


class PreferenceBatches:
    """Batches of pairs, or of labelled answers, by their number, over any number of epochs.

    With labelled answers, each prompt also comes with the answer to another prompt, the next one of the data
    set that differs, for the KL term of `preference_losses.kto`.

    Args:
        samples: pairs or labelled answers, one at least.
        batch_size: most pairs or answers of a batch. An epoch's are spread evenly over its batches.
        max_seq_length: most tokens of a prompt with its answer.
        packed: put several answers into a row, which don't attend to each other. Otherwise a row has one
            answer, and a batch has answers of similar length.
        strength: strength of pairs whose line has none.
        seed: seed of the shuffle; 0 or more.
        shuffle: shuffle the samples in each epoch.

    Attributes:
        per_epoch: number of batches in an epoch.
        images: the samples' images, and as what a batch has them.
        n_cut: number of samples whose prompt is cut.
        n_tokens: number of tokens of all prompts with their answers.
        n_targets: number of tokens of all answers.
        n_scored: number of tokens whose log-probabilities are needed: mismatched answers, too.
        length: most input tokens of a row.

    Raises:
        DataError: for labelled answers which all have one prompt.
    """

    def __init__(
        self,
        samples: PreferenceSamples,
        *,
        batch_size: int,
        max_seq_length: int,
        packed: bool = True,
        strength: float = 1.0,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        self.batch_size, self.packed, self.seed, self.shuffle = batch_size, packed, seed, shuffle
        self.n_cut = sum(sample.cut > 0 for sample in samples)
        self._strengths: Any = None  # (samples,), of pairs
        self._is_good: Any = None  # (samples,), of labelled answers
        self._reference: Any = None
        self._part = slice(None)  # of each batch
        # The sequences of sample i have the numbers i and i + the number of samples.
        pairs = [sample for sample in samples if isinstance(sample, PreferencePair)]
        labelled = [sample for sample in samples if isinstance(sample, LabeledAnswer)]
        if pairs:
            first = [(pair.prompt, pair.chosen) for pair in pairs]
            second = [(pair.prompt, pair.rejected) for pair in pairs]
            given = [strength if pair.strength is None else pair.strength for pair in pairs]
            self._strengths = np.array(given, np.float32)
        else:
            first = [(sample.prompt, sample.answer) for sample in labelled]
            second = _mismatched(labelled, max_seq_length)
            self._is_good = np.array([sample.is_good for sample in labelled])
            share = 1 / len(labelled)
            self._good_share = float(np.clip(self._is_good.mean(), share, 1 - share))
        sequences = first + second
        self.images = SampleImages([sample.images for sample in (*samples, *samples)])
        self._tokens = [np.concatenate(each) for each in sequences]
        self._prompts = np.array([len(prompt) for prompt, _ in sequences])
        self._answers = np.array([len(answer) for _, answer in sequences])
        self._inputs = self._prompts + self._answers - 1  # input tokens of each sequence
        self._starts = np.cumsum(self._answers) - self._answers
        own = len(sequences) if self._is_good is None else len(samples)
        self.n_tokens = int(self._inputs[:own].sum()) + own
        self.n_targets = int(self._answers[:own].sum())
        self.n_scored = int(self._answers.sum())
        longest = int(self._inputs.max())
        wanted = (
            max(longest, math.ceil(SAMPLES_OF_A_ROW * self._inputs.mean())) if packed else longest
        )
        self.length = min(round_up(wanted, ROW_MULTIPLE), max(max_seq_length, longest))
        self.per_epoch = -(-len(samples) // batch_size)
        self._epoch, self._plan = -1, [np.arange(0)]

    @property
    def unit(self) -> str:
        """What is predicted: "pairs" or "answers"."""
        return "pairs" if self._is_good is None else "answers"

    def __len__(self) -> int:
        """Number of pairs or labelled answers."""
        return len(self._tokens) // 2

    @property
    def summary(self) -> str:
        """The numbers of samples and tokens, for people."""
        good = "" if self._is_good is None else f", {int(self._is_good.sum()):,} of them good"
        cut = f"; {self.n_cut:,} prompts are cut" if self.n_cut else ""
        return (
            f"{len(self):,} {self.unit}{good}, {self.n_tokens:,} tokens, {self.n_targets:,} of them in answers"
            f"{cut}"
        )

    @property
    def layout(self) -> str:
        """The rows of a batch, for people."""
        kind = "packed rows" if self.packed else "a row for each answer,"
        return f"{self.batch_size} {self.unit}, {kind} of up to {self.length:,} tokens"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, tokens of a row and targets of the first batch: B, L and T."""
        batch = self(0)
        rows, length = batch.inputs.shape
        return rows, length, batch.labels.size

    @cached_property
    def fingerprint(self) -> str:
        """Digest, in hex, that is equal for equal batches, apart from the reference."""
        order = self.seed if self.shuffle else None
        digest = sha256(repr((self.batch_size, self.length, self.packed, order)).encode())
        for array in (self._prompts, self._strengths, self._is_good, *self._tokens):
            if array is not None:
                digest.update(array.astype(array.dtype.newbyteorder("<")).tobytes() + b";")
        digest.update(self.images.fingerprint.encode())
        return digest.hexdigest()

    def with_reference(self, log_probabilities: np.ndarray) -> PreferenceBatches:
        """Return the same batches with a reference's log-probabilities (n_scored,), by targets' `numbers`."""
        found = copy.copy(self)
        # Padding has the last number.
        found._reference = np.append(log_probabilities, 0).astype(np.float32)
        return found

    def share(self, rank: int, size: int) -> PreferenceBatches:
        """Return the same batches with every pair number `rank + i * size` alone, for i = 0, 1, ...

        A batch that has no such pair has one without weight. Raises `ConfigError` when no batch has a pair for
        each rank, and for labelled answers, whose losses depend on the mean over the batch.
        """
        if self._is_good is not None:
            raise ConfigError(
                f"kto's losses depend on the mean over a batch, which {size} ranks can't split. Start it "
                "without mlx.launch, on one machine."
            )
        check_rows(self.batch_size, size)
        found = copy.copy(self)
        found._part = slice(rank, None, size)
        return found

    def samples_of(self, step: int) -> tuple[np.ndarray, mx.array]:
        """Return the indices and weights of the pairs or labelled answers of micro-batch number `step`."""
        epoch, index = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self._epoch, self._plan = epoch, self._plan_epoch(epoch)
        whole = self._plan[index]
        chosen = whole[self._part]
        return (chosen, mx.ones(len(chosen))) if len(chosen) else (whole[:1], mx.zeros(1))

    def __call__(self, step: int) -> PreferenceBatch:
        """Return micro-batch number `step`, counted from 0 over all epochs."""
        chosen, weights = self.samples_of(step)
        if self._is_good is None:
            rows = self._rows(np.concatenate([chosen, chosen + len(self)]))
            strengths = mx.array(self._strengths[chosen])
            return PreferenceBatch(**rows, weights=weights, strengths=strengths)
        rows, others = self._rows(chosen), self._rows(chosen + len(self))
        # Compiled functions take no None.
        others = {name: array for name, array in others.items() if array is not None}
        return PreferenceBatch(
            **rows,
            weights=weights,
            is_good=mx.array(self._is_good[chosen]),
            good_share=mx.array(self._good_share),
            mismatched=others,
        )

    def _rows(self, numbers: np.ndarray) -> dict[str, Any]:
        """Return the arrays of a `PreferenceBatch` that are about the tokens of sequences, by name."""
        sizes = self._inputs[numbers]
        longest = int(sizes.max())
        rows = _pack(sizes, self.length) if self.packed else [[i] for i in range(len(numbers))]
        width = self.length if self.packed else min(round_up(longest, ROW_MULTIPLE), self.length)
        count = round_up(int(self._answers[numbers].sum()), TARGET_MULTIPLE)
        inputs, segments = np.zeros((2, len(rows), width), np.int32)
        positions, labels = np.zeros((2, count), np.int32)
        answers = np.full(count, len(numbers), np.int32)
        targets = np.full(count, self.n_scored, np.int32)
        done, placed = 0, []
        for line, row in enumerate(rows):
            offset = 0
            for segment, i in enumerate(row, start=1):
                number, n = numbers[i], sizes[i]
                placed.append((line * width + offset, number))
                tokens, length = self._tokens[number], self._answers[number]
                inputs[line, offset : offset + n] = tokens[:-1]
                segments[line, offset : offset + n] = segment
                target = slice(done, done + length)
                positions[target] = line * width + offset + np.arange(n - length, n)
                labels[target] = tokens[-length:]
                answers[target] = i
                targets[target] = self._starts[number] + np.arange(length)
                offset, done = offset + n, target.stop
        arrays = {
            "inputs": inputs,
            "segments": segments if self.packed else None,
            "positions": positions,
            "labels": labels,
            "answers": answers,
            "numbers": targets,
            "lengths": self._answers[numbers].astype(np.float32),
            "reference": None if self._reference is None else self._reference[targets],
        }
        made = {name: None if each is None else mx.array(each) for name, each in arrays.items()}
        return made | {"images": self.images.of_batch(placed, inputs.size)}

    def _plan_epoch(self, epoch: int) -> list[np.ndarray]:
        """Return the samples of each batch of an epoch."""
        random = np.random.default_rng([self.seed, 2, epoch]) if self.shuffle else None
        order = np.arange(len(self))
        if random is not None:
            order = random.permutation(order)
        if not self.packed:
            longest = self._inputs.reshape(2, -1).max(axis=0)
            order = sorted_by_length(order, longest, self.batch_size)
        batches = np.array_split(order, self.per_epoch)
        if random is not None and not self.packed:
            batches = [batches[i] for i in random.permutation(len(batches))]
        return batches


_Sequence: TypeAlias = tuple[np.ndarray, np.ndarray]  # a prompt and its answer


def _mismatched(samples: Sequence[LabeledAnswer], max_seq_length: int) -> list[_Sequence]:
    """Return each prompt with the answer to the next prompt that differs; the prompt is cut if needed."""
    prompts = [
        (each.prompt.tobytes(), *(placed.image.digest for placed in each.images))
        for each in samples
    ]
    found, count, other = [], len(samples), 0
    for i, sample in enumerate(samples):
        other = max(other, i + 1)
        while other < i + count and prompts[other % count] == prompts[i]:
            other += 1
        if other == i + count:
            raise DataError(
                "All answers have one and the same prompt. Labelled answers (kto) need two prompts at least."
            )
        answer = samples[other % count].answer
        kept = max(1, max_seq_length - len(answer))
        if sample.images and kept < len(sample.prompt):
            raise DataError(
                f"{sample.where}: a prompt with images of {len(sample.prompt)} tokens, of which another "
                f"prompt's answer leaves {kept}. Raise max_seq_length (--max-seq-length)."
            )
        found.append((sample.prompt[-kept:], answer))
    return found


def _pack(sizes: np.ndarray, length: int) -> list[list[int]]:
    """Assign sequences to rows of `length` tokens: longest first, each into the first row with room."""
    rows: list[list[int]] = []
    free: list[int] = []
    for i in np.argsort(-sizes, kind="stable").tolist():
        row = next((r for r, n in enumerate(free) if n >= sizes[i]), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(length)
        rows[row].append(i)
        free[row] -= int(sizes[i])
    return rows
