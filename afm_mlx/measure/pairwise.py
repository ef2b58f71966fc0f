"""Two models' answers to the same prompts, compared by a judge: a model that says which answer is better.

    assess   one question about each answer: which tools are useful?       (with tools)
    check    each useful tool runs, and writes a short report
    decide   two questions about each pair, in either order of the answers: which is better?

An answer wins if it is preferred in both orders; otherwise the pair is a tie. A judge that prefers the place
and not the text therefore gives ties alone, and `first_rate`, the share of verdicts for the answer that is
shown first, says how large its bias is. Tools and assessment are due to Apple's "external validation tools"
for judges (arXiv 2507.17015); these tools are local.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn

from afm_mlx.engine.engine import Engine
from afm_mlx.errors import AFMError, DataError, shown
from afm_mlx.guidance.answer_parts import splitter_for
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.guidance.thoughts import thought_form
from afm_mlx.jsonl import ChatRecord, document_of, read_jsonl
from afm_mlx.measure.comparison import wilson_interval
from afm_mlx.measure.evaluation import chat_request, response_format_of, run_requests
from afm_mlx.measure.judge_tools import JudgeTool
from afm_mlx.progress import Progress
from afm_mlx.tokenizer.protocol import Tokenizer

FORM = '{"prompt" or "messages", "answer", "id"?, "schema"?}'
FIRST, SECOND = "first", "second"


@dataclass(frozen=True)
class Answer:
    """A line of a file of answers; `where` is its file and line, and `tools` are the prompt's."""

    messages: list[dict[str, Any]]
    text: str
    schema: Mapping[str, Any] | None
    where: str
    tools: Any = None


@dataclass(frozen=True)
class AnswerPair:
    """Two answers, A's and B's, to the same prompt."""

    key: str
    a: Answer
    b: Answer


@dataclass(frozen=True)
class Question:
    """A question for a judge: a chat, the schema of the answer, and where its texts are from."""

    messages: list[dict[str, Any]]
    schema: dict[str, Any]
    where: str


Judge = Callable[[Sequence[Question], Progress | None], Sequence[Any]]
"""Answers questions: one JSON value for each, valid under the question's schema."""


@dataclass(frozen=True)
class Verdict:
    """A judge's opinion of a pair.

    Args:
        pair: what was judged.
        preferred: "first" or "second", when A's answer is shown first, and when B's is.
        reports: the tools' reports on A's and B's answer, by the tools' names.
    """

    pair: AnswerPair
    preferred: tuple[str, str]
    reports: tuple[dict[str, str], dict[str, str]]

    @property
    def winner(self) -> str:
        """`"a"`, `"b"` or `"tie"`."""
        return {(FIRST, SECOND): "a", (SECOND, FIRST): "b"}.get(self.preferred, "tie")


@dataclass(frozen=True)
class Pairwise:
    """All verdicts, and the numbers of answers of A and B that have no counterpart."""

    verdicts: list[Verdict]
    unmatched: tuple[int, int] = (0, 0)

    def count(self, winner: str) -> int:
        """Return the number of pairs with this `Verdict.winner`."""
        return sum(verdict.winner == winner for verdict in self.verdicts)

    @property
    def win_rate(self) -> float:
        """A's wins and half of the ties, as a share of all pairs."""
        return (self.count("a") + self.count("tie") / 2) / len(self.verdicts)

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of `win_rate`."""
        return wilson_interval(self.win_rate, len(self.verdicts))

    @property
    def first_rate(self) -> float:
        """The share of verdicts for the answer that was shown first; 0.5 without position bias."""
        said = [place for verdict in self.verdicts for place in verdict.preferred]
        return said.count(FIRST) / len(said)


# -- files of answers


def load_answer_pairs(
    a: str | Path, b: str | Path, limit: int | None = None
) -> tuple[list[AnswerPair], tuple[int, int]]:
    """Read two files of answers, and match them by their "id", or else by their prompts.

    A line is {"prompt" or "messages", "answer", "id"?, "schema"?}, or a chat that ends with the answer, in any
    form that `jsonl.document_of` takes.

    Returns:
        The pairs in A's order, at most `limit`; and the numbers of answers of A and B without a counterpart.

    Raises:
        DataError: names the file and line: for a line of another form, two answers with one id or prompt, an
            id with two prompts, or files that have nothing in common.
    """
    ours, theirs = load_answers(a), load_answers(b)
    pairs = []
    for key, answer in ours.items():
        if (other := theirs.get(key)) is None:
            continue
        if answer.messages != other.messages:
            raise DataError(
                f"{answer.where} and {other.where} have the id {key} and different prompts; which one was "
                "answered?"
            )
        if answer.tools and other.tools and answer.tools != other.tools:
            raise DataError(
                f"{answer.where} and {other.where} have the same prompt and different tools. Give both "
                "the tools that were offered."
            )
        pairs.append(AnswerPair(key, answer, other))
    if not pairs:
        raise DataError(
            f"{a} ({len(ours)} answers) and {b} ({len(theirs)}) have no prompt in common; answers are matched "
            'by "id", or else by "prompt" or "messages".'
        )
    return pairs[:limit], (len(ours) - len(pairs), len(theirs) - len(pairs))


def load_answers(path: str | Path, unique: bool = True) -> dict[str, Answer]:
    """Read a file of answers, by their ids or prompts; see `load_answer_pairs` for its lines and errors.

    Without `unique`, several answers may have one id or prompt, and keys mean nothing.
    """
    found: dict[str, Answer] = {}
    for where, record in read_jsonl(Path(path)):
        try:
            answer = _answer(record, where)
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        own = record.get("id") if isinstance(record, dict) else None
        key = json.dumps(answer.messages if own is None else own, sort_keys=True)
        if not unique:
            key = where
        elif key in found:
            by = "prompt; give each an id" if own is None else f"id {shown(own)}"
            raise DataError(f"{where} and {found[key].where} have the same {by}.")
        found[key] = answer
    if not found:
        raise DataError(f"{path} holds no answers; a line is {FORM}.")
    return found


def _answer(record: Any, where: str) -> Answer:
    schema = None
    tools = record.get("tools") if isinstance(record, dict) else None
    if isinstance(record, dict) and "answer" in record:
        text, messages = record["answer"], record.get("messages", record.get("prompt"))
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
    else:
        document = document_of(record)
        chat: list[Any] = []
        if isinstance(document, ChatRecord):
            chat, tools = list(document.messages), document.tools
        *messages, last = chat or [{}]
        text = last.get("content") if _role(last) == "assistant" else None
    is_chat = isinstance(messages, list) and all(map(_role, messages))
    if not isinstance(text, str) or not is_chat or not messages:
        raise DataError(
            f"an answer is {FORM}, a text to a text or list of messages; this has "
            f"{shown(record if not isinstance(record, dict) else list(record))}."
        )
    if isinstance(record, dict) and (schema := record.get("schema")) is None:
        asked = response_format_of(messages)
        schema = None if asked is None else asked["json_schema"]["schema"]
    return Answer(messages, text, schema, where, tools)


def _role(message: Any) -> str:
    """Return a message's role; empty if it is no message."""
    return str(message.get("role", "")) if isinstance(message, dict) else ""


# -- judging


def judge_pairs(
    judge: Judge,
    pairs: Sequence[AnswerPair],
    tools: Mapping[str, JudgeTool] | None = None,
    *,
    reasons: int = 0,
    unmatched: tuple[int, int] = (0, 0),
    progress: Progress | None = None,
) -> Pairwise:
    """Let a judge compare pairs of answers, each in both orders.

    Args:
        judge: answers questions, such as `ModelJudge`.
        pairs: what is compared.
        tools: checks whose reports the judge may have, by name; see `judge_tools`.
        reasons: most characters of the reasons that the judge gives before each verdict; 0 for none.
        unmatched: what `load_answer_pairs` returns, which the result reports.
        progress: called with the numbers of questions answered and in all.

    Raises:
        DataError: for an answer that can't be checked, or does not fit into the judge's context.
    """
    tools = tools or {}
    answers = [answer for pair in pairs for answer in (pair.a, pair.b)]
    total = 2 * len(pairs) * (2 if tools else 1)
    reports: list[dict[str, str]] = [{} for _ in answers]
    if tools:
        questions = [assessment(answer, tools) for answer in answers]
        useful = judge(questions, _part(progress, 0, total))
        for answer, names, report in zip(answers, useful, reports, strict=True):
            report |= _checked(answer, {name: tools[name] for name in tools if names[name]})
    decisions = []
    for index, pair in enumerate(pairs):
        own, other = (pair.a, reports[2 * index]), (pair.b, reports[2 * index + 1])
        decisions += [decision(own, other, reasons), decision(other, own, reasons)]
    said = judge(decisions, _part(progress, total - len(decisions), total))
    places = [answer["better"] for answer in said]
    verdicts = [
        Verdict(pair, (places[2 * i], places[2 * i + 1]), (reports[2 * i], reports[2 * i + 1]))
        for i, pair in enumerate(pairs)
    ]
    return Pairwise(verdicts, unmatched)


def _part(progress: Progress | None, before: int, total: int) -> Progress | None:
    """Return a progress function for a part of all questions, `before` which others come."""
    return None if progress is None else lambda done, _: progress(before + done, total)


def _checked(answer: Answer, tools: Mapping[str, JudgeTool]) -> dict[str, str]:
    """Return the reports of tools on an answer, by name, without tools that found nothing to check."""
    try:
        found = {name: tool.report(answer.text, answer.schema) for name, tool in tools.items()}
    except AFMError as error:
        raise DataError(f"{answer.where}: {error}") from None
    return {name: report for name, report in found.items() if report is not None}


def assessment(answer: Answer, tools: Mapping[str, JudgeTool]) -> Question:
    """Make the question which tools are useful for an answer."""
    lines = [f"- {name}: {tool.purpose}" for name, tool in tools.items()]
    text = [
        "An answer will be checked by tools. Which ones are useful for it?",
        *lines,
        "Reply with JSON that has true or false for each.",
        *_task(answer.messages, answer.tools),
        f"\nAnswer:\n{answer.text}",
    ]
    properties = {name: {"type": "boolean"} for name in tools}
    return _question(text, properties, answer.where)


def decision(
    first: tuple[Answer, Mapping[str, str]],
    second: tuple[Answer, Mapping[str, str]],
    reasons: int = 0,
) -> Question:
    """Make the question which of two answers, each with its reports, is better."""
    keys = "your reasons and what is better" if reasons else "what is better"
    text = [f"Which answer to the task is better? Reply with JSON: {keys}, {FIRST} or {SECOND}."]
    text += _task(first[0].messages, first[0].tools or second[0].tools)
    for place, (answer, reports) in ((FIRST, first), (SECOND, second)):
        text.append(f"\nThe {place} answer:\n{answer.text}")
        if reports:
            text.append(f"Checks of the {place} answer:")
            text += [f"- {name}: {report}" for name, report in reports.items()]
    properties: dict[str, Any] = {"better": {"enum": [FIRST, SECOND]}}
    if reasons:
        properties = {"reasons": {"type": "string", "maxLength": reasons}, **properties}
    return _question(text, properties, f"{first[0].where}, {second[0].where}")


def _question(text: Sequence[str], properties: dict[str, Any], where: str) -> Question:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return Question([{"role": "user", "content": "\n".join(text)}], schema, where)


def _task(messages: Sequence[Mapping[str, Any]], tools: Any) -> list[str]:
    """Return lines with a prompt, its only message or all messages with their roles, and its tools as JSON."""
    lines = [f"{message['role']}: {message.get('content', '')}" for message in messages]
    if len(messages) == 1:
        lines = [str(messages[0].get("content", ""))]
    if tools := tools or messages[0].get("tools"):
        listed = tools if isinstance(tools, list) else [tools]
        lines += ["Tools that the answer may call:"]
        lines += [json.dumps(tool, ensure_ascii=False) for tool in listed]
    return ["\nTask:", *lines]


@dataclass(frozen=True)
class ModelJudge:
    """A model that answers questions, with constraints that make each answer valid.

    Args:
        model, tokenizer: what `load` returns.
        batch_size: questions that are answered at the same time.
    """

    model: nn.Module
    tokenizer: Tokenizer
    batch_size: int = 16

    def __call__(self, questions: Sequence[Question], progress: Progress | None) -> list[Any]:
        """Answer questions; raise `DataError` for one that does not fit into the context."""
        if not self.tokenizer.has_chat_template:
            raise DataError("A judge is asked in chats, and its folder has no chat template.")
        thoughts = thought_form(self.tokenizer)
        requests = [
            dataclasses.replace(
                chat_request(
                    self.tokenizer,
                    question.messages,
                    None,
                    -1,
                    Constraint.json_schema(question.schema),
                    thoughts,
                ),
                at_limit="complete",
            )
            for question in questions
        ]
        splitters = [splitter_for(None, (), thoughts, request.prompt) for request in requests]
        engine = Engine(self.model, self.tokenizer, max_batch=self.batch_size)
        wheres = [question.where for question in questions]
        texts = run_requests(engine, requests, splitters, wheres, progress)
        return [json.loads(text) for text in texts]
