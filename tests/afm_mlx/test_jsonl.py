"""Lines of data files: which record each kind gives, and what is refused with its place."""

import pytest

from afm_mlx.errors import DataError
from afm_mlx.jsonl import ChatRecord, TextRecord, document_of, read_jsonl
from tests.tools.cases import each

ASKED = {"role": "user", "content": "a"}
ANSWERED = {"role": "assistant", "content": "b"}


@each(
    ("record", "found"),
    [
        ({"text": "a", "id": 1}, TextRecord("a")),
        ({"messages": [ASKED], "tools": [1]}, ChatRecord([ASKED], [1])),
        ({"prompt": "a", "completion": "b"}, ChatRecord([ASKED, ANSWERED])),
        ([ASKED], ChatRecord([ASKED])),
        ({"conversation": [ASKED], "tools": [1]}, ChatRecord([ASKED], [1])),
        ({"tools": [ASKED]}, ChatRecord([ASKED])),
    ],
)
def test_every_kind(record, found):
    assert document_of(record) == found


@each(
    ("record", "words"),
    [
        (5, "a JSON int is not a document"),
        ({}, "the keys none; allowed are"),
        ({"text": "a", "messages": []}, "has 'messages' and 'text'; which one is meant"),
        ({"prompt": "a", "completion": None}, "'completion' is a NoneType; a string is needed"),
        ({"prompt": "a"}, "the keys prompt; allowed are"),
        (
            {"version": 1, "data": [{"text": "a"}]},
            "the records are inside 'data'; .* Take them out",
        ),
    ],
)
def test_what_is_no_document(record, words):
    with pytest.raises(DataError, match=words):
        document_of(record)


def test_lines(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "a"}\r\n\n \n["b"]\n\xff\n')
    lines = read_jsonl(path)
    assert [next(lines), next(lines)] == [(f"{path}:1", {"text": "a"}), (f"{path}:4", ["b"])]
    with pytest.raises(DataError, match=r"data\.jsonl:5: this is not UTF-8 text"):
        next(lines)
    path.write_text("{")
    with pytest.raises(DataError, match=r"data\.jsonl:1: this is not JSON"):
        list(read_jsonl(path))
    with pytest.raises(DataError, match=r"missing\.jsonl can't be read: No such file"):
        list(read_jsonl(tmp_path / "missing.jsonl"))
