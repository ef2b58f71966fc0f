"""Rollouts: what is sampled, how it is laid out for training, and what is kept."""

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from afm_mlx.adapters.lora import add_lora, lora_tensors
from afm_mlx.errors import CheckpointError, DataError, RewardError
from afm_mlx.guidance.constraint import Constraint
from afm_mlx.loading.load import load
from afm_mlx.measure.rewards import Rewards, make_rewards
from afm_mlx.training.data.rollouts import Answerer, Rollouts, load_prompts
from afm_mlx.training.loop.policy_losses import answer_logprobs
from tests.tools.cli import lines, write_folder
from tests.tools.compare import assert_close, assert_same_tensors
from tests.tools.training_data import TRAINABLE
from tests.tools.zoo import word_tokenizer_json, write_zoo_folder, zoo_model

LENGTH = make_rewards(["length:3"])


def adapted(folder, rng):
    """A folder's model with LoRA layers that change what it says, and its tokenizer."""
    model, tokenizer = load(folder)
    add_lora(model, 2, 2.0)
    drawn = [
        (name, mx.array(rng.normal(0, 0.1, array.shape).astype(np.float32)))
        for name, array in lora_tensors(model).items()
    ]
    return model.load_weights(drawn, strict=False), tokenizer


@pytest.fixture
def trained(tmp_path, spm_bpe, rng):
    return adapted(write_folder(tmp_path / "model", spm_bpe, rng, TRAINABLE), rng)


@pytest.fixture
def zoo(tmp_path, rng):
    folder = tmp_path / "zoo"
    write_zoo_folder(folder, "llama", zoo_model("llama", 64, 5), word_tokenizer_json(64))
    return adapted(folder, rng)


@pytest.fixture
def prompts(trained, tmp_path):
    records = [{"prompt": f"say {word}", "answer": word} for word in ("one", "two", "three")]
    return load_prompts(lines(tmp_path / "train.jsonl", *records), "train", trained[1], 64, 6)


def rollouts(trained, prompts, count=3, **options):
    answerer = Answerer(*trained)
    values = {"batch_size": 2, "group_size": count, "longest_answer": 6}
    return Rollouts(prompts, **values | {"answerer": answerer, "rewards": LENGTH} | options)


def logprobs(model, batch):
    return np.array(answer_logprobs(model.train(), batch) * batch.counted)


def assert_same_batch(one, other):
    named = [{k: v for k, v in b._asdict().items() if v is not None} for b in (one, other)]
    assert_same_tensors(*named)


# -- prompts


def test_prompts_are_texts_or_messages(trained, tmp_path):
    tokenizer = trained[1]
    chat = [{"role": "user", "content": "say one"}]
    file = lines(tmp_path / "a.jsonl", {"prompt": "say one"}, {"messages": chat, "extra": 3})
    first, second = load_prompts(file, "train", tokenizer, 64)
    wanted = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    assert first.tokens == second.tokens == wanted
    assert first.text == second.text == "say one"
    assert second.sample == {"messages": chat, "extra": 3}
    assert second.where.endswith("a.jsonl:2")
    chat_to_train_on = {"messages": [*chat, {"role": "assistant", "content": "one"}]}
    (third,) = load_prompts(lines(file, chat_to_train_on), "train", tokenizer, 64)
    assert third.tokens == wanted
    assert third.sample == {"messages": chat, "answer": "one"}


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"text": "a"}, "is no prompt"),
        ({"prompt": "a", "messages": []}, "is no prompt"),
        ({"prompt": "word " * 80}, "1 to 64 are allowed"),
        ({"messages": [{"role": "assistant", "content": "b"}]}, "ends before it"),
    ],
)
def test_lines_that_are_no_prompts(trained, tmp_path, record, reason):
    with pytest.raises(DataError, match=f"a.jsonl:1: .*{reason}"):
        load_prompts(lines(tmp_path / "a.jsonl", record), "train", trained[1], 64)


def test_a_model_without_a_template_takes_texts(zoo, tmp_path):
    (prompt,) = load_prompts(lines(tmp_path / "a.jsonl", {"prompt": "w3 w4"}), "train", zoo[1], 64)
    assert list(prompt.tokens) == zoo[1].encode("w3 w4")


# -- answers


def test_the_serving_model_shares_the_base(trained):
    model, tokenizer = trained
    before = mx.get_active_memory()
    answerer = Answerer(model, tokenizer)
    served = dict(tree_flatten(answerer._served.parameters()))
    assert not any("lora" in name for name in served)
    base = sum(array.nbytes for array in served.values())
    assert mx.get_active_memory() - before < base / 10


def test_answers_are_of_the_adapter_as_it_is_now(trained, prompts):
    model, tokenizer = trained
    answerer = Answerer(model, tokenizer)
    for _ in range(2):
        (answer,) = answerer(prompts[:1])
        tokens = list(prompts[0].tokens)
        for token in answer.tokens:  # greedily, by the training graph
            assert model.train()(mx.array([tokens]))[0, -1].argmax().item() == token
            tokens.append(token)
        assert answer.logprobs == [0.0] * len(answer.tokens)
        model.load_weights([(n, -3 * t) for n, t in lora_tensors(model).items()], strict=False)


def test_a_seed_gives_the_same_answer_in_any_company(trained, prompts):
    answerer = Answerer(*trained)
    both = answerer(prompts[:2], [[1, 2], [3, 4]])
    (alone,) = answerer(prompts[1:2], [[4]])
    assert both[3].tokens == alone.tokens
    np.testing.assert_allclose(both[3].logprobs, alone.logprobs, atol=1e-4)
    assert len({tuple(answer.tokens) for answer in both}) == 4


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_log_probabilities_of_the_sampler_are_the_graphs(trained, prompts, temperature):
    model, tokenizer = trained
    made = rollouts(trained, prompts, answerer=Answerer(model, tokenizer, temperature))
    batch = made(0)
    h = np.array(answer_logprobs(model.train(), batch, temperature) * batch.counted)
    assert_close(np.array(batch.sampled), h, 2e-2)  # int8 keys and values, and a float16 adapter


def test_cut_off_answers_and_end_tokens(trained, prompts):
    ends = trained[1].eos_token_ids
    batch = rollouts(trained, prompts, count=40)(0)
    n = np.array(batch.lengths).astype(int)
    labels = np.array(batch.labels)[np.array(batch.grid)]
    last = labels[np.arange(len(n)), n - 1]
    is_end = np.isin(last, list(ends))
    np.testing.assert_array_equal(np.array(batch.cut_off), ~is_end)
    assert (n[~is_end] == 6).all()
    assert np.array(batch.counted).sum() == n.sum()
    masked = rollouts(trained, prompts, count=40, mask_truncated_completions=True)(0)
    np.testing.assert_array_equal(np.array(masked.counted).sum(1), np.where(is_end, n, 0))


def test_a_constraints_forced_tokens_are_not_trained_on(trained, prompts):
    constraint = Constraint.regex("(yes|no)!!")
    exact = Rewards(("ends",), (lambda p, a, s: float(a in ("yes!!", "no!!")),), (1.0,))
    file = prompts[0].where.rpartition(":")[0]
    asked = load_prompts(file, "train", trained[1], 64, 40, constraint)
    batch = rollouts(trained, asked, 4, rewards=exact, longest_answer=40)(0)
    assert batch.reward.tolist() == [1.0] * 8
    counted, n = np.array(batch.counted).sum(1), np.array(batch.lengths)
    assert (counted < n).all()
    assert (counted > 0).all()


# -- batches


def test_answers_in_one_row_or_in_rows_of_their_own(trained, prompts):
    model = trained[0]
    together = rollouts(trained, prompts)(0)
    apart = rollouts(trained, prompts, one_row=False)(0)
    assert together.inputs.shape[0] == 2
    assert apart.inputs.shape[0] == 6
    assert_same_tensors({"a": together.labels}, {"a": apart.labels})
    assert_close(logprobs(model, together), logprobs(model, apart), 1e-5)

    def gradients(batch):
        def total(parameters):
            model.update(parameters)
            return (answer_logprobs(model, batch) * batch.counted).sum()

        return dict(tree_flatten(mx.grad(total)(model.trainable_parameters())))

    one, other = gradients(together), gradients(apart)
    for name in one:
        assert_close(one[name], other[name], 1e-4, what=name)


def test_models_of_the_zoo(zoo, tmp_path):
    model, tokenizer = zoo
    file = lines(tmp_path / "a.jsonl", *({"prompt": f"w{i} w4"} for i in (2, 3, 5)))
    found = load_prompts(file, "train", tokenizer, 64, 6)
    batch = rollouts(zoo, found, one_row=False)(0)
    assert batch.segments is None
    assert batch.shared is None
    assert_close(np.array(batch.sampled), logprobs(model, batch), 2e-2)


def test_batches_are_a_function_of_seed_and_number(trained, prompts):
    made = rollouts(trained, prompts)
    first = made(0)
    made(1)
    assert_same_batch(first, made(0))
    assert_same_batch(first, rollouts(trained, prompts)(0))
    for other in (made(2), rollouts(trained, prompts, seed=1)(0)):  # 2 is of another epoch
        assert other.labels.tolist() != first.labels.tolist()
    assert made.per_epoch == 2
    assert (len(made), made.unit, made.packed) == (3, "answers", False)
    assert made.shape == (2, max(len(p.tokens) for p in prompts) + 18, 36)


def test_most_likely_answers_of_every_prompt(trained, prompts):
    made = rollouts(trained, prompts, count=None)
    assert [made(i).reward.size for i in range(2)] == [2, 1]
    assert made.shape[2] == 12
    answers = made.answerer(prompts)
    wanted = [LENGTH("", answer.text, {}) for answer in answers]
    assert [*made(0).reward.tolist(), *made(1).reward.tolist()] == pytest.approx(wanted)


def test_several_updates_of_a_rollout(trained, prompts, tmp_path):
    model = trained[0]
    calls = []

    def policy(batch):
        calls.append(batch)
        return answer_logprobs(model.train(), batch)

    options = {"updates": 3, "micro_batches": 2, "policy": policy, "folder": tmp_path / "kept"}
    made = rollouts(trained, prompts, **options)
    assert made.per_epoch == 6
    batches = [made(i) for i in range(8)]
    assert len(calls) == 4  # two of the first rollout, and two of the second
    for i in range(2):
        assert batches[i] is batches[i + 2] is batches[i + 4]
        assert batches[i] is not batches[i + 6]
        assert_close(batches[i].old * batches[i].counted, logprobs(model, batches[i]), 1e-6)
    model.load_weights([(n, 2 * t) for n, t in lora_tensors(model).items()], strict=False)
    resumed = rollouts(trained, prompts, **options)  # in the middle of a rollout's updates
    for i in (2, 3, 4, 5):
        assert_same_batch(resumed(i), batches[i])
    assert len(calls) == 4
    (tmp_path / "kept" / "0000001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"0000001.safetensors can't be read"):
        rollouts(trained, prompts, **options)(2)


def test_rollouts_are_kept_for_people(trained, prompts, tmp_path):
    named = make_rewards(["length:3", "regex:.*"], [1.0, 2.0])
    made = rollouts(trained, prompts, rewards=named, folder=tmp_path / "kept")
    batch = made(1)
    (file,) = (tmp_path / "kept").iterdir()
    assert file.name == "0000002.jsonl"
    (record,) = map(json.loads, file.read_text().splitlines())
    assert record["step"] == 2
    assert record["prompt"] in {prompt.text for prompt in prompts}
    assert [found["tokens"] for found in record["answers"]] == batch.lengths.tolist()
    for i, found in enumerate(record["answers"]):
        assert found["rewards"] == dict(zip(named.names, batch.rewards[i].tolist(), strict=True))
        assert found["reward"] == batch.reward[i].item()


def test_a_reward_that_fails_names_the_sample(trained, prompts):
    def strict(prompt, answer, sample):
        return float("nan") if sample["answer"] == "two" else 1.0

    made = rollouts(trained, prompts, rewards=Rewards(("strict",), (strict,), (1.0,)), batch_size=3)
    with pytest.raises(RewardError, match=r"train.jsonl:2: the reward strict returned nan"):
        made(0)
