"""The data of the embedded model: reproducible, split by value, and renderable in the real chat format."""

from __future__ import annotations

import itertools
import json
import random
import re
import string

import pytest

pytest.importorskip("tamm", reason="the example trains with tamm: pip install '.[tamm]'")
pytest.importorskip("sentencepiece")

import docstrings
import tasks
import text_tasks
import tone_task
import values


def test_equal_seeds_give_equal_samples(seed):
    first = list(itertools.islice(tasks.training_samples(seed), 50))
    assert first == list(itertools.islice(tasks.training_samples(seed), 50))
    assert first != list(itertools.islice(tasks.training_samples(seed + 1), 50))


def test_each_task_has_its_samples_once(seed):
    samples = tasks.test_samples(seed, 20)
    assert samples == tasks.test_samples(seed, 20)
    assert [s["task"] for s in samples] == [task for task in tasks.TASKS for _ in range(20)]
    assert len({json.dumps(s) for s in samples}) == len(samples)


def test_values_of_the_test_split_never_occur_in_training(seed, drawn):
    list(itertools.islice(tasks.training_samples(seed), 2000))
    tasks.test_samples(seed, 50)
    assert len(drawn["train"]) > 1000
    assert len(drawn["test"]) > 200
    assert not drawn["train"] & drawn["test"]


def test_values_start_where_the_tokenizer_splits(seed):
    """Copied values have the same tokens everywhere only if they start with a capital or a digit."""
    drawer = values.Values(random.Random(seed), "train")
    for kind in values.KINDS:
        for _ in range(50):
            for word in drawer.draw(kind).split():
                assert word in ("am", "pm") or word[0] in string.ascii_uppercase + string.digits


def test_values_refuse_an_unknown_split():
    with pytest.raises(ValueError, match="'valid'"):
        values.Values(random.Random(0), "valid")


def test_answers_follow_from_the_prompt(seed):
    """Equal prompts have equal answers, and an answer holds no number that its prompt lacks."""
    answers: dict[str, str] = {}
    for sample in tasks.test_samples(seed, 60):
        prompt = tasks.render(sample)
        assert answers.setdefault(prompt, sample["answer"]) == sample["answer"]
        for number in re.findall(r"\d+", sample["answer"]):
            assert number in prompt, sample


def test_every_wording_holds_the_values_of_its_answer(slots):
    for lines, summary in text_tasks._THREADS:
        for wordings in itertools.product(*lines):
            assert slots(summary) <= slots(" ".join(wordings)), wordings
    for casual, formal, friendly in (*tone_task._GREETINGS, *tone_task._CLAUSES):
        assert all(slots(formal) <= slots(wording) for wording in casual), casual
        assert slots(friendly) <= slots(formal), formal
    for wordings, *answers in text_tasks._REPLIES:
        assert all(slots(answer) <= slots(w) for answer in answers for w in wordings), wordings


def test_no_wording_belongs_to_two_answers():
    for bank in (tone_task._CLAUSES, tone_task._GREETINGS, text_tasks._REPLIES):
        wordings = [wording for entry in bank for wording in entry[0]]
        assert len(wordings) == len(set(wordings))


def test_every_sample_renders_and_its_labels_are_the_assistants_words(seed, preprocessor):
    for sample in itertools.islice(tasks.training_samples(seed), 100):
        before = json.dumps(sample)
        ids, labels = tasks.encode(preprocessor, sample)
        assert json.dumps(sample) == before, "encoding must not change the sample"
        assert len(ids) == len(labels)
        spoken = [label for label in labels if label != preprocessor.ignored_id]
        said = [m for m in sample["messages"] if m["role"] == "assistant"]
        expected = "".join(tasks.answer_text(m) + "<turn_end>" for m in said)
        assert preprocessor.tokenizer.decode(spoken) == expected


def test_a_prompt_ends_where_its_answer_begins(seed, preprocessor):
    for sample in tasks.test_samples(seed, 2):
        ids, _ = tasks.encode(preprocessor, sample, generate=True)
        prompt = preprocessor.tokenizer.decode(ids)
        assert prompt.endswith("<turn_start> assistant\n")
        assert prompt.count("<turn_start>") == len(sample["messages"]) + 1


def test_structured_answers_are_json_that_fits_the_request(seed):
    for sample in tasks.test_samples(seed, 40):
        if sample["task"] == "extract_event":
            event = json.loads(sample["answer"])
            request = sample["messages"][-1]
            if "response_format" in request:
                schema = request["response_format"]["json_schema"]["schema"]
                assert list(event) == schema["required"] == list(schema["properties"])
            else:
                assert ", ".join(event) in request["content"]
        if sample["task"] == "call_tool":
            body = sample["answer"].removeprefix("<executable_start> ```function\n")
            (call,) = json.loads(body.removesuffix("```<executable_end>"))
            (tool,) = [
                t["function"] for t in sample["tools"] if t["function"]["name"] == call["name"]
            ]
            assert list(call["arguments"]) == tool["parameters"]["required"]


def test_docstrings_are_split_by_file_without_overlap(tmp_path):
    for i in range(200):
        shared = "Every one of the files repeats this docstring in front of its code."
        own = f"The function number {i}, which no other file describes."
        source = f'"""{shared}"""\ndef f():\n    """{own}"""\n'
        (tmp_path / f"module_{i}.py").write_text(source)
    (tmp_path / "broken.py").write_text("def (")
    texts = docstrings.gather(tmp_path)
    assert len(texts.docstrings) + len(texts.held_out) == 201
    assert 0 < len(texts.held_out) < len(texts.docstrings)
    assert not set(texts.docstrings) & set(texts.held_out)
    assert not texts.further
    assert texts == docstrings.gather(tmp_path)


def test_further_texts_are_long_docstrings_comments_and_help_topics(tmp_path):
    names = [f"module_{i}.py" for i in range(40)]
    comment = "A comment that runs\nover more than two lines\nexplains something."
    for name in names:
        body = "\n\n".join(f"{name} {i} is long. " + "It goes on. " * 60 for i in range(3))
        lines = comment.replace("\n", "\n# ")
        (tmp_path / name).write_text(f'"""{body}"""\n# {lines}\n')
    (tmp_path / "pydoc_data").mkdir()
    topic = "The with statement wraps a block in methods of a context manager."
    (tmp_path / "pydoc_data" / "topics.py").write_text(f"topics = {{'with': {topic!r}}}")
    texts = docstrings.gather(tmp_path)
    assert {comment, topic} <= set(texts.further)
    assert not texts.docstrings
    found = {name for name in names if any(name in text for text in texts.further)}
    assert 0 < len(found) < len(names), "held-out files must stay out of training"
