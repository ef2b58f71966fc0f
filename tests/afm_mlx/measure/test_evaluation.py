"""Test sets, scores, and the comparison of answers."""

import json
from dataclasses import replace

import pytest

from afm_mlx.config import ModelConfig
from afm_mlx.engine.generation import generate
from afm_mlx.engine.request import Request
from afm_mlx.guidance.call_forms import call_form
from afm_mlx.loading.load import load
from afm_mlx.measure import evaluation
from afm_mlx.measure.evaluation import (
    Evaluation,
    Example,
    GradedAnswer,
    evaluate,
    is_right,
    load_examples,
    natural_comparison,
)
from afm_mlx.tokenizer.tokenizer import load_tokenizer
from tests.tools.cases import each
from tests.tools.model_scripts import FollowsText
from tests.tools.models import random_config, random_model
from tests.tools.zoo_chats import write_family_folder

TOOLS = [{"type": "function", "function": {"name": "look_up"}}]


@pytest.fixture
def tokenizer(tokenizer_folder):
    return load_tokenizer(tokenizer_folder)


def config(rng, context_length) -> ModelConfig:
    """Without int8 keys and values, whose codes depend on what is computed side by side."""
    return random_config(rng, vocab_size=1000, context_length=context_length, kv_bits=None)


def example(index, task, answer, tools=None):
    messages = [{"role": "user", "content": f"What is {index}?"}]
    return Example(task, messages, tools, answer, f"test:{index}")


def test_answers_are_those_of_one_prompt_at_a_time(rng, tokenizer):
    # A random model does not know when to stop; here every fifth token ends an answer.
    tokenizer.eos_token_ids.update(range(0, 1000, 5))
    model = random_model(config(rng, 512), rng)
    examples = [example(i, "a", "the fox " * (i % 4), TOOLS[: i % 2]) for i in range(12)]
    alone = []
    for asked in examples:
        prompt = tokenizer.apply_chat_template(
            asked.messages, tools=asked.tools, add_generation_prompt=True
        )
        most = 2 * len(tokenizer.encode(asked.answer)) + 8
        alone.append(generate(model, tokenizer, prompt, max_tokens=most))
    seen = []
    result = evaluate(
        model, tokenizer, examples, batch_size=5, progress=lambda *counts: seen.append(counts)
    )
    assert [graded.answer for graded in result.answers] == alone
    assert [graded.example for graded in result.answers] == examples
    assert seen == [(done, 12) for done in range(1, 13)]


def test_an_answer_that_fills_the_context_is_wrong_and_no_error(rng, tokenizer):
    tokenizer.eos_token_ids.clear()
    asked = example(0, "a", "a " * 100)
    used = len(tokenizer.apply_chat_template(asked.messages, add_generation_prompt=True))
    model = random_model(config(rng, used + 3), rng)
    assert evaluate(model, tokenizer, [asked]).overall.correct == 0


def test_an_answer_is_right_when_it_is_equal_but_for_white_space_around_it():
    answers = [("b", "the fox"), ("a", " the fox\n"), ("b", "the  fox"), ("b", "")]
    graded = [GradedAnswer(example(0, task, "the fox\n"), answer) for task, answer in answers]
    result = Evaluation(graded, seconds=1)
    scores = [(task, score.correct, score.total) for task, score in result.tasks.items()]
    assert scores == [("b", 1, 3), ("a", 1, 1)]
    assert result.overall.accuracy == 0.5
    assert result.mistakes == graded[2:]


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "N", "schema": SCHEMA}}
CALL = '<executable_start> ```function\n[{"name": "look_up", "arguments": {}}]```<executable_end>'


def record(**changes):
    message = {"role": "user", "content": "What?", "response_format": FORMAT}
    return {"task": "a", "messages": [message], "answer": '{"n": 1}', **changes}


def loaded(tmp_path, *records):
    file = tmp_path / "examples.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    return load_examples(file)


def test_what_is_compared_and_what_an_answer_must_look_like(tmp_path):
    plain = [{"role": "user", "content": "What?"}]
    of_system = [{"role": "system", "content": "", "tools": TOOLS}, *plain]
    examples = loaded(
        tmp_path,
        record(),
        record(compare="text"),
        record(messages=plain, tools=TOOLS, answer=CALL),
        record(messages=of_system, answer="It is."),
        record(messages=plain, compare="json"),
    )
    assert [e.compare for e in examples] == ["json", "text", "calls", "text", "json"]
    made = [(made := e.constraint()) and made.what for e in examples]
    assert made == ["JSON schema", "JSON schema", "tool calls", "tool calls", None]


def test_an_answer_that_is_cut_off_before_its_constraint_is_met_is_wrong(rng, tokenizer, tmp_path):
    schema = {"type": "array", "items": {"const": "x"}, "minItems": 50}
    asked = {"type": "json_schema", "json_schema": {"name": "N", "schema": schema}}
    message = {"role": "user", "content": "What?", "response_format": asked}
    examples = loaded(tmp_path, record(messages=[message], answer='["x"]'))
    result = evaluate(random_model(config(rng, 512), rng), tokenizer, examples, constrained=True)
    assert result.overall.correct == 0
    assert result.answers[0].answer.startswith('["x", "x"')


def calls(*calls, before="", after=""):
    return f"{before}<executable_start> ```function\n{json.dumps(calls)}```<executable_end>{after}"


CALL_OF_F = {"name": "f", "arguments": {"a": 1, "b": [True, "x"]}}
TURNED = {"arguments": {"b": [True, "x"], "a": 1.0}, "name": "f"}


@each(
    "comparison, answer, expected, right",
    [
        ("text", " the fox\n", "the fox", True),
        ("text", "the  fox", "the fox", False),
        ("text", '{"a":1}', '{"a": 1}', False),
        ("json", ' {"b": [1, 2.0], "a": null}', '{"a":null,"b":[1.0,2]}', True),
        ("json", '{"a": [1, 2]}', '{"a": [2, 1]}', False),
        ("json", '{"a": 1}', '{"a": true}', False),
        ("json", "[0, 1]", "[false, true]", False),
        ("json", '{"a": 1, "b": null}', '{"a": 1}', False),
        ("json", '{"a": "x"}', '{"a": "x "}', False),
        ("json", '{"a": 1}', "[1]", False),
        ("json", "[1]", '{"a": 1}', False),
        ("json", '{"a": 1', '{"a": 1}', False),
        ("json", "[" * 100_000, "[]", False),
        ("calls", calls(TURNED), calls(CALL_OF_F), True),
        ("calls", calls(CALL_OF_F, CALL_OF_F), calls(CALL_OF_F), False),
        ("calls", calls(CALL_OF_F, {"name": "g"}), calls({"name": "g"}, CALL_OF_F), False),
        ("calls", calls(CALL_OF_F, before="Sure. "), calls(CALL_OF_F), False),
        ("calls", calls(CALL_OF_F, before="Sure. \n"), calls(CALL_OF_F, before="Sure."), True),
        ("calls", calls(CALL_OF_F, after="x"), calls(CALL_OF_F), False),
        (
            "calls",
            calls({"name": "g", "arguments": CALL_OF_F["arguments"]}),
            calls(CALL_OF_F),
            False,
        ),
        ("calls", "Sure.", calls(CALL_OF_F), False),
        ("calls", calls(CALL_OF_F)[:-20], calls(CALL_OF_F), False),
    ],
)
def test_answers_are_compared_as_what_they_are(comparison, answer, expected, right):
    assert is_right(answer, expected, comparison) is right
    assert is_right(expected, expected, comparison)


@each(
    "expected, has_format, comparison",
    [
        ('{"a": 1}', True, "json"),
        ('{"a": 1}', False, "text"),
        ("a: 1", True, "text"),
        (calls(CALL_OF_F), False, "calls"),
        (calls(CALL_OF_F), True, "calls"),
        ("<executable_start> f()<executable_end>", False, "text"),
    ],
)
def test_the_comparison_follows_from_the_expected_answer(expected, has_format, comparison):
    assert natural_comparison(expected, has_format) == comparison
    assert is_right(expected, expected, comparison)
    assert not any(is_right("a: 1", "a: 1", form) for form in ("json", "calls"))


@pytest.mark.parametrize("family", ["qwen3", "llama3", "lfm2"])
def test_calls_of_zoo_models_are_compared_in_their_own_form(tmp_path, family):
    folder = write_family_folder(tmp_path / "model", family, max_position_embeddings=2048)
    model, tokenizer = load(folder)
    parameters = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    call = (
        '<executable_start> ```function\n[{"name": "f", "arguments": {"a": 1}}]```<executable_end>'
    )
    form = call_form(tokenizer)
    arguments = "a=1" if family == "lfm2" else '{"a": 1}'
    made = form.opening + form.head_of("f") + arguments + form.tail + form.closing
    assert is_right(made, call, "calls", form)
    assert not is_right(made.replace("1", "2"), call, "calls", form)
    assert not is_right(call, call, "calls", form)
    assert not is_right(made[:-3], call, "calls", form)
    question = [{"role": "user", "content": "q"}]
    asked = Example("t", question, tools, call, "x:1", "calls")
    assert is_right(made, asked.answer, asked.compare, form)
    (graded,) = evaluate(model, tokenizer, [asked], constrained=True).answers
    assert graded.form.name == form.name


@pytest.mark.parametrize("family", ["qwen3", "qwen3 thinking", "harmony"])
def test_models_that_think_answer_at_once(tmp_path, monkeypatch, family):
    model, tokenizer = load(write_family_folder(tmp_path / "model", family))
    said = "<|channel|>final<|message|>Fine." if family == "harmony" else "Fine."
    prompts = []

    def request(prompt, *rest, logits_processors=(), **fields):
        prompts.append(tokenizer.decode(prompt))
        script = [FollowsText(tokenizer, said, len(prompt)), *logits_processors]
        return Request(prompt, *rest, logits_processors=script, **fields)

    monkeypatch.setattr(evaluation, "Request", request)
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 7}}}
    asked = [example(0, "a", "Fine."), example(1, "a", "7")]
    asked[1].messages[0]["response_format"] = schema
    found = evaluate(
        model, tokenizer, [asked[0], replace(asked[1], compare="json")], constrained=True
    )
    assert [(graded.answer, graded.is_right) for graded in found.answers] == [
        ("Fine.", True),
        ("7", True),
    ]
    assert all(prompt.rstrip().endswith("</think>") for prompt in prompts) or family == "harmony"
