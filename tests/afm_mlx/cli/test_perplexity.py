"""`afm-mlx perplexity`."""

import json

import numpy as np

from tests.tools.cli import lines


def test_perplexity(folder, done, fails):
    argv = ("perplexity", "--model", folder)
    assert "has no heldout.jsonl" in fails(*argv)
    lines(folder / "heldout.jsonl", *({"text": f"Document {i} of the fox."} for i in range(5)))
    facts = json.loads(done(*argv, "--json"))
    assert facts["samples"] == 5
    assert np.isfinite(facts["perplexity"] + facts["standard_error"] + facts["tokens_per_second"])
    out = done(*argv, "--data-path", folder / "heldout.jsonl")
    assert f"Perplexity: {facts['perplexity']:.3f} ± {facts['standard_error']:.3f}" in out
    sampled = (*argv, "--json", "--num-samples", 2, "--seed")
    one, same, other = (json.loads(done(*sampled, seed)) for seed in (1, 1, 2))
    assert one["perplexity"] == same["perplexity"] != other["perplexity"]
    assert one["samples"] == 2


def test_what_can_not_be_measured_is_one_line(folder, fails, tmp_path):
    file = tmp_path / "d.jsonl"
    for content, says in [
        (b'{"text": "a"}\n{"text"', "d.jsonl:2: this is not JSON"),
        (b'{"text": "a"}\n\n{"words": "b"}', "d.jsonl:3: a document with the keys words"),
        (b'{"messages": [{"role": "robot", "content": "x"}]}', "d.jsonl:1: messages[0]"),
        (b"\n\n", "holds no documents"),
    ]:
        file.write_bytes(content)
        assert says in fails("perplexity", "--model", folder, "--data-path", file)
    assert "--num-samples" in fails("perplexity", "--num-samples", 0)
    assert "allowed is 2 or more" in fails("perplexity", "--sequence-length", 1)
    assert "no file or folder no.jsonl" in fails("perplexity", "--data-path", "no.jsonl")
