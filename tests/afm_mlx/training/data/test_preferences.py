"""Preferences: TRL's forms of records, the border of prompt and answer, and batches with each answer once."""

import numpy as np
import pytest

from afm_mlx.errors import DataError
from afm_mlx.tokenizer.tokenizer import load_tokenizer, save_tokenizer
from afm_mlx.training.data.preferences import (
    LabeledAnswer,
    PreferenceBatches,
    PreferencePair,
    load_labeled_answers,
    load_preferences,
)
from tests.tools.cases import each
from tests.tools.chats import ANSWER, CALL, CHATML, NEWLINES, SYSTEM, THINKING, TOOL, USER
from tests.tools.cli import lines

OTHER = {"role": "assistant", "content": "A dog, or so."}
TEXTS = {"prompt": "Who?", "chosen": "The fox.", "rejected": "A dog, or so."}
both_ways = pytest.mark.parametrize("packed", [True, False])


@pytest.fixture(scope="module")
def tokenizer(spm_bpe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(spm_bpe, folder)
    return load_tokenizer(folder)


def load_one(tmp_path, tokenizer, record, limit=2000, load=load_preferences):
    (found,) = load(lines(tmp_path / "train.jsonl", record), "train", tokenizer, limit)
    assert found.where == f"{tmp_path / 'train.jsonl'}:1"
    return found


def chat_of(pair, answer):
    return [*pair.prompt.tolist(), *answer.tolist()]


@each(
    "record, before, tools",
    [
        (TEXTS, [USER], None),
        ({**TEXTS, "prompt": [SYSTEM, USER]}, [SYSTEM, USER], None),
        ({"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER], "id": 3}, [USER], None),
        ({"messages": [USER], "chosen": [ANSWER], "rejected": [OTHER]}, [USER], None),
        ({"prompt": "Who?", "chosen": [ANSWER], "rejected": [OTHER]}, [USER], None),
        ({"chosen": [SYSTEM, USER, ANSWER], "rejected": [SYSTEM, USER, OTHER]}, [SYSTEM, USER], None),
        # HuggingFaceH4's: the prompt's text again, and all messages of the chosen answer.
        ({"prompt": "Who?", "messages": [USER, ANSWER], "chosen": [USER, ANSWER],
          "rejected": [USER, OTHER]}, [USER], None),
        ({"chosen": [USER, ANSWER, USER, ANSWER], "rejected": [USER, ANSWER, USER, OTHER]},
         [USER, ANSWER, USER], None),
        ({**TEXTS, "tools": [TOOL]}, [USER], [TOOL]),
    ],
)  # fmt: skip
def test_forms_of_pairs(tokenizer, tmp_path, record, before, tools):
    pair = load_one(tmp_path, tokenizer, record)
    for answer, message in ((pair.chosen, ANSWER), (pair.rejected, OTHER)):
        whole = tokenizer.apply_chat_template([*before, message], tools)
        assert whole[: len(chat_of(pair, answer))] == chat_of(pair, answer)
        text = tokenizer.decode(answer.tolist()).strip()
        assert text == f"{message['content']}<turn_end>"
    start = tokenizer.apply_chat_template(before, tools, add_generation_prompt=True)
    assert pair.prompt.tolist() == start
    assert (pair.strength, pair.grades, pair.cut) == (None, None, 0)
    assert pair.prompt.dtype == pair.chosen.dtype == pair.rejected.dtype == np.int32


def test_an_answer_may_call_a_tool(tokenizer, tmp_path):
    calls = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    record = {"prompt": [USER], "chosen": [calls], "rejected": [ANSWER], "tools": [TOOL]}
    pair = load_one(tmp_path, tokenizer, record)
    assert "look" in tokenizer.decode(pair.chosen.tolist())
    assert "look" not in tokenizer.decode(pair.rejected.tolist())


@each(
    "given, strength",
    [("significantly better", 0.95), ("better", 0.85), ("slightly better", 0.75),
     ("negligibly better", 0.65), (0.5, 0.5), (1, 1.0), (None, None)],
)  # fmt: skip
def test_strengths(tokenizer, tmp_path, given, strength):
    pair = load_one(tmp_path, tokenizer, {**TEXTS, "strength": given, "grades": {"a": 1}})
    assert (pair.strength, pair.grades) == (strength, {"a": 1})


@each(
    "template, prompt, chosen, border",
    [
        (CHATML, "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n", "fox", ""),
        # The prompt's last newline and the answer's first ones are one token, of one answer.
        (CHATML, "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant", "\n\n\nfox", "\n"),
        # The prompt starts a thought, which these answers end.
        (THINKING, "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n<think>\n", "fox",
         "\n</think>\n\n"),
    ],
)  # fmt: skip
def test_answers_share_the_prompts_tokens(
    zoo_tokenizer, tmp_path, template, prompt, chosen, border
):
    tokenizer = zoo_tokenizer(template)
    pair = load_one(tmp_path, tokenizer, {**TEXTS, "chosen": chosen})
    assert tokenizer.decode(pair.prompt.tolist()) == prompt
    assert tokenizer.decode(pair.chosen.tolist()) == f"{border}{chosen}<|im_end|>"
    assert tokenizer.decode(pair.rejected.tolist()) == f"{border}A dog, or so.<|im_end|>"
    for answer, message in ((pair.chosen, {**ANSWER, "content": chosen}), (pair.rejected, OTHER)):
        whole = tokenizer.apply_chat_template([USER, message])
        assert whole[: len(chat_of(pair, answer))] == chat_of(pair, answer)


def test_a_template_without_an_end_token(zoo_tokenizer, tmp_path):
    tokenizer = zoo_tokenizer(NEWLINES)
    pair = load_one(tmp_path, tokenizer, TEXTS)
    assert tokenizer.decode(pair.rejected.tolist()) == " A dog, or so.\n"


def test_prompts_are_cut_from_the_left_for_both_answers(tokenizer, tmp_path):
    whole = load_one(tmp_path, tokenizer, TEXTS)
    longest = max(len(whole.chosen), len(whole.rejected))
    for limit in (longest + len(whole.prompt), longest + len(whole.prompt) - 1, longest + 1):
        pair = load_one(tmp_path, tokenizer, TEXTS, limit)
        kept = limit - longest
        assert pair.prompt.tolist() == whole.prompt[-kept:].tolist()
        assert pair.cut == len(whole.prompt) - kept
        assert pair.chosen.tolist() == whole.chosen.tolist()
        assert pair.rejected.tolist() == whole.rejected.tolist()
    with pytest.raises(DataError, match=rf"train.jsonl:1: an answer of {longest} tokens"):
        load_one(tmp_path, tokenizer, TEXTS, longest)


def test_labelled_answers_and_pairs_of_them(tokenizer, tmp_path):
    pair = load_one(tmp_path, tokenizer, TEXTS)
    file = lines(
        tmp_path / "labels.jsonl",
        {"prompt": "Who?", "completion": "The fox.", "label": True},
        {"prompt": [USER], "completion": [OTHER], "label": False},
        {"completion": [USER, ANSWER], "label": 1},
        TEXTS,
    )
    found = load_labeled_answers(file, "train", tokenizer, 2000)
    assert [each.is_good for each in found] == [True, False, True, True, False]
    assert [each.where for each in found] == [f"{file}:{n}" for n in (1, 2, 3, 4, 4)]
    for sample in found:
        answer = pair.chosen if sample.is_good else pair.rejected
        assert sample.prompt.tolist() == pair.prompt.tolist()
        assert sample.answer.tolist() == answer.tolist()


@each(
    "record, fault",
    [
        ([USER, ANSWER], "this is a JSON list; an object is needed"),
        ({"prompt": "a", "completion": "b"}, "lacks 'chosen' and 'rejected'; it has the keys prompt"),
        ({"chosen": "a", "rejected": "b"}, "'prompt' is missing; a text or a list"),
        ({**TEXTS, "prompt": 3}, "'prompt' is 3; a text or a list"),
        ({**TEXTS, "prompt": " "}, "an empty turn of the role 'user'"),
        ({**TEXTS, "chosen": 3}, "'chosen' is 3; a text or a list"),
        ({**TEXTS, "chosen": [3]}, r"'chosen' is \[3\]; a text or a list"),
        ({**TEXTS, "chosen": " "}, "an empty assistant turn"),
        ({**TEXTS, "chosen": []}, "messages is empty|a chat of one|differ before"),
        ({**TEXTS, "chosen": [ANSWER, USER, ANSWER]}, "'chosen' and 'rejected' differ before"),
        ({"chosen": [USER, ANSWER], "rejected": [SYSTEM, USER, ANSWER]}, "differ before their last"),
        ({"chosen": [USER, ANSWER, USER], "rejected": [USER, ANSWER, USER]}, "ends with the role 'user'"),
        ({**TEXTS, "rejected": "The fox."}, "are the same answer"),
        ({**TEXTS, "rejected": [ANSWER]}, "are the same answer"),
        ({**TEXTS, "strength": "best"}, "'strength' is 'best'; allowed are 'significantly better'"),
        ({**TEXTS, "strength": 0.4}, "'strength' is 0.4; allowed"),
        ({**TEXTS, "strength": True}, "'strength' is True; allowed"),
    ],
)  # fmt: skip
def test_a_bad_pair_is_named(tokenizer, tmp_path, record, fault):
    lines(tmp_path / "train.jsonl", TEXTS, record)
    for load in (load_preferences, load_labeled_answers):
        if load is load_labeled_answers and "completion" in record:
            continue
        with pytest.raises(DataError, match=rf"train\.jsonl:2: .*{fault}"):
            load(tmp_path, "train", tokenizer, 200)


@each(
    "record, fault",
    [
        ({"prompt": "a", "completion": "b"}, "lacks 'label'"),
        (
            {"prompt": "a", "completion": "b", "label": "good"},
            "'label' is 'good'; allowed are true",
        ),
        ({"prompt": "a", "label": True}, "lacks 'completion'"),
    ],
)
def test_a_bad_label_is_named(tokenizer, tmp_path, record, fault):
    lines(tmp_path / "train.jsonl", record)
    with pytest.raises(DataError, match=rf"train\.jsonl:1: .*{fault}"):
        load_labeled_answers(tmp_path, "train", tokenizer, 200)


# -- batches


def random_pairs(rng, count, longest=30):
    """Prompts and answers of distinct tokens, so that each token tells where it is from."""
    tokens = iter(range(1, 10**6))

    def drawn():
        return np.array([next(tokens) for _ in range(int(rng.integers(1, longest)))], np.int32)

    strengths = [None, 0.75]
    return [
        PreferencePair(drawn(), drawn(), drawn(), f"line {i}", strengths[i % 2])
        for i in range(count)
    ]


def random_labels(rng, count):
    pairs = random_pairs(rng, count)
    return [LabeledAnswer(p.prompt, p.chosen, bool(rng.integers(2)), p.where) for p in pairs]


def sequences_of(rows, count):
    """Each answer with the tokens before it, by the answers' order, as the model sees them."""
    inputs, positions, labels, answers = (
        np.array(getattr(rows, name)) for name in ("inputs", "positions", "labels", "answers")
    )
    segments = np.array(inputs > 0 if rows.segments is None else rows.segments)
    found = []
    for answer in range(count):
        chosen = positions[answers == answer]
        line, first = divmod(int(chosen[0]), inputs.shape[1])
        assert chosen.tolist() == list(range(chosen[0], chosen[-1] + 1))
        segment = segments[line, first]
        before = inputs[line, : first + len(chosen)][
            segments[line, : first + len(chosen)] == segment
        ]
        # No token of the segment follows.
        assert (segments[line] == segment).sum() == len(before)
        tokens = labels[answers == answer]
        assert before[len(before) - len(chosen) + 1 :].tolist() == tokens[:-1].tolist()
        found.append((before[: len(before) - len(chosen) + 1].tolist(), tokens.tolist()))
    return found


class Rows:
    """The arrays of mismatched answers, with those that are missing."""

    def __init__(self, arrays):
        self.segments = None
        self.__dict__.update(arrays)


@both_ways
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_pair_is_in_an_epoch_once(rng, packed, shuffle):
    pairs = random_pairs(rng, int(rng.integers(5, 40)))
    expected = sorted(
        (p.prompt.tolist(), p.chosen.tolist(), p.rejected.tolist(), p.strength or 0.9)
        for p in pairs
    )
    options = {"batch_size": 4, "max_seq_length": 64, "packed": packed, "shuffle": shuffle}
    batches = PreferenceBatches(pairs, strength=0.9, seed=int(rng.integers(99)), **options)
    targets = sum(len(p.chosen) + len(p.rejected) for p in pairs)
    assert (batches.n_targets, batches.n_scored) == (targets, targets)
    assert batches.unit == "pairs"
    for epoch in (0, 1, 3):
        found, seen = [], []
        for step in range(epoch * batches.per_epoch, (epoch + 1) * batches.per_epoch):
            batch = batches(step)
            count = batch.weights.size
            assert batch.weights.tolist() == [1] * count
            assert batch.inputs.shape[1] <= 64
            assert batch.labels.size % 256 == 0
            read = sequences_of(batch, 2 * count)
            assert batch.lengths.tolist() == [len(answer) for _, answer in read]
            for chosen, rejected, strength in zip(
                read[:count], read[count:], batch.strengths.tolist(), strict=True
            ):
                assert chosen[0] == rejected[0]
                found.append((*chosen, rejected[1], pytest.approx(strength)))
            seen += [number for number in batch.numbers.tolist() if number < targets]
        assert sorted(found, key=lambda each: each[0]) == expected
        assert sorted(seen) == list(range(targets))


@both_ways
def test_each_prompt_meets_its_label_and_another_answer(rng, packed):
    samples = random_labels(rng, 13)
    samples += [LabeledAnswer(samples[-1].prompt, s.answer, s.is_good, "") for s in samples[:2]]
    options = {"batch_size": 4, "max_seq_length": 60, "packed": packed}
    batches = PreferenceBatches(samples, **options)
    assert batches.unit == "answers"
    found, others, seen = [], [], []
    for step in range(batches.per_epoch):
        batch = batches(step)
        count = batch.weights.size
        read = sequences_of(batch, count)
        found += [(*each, good) for each, good in zip(read, batch.is_good.tolist(), strict=True)]
        mismatched = Rows(batch.mismatched)
        others += sequences_of(mismatched, count)
        for rows in (batch, mismatched):
            seen += [n for n in rows.numbers.tolist() if n < batches.n_scored]
    expected = [(s.prompt.tolist(), s.answer.tolist(), s.is_good) for s in samples]
    assert sorted(found) == sorted(expected)
    assert sorted(seen) == list(range(batches.n_scored))
    # The last three have one prompt, and are followed by the first.
    following = [*range(1, 13), 0, 0, 0]
    assert sorted(others) == sorted(
        (samples[i].prompt.tolist(), samples[j].answer.tolist()) for i, j in enumerate(following)
    )


def test_a_mismatched_prompt_is_cut_and_one_prompt_is_not_enough():
    def sample(prompt, answer):
        return LabeledAnswer(np.array(prompt), np.array(answer), True, "")

    samples = [sample([1, 2, 3, 4], [5]), sample([6], [7, 8, 9])]
    batch = PreferenceBatches(samples, batch_size=2, max_seq_length=5, shuffle=False)(0)
    read = sequences_of(Rows(batch.mismatched), 2)
    assert read == [([3, 4], [7, 8, 9]), ([6], [5])]
    with pytest.raises(DataError, match="one and the same prompt"):
        PreferenceBatches([samples[0]] * 2, batch_size=2, max_seq_length=5)


@both_ways
def test_batches_depend_on_seed_and_number(rng, packed):
    pairs = random_pairs(rng, 20)

    def make(**changes):
        options = {"batch_size": 4, "max_seq_length": 64, "packed": packed, "seed": 3}
        return PreferenceBatches(pairs, **(options | changes))

    batches, again = make(), make()
    for step in (7, 0, 3, 11):
        for one, other in zip(batches(step), again(step), strict=True):
            assert (one is None) == (other is None)
            assert one is None or one.tolist() == other.tolist()
    assert batches.fingerprint == again.fingerprint
    for changes in ({"seed": 4}, {"batch_size": 5}, {"strength": 0.8}, {"packed": not packed}):
        assert make(**changes).fingerprint != batches.fingerprint
    assert batches(0).numbers.tolist() != make(seed=4)(0).numbers.tolist()


def test_packing_needs_fewer_rows(rng):
    pairs = random_pairs(rng, 32)
    packed, unpacked = (
        PreferenceBatches(pairs, batch_size=8, max_seq_length=300, packed=each)
        for each in (True, False)
    )
    assert unpacked.shape[0] == 16
    assert packed.shape[0] < 16
    sizes = [sum(b(i).inputs.size for i in range(b.per_epoch)) for b in (packed, unpacked)]
    assert sizes[0] < sizes[1]
    assert "8 pairs, packed rows of up to" in packed.layout
    assert "32 pairs, " in packed.summary


def test_a_reference_goes_with_its_targets(rng):
    samples = random_labels(rng, 9)
    batches = PreferenceBatches(samples, batch_size=4, max_seq_length=80)
    values = rng.normal(size=batches.n_scored).astype(np.float32)
    given = batches.with_reference(values)
    assert batches(1).reference is None
    for step in range(2 * given.per_epoch):
        batch = given(step)
        for rows in (batch, Rows(batch.mismatched)):
            numbers, reference = np.array(rows.numbers), np.array(rows.reference)
            is_target = numbers < batches.n_scored
            np.testing.assert_array_equal(reference[is_target], values[numbers[is_target]])
            assert not reference[~is_target].any()
    assert given.fingerprint == batches.fingerprint
