"""Evaluation: batched greedy answers against answers one by one."""

import dataclasses
import itertools
import json

import pytest

from afm_mlx.config import ModelConfig
from afm_mlx.engine.generation import stream_generate
from afm_mlx.errors import DataError
from afm_mlx.measure.evaluation import Example, GradedAnswer, evaluate, load_examples
from afm_mlx.tokenizer.tokenizer import load_tokenizer
from tests.tools.models import random_model

SIZES = {
    "vocab_size": 1000,
    "hidden_dim": 32,
    "num_layers": 3,
    "num_kv_reuse_layers": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "rope_theta": 10000.0,
    "kv_bits": None,  # int8 codes depend on what is computed side by side
}


@pytest.fixture
def tokenizer(tokenizer_folder):
    tokenizer = load_tokenizer(tokenizer_folder)
    # A random model does not know when to stop; here every second token ends an answer.
    tokenizer.eos_token_ids.update(range(0, 1000, 2))
    return tokenizer


def example(index, task, answer, tools=None):
    messages = [{"role": "user", "content": f"What is {index}?"}]
    return Example(task, messages, tools, answer, f"test:{index}")


def test_answers_are_those_of_one_prompt_at_a_time(rng, tokenizer):
    model = random_model(ModelConfig(**SIZES, context_length=512), rng)
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    examples = []
    for index in itertools.count():
        blank = example(index, "odd" if len(examples) % 2 else "even", "", tools[: index % 2])
        prompt = tokenizer.apply_chat_template(
            blank.messages, tools=blank.tools, add_generation_prompt=True
        )
        steps = list(stream_generate(model, tokenizer, prompt, max_tokens=8))
        if steps[-1].finish_reason != "stop":
            continue  # a random model may also go on forever
        answer = "".join(step.text for step in steps) + "!" * (len(examples) in (1, 3, 4))
        examples.append(dataclasses.replace(blank, answer=answer))
        if len(examples) == 12:
            break
    seen = []
    result = evaluate(
        model, tokenizer, examples, batch_size=5, progress=lambda *counts: seen.append(counts)
    )
    assert [o.example for o in result.mistakes] == [examples[i] for i in (1, 3, 4)]
    assert [o.answer + "!" for o in result.mistakes] == [examples[i].answer for i in (1, 3, 4)]
    assert {task: (s.correct, s.total) for task, s in result.tasks.items()} == {
        "even": (5, 6),
        "odd": (4, 6),
    }
    assert result.overall.accuracy == 9 / 12
    assert seen[-1] == (12, 12)


def test_an_answer_that_fills_the_context_is_wrong_and_no_error(rng, tokenizer):
    tokenizer.eos_token_ids.clear()
    blank = example(0, "a", "a " * 100)
    used = len(tokenizer.apply_chat_template(blank.messages, add_generation_prompt=True))
    model = random_model(ModelConfig(**SIZES, context_length=used + 3), rng)
    result = evaluate(model, tokenizer, [blank])
    assert result.overall.correct == 0


def test_a_prompt_that_does_not_fit_names_its_line(rng, tokenizer):
    model = random_model(ModelConfig(**SIZES, context_length=10), rng)
    with pytest.raises(DataError, match="test:7: The prompt needs"):
        evaluate(model, tokenizer, [example(7, "a", "")])


def test_white_space_counts_inside_an_answer_only():
    for answer, is_right in [
        ("the fox", True),
        (" the fox\n", True),
        ("the  fox", False),
        ("", False),
    ]:
        assert GradedAnswer(example(0, "a", "the fox\n"), answer).is_right == is_right


def test_the_limit_is_per_task_and_lines_are_counted(tmp_path):
    lines = [{"task": t, "messages": [], "answer": a} for t, a in [("a", " x\n"), ("b", "y")] * 3]
    file = tmp_path / "e.jsonl"
    file.write_text("\n\n".join(map(json.dumps, lines)))
    assert [e.task for e in load_examples(file, limit=2)] == ["a", "b", "a", "b"]
    assert load_examples(file)[-1].where == f"{file}:11"
