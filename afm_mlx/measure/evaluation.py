"""Measure how many tasks of a test set a model solves greedily, with and without constraints.

A test set is a JSONL file with one example per line:

    {"task": "...", "messages": [...], "tools": [...]?, "answer": "...", "compare": "..."?}

`compare` says how answers are compared, see `is_right`: by default as tool calls if the expected answer has
any, as JSON if a message has a `response_format`, and as text otherwise. Messages may have images, see
`vision.message_images`.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn

from afm_mlx.engine.engine import Engine
from afm_mlx.engine.request import CUT_OFF, LogitsProcessor, Request, TokenResponse
from afm_mlx.errors import (
    AFMError,
    DataError,
    TokenizerError,
    shown,
)
from afm_mlx.guidance.answer_parts import AnySplitter, Text, read_answer, split, splitter_for
from afm_mlx.guidance.call_forms import AFM_CALLS, CallForm, call_form
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.guidance.thoughts import (
    ThoughtForm,
    after_thoughts,
    limits_of_thoughts,
    thought_form,
)
from afm_mlx.guidance.tool_calls import tool_call_constraint
from afm_mlx.jsonl import read_jsonl
from afm_mlx.measure.comparison import Score
from afm_mlx.model.wired_memory import wired_memory
from afm_mlx.progress import Progress
from afm_mlx.ranks import ALONE, Ranks
from afm_mlx.tokenizer.chat_images import ChatImages
from afm_mlx.tokenizer.chat_messages import parse_tool_calls
from afm_mlx.tokenizer.protocol import Tokenizer
from afm_mlx.tokenizer.vocabulary import EXECUTABLE_END, EXECUTABLE_START
from afm_mlx.vision.message_images import folder_of_line, with_images

TEXT, JSON, CALLS = "text", "json", "calls"
COMPARISONS = (TEXT, JSON, CALLS)


@dataclass(frozen=True)
class Example:
    """One line of a test set; `where` is its file and line."""

    task: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    answer: str
    where: str
    compare: str = TEXT

    def constraint(self, form: CallForm = AFM_CALLS) -> Constraint | None:
        """Make the constraint of the chat's response format, else of its tools; None without either.

        `form` is how the model writes calls.
        """
        asked = response_format_of(self.messages)
        if asked is not None:
            return Constraint.json_schema(asked["json_schema"]["schema"])
        return tool_call_constraint(tools, "auto", form=form) if (tools := self.all_tools) else None

    @property
    def all_tools(self) -> list[dict[str, Any]] | None:
        """The chat's tools, which the first message may hold."""
        return self.tools or _dict(next(iter(self.messages), None)).get("tools")


@dataclass(frozen=True)
class GradedAnswer:
    """An example, and a model's answer to it, with calls in the model's form."""

    example: Example
    answer: str
    form: CallForm = AFM_CALLS

    @property
    def is_right(self) -> bool:
        example = self.example
        tools = example.all_tools or ()
        return is_right(self.answer, example.answer, example.compare, self.form, tools)


@dataclass(frozen=True)
class TaskScore:
    """Number of right answers and of all answers."""

    correct: int
    total: int

    @property
    def accuracy(self) -> float:
        return self.correct / self.total


@dataclass(frozen=True)
class Evaluation:
    """All answers in the order of the examples, and their total time in seconds."""

    answers: list[GradedAnswer]
    seconds: float

    @property
    def tasks(self) -> dict[str, TaskScore]:
        """Score of each task, in the order of their first examples."""
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
    """Read a test set: the first `limit` examples of each task, by default all.

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
    answer, has_format = record["answer"], response_format_of(record["messages"]) is not None
    compare = record.get("compare", natural_comparison(answer, has_format))
    if compare not in COMPARISONS:
        raise DataError(
            f"{where}: 'compare' is {shown(compare)}; allowed are {', '.join(COMPARISONS)}."
        )
    if _read(answer, compare) is None:
        raise DataError(
            f"{where}: the answer is to be compared as {compare}, and is {shown(answer)}."
        )
    return Example(record["task"], record["messages"], record.get("tools"), answer, where, compare)


def response_format_of(messages: list[Any]) -> dict[str, Any] | None:
    """Return the last response format of the messages; None without one."""
    for message in reversed(messages):
        asked = _dict(_dict(message).get("response_format"))
        if asked.get("type") == "json_schema" and "schema" in _dict(asked.get("json_schema")):
            return asked
    return None


def _dict(value: Any) -> dict[str, Any]:
    """Return a value if it is a dict, else an empty one: messages are checked later, when encoded."""
    return value if isinstance(value, dict) else {}


def evaluate(
    model: nn.Module,
    tokenizer: Tokenizer,
    examples: Sequence[Example],
    *,
    batch_size: int = 16,
    constrained: bool = False,
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
) -> Evaluation:
    """Let a model answer every example.

    Answers are cut at about twice the length of the expected one, since longer ones are wrong. Therefore
    thoughts are switched off.

    Args:
        model, tokenizer: the results of `load`.
        examples: examples of `load_examples`.
        batch_size: examples in a batch.
        constrained: True to generate under each example's constraint, if it has one.
        progress: called with the numbers of answers done and in all.
        ranks: processes that split the examples.

    Raises:
        DataError: if an example's messages are not valid, or do not fit in the context.
    """
    if not tokenizer.has_chat_template:
        raise DataError("The examples are chats, and the model's folder has no chat template.")
    start = time.perf_counter()
    has_tools = any(example.all_tools for example in examples)
    form = _form(tokenizer) if has_tools else AFM_CALLS
    thoughts = thought_form(tokenizer)
    engine = Engine(model, tokenizer, max_batch=batch_size)

    def answered(own: list[Example]) -> list[str]:
        requests = [_request(tokenizer, e, constrained, form, thoughts) for e in own]
        splitters = [
            None if e.compare == CALLS else splitter_for(None, (), thoughts, request.prompt)
            for e, request in zip(own, requests, strict=True)
        ]
        wheres = [example.where for example in own]
        # An answer that is too long, or fills the context, is wrong.
        return run_requests(engine, requests, splitters, wheres, progress, ignored=CUT_OFF)

    answers = ranks.each(examples, answered)
    graded = [GradedAnswer(e, answer, form) for e, answer in zip(examples, answers, strict=True)]
    return Evaluation(graded, time.perf_counter() - start)


def _form(tokenizer: Tokenizer) -> CallForm:
    """Return the form of a model's calls; AFM's for a model that can't call, whose calls are all wrong."""
    try:
        return call_form(tokenizer)
    except AFMError:
        return AFM_CALLS


def _request(
    tokenizer: Tokenizer,
    example: Example,
    constrained: bool,
    form: CallForm,
    thoughts: ThoughtForm | None,
) -> Request:
    try:
        most = 2 * len(tokenizer.encode(example.answer)) + 8
        constraint = example.constraint(form) if constrained else None
        config = getattr(tokenizer, "vision_config", None)
        messages = with_images(example.messages, config, folder_of_line(example.where))
        return chat_request(tokenizer, messages, example.tools, most, constraint, thoughts)
    except AFMError as error:
        raise DataError(f"{example.where}: {error}") from None


def chat_request(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    max_tokens: int,
    constraint: Constraint | None,
    thoughts: ThoughtForm | None,
) -> Request:
    """Make the request of a chat's next answer, without thoughts, which would fill `max_tokens`.

    `thoughts` is how the model writes thoughts; pass None for a model that writes none. Parts of messages may
    hold an image if the model reads images.
    """
    off: dict[str, Any] = {}
    images = ChatImages()
    if thoughts is not None:
        off = {"enable_thinking": False, "thinking": False}
    if getattr(tokenizer, "vision_config", None) is not None:
        off["images"] = images
    prompt = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, **off)
    limits: list[LogitsProcessor] = []
    if thoughts is not None:
        if thoughts.is_begun(prompt):
            prompt = [*prompt, *thoughts.end_ids]
        calls = bool(tools or _dict(next(iter(messages), None)).get("tools"))
        limits += limits_of_thoughts(thoughts, prompt, 0, may_call=calls)
        if constraint is not None and (response_format_of(messages) or not calls):
            constraint = after_thoughts(constraint, thoughts, is_begun=False, may_think=False)
    return Request(
        prompt,
        max_tokens,
        logprobs=False,
        constraint=constraint,
        logits_processors=tuple(limits),
        images=images.placed,
    )


def run_requests(
    engine: Engine,
    requests: Sequence[Request],
    splitters: Sequence[AnySplitter | None],
    wheres: Sequence[str],
    progress: Progress | None = None,
    ignored: tuple[type[AFMError], ...] = (),
) -> list[str]:
    """Return the texts of the answers to requests, in their order.

    Args:
        engine: an engine without rows.
        requests: what is submitted, all at once.
        splitters: for each request, what divides its answer (`answer_text`).
        wheres: for each request, its place in the data, for error messages.
        progress: called with the numbers of answers done and in all.
        ignored: errors that end an answer, whose text so far is returned.

    Raises:
        DataError: for a request that is refused, with its place.
        AFMError: for an answer that ends with an error that is not `ignored`.
    """
    rows: dict[int, int] = {}
    for index, request in enumerate(requests):
        try:
            rows[engine.submit(request)] = index
        except AFMError as error:
            raise DataError(f"{wheres[index]}: {error}") from None
    answers, done = [""] * len(requests), 0
    with wired_memory(engine.model):
        for response in engine.run():
            index = rows[response.row]
            answers[index] += answer_text(splitters[index], response)
            if response.error is not None and not isinstance(response.error, ignored):
                raise response.error
            if response.finish_reason is not None:
                done += 1
                if progress is not None:
                    progress(done, len(requests))
    return answers


def answer_text(splitter: AnySplitter | None, response: TokenResponse) -> str:
    """Return the next text of an answer, without thoughts.

    Without a splitter, calls and their marks are part of it.
    """
    if splitter is None:
        return response.text
    ended = response.finish_reason is not None
    parts = split(splitter, response.text, [response.token], is_last=ended)
    return "".join(part.text for part in parts if isinstance(part, Text))


def question_scores(evaluation: Evaluation) -> dict[str, Score]:
    """Return the accuracy of each task, and of all examples, with each example's: 1 if it is right, else 0."""
    questions = defaultdict[str, list[float]](list)
    for answer in evaluation.answers:
        questions[answer.example.task].append(answer.is_right)
    every = [value for values in questions.values() for value in values]
    return {
        task: Score(sum(values) / len(values), values)
        for task, values in {**questions, "all": every}.items()
    }


# -- comparing answers


def natural_comparison(expected: str, has_format: bool) -> str:
    """Return the default comparison for an expected answer to a chat that may have a `response_format`."""
    if EXECUTABLE_START in expected and _read(expected, CALLS) is not None:
        return CALLS
    return JSON if has_format and _read(expected, JSON) is not None else TEXT


def is_right(
    answer: str,
    expected: str,
    comparison: str,
    form: CallForm = AFM_CALLS,
    tools: Sequence[Mapping[str, Any]] = (),
) -> bool:
    """True if an answer, with calls in a model's `form`, equals the expected one, with calls in AFM's.

    The comparison "text" is word for word, leading and trailing white space aside; "json" compares JSON values,
    ignoring the order of keys; "calls" compares names and arguments of tool calls, and the text before them.
    """
    got, wanted = _read(answer, comparison), _read(expected, comparison)
    if comparison == CALLS and form.name != AFM_CALLS.name:
        try:
            said, calls = read_answer(form, answer, tools)
        except (ValueError, RecursionError):
            return False
        got = ([said.strip(), calls],)
    return got is not None and wanted is not None and _same(got[0], wanted[0])


def _read(text: str, comparison: str) -> tuple[Any] | None:
    """Return a tuple with the value that a comparison is about; None if the text lacks that form."""
    text = text.strip()
    try:
        if comparison == JSON:
            return (json.loads(text),)
        if comparison == CALLS:
            before, _, calls = text.partition(EXECUTABLE_START)
            if not calls.endswith(EXECUTABLE_END):
                return None
            calls = calls.removesuffix(EXECUTABLE_END)
            return ([before.strip(), parse_tool_calls(calls)],)
    except (ValueError, RecursionError, TokenizerError):
        return None
    return (text,)


def _same(one: Any, other: Any) -> bool:
    """True if two JSON values are equal; unlike in Python, true differs from 1."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and one == other
