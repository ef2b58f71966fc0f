"""A chat through pipes: messages, full contexts, errors, Ctrl-C."""

import itertools
import signal

import pytest

from afm_mlx.cli.chat import dialogue, loop
from afm_mlx.engine.generation import stream_generate
from afm_mlx.errors import AFMError, RequestError
from tests.tools.cli import answer

LEFT_OUT = "The question is left out of the conversation."


def test_messages_are_answered_until_the_input_ends(chat, run, say, folder):
    text = answer(folder, "the fox")
    assert chat("the fox", "", "/reset", "the fox", "/exit", "not reached") == (
        f"{text}\n{text}\n",
        ["The conversation is forgotten."],
    )
    say(b"the fox")
    assert run("chat", "--model", folder, "-m", 12) == (0, f"{text}\n", "")


def test_lines_between_quotes_are_one_message(chat, folder, say, fails):
    out, _ = chat('"""', "the fox", "", "the dog", '"""', "/reset", '"the" fox')
    answers = [answer(folder, text) for text in ("the fox\n\nthe dog", '"the" fox')]
    assert out == "".join(f"{text}\n" for text in answers)
    say(b'"""\nthe fox\n')
    assert "ends within a message of several lines" in fails("chat", "--model", folder)


@pytest.mark.parametrize(
    ("said", "flags", "says"),
    [
        (b"\xff\n", (), "line 1 of standard input is not UTF-8"),
        (b"x\n", ("-m", 0), "max_tokens is 0"),
    ],
)
def test_what_no_turn_can_honour_ends_a_chat(folder, fails, say, said, flags, says):
    say(said)
    assert says in fails("chat", "--model", folder, *flags)


def test_a_full_context_names_the_ways_out(chat, folder):
    out, (full, forgotten) = chat("the fox", "fox " * 300, "/reset", "the fox")
    assert full.startswith(
        "The context of 256 tokens is full: the conversation with this question takes "
    )
    assert full.endswith(LEFT_OUT)
    for way_out in ("/save FILE and /reset", "start afm-mlx chat with --sliding-window"):
        assert way_out in full
    assert forgotten == "The conversation is forgotten."
    assert out == f"{answer(folder, 'the fox')}\n" * 2


def test_an_answer_that_fills_the_context_says_so(chat):
    _, (full,) = chat("the fox", flags=["-m", -1, "--max-kv-size", 64])
    assert "of 64 tokens is full" in full
    assert "the answer needs more than the rest" in full


def failing(monkeypatch, number, error, tokens=0):
    """Have the answer of that number raise an error after some tokens."""
    calls = itertools.count(1)

    def stream(*args, **kwargs):
        responses = stream_generate(*args, **kwargs)
        if next(calls) == number:
            yield from itertools.islice(responses, tokens)
            raise error
        yield from responses

    monkeypatch.setattr(dialogue, "stream_generate", stream)


@pytest.mark.parametrize("error", [RequestError("No room."), AFMError("Odd."), KeyboardInterrupt()])
def test_no_error_ends_a_chat_that_has_something_to_lose(chat, monkeypatch, error):
    """Nor does Ctrl-C, which leaves the question out, too, before its answer begins."""
    whole, _ = chat("the fox", "and then")
    failing(monkeypatch, 2, error)
    out, notes = chat("the fox", "the dog", "and then")
    assert notes == [f"{str(error) or 'Stopped before the answer began.'} {LEFT_OUT}"]
    assert out == whole


def test_ctrl_c_stops_an_answer_and_not_the_chat(chat, folder, monkeypatch):
    failing(monkeypatch, 1, KeyboardInterrupt, tokens=3)
    out, notes = chat("the fox", "/reset", "the fox")
    assert notes == ["Stopped.", "The conversation is forgotten."]
    assert out.endswith(f"\n{answer(folder, 'the fox')}\n")


def test_ctrl_c_stops_a_command_and_not_the_chat(chat, folder, monkeypatch):
    monkeypatch.setattr(loop, "read_conversation", lambda path: signal.raise_signal(signal.SIGINT))
    assert chat("/load x", "the fox") == (answer(folder, "the fox") + "\n", ["Stopped."])
