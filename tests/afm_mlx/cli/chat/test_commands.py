"""Commands of a chat, through pipes."""

import itertools
import json
import os
import signal

import mlx.core as mx
import pytest

from afm_mlx.cli import options
from afm_mlx.cli.chat import commands, conversation
from afm_mlx.cli.chat.interrupts import Interrupts
from afm_mlx.engine import generation
from afm_mlx.errors import AFMError, RequestError
from afm_mlx.loading.load import load
from tests.tools.cli import answer


@pytest.fixture
def chat(folder, run, say):
    """Say lines in a chat; returns what it answers and what it notes."""

    def chat(*lines, **flags):
        say("".join(f"{line}\n" for line in lines).encode())
        argv = [part for name, value in flags.items() for part in (f"--{name}", value)]
        status, out, err = run("chat", "--model", folder, "-m", 8, *argv)
        assert status == 0
        return out, err.splitlines()

    return chat


def continued(folder, messages, **arguments):
    """What the library says to a whole conversation."""
    model, tokenizer = load(folder)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return generation.generate(model, tokenizer, prompt, max_tokens=8, **arguments)


def test_an_unknown_command_is_told_and_not_sent(chat):
    out, notes = chat("/sav x", "/usr/bin/env is what?", "/" + "x" * 5000)
    assert out == ""
    assert notes[0].startswith("There is no command '/sav'; did you mean /save?")
    assert notes[1].startswith("There is no command '/usr/bin/env'. /help lists them.")
    assert len(notes) == 3
    assert max(map(len, notes)) < 500


def test_a_message_may_begin_with_a_slash(chat, folder):
    out, notes = chat("//etc/hosts")
    assert (out, notes) == (answer(folder, "/etc/hosts", max_tokens=8) + "\n", [])


def test_a_command_says_what_belongs_behind_it(chat):
    _, notes = chat("/save", "/reset now", "/exit")
    assert notes == [
        "/save needs something behind it: /save FILE",
        "/reset takes nothing behind it, and got 'now'.",
    ]


def test_help_names_every_command(chat):
    _, notes = chat("/help")
    assert [note.split()[0] for note in notes[: len(commands.COMMANDS)]] == list(commands.COMMANDS)


def test_instructions_are_given_shown_and_taken_back(chat, folder):
    out, notes = chat(
        "/system", "/system Be brief.", "the fox", "/system", '/system ""', "/reset", "the fox"
    )
    asked = {"role": "user", "content": "the fox"}
    instructed = continued(folder, [{"role": "system", "content": "Be brief."}, asked])
    assert out == f"{instructed}\n{continued(folder, [asked])}\n"
    assert notes[:4] == [
        "There are no instructions.",
        "Instructions: Be brief.",
        "Instructions: Be brief.",
        "There are no instructions.",
    ]


def test_retry_puts_another_seeds_answer_in_place_of_the_last(chat, folder, monkeypatch, tmp_path):
    def sampler(logprobs):
        return mx.random.categorical(logprobs)

    monkeypatch.setattr(options, "sampler_of", lambda *args: sampler)
    file = tmp_path / "saved.json"
    out, _ = chat("the fox", "/retry", "/retry", f"/save {file}", seed=5)
    asked = {"role": "user", "content": "the fox"}
    answers = [continued(folder, [asked], sampler=sampler, seed=5 + n) for n in range(3)]
    assert len(set(answers)) == 3
    assert out == "".join(f"{text}\n" for text in answers)
    assert json.loads(file.read_text())["messages"] == [
        asked,
        {"role": "assistant", "content": answers[-1]},
    ]


def test_retry_without_a_question_and_without_chance(chat):
    out, notes = chat("/retry", "the fox", "/retry")
    assert notes[0] == "There is no question yet that could be answered again."
    assert len(set(out.splitlines())) == 1
    assert notes[1].startswith("The same again: without --temp")
    assert len(notes) == 2


def test_retry_asks_a_question_again_that_got_no_answer(chat, folder, monkeypatch):
    """Its adapter could not be read at first; without one it can."""
    (folder / "adapters" / "gone").mkdir(parents=True)
    monkeypatch.setattr(
        "afm_mlx.cli.chat.conversation.Conversation.switch",
        lambda self, name: setattr(self, "adapter", name),
    )
    out, notes = chat("/adapter gone", "the fox", "/adapter", "/retry")
    assert "The question is left out of the conversation." in notes[1]
    assert out == answer(folder, "the fox", max_tokens=8) + "\n"


def test_a_saved_conversation_goes_on(chat, folder, tmp_path):
    file = tmp_path / "my chat.json"
    whole, _ = chat("/system Be brief.", "the fox", "and then")
    first, _ = chat("/system Be brief.", "the fox", f"/save {file}")
    record = json.loads(file.read_text())
    assert record["adapter"] is None
    assert [message["role"] for message in record["messages"]] == ["system", "user", "assistant"]
    second, notes = chat("the dog", f"/load {file}", "and then")
    assert notes == ["The conversation goes on after 2 messages."]
    assert whole == first + second.split("\n", 1)[1]
    again, _ = chat(f"/load {file}", "/retry")
    assert again == first


def test_save_replaces_no_file_but_its_own(chat, tmp_path):
    file = tmp_path / "chat.json"
    file.write_text("precious")
    _, notes = chat(f"/save {file}", "the fox", f"/save {file}", f"/save {tmp_path}")
    assert notes[0] == "There is no conversation yet that could be saved."
    assert "exists, and is not of this chat" in notes[1]
    assert "exists, and is not of this chat" in notes[2]
    assert file.read_text() == "precious"
    file.unlink()
    _, notes = chat("the fox", f"/save {file}", "the dog", f"/save {file}")
    assert len(notes) == 2
    assert len(json.loads(file.read_text())["messages"]) == 4


def test_save_says_why_it_can_not(chat, tmp_path):
    _, notes = chat("the fox", f"/save {tmp_path}/no/x.json", "/save " + "x" * 5000, "/save a\0b")
    assert "No such file or directory" in notes[0]
    assert "too long" in notes[1]
    assert "is no name of a file" in notes[2]
    assert len(notes) == 3


USER = {"role": "user", "content": "x"}
HOSTILE = {
    "nothing": b"",
    "bytes": b"\xff\xfe\x00",
    "nested": b"[" * 100_000,
    "a huge number": b'{"messages": [], "adapter": ' + b"9" * 10_000 + b"}",
    "a list": json.dumps([USER]).encode(),
    "no messages": b'{"adapter": null}',
    "messages that are a string": b'{"messages": "x"}',
    "no message": b'{"messages": []}',
    "a number for a message": b'{"messages": [1]}',
    "a role": json.dumps({"messages": [{**USER, "role": "root"}]}).encode(),
    "a late system message": json.dumps({"messages": [USER, {**USER, "role": "system"}]}).encode(),
    "no content": b'{"messages": [{"role": "user"}]}',
    "half a character": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "half a key": b'{"messages": [{"role": "tool", "content": {"\\udfff": 1}}]}',
    "an unknown key": json.dumps({"messages": [USER], "tools": []}).encode(),
    "an unknown adapter": json.dumps({"messages": [USER], "adapter": "x"}).encode(),
    "a number for an adapter": json.dumps({"messages": [USER], "adapter": 1}).encode(),
    "deep content": b'{"messages": [{"role": "tool", "content": %s}]}'
    % (b'{"a":' * 5000 + b"1" + b"}" * 5000),
    "megabytes": json.dumps({"messages": [{**USER, "content": "x" * (5 << 20)}]}).encode(),
}


def test_a_hostile_file_is_one_error_and_the_conversation_stays(chat, tmp_path):
    for name, content in HOSTILE.items():
        (tmp_path / name).write_bytes(content)
    os.mkfifo(tmp_path / "pipe")
    names = [*HOSTILE, "pipe", ".", "missing"]
    whole, _ = chat("/system Be brief.", "the fox", "and then")
    loads = [f"/load {tmp_path / name}" for name in names]
    out, notes = chat("/system Be brief.", "the fox", *loads, "and then")
    assert out == whole
    assert len(notes) == 1 + len(names)
    assert not any("goes on" in note for note in notes)
    assert max(map(len, notes)) < 1000


def test_stats(chat):
    _, notes = chat("/stats", "the fox", "/stats")
    before, after = notes[:4], notes[4:]
    assert before[0] == "last answer  none yet"
    assert before[1] == "context      0 tokens of 256"
    assert after[0].startswith("last answer  8 tokens, ")
    assert " per second; before it " in after[0]
    assert int(after[1].split()[1]) > 8
    assert after[2].startswith("memory       0.0")
    assert after[3] == "adapter      none"


# -- what goes wrong in an answer


def failing_at(number, error, monkeypatch):
    """Have the answer of that number raise an error at once."""
    calls = itertools.count(1)

    def stream(*args, **kwargs):
        if next(calls) == number:
            raise error
        yield from generation.stream_generate(*args, **kwargs)

    monkeypatch.setattr(conversation, "stream_generate", stream)


@pytest.mark.parametrize("error", [RequestError("No room."), AFMError("Odd.")])
def test_no_error_ends_a_chat_that_has_something_to_lose(chat, monkeypatch, error):
    whole, _ = chat("the fox", "and then")
    failing_at(2, error, monkeypatch)
    out, notes = chat("the fox", "the dog", "and then")
    assert notes == [f"{error} The question is left out of the conversation."]
    assert out == whole


# -- Ctrl-C


def test_ctrl_c_before_an_answer_begins_leaves_the_question_out(chat, monkeypatch):
    whole, _ = chat("the fox", "and then")
    failing_at(2, KeyboardInterrupt(), monkeypatch)
    out, notes = chat("the fox", "the dog", "and then")
    left_out = "The question is left out of the conversation."
    assert notes == [f"Stopped before the answer began. {left_out}"]
    assert out == whole


def test_ctrl_c_stops_a_command_and_not_the_chat(chat, folder, monkeypatch):
    def waits(path):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(commands, "read_conversation", waits)
    out, notes = chat("/load x", "the fox")
    assert notes == ["Stopped."]
    assert out == answer(folder, "the fox", max_tokens=8) + "\n"


def test_ctrl_c_counts_once_and_only_where_it_is_allowed():
    before = signal.getsignal(signal.SIGINT)
    cleaned = False
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), interrupts.allowed():
            try:
                signal.raise_signal(signal.SIGINT)
            finally:
                signal.raise_signal(signal.SIGINT)
                cleaned = True
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt), interrupts.allowed():
            signal.raise_signal(signal.SIGINT)
    assert cleaned
    assert signal.getsignal(signal.SIGINT) is before


def test_an_ignored_ctrl_c_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts, interrupts.allowed():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
