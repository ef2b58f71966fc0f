"""Thoughts on the command line: `generate` and `chat` with --think and --no-think; answers follow a text."""

import json

import pytest

from afm_mlx.cli.thoughts import Thoughts
from afm_mlx.loading.load import load
from tests.tools.cases import each
from tests.tools.model_scripts import FollowsText
from tests.tools.zoo_chats import write_family_folder

MARKS = {
    "qwen3": ("<think>\n", "\n</think>\n\n"),
    "qwen3 thinking": ("", "\n</think>\n\n"),  # the prompt begins the thought
    "harmony": (
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
}
HM = "Hm. So.\n\nIt <b>is."


@pytest.fixture(scope="module", params=MARKS)
def thinking(request, tmp_path_factory):
    """A folder of a model that thinks, and what it writes before and after a thought."""
    folder = tmp_path_factory.mktemp("zoo") / "model"
    return write_family_folder(folder, request.param), *MARKS[request.param]


@pytest.fixture
def follow(monkeypatch):
    """Make answers follow a text; returns the prompts that they are given."""
    options, prompts = Thoughts.options, []

    def follow(text, end=None):
        def followed(self, prompt, constraint=None, seen=None):
            prompts.append(self.tokenizer.decode(prompt))
            made = options(self, prompt, constraint, seen)
            script = FollowsText(self.tokenizer, text, len(prompt[-(seen or 0) :]), end)
            return made | {"logits_processors": [script, *made.get("logits_processors", ())]}

        monkeypatch.setattr(Thoughts, "options", followed)
        return prompts

    init = Thoughts.__init__

    def with_tokenizer(self, tokenizer, is_on):
        self.tokenizer = tokenizer
        init(self, tokenizer, is_on)

    monkeypatch.setattr(Thoughts, "__init__", with_tokenizer)
    return follow


@each("flags", [(), ("--think",)])
def test_generate_prints_thoughts_on_standard_error(thinking, follow, run, flags):
    folder, begin, end = thinking
    follow(f"{begin}{HM}{end}Fine.")
    argv = ("generate", "--model", folder, "-p", "How?", *flags)
    assert run(*argv, "--verbose", "F") == (0, "Fine.\n", f"{HM}\n\n")
    status, out, err = run(*argv, "--json")
    facts = json.loads(out)
    assert (status, facts["text"], facts["thought"], err) == (0, "Fine.", HM, "")


def test_no_think_ends_or_forbids_the_thought(thinking, follow, run):
    folder, begin, _ = thinking
    opening = "<|channel|>final<|message|>" if "channel" in begin else ""
    follow(f"{opening}Fine.")
    argv = ("generate", "--model", folder, "-p", "How?", "--verbose", "F", "--no-think")
    assert run(*argv) == (0, "Fine.\n", "")
    if "<think>" in begin:  # a model that thinks nevertheless can't
        follow(f"{begin}Fine.")
        status, out, err = run(*argv)
        assert (status, err) == (0, "")
        assert "<think>" not in out


def test_a_constraint_holds_behind_the_thought(thinking, follow, run):
    folder, begin, end = thinking
    follow(f"{begin}{HM}{end}so")
    argv = ("generate", "--model", folder, "-p", "How?", "--verbose", "F", "--choices", "so", "no")
    assert run(*argv) == (0, "so\n", f"{HM}\n\n")


@each("cut", [12, 15])
def test_a_thought_that_is_cut_off_ends_and_the_answer_is_completed(thinking, follow, run, cut):
    """At any token: within a thought, a character of it, or a mark."""
    folder, begin, end = thinking
    follow(f"{begin}Hm é 日本語 – é 日本語 – é 日本語 – é 日本語 –{end}so")
    argv = ("generate", "--model", folder, "-p", "How?", "--choices", "so", "--verbose", "F")
    for count in range(cut, cut + 3):
        status, out, err = run(*argv, "-m", count, "--at-limit", "complete")
        assert (status, out) == (0, "so\n"), count
        assert err.startswith("Hm é")
        assert not any(mark in err for mark in ("</think>", "<|end|>"))
    status, out, err = run(*argv, "-m", cut)
    assert (status, out) == (2, "")
    assert "ask for the shortest completion with --at-limit complete" in err


def test_chat_leaves_thoughts_to_the_template(thinking, follow, run, say):
    folder, begin, end = thinking
    prompts = follow(f"{begin}{HM}{end}Fine.")
    say(b"How?\nAnd now?\n")
    assert run("chat", "--model", folder) == (0, "Fine.\nFine.\n", f"{HM}\n\n" * 2)
    assert "Fine." in prompts[1]
    assert "Hm." not in prompts[1]  # these templates leave past thoughts out
    opening = "<|channel|>final<|message|>" if "channel" in begin else ""
    follow(f"{opening}Fine.")
    say(b"How?\n")
    assert run("chat", "--model", folder, "--no-think") == (0, "Fine.\n", "")


def test_thoughts_that_are_off_end_at_once_in_each_turn_of_a_chat(tmp_path, follow, run, say):
    """In the second turn, logits processors are given what the prompt cache lacks."""
    folder = write_family_folder(tmp_path / "model", "harmony")
    _, tokenizer = load(folder)
    begin, end = MARKS["harmony"]
    follow(f"{begin}Hm. Hm. Hm.{end}Fine.", tokenizer.convert_tokens_to_ids("<|end|>"))
    say(b"How?\nAnd now?\nAnd then?\n")
    assert run("chat", "--model", folder, "--no-think") == (0, "Fine.\n" * 3, "")


def test_models_that_do_not_think(tmp_path, fails, folder):
    other = write_family_folder(tmp_path / "gemma", "gemma3")
    for path in (other, folder):
        for command in ("generate", "chat"):
            assert "answers without thinking first" in fails(command, "--model", path, "--think")
    argv = ("generate", "--model", other, "--ignore-chat-template")
    assert "--no-think needs the chat template, which --ignore" in fails(*argv, "--no-think")
    (other / "chat_template.jinja").unlink()
    assert "--think needs the chat template, which is missing" in fails(*argv[:3], "--think")
