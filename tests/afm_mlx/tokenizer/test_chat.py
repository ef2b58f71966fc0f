"""What a chat is rendered from: whose tools it has, and where it ends."""

import pytest

from afm_mlx.errors import TokenizerError
from tests.tools.chats import SYSTEM, TOOL, USER


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
