"""What a benchmark runs and what it makes of the times; never how fast anything is."""

import dataclasses
from itertools import pairwise
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import RotatingKVCache

from afm_mlx.adapters.active import adapter_arrays
from afm_mlx.engine.decoding import DecodeBatch
from afm_mlx.engine.engine import Engine
from afm_mlx.errors import RequestError
from afm_mlx.measure import benchmark
from afm_mlx.measure.benchmark import Bench, BenchmarkCase, count_operations, run_case, step_cost
from tests.tools.cases import each
from tests.tools.models import WordTokenizer, random_config, random_model
from tests.tools.zoo import zoo_model


@pytest.fixture
def model(rng):
    return random_model(random_config(rng, num_layers=3, num_kv_reuse_layers=1), rng)


def test_rates_are_tokens_of_all_rows_over_the_times_of_the_engine(model, rng, monkeypatch):
    now = 0.0
    until_first, steps = rng.uniform(1, 2, (5, 1)), rng.uniform(0.1, 0.2, (5, 5))
    at_once = np.zeros((5, 1))  # the last token, with which nothing is submitted
    runs = iter([np.ones(3), *np.concatenate([until_first, steps, at_once], axis=1)])

    class Timed(Engine):
        """Takes a known time for every token."""

        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.times = iter(next(runs))

        def step(self):
            nonlocal now
            responses = super().step()
            if responses:
                now += next(self.times)
            return responses

    monkeypatch.setattr(benchmark, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(benchmark, "Engine", Timed)
    case = BenchmarkCase(prompt_tokens=9, generated_tokens=7, batch=2)
    result = run_case(model, case, repetitions=5)
    assert list(runs) == []
    prefill = 2 * 9 / until_first
    assert dataclasses.astuple(result.prefill) == pytest.approx(
        (np.mean(prefill), np.median(prefill), np.std(prefill, ddof=1))
    )
    assert result.decode.mean == pytest.approx(np.mean(2 * 5 / steps.sum(axis=1)))
    assert result.first_token.mean == pytest.approx(until_first.mean())
    assert result.bytes_per_second == pytest.approx(result.bytes_per_token * result.decode.mean)
    assert result.peak_memory > result.cost.weight_bytes


def test_the_engine_is_asked_for_what_the_case_says(model, rng, monkeypatch):
    case = BenchmarkCase(
        prompt_tokens=int(rng.integers(1, 12)),
        generated_tokens=int(rng.integers(3, 8)),
        batch=int(rng.integers(1, 4)),
        depth=int(rng.integers(1, 40)),
    )
    asked, lengths = [], []

    class Watched(Engine):
        def submit(self, request):
            asked.append((len(request.prompt), request.max_tokens, request.cache[0].lengths))
            assert not request.logprobs, "they would be computed in every step"
            return super().submit(request)

    forward = DecodeBatch._forward

    def watched_forward(self):
        lengths.append(self.batch.cache[0].lengths)
        return forward(self)

    monkeypatch.setattr(DecodeBatch, "_forward", watched_forward)
    monkeypatch.setattr(benchmark, "Engine", Watched)
    Bench(model, case, "int8", None, rng).run(case.generated_tokens)
    assert asked == [(case.prompt_tokens, case.generated_tokens, [case.depth])] * case.batch
    # What each step attends to, its own token included, and what is in the cache after the last.
    attended = np.array(lengths) + 1
    assert attended.shape == (case.generated_tokens, case.batch)
    assert attended[1:].mean() == case.mean_length
    assert attended[-1, 0] == case.tokens


@pytest.mark.parametrize("kv", ["int8", "float"])
def test_bytes_of_a_step(model, rng, kv):
    config = model.args
    case = BenchmarkCase(5, 4, int(rng.integers(1, 4)), int(rng.integers(0, 30)))
    cost = step_cost(model, case, kv)
    assert cost.weight_bytes == sum(a.nbytes for _, a in tree_flatten(model.parameters()))
    # A real cache of that many tokens, and what every block reads of it at each decode step.
    tokens = mx.array(rng.integers(0, config.vocab_size, (case.batch, case.tokens)))
    cache = [layer.merge([layer] * case.batch) for layer in model.make_cache(kv)]
    model.prefill(tokens, cache)
    stored = [sum(a.nbytes for a in layer.keys_and_values()) for layer in cache[:2]]
    assert cost.cache_bytes == sum(stored)
    attended = [case.depth + case.prompt_tokens + i for i in range(1, case.generated_tokens)]
    reads = [(sum(stored) + stored[-1]) * length / case.tokens for length in attended]
    assert cost.kv_bytes == round(np.mean(reads))


def test_operations_grow_by_a_block_at_a_time(rng):
    seed = int(rng.integers(2**31))

    def count(writing, reuse, batch=1):
        sizes = {"num_layers": writing + reuse, "num_kv_reuse_layers": reuse}
        config = random_config(np.random.default_rng(seed), **sizes)
        return count_operations(random_model(config, rng), batch)

    by_writing = {b - a for a, b in pairwise(count(n, 0) for n in range(1, 5))}
    by_reuse = {b - a for a, b in pairwise(count(2, n) for n in range(1, 5))}
    assert len(by_writing) == len(by_reuse) == 1
    # A block that reuses keys and values has neither to make.
    assert 0 < by_reuse.pop() < by_writing.pop()
    assert count(2, 1, batch=3) == count(2, 1)


@pytest.mark.parametrize("adapters", [1, 3])
def test_adapters_run_and_count_while_their_case_runs(model, monkeypatch, adapters):
    case = BenchmarkCase(4, 3, batch=5, adapter_rank=4, adapters=adapters)
    tokens, seen = mx.array([[1, 2, 3]] * case.batch), []
    before, logits = step_cost(model, case, "int8"), model(tokens)

    class Watched(Engine):
        def __init__(self, model, *args, **options):
            super().__init__(model, *args, **options)
            arrays = adapter_arrays(model)
            seen.append((len(arrays), sum(array.nbytes for array in arrays.values())))
            assert not mx.allclose(model(tokens), logits, atol=1e-4)

    monkeypatch.setattr(benchmark, "Engine", Watched)
    result = run_case(model, case, repetitions=1)
    cost = result.cost
    # An adapter is one array, in the warm-up and in the measured run.
    assert seen == [(adapters, cost.adapter_bytes)] * 2
    assert cost.weight_bytes == before.weight_bytes
    assert result.bytes_per_token == (cost.model_bytes + cost.kv_bytes) / 5
    assert cost.model_bytes == cost.weight_bytes + cost.adapter_bytes
    assert result.memory_ratio == result.peak_memory / (cost.model_bytes + cost.cache_bytes)
    # x A, its product with B, and a sum, at each matrix of each block.
    assert cost.operations >= before.operations + 3 * 5 * model.args.num_layers
    assert result.decode.deviation is None
    # Nothing is left of it.
    assert adapter_arrays(model) == {}
    assert mx.array_equal(model(tokens), logits)


def test_a_tokenizer_s_text_is_made_too(model):
    made = []

    class Words(WordTokenizer):
        def decode(self, tokens):
            made.extend(tokens)
            return super().decode(tokens)

    run_case(model, BenchmarkCase(3, 5), repetitions=2, tokenizer=Words(model.args.vocab_size))
    assert len(made) == 3 + 2 * 5


@each(
    ("case", "says"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens of a benchmark is 0; at least 1"),
        ({"generated_tokens": 2}, "generated_tokens of a benchmark is 2; at least 3"),
        ({"batch": 0}, "batch of a benchmark is 0; at least 1"),
        ({"depth": -1}, "depth of a benchmark is -1; at least 0"),
        ({"adapter_rank": -1}, "adapter_rank of a benchmark is -1; at least 0"),
        ({"adapters": 0}, "adapters of a benchmark is 0; at least 1"),
        ({"batch": 9, "adapters": 4}, "adapters of a benchmark is 4, and adapter_rank is 0"),
        ({"batch": 3, "adapter_rank": 4, "adapters": 4}, "a batch of 3 runs at most 3"),
        ({"batch": 9, "adapter_rank": 4, "adapters": 9}, "a batch of 9 runs at most 8"),
    ],
)
def test_cases_that_can_t_be_run(case, says):
    with pytest.raises(RequestError, match=says):
        BenchmarkCase(**case)


def test_models_of_the_zoo_have_a_depth_and_no_cost(rng, monkeypatch):
    zoo = zoo_model("llama", 50, seed=1)
    assert Bench(zoo, BenchmarkCase(4, 3), "int8", None, rng)._vocab_size == 50
    lengths = []

    class Watched(Engine):
        def submit(self, request):
            lengths.append([layer.offset for layer in request.cache])
            return super().submit(request)

    monkeypatch.setattr(benchmark, "Engine", Watched)
    depth = int(rng.integers(1, 300))
    result = run_case(zoo, BenchmarkCase(4, 3, batch=2, depth=depth), repetitions=1)
    assert lengths == [[depth, depth]] * 2 * 2  # rows, warm-up and the measured run
    assert result.cost is None
    assert result.bytes_per_token is result.bytes_per_second is result.memory_ratio is None
    monkeypatch.setattr(zoo, "make_cache", lambda: [RotatingKVCache(9)] * 2, raising=False)
    with pytest.raises(RequestError, match="depth is 7, and this model has a RotatingKVCache"):
        run_case(zoo, BenchmarkCase(4, 3, depth=7), repetitions=1)
