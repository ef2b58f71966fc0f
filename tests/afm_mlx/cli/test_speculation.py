"""Draft tokens from the command line: `--draft-model`, `--prompt-lookup`, `--num-draft-tokens`."""

import json
import shutil

import pytest

PROMPT = "word word word list of a word word list of a"


@pytest.fixture
def with_draft(folder, tmp_path):
    """A model folder whose own draft model is a copy of itself."""
    model = tmp_path / "drafted"
    shutil.copytree(folder, model)
    shutil.copytree(folder, model / "draft")
    return model


def test_generate_answers_the_same_with_draft_tokens(with_draft, done, fails):
    argv = ("generate", "--model", with_draft, "-p", PROMPT, "-m", 30)
    plain = json.loads(done(*argv, "--json"))
    assert "proposed" not in plain
    for more in (("--draft-model", "auto"), ("--draft-model", with_draft), ("--prompt-lookup",)):
        found = json.loads(done(*argv, *more, "--num-draft-tokens", 3, "--json"))
        assert found["tokens"] == plain["tokens"]
        assert 0 <= found["accepted"] <= found["proposed"]
        if "auto" in more:
            assert found["accepted"] == found["proposed"] > 0  # the draft is the model itself
    shown = done(*argv, "--draft-model", "auto", "--num-draft-tokens", 2).splitlines()
    assert shown[-1].startswith("Drafts: ")
    assert "tokens were accepted" in shown[-1]
    no_draft = ("generate", "--model", with_draft / "draft", "-p", PROMPT, "--draft-model", "auto")
    assert "has no draft model of its own" in fails(*no_draft)


def test_bench_compares_with_and_without(with_draft, done, fails):
    argv = ("bench", "--model", with_draft, "-p", 6, "-g", 12, "-n", 1)
    facts = json.loads(
        done(*argv, "--draft-model", "auto", "--num-draft-tokens", "1,3", "-b", "1,2", "-o", "json")
    )
    rows = facts["results"]
    assert [(r["batch"], r["num_draft_tokens"]) for r in rows] == [(1, 1), (1, 3), (2, 1), (2, 3)]
    for row in rows:
        assert row["same_answers"]
        assert row["accepted"] == 1.0
        assert row["times"] > 0
    given = ("--draft-model", "auto", "--draft-acceptance", 0.5, "--num-draft-tokens", 2)
    [row] = json.loads(done(*argv[:-4], "-g", 60, "-n", 2, *given, "-o", "json"))["results"]
    assert 0.2 < row["accepted"] < 0.8
    assert row["same_answers"]
    text = done(*argv, "--prompt-lookup")
    assert "none, prompt look-up" in text
    assert len(done(*argv, "--prompt-lookup", "-o", "csv").splitlines()) == 2
    for wrong, says in (
        (("--num-draft-tokens", 2), "--num-draft-tokens needs --draft-model"),
        (("--draft-acceptance", 0.7), "--draft-acceptance needs --draft-model"),
        (
            ("--prompt-lookup", "--draft-acceptance", 0.7),
            "needs --draft-model, and no --prompt-lookup",
        ),
        (("--prompt-lookup", "-d", 5), "--depth can't be combined with draft tokens"),
        (("--prompt-lookup", "--num-draft-tokens", "0"), "is out of range|allowed"),
    ):
        line = fails(*argv, *wrong)
        assert any(part in line for part in says.split("|")), line
    preset = ("bench", "--preset", "afm-nano", "--random-weights", "-p", 4, "-g", 4, "-n", 1)
    assert "it is the name of one" in fails(*preset, "--draft-model", "auto")
