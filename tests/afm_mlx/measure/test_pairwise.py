"""Pairs of answers and a judge: who wins, how sure that is, and what the place of an answer counts."""

import dataclasses
import json
from itertools import cycle

import pytest

from afm_mlx.errors import DataError
from afm_mlx.measure.comparison import wilson_interval
from afm_mlx.measure.judge_tools import find_tools
from afm_mlx.measure.pairwise import (
    FIRST,
    SECOND,
    Answer,
    AnswerPair,
    ModelJudge,
    judge_pairs,
    load_answer_pairs,
    load_answers,
)
from afm_mlx.tokenizer.tokenizer import load_tokenizer
from tests.tools.cases import each
from tests.tools.cli import lines
from tests.tools.models import random_config, random_model


def pair(number, a, b, schema=None):
    messages = [{"role": "user", "content": f"Task {number}"}]
    return AnswerPair(
        str(number),
        Answer(messages, a, schema, f"a:{number}"),
        Answer(messages, b, schema, f"b:{number}"),
    )


class Scripted:
    """A judge that keeps the questions, finds given tools useful, and decides by a function of the texts."""

    def __init__(self, decide, useful=()):
        self.decide, self.useful, self.questions = decide, useful, []

    def __call__(self, questions, progress):
        found = []
        for done, question in enumerate(questions, start=1):
            (message,) = question.messages
            text = message["content"]
            self.questions.append(text)
            keys = question.schema["properties"]
            if "better" in keys:
                first, second = text.split("The first answer:")[1].split("The second answer:")
                found.append({"better": self.decide(first, second)})
            else:
                found.append({name: name in self.useful for name in keys})
            if progress is not None:
                progress(done, len(questions))
        return found


def longer(first, second):
    return FIRST if len(first.strip()) > len(second.strip()) else SECOND


def test_wins_are_counted_exactly():
    pairs = [pair(0, "long answer", "no"), pair(1, "no", "longest answer"), pair(2, "abc", "x")]
    seen = []
    found = judge_pairs(
        Scripted(longer), pairs, unmatched=(1, 2), progress=lambda *counts: seen.append(counts)
    )
    assert [verdict.winner for verdict in found.verdicts] == ["a", "b", "a"]
    assert [found.count(name) for name in ("a", "b", "tie")] == [2, 1, 0]
    assert found.win_rate == pytest.approx(2 / 3)
    assert found.interval == wilson_interval(2 / 3, 3)
    assert found.first_rate == 0.5
    assert found.unmatched == (1, 2)
    assert seen == [(done, 6) for done in range(1, 7)]


@each("place, rate", [(FIRST, 1.0), (SECOND, 0.0)])
def test_position_bias_is_measured_and_cancels_out(place, rate):
    pairs = [pair(i, "good " * i, "bad") for i in range(5)]
    found = judge_pairs(Scripted(lambda first, second: place), pairs)
    assert found.count("tie") == 5
    assert found.win_rate == 0.5
    assert found.first_rate == rate


def test_a_bias_that_is_not_total_costs_ties_and_no_wins():
    # This judge prefers the longer answer, and the first one where they differ by little.
    def decide(first, second):
        return FIRST if len(first) > len(second) - 10 else SECOND

    pairs = [pair(0, "x" * 40, "y"), pair(1, "x", "y" * 40), pair(2, "xx", "y"), pair(3, "x", "yy")]
    found = judge_pairs(Scripted(decide), pairs)
    assert [verdict.winner for verdict in found.verdicts] == ["a", "b", "tie", "tie"]
    assert found.win_rate == 0.5
    assert found.first_rate == 6 / 8


def test_both_orders_are_asked_with_the_reports_of_useful_tools():
    judge = Scripted(lambda first, second: SECOND if "wrong:" in first else FIRST, ("math",))
    pairs = [pair(0, "1 + 1 = 2", "1 + 1 = 3"), pair(1, "no sums", "2 + 2 = 5")]
    seen = []
    found = judge_pairs(
        judge, pairs, find_tools(["math", "count"]), progress=lambda *c: seen.append(c)
    )
    assert seen == [(done, 8) for done in range(1, 9)]
    assert [verdict.winner for verdict in found.verdicts] == ["a", "a"]
    right, wrong = {"math": "right: 1 + 1 = 2"}, {"math": "wrong: 1 + 1 = 3, it is 2"}
    assert [verdict.reports for verdict in found.verdicts] == [
        (right, wrong),
        ({}, {"math": "wrong: 2 + 2 = 5, it is 4"}),
    ]
    assessments, decisions = judge.questions[:4], judge.questions[4:]
    assert [text.rpartition("\n")[2] for text in assessments] == [
        text for each_pair in pairs for text in (each_pair.a.text, each_pair.b.text)
    ]
    assert "- math: it states results" in assessments[0]
    first, second = decisions[:2]
    assert first.index("1 + 1 = 2") < first.index("wrong: 1 + 1 = 3")
    assert second.index("wrong: 1 + 1 = 3") < second.index("right: 1 + 1 = 2")
    assert "Task 0" in first
    assert "Checks of the first answer" not in decisions[2]  # an answer without sums
    assert "Checks of the second answer:\n- math: wrong: 2 + 2 = 5" in decisions[2]


@each("place", ["of both answers", "in the first message", "of one answer only"])
def test_the_judge_sees_the_tools_of_a_prompt(place):
    tool = {"type": "function", "function": {"name": "search", "description": "Größe"}}
    given = pair(0, "short", "a longer one")
    answers = [dataclasses.replace(answer, tools=[tool]) for answer in (given.a, given.b)]
    if place == "in the first message":
        answers = [
            dataclasses.replace(answer, messages=[{**answer.messages[0], "tools": [tool]}])
            for answer in (given.a, given.b)
        ]
    elif place == "of one answer only":
        answers[0] = given.a
    judge = Scripted(longer)
    judge_pairs(judge, [AnswerPair("0", *answers)], find_tools(["count"]))
    offered = f"Task 0\nTools that the answer may call:\n{json.dumps(tool, ensure_ascii=False)}\n"
    shown = [offered in text for text in judge.questions]
    assert shown == [place != "of one answer only", True, True, True]


def test_a_judge_that_needs_no_tool_has_no_reports():
    judge = Scripted(longer)
    found = judge_pairs(judge, [pair(0, "1 + 1 = 2", "2")], find_tools(["math"]))
    assert found.verdicts[0].reports == ({}, {})
    assert not any("Checks" in text for text in judge.questions)


def test_a_wrong_schema_is_named_with_its_answer():
    judge = Scripted(longer, ("schema",))
    pairs = [pair(0, "{}", "[]", {"type": "object"}), pair(1, "{}", "[]", {"type": "thing"})]
    with pytest.raises(DataError, match="a:1: The schema is not valid"):
        judge_pairs(judge, pairs, find_tools(["schema"]))
    found = judge_pairs(judge, pairs[:1], find_tools(["schema"]))
    assert found.verdicts[0].reports[0] == {"schema": "valid"}
    assert found.verdicts[0].reports[1]["schema"].startswith("not valid: [] is not of type")


@each("share, count", [(0.5, 100), (1.0, 200), (0.0, 10), (0.675, 3)])
def test_wilsons_interval_ends_where_the_share_is_at_the_edge_of_chance(share, count):
    for bound in wilson_interval(share, count):
        # Shares of `count` trials with the probability `bound` have this standard error.
        assert (share - bound) ** 2 == pytest.approx(
            1.96**2 * bound * (1 - bound) / count, abs=1e-12
        )
    low, high = wilson_interval(share, count)
    assert -1e-12 < low <= share <= high < 1 + 1e-12


# -- files


def test_answers_are_matched_by_id_or_prompt(tmp_path):
    user = {"role": "user", "content": "Hi"}
    asked = {"type": "json_schema", "json_schema": {"name": "N", "schema": {"type": "object"}}}
    a = lines(
        tmp_path / "a.jsonl",
        {"prompt": "Hi", "answer": "1"},
        {"id": 7, "messages": [user], "answer": "2", "schema": {"type": "array"}},
        {"messages": [{**user, "response_format": asked}], "answer": "3"},
        {"prompt": "alone", "answer": "4", "tools": [{"name": "f"}]},
    )
    b = lines(
        tmp_path / "b.jsonl",
        {"messages": [{**user, "response_format": asked}], "answer": "c"},
        {"prompt": "other", "answer": "x"},
        {"id": 7, "prompt": "Hi", "answer": "b"},
        # A chat that ends with the answer, and a prompt with its completion.
        {"messages": [user, {"role": "assistant", "content": "a"}]},
        {"prompt": "another", "completion": "y"},
    )
    pairs, unmatched = load_answer_pairs(a, b)
    assert [(each_pair.a.text, each_pair.b.text) for each_pair in pairs] == [
        ("1", "a"),
        ("2", "b"),
        ("3", "c"),
    ]
    assert unmatched == (1, 2)
    schemas = [each_pair.a.schema for each_pair in pairs]
    assert schemas == [None, {"type": "array"}, {"type": "object"}]
    assert pairs[0].a.where.endswith("a.jsonl:1")
    assert len(load_answer_pairs(a, b, limit=2)[0]) == 2
    assert [answer.tools for answer in load_answers(a).values()] == [
        None,
        None,
        None,
        [{"name": "f"}],
    ]


PLAIN = {"prompt": "Hi", "answer": "1"}


@each(
    "a, says",
    [
        ([], "a.jsonl holds no answers; a line is"),
        ([[]], "a.jsonl:1: "),
        ([{"prompt": "Hi"}], "a.jsonl:1: "),
        ([{"prompt": "Hi", "answer": 3}], "a.jsonl:1: an answer is"),
        ([{"prompt": 3, "answer": "1"}], "a.jsonl:1: an answer is"),
        ([{"prompt": [], "answer": "1"}], "a.jsonl:1: an answer is"),
        ([{"messages": ["Hi"], "answer": "1"}], "a.jsonl:1: an answer is"),
        ([{"messages": [{"role": "user", "content": "Hi"}]}], "a.jsonl:1: an answer is"),
        ([{"text": "Hi"}], "a.jsonl:1: an answer is"),
        ([PLAIN, PLAIN], "a.jsonl:2 and .*a.jsonl:1 have the same prompt; give each an id"),
        ([{**PLAIN, "id": 1}] * 2, "have the same id 1"),
        ([{**PLAIN, "prompt": "No"}], "have no prompt in common"),
        ([{**PLAIN, "id": 5, "prompt": "No"}], "have the id 5 and different prompts"),
        ([{**PLAIN, "id": 6, "tools": [{"name": "g"}]}], "same prompt and different tools"),
    ],
)
def test_wrong_files_are_errors_that_name_the_line(tmp_path, a, says):
    file = lines(tmp_path / "a.jsonl", *a)
    other = lines(
        tmp_path / "b.jsonl", PLAIN, {**PLAIN, "id": 5}, {**PLAIN, "id": 6, "tools": [{}]}
    )
    with pytest.raises(DataError, match=says):
        load_answer_pairs(file, other)


# -- a model as the judge


def test_a_model_answers_in_the_form_that_is_needed(rng, tokenizer_folder):
    tokenizer = load_tokenizer(tokenizer_folder)
    model = random_model(random_config(rng, vocab_size=1000, context_length=512, kv_bits=None), rng)
    pairs = [pair(i, a, b) for i, (a, b) in enumerate(zip("abcd", cycle("xy"), strict=False))]
    tools, seen = find_tools(["math", "count"]), []
    judge = ModelJudge(model, tokenizer, batch_size=3)
    found = judge_pairs(
        judge, pairs, tools, reasons=5, progress=lambda *counts: seen.append(counts)
    )
    assert seen == [(done, 16) for done in range(1, 17)]
    for verdict in found.verdicts:
        assert set(verdict.preferred) <= {FIRST, SECOND}
        assert set(verdict.reports[0]) <= {"count"}
    # One question at a time, it says the same.
    again = judge_pairs(ModelJudge(model, tokenizer, batch_size=1), pairs, tools, reasons=5)
    assert [v.preferred for v in again.verdicts] == [v.preferred for v in found.verdicts]
    long = pair(9, "the fox " * 400, "no")
    with pytest.raises(DataError, match=r"a:9, b:9: The prompt needs"):
        judge_pairs(judge, [long])


def test_a_judge_without_a_chat_template_is_refused(rng, tokenizer_folder, monkeypatch):
    tokenizer = load_tokenizer(tokenizer_folder)
    judge = ModelJudge(random_model(random_config(rng, vocab_size=1000), rng), tokenizer)
    monkeypatch.setattr(type(tokenizer), "has_chat_template", False)
    with pytest.raises(DataError, match="no chat template"):
        judge_pairs(judge, [pair(0, "a", "b")])
