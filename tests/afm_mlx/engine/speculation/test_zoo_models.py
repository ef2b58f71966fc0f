"""mlx-lm's models with draft tokens: answers as without, whatever is rejected, and how often a model runs."""

import copy
from dataclasses import replace

import mlx.core as mx
import pytest
from mlx.utils import tree_map

from afm_mlx.engine.engine import Engine
from afm_mlx.engine.prefix_cache import PrefixCache
from afm_mlx.engine.prompt_cache import tokens_in
from afm_mlx.engine.request import Request
from afm_mlx.engine.samplers import make_sampler
from afm_mlx.engine.speculation.draft_model import DraftModel
from afm_mlx.engine.speculation.drafting import Speculation
from afm_mlx.errors import RequestError
from afm_mlx.model.zoo_blocks import replace_blocks
from tests.tools.drafts import KnownAnswers, outcome
from tests.tools.engines import SIZES, naive_greedy, run, some_prompt, tiny
from tests.tools.models import WordTokenizer
from tests.tools.zoo import zoo_model

VOCAB = SIZES["vocab_size"]
STATELESS = ["llama", "llama blocks", "longcat_flash", "gemma3_text", "gpt_oss"]
STATES = ["lfm2", "mamba2", "falcon_h1", "baichuan_m1"]


def made(rng, kind):
    model = zoo_model(kind.split()[0], VOCAB, int(rng.integers(2**31)))
    if kind == "llama blocks":  # as `load` has them on a CPU
        replace_blocks(model)
    return model


def requests_of(rng, lengths=(40, 70, 33, 2, 1), count=16):
    """Greedy and sampled requests whose prompts are shorter and longer than the models' windows."""
    sampled = [{}, {"sampler": make_sampler(0.7), "seed": int(rng.integers(2**40))}]
    return [
        Request(some_prompt(rng, n), count - 2 * i, logprobs=False, **sampled[i % 2])
        for i, n in enumerate(lengths)
    ]


@pytest.fixture
def tokenizer():
    return WordTokenizer(VOCAB, ends=())


@pytest.fixture
def passes(monkeypatch):
    """Count how often a model runs: a function that begins to count."""

    def count(model):
        shapes, call = [], type(model).__call__

        def counted(self, inputs, *args, **options):
            if self is model:
                shapes.append(inputs.shape)
            return call(self, inputs, *args, **options)

        monkeypatch.setattr(type(model), "__call__", counted)
        return shapes

    return count


@pytest.mark.parametrize("kind", [*STATELESS, *STATES])
def test_answers_are_the_ones_without_draft_tokens(rng, tokenizer, kind):
    model, requests = made(rng, kind), requests_of(rng)
    wanted = [tokens for tokens, *_ in outcome(model, tokenizer, requests)]
    answers = {tuple(r.prompt): w for r, w in zip(requests, wanted, strict=True)}
    for rate, count in ((0.0, 3), (0.5, 7), (0.9, int(rng.integers(1, 8)))):
        drafter = KnownAnswers(rng, answers, rate, VOCAB)
        speculation = Speculation(drafter, num_draft_tokens=count)
        found = outcome(model, tokenizer, requests, speculation=speculation, max_batch=3)
        assert [tokens for tokens, *_ in found] == wanted
        assert rate == 0.0 or any(counts.accepted for *_, counts in found)
    copied = Request([*requests[0].prompt, *wanted[0], *requests[0].prompt], 20, logprobs=False)
    [(tokens, *_)] = outcome(model, tokenizer, [copied])
    lookup = Speculation(prompt_lookup=True, num_draft_tokens=4)
    [(found, *_, counts)] = outcome(model, tokenizer, [copied], speculation=lookup)
    assert found == tokens
    assert counts.proposed


@pytest.mark.parametrize("kind", [*STATELESS, *STATES])
def test_a_row_of_right_drafts_takes_fewer_passes(rng, tokenizer, passes, kind):
    model, request = made(rng, kind), Request(some_prompt(rng, 30), 21, logprobs=False)
    [(wanted, *_)] = outcome(model, tokenizer, [request])
    counts = {}
    for rate in (1.0, 0.0):
        answer = wanted if rate else [(token + 1) % VOCAB for token in wanted]
        drafter = KnownAnswers(rng, {tuple(request.prompt): answer}, 1.0, VOCAB)
        fed = passes(model)
        speculation = Speculation(drafter, num_draft_tokens=3)
        [(tokens, *_)] = outcome(model, tokenizer, [request], speculation=speculation)
        assert tokens == wanted
        counts[rate] = len(fed)
    # The prompt's pass, and 20 tokens after the first one, four at a time or one by one. A model with
    # states runs once more after each nine steps that reject a token: nine kept tokens are fed alone.
    # Where padding would get into the states, they are fed alone after each of these steps. One pass,
    # which is never computed, finds that out.
    asked = int(kind in STATES)
    more = {"baichuan_m1": 20}.get(kind, 2 * asked)
    assert counts == {1.0: asked + 1 + 6, 0.0: asked + 1 + 21 + more}


@pytest.mark.parametrize("kind", [*STATELESS, *STATES])
def test_rows_join_leave_and_begin_with_kept_prefixes_while_others_have_drafts(
    rng, tokenizer, kind
):
    model = made(rng, kind)
    requests = requests_of(rng, (40, 70, 33, 9, 30), 14)
    wanted = [tokens for tokens, *_ in outcome(model, tokenizer, requests)]
    answers = {tuple(r.prompt): w for r, w in zip(requests, wanted, strict=True)}
    engine = Engine(
        model,
        tokenizer,
        max_batch=3,
        prefill_step_size=16,
        prefix_cache=PrefixCache(1 << 30),
        speculation=Speculation(KnownAnswers(rng, answers, 0.6, VOCAB), num_draft_tokens=3),
    )
    for _ in range(2):
        got, rows = {}, []
        for request in requests:
            rows.append(engine.submit(request))
            for response in engine.step() + engine.step():
                got.setdefault(response.row, []).append(response)
        for row, responses in run(engine).items():
            got.setdefault(row, []).extend(responses)
        assert [[r.token for r in got[row]] for row in rows] == wanted
    assert [got[row][-1].cached_tokens for row in rows] == [len(r.prompt) - 1 for r in requests]
    second = Request([*requests[0].prompt, *wanted[0], 5], 9, logprobs=False)
    answers[tuple(second.prompt)] = []
    row = engine.submit(second)
    tokens = run(engine)[row]
    assert tokens[-1].cached_tokens == len(second.prompt) - 2  # the last token was not fed
    [(plain, *_)] = outcome(model, tokenizer, [second])
    assert [r.token for r in tokens] == plain


class Compared:
    """A draft model, each of whose draft tokens is the one that it would draw without a cache."""

    def __init__(self, model):
        self.model, self.inner = model, DraftModel(model, 16)
        self.forget = self.inner.forget

    def propose(self, drafts, count):
        self.inner.propose(drafts, count)
        for draft in drafts:
            if draft.proposed and not draft.row.request.sampler:
                before = [*draft.row.request.prompt, *draft.row.tokens]
                assert draft.assumed == naive_greedy(self.model, before, len(draft.proposed))


@pytest.mark.parametrize(
    ("kind", "target"),
    [*((kind, "same kind") for kind in STATELESS), ("gemma3_text", "lfm2"), ("gpt_oss", "AFM")],
)
def test_a_model_drafts_for_another(rng, tokenizer, kind, target):
    """The draft is the target with some noise, or another model; what is rejected leaves its cache, too."""
    draft = made(rng, kind)
    if target == "same kind":
        model = copy.deepcopy(draft)
        noise = tree_map(lambda x: x + 0.01 * mx.random.normal(x.shape), draft.parameters())
        draft.update(noise)
    else:
        model = tiny(rng) if target == "AFM" else made(rng, target)
    requests = requests_of(rng)
    wanted = [tokens for tokens, *_ in outcome(model, tokenizer, requests)]
    speculation = Speculation(Compared(draft), num_draft_tokens=7)
    found = outcome(model, tokenizer, requests, speculation=speculation)
    assert [tokens for tokens, *_ in found] == wanted
    accepted = sum(counts.accepted for *_, counts in found)
    assert accepted < sum(counts.proposed for *_, counts in found)
    assert target != "same kind" or accepted > 12


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_an_afm_model_drafts_for_one_of_mlx_lm(rng, tokenizer, kind):
    model, draft, requests = made(rng, kind), tiny(rng), requests_of(rng)
    wanted = [tokens for tokens, *_ in outcome(model, tokenizer, requests)]
    found = outcome(model, tokenizer, requests, speculation=Speculation(draft, num_draft_tokens=2))
    assert [tokens for tokens, *_ in found] == wanted


@pytest.mark.parametrize("kind", STATES)
def test_draft_models_with_states_are_refused(rng, tokenizer, kind):
    with pytest.raises(RequestError, match=rf"draft_model is a {kind} model, whose states"):
        Engine(made(rng, "llama"), tokenizer, speculation=Speculation(made(rng, kind)))


@pytest.mark.parametrize("kind", ["gemma3_text", *STATES])
def test_a_row_that_is_cancelled_amid_rejected_drafts_leaves_what_it_has_said(rng, tokenizer, kind):
    """What was taken back together with rejected tokens is in the cache before it is kept or returned."""
    model, prompts = made(rng, kind), [some_prompt(rng, n) for n in (30, 12)]
    drafter = KnownAnswers(rng, {tuple(prompt): [] for prompt in prompts}, 0.0, VOCAB)
    speculation = Speculation(drafter, num_draft_tokens=3)
    engine = Engine(model, tokenizer, speculation=speculation, prefix_cache=PrefixCache(1 << 30))
    cache = engine.make_cache()
    rows = [
        engine.submit(Request(prompts[0], -1, logprobs=False)),
        engine.submit(Request(prompts[1], -1, logprobs=False, cache=cache)),
    ]
    said = {row: [] for row in rows}
    for _ in range(6):
        for response in engine.step():
            said[response.row].append(response.token)
    for row in rows:
        engine.cancel(row)
    second = Request([*prompts[0], *said[rows[0]], 5], 8, logprobs=False)
    [(wanted, *_)] = outcome(model, tokenizer, [second])
    row = engine.submit(replace(second, draft=False))
    responses = run(engine)[row]
    assert [r.token for r in responses] == wanted
    assert responses[-1].cached_tokens >= len(second.prompt) - 2
    whole = Request([*prompts[1], *said[rows[1]], 5], 8, logprobs=False)
    [(wanted, *_)] = outcome(model, tokenizer, [whole])
    held = tokens_in(cache) or len(prompts[1]) + len(said[rows[1]]) - 1
    rest = Request(whole.prompt[held:], 8, logprobs=False, cache=cache, draft=False)
    row = engine.submit(rest)
    assert [r.token for r in run(engine)[row]] == wanted
