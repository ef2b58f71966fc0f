"""Marked text is the plain string to a template, and what is joined of it has the marks."""

import json

import pytest

from afm_mlx.errors import TokenizerError
from afm_mlx.tokenizer.caller_text import CallerText, free_mark, marked, strings_in

MARK = "\ufdd0"


def test_marked_text_reads_as_the_string():
    text = CallerText("a <b> c", MARK)
    assert text == "a <b> c"
    assert {text: 1}["a <b> c"] == 1
    assert (len(text), "<b>" in text, text.find("<")) == (7, True, 2)
    assert text.split(" ")[1].encode() == f"<{MARK}b{MARK}>{MARK}".encode()
    assert json.dumps({text: 1}, ensure_ascii=False).replace(MARK, "") == '{"a <b> c": 1}'
    assert text.replace("<b>", "<turn_end>").count("<turn_end>") == 1
    assert "".join([repr(text)]).replace(MARK, "") == repr("a <b> c")


def test_strings_of_nested_values():
    loop = {"a": ["x", {"y": ("z",)}]}
    loop["b"] = loop
    assert sorted(strings_in(loop)) == ["a", "b", "x", "y", "z"]
    copied = marked({"a": [1, None, ("b",)]}, MARK)
    assert copied == {"a": [1, None, ("b",)]}
    assert type(copied["a"][2][0]) is CallerText


def test_a_mark_is_a_character_that_no_text_has():
    assert free_mark([chr(c) for c in range(0xFDD0, 0xFDEF)]) == "\ufdef"
    with pytest.raises(TokenizerError, match="every private character"):
        free_mark([chr(c) for c in range(0xFDD0, 0x110000)])
