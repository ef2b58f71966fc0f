"""Rendered conversations have the same ids as tamm's preprocessor; a faulty template is named."""

import copy
import functools
import warnings

import pytest

from afm_mlx.errors import TokenizerError
from afm_mlx.tokenizer.chat_template import V6_TEMPLATE, ChatTemplate
from tests.tools.cases import each
from tests.tools.chats import CALL, SCHEMA, SYSTEM, TOOL, USER, random_chat
from tests.tools.tokenizers import same_ids


@pytest.fixture(scope="module")
def tamm_ids(reference):
    """A function (messages, tools, add_generation_prompt) -> ids by tamm's preprocessor."""
    from tamm.preprocessors.instruct_lm.afm import AFMChatTemplateV6Preprocessor

    @functools.cache
    def preprocessor(prepend_system_message):
        made = AFMChatTemplateV6Preprocessor(
            reference, prepend_system_message=prepend_system_message
        )
        # It raises for training without an answer, which is nothing a renderer has to refuse.
        made._validate_messages_contain_target_role = lambda messages: None
        return made

    def ids(messages, tools, add_generation_prompt):
        render = preprocessor(all(m["role"] != "system" for m in messages))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return render(
                copy.deepcopy(messages), generate_prefix=add_generation_prompt, tools=tools
            ).input_ids

    return ids


def answer(content="", *arguments, **fields):
    calls = [{"function": {"name": 'a"b', "arguments": text}} for text in arguments]
    return {"role": "assistant", "content": content, "tool_calls": [CALL, *calls], **fields}


EDGES = [
    [USER],
    [{**SYSTEM, "content": ""}, {**USER, "content": ""}],
    [USER, {"role": "assistant", "content": "Hello\n  you"}],
    [{**USER, "content": "{{ 7*7 }} {% raw %} <turn end> < n>"}],
    [
        USER,
        answer("Look:", "{}", '{"city": ', '"x"', "", "3"),
        {"role": "tool", "content": "error"},
    ],
    [USER, {"role": "tool", "content": []}],
    [USER, {"role": "tool", "content": [TOOL, {"name": "clock"}]}],
    [USER, answer("x", response_format=SCHEMA), USER],
]


def test_ids_equal_tamm(tokenizer, tamm_ids, rng, spm_path, either_folder):
    hub = not (either_folder / "tokenizer.model").exists()
    for chat in [*EDGES, *(random_chat(rng) for _ in range(20))]:
        for tools, prompt in ((None, True), ([], False), ([TOOL, {"name": "clock"}], True)):
            messages = copy.deepcopy(chat)
            ids = tokenizer.apply_chat_template(messages, tools, prompt)
            assert messages == chat
            wanted = tamm_ids(messages, tools, prompt)
            assert ids == wanted or (hub and same_ids(spm_path, ids, wanted))
            text = tokenizer.apply_chat_template(messages, tools, prompt, tokenize=False)
            assert tokenizer.encode(text, add_special_tokens=True) == ids


def test_a_typed_newline_mark_is_no_newline(tokenizer, tamm_ids):
    """tamm reads a user's `<n>` as a newline; here only the template and a true newline make one."""
    typed, meant = ([{**USER, "content": f"a{mark}b"}] for mark in ("<n>", "\n"))
    assert tamm_ids(typed, None, True) == tamm_ids(meant, None, True)
    assert tokenizer.apply_chat_template(meant, None, True) == tamm_ids(meant, None, True)
    ids = tokenizer.apply_chat_template(typed, None, True)
    newline = tokenizer.convert_tokens_to_ids("<n>")
    assert ids.count(newline) == tamm_ids(typed, None, True).count(newline) - 1


def test_arguments_may_be_decoded_or_json_text():
    """mlx-lm's server decodes arguments; others pass the JSON text on."""
    for arguments in ({"a": 1}, '{"a": 1}'):
        call = {"function": {"name": "weather", "arguments": arguments}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        text = ChatTemplate(V6_TEMPLATE).render([USER, message], bos_token="</s>")
        assert text.startswith("</s><turn_start> system<n>A conversation")
        assert '```function\n[{"name": "weather", "arguments": {"a": 1}}]```' in text


@each(
    ("source", "words"),
    [
        ("{% if %}", "The chat template in a/b.jinja is not valid Jinja"),
        (
            "{{ raise_exception('no such role') }}",
            "in a/b.jinja refuses these messages: no such role",
        ),
        ("{{ messages.append(1) }}", "in a/b.jinja failed: SecurityError"),
        ("{{ [cycler] | tojson }}", "in a/b.jinja failed: .*not JSON serializable"),
        ("{{ messages }}", r"messages\[0\] has 'response_format'.*in a/b.jinja"),
    ],
)
def test_faulty_templates_name_their_file(source, words):
    fields = {"response_format": SCHEMA} if "has" in words else {}
    with pytest.raises(TokenizerError, match=words):
        ChatTemplate(source, "a/b.jinja").render([{**USER, **fields}])


def test_tools_of_the_system_message(tokenizer):
    with_tools = [{**SYSTEM, "tools": [TOOL]}, USER]
    expected = tokenizer.apply_chat_template([SYSTEM, USER], tools=[TOOL])
    assert tokenizer.apply_chat_template(with_tools) == expected
    with pytest.raises(TokenizerError, match="twice"):
        tokenizer.apply_chat_template(with_tools, tools=[TOOL])


def test_continue_final_message(tokenizer):
    messages = [USER, {"role": "assistant", "content": "The answer is "}]
    text = tokenizer.apply_chat_template(messages, continue_final_message=True, tokenize=False)
    assert text.endswith("<turn_start> assistant<n>The answer is ")
