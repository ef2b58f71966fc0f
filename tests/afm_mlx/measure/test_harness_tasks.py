"""Tasks of lm-eval are found, run, written and compared, offline."""

import json

import lm_eval
import nltk
import numpy as np
import pytest
from lm_eval.tasks import TaskManager

from afm_mlx.errors import DataError, RequestError
from afm_mlx.measure import harness_tasks
from afm_mlx.measure.comparison import Score
from afm_mlx.measure.harness_model import HarnessModel
from afm_mlx.measure.harness_tasks import find_tasks, question_scores, run_tasks
from tests.tools.cli import write_folder
from tests.tools.harness_tasks import (
    INSTRUCTIONS,
    write_answers,
    write_choices,
    write_ifeval,
    write_task,
    write_texts,
)
from tests.tools.server import running_server


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """lm-eval records the machine's packages, which takes seconds, and so does listing its own tasks."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda storage: None)

    def manager(**options):
        return TaskManager(**options | {"include_defaults": False})

    monkeypatch.setattr(harness_tasks, "TaskManager", manager)


@pytest.fixture
def tasks(tmp_path):
    return tmp_path / "tasks"


@pytest.fixture
def model(tmp_path, spm_bpe, rng):
    return HarnessModel(str(write_folder(tmp_path / "model", spm_bpe, rng)))


def test_tasks_are_found_by_name_and_pattern(tasks):
    write_choices(tasks, 4, "one_a")
    write_choices(tasks, 4, "one_b")
    assert find_tasks(["one_*"], tasks).match_tasks(["one_*"]) == ["one_a", "one_b"]
    for names, folder, says in [
        (["one_a", "one_c"], tasks, r"no task 'one_c' \(did you mean one_\w\?\)"),
        (["hellaswag"], None, "no task 'hellaswag'"),
        (["one_a"], tasks / "no", "There is no folder"),
    ]:
        with pytest.raises(DataError, match=says):
            find_tasks(names, folder)


def test_results_are_written_as_lm_eval_writes_them(model, tasks, tmp_path):
    names = [write_choices(tasks, 6), write_texts(tasks, 3)]
    manager = find_tasks(names, tasks)
    out = tmp_path / "out"
    options = {"limit": 5, "num_fewshot": None, "log_samples": True, "bootstrap_iters": 0}
    results, file = run_tasks(model, "a/b:c", manager, ["nano_*"], out, **options)
    assert file.parent == out / "a__b__c"
    written = json.loads(file.read_text())
    assert written["results"] == json.loads(json.dumps(results["results"], default=float))
    assert written["config"]["model"] == "afm"
    assert written["config"]["model_args"] == {"pretrained": "a/b:c"}
    assert written["max_length"] == model.max_length
    assert "samples" not in written
    (lines,) = file.parent.glob("samples_nano_choices_*.jsonl")
    assert len(lines.read_text().splitlines()) == 5
    scores = question_scores(results)
    assert {key for key, score in scores.items() if score.questions is None} == {
        ("nano_texts", "word_perplexity"),
        ("nano_texts", "bits_per_byte"),
    }
    acc = scores["nano_choices", "acc"]
    assert len(acc.questions) == 5
    assert acc.value == sum(acc.questions) / 5


def test_tasks_that_cannot_run(model, tasks, tmp_path):
    write_choices(tasks, 4, "gone")
    (tasks / "gone.jsonl").unlink()
    code = "output_type: generate_until\nunsafe_code: true\ndoc_to_text: question\ndoc_to_target: gold\n"
    write_task(tasks, "code", [{"question": "a", "gold": "b"}], code)
    write_choices(tasks, 4, "fine")
    yaml = "output_type: generate_until\ndoc_to_text: '{{no_such_field}}'\ndoc_to_target: gold\n"
    write_task(tasks, "wrong", [{"question": "a", "gold": "b"}], yaml)
    (tmp_path / "file").touch()
    for name, out, says in [
        ("gone", "out", "lm-eval can't run gone: FileNotFoundError: .*gone.jsonl"),
        ("wrong", "out", "lm-eval can't run wrong: UndefinedError: 'no_such_field' is undefined"),
        ("code", "out", "runs code that the model writes.*--confirm-run-unsafe-code"),
        ("fine", "file", "The results can't be written to .*file"),
    ]:
        with pytest.raises(DataError, match=says):
            run_tasks(model, "model", find_tasks([name], tasks), [name], tmp_path / out)
    other = write_answers(tasks, 4)
    model.batch_size = "many"  # a defect of ours stays one
    with pytest.raises(RequestError, match="max_batch"):
        run_tasks(model, "model", find_tasks([other], tasks), [other], tmp_path / "out")
    model.batch_size = 2
    options = {"confirm_run_unsafe_code": True}
    run_tasks(model, "model", find_tasks(["code"], tasks), ["code"], tmp_path / "out", **options)


def test_scores_of_groups_and_filters():
    def sample(filtered, **metrics):
        return {"filter": filtered, **metrics}

    results = {
        "results": {
            "all": {"alias": "all", "acc,none": 0.75, "acc_stderr,none": 0.1, "sample_len": 4},
            "one": {"acc,none": 1.0, "f1,none": 0.9},
            "two": {"acc,none": 2 / 3},
            "text": {"exact_match,strict": 0.5, "exact_match,loose": np.float64(1.0)},
            "macro": {"acc,none": 5 / 6},
        },
        "group_subtasks": {"all": ["inner"], "inner": ["one", "two"], "macro": ["one", "two"]},
        "samples": {
            "one": [sample("none", acc=1.0, f1=(1, 0))],
            "two": [sample("none", acc=each) for each in (True, np.bool_(False), np.int64(1))],
            "text": [sample(f, exact_match=v) for f, v in
                     [("strict", 0), ("strict", 1), ("loose", 1), ("loose", 1)]],
        },
    }  # fmt: skip
    assert question_scores(results) == {
        ("all", "acc"): Score(0.75, [1, 1, 0, 1]),
        ("one", "acc"): Score(1.0, [1]),
        ("one", "f1"): Score(0.9),
        ("two", "acc"): Score(2 / 3, [1, 0, 1]),
        ("text", "exact_match,strict"): Score(0.5, [0, 1]),
        ("text", "exact_match,loose"): Score(1.0, [1, 1]),
        ("macro", "acc"): Score(5 / 6),  # the mean of the tasks' scores
    }


def test_ifeval_checks_answers(model, tasks, tmp_path, monkeypatch):
    """All 25 instructions, by lm-eval's own checkers."""
    answers = write_ifeval(tasks)
    monkeypatch.setattr(nltk.data, "path", [str(tasks / "nltk_data")])

    def generate_until(self, requests):
        return [answers[request.args[0]] for request in requests]

    monkeypatch.setattr(HarnessModel, "generate_until", generate_until)
    names = ["canned_ifeval"]
    results, _ = run_tasks(model, "model", find_tasks(names, tasks), names, tmp_path / "out")
    assert len(INSTRUCTIONS) == 25
    for sample in results["samples"]["canned_ifeval"]:
        wanted = sample["doc"]["is_right"]
        assert sample["prompt_level_strict_acc"] == wanted, sample["doc"]
    scores = question_scores(results)
    assert scores["canned_ifeval", "prompt_level_strict_acc"].value == 0.5
    assert scores["canned_ifeval", "inst_level_strict_acc"] == Score(0.5)


def test_lm_evals_clients_drive_the_server(tasks):
    """Chats, completions and texts, as our class answers them."""
    names = [write_answers(tasks, 6), write_texts(tasks, 3)]
    manager = find_tasks(names, tasks)
    nano = HarnessModel("afm-nano")
    folder = nano.tokenizer.name_or_path

    def run(model, name, is_chat, **options):
        options |= {"tasks": [name], "task_manager": manager, "torch_random_seed": None}
        found = lm_eval.simple_evaluate(
            model, apply_chat_template=is_chat, bootstrap_iters=0, **options
        )
        return found["results"][name], [sample["resps"] for sample in found["samples"][name]]

    with running_server(kv="float") as server:
        chats = {"base_url": f"{server.url}/v1/chat/completions", "model": "afm-nano"}
        texts = {"base_url": f"{server.url}/v1/completions", "model": "afm-nano"}
        for name, client, arguments, is_chat in [
            (names[0], "local-chat-completions", chats | {"num_concurrent": 3}, True),
            (names[1], "local-completions", texts | {"tokenizer": folder}, False),
        ]:
            ours, answers = run(nano, name, is_chat)
            theirs, others = run(client, name, is_chat, model_args=arguments)
            for metric, value in ours.items():
                if isinstance(value, float):
                    assert theirs[metric] == pytest.approx(value, abs=1e-3)
            if is_chat:
                assert answers == others
                assert len({text for ((text,),) in answers}) == 6
