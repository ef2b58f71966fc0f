"""A chat through pipes: messages, commands, full contexts, errors, Ctrl-C."""

import itertools
import json
import os
import signal

import mlx.core as mx
import pytest

from afm_mlx.cli import model_options
from afm_mlx.cli.chat import dialogue, loop
from afm_mlx.cli.chat.loop import Interrupts
from afm_mlx.engine.generation import generate, stream_generate
from afm_mlx.errors import AFMError, RequestError
from afm_mlx.loading.load import load
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
        (b"x\n", ("-m", 0), "--max-tokens/-m: 0 is out of range"),
    ],
)
def test_what_no_turn_can_honour_ends_a_chat(folder, fails, say, said, flags, says):
    say(said)
    assert says in fails("chat", "--model", folder, *flags)


def test_a_full_context_names_the_ways_out(chat, folder):
    out, (full, forgotten) = chat("the fox", "fox " * 300, "/reset", "the fox")
    beginning = "The context of 256 tokens is full: the conversation with this question takes "
    assert full.startswith(beginning)
    assert full.endswith(LEFT_OUT)
    assert "/save FILE and /reset, or start afm-mlx chat with --sliding-window" in full
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


FOX = {"role": "user", "content": "the fox"}


def continued(folder, messages, **arguments):
    """What the library says to a whole conversation."""
    model, tokenizer = load(folder)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return generate(model, tokenizer, prompt, max_tokens=12, **arguments)


def test_an_unknown_command_is_told_and_not_sent(chat, folder):
    """A message that begins with a slash has two."""
    out, notes = chat("/sav x", "/usr/bin/env is what?", "/" + "x" * 5000, "//etc/hosts")
    assert out == answer(folder, "/etc/hosts") + "\n"
    assert notes[0].startswith("There is no command '/sav'; did you mean /save?")
    assert notes[1].startswith("There is no command '/usr/bin/env'. /help lists them.")
    assert len(notes) == 3
    assert max(map(len, notes)) < 500


def test_a_command_says_what_belongs_behind_it(chat):
    _, notes = chat("/save", "/reset now", "/help", "/exit", "not reached")
    assert notes[:2] == [
        "/save needs an argument: /save FILE",
        "/reset takes no argument, and got 'now'.",
    ]
    assert [note.split()[0] for note in notes if note.startswith("/")][2:] == [*loop.COMMANDS]


@pytest.mark.parametrize("columns", [40, 72, 300])
def test_the_help_fits_the_terminal(chat, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    _, notes = chat("/help", "/exit")
    lines = [line for note in notes for line in note.split("\n")]
    assert max(map(len, lines)) <= columns
    assert (len(lines) > len(loop.COMMANDS) + len(loop._ENTRY_HELP)) == (columns < 300)


def test_instructions_are_given_shown_and_taken_back(chat, folder):
    given = ("/system Be brief.", "the fox", "/system")
    out, notes = chat("/system", *given, '/system ""', "/reset", "the fox")
    instructed = continued(folder, [{"role": "system", "content": "Be brief."}, FOX])
    assert out == f"{instructed}\n{answer(folder, 'the fox')}\n"
    assert notes == [
        "There are no instructions.",
        "Instructions: Be brief.",
        "Instructions: Be brief.",
        "There are no instructions.",
        "The conversation is forgotten.",
    ]


def test_retry_puts_another_seeds_answer_in_place_of_the_last(chat, folder, monkeypatch, tmp_path):
    sampler = mx.random.categorical
    monkeypatch.setattr(model_options, "sampler_of", lambda *args: sampler)
    file = tmp_path / "saved.json"
    typed = ("the fox", "/retry", "/retry", f"/save {file}", "/reset", "the fox")
    out, _ = chat(*typed, flags=["--seed", 5])
    answers = [continued(folder, [FOX], sampler=sampler, seed=5 + n) for n in range(3)]
    assert len(set(answers)) == 3
    assert out == "".join(f"{text}\n" for text in (*answers, answers[0]))
    said = {"role": "assistant", "content": answers[-1]}
    assert json.loads(file.read_text())["messages"] == [FOX, said]


def test_retry_without_a_question_and_without_chance(chat):
    out, notes = chat("/retry", "the fox", "/retry")
    assert notes[0] == "There is no question yet that could be answered again."
    assert out == 2 * out[: len(out) // 2]
    assert notes[1].startswith("The same again: without --temp")
    assert len(notes) == 2


def test_retry_asks_a_question_again_that_got_no_answer(chat, folder, monkeypatch):
    """Its adapter could not be read at first; without one it can."""
    (folder / "adapters" / "gone").mkdir(parents=True)
    monkeypatch.setattr(
        "afm_mlx.cli.chat.dialogue.Dialogue.switch",
        lambda self, name: setattr(self, "adapter", name),
    )
    out, notes = chat("/adapter gone", "the fox", "/adapter", "/retry")
    assert "The question is left out of the conversation." in notes[1]
    assert out == answer(folder, "the fox") + "\n"


def test_a_saved_conversation_goes_on(chat, tmp_path):
    file = tmp_path / "my chat.json"
    whole, _ = chat("/system Be brief.", "the fox", "and then")
    first, _ = chat("/system Be brief.", "the fox", f"/save {file}")
    record = json.loads(file.read_text())
    assert record["adapter"] is None
    assert [message["role"] for message in record["messages"]] == ["system", "user", "assistant"]
    second, notes = chat("the dog", f"/load {file}", "and then")
    assert notes == ["The conversation goes on after 2 messages."]
    assert whole == first + second.split("\n", 1)[1]
    assert chat(f"/load {file}", "/retry")[0] == first


def test_save_replaces_no_file_but_its_own_and_says_why_it_can_not(chat, tmp_path):
    file = tmp_path / "chat.json"
    file.write_text("precious")
    _, notes = chat(f"/save {file}", "the fox", f"/save {file}", f"/save {tmp_path}")
    assert notes[0] == "There is no conversation yet that could be saved."
    assert all("exists, and was not written by this chat" in note for note in notes[1:])
    assert file.read_text() == "precious"
    file.unlink()
    wrong = (f"{tmp_path}/no/x.json", "x" * 5000, "a\0b")
    saves = [f"/save {name}" for name in (file, *wrong)]
    _, (_, *notes, _) = chat("the fox", *saves, "the dog", f"/save {file}")
    causes = ("No such file", "too long", "not the name of a file")
    assert all(words in text for words, text in zip(causes, notes, strict=True))
    assert len(json.loads(file.read_text())["messages"]) == 4


HOSTILE = {
    "nothing": "",
    "nested": "[" * 100_000,
    "a huge number": '{"messages": [], "adapter": ' + "9" * 10_000 + "}",
    "a list": json.dumps([FOX]),
    "no messages": '{"adapter": null}',
    "messages that are a string": '{"messages": "x"}',
    "no message": '{"messages": []}',
    "a number for a message": '{"messages": [1]}',
    "half a character": '{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "half a key": '{"messages": [{"role": "tool", "content": {"\\udfff": 1}}]}',
    "an unknown key": json.dumps({"messages": [FOX], "tools": []}),
    "an unknown adapter": json.dumps({"messages": [FOX], "adapter": "x"}),
    "a number for an adapter": json.dumps({"messages": [FOX], "adapter": 1}),
    "deep content": '{"messages": [{"role": "tool", "content": %s}]}'
    % ('{"a":' * 5000 + "1" + "}" * 5000),
    "megabytes": json.dumps({"messages": [{**FOX, "content": "x" * (5 << 20)}]}),
}


def test_a_hostile_file_is_one_error_and_the_conversation_stays(chat, tmp_path):
    for name, content in HOSTILE.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    os.mkfifo(tmp_path / "pipe")
    names = [*HOSTILE, "bytes", "pipe", ".", "missing"]
    whole, _ = chat("/system Be brief.", "the fox", "and then")
    loads = [f"/load {tmp_path / name}" for name in names]
    out, notes = chat("/system Be brief.", "the fox", *loads, "and then")
    assert out == whole
    assert len(notes) == 1 + len(names)
    assert not any("goes on" in note for note in notes)
    assert notes[1 + names.index("half a character")].endswith("Change or remove it.")
    assert max(map(len, notes)) < 1000


def test_stats(chat):
    _, notes = chat("/stats", "the fox", "/stats")
    assert notes[:2] == ["last answer  none yet", "context      0 tokens of 256"]
    answer, context, memory, adapter = notes[4:]
    assert answer.startswith("last answer  12 tokens, ")
    assert " per second; before it " in answer
    assert int(context.split()[1]) > 12
    assert memory.startswith("memory       0.0")
    assert adapter == "adapter      none"


def ctrl_c():
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_counts_once_and_only_where_it_is_allowed():
    before = signal.getsignal(signal.SIGINT)
    cleaned = False
    with Interrupts() as interrupts:
        ctrl_c()
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt), interrupts.allowed():
                try:
                    ctrl_c()
                finally:
                    ctrl_c()
                    cleaned = True
            ctrl_c()
    assert cleaned
    assert signal.getsignal(signal.SIGINT) is before


def test_an_ignored_ctrl_c_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts, interrupts.allowed():
            ctrl_c()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
