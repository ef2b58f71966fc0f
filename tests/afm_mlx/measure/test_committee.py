"""A committee's answers: the same as each member's alone, and what ranking them makes of them."""

import json

import numpy as np
import pytest

from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.engine.generation import generate
from afm_mlx.engine.samplers import make_sampler
from afm_mlx.errors import DataError
from afm_mlx.guidance.call_forms import AFM_CALLS
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.measure.committee import (
    Candidate,
    MemberFigures,
    load_prompts,
    member_figures,
    pair_record,
    rank,
    read_answers,
    sample_answers,
    winner_record,
)
from afm_mlx.measure.rewards import make_rewards
from tests.tools.constraints import nano_tokenizer, wide_model
from tests.tools.engines import Adapters

PROMPTS = [
    (f"prompts.jsonl:{i}", {"prompt": text})
    for i, text in enumerate(["one", "two and more words", "three"], start=1)
]


@pytest.fixture
def model(rng):
    return wide_model(rng, extra=0)


@pytest.fixture
def tokenizer():
    return nano_tokenizer()


@pytest.fixture
def pool(rng, tmp_path, model):
    pool, adapters = AdapterPool(model), Adapters(model, rng, tmp_path)
    adapters.add(pool, "a", 4)
    adapters.add(pool, "b", 2)
    return pool


@pytest.mark.parametrize("batch_size", [2, 32])
def test_members_answer_as_they_do_alone(model, tokenizer, pool, batch_size):
    members = ["base", "a", "b"]
    options = {"max_tokens": 6, "adapters": pool}
    found = list(
        sample_answers(model, tokenizer, PROMPTS, members, 1, batch_size=batch_size, **options)
    )
    for (_, sample), answers in zip(PROMPTS, found, strict=True):
        messages = [{"role": "user", "content": sample["prompt"]}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        alone = [
            generate(model, tokenizer, ids, adapter=None if m == "base" else m, **options)
            for m in members
        ]
        assert [each.member for each in answers] == members
        assert [each.answer for each in answers] == alone
        assert {each.tokens for each in answers} <= set(range(1, 7))


def test_samples_depend_on_their_numbers_alone(model, tokenizer, pool):
    def answers(**options):
        sampler = make_sampler(1.0)
        options = {"max_tokens": 6, "adapters": pool, "sampler": sampler, **options}
        return list(sample_answers(model, tokenizer, PROMPTS, ["a", "base"], 3, **options))

    whole = answers(seed=4)
    assert [len(each) for each in whole] == [6, 6, 6]
    assert [each.member for each in whole[0]] == ["a"] * 3 + ["base"] * 3
    assert len({each.answer for each in whole[0]}) > 3
    assert answers(seed=4, chosen=[1], batch_size=3) == whole[1:2]
    assert answers(seed=5) != whole


def test_answers_under_a_constraint(model, tokenizer):
    options = {"sampler": make_sampler(1.0), "max_tokens": 8}
    colors = Constraint.choices(["red", "green"])
    (answers,) = sample_answers(
        model, tokenizer, PROMPTS[:1], ["base"], 4, constraint=colors, **options
    )
    assert {each.answer for each in answers} <= {"red", "green"}
    assert all(each.is_whole for each in answers)
    letters = Constraint.regex("[a-z]{300}")
    (answers,) = sample_answers(
        model, tokenizer, PROMPTS[:1], ["base"], 2, constraint=letters, **options
    )
    assert not any(each.is_whole for each in answers)


# -- ranking


def ranked(answers, sample, rewards=("length:4",), verify=None, whole=True):
    candidates = [Candidate(m, text, len(text), whole) for m, text in answers]
    check = None if verify is None else make_rewards([verify])
    return rank("data:1", sample, candidates, rewards and make_rewards(rewards), check)


def test_the_best_and_the_worst_are_a_pair():
    one = ranked([("a", "12345678"), ("b", "1234"), ("a", "12345"), ("b", "1")], {"prompt": "p"})
    assert one.rewards.tolist() == [0.5, 1, 0.8, 1]
    assert pair_record(one) == {"prompt": "p", "chosen": "1234", "rejected": "12345678"}
    assert winner_record(one) == {"prompt": "p", "completion": "1234"}


def test_ties_have_no_pair():
    one = ranked([("a", "1"), ("b", "2")], {"prompt": "p"})
    assert pair_record(one) is None
    assert winner_record(one) == {"prompt": "p", "completion": "1"}


def test_a_check_divides_the_answers():
    answers = [("a", "12345678"), ("b", "xx"), ("a", "123456"), ("b", "x")]
    one = ranked(answers, {"prompt": "p"}, verify="regex:\\d+")
    assert pair_record(one) == {"prompt": "p", "chosen": "123456", "rejected": "xx"}
    alone = ranked(answers, {"prompt": "p"}, None, "regex:\\d+")
    assert pair_record(alone) == {"prompt": "p", "chosen": "12345678", "rejected": "xx"}
    nothing = ranked(answers, {"prompt": "p"}, verify="regex:[a-f]")
    assert pair_record(nothing) is None
    assert winner_record(nothing) is None
    all_pass = ranked(answers, {"prompt": "p"}, verify="regex:.*")
    assert pair_record(all_pass) == {"prompt": "p", "chosen": "xx", "rejected": "12345678"}


def test_answers_that_are_cut_off_do_not_win():
    one = ranked([("a", "1"), ("b", "12345678")], {"prompt": "p"}, whole=False)
    assert winner_record(one) is None
    assert pair_record(one) is None


def test_chats_have_lists_of_messages():
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    one = ranked([("a", "12345678"), ("b", "1")], {"messages": messages, "answer": "x"})
    assert pair_record(one) == {
        "prompt": messages,
        "chosen": [{"role": "assistant", "content": "1"}],
        "rejected": [{"role": "assistant", "content": "12345678"}],
    }
    won = {"messages": [*messages, {"role": "assistant", "content": "1"}]}
    assert winner_record(one) == won
    assert winner_record(ranked([("a", "1")], {"prompt": messages})) == won


def test_calls_are_calls_of_the_message():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    call = AFM_CALLS.opening + '{"name": "f", "arguments": {"a": 1}}' + AFM_CALLS.closing
    sample = {"prompt": "p", "tools": tools, "answer": call}
    one = ranked([("a", "no"), ("b", call)], sample, ["exact"])
    pair = pair_record(one)
    assert pair["tools"] == winner_record(one)["tools"] == tools
    assert pair["prompt"] == [{"role": "user", "content": "p"}]
    (function,) = [c["function"] for c in pair["chosen"][0]["tool_calls"]]
    assert function == {"name": "f", "arguments": {"a": 1}}
    assert pair["rejected"] == [{"role": "assistant", "content": "no"}]
    cut = ranked([("a", call[:-30]), ("b", call)], sample, ["exact"])
    assert pair_record(cut)["rejected"] == [{"role": "assistant", "content": call[:-30]}]


def test_figures_of_members():
    two = [
        ranked([("a", "12345678"), ("a", "1234"), ("b", "12"), ("b", "123")], {"prompt": "p"}),
        ranked([("a", "12345678"), ("a", "12345678"), ("b", "1" * 16), ("b", "1" * 8)], {}),
    ]
    a, b = member_figures(two).values()
    assert a == MemberFigures(0.625, 0.75, 0.5, 7, 0.5)
    np.testing.assert_allclose(
        [b.reward, b.best, b.wins, b.tokens, b.alike], [(2 + 0.75) / 4, 0.75, 0.5, 7.25, 0.5]
    )


# -- files


def test_prompts_and_answers_of_files(tmp_path):
    file = tmp_path / "answers.jsonl"
    cut_off = {"answer": "y", "adapter": "a", "tokens": 3, "reward": 1, "is_whole": False}
    answers = ["x", cut_off]
    lines = [{"prompt": "p", "answer": "z", "answers": answers}, {"messages": [{"role": "user"}]}]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert [record for _, record in load_prompts(file)] == lines
    assert load_prompts(file, 1) == [(f"{file}:1", lines[0])]
    asked, said = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
    file.write_text(json.dumps({"messages": [asked, said]}))
    assert load_prompts(file) == [(f"{file}:1", {"messages": [asked], "answer": "a"})]
    file.write_text(json.dumps(lines[0]))
    candidates = [Candidate("all", "x", 0), Candidate("a", "y", 3, False)]
    assert read_answers(file) == [(f"{file}:1", {"prompt": "p", "answer": "z"}, candidates)]


def test_lines_that_are_refused(tmp_path):
    file = tmp_path / "answers.jsonl"

    def refusal(line, read=read_answers):
        file.write_text(json.dumps(line))
        with pytest.raises(DataError) as caught:
            read(file)
        return str(caught.value)

    for line in (
        {"text": "x"},
        {"prompt": ""},
        {"prompt": 1},
        {"messages": []},
        {"messages": ["x"]},
        {"prompt": "p", "messages": [{"role": "user", "content": "p"}]},
    ):
        assert f"{file}:1: " in refusal([line, line])
        assert "is no prompt" in refusal([line, line], load_prompts)
    chat = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    assert "end with the assistant's" in refusal({"messages": chat, "answer": "a"})
    assert "end with the assistant's" in refusal({"messages": chat[1:]})
    assert "end with the assistant's" in refusal(
        {"messages": [*chat[:1], {**chat[1], "content": None}]}
    )
    assert "'answers' is None" in refusal({"prompt": "p"})
    assert "'answers' is 1" in refusal({"prompt": "p", "answers": 1})
    assert "'answers' is [1]" in refusal({"prompt": "p", "answers": [1]})
    assert "there are 1 answers" in refusal({"prompt": "p", "answers": ["x"]})
