"""Messages that are put together from items or blocks."""

import pytest

from afm_mlx.server.conversation import Conversation
from afm_mlx.server.errors import ApiError


def calls(*ids):
    """A conversation in which the model has made calls."""
    conversation = Conversation()
    conversation.add_text("user", "Go", "here")
    for each in ids:
        conversation.add_call(each, f"tool_{each}", "{}", "here")
    return conversation


def test_results_stand_in_the_order_of_their_calls():
    conversation = calls("a", "b", "c")
    for each in "cab":
        conversation.add_result(each, each.upper(), "here")
    _, assistant, *results = conversation.finished("input")
    assert [call["id"] for call in assistant["tool_calls"]] == ["a", "b", "c"]
    assert [result["content"] for result in results] == ["A", "B", "C"]
    # The next answer's calls may have the same ids.
    conversation.add_call("b", "tool_b", "{}", "here")
    conversation.add_result("b", "again", "here")
    assert conversation.finished("input")[-1]["content"] == "again"


def test_calls_join_the_text_before_them_and_instructions_come_first():
    conversation = Conversation([{"role": "system", "content": "One"}])
    conversation.add_system("Two", "here")
    conversation.add_text("user", "Go", "here")
    conversation.add_text("assistant", "I will", "here")
    conversation.add_call("a", "tool", "{}", "here")
    conversation.add_result("a", "done", "here")
    kept = conversation.finished("input")
    assert [message["role"] for message in kept] == ["system", "user", "assistant", "tool"]
    assert kept[0]["content"] == "One\n\nTwo"
    assert kept[2]["content"] == "I will"
    assert conversation.finished("input", "Zero")[0]["content"] == "Zero\n\nOne\n\nTwo"
    # What goes on from it leaves it as it is.
    later = Conversation(kept)
    later.add_text("assistant", "All done", "here")
    later.add_call("b", "tool", "{}", "here")
    assert len(kept) == 4
    assert "tool_calls" not in kept[3]


def test_what_belongs_to_nothing_is_refused():
    conversation = calls("a", "b")
    with pytest.raises(ApiError, match="'a', as of another call") as caught:
        conversation.add_call("a", "tool", "{}", "input[3].call_id")
    assert caught.value.param == "input[3].call_id"
    for go_on in (
        lambda: conversation.finished("here"),
        lambda: conversation.add_text("user", "Well?", "here"),
        lambda: conversation.add_text("assistant", "I did", "here"),
    ):
        with pytest.raises(ApiError, match="here: the call 'a' has no result before it"):
            go_on()
    conversation.add_result("b", "", "here")
    with pytest.raises(ApiError, match="'b', a call that has a result already"):
        conversation.add_result("b", "", "here")
    with pytest.raises(ApiError, match="'x', a call that the answer before it didn't make"):
        conversation.add_result("x", "", "here")
    with pytest.raises(ApiError, match="instructions within a conversation"):
        conversation.add_system("Be brief", "here")
    with pytest.raises(ApiError, match="no message to answer"):
        Conversation().finished("input")
