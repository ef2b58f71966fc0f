"""Searches: the particle filter on a Markov chain that is solved exactly, and samples as rows of the engine."""

import math

import numpy as np
import pytest

import afm_mlx
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.engine.generation import generate
from afm_mlx.engine.samplers import make_sampler
from afm_mlx.engine.search import particle_filter, search
from afm_mlx.errors import IncompleteError, RequestError
from afm_mlx.guidance.constraint import Constraint
from tests.tools.constraints import nano_tokenizer, wide_model
from tests.tools.engines import Adapters


@pytest.fixture
def rng():
    """Always the same numbers: these tests are about chances."""
    return np.random.default_rng(33)


# -- a chain of three letters, of which five are drawn: an answer is right if it ends with c and has no a

START = np.array([0.5, 0.3, 0.2])
NEXT = np.array([[0.6, 0.3, 0.1], [0.5, 0.3, 0.2], [0.7, 0.2, 0.1]])
LENGTH, RUNS, N = 5, 2000, 8
# By number of letters left, the chance that an answer whose last letter is given will be right.
CHANCE = [np.array([0, 0, 1.0])]
for _ in range(LENGTH - 1):
    CHANCE.append(NEXT[:, 1:] @ CHANCE[-1][1:])
RIGHT = START[1:] @ CHANCE[LENGTH - 1][1:]


def potential(power):
    def psi(letters):
        if 0 in letters:
            return 0.0
        exact = CHANCE[LENGTH - len(letters)][letters[-1]]
        return exact ** (1 if len(letters) == LENGTH else power)

    return psi


def filtered(rng, power, count=N):
    def extend(particles):
        cumulated = np.array([np.cumsum(NEXT[p[-1]] if p else START) for p in particles])
        letters = (rng.random((len(particles), 1)) > cumulated).sum(axis=1)
        return [(*p, int(letter)) for p, letter in zip(particles, letters, strict=True)]

    psi = potential(power)
    return particle_filter([()] * count, extend, psi, lambda p: len(p) == LENGTH, rng)


@pytest.mark.parametrize("power", [0.25, 0.5, 1])
def test_z_is_unbiased(rng, power):
    found = np.array([math.exp(filtered(rng, power)[2]) for _ in range(RUNS)])
    assert abs(found.mean() - RIGHT) < 3.5 * found.std() / RUNS**0.5
    # A biased filter would be seen: without the resampled weights, the mean is many errors away.
    assert 10 * found.std() / RUNS**0.5 < RIGHT


def test_resampling_passes_more_often_than_best_of_n(rng):
    def pass_rate(draw, runs=400):
        return np.mean([draw() for _ in range(runs)])

    def whole(particles):
        found = []
        for _ in particles:
            letters = [int(rng.choice(3, p=START))]
            while len(letters) < LENGTH:
                letters.append(int(rng.choice(3, p=NEXT[letters[-1]])))
            found.append(tuple(letters))
        return found

    def plain(count):
        ends = potential(1), lambda p: len(p) == LENGTH
        return particle_filter([()] * count, whole, *ends, rng)[1].any()

    single, best = pass_rate(lambda: plain(1)), pass_rate(lambda: plain(N))
    stepwise = pass_rate(lambda: filtered(rng, 0.5)[1].any())
    assert single + 0.03 < best
    assert best + 0.2 < stepwise


def test_all_particles_may_fail(rng):
    particles, weights, log_z = particle_filter(
        [0, 0], lambda ps: [p + 1 for p in ps], lambda p: 0.0, lambda p: p == 9, rng
    )
    assert particles == [1, 1]
    assert not weights.any()
    assert log_z == -math.inf


# -- samples as rows


@pytest.fixture
def tokenizer():
    return nano_tokenizer()


@pytest.fixture
def model(rng):
    return wide_model(rng, extra=0)


@pytest.fixture
def prompt(rng, tokenizer):
    return rng.integers(10, len(tokenizer), 30).tolist()


COLORS = ["blue", "green", "red"]
LINES = Constraint.regex("([ab]\n){6}")


@pytest.mark.parametrize("value", [None, lambda answer: 0.5])
def test_one_sample_is_the_plain_answer_of_the_seed(model, tokenizer, prompt, value):
    for seed in (0, 7):
        plain = generate(
            model, tokenizer, prompt, max_tokens=40, seed=seed, sampler=make_sampler(1.0)
        )
        found = search(model, tokenizer, prompt, 1, seed=seed, max_tokens=40, value=value)
        assert found == ([plain], [1], 0)


def test_weighted_majority_by_hand(model, tokenizer, prompt):
    options = {"seed": 3, "constraint": Constraint.choices(COLORS), "max_tokens": 40}
    rewards = {"blue": 0.1, "green": 3, "red": 0.5}

    def vote(select, **more):
        return search(model, tokenizer, prompt, 12, select=select, **options, **more)

    majority = vote("majority")
    counts = {a: round(12 * w) for a, w in zip(majority.answers, majority.weights, strict=True)}
    assert sum(counts.values()) == 12
    assert len(counts) > 1
    assert majority.weights == sorted(majority.weights, reverse=True)
    assert majority == vote("weighted")
    assert majority.log_z == 0

    weighted = vote("weighted", verify=rewards.get)
    total = sum(counts[color] * rewards[color] for color in counts)
    shares = {color: counts[color] * rewards[color] / total for color in counts}
    assert dict(zip(weighted.answers, weighted.weights, strict=True)) == pytest.approx(shares)
    assert weighted.answers == sorted(shares, key=lambda color: -shares[color])
    assert weighted.log_z == pytest.approx(math.log(total / 12))

    best = vote("best", verify=lambda answer: -rewards[answer])
    assert best.answers == sorted(counts, key=rewards.get)
    assert best.weights == [-rewards[color] for color in best.answers]
    assert math.isnan(best.log_z)

    none = vote("weighted", verify=lambda answer: 0)
    assert none.answers[0] == majority.answers[0]
    assert set(none.weights) == {0}
    assert none.log_z == -math.inf
    # Answers that differ in their keys alone are one.
    one = vote("majority", key=len, verify=len)
    assert sum(one.weights) == pytest.approx(1)
    assert len(one.answers) == len({len(color) for color in counts})


def test_the_first_that_passes_ends_the_others(model, tokenizer, prompt):
    options = {"seed": 3, "max_tokens": 30}
    seen = []

    def verify(answer):
        seen.append(answer)
        return len(seen) == 2

    found = search(model, tokenizer, prompt, 5, verify=verify, select="first", **options)
    assert found.answers[0] == seen[1]
    assert found.weights[0] == 1
    assert len(seen) == len(found.answers) == 2
    assert math.isnan(found.log_z)
    nothing = search(model, tokenizer, prompt, 5, verify=lambda a: 0.9, select="first", **options)
    assert nothing.weights == [0.9] * 5


def test_samples_share_their_prompt(model, tokenizer, prompt, chunks):
    found = search(model, tokenizer, prompt, 3, seed=1, max_tokens=4)
    assert len(found.answers) == 3
    assert sum(rows * columns for rows, columns in chunks) < 2 * len(prompt)


def test_a_batch_may_be_smaller_than_n(model, tokenizer, prompt):
    seen = []
    options = {"engine_options": {"max_batch": 2}, "progress": lambda *counts: seen.append(counts)}
    found = search(model, tokenizer, prompt, 5, seed=1, max_tokens=4, **options)
    assert len(found.answers) == 5
    assert seen == [(done, 5) for done in range(1, 6)]


def test_lines_are_resampled_under_a_constraint(model, tokenizer, prompt):
    prefixes, answers = [], []

    def value(prefix):
        prefixes.append(prefix)
        return 1e-3 ** prefix.count("b")

    def verify(answer):
        answers.append(answer)
        return 1e-3 ** answer.count("b")

    options = {"constraint": LINES, "max_tokens": 60, "seed": 5, "twist": 1}
    seen = []
    found = search(
        model,
        tokenizer,
        prompt,
        8,
        value=value,
        verify=verify,
        progress=lambda *counts: seen.append(counts),
        **options,
    )
    assert found == search(model, tokenizer, prompt, 8, value=value, verify=verify, **options)
    assert all(prefix.endswith("\n") for prefix in prefixes)
    assert {prefix.count("\n") for prefix in prefixes} >= {1, 2, 3, 4, 5}
    assert all(answer.count("\n") == 6 and set(answer) <= set("ab\n") for answer in answers)
    assert (seen[0], seen[-1]) == ((0, 8), (8, 8))
    plain = search(model, tokenizer, prompt, 8, constraint=LINES, max_tokens=60, seed=5)
    least = min(answer.count("b") for answer in plain.answers)
    assert found.answers[0].count("b") < least
    assert sum(found.weights) == pytest.approx(1)


def test_stop_strings_may_span_lines(model, tokenizer, prompt):
    options = {
        "max_tokens": 60,
        "seed": 5,
        "stop": ["a\nb"],
        "constraint": Constraint.regex("([ab]\n){1,9}"),
    }
    values = []
    found = search(
        model,
        tokenizer,
        prompt,
        8,
        value=lambda text: values.append(text) or 1,
        at_limit="complete",
        **options,
    )
    assert not any("a\nb" in text for text in [*values, *found.answers])


def test_answers_that_are_cut_off_have_no_weight(model, tokenizer, prompt):
    with pytest.raises(IncompleteError):
        search(model, tokenizer, prompt, 3, constraint=Constraint.regex("[a-z]{400}"), max_tokens=5)
    some = Constraint.regex("[a-m]|[n-z]{400}")
    found = search(model, tokenizer, prompt, 8, constraint=some, max_tokens=5, seed=0)
    assert all(len(answer) == 1 for answer in found.answers)
    assert sum(found.weights) == pytest.approx(1)
    assert 0 < math.exp(found.log_z) * 8 < 7.5


def test_an_adapter_answers(rng, tmp_path, model, tokenizer, prompt):
    pool, adapters = AdapterPool(model), Adapters(model, rng, tmp_path)
    adapters.add(pool, "mine", 4)
    options = {"seed": 2, "max_tokens": 8}
    engine_options = {"adapters": pool}
    found = search(
        model, tokenizer, prompt, 4, adapter="mine", engine_options=engine_options, **options
    )
    sampler = make_sampler(1.0)
    ours, plain = (
        generate(model, tokenizer, prompt, sampler=sampler, adapter=name, adapters=pool, **options)
        for name in ("mine", None)
    )
    assert ours in found.answers
    assert plain not in found.answers


def test_what_is_refused(model, tokenizer, prompt):
    def refusal(n=2, **options):
        with pytest.raises(RequestError) as caught:
            search(model, tokenizer, prompt, n, **{"max_tokens": 3, **options})
        return str(caught.value)

    for n in (0, -1, True, 1.5, "2"):
        assert "n is " in refusal(n)
    wrong = refusal(select="mean")
    assert "select is 'mean'; allowed are weighted, majority, best, first" in wrong
    for select in ("best", "first"):
        assert "needs verify" in refusal(select=select)
    for wrong in (math.nan, math.inf, None, "1", -1):
        assert "verify is " in refusal(verify=lambda answer, wrong=wrong: wrong)
    assert "twist is -1" in refusal(twist=-1)
    for seed in (-1, "1"):
        assert "seed is " in refusal(seed=seed)
    lines = {"constraint": LINES, "max_tokens": 60}
    assert "value is nan" in refusal(value=lambda text: math.nan, **lines)
    assert "value is 0 for every sample" in refusal(value=lambda text: 0, **lines)


def test_it_is_public():
    assert afm_mlx.search is search
