"""Evaluation: batched greedy answers against answers one by one."""

import json

import pytest

from afm_mlx.config import ModelConfig
from afm_mlx.engine.generation import generate
from afm_mlx.errors import DataError
from afm_mlx.measure.evaluation import Evaluation, Example, GradedAnswer, evaluate, load_examples
from afm_mlx.tokenizer.tokenizer import load_tokenizer
from tests.tools.models import random_config, random_model

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


def test_a_prompt_that_does_not_fit_names_its_line(rng, tokenizer):
    with pytest.raises(DataError, match="test:7: The prompt needs"):
        evaluate(random_model(config(rng, 10), rng), tokenizer, [example(7, "a", "")])


def test_an_answer_is_right_when_it_is_equal_but_for_white_space_around_it():
    answers = [("b", "the fox"), ("a", " the fox\n"), ("b", "the  fox"), ("b", "")]
    graded = [GradedAnswer(example(0, task, "the fox\n"), answer) for task, answer in answers]
    result = Evaluation(graded, seconds=1)
    scores = [(task, score.correct, score.total) for task, score in result.tasks.items()]
    assert scores == [("b", 1, 3), ("a", 1, 1)]
    assert result.overall.accuracy == 0.5
    assert result.mistakes == graded[2:]


def test_the_limit_is_per_task_and_lines_are_counted(tmp_path):
    lines = [{"task": t, "messages": [], "answer": a} for t, a in [("a", " x\n"), ("b", "y")] * 3]
    file = tmp_path / "e.jsonl"
    file.write_text("\n\n".join(map(json.dumps, lines)))
    assert [e.task for e in load_examples(file, limit=2)] == ["a", "b", "a", "b"]
    assert load_examples(file)[-1].where == f"{file}:11"
