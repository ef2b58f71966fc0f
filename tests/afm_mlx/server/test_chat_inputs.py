"""Conversations built from items or blocks."""

import time

import pytest

from afm_mlx.server.chat_inputs import ConversationBuilder
from afm_mlx.server.replies import ApiError


def test_calls_join_the_text_before_them_and_instructions_come_first():
    conversation = ConversationBuilder([{"role": "system", "content": "One"}])
    conversation.add_system("Two", "here")
    conversation.add_user("Go", "here")
    conversation.add_answer("I will", "here")
    conversation.add_call("a", "tool", "{}", "here")
    conversation.add_result("a", "done", "here")
    kept = conversation.finished("input")
    assert [message["role"] for message in kept] == ["system", "user", "assistant", "tool"]
    assert kept[0]["content"] == "One\n\nTwo"
    assert kept[2]["content"] == "I will"
    assert conversation.finished("input", "Zero")[0]["content"] == "Zero\n\nOne\n\nTwo"
    # Continuing a conversation doesn't change it.
    later = ConversationBuilder(kept)
    later.add_answer("All done", "here")
    later.add_call("b", "tool", "{}", "here")
    assert len(kept) == 4
    assert "tool_calls" not in kept[3]
    # The next answer's calls may have the same ids.
    conversation.add_call("a", "tool", "{}", "here")
    conversation.add_result("a", "again", "here")
    assert conversation.finished("input")[-1]["content"] == "again"


def test_late_instructions_join_the_users_turn():
    kept = [{"role": "system", "content": "Zero"}, {"role": "user", "content": "Go"}]
    conversation = ConversationBuilder(kept)
    conversation.add_system("One", "here")  # after the user's text
    conversation.add_user("And go", "here")
    conversation.add_answer("I go", "here")
    conversation.add_system("Two", "here")  # before it
    conversation.add_system("Three", "here")
    conversation.add_user("Stop", "here")
    conversation.add_user("Now", "here")
    assert [(each["role"], each["content"]) for each in conversation.finished("input")] == [
        ("system", "Zero"),
        ("user", "Go\n\nOne"),
        ("user", "And go"),
        ("assistant", "I go"),
        ("user", "Two\n\nThree\n\nStop"),
        ("user", "Now"),
    ]
    assert kept[1]["content"] == "Go"  # another request may continue it
    conversation.add_answer("Done", "here")
    conversation.add_system("Last", "here")  # after all others
    assert conversation.finished("input")[-1] == {"role": "user", "content": "Last"}
    strict = ConversationBuilder(kept, folds=False)
    with pytest.raises(ApiError, match="instructions within a conversation"):
        strict.add_system("Be brief", "here")


def test_many_late_instructions_take_linear_time():
    """Rebuilding the user's message for each of them would take two minutes for 8 MB."""
    conversation = ConversationBuilder()
    conversation.add_user("Go", "here")
    began = time.process_time()
    for _ in range(16_000):
        conversation.add_system("y" * 500, "here")
    (message,) = conversation.finished("input")
    assert time.process_time() - began < 5
    assert message["content"] == "\n\n".join(["Go", *["y" * 500] * 16_000])


def test_arguments_must_be_json_objects():
    for arguments in ("{", "[]", "7", "null", "{'a': 1}", '{"a": NaN}', "{" * 9000):
        with pytest.raises(ApiError, match="no JSON object") as caught:
            ConversationBuilder().add_call("a", "tool", arguments, "call.id", "call.arguments")
        assert caught.value.param == "call.arguments"
    conversation = ConversationBuilder()
    conversation.add_call("a", "tool", " ", "here", "here")  # as some clients send it
    conversation.add_result("a", "", "here")
    (call,) = conversation.finished("input")[0]["tool_calls"]
    assert call["function"]["arguments"] == "{}"
