"""lm-eval through our class, our server and mlx-lm's own class: equal scores and answers."""

import json
import math
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import ClassVar

import lm_eval
import mlx.core as mx
import mlx_lm.models.afm7
import numpy as np
import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from mlx_lm.evaluate import MLXLM

from afm_mlx.converters.convert import convert
from afm_mlx.engine.generation import stream_generate
from afm_mlx.engine.request import Request
from afm_mlx.errors import ContextLengthError, DataError
from afm_mlx.measure import harness_model
from afm_mlx.measure.harness_model import HarnessModel
from afm_mlx.measure.harness_tasks import find_tasks
from afm_mlx.ranks import Ranks
from tests.tools.adapters import draw_tensors
from tests.tools.adapters import write_folder as write_adapter
from tests.tools.cases import each
from tests.tools.cli import CONFIG, write_folder
from tests.tools.harness_tasks import write_answers, write_choices
from tests.tools.model_scripts import FollowsText
from tests.tools.server import running_server
from tests.tools.zoo_guests import Guest

KINDS = ["AFM", "Llama 3.2", "LFM2"]


def float_folders(kind, place):
    """A folder of floats, and the one for stock mlx-lm.

    Stock mlx-lm always rounds an AFM model's keys and values to int8. Where a number is between two codes, the
    last bit of a sum decides; so the test has the grid of neither.
    """
    if kind != "AFM":
        folder = Guest(kind, place.parent).folder
        return folder, folder
    convert("afm-nano", place, dequantize=True, dtype="float32")
    stock = place.with_name("stock")
    weights = mx.load(str(place / "model.safetensors"))
    stock.mkdir()
    for file in place.glob("*.json"):
        (stock / file.name).write_bytes(file.read_bytes())
    (stock / "chat_template.jinja").write_bytes((place / "chat_template.jinja").read_bytes())
    mx.save_safetensors(str(stock / "model.safetensors"), weights, {"format": "mlx"})
    kept = {name: array for name, array in weights.items() if not name.endswith("_scale")}
    mx.save_safetensors(str(place / "model.safetensors"), kept, {"format": "mlx"})
    (place / "model.safetensors.index.json").unlink()
    (stock / "model.safetensors.index.json").unlink()
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"kv_bits": None}))
    return place, stock


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """lm-eval records the machine's packages, which takes seconds."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda storage: None)


def answers_of(model, manager, names, is_chat, **options):
    """Log-likelihoods of the first task's choices, the second one's answers, and both tasks' scores."""
    options |= {"apply_chat_template": is_chat, "bootstrap_iters": 0, "torch_random_seed": None}
    found = lm_eval.simple_evaluate(
        model, tasks=names, task_manager=manager, num_fewshot=1, **options
    )
    choices, texts = (found["samples"][name] for name in names)
    likelihoods = [response for sample in choices for (response,) in sample["resps"]]
    return likelihoods, [sample["resps"][0][0].strip() for sample in texts], found["results"]


def prove(kind, place, count, monkeypatch):
    is_chat = kind == "AFM"
    folder, stock = float_folders(kind, place / "MODEL")
    tasks = place / "tasks"
    names = [write_choices(tasks, count), write_answers(tasks, count)]
    manager = find_tasks(names, tasks)
    ours = answers_of(HarnessModel(str(folder)), manager, names, is_chat)
    with monkeypatch.context() as patch:
        patch.setattr(mlx_lm.models.afm7, "fake_8bit_quant", lambda x, scale: x)
        model = MLXLM(str(stock), batch_size=1, use_chat_template=is_chat)
        patch.setattr(MLXLM, "tokenizer_name", "stock")
        theirs = [answers_of(model, manager, names, is_chat)]
    with running_server(source=folder, kv="float") as server:
        arguments = {
            "model": "MODEL",
            "base_url": f"{server.url}/v1/completions",
            "tokenizer": str(folder),
            "add_bos_token": not is_chat,
            "max_length": 4096,
        }
        client = "local-completions"
        options = {"model_args": arguments, "batch_size": 16}
        theirs.append(answers_of(client, manager, names, is_chat, **options))
    assert len(ours[0]) == 4 * count
    assert len(ours[1]) == count
    for likelihoods, texts, scores in theirs:
        one, other = np.array(ours[0]), np.array(likelihoods)  # (n, 2), and whether they are greedy
        np.testing.assert_allclose(one[:, 0], other[:, 0], atol=1e-3, rtol=0)
        assert (one[:, 1] == other[:, 1]).all()
        assert ours[1] == texts
        assert ours[2] == scores
    return ours


@pytest.mark.parametrize("kind", KINDS[:2])
def test_scores_and_answers_are_those_of_mlx_lm_and_of_the_server(kind, tmp_path, monkeypatch):
    likelihoods, texts, scores = prove(kind, tmp_path, 4, monkeypatch)
    assert len(set(likelihoods)) == 16
    if kind == "AFM":
        assert {is_greedy for _, is_greedy in likelihoods} == {True, False}
        assert scores["nano_choices"]["acc,none"] > 0.6
        assert len(set(texts)) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_scores_and_answers_of_200_questions(kind, tmp_path, monkeypatch):
    prove(kind, tmp_path, 200, monkeypatch)


# -- one request at a time


@pytest.fixture
def folder(tmp_path, spm_bpe, rng):
    return write_folder(tmp_path / "model", spm_bpe, rng)


@pytest.fixture
def model(folder):
    return HarnessModel(str(folder), batch_size=4)


def requests(kind, *arguments):
    return [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]


def naive(model, tokens, start):
    """The log-likelihood of `tokens[start:]`, of one full forward, and if all are the likeliest."""
    logits = np.array(model.model(mx.array([tokens]))[0, start - 1 : -1], np.float64)
    logprobs = logits - logits.max(-1, keepdims=True)
    logprobs -= np.log(np.exp(logprobs).sum(-1, keepdims=True))
    own = logprobs[np.arange(len(tokens) - start), np.array(tokens[start:])]
    return own.sum(), bool((logprobs.argmax(-1) == tokens[start:]).all())


def test_it_is_registered_and_made_of_lm_evals_arguments(folder):
    kind = get_model("afm")
    assert kind is HarnessModel
    made = kind.create_from_arg_string(f"pretrained={folder},max_tokens=7", {"batch_size": 2})
    assert (made.batch_size, made.max_tokens, made.max_length) == (2, 7, CONFIG.context_length)
    assert made.tokenizer_name == str(folder).replace("/", "__")
    assert (made.eot_token_id, made.prefix_token_id) == (
        made.tokenizer.eos_token_id,
        made.tokenizer.separator_id,
    )


@each(
    "context, continuation, ids, start",
    [
        ("the value", " of a", lambda t: t.encode("the value of a", True), 3),
        # The space behind a context is the continuation's.
        ("the value ", "of a", lambda t: t.encode("the value of a", True), 3),
        ("", "the value", lambda t: [t.separator_id, *t.encode("the value")], 1),
        ("  ", "the", lambda t: t.encode("  the", True), 1),
    ],
)
def test_a_continuation_is_encoded_with_its_context(model, context, continuation, ids, start):
    tokens = ids(model.tokenizer)
    ((total, is_greedy),) = model.loglikelihood(requests("loglikelihood", (context, continuation)))
    wanted = naive(model, tokens, start)
    assert math.isclose(total, wanted[0], abs_tol=1e-4)
    assert is_greedy == wanted[1]


def test_a_long_context_loses_its_beginning(model):
    words = "the value of a string is " * 100
    with pytest.warns(UserWarning, match="2 of 3 contexts lose their beginning.* 256 tokens"):
        found = model.loglikelihood(
            requests("loglikelihood", (words, "the"), (words, "a b"), ("a", "b"))
        )
    tokens = model.tokenizer.encode(words + "the", True)[-256:]
    assert math.isclose(found[0][0], naive(model, tokens, 255)[0], abs_tol=1e-4)
    with pytest.raises(DataError, match=r"has \d+ tokens, and the model's context holds 256"):
        model.loglikelihood(requests("loglikelihood", ("a", words)))


def test_a_text_is_scored_in_windows(model):
    """Each token once, behind as many others as fit."""
    words = "the value of a string is "
    texts = ["", words, words * 90]
    found = model.loglikelihood_rolling(requests("loglikelihood_rolling", *((t,) for t in texts)))
    assert found[0] == 0
    size = model.max_length - 1
    for text, total in zip(texts[1:], found[1:], strict=True):
        tokens = [model.tokenizer.separator_id, *model.tokenizer.encode(text)]
        wanted = naive(model, tokens[: size + 1], 1)[0]
        for done in range(size + 1, len(tokens), size):
            window = tokens[: done + size][-size - 1 :]
            new = min(size, len(tokens) - done)
            wanted += naive(model, window, len(window) - new)[0]
        assert math.isclose(total, wanted, abs_tol=1e-3)
    assert len(tokens) > 2 * size


def test_answers_end_at_stop_strings_and_limits(model):
    def answer(**options):
        return model.generate_until(requests("generate_until", ("the value", options)))[0]

    whole = answer(max_gen_toks=12)
    stop = whole[3:5]
    assert whole.startswith(answer(max_gen_toks=12, until=[stop]))
    assert stop not in answer(max_gen_toks=12, until=["", stop])
    assert len(answer(max_gen_toks=4)) < len(whole)
    assert answer(max_new_tokens=12, until=whole[-1:], num_beams=1) == whole.partition(whole[-1])[0]
    limited = HarnessModel(str(model.tokenizer.name_or_path), max_tokens=4)
    one = requests("generate_until", ("the value", {"max_gen_toks": 12}))
    assert limited.generate_until(one) == [answer(max_gen_toks=4)]
    for options, says in [
        ({"num_beams": 4}, "num_beams 4"),
        ({"typical_p": 0.5}, "typical_p.*answers can have do_sample"),
    ]:
        with pytest.raises(DataError, match=says):
            answer(**options)


def test_a_long_prompt_leaves_room_for_an_answer(model):
    words = "the value of a string is " * 100
    for limit, kept in ((100, 156), (1000, 128)):
        with pytest.warns(UserWarning, match="1 of 1 contexts lose their beginning"):
            (text,) = model.generate_until(
                requests("generate_until", (words, {"max_gen_toks": limit}))
            )
        prompt = model.tokenizer.encode(words, True)[-kept:]
        options = {"max_tokens": limit, "logprobs": False}
        answer = ""
        with suppress(ContextLengthError):  # of which the answer is what came before
            for response in stream_generate(model.model, model.tokenizer, prompt, **options):
                answer += response.text
        assert text == answer


def test_sampled_answers_differ_and_repeat(model):
    options = {"do_sample": True, "temperature": 1.5, "top_p": 0.95, "max_gen_toks": 8}
    (asked,) = requests("generate_until", ("the value", options))
    answers = model.generate_until([asked] * 3)
    assert len(set(answers)) == 3
    again = HarnessModel(str(model.tokenizer.name_or_path), batch_size=1)
    assert again.generate_until([asked] * 3) == answers
    other = HarnessModel(str(model.tokenizer.name_or_path), seed=7)
    assert other.generate_until([asked] * 3) != answers
    greedy = requests("generate_until", ("the value", options | {"do_sample": False}))
    assert model.generate_until(greedy * 2) == 2 * model.generate_until(greedy)


def test_an_adapter_changes_scores(model, folder, tmp_path, rng):
    tensors = draw_tensors(model.model, rng, 4, "", strength=4)
    adapter = write_adapter(tmp_path / "adapter", tensors, 0.5, None)
    adapted = HarnessModel(str(folder), adapter_path=str(adapter), force_adapter=True)
    pair = requests("loglikelihood", ("the value", " of a"))
    assert abs(adapted.loglikelihood(pair)[0][0] - model.loglikelihood(pair)[0][0]) > 0.1


def test_thoughts_are_no_part_of_an_answer(tmp_path, monkeypatch):
    """Nor do stop strings end them."""
    guest = Guest("Qwen3", tmp_path)
    model = HarnessModel(str(guest.folder), chat_template_args={"enable_thinking": True})
    chat = [{"role": "user", "content": "How is it?"}]
    prompt = model.apply_chat_template(chat)
    off = HarnessModel(str(guest.folder), chat_template_args={"enable_thinking": False})
    assert off.apply_chat_template(chat).startswith(prompt)
    assert off.apply_chat_template(chat) != prompt
    ids = model.tok_encode(prompt)
    assert ids == guest.stock[1].apply_chat_template(chat, add_generation_prompt=True)
    script = FollowsText(model.tokenizer, "<think>\nIt is\n</think>\n\nfine\nor", len(ids))
    made = Request.checked
    monkeypatch.setattr(
        Request,
        "checked",
        lambda self, *sizes: replace(made(self, *sizes), logits_processors=[script]),
    )
    asked = requests("generate_until", (prompt, {"until": ["\n"], "max_gen_toks": 40}))
    assert [text.strip() for text in model.generate_until(asked)] == ["fine"]


# -- interrupted runs


def test_an_interrupted_run_continues(folder, tmp_path, monkeypatch):
    pairs = requests("loglikelihood", *((f"w{i // 2}", f" the{i}") for i in range(8)))
    texts = requests("loglikelihood_rolling", *((f"text {i}",) for i in range(3)))
    asked = requests("generate_until", *((f"v{i}", {"max_gen_toks": 3}) for i in range(4)))
    scored = harness_model.score_continuations
    counts = []

    def counted(model, tokenizer, pairs, **options):
        counts.append(len(pairs))
        for done, found in enumerate(scored(model, tokenizer, pairs, **options)):
            if len(counts) == 1 and done == 5:
                raise KeyboardInterrupt
            yield found

    def run(model):
        return [
            model.loglikelihood(pairs),
            model.loglikelihood_rolling(texts),
            model.generate_until(asked),
        ]

    def assert_whole(found):  # rounded by what a batch holds
        for scores, others in zip(found[:2], whole[:2], strict=True):
            np.testing.assert_allclose(scores, others, rtol=1e-5)
        assert found[2] == whole[2]

    whole = run(HarnessModel(str(folder)))
    monkeypatch.setattr(harness_model, "score_continuations", counted)
    first = HarnessModel(str(folder))
    file = first.keep_answers(tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        run(first)
    with file.open("a") as torn:
        torn.write('["0123')
    second = HarnessModel(str(folder))
    assert second.keep_answers(tmp_path / "out") == file
    assert second.answer_count == 5
    assert_whole(run(second))
    assert counts == [8, 3, 3]
    third = HarnessModel(str(folder))
    third.keep_answers(tmp_path / "out")
    assert third.answer_count == 15
    assert_whole(run(third))
    assert counts == [8, 3, 3]
    # Other options have other answers.
    for options in ({"max_tokens": 3}, {"seed": 1}, {"force_adapter": True}):
        other = HarnessModel(str(folder), **options)
        assert other.keep_answers(tmp_path / "out") != file
        assert other.answer_count == 0
    file.write_text("[1]\n")
    with pytest.raises(DataError, match=r"answers-\w+.jsonl is damaged. Remove it"):
        HarnessModel(str(folder)).keep_answers(tmp_path / "out")


def test_equal_requests_are_scored_once(model, monkeypatch):
    scored, counts = harness_model.score_continuations, []

    def counted(model, tokenizer, pairs, **options):
        counts.append(len(pairs))
        return scored(model, tokenizer, pairs, **options)

    monkeypatch.setattr(harness_model, "score_continuations", counted)
    pairs = requests("loglikelihood", ("a", " b"), ("a", " b"), ("a", " c"))
    found = model.loglikelihood(pairs)
    assert (found[0] == found[1], found[0] == found[2], counts) == (True, False, [2])


class OneAfterTheOther(Ranks):
    """Two ranks in one process, one after the other."""

    seen: ClassVar[list[int]] = []

    @property
    def size(self):
        return 2

    def each(self, items, work):
        parts = [json.loads(json.dumps(work(list(items[rank::2])))) for rank in range(2)]
        self.seen.extend(map(len, parts))
        return [parts[i % 2][i // 2] for i in range(len(items))]


def test_ranks_split_contexts(model, folder):
    split = HarnessModel(str(folder), batch_size=4, ranks=OneAfterTheOther())
    scored = [(f"q {i}", text) for i in range(3) for text in (" one", " two")]
    wanted = model.loglikelihood(requests("loglikelihood", *scored))
    got = split.loglikelihood(requests("loglikelihood", *scored))
    np.testing.assert_allclose([s for s, _ in got], [s for s, _ in wanted], atol=1e-4)
    assert all(isinstance(answer, tuple) for answer in got)
    assert split.ranks.seen == [2, 1]
    asked = [(f"q {i}", {"until": ["\n"], "max_gen_toks": 6}) for i in range(3)]
    assert split.generate_until(requests("generate_until", *asked)) == model.generate_until(
        requests("generate_until", *asked)
    )


def test_progress_is_reported(folder):
    seen = []

    @contextmanager
    def bars(description, unit):
        yield lambda done, total: seen.append((description, unit, done, total))

    model = HarnessModel(str(folder), bars=bars)
    model.loglikelihood(requests("loglikelihood", ("a", " b"), ("a", " c")))
    model.generate_until(requests("generate_until", ("a", {"max_gen_toks": 2})))
    assert seen == [("scoring", "request", i, 2) for i in (1, 2)] + [("answering", "request", 1, 1)]
