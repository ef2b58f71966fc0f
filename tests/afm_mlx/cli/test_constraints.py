"""`afm-mlx generate` with what the answer must look like."""

import json
import re

import pytest

from afm_mlx.loading.load import load

KINDS = """
from __future__ import annotations
from dataclasses import dataclass
from typing import Literal
import neighbours
from afm_mlx import fm

class Animals:
    @dataclass
    class Animal:
        \"\"\"An animal.\"\"\"
        name: Literal["fox", "dog"]
        friend: Animals.Animal | None = None

@fm.generable
class Generable:
    size: int = fm.guide(range=(7, 7))

@dataclass
class Even:
    number: int

    def __post_init__(self):
        raise ValueError("never even")

broken = bytes
"""
SCHEMA = {
    "title": "Point",
    "description": "Where it is",
    "type": "object",
    "properties": {"x": {"enum": [1, 22]}, "y": {"enum": [3, 44]}},
    "required": ["x", "y"],
    "additionalProperties": False,
}


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "any.json").write_text('{"enum": [null]}', "utf-8-sig")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "kinds.py").write_text(KINDS)
    (tmp_path / "code" / "neighbours.py").write_text("")
    (tmp_path / "constrained_kinds.py").write_text(KINDS.replace("import neighbours", ""))
    (tmp_path / "g.lark").write_text('start: "a" B\nB: /b{2,4}/')
    (tmp_path / "g.gbnf").write_text('root ::= "x" ("y" | "z")')
    return tmp_path


@pytest.fixture
def generate(folder, done, files):
    """Generate with 40 tokens at most; returns what `--json` says."""

    def generate(*argv):
        argv = ("generate", "--model", folder, "-p", "A list", "-m", 40, "--seed", 1, *argv)
        return json.loads(done(*argv, "--json"))

    return generate


def test_answers_look_as_they_must(generate, write_config):
    config = write_config("choices: [a list, B]")
    for argv, pattern in [
        (("--json-schema", "schema.json"), r'\{"x": (1|22), "y": (3|44)\}'),
        (("--json-schema", "any.json"), "null"),
        (("--json-schema", "code/kinds.py:Generable"), r'\{"size": 7\}'),
        (("--regex", r"[a-c]{3}\.", "--temp", 5), r"[a-c]{3}\."),
        (("--choices", "yes", "no, never", "--temp", 5), "yes|no, never"),
        (("--grammar", "g.lark"), "ab{2,4}"),
        (("--grammar", "g.gbnf"), "x[yz]"),
        (("-c", config), "a list|B"),
        (("-c", config, "--regex", "c"), "c"),
    ]:
        facts = generate(*argv)
        assert re.fullmatch(pattern, facts["text"]), argv
        assert facts["finish_reason"] == "stop"
        assert ("value" in facts) == ("--json-schema" in argv)
        if "value" in facts:
            assert facts["value"] == json.loads(facts["text"])


def test_types_of_files_and_modules(generate):
    for named in ("code/kinds.py:Animals.Animal", "constrained_kinds:Animals.Animal"):
        # As text, without the schema: the context is small.
        argv = ("--ignore-chat-template", "--at-limit", "complete")
        facts = generate("--json-schema", named, *argv)
        assert facts["value"]["name"] in ("fox", "dog")
        assert facts["value"].keys() <= {"name", "friend"}


def test_a_chat_shows_the_schema_to_the_model(generate, folder):
    _, tokenizer = load(folder)
    named = {"name": "Point", "description": "Where it is", "schema": SCHEMA}
    asked = {"type": "json_schema", "json_schema": named}
    message = {"role": "user", "content": "A list", "response_format": asked}
    prompt = tokenizer.apply_chat_template([message], add_generation_prompt=True)
    assert generate("--json-schema", "schema.json")["prompt_tokens"] == len(prompt)
    plain = generate("--choices", "a")["prompt_tokens"]
    assert plain < len(prompt)
    as_text = generate("--json-schema", "schema.json", "--ignore-chat-template")
    assert as_text["prompt_tokens"] < plain


def test_an_answer_that_is_cut_off(folder, done, fails, files):
    argv = ("generate", "--model", folder, "-p", "A list", "--verbose", "F")
    argv = (*argv, "--json-schema", "schema.json", "-m")
    whole = done(*argv, 1, "--at-limit", "complete")
    assert json.loads(whole).keys() == {"x", "y"}
    says = "before its constraint (JSON schema) was met"
    assert says in fails(*argv, 1, output="{\n")
    assert says in fails(*argv, 1, "--json")


def test_what_can_not_be_asked_for_is_one_line(folder, fails, files):
    (files / "list.json").write_text("[1]")
    (files / "broken.json").write_text('{"a"')
    (files / "refused.json").write_text('{"type": "thing"}')
    (files / "raises.py").write_text("1 / 0\n")
    (files / "leaves.py").write_text("raise SystemExit(0)")
    (files / "endless.gbnf").write_text('root ::= root "x"')
    (files / "folder.json").mkdir()
    (files / "latin.json").write_bytes(b'{"const": "\xff"}')
    (files / "large.json").write_text(json.dumps({"const": "x" * 10_000_000}))
    (files / "deep.json").write_text("[" * 100_000)
    asks = "from afm_mlx import fm\n@fm.generable\nclass Bad:\n    size: int = fm.guide(regex='a')"
    (files / "bad_guide.py").write_text(f"{asks}\ndef __getattr__(name): raise ValueError(name)")
    for argv, says in {
        "--regex a --choices b": "--regex and --choices both say what the answer must look like",
        "--json-schema x --grammar b": "--json-schema and --grammar both say",
        "--json-schema nowhere.json": "--json-schema: nowhere.json can't be read",
        "--json-schema folder.json": "--json-schema: folder.json can't be read",
        "--json-schema latin.json": "--json-schema: latin.json can't be read",
        "--json-schema large.json": "Give a smaller schema",
        "--json-schema deep.json": "deep.json is not JSON",
        "--json-schema leaves.py:Animal": "leaves.py can't be run (SystemExit: 0)",
        "--json-schema bad_guide.py:Bad": "bad_guide.py:Bad can't be generated: ",
        "--json-schema bad_guide.py:Good": "bad_guide.py can't be run (ValueError: Good)",
        "--grammar endless.gbnf": "no text follows it",
        "--json-schema list.json": "list.json holds [1]; a JSON schema is an object",
        "--json-schema broken.json": "broken.json is not JSON",
        "--json-schema refused.json": "thing",
        "--json-schema Animal": "module:Class or path/to/file.py:Class is needed",
        "--json-schema nowhere:Animal": "nowhere can't be run (ModuleNotFoundError: ",
        "--json-schema nowhere.py:Animal": "nowhere.py can't be run (FileNotFoundError: ",
        "--json-schema raises.py:Animal": "raises.py can't be run (ZeroDivisionError: ",
        "--json-schema code/kinds.py:Animals.Plant": "code/kinds.py has no Plant",
        "--json-schema code/kinds.py:broken": "The type is bytes",
        "--regex (a": "The regular expression can't be honoured",
        "--choices=": "list of non-empty strings",
        "--grammar g.txt": "a .lark or .gbnf file is needed",
        "--grammar no.lark": "no.lark can't be read",
        "--at-limit complete": "--at-limit needs one of --json-schema, --regex, --choices, --grammar",
        "--choices a --prefill-response x": "--prefill-response can't be combined",
    }.items():
        assert says in fails("generate", "--model", folder, *argv.split())


def test_what_a_types_module_prints_is_no_part_of_the_answer(folder, run, files):
    (files / "speaks.py").write_text("print('Hi')\nfrom typing import Literal\nThree = Literal[3]")
    argv = ("generate", "--model", folder, "--json-schema", "speaks.py:Three", "-p", "A", "--json")
    status, out, err = run(*argv)
    assert (status, json.loads(out)["value"], err) == (0, 3, "Hi\n")


def test_an_answer_that_the_type_itself_refuses(folder, run, files):
    argv = ("generate", "--model", folder, "--json-schema", "code/kinds.py:Even", "--at-limit")
    status, out, err = run(*argv, "complete", "-m", 8)
    assert status == 2
    assert "is no Even: never even" in err
    assert out.startswith("==========\n{")
