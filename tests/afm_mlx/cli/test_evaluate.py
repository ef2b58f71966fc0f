"""`afm-mlx evaluate`."""

import json

from tests.tools.cli import example, lines


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
    assert "mlx_lm.evaluate" in fails("evaluate", "--tasks", "hellaswag")
