"""`afm-mlx perplexity` and `afm-mlx evaluate`."""

import json

import numpy as np

from tests.tools.cli import example, lines


def test_perplexity(folder, run, fails, tmp_path):
    assert "heldout.jsonl" in fails("perplexity", "--model", folder)
    lines(folder / "heldout.jsonl", *({"text": f"Document {i} of the fox."} for i in range(5)))
    argv = ("perplexity", "--model", folder)
    facts = json.loads(run(*argv, "--json")[1])
    assert facts["samples"] == 5
    assert np.isfinite(facts["perplexity"] + facts["standard_error"] + facts["tokens_per_second"])
    status, out, err = run(*argv, "--data-path", folder / "heldout.jsonl")
    assert (status, err) == (0, "")
    assert f"Perplexity: {facts['perplexity']:.3f} ± {facts['standard_error']:.3f}" in out
    two = [json.loads(run(*argv, "--json", "--num-samples", 2, "--seed", s)[1]) for s in (1, 1, 2)]
    assert two[0]["perplexity"] == two[1]["perplexity"]
    assert two[0]["samples"] == 2


def test_bad_documents_are_one_line(folder, fails, tmp_path):
    for content, says in [
        (b'{"text": "a"}\n{"text"', "d.jsonl:2: this is not JSON"),
        (b'{"text": "a"}\n\n{"words": "b"}', "d.jsonl:3: a document with the keys words"),
        (b'{"text": 5}', "d.jsonl:1: 'text' is a int"),
        (b'{"messages": [{"role": "robot", "content": "x"}]}', "d.jsonl:1: messages[0]"),
        (b'{"prompt": 1, "completion": "x"}', "d.jsonl:1: 'prompt' is a int"),
        (b"5", "d.jsonl:1: a JSON int is no document"),
        (b'{"text": "a"}\n{"text": "\xff"}', "d.jsonl:2: this is not UTF-8"),
        (b"\n\n", "holds no documents"),
    ]:
        file = tmp_path / "d.jsonl"
        file.write_bytes(content)
        assert says in fails("perplexity", "--model", folder, "--data-path", file)


def test_evaluate(folder, run, fails):
    argv = ("evaluate", "--model", folder)
    assert "evaluation.jsonl" in fails(*argv)
    lines(
        folder / "evaluation.jsonl",
        *(example(task, f"What is {i}?", "Nothing.") for i in range(3) for task in ("b", "a")),
    )
    status, out, err = run(*argv, "--show-errors", 2, "--limit", 2)
    assert (status, err) == (0, "")
    assert out.count("expected: 'Nothing.'") == out.count("got:  ") == 2
    table = out[out.index("task") :].splitlines()
    assert [row.split() for row in table] == [
        ["task", "correct", "of", "accuracy"],
        ["b", "0", "2", "0.0%"],
        ["a", "0", "2", "0.0%"],
        ["all", "0", "4", "0.0%"],
    ]
    lines(folder / "heldout.jsonl", {"text": "The fox."})
    facts = json.loads(run(*argv, "--json", "--show-errors", 1, "--batch-size", 2)[1])
    assert facts["overall"] == {"correct": 0, "total": 6, "accuracy": 0.0}
    assert facts["errors"][0]["where"].endswith("evaluation.jsonl:1")
    assert facts["perplexity"]["tokens"] > 2


def test_bad_examples_are_one_line(folder, fails, tmp_path):
    for record, says in [
        ({"task": "a", "messages": []}, "e.jsonl:1: 'answer' is missing"),
        ({"task": 5, "messages": [], "answer": ""}, "e.jsonl:1: 'task' is int"),
        ([], "e.jsonl:1: this is a JSON list"),
        (example("a", "the fox " * 300, ""), "e.jsonl:1: The prompt needs"),
        ({"task": "a", "messages": [], "answer": ""}, "e.jsonl:1: messages is empty"),
    ]:
        file = lines(tmp_path / "e.jsonl", record)
        assert says in fails("evaluate", "--model", folder, "--data", file)


def test_an_empty_or_missing_test_set_is_one_line(folder, fails, tmp_path):
    file = lines(tmp_path / "e.jsonl")
    assert "holds no examples" in fails("evaluate", "--model", folder, "--data", file)
    assert "can't be read" in fails("evaluate", "--model", folder, "--data", tmp_path / "no.jsonl")
