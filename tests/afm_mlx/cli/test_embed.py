"""`afm-mlx embed`: texts of all forms in, JSONL and .npy out."""

import io
import json

import numpy as np
import pytest

from afm_mlx import embed, load
from tests.tools.cases import each
from tests.tools.cli import lines

TEXTS = ["a cat", "tax law of <turn_end>", "the\u2028sea"]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("a cat\ntax law of <turn_end>\r\nthe\u2028sea\n\n", encoding="utf-8")
    return path


def vectors_of(output):
    found = [json.loads(line) for line in output.splitlines()]
    assert [line["index"] for line in found] == list(range(len(found)))
    return np.array([line["embedding"] for line in found], np.float32)


def test_texts_come_from_lines_records_and_standard_input(
    folder, file, done, tmp_path, monkeypatch
):
    argv = ("embed", "--model", folder)
    wanted = embed(*load(folder), TEXTS)
    np.testing.assert_array_equal(vectors_of(done(*argv, file)), wanted)
    records = lines(tmp_path / "records.jsonl", {"text": TEXTS[0], "id": 1}, *TEXTS[1:])
    np.testing.assert_array_equal(vectors_of(done(*argv, records)), wanted)
    monkeypatch.setattr("sys.stdin", io.StringIO(file.read_text(encoding="utf-8")))
    np.testing.assert_array_equal(vectors_of(done(*argv, "-")), wanted)


def test_options_are_those_of_the_library(folder, file, done):
    model, tokenizer = load(folder)
    for flags, options in (
        (("--pool", "mean", "--dimensions", 5), {"pooling": "mean", "dimensions": 5}),
        (("--center", "--batch-size", 1), {"center": True, "batch_size": 1}),
        (("--instruction", "Find it"), {"instruction": "Find it"}),
        (("--query",), {}),
    ):
        found = vectors_of(done("embed", "--model", folder, file, *flags))
        np.testing.assert_allclose(found, embed(model, tokenizer, TEXTS, **options), atol=1e-6)


def test_an_adapter_brings_its_pooling_and_instruction(folder, file, make_adapter, done):
    path = make_adapter("adapter")
    argv = ("embed", "--model", folder, file, "--adapter-path", path)
    plain = {
        flags: done(*argv, *flags)
        for flags in (("--pool", "mean"), ("--pool", "mean", "--instruction", "Find it"), ())
    }
    config = path / "adapter_config.json"
    use = {"pooling": "mean", "instruction": "Find it"}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"embedding": use}))
    by_mean, by_query, by_last = plain.values()
    assert done(*argv) == by_mean
    assert done(*argv, "--query") == by_query
    assert done(*argv, "--pool", "last") == by_last
    assert len({by_mean, by_query, by_last, done(*argv[:4])}) == 4


def test_files_are_written_whole(folder, file, done, fails, tmp_path):
    argv = ("embed", "--model", folder, file, "--output")
    wanted = vectors_of(done(*argv[:-1]))
    matrix, written = tmp_path / "vectors.npy", tmp_path / "vectors.jsonl"
    assert done(*argv, matrix) == done(*argv, written) == ""
    np.testing.assert_array_equal(np.load(matrix), wanted)
    np.testing.assert_array_equal(vectors_of(written.read_text()), wanted)
    assert "a name in .jsonl or .npy is needed" in fails(*argv, tmp_path / "vectors.csv")
    assert "exists" in fails(*argv, matrix)
    file.write_text("a\n" + "b " * 400)
    assert "Text 1: The prompt needs" in fails(*argv, tmp_path / "new.npy")
    assert not (tmp_path / "new.npy").exists()
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith(".")} == set()


@each(
    ("record", "words"),
    [
        ({"text": ""}, "records.jsonl:2: {'text': ''} has no text"),
        ({"texts": "a"}, "has no text"),
        (3, "3 has no text"),
        ({"text": ["a"]}, "has no text"),
    ],
)
def test_records_without_a_text_are_named(folder, fails, tmp_path, record, words):
    path = lines(tmp_path / "records.jsonl", {"text": "a"}, record)
    assert words in fails("embed", "--model", folder, path)


def test_an_empty_line_is_named(folder, fails, tmp_path, monkeypatch):
    """If it were left out, the texts behind it would have other indices than lines."""
    (file := tmp_path / "texts.txt").write_text("a\n \nb\n")
    assert f"{file}:2: the line is empty" in fails("embed", "--model", folder, file)
    monkeypatch.setattr("sys.stdin", io.StringIO("\na"))
    assert "Standard input:1: the line is empty" in fails("embed", "--model", folder, "-")


def test_a_missing_file_is_one_line(fails, tmp_path):
    assert "can't be read" in fails("embed", tmp_path / "none.txt")
    assert "required: FILE" in fails("embed")
