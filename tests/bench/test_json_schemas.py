"""The benchmarks of JSON schemas, on a handful of them."""

import json

import pytest

from bench import json_schemas, schema_answers

CASES = [
    {"description": "a", "schema": {"type": "null"}, "tests": [{"data": None, "valid": True}]},
    {"description": "b", "schema": False, "tests": []},
    {
        "description": "c",
        "schema": {"not": {"type": "null"}},
        "tests": [{"data": None, "valid": False}],
    },
]


@pytest.fixture
def folder(tmp_path):
    suite, sets = tmp_path / "tests" / "draft2020-12", tmp_path / "data" / "A"
    suite.mkdir(parents=True)
    sets.mkdir(parents=True)
    (suite / "some.json").write_text(json.dumps(CASES))
    for i, schema in enumerate([{"uniqueItems": True}, {"$ref": "x"}, {"type": "boolean"}]):
        (sets / f"{i}.json").write_text(json.dumps(schema))
    return tmp_path


def test_the_table_counts_what_is_honoured(folder, capsys):
    where = ["--suite", str(folder), "--schemas", str(folder), "--count", "3"]
    json_schemas.main([*where, "--documents", "2"])
    out = capsys.readouterr().out
    assert "| official suite, 2020-12 | 3 | 2 (66.7 %) | 1 (33.3 %) |" in out
    assert "| A | 3 | 2 (66.7 %) | 1 (33.3 %) |" in out
    assert "A, refused: 1 $ref" in out
    assert "1 valid ones accepted, 0 rejected; 0 invalid ones accepted." in out
    assert "Faults: 0" in out


def test_answers_of_models_are_validated(folder, capsys):
    where = ["--suite", str(folder), "--schemas", str(folder), "--count", "3"]
    schema_answers.main([*where, "--temperatures", "0", "5", "--max-tokens", "20"])
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line[:1] == "|"]
    answers, whole, completed, invalid, failed, refused = zip(
        *(row[2:8] for row in rows[2:]), strict=True
    )
    assert [int(n) for n in answers] == [2] * 8
    assert [int(a) + int(b) for a, b in zip(whole, completed, strict=True)] == [2] * 8
    assert {int(n) for n in (*invalid, *failed, *refused)} == {0}
