"""Forms of calls: what templates write is read back, and grammars allow that and nothing else."""

import json
from dataclasses import replace

import pytest

from afm_mlx.errors import ConstraintError, TokenizerError
from afm_mlx.guidance.answer_parts import (
    CallBegins,
    Text,
    Thought,
    read_answer,
    splitter_of,
)
from afm_mlx.guidance.call_forms import call_form
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.guidance.matcher import Matcher
from afm_mlx.guidance.tool_calls import tool_call_constraint
from afm_mlx.tokenizer.zoo_tokenizer import ZooTokenizer
from tests.tools.cases import each
from tests.tools.documents import ROOT
from tests.tools.zoo_chats import FAMILIES, write_tokenizer

FORMS = {
    "qwen3": "Hermes",
    "llama3": "Llama 3",
    "mistral": "Mistral",
    "mistral args": "Mistral",
    "mistral ids": "Mistral",
    "harmony": "Harmony",
    "lfm2": "Pythonic",
    "lfm2 first": "Pythonic",
    "gemma4": "Gemma 4",
    "falcon h1": "Hermes",
    "qwen3 coder": "qwen3_coder",
}
GRAMMARS = [family for family in FORMS if family not in ("lfm2 first", "qwen3 coder")]
SINGLE = ("llama3", "harmony")
TIME = {
    "type": "object",
    "properties": {"hour": {"type": "integer", "minimum": 0}},
    "required": ["hour"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "at": TIME},
        "required": ["city"], "additionalProperties": False}}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]  # fmt: skip
WEATHER = {"name": "weather", "arguments": {"city": 'Porto [x] {1}, "y"', "days": 3}}
NESTED = {"name": "weather", "arguments": {"city": "São Tomé", "at": {"hour": 7}}}
STOP = {"name": "stop", "arguments": {}}


@pytest.fixture(scope="module")
def tokenizer_of(tmp_path_factory):
    from mlx_lm.tokenizer_utils import load

    made = {}

    def tokenizer_of(family):
        if family not in made:
            folder = tmp_path_factory.mktemp("family")
            write_tokenizer(folder, family)
            made[family] = ZooTokenizer.of(load(folder, eos_token_ids=None))
            for end in FAMILIES[family][-1]:
                made[family].add_eos_token(end)
        return made[family]

    return tokenizer_of


def rendered(tokenizer, family, *calls, said=""):
    """What the family's template writes for an answer with calls, without what is before and after it."""
    made = [{"id": f"a2345678{i}", "function": call} for i, call in enumerate(calls)]
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": said, "tool_calls": made},
    ]
    whole = tokenizer.apply_chat_template(messages, TOOLS, tokenize=False)
    prompt = tokenizer.apply_chat_template(
        messages[:1], TOOLS, add_generation_prompt=True, tokenize=False
    )
    assert whole.startswith(prompt)
    text = whole[len(prompt) :].removeprefix("<think>\n\n</think>\n\n").rstrip("\n")
    return next((text[: -len(e)] for e in FAMILIES[family][-1] if text.endswith(e)), text)


def ids_of(tokenizer, text):
    return tokenizer._tokenizer(text, add_special_tokens=False)["input_ids"]


def is_whole(constraint, tokenizer, text):
    """True if a constraint accepts a text, in which names of control tokens are these."""
    matcher = Matcher(constraint, tokenizer)
    ids = ids_of(tokenizer, "\n" + text)[len(ids_of(tokenizer, "\n")) :]
    for token in ids:
        try:
            matcher.accept(token)
        except ConstraintError:
            return False
    return matcher.is_complete


@each("family", FORMS)
def test_what_a_template_writes_is_read_back(tokenizer_of, family):
    tokenizer = tokenizer_of(family)
    form = call_form(tokenizer)
    assert form.name == FORMS[family]
    plain = {"name": "weather", "arguments": {"city": "Porto", "days": 3}}
    calls = [plain] if family in SINGLE else [plain, STOP]
    said = "" if family in ("llama3", "harmony", "mistral", "gemma4") else "Let me look."
    text = rendered(tokenizer, family, *calls, said=said)
    assert read_answer(form, text, TOOLS) == (said + ("\n" if "qwen3" in family else ""), calls)


OF_EVERY_KIND = [
    WEATHER,
    {"name": "weather", "arguments": {"city": "", "days": -3, "ratio": 1.5, "none": None, "no": False}},
    {"name": "weather", "arguments": {"at": {"hour": 7, "rain": True, "tags": ["a", "é"]}, "city": "São Tomé"}},
    {"name": "weather", "arguments": {"city": "line\nbreak, 日本", "tags": ["x", "y z"], "empty": []}},
    STOP,
]  # fmt: skip
LEFT_TO_US = {
    "llama3": [0, 1, 2, 3, 4], "harmony": [0, 1, 2, 3, 4],  # mlx-lm has no parser of these forms
    "falcon h1": [0, 1, 2, 3, 4],  # it finds no parser, because the template writes no calls
    "mistral ids": [0, 1, 2, 3, 4],  # its parser takes the id for the name
    "lfm2": [3],  # the template writes line breaks as they are
}  # fmt: skip
"""Calls of `OF_EVERY_KIND` that mlx-lm's parsers can't read as templates write them."""


@each("family", [family for family in FORMS if family != "qwen3 coder"])
def test_mlx_lms_parsers_read_the_same_calls(tokenizer_of, family):
    from mlx_lm.generate import TextStateMachine, make_text_state_machine

    tokenizer = tokenizer_of(family)
    form = call_form(tokenizer)
    for number, call in enumerate(OF_EVERY_KIND):
        text = rendered(tokenizer, family, call)
        assert read_answer(form, text, TOOLS) == ("", [call]), text
        state = make_text_state_machine(tokenizer).make_state()
        _, segments = TextStateMachine.split(state, text)
        written = "".join(text for state, text in segments if state == "tool")
        try:
            made = tokenizer.tool_parser(written, TOOLS)
        except (TypeError, ValueError, SyntaxError):
            made = []
        made = made if isinstance(made, list) else [made]
        made = [{"name": each["name"], "arguments": each["arguments"]} for each in made]
        assert (made == [call]) == (number not in LEFT_TO_US.get(family, ())), (number, text)


@each("family", GRAMMARS)
def test_grammars_allow_calls_as_templates_write_them(tokenizer_of, family):
    tokenizer = tokenizer_of(family)
    form = call_form(tokenizer)
    options = {"form": form}
    required = tool_call_constraint(TOOLS, "required", **options)
    auto = tool_call_constraint(TOOLS, "auto", **options)
    for call in (WEATHER, NESTED, STOP):
        text = written(form, call)
        if family not in (
            "lfm2",
            "harmony",
            "mistral",
        ):  # these have other quotes, another order, an id
            assert rendered(tokenizer, family, call) == text
        assert is_whole(required, tokenizer, text), text
        assert is_whole(auto, tokenizer, text), text
        assert read_answer(form, text) == ("", [call])
    two = written(form, WEATHER, STOP)
    assert is_whole(required, tokenizer, two) == (family not in SINGLE)
    one = tool_call_constraint(TOOLS, "one", **options)
    assert not is_whole(one, tokenizer, two)
    assert not is_whole(
        tool_call_constraint(TOOLS, "stop", **options), tokenizer, written(form, WEATHER)
    )
    wrong = [
        {"name": "wether", "arguments": {"city": "Porto"}},
        {"name": "weather", "arguments": {"town": "Porto"}},
        {"name": "weather", "arguments": {"city": "Porto", "more": 1}},
        {"name": "weather", "arguments": {"city": 7}},
        {"name": "weather", "arguments": {"city": "x", "at": {"hour": -1}}},
        {"name": "weather", "arguments": {}},
    ]
    for call in wrong:
        assert not is_whole(required, tokenizer, written(form, call)), call
        assert not is_whole(auto, tokenizer, written(form, call)), call
    assert not is_whole(required, tokenizer, free(family, "Some text."))
    for text in ("Some text.", "a [x] {1} <b>\n", '{"nam', '{"a": 1}'):
        assert is_whole(auto, tokenizer, free(family, text)), text
        assert read_answer(form, free(family, text)) == (text, [])


def free(family, text):
    return f"<|channel|>final<|message|>{text}" if family == "harmony" else text


def written(form, *calls):
    def arguments(call):
        if form.parser is None:
            return json.dumps(call["arguments"], ensure_ascii=False)
        if form.quote is not None:
            return gemma(call["arguments"])
        pairs = call["arguments"].items()
        return ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in pairs)

    texts = [
        form.head_of(call["name"], "a23456780") + arguments(call) + form.tail for call in calls
    ]
    return form.opening + (form.between or ", ").join(texts) + form.closing


def gemma(value):
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{gemma(v)}" for k, v in sorted(value.items())) + "}"
    return f"[{','.join(map(gemma, value))}]" if isinstance(value, list) else json.dumps(value)


@each("family", GRAMMARS)
def test_an_answer_may_have_a_form_of_its_own(tokenizer_of, family):
    tokenizer = tokenizer_of(family)
    form = call_form(tokenizer)
    constraint = tool_call_constraint(TOOLS, "auto", Constraint.choices(["yes", "no"]), form=form)
    final = "<|channel|>final<|message|>" if form.is_harmony else ""
    assert is_whole(constraint, tokenizer, f"{final}yes")
    assert is_whole(constraint, tokenizer, written(form, STOP))
    assert not is_whole(constraint, tokenizer, f"{final}maybe")


@each("family", GRAMMARS)
@each("size", [1, 2, 7, 1000])
def test_answers_are_split_however_they_are_cut(tokenizer_of, family, size):
    tokenizer = tokenizer_of(family)
    form = call_form(tokenizer)
    calls = [WEATHER] if family in SINGLE else [WEATHER, STOP, NESTED]
    said = "" if family in SINGLE else "First "
    splitter, parts = splitter_of(form), []
    text = said + written(form, *calls)
    pieces, names = [], sorted(form.ids, key=len, reverse=True)
    while text:
        name = next((name for name in names if text.startswith(name)), None)
        upto = len(name) if name else min([size, *(text.find(n) for n in names if n in text)])
        pieces.append((text[:upto], form.ids[name] if name else -1))
        text = text[upto:]
    for piece, token in pieces:
        parts += splitter.feed(piece, token)
    parts += splitter.finish()
    assert not splitter.is_open
    cut = splitter_of(form)
    for piece, token in pieces[: -2 - len(form.closing) // size]:
        list(cut.feed(piece, token))
    assert cut.is_open or size > 1
    assert "".join(p.text for p in parts if isinstance(p, Text)) == said
    assert [p.name for p in parts if isinstance(p, CallBegins)] == [c["name"] for c in calls]
    joined = "".join(
        "|" if isinstance(p, CallBegins) else p.json for p in parts if not isinstance(p, Text)
    )
    arguments = joined.split("|")[1:]
    assert list(map(json.loads, arguments)) == [c["arguments"] for c in calls]
    assert [text.strip() for text in arguments] == arguments


@each("value", ["{1, 2}", 'b"x"', "...", "1j", "{[1]: 2}", "[NaN]"])
def test_arguments_that_are_no_json_are_text(tokenizer_of, value):
    form = call_form(tokenizer_of("lfm2"))
    text = f"{form.opening}f(a={value}){form.closing}"
    assert read_answer(form, text) == (text, [])
    fine = text.replace(value, "(1, 'x')")
    assert read_answer(form, fine) == ("", [{"name": "f", "arguments": {"a": [1, "x"]}}])


def test_names_of_marks_in_text_are_text(tokenizer_of):
    form = call_form(tokenizer_of("qwen3"))
    splitter = splitter_of(form)
    text = 'say <tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    assert list(splitter.feed(text)) == [Text(text)]
    assert not splitter.in_calls


def test_harmonys_channels(tokenizer_of):
    tokenizer = tokenizer_of("harmony")
    form = call_form(tokenizer)
    thought = "<|channel|>analysis<|message|>Hm {1}<|end|><|start|>assistant"
    preamble = "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant"
    older = " to=functions.stop<|channel|>commentary json<|message|>{}"
    for call in (written(form, STOP), older):
        whole = thought + preamble + call
        assert read_answer(form, whole) == ("I will look.", [STOP])
    auto = tool_call_constraint(TOOLS, "auto", form=form)
    assert is_whole(auto, tokenizer, thought + preamble + written(form, STOP))
    assert is_whole(auto, tokenizer, thought + "<|channel|>final<|message|>Done.")
    assert not is_whole(auto, tokenizer, thought)
    for cut in ("<|channel|>", "<|channel|>fin", "<|channel|>analysis"):  # by a limit of tokens
        assert read_answer(form, cut) == ("", [])
    splitter, parts = splitter_of(form), []
    for token in ids_of(tokenizer, thought + "<|channel|>final<|message|>Done."):
        parts += splitter.feed(tokenizer.token_bytes(token).decode(), token)
    assert "".join(p.text for p in parts if isinstance(p, Thought)) == "Hm {1}"
    assert "".join(p.text for p in parts if isinstance(p, Text)) == "Done."


def test_a_thought_may_come_before_an_answer(tokenizer_of):
    tokenizer = tokenizer_of("qwen3")
    form = call_form(tokenizer)
    auto = tool_call_constraint(TOOLS, "auto", form=form)
    call = written(form, STOP)
    for thought in ("<think>\nHm.\n</think>\n\n", "Hm.\n</think>\n\n"):
        assert is_whole(auto, tokenizer, thought + call)
        assert is_whole(auto, tokenizer, thought + "Done.")
    assert not is_whole(auto, tokenizer, "<think>\nHm.")
    assert not is_whole(auto, tokenizer, "a<|im_start|>b")


def test_calls_of_mlx_lms_parsers_are_read_and_not_required(tokenizer_of):
    form = call_form(tokenizer_of("qwen3 coder"))
    text = (
        "<tool_call>\n<function=weather>\n<parameter=city>\nPorto {1}\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
    )
    call = {"name": "weather", "arguments": {"city": "Porto {1}", "days": 3}}
    assert read_answer(form, f"Yes. {text}\n{text}", TOOLS) == ("Yes. ", [call, call])
    broken = "<tool_call>nothing</tool_call>"
    assert read_answer(form, broken) == (broken, [])
    with pytest.raises(ValueError, match="not complete"):
        read_answer(form, text[:-12])
    without_tokens = replace(form, ids={})
    assert read_answer(without_tokens, f"Yes. {text}\n", TOOLS) == ("Yes. ", [call])
    assert tool_call_constraint(TOOLS, "auto", form=form) is None
    for choice, options in {
        "required": {},
        "weather": {},
        "auto": {"parallel": False},
    }.items():
        with pytest.raises(ConstraintError, match=r"qwen3_coder.*can't be enforced"):
            tool_call_constraint(TOOLS, choice, form=form, **options)


def test_models_that_can_not_call(tokenizer_of, tmp_path):
    for family in ("gemma3", "phi3"):
        with pytest.raises(TokenizerError, match="knows no tools"):
            call_form(tokenizer_of(family))
    with pytest.raises(ConstraintError, match="none of the known forms"):
        call_form(tokenizer_of("phi4 mini"))


@each(
    "parameters, words",
    [
        ({"type": "array"}, "'array', and this model writes arguments as keywords"),
        ({"type": "object", "minProperties": 1}, "'minProperties', and this model"),
        (
            {"type": "object", "properties": {"a b": {}}},
            "'a b' of 'f' can't be written as a keyword",
        ),
        ({"type": "object", "properties": {"class": {}}}, "can't be written as a keyword"),
        ({"type": "object", "required": ["a"]}, "requires 'a', which has no schema"),
    ],
)
def test_parameters_that_are_no_keywords(tokenizer_of, parameters, words):
    form = call_form(tokenizer_of("lfm2"))
    with pytest.raises(ConstraintError, match=words):
        tool_call_constraint([{"name": "f", "parameters": parameters}], "required", form=form)


def test_keywords_in_any_choice_of_optional_ones(tokenizer_of):
    tokenizer = tokenizer_of("lfm2")
    form = call_form(tokenizer)
    parameters = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"type": "boolean"}, "c": {"type": "null"}},
        "required": ["b"],
        "$defs": {"n": {"type": "integer"}},
    }
    constraint = tool_call_constraint([{"name": "f", "parameters": parameters}], "one", form=form)
    for text, fits in {
        "a=1, b=true, c=null": True, "b=false": True, "b=true, c=null": True, "a=1, b=true": True,
        "": False, "a=1": False, "c=null, b=true": False, "a=1,b=true": False, "b=true, ": False,
        "b=True": False, "a=1.5, b=true": False,
    }.items():  # fmt: skip
        whole = f"<|tool_call_start|>[f({text})]<|tool_call_end|>"
        assert is_whole(constraint, tokenizer, whole) == fits, text


def test_a_mark_that_is_no_control_token(tokenizer_of):
    """Hermes' form in a vocabulary without `<tool_call>`, as older fine-tuned models have it."""
    tokenizer = tokenizer_of("mistral args")
    form = replace(call_form(tokenizer_of("qwen3")), ids={}, thinking=())
    auto = tool_call_constraint(TOOLS, "auto", form=form)
    for text in ("", "Some <b>text</b>.", "<tool_cal", "First: " + written(form, WEATHER, STOP)):
        assert is_whole(auto, tokenizer, text), text
    wrong = {"name": "weather", "arguments": {"city": 7}}
    for text in (
        "<tool_call>",
        "a <tool_call>\nb",
        written(form, wrong),
        written(form, STOP) + "more",
    ):
        assert not is_whole(auto, tokenizer, text), text
    assert is_whole(
        tool_call_constraint(TOOLS, "required", form=form), tokenizer, written(form, STOP)
    )
    text = "First <tool " + written(form, STOP)
    for size in (1, 5, 100):
        splitter = splitter_of(form)
        parts = [p for at in range(0, len(text), size) for p in splitter.feed(text[at : at + size])]
        assert "".join(p.text for p in parts if isinstance(p, Text)) == "First <tool "
        assert [p.name for p in parts if isinstance(p, CallBegins)] == ["stop"]
        assert not splitter.is_open
    held = splitter_of(form)
    parts = [*held.feed("so <tool_ca"), *held.finish()]
    assert parts == [Text("so "), Text("<tool_ca")]


def test_the_documents_name_every_form(tokenizer_of):
    page = (ROOT / "docs" / "models.md").read_text().partition("<!-- forms of calls -->")[2]
    rows = [
        row.split(" | ") for row in page.partition("<!-- end")[0].splitlines() if row[:2] == "| "
    ]
    known = {row[1]: (row[2], row[3]) for row in rows if len(row) > 3}
    for family, name in FORMS.items():
        form = call_form(tokenizer_of(family))
        if not form.has_grammar:
            continue
        call, grammar = known[name]
        assert grammar == "yes |"
        assert form.mark.replace("|", "\\|") in call or form.is_harmony
        assert ("one at a time" in call) == (form.between is None)


KINDS = {
    "type": "object",
    "properties": {
        "a": {"enum": ["x", 1, None]},
        "b": {"type": "array", "items": {"$ref": "#/$defs/pair"}},
        "c": {"anyOf": [{"type": "boolean"}, {"const": "it's"}]},
        "d": {"type": ["number", "string"], "title": "D"},
        "e": {},
    },
    "$defs": {
        "pair": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    },
}


def test_values_of_gemma_4(tokenizer_of):
    tokenizer = tokenizer_of("gemma4")
    form = call_form(tokenizer)
    constraint = tool_call_constraint([{"name": "f", "parameters": KINDS}], "one", form=form)
    for arguments, fits in [
        ({}, True), ({"a": "x"}, True), ({"a": 1}, True), ({"a": None}, True), ({"a": "y"}, False),
        ({"b": []}, True), ({"b": [{"n": 1}, {"n": 2}]}, True), ({"b": [{"n": "1"}]}, False),
        ({"c": True}, True), ({"c": "it's"}, True), ({"c": 1}, False), ({"c": "its"}, False),
        ({"d": 1.5}, True), ({"d": "{a:1}"}, True), ({"d": True}, False),
        ({"e": "x"}, True), ({"e": False}, True), ({"a": 1, "c": True, "e": 1}, True), ({"x": 1}, False),
    ]:  # fmt: skip
        call = {"name": "f", "arguments": arguments}
        assert is_whole(constraint, tokenizer, written(form, call)) == fits, arguments
        if fits:
            assert read_answer(form, written(form, call)) == ("", [call])
    endless = {"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}
    for value, words in [
        ({"type": "string", "pattern": "a+"}, "'pattern'"),
        ({"type": "array", "minItems": 1}, "'minItems'"),
        ({"$ref": "#/$defs/b"}, "'#/\\$defs/b'"),
        ({"$ref": "#/$defs/a"}, "nest without an end"),
        (True, "have True"),
    ]:
        parameters = {"type": "object", "properties": {"v": value}, **endless}
        with pytest.raises(ConstraintError, match=words):
            tool_call_constraint([{"name": "f", "parameters": parameters}], "one", form=form)
