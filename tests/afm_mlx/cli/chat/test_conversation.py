"""`afm-mlx chat`."""

import contextlib
import json
import sys

import pytest

from afm_mlx.cli.chat.conversation import Conversation
from afm_mlx.engine.generation import stream_generate
from afm_mlx.errors import ContextLengthError
from afm_mlx.loading.load import load
from tests.tools.cli import answer, example, lines


def scratch_answer(model, tokenizer, messages, **options):
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    responses = list(stream_generate(model, tokenizer, prompt, **options))
    return "".join(r.text for r in responses), len(prompt)


@pytest.mark.parametrize("sliding", [False, True])
@pytest.mark.parametrize("system_prompt", [None, "Be brief."])
def test_a_cached_conversation_is_the_one_from_scratch(folder, rng, system_prompt, sliding):
    model, tokenizer = load(folder)
    # Answers that end by themselves, and answers that are cut.
    tokenizer.eos_token_ids.update(range(0, 1000, 9))
    limits = {"max_kv_size": 48, "sliding_window": True} if sliding else {}
    cache_limits = {"max_size": 48 if sliding else 256, "sliding_window": sliding}

    def new_cache():
        return model.make_cache(**cache_limits)

    conversation = Conversation(model, tokenizer, new_cache, system_prompt)
    for turn in range(5):
        words = rng.choice("the quick brown fox can be lazy".split(), 4)
        question = " ".join(words)
        asked = [*conversation.messages, {"role": "user", "content": question}]
        shown = []
        last = conversation.ask(question, shown.append, max_tokens=10, **limits)
        expected, whole = scratch_answer(model, tokenizer, asked, max_tokens=10, **limits)
        if not sliding:
            assert "".join(shown) == expected
        if turn and not sliding:
            # Of what came before, no more is computed again than the last answer's tokenization.
            assert last.prompt_tokens < whole - 10
    conversation.reset()
    shown = []
    conversation.ask("the fox", shown.append, max_tokens=10, **limits)
    asked = [{"role": "system", "content": system_prompt}] if system_prompt else []
    asked.append({"role": "user", "content": "the fox"})
    assert "".join(shown) == scratch_answer(model, tokenizer, asked, max_tokens=10, **limits)[0]


def test_an_interrupted_answer_stays_in_the_conversation(folder):
    model, tokenizer = load(folder)
    conversation = Conversation(model, tokenizer, lambda: model.make_cache(max_size=256))
    shown = []

    def show(text):
        shown.append(text)
        if len(shown) == 4:
            raise KeyboardInterrupt

    assert conversation.ask("the fox", show, max_tokens=10) is None
    said = "".join(shown)
    assert conversation.messages[-1] == {"role": "assistant", "content": said}
    shown = []
    asked = [*conversation.messages, {"role": "user", "content": "and then"}]
    conversation.ask("and then", shown.append, max_tokens=10)
    assert "".join(shown) == scratch_answer(model, tokenizer, asked, max_tokens=10)[0]


def test_a_full_context_leaves_the_conversation_as_it_was(folder):
    model, tokenizer = load(folder)
    conversation = Conversation(model, tokenizer, lambda: model.make_cache(max_size=160))
    conversation.ask("the fox", [].append, max_tokens=10)
    before = list(conversation.messages)
    for question, limit in (("the fox " * 90, 10), ("the dog", -1)):
        with pytest.raises(ContextLengthError):
            conversation.ask(question, [].append, max_tokens=limit)
        assert conversation.messages == before
    shown = []
    conversation.ask("hm", shown.append, max_tokens=3)
    asked = [*before, {"role": "user", "content": "hm"}]
    expected, _ = scratch_answer(model, tokenizer, asked, max_tokens=3)
    assert "".join(shown) == expected


def test_chat_through_pipes(folder, run, say):
    say(b"the fox\n\n/help\n/reset\nthe fox\n/exit\nnot reached\n")
    status, out, err = run("chat", "--model", folder, "-m", 12)
    text = answer(folder, "the fox")
    assert (status, out) == (0, f"{text}\n{text}\n")
    assert err.startswith("/help ")
    assert err.endswith("The conversation is forgotten.\n")


def test_letters_are_text_and_not_commands(folder, run, say):
    """Before there were commands with a slash, q quit, r forgot and h helped."""
    say(b"r\n")
    assert run("chat", "--model", folder, "-m", 12) == (0, answer(folder, "r") + "\n", "")


def test_lines_between_quotes_are_one_message(folder, run, say, fails):
    say(b'"""\nthe fox\n\nthe dog\n"""\n/reset\n"the" fox\n')
    status, out, _ = run("chat", "--model", folder, "-m", 12)
    expected = [answer(folder, text) for text in ("the fox\n\nthe dog", '"the" fox')]
    assert (status, out.split("\n")[:-1]) == (0, "\n".join(expected).split("\n"))
    say(b'"""\nthe fox\n')
    assert "ends within a message of several lines" in fails("chat", "--model", folder)


def test_chat_ends_with_its_input(folder, run, say):
    say(b"the fox")
    assert run("chat", "--model", folder, "-m", 12)[:2] == (0, answer(folder, "the fox") + "\n")


def test_chat_survives_a_full_context(folder, run, say):
    say(b"the fox\n" + b"fox " * 300 + b"\nthe fox\n/reset\nthe fox\n")
    status, out, err = run("chat", "--model", folder, "-m", 5)
    assert status == 0
    full, forgotten = err.splitlines()
    assert forgotten == "The conversation is forgotten."
    assert full.startswith(
        "The context of 256 tokens is full: the conversation with this question takes "
    )
    assert full.endswith("The question is left out of the conversation.")
    for way_out in ("/save FILE and /reset", "start afm-mlx chat with --sliding-window"):
        assert way_out in full
    assert "max_kv_size" not in full
    text = answer(folder, "the fox", max_tokens=5)
    assert out.startswith(f"{text}\n")
    assert out.endswith(f"{text}\n")


def test_an_answer_that_fills_the_context_says_so(folder, run, say):
    say(b"the fox\n")
    status, _, err = run("chat", "--model", folder, "-m", -1, "--max-kv-size", 64)
    assert status == 0
    assert "of 64 tokens is full" in err
    assert "the answer needs more than the rest" in err


def test_chat_refuses_bytes_that_are_no_text(folder, fails, say):
    say(b"\xff\n")
    assert "line 1 of standard input is not UTF-8" in fails("chat", "--model", folder)


def test_chat_ends_at_a_request_that_no_turn_can_honour(folder, fails, say):
    say(b"the fox\n")
    assert "max_tokens is 0" in fails("chat", "--model", folder, "-m", 0)


@pytest.mark.parametrize("seed", range(3))
def test_ctrl_c_anywhere_leaves_a_conversation_that_goes_on(folder, rng, seed):
    """At any line of Python that runs for an answer: while the prompt is written, computed, or answered."""
    model, tokenizer = load(folder)
    conversation = Conversation(model, tokenizer, lambda: model.make_cache(max_size=256))
    conversation.ask("the quick brown fox", [].append, max_tokens=10)
    before = conversation.turns
    countdown = int(rng.spawn(seed + 1)[-1].integers(1, 25_000))  # an answer takes some 26,000

    def interrupt(frame, event, argument):
        nonlocal countdown
        countdown -= 1
        if not countdown:
            raise KeyboardInterrupt
        return interrupt

    tracer = sys.gettrace()
    sys.settrace(interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        conversation.ask("the lazy", [].append, max_tokens=10)
    sys.settrace(tracer)
    turns = conversation.turns
    assert turns[:2] == before
    if turns != before:
        assert [turn["role"] for turn in turns[2:]] == ["user", "assistant"]
    shown = []
    conversation.ask("and then", shown.append, max_tokens=10)
    asked = [*turns, {"role": "user", "content": "and then"}]
    assert "".join(shown) == scratch_answer(model, tokenizer, asked, max_tokens=10)[0]


def test_ctrl_c_stops_an_answer_and_not_the_chat(folder, run, say, monkeypatch):
    from afm_mlx.cli.chat import conversation

    def interrupted_once(*args, **kwargs):
        monkeypatch.undo()
        yield from list(stream_generate(*args, **kwargs))[:3]
        raise KeyboardInterrupt

    say(b"the fox\n/reset\nthe fox\n")
    stdin = sys.stdin
    monkeypatch.setattr(conversation, "stream_generate", interrupted_once)
    status, out, err = main_with_stdin(run, stdin, "chat", "--model", folder, "-m", 12)
    assert status == 0
    assert "Stopped." in err
    assert out.endswith("\n" + answer(folder, "the fox") + "\n")


def main_with_stdin(run, stdin, *argv):
    sys.stdin, kept = stdin, sys.stdin
    try:
        return run(*argv)
    finally:
        sys.stdin = kept


def test_a_model_without_a_chat_template(tmp_path, run, fails, say):
    from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_model

    folder = tmp_path / "llama"
    write_zoo_folder(folder, "llama", zoo_model("llama", 50, seed=1), word_tokenizer_json(50))
    argv = ("--model", folder)
    status, out, err = run("generate", *argv, "-p", "w2 w3 w4", "-m", 6, "--json")
    assert (status, json.loads(out)["prompt_tokens"]) == (0, 3), err
    assert "the chat template, which is missing" in fails("generate", *argv, "--system-prompt", "x")
    assert "--sliding-window is for AFM" in fails("generate", *argv, "--sliding-window")
    assert "is for AFM models" in fails("generate", *argv, "--prompt-cache-file", "x.safetensors")
    say(b"w2\n")
    assert "no chat template" in fails("chat", *argv)
    chats = lines(tmp_path / "chats.jsonl", example("a", "w2", "w3"))
    assert "no chat template" in fails("evaluate", *argv, "--data", chats)
    assert "no chat template" in fails("perplexity", *argv, "--data-path", chats)
    texts = lines(tmp_path / "texts.jsonl", {"text": "w2 w3 w4"})
    facts = json.loads(run("perplexity", *argv, "--data-path", texts, "--json")[1])
    assert facts["tokens"] == 3  # the last is the end
