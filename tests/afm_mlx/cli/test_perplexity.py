"""`afm-mlx perplexity`."""

import json

import numpy as np

from tests.tools.cli import lines


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
