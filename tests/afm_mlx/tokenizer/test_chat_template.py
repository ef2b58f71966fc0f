"""Rendered conversations: the same ids as tamm's preprocessor, and errors that say what is allowed."""

import copy
import json
import warnings

import pytest

from afm_mlx.errors import TokenizerError
from afm_mlx.tokenizer.chat_messages import checked_messages, parse_tool_calls
from afm_mlx.tokenizer.chat_template import V6_TEMPLATE, ChatTemplate
from afm_mlx.tokenizer.tokenizer import load_tokenizer
from tests.tools.cases import all_pairs
from tests.tools.tokenizers import plain_text

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The <b>weather</b> & more, in 東京\n",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "Answer",
        "strict": "true",
        "schema": {"type": "object", "é": [1.5, None]},
    },
}
USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def tokenizer(spm_bpe):
    return load_tokenizer(spm_bpe.parent)


@pytest.fixture(scope="module")
def any_tokenizer(either_folder):
    return load_tokenizer(either_folder)


@pytest.fixture(scope="module")
def tamm_ids(spm_path):
    """A function (messages, tools, add_generation_prompt) -> ids by tamm's preprocessor."""
    afm = pytest.importorskip("tamm.tokenizers.afm", reason="parity needs tamm")
    from tamm.preprocessors.instruct_lm.afm import AFMChatTemplateV6Preprocessor

    reference = afm.AFMTokenizer(str(spm_path), extra_properties={"eot_id": 4})

    def ids(messages, tools=None, add_generation_prompt=True):
        preprocessor = AFMChatTemplateV6Preprocessor(
            reference, prepend_system_message=all(m["role"] != "system" for m in messages)
        )
        # It raises for training without an answer, which is nothing a renderer has to refuse.
        preprocessor._validate_messages_contain_target_role = lambda messages: None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return preprocessor(
                copy.deepcopy(messages), generate_prefix=add_generation_prompt, tools=tools
            ).input_ids

    return ids


def call(name="weather", arguments='{"city":"東京", "days": [1,2.50]}'):
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


CONVERSATIONS = {
    "default system message": [USER],
    "own system message": [{"role": "system", "content": "Be brief.\n\nVery."}, USER],
    "empty contents": [{"role": "system", "content": ""}, {"role": "user", "content": ""}],
    "two system messages": [{"role": "system", "content": "A"}, USER, {"role": "system", "content": "B"}],
    "an answer": [USER, {"role": "assistant", "content": "Hello\n  you"}, USER],
    "ends with an answer": [USER, {"role": "assistant", "content": "Hello"}],
    "template syntax": [{"role": "user", "content": "{{ 7*7 }} {% raw %} <turn end> <n>"}],
    "tool calls": [
        USER,
        {"role": "assistant", "content": "Look:", "tool_calls": [call(), call("a\"b", "{}")]},
        {"role": "tool", "content": {"temperature": 21.5, "note": "schön\n"}, "tool_call_id": "1"},
    ],
    "arguments that are no JSON": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call(arguments='{"city": ')]},
        {"role": "tool", "content": "error"},
    ],
    "arguments that are other JSON": [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call(arguments=a) for a in ('"x"', "", "3")]},
    ],
    "function role": [USER, {"role": "function", "content": "text"}],
    "new tools": [USER, {"role": "tool", "content": [WEATHER, {"name": "clock"}]}],
    "no new tools": [USER, {"role": "tool", "content": []}],
    "response format": [{"role": "user", "content": "Q", "response_format": SCHEMA}],
    "everything in one message": [
        USER,
        {"role": "assistant", "content": "x", "tool_calls": [call()], "response_format": SCHEMA},
        USER,
    ],
}  # fmt: skip


def test_ids_equal_tamm(any_tokenizer, tamm_ids):
    tokenizer = any_tokenizer
    for name, tools, prompt in all_pairs(
        list(CONVERSATIONS), [None, [], [WEATHER, {"name": "clock"}]], [True, False]
    ):
        messages = copy.deepcopy(CONVERSATIONS[name])
        ids = tokenizer.apply_chat_template(messages, tools, add_generation_prompt=prompt)
        assert messages == CONVERSATIONS[name]
        assert ids == tamm_ids(messages, tools, prompt)
        text = tokenizer.apply_chat_template(
            messages, tools, add_generation_prompt=prompt, tokenize=False
        )
        assert tokenizer.encode(text, add_special_tokens=True) == ids


def test_random_conversations_equal_tamm(any_tokenizer, tamm_ids, rng):
    for _ in range(50):
        messages = [
            {"role": str(rng.choice(["user", "assistant", "tool"])), "content": plain_text(rng)}
            for _ in range(rng.integers(1, 6))
        ]
        prompt = bool(rng.integers(2))
        if rng.integers(2):
            messages.insert(0, {"role": "system", "content": plain_text(rng)})
        ids = any_tokenizer.apply_chat_template(messages, add_generation_prompt=prompt)
        assert ids == tamm_ids(messages, add_generation_prompt=prompt), messages


def test_forms_of_the_openai_api(tokenizer):
    """Null content, text parts and decoded arguments mean the same as the toolkit's own forms."""
    plain = [USER, {"role": "assistant", "content": "", "tool_calls": [call(arguments='{"a": 1}')]}]
    other = [
        {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
        {"role": "assistant", "content": None, "tool_calls": [call(arguments={"a": 1})], "refusal": None},
    ]  # fmt: skip
    assert checked_messages(other) == checked_messages(plain)
    assert tokenizer.apply_chat_template(other) == tokenizer.apply_chat_template(plain)
    flat = [USER, {"role": "assistant", "tool_calls": [{"name": "weather", "arguments": {"a": 1}}]}]
    assert tokenizer.apply_chat_template(flat) == tokenizer.apply_chat_template(plain)
    # What says "nothing" changes nothing.
    empty = {"role": "assistant", "content": "x", "tool_calls": []}
    assert checked_messages([empty]) == [{"role": "assistant", "content": "x"}]
    result = {"role": "tool", "content": [{"type": "text", "text": "21 degrees"}]}
    assert checked_messages([USER, result])[1]["content"] == "21 degrees"
    free = {**USER, "response_format": {"type": "text"}}
    assert tokenizer.apply_chat_template([free]) == tokenizer.apply_chat_template([USER])


def test_tools_of_the_system_message(tokenizer):
    system = {"role": "system", "content": "Be brief."}
    with_tools = [{**system, "tools": [WEATHER]}, USER]
    assert tokenizer.apply_chat_template(with_tools) == tokenizer.apply_chat_template(
        [system, USER], tools=[WEATHER]
    )
    with pytest.raises(TokenizerError, match="twice"):
        tokenizer.apply_chat_template(with_tools, tools=[WEATHER])


def test_continue_final_message(tokenizer):
    messages = [USER, {"role": "assistant", "content": "The answer is "}]
    text = tokenizer.apply_chat_template(messages, continue_final_message=True, tokenize=False)
    assert text.endswith("<turn_start> assistant<n>The answer is ")
    with pytest.raises(TokenizerError, match="only one"):
        tokenizer.apply_chat_template(
            messages, continue_final_message=True, add_generation_prompt=True
        )


BAD_MESSAGES = [
    ([], "empty"),
    ("Hi", "must be a list .* got str"),
    ({"role": "user"}, "must be a list .* got dict"),
    (["Hi"], r"messages\[0\] must be a dict .* got str"),
    ([USER, {"content": "x"}], r"messages\[1\] has the role None; allowed are system, user"),
    ([{"role": "human", "content": "x"}], r"messages\[0\] has the role 'human'; allowed"),
    ([USER, {"role": "system", "content": "x"}], r"messages\[1\] has the role 'system'"),
    (
        [USER, {"role": "user"}],
        r"messages\[1\] \(user\) has nothing as 'content'; allowed is a str",
    ),
    (
        [USER, {"role": "assistant", "content": None}],
        r"messages\[1\].*null together with tool_calls",
    ),
    ([{"role": "user", "content": 3}], r"messages\[0\] \(user\) has int as 'content'"),
    ([{"role": "user", "content": {"a": 1}}], r"messages\[0\] \(user\) has dict"),
    (
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}],
        r"messages\[0\]\['content'\]\[1\] has the type 'image_url'; this model reads text only",
    ),
    ([{"role": "user", "content": ["a"]}], r"\['content'\]\[0\] has the type str"),
    ([USER, {"role": "tool", "content": ["a"]}], r"\['content'\]\[0\] must be a tool definition"),
    ([USER, {"role": "assistant", "tool_calls": "f"}], r"\['tool_calls'\] must be a list"),
    (
        [USER, {"role": "assistant", "tool_calls": [{"function": {}}]}],
        r"tool_calls'\]\[0\] must be",
    ),
    ([{**USER, "response_format": {"type": "xml"}}], r"\['response_format'\] must be .* got"),
    ([{**USER, "response_format": {"type": "json_schema"}}], r"\['response_format'\] must be"),
    ([{"role": "user", "content": "half \ud800"}], "surrogate"),
]


def test_bad_messages(tokenizer):
    for messages, message in BAD_MESSAGES:
        with pytest.raises(TokenizerError, match=message):
            tokenizer.apply_chat_template(messages)


def test_bad_tools(tokenizer):
    with pytest.raises(TokenizerError, match=r"tools\[0\] must be a tool definition"):
        tokenizer.apply_chat_template([USER], tools=["f"])
    with pytest.raises(TokenizerError, match="tools must be a list"):
        tokenizer.apply_chat_template([USER], tools={"a": 1})
    with pytest.raises(TokenizerError, match="not JSON serializable"):
        tokenizer.apply_chat_template([USER], tools=[{"a": {1, 2}}])


def test_arguments_of_transformers(tokenizer):
    ids = tokenizer.apply_chat_template([USER])
    for neutral in ({"enable_thinking": True}, {"return_dict": False}, {"padding": False}):
        assert tokenizer.apply_chat_template([USER], **neutral) == ids
    for effective in ({"return_dict": True}, {"return_tensors": "np"}, {"max_length": 3}):
        with pytest.raises(TokenizerError, match="is not supported"):
            tokenizer.apply_chat_template([USER], **effective)


HOSTILE = [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__class__ }}",
    "{{ messages.append(1) }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ lipsum.__globals__['os'].getcwd() }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{% for i in range(1000000000) %}x{% endfor %}",
]


def test_hostile_template_is_contained(tokenizer):
    for source in HOSTILE:
        with pytest.raises(
            TokenizerError, match=r"The chat template failed: (Security|Overflow)Error"
        ):
            tokenizer.apply_chat_template([USER], chat_template=source)


def test_faulty_templates_name_their_file():
    with pytest.raises(TokenizerError, match=r"The chat template in a/b.jinja is not valid Jinja"):
        ChatTemplate("{% if %}", "a/b.jinja").render([USER])
    with pytest.raises(TokenizerError, match=r"in a/b.jinja failed: .*no such role"):
        ChatTemplate("{{ raise_exception('no such role') }}", "a/b.jinja").render([USER])
    # A template that would drop what the user gave is refused.
    with pytest.raises(TokenizerError, match=r"messages\[0\] has 'response_format'.*in a/b.jinja"):
        ChatTemplate("{{ messages }}", "a/b.jinja").render([{"response_format": SCHEMA}])


def test_template_takes_arguments_as_other_programs_have_them():
    """mlx-lm's server decodes arguments; others pass the JSON text on."""
    template = ChatTemplate(V6_TEMPLATE)
    for arguments in ({"a": 1}, '{"a": 1}'):
        message = {"role": "assistant", "content": None, "tool_calls": [call(arguments=arguments)]}
        text = template.render([USER, message], bos_token="</s>")
        assert text.startswith("</s><turn_start> system<n>A conversation")
        assert '```function\n[{"name": "weather", "arguments": {"a": 1}}]```' in text


def test_parse_tool_calls(tokenizer):
    calls = [{"name": "a", "arguments": {"x": "```\n"}}, {"name": "b", "arguments": {}}]
    message = {"role": "assistant", "tool_calls": [{"function": c} for c in calls]}
    text = tokenizer.apply_chat_template([USER, message], tokenize=False)
    inner = text.split(tokenizer.tool_call_start)[1].split(tokenizer.tool_call_end)[0]
    assert tokenizer.tool_parser(inner, tools=[]) == calls
    assert parse_tool_calls(json.dumps(calls[1])) == calls[1:]
    for broken in ("```function\n[{", "[3]", '[{"arguments": {}}]', "[" * 100000):
        with pytest.raises(TokenizerError, match="tool call"):
            parse_tool_calls(broken)
