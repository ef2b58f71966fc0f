"""How many tasks of a test set a model solves: greedy answers, with and without constraints.

A test set is a JSONL file with one example per line:

    {"task": "...", "messages": [...], "tools": [...]?, "answer": "...", "compare": "..."?}

Answers are compared as `compare` says, see `comparison`: by default as calls of tools where the expected answer
has such, as JSON where a message has a `response_format`, and else as text.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn

from afm_mlx.engine.engine import Engine
from afm_mlx.engine.request import Request
from afm_mlx.errors import AFMError, ContextLengthError, DataError, IncompleteError, shown
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.guidance.tool_calls import tool_call_constraint
from afm_mlx.jsonl import read_jsonl
from afm_mlx.measure.comparison import (
    COMPARISONS,
    TEXT,
    can_be_compared,
    is_right,
    natural_comparison,
)
from afm_mlx.model.wired_memory import wired_memory
from afm_mlx.progress import Progress

_CUT_OFF = (ContextLengthError, IncompleteError)


@dataclass(frozen=True)
class Example:
    """One line of a test set; `where` is its file and line."""

    task: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    answer: str
    where: str
    compare: str = TEXT

    @property
    def constraint(self) -> Constraint | None:
        """What the chat asks of the answer: the schema of its response format, or calls of its tools, if any.

        Raises:
            ConstraintError: for a schema or tools that can't be honoured.
        """
        asked = _response_format(self.messages)
        if asked is not None:
            return Constraint.json_schema(asked["json_schema"]["schema"])
        tools = self.tools or _dict(next(iter(self.messages), None)).get("tools")
        return tool_call_constraint(tools, "auto") if tools else None


@dataclass(frozen=True)
class GradedAnswer:
    """An example, and what a model answered to it."""

    example: Example
    answer: str

    @property
    def is_right(self) -> bool:
        return is_right(self.answer, self.example.answer, self.example.compare)


@dataclass(frozen=True)
class TaskScore:
    """Right answers of one task, or of all of them."""

    correct: int
    total: int

    @property
    def accuracy(self) -> float:
        return self.correct / self.total


@dataclass(frozen=True)
class Evaluation:
    """All answers in the order of the examples, and the seconds that they took."""

    answers: list[GradedAnswer]
    seconds: float

    @property
    def tasks(self) -> dict[str, TaskScore]:
        """The score of each task, in the order of their first examples."""
        total = Counter(answer.example.task for answer in self.answers)
        correct = Counter(a.example.task for a in self.answers if a.is_right)
        return {task: TaskScore(correct[task], count) for task, count in total.items()}

    @property
    def overall(self) -> TaskScore:
        return TaskScore(sum(answer.is_right for answer in self.answers), len(self.answers))

    @property
    def mistakes(self) -> list[GradedAnswer]:
        return [answer for answer in self.answers if not answer.is_right]


def load_examples(path: str | Path, limit: int | None = None) -> list[Example]:
    """Read a test set.

    Args:
        path: path of the JSONL file.
        limit: most examples per task, the first ones of the file; None for all.

    Raises:
        DataError: names the file and the line.
    """
    examples, taken = [], Counter[str]()
    for where, record in read_jsonl(Path(path)):
        example = _example(where, record)
        if limit is None or taken[example.task] < limit:
            taken[example.task] += 1
            examples.append(example)
    if not examples:
        raise DataError(f"{path} holds no examples.")
    return examples


def _example(where: str, record: Any) -> Example:
    if not isinstance(record, dict):
        raise DataError(f"{where}: this is a JSON {type(record).__name__}; an object is needed.")
    wanted = {"task": str, "messages": list, "answer": str}
    for key, kind in wanted.items():
        if not isinstance(record.get(key), kind):
            got = type(record[key]).__name__ if key in record else "missing"
            raise DataError(
                f"{where}: {key!r} is {got}; an example has 'task' (a string), 'messages' (a list), "
                "'answer' (a string) and, if need be, 'tools' (a list)."
            )
    answer, has_format = record["answer"], _response_format(record["messages"]) is not None
    compare = record.get("compare", natural_comparison(answer, has_format))
    if compare not in COMPARISONS:
        raise DataError(
            f"{where}: 'compare' is {shown(compare)}; allowed are {', '.join(COMPARISONS)}."
        )
    if not can_be_compared(answer, compare):
        raise DataError(
            f"{where}: the answer is to be compared as {compare}, and is {shown(answer)}."
        )
    return Example(record["task"], record["messages"], record.get("tools"), answer, where, compare)


def _response_format(messages: list[Any]) -> dict[str, Any] | None:
    """The response format that was asked for last."""
    for message in reversed(messages):
        asked = _dict(_dict(message).get("response_format"))
        if asked.get("type") == "json_schema" and "schema" in _dict(asked.get("json_schema")):
            return asked
    return None


def _dict(value: Any) -> dict[str, Any]:
    """The value itself where it is a dict: messages are checked when they are encoded."""
    return value if isinstance(value, dict) else {}


def evaluate(
    model: nn.Module,
    tokenizer: Any,
    examples: Sequence[Example],
    *,
    batch_size: int = 16,
    constrained: bool = False,
    progress: Progress | None = None,
) -> Evaluation:
    """Let a model answer every example.

    An answer may be about twice as long as the expected one; what is longer is wrong anyway.

    Args:
        model, tokenizer: what `load` returns.
        examples: examples of `load_examples`.
        batch_size: examples that are answered side by side.
        constrained: whether answers are generated under each example's constraint, if it has one.
        progress: called with answers done and answers in all.

    Raises:
        DataError: when an example has messages that can't be used, or does not fit in the context.
    """
    if not tokenizer.has_chat_template:
        raise DataError("The examples are chats, and the model's folder has no chat template.")
    start = time.perf_counter()
    engine = Engine(model, tokenizer, max_batch=batch_size)
    rows = {_submit(engine, tokenizer, e, constrained): i for i, e in enumerate(examples)}
    answers = [""] * len(examples)
    done = 0
    with wired_memory(model):
        for response in engine.run():
            answers[rows[response.row]] += response.text
            # An answer that is too long, or fills the context, is cut off, and wrong.
            if response.error is not None and not isinstance(response.error, _CUT_OFF):
                raise response.error
            if response.finish_reason is not None:
                done += 1
                if progress is not None:
                    progress(done, len(examples))
    graded = [GradedAnswer(e, answer) for e, answer in zip(examples, answers, strict=True)]
    return Evaluation(graded, time.perf_counter() - start)


def _submit(engine: Engine, tokenizer: Any, example: Example, constrained: bool) -> int:
    try:
        prompt = tokenizer.apply_chat_template(
            example.messages, tools=example.tools, add_generation_prompt=True
        )
        most = 2 * len(tokenizer.encode(example.answer)) + 8
        constraint = example.constraint if constrained else None
        return engine.submit(Request(prompt, most, logprobs=False, constraint=constraint))
    except AFMError as error:
        raise DataError(f"{example.where}: {error}") from None
