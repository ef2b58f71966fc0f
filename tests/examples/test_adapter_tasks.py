"""The tasks of the example adapters: reproducible, split by value, and answered by what the prompt says."""

from __future__ import annotations

import importlib.util
import itertools
import json
import random
import re
import string
from pathlib import Path
from types import ModuleType

import pytest

from afm_mlx.adapters.adapter_folder import TENSORS_NAME, load_adapter
from afm_mlx.loading.resolve import resolve_model

EXAMPLES = Path(__file__).parents[2] / "examples"
import inbox  # noqa: E402
import measure  # noqa: E402
import values  # noqa: E402


@pytest.fixture
def build() -> ModuleType:
    """The script; another example has one of that name, too."""
    spec = importlib.util.spec_from_file_location("adapters_build", EXAMPLES / "adapters/build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def draw(seed: int, count: int) -> list[inbox.Inquiry]:
    drawer = values.Values(random.Random(seed), "test")
    return [inbox.draw_inquiry(drawer) for _ in range(count)]


def take(task: str, seed: int, split: str = "train") -> list[list[inbox.Message]]:
    return list(itertools.islice(inbox.training_chats(task, seed, split), 50))


def test_equal_seeds_give_equal_chats(task, seed):
    assert take(task, seed) == take(task, seed)
    assert take(task, seed) != take(task, seed + 1)
    assert take(task, seed) != take(task, seed, "valid")
    assert inbox.test_examples(task, seed, 5) == inbox.test_examples(task, seed, 5)
    assert inbox.switching_examples(seed, 3) == inbox.switching_examples(seed, 3)


def test_values_of_the_test_split_never_occur_in_training(task, seed, drawn):
    list(itertools.islice(inbox.training_chats(task, seed), 500))
    inbox.test_examples(task, seed, 100)
    inbox.switching_examples(seed, 20)
    assert len(drawn["train"]) > 500
    assert len(drawn["test"]) > 100
    assert not drawn["train"] & drawn["test"]


def test_redaction_hides_all_personal_values_and_keeps_every_other_word(seed):
    for inquiry in draw(seed, 200):
        answer = inbox.redact(inquiry)
        assert not re.search(r"\d", answer), "a time, date, amount or order is left"
        pattern = re.sub(r"\\\[[A-Z]+\\\]", "(.+?)", re.escape(answer))
        match = re.fullmatch(pattern, inquiry.text)
        assert match is not None, (inquiry.text, answer)
        kinds = [slot.rstrip("0123456789") for slot in inquiry.slots]
        assert {tag for kind in kinds if (tag := inbox.TAGS.get(kind))} == set(
            re.findall(r"\[[A-Z]+\]", answer)
        )
        names = [value for slot, value in inquiry.slots.items() if slot.startswith("name")]
        assert all(name not in answer.split() for name in names)


def test_every_problem_and_wish_is_one_todo_whose_values_the_message_has(seed):
    for inquiry in draw(seed, 200):
        lines = inbox.todo(inquiry).split("\n")
        assert len(lines) == len(inquiry.clauses) == len(inquiry.sentences) - 1
        for line in lines:
            assert line.startswith("- [ ] ")
            _, *words = line.removeprefix("- [ ] ").split()
            copied = [word for word in words if word[0] in string.ascii_uppercase + string.digits]
            assert all(word in inquiry.text for word in copied), (inquiry.text, line)


def test_the_most_urgent_problem_decides_where_a_message_goes(seed):
    seen = set()
    for inquiry in draw(seed, 200):
        answer = dict(line.split(": ") for line in inbox.triage(inquiry).split("\n"))
        problems = [clause for clause in inquiry.clauses if clause.priority is not None]
        for priority in inbox.PRIORITIES:
            teams = [clause.team for clause in problems if clause.priority == priority]
            if teams:
                expected = (priority, teams[0], inquiry.slots["name"])
                break
        assert (answer["Priority"], answer["Team"], answer["Customer"]) == expected
        seen.add(answer["Priority"])
    assert seen == set(inbox.PRIORITIES)


def test_every_wording_has_the_values_of_its_todo_and_belongs_to_one_clause(slots):
    clauses = (*inbox._PROBLEMS, *inbox._WISHES)
    for clause in clauses:
        for wording in clause.wordings:
            assert slots(clause.todo) <= slots(wording), wording
    wordings = [wording for clause in clauses for wording in clause.wordings]
    assert len(wordings) == len(set(wordings))


def test_a_switching_chat_asks_all_tasks_about_one_message(seed):
    for chat in inbox.switching_examples(seed, 10):
        assert {example["task"] for example in chat} == set(inbox.TASKS)
        *_, last = chat
        asked = [message["content"] for message in last["messages"] if message["role"] == "user"]
        assert len({question.partition("\n")[2] for question in asked}) == 1
        for before, after in itertools.pairwise(chat):
            answer = {"role": "assistant", "content": before["answer"]}
            assert after["messages"][:-1] == [*before["messages"], answer]


def test_one_command_makes_a_small_adapter_and_measures_it(
    build, rng, seed, tmp_path, monkeypatch, capsys
):
    task = str(rng.choice(list(inbox.TASKS)))
    old = tmp_path / "old"
    old.mkdir()
    lines = (resolve_model("afm-nano") / "evaluation.jsonl").read_text().splitlines()
    (old / "evaluation.jsonl").write_text(lines[0])
    monkeypatch.setattr(measure, "resolve_model", lambda name: old)
    for name, count in {"_VALID": 2, "_TEST": 2, "_SHIPPED": 1}.items():
        monkeypatch.setattr(build, name, count)
    out = tmp_path / "out"
    argv = ["--out", str(out), "--seed", str(seed), "--only", task, "--examples", "4"]
    assert build.main([*argv, "--iters", "1"]) == 0
    assert f"| `{task}` |" in capsys.readouterr().out

    folder = out / "adapters" / task
    assert {file.name for file in folder.iterdir()} == {
        TENSORS_NAME,
        "adapter_config.json",
        "README.md",
        "evaluation.jsonl",
    }
    tensors, config = load_adapter(folder)
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"mlx.core.float16"}
    assert (config.rank, config.scale) == (16, 1.0)
    assert not re.search(r"@[A-Z_]+@", (folder / "README.md").read_text())
    (example,) = map(json.loads, (folder / "evaluation.jsonl").read_text().splitlines())
    assert example in inbox.test_examples(task, seed, 2)

    before = {file: file.stat().st_mtime_ns for file in out.rglob("*.safetensors")}
    assert build.main([*argv, "--iters", "1"]) == 0
    assert before == {file: file.stat().st_mtime_ns for file in out.rglob("*.safetensors")}


def test_the_command_prints_training_chats(capsys):
    inbox.main(["todo", "3", "--seed", "5"])
    lines = [json.loads(line)["messages"] for line in capsys.readouterr().out.splitlines()]
    assert lines == list(itertools.islice(inbox.training_chats("todo", 5), 3))
    inbox.main([])
    shown = capsys.readouterr().out
    assert all(f"\n{task}:\n" in shown for task in inbox.TASKS)
