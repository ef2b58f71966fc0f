"""`afm-mlx evaluate`."""

import json

import pytest

from afm_mlx.measure.harness_model import HarnessModel
from tests.tools.cli import example, lines, process
from tests.tools.harness_tasks import write_answers, write_choices


def test_tasks_are_scored_and_held_out_text_is_too(folder, done, fails):
    argv = ("evaluate", "--model", folder)
    assert "has no evaluation.jsonl" in fails(*argv)
    lines(
        folder / "evaluation.jsonl",
        *(example(task, f"What is {i}?", "Nothing.") for i in range(3) for task in ("b", "a")),
    )
    out = done(*argv, "--show-errors", 2, "--limit", 2)
    assert out.count("expected: 'Nothing.'") == out.count("got:  ") == 2
    table = out.partition("seconds)\n")[2].splitlines()
    assert [row.split() for row in table] == [
        ["task", "correct", "of", "accuracy"],
        ["b", "0", "2", "0.0%"],
        ["a", "0", "2", "0.0%"],
        ["all", "0", "4", "0.0%"],
    ]
    lines(folder / "heldout.jsonl", {"text": "The fox."})
    facts = json.loads(done(*argv, "--json", "--show-errors", 1, "--batch-size", 2))
    assert facts["overall"] == {"correct": 0, "total": 6, "accuracy": 0.0}
    (error,) = facts["errors"]
    assert error.keys() == {"where", "task", "expected", "got"}
    assert error["where"].endswith("evaluation.jsonl:1")
    assert facts["perplexity"]["tokens"] > 2
    assert f"Perplexity: {facts['perplexity']['perplexity']:.3f} ±" in done(*argv)


def test_with_and_without_constraints(folder, done, write_config, tmp_path):
    schema = {"type": "string", "enum": ["fox"]}
    asked = {"type": "json_schema", "json_schema": {"name": "Animal", "schema": schema}}
    message = {"role": "user", "content": "Who?", "response_format": asked}
    record = {"task": "a", "messages": [message], "answer": '"fox"'}
    file = lines(tmp_path / "e.jsonl", record, example("b", "Who?", "fox"))
    argv = ("evaluate", "--model", folder, "--data", file)
    table = done(*argv, "--constrained", "both").partition("seconds)\n")[2].splitlines()
    assert [row.split() for row in table] == [
        ["task", "correct", "of", "accuracy", "constrained", "accuracy"],
        ["a", "0", "1", "0.0%", "1", "100.0%"],
        ["b", "0", "1", "0.0%", "0", "0.0%"],
        ["all", "0", "2", "0.0%", "1", "50.0%"],
    ]
    both = json.loads(done(*argv, "--constrained", "both", "--json", "--show-errors", 1))
    config = write_config("constrained: always")
    under = json.loads(done(*argv, "-c", config, "--json", "--show-errors", 1))
    assert (both["constrained"], under["constrained"]) == (False, True)
    assert both["overall"]["correct"] == 0
    assert both["under_constraints"]["tasks"] == under["tasks"]
    assert under["tasks"]["a"] == {"correct": 1, "total": 1, "accuracy": 1.0}
    assert [e["task"] for e in both["errors"] + under["errors"]] == ["a", "b"]


def test_bad_examples_are_one_line(folder, fails, tmp_path):
    plain = example("a", "Who?", "{")
    for record, says in [
        ({"task": "a", "messages": []}, "e.jsonl:1: 'answer' is missing"),
        ({"task": 5, "messages": [], "answer": ""}, "e.jsonl:1: 'task' is int"),
        ([], "e.jsonl:1: this is a JSON list"),
        (example("a", "the fox " * 300, ""), "e.jsonl:1: The prompt needs"),
        ({"task": "a", "messages": [], "answer": ""}, "e.jsonl:1: messages is empty"),
        (plain | {"compare": "yaml"}, "1: 'compare' is 'yaml'; allowed are text, json, calls"),
        (plain | {"compare": "calls"}, "1: the answer is to be compared as calls, and is '{'"),
        (plain | {"compare": "json"}, "1: the answer is to be compared as json"),
        (None, "holds no examples"),
    ]:
        file = lines(tmp_path / "e.jsonl", *([] if record is None else [record]))
        assert says in fails("evaluate", "--model", folder, "--data", file)
    argv = ("evaluate", "--model", folder, "--constrained", "always", "--data")
    form = {"type": "json_schema", "json_schema": {"name": "N", "schema": {"type": "thing"}}}
    plain["messages"][0]["response_format"] = form
    assert "e.jsonl:1: The JSON schema" in fails(*argv, lines(tmp_path / "e.jsonl", plain))
    assert "can't be read" in fails(*argv, tmp_path / "no.jsonl")


# -- two files of answers


def test_a_judge_compares_two_files(folder, done, fails, tmp_path):
    a = lines(tmp_path / "a.jsonl", *({"prompt": f"{i}?", "answer": "1 + 1 = 2"} for i in range(3)))
    b = lines(tmp_path / "b.jsonl", *({"prompt": f"{i}?", "answer": "No."} for i in range(4)))
    argv = ("evaluate", "--pairwise", a, b)
    judged = (*argv, "--judge", folder, "--tools", "math,count", "schema")
    facts = json.loads(done(*judged, "--json", "--batch-size", 2))
    assert facts["pairs"] == sum(facts["wins"].values()) == len(facts["verdicts"]) == 3
    assert facts["unmatched"] == [0, 1]
    assert facts["interval"][0] < facts["win_rate"] < facts["interval"][1]
    assert facts["verdicts"][1]["a"] == f"{a}:2"
    table = done(*judged).splitlines()
    assert table[:3] == [f"A: {a}", f"B: {b}", f"Judge: {folder}"]
    assert table[3].split() == ["pairs", "A", "wins", "B", "wins", "ties"]
    assert table[4].split() == ["3", *map(str, facts["wins"].values())]
    assert f"{facts['win_rate']:.1%}" in table[5]
    assert table[6] == "Answers without a counterpart: 0 of A, 1 of B."
    for flags, says in [
        (argv, "--judge is missing"),
        ((*judged, "--model", folder), "--model is of no use with --pairwise"),
        ((*judged, "--num-shots", 2), "--num-shots needs --tasks"),
        ((*judged, "--show-errors", 2), "--show-errors is for the examples of a file"),
        ((*argv[:1], "--judge", folder), "--judge needs --pairwise"),
        ((*argv, "--judge", folder, "--tools", "web"), "There is no tool 'web'"),
        (("evaluate", "--pairwise", a, tmp_path / "no.jsonl", "--judge", folder), "can't be read"),
    ]:
        assert says in fails(*flags)


# -- tasks of lm-evaluation-harness


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A folder of tasks: 4 questions with answers to choose from, and 4 with free answers.

    lm-eval records the machine's packages, which takes seconds, and so does listing its own tasks.
    """
    from lm_eval.tasks import TaskManager

    from afm_mlx.measure import harness_tasks

    def manager(**options):
        return TaskManager(**options | {"include_defaults": False})

    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda storage: None)
    monkeypatch.setattr(harness_tasks, "TaskManager", manager)
    write_choices(tmp_path / "tasks", 4, "choices")
    write_answers(tmp_path / "tasks", 4, "answers")
    return tmp_path / "tasks"


@pytest.fixture
def argv(folder, tasks, tmp_path):
    paths = ("--include-path", tasks, "--output-dir", tmp_path / "out")
    return ("evaluate", "--model", folder, "--tasks", "choices,answers", *paths)


def test_tasks_of_lm_eval(argv, done, tmp_path, folder):
    out = done(*argv, "--limit", 3, "--no-apply-chat-template", "--log-samples")
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines()[2:]]
    assert [(row[0], row[4]) for row in table if len(row) > 6][2:] == [
        ("answers", "exact_match"),
        ("choices", "acc"),
        ("", "acc_norm"),
    ]
    assert out.startswith(f"Model: {folder}\nResults: ")
    (results,) = (tmp_path / "out").rglob("results_*.json")
    assert f"Results: {results}\n" in out
    assert json.loads(results.read_text())["n-samples"]["choices"]["effective"] == 3
    assert len([*results.parent.glob("samples_*.jsonl")]) == 2
    assert [*(tmp_path / "out").glob("answers-*")] == []
    facts = json.loads(done(*argv, "--json", "--num-shots", 0, "--max-tokens", 2))
    (found,) = facts["models"].values()
    assert found["results"]["choices"]["sample_len"] == 4
    assert "differences" not in facts


def test_chats_and_plain_prompts(argv, run, monkeypatch):
    seen = []
    encode = HarnessModel.tok_encode

    def seeing(self, string, *args, **kwargs):
        seen.append(string)
        return encode(self, string, *args, **kwargs)

    monkeypatch.setattr(HarnessModel, "tok_encode", seeing)
    for flags, is_chat, turns in [
        ((), True, 2),
        (("--no-apply-chat-template", "--num-shots", 1), False, 0),
        (("--num-shots", 1), True, 2),
        (("--num-shots", 1, "--fewshot-as-multiturn"), True, 4),
    ]:
        seen.clear()
        assert run(*argv, "--limit", 2, *flags)[0] == 0
        assert {text.startswith("<turn_start> system") for text in seen} == {is_chat}
        assert {text.count("<turn_end>") for text in seen if "assistant<n>" in text[-20:]} <= {
            turns
        }


def test_an_interrupted_evaluation_continues(argv, run, done, monkeypatch, tmp_path):
    keep, count = HarnessModel._keep, []

    def keeping(self, key, answer):
        keep(self, key, answer)
        count.append(key)
        if len(count) == 18:
            raise KeyboardInterrupt

    whole = json.loads(done(*argv, "--json"))
    monkeypatch.setattr(HarnessModel, "_keep", keeping)
    status, out, err = run(*argv, "--json")
    assert (status, out) == (130, "")
    assert f"interrupted. The answers so far are in {tmp_path / 'out'}: the same command" in err
    (file,) = (tmp_path / "out").glob("answers-*")
    status, out, err = run(*argv, "--json", "--max-tokens", 5)
    assert status == 0
    assert f"starts from the first request; {file} is of another model or other options" in err
    assert file.exists()
    count.clear()
    status, out, err = run(*argv, "--json")
    assert status == 0
    assert f"{file} has 18 answers of a run that was interrupted; it continues" in err
    assert len(count) == 2
    assert not file.exists()
    first, second = (
        next(iter(each["models"].values()))["results"] for each in (whole, json.loads(out))
    )
    assert first == second


def test_models_are_compared(argv, done, folder, make_adapter, tmp_path):
    argv = (argv[0], *argv[3:])
    adapter = make_adapter("adapter")
    models = ("--compare", folder, f"{folder}:{adapter}")
    out = done(*argv, *models)
    lines = out.splitlines()
    at = lines.index(f"A: {folder}")
    assert lines[at + 1] == f"B: {folder}:{adapter}"
    rows = [line.split() for line in lines[at + 2 :]]
    assert rows[0] == ["task", "metric", "questions", "A", "B", "B", "-", "A"]
    assert [row[:3] for row in rows[1:4]] == [
        ["choices", "acc", "4"],
        ["choices", "acc_norm", "4"],
        ["answers", "exact_match,first-word", "4"],
    ]
    for row in rows[1:4]:
        first, second, difference, _, margin = row[3:]
        assert abs(float(second) - float(first) - float(difference)) < 2e-4
        assert 0 <= float(margin) < 2
    assert lines[-1].startswith("± is half of the 95 % interval")
    facts = json.loads(done(*argv, *models, "--json"))
    assert len(facts["models"]) == 2
    assert {d["metric"] for d in facts["differences"]} == {
        "acc", "acc_norm", "exact_match,first-word",
    }  # fmt: skip
    assert all(d["of"] == str(folder) for d in facts["differences"])


def test_models_are_compared_in_examples(folder, done, fails, make_adapter, tmp_path):
    file = lines(tmp_path / "e.jsonl", *(example("ab"[i % 2], f"Who? {i}", "x") for i in range(5)))
    models = ("--compare", folder, f"{folder}:{make_adapter('adapter')}", "--data", file)
    rows = [row.split() for row in done("evaluate", *models).splitlines()[2:]]
    assert [row[:4] for row in rows[1:4]] == [
        ["a", "accuracy", "3", "0.0000"],
        ["b", "accuracy", "2", "0.0000"],
        ["all", "accuracy", "5", "0.0000"],
    ]
    assert rows[3][4:] == ["0.0000", "+0.0000", "±", "0.0000"]
    facts = json.loads(done("evaluate", *models, "--json", "--constrained", "both"))
    assert facts["models"][str(folder)]["a,constrained"] == 0
    assert len(facts["differences"]) == 6
    assert "--show-errors is for one model" in fails("evaluate", *models, "--show-errors", 1)


def test_a_task_that_fails_leaves_no_file(argv, fails, tasks, tmp_path):
    (tasks / "choices.jsonl").unlink()
    assert "lm-eval can't run choices, answers: FileNotFoundError" in fails(*argv)
    assert [*(tmp_path / "out").iterdir()] == []


def test_arguments_that_do_not_go_together(folder, fails, tasks):
    for argv, says in [
        (("--num-shots", 2), "--num-shots needs --tasks; leave it out"),
        (("--apply-chat-template",), "--apply-chat-template needs --tasks"),
        (("--tasks", "choices", "--show-errors", 1), "--show-errors is for the examples of a file"),
        (("--tasks", "choices", "--data", "x.jsonl"), "both say what they answer"),
        (("--compare", "a", "b", "--model", "c"), "both say which models run"),
        (("--compare", folder), "--compare has one model"),
        (("--compare", "a", "b", "--adapter-path", "c"), "write MODEL:ADAPTER"),
        (
            ("--tasks", "choice", "--include-path", tasks),
            "no task 'choice' (did you mean choices?)",
        ),
        (("--tasks", "choices", "--include-path", tasks / "no"), "There is no folder"),
    ]:
        assert says in fails("evaluate", *argv)


def test_without_lm_eval_the_error_says_how_to_install_it():
    code = """
import sys
sys.modules["lm_eval"] = None
from afm_mlx.cli import main
sys.exit(main(sys.argv[1:]))
"""
    ended = process("evaluate", "--tasks", "arc_easy", code=code)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(
        "afm-mlx: error: The package lm-eval is not installed. Install it: "
    )
    assert "[evaluate]" in ended.stderr
