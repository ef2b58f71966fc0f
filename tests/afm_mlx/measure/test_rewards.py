"""Rewards by name: what each pays, weighted sums, and errors that name reward, sample and prompt."""

import json
import math

import numpy as np
import pytest

from afm_mlx.errors import RewardError
from afm_mlx.guidance.call_forms import AFM_CALLS
from afm_mlx.measure.rewards import Answered, make_rewards, prompt_text

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
CHAT = [
    {"role": "system", "content": "Answer."},
    {
        "role": "user",
        "content": "Count.",
        "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
    },
]


def paid(name, answer, /, **sample):
    return make_rewards([name])("the prompt", answer, sample)


@pytest.mark.parametrize(
    ("name", "answer", "sample", "reward"),
    [
        ("exact", " four\n", {"answer": "four"}, 1),
        ("exact", "4", {"completion": "four"}, 0),
        ("exact", '{"b":2,"a":1}', {"answer": '{"a": 1, "b": 2}', "compare": "json"}, 1),
        ("exact", '{"b":2,"a":1}', {"answer": '{"a": 1, "b": 2}'}, 0),
        ("exact", '{"n":2}', {"answer": '{"n": 2}', "messages": CHAT}, 1),
        ("regex:a+b", " aab ", {}, 1),
        ("regex:a+b", "xaab", {}, 0),
        ("regex:\\d:\\d", "1:2", {}, 1),
        ("schema", '{"n": 3, "more": null}', {"schema": SCHEMA}, 1),
        ("schema", '{"n": "3"}', {"messages": CHAT}, 0),
        ("schema", '{"n": 3', {"messages": CHAT}, 0),
        ("length:5", "12345 ", {}, 1),
        ("length:5", "1234567890", {}, 0.5),
        ("length:5", "", {}, 1),
    ],
)
def test_what_a_reward_pays(name, answer, sample, reward):
    assert paid(name, answer, **sample) == reward


def test_exact_compares_tool_calls():
    def call(arguments):
        return f'{AFM_CALLS.opening}{{"name": "f", "arguments": {arguments}}}{AFM_CALLS.closing}'

    wanted = call('{"a": 1, "b": "x"}')
    assert paid("exact", call('{"b":"x","a":1}'), answer=wanted) == 1
    assert paid("exact", call('{"b":"x","a":2}'), answer=wanted) == 0


def test_a_schema_of_a_file(tmp_path):
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    assert paid(f"schema:{file}", '{"n": 1}') == 1
    assert paid(f"schema:{file}", "[1]") == 0


def test_a_schema_fetches_nothing(tmp_path):
    file = tmp_path / "schema.json"
    file.write_text('{"$ref": "http://127.0.0.1:9/schema"}')
    with pytest.raises(RewardError, match=r"raised .*Unresolvable.*'the prompt'"):
        paid(f"schema:{file}", "1")


FUNCTIONS = """
from helper import scale

def words(prompt, answer, sample):
    return scale * len(answer.split()) / sample["most"]

def passed(prompt, answer, sample):
    return answer in prompt

def wrong(prompt, answer, sample):
    return sample["value"]
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "helper.py").write_text("scale = 2")
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return tmp_path / "mine.py"


def test_functions_of_a_file(file):
    assert paid(f"{file}:words", "one two three", most=12) == 0.5
    assert paid(f"{file}:passed", "prompt") == 1
    assert paid(f"{file}:passed", "other") == 0


def test_a_weighted_sum(file):
    rewards = make_rewards(["length:4", f"{file}:words", "regex:.*"], [1, -0.5, 2])
    answers = [Answered("p", "12345678", {"most": 2}), Answered("p", "a b", {"most": 4})]
    np.testing.assert_array_equal(rewards.table(answers), [[0.5, 1, 1], [1, 1, 1]])
    np.testing.assert_array_equal(rewards.totals(answers), [0.5 - 0.5 + 2, 1 - 0.5 + 2])
    assert rewards.totals([]).shape == (0,)


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "1", [1.0], 10**400])
def test_what_is_no_finite_number_is_an_error(file, value):
    answer = Answered("my prompt", "my answer", {"value": value}, "data.jsonl:7")
    with pytest.raises(RewardError) as caught:
        make_rewards([f"{file}:wrong"]).table([answer])
    message = str(caught.value)
    assert message.startswith(f"data.jsonl:7: the reward {file}:wrong returned ")
    assert "'my prompt'" in message
    assert "'my answer'" in message


def test_what_a_reward_raises_names_the_sample(file):
    answer = Answered("my prompt", "my answer", {}, "data.jsonl:7")
    with pytest.raises(
        RewardError, match=r"^data.jsonl:7: the reward .*words raised KeyError \('most'"
    ):
        make_rewards([f"{file}:words"]).table([answer])
    with pytest.raises(RewardError, match=r"exact raised .*no text 'answer' or 'completion'"):
        paid("exact", "4")


def test_a_reward_adapter_is_computed_for_all_answers_together(tmp_path):
    calls = []

    class Lengths:
        def of_all(self, answers):
            calls.append(len(answers))
            return [len(each.answer) for each in answers]

    for name in (f"adapter:{tmp_path}", str(tmp_path)):
        rewards = make_rewards([name], adapter=lambda path: Lengths())
        answers = [Answered("p", "ab"), Answered("p", "abc")]
        np.testing.assert_array_equal(rewards.totals(answers), [2, 3])
    assert calls == [2, 2]
    with pytest.raises(RewardError, match="a model is needed"):
        make_rewards([f"adapter:{tmp_path}"])


def test_names_that_are_refused(tmp_path, file):
    (tmp_path / "broken.py").write_text("1/0")
    (tmp_path / "broken.json").write_text('{"type": "integre"}')
    for names, problem in {
        ("exct",): "did you mean exact",
        ("regex:(",): "pattern '\\('",
        ("regex:",): "There is no reward",
        ("length:0",): "number of characters",
        ("length:-3",): "number of characters",
        (f"schema:{tmp_path / 'none.json'}",): "can't be read: No such file",
        (f"schema:{tmp_path / 'broken.json'}",): "not valid: 'integre'",
        (f"{file}:none",): "has no function none",
        (f"{tmp_path / 'broken.py'}:f",): "can't be run \\(ZeroDivisionError",
        (f"{tmp_path / 'none.py'}:f",): "can't be run \\(FileNotFoundError",
        (): "a list of names is needed",
    }.items():
        with pytest.raises(RewardError, match=problem):
            make_rewards(names)
    with pytest.raises(RewardError, match="1 weights for 2 rewards"):
        make_rewards(["exact", "schema"], [1])
    with pytest.raises(RewardError, match="finite numbers"):
        make_rewards(["exact"], [math.nan])


def test_the_text_of_a_prompt():
    assert prompt_text({"prompt": "hello"}) == "hello"
    assert prompt_text({"messages": CHAT}) == "Count."
    assert prompt_text({"prompt": CHAT}) == "Count."
    assert prompt_text({"answer": "4"}) == ""
