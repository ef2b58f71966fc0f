"""The benchmark of JSON schemas, on a handful of them."""

import json

from bench.json_schemas import main

CASES = [
    {"description": "a", "schema": {"type": "null"}, "tests": [{"data": None, "valid": True}]},
    {"description": "b", "schema": False, "tests": []},
    {
        "description": "c",
        "schema": {"not": {"type": "null"}},
        "tests": [{"data": None, "valid": False}],
    },
]


def test_the_table_counts_what_is_honoured(tmp_path, capsys):
    suite, sets = tmp_path / "tests" / "draft2020-12", tmp_path / "data" / "A"
    suite.mkdir(parents=True)
    sets.mkdir(parents=True)
    (suite / "some.json").write_text(json.dumps(CASES))
    for i, schema in enumerate([{"uniqueItems": True}, {"$ref": "x"}, {"type": "boolean"}]):
        (sets / f"{i}.json").write_text(json.dumps(schema))
    main(["--suite", str(tmp_path), "--schemas", str(tmp_path), "--count", "3", "--documents", "2"])
    out = capsys.readouterr().out
    assert "| official suite, 2020-12 | 3 | 2 (66.7 %) | 1 (33.3 %) |" in out
    assert "| A | 3 | 2 (66.7 %) | 1 (33.3 %) |" in out
    assert "A, refused: 1 $ref" in out
    assert "1 valid ones accepted, 0 rejected; 0 invalid ones accepted." in out
    assert "Faults: 0" in out
