"""What a benchmark runs and what it makes of the times; never how fast anything is."""

from itertools import pairwise
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from afm_mlx.adapters.attach import adapter_arrays, attach_random_adapters
from afm_mlx.engine.engine import Engine
from afm_mlx.errors import RequestError
from afm_mlx.measure import benchmark
from afm_mlx.measure.benchmark import (
    Bench,
    BenchmarkCase,
    Spread,
    count_operations,
    run_case,
    step_cost,
)
from afm_mlx.quantization.quantize_model import quantize_model
from afm_mlx.quantization.rule import QuantizationRule
from tests.tools.models import WordTokenizer, random_config, random_model


@pytest.fixture
def model(rng):
    return random_model(random_config(rng, num_layers=3, num_kv_reuse_layers=1), rng)


class Clock:
    """Time that passes only when somebody says so."""

    def __init__(self, monkeypatch, module):
        self.now = 0.0
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))


# -- figures


def test_spread(rng):
    samples = rng.uniform(1, 100, 7).tolist()
    spread = Spread.of(samples)
    assert spread.mean == pytest.approx(np.mean(samples))
    assert spread.median == pytest.approx(np.median(samples))
    assert spread.deviation == pytest.approx(np.std(samples, ddof=1))
    assert Spread.of(samples[:1]).deviation is None


def test_rates_are_tokens_of_all_rows_over_the_times_of_the_engine(model, rng, monkeypatch):
    clock = Clock(monkeypatch, benchmark)
    until_first, steps = rng.uniform(1, 2, 5), rng.uniform(0.1, 0.2, (5, 6))
    runs = []

    class Timed(Engine):
        """Takes a known time for every token; the last one comes at once."""

        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            runs.append(self)
            self.read = 0

        def step(self):
            responses = super().step()
            if responses and len(runs) > 1:  # the first run is the warm-up
                i = len(runs) - 2
                times = [until_first[i], *steps[i][:5], 0.0]
                clock.now += times[self.read]
                self.read += 1
            return responses

    monkeypatch.setattr(benchmark, "Engine", Timed)
    result = run_case(
        model, BenchmarkCase(prompt_tokens=9, generated_tokens=7, batch=2), repetitions=5
    )
    assert len(runs) == 6
    assert result.prefill.mean == pytest.approx(np.mean(2 * 9 / until_first))
    assert result.decode.mean == pytest.approx(np.mean(2 * 5 / steps[:, :5].sum(axis=1)))
    assert result.first_token.mean == pytest.approx(until_first.mean())
    read = result.cost.weight_bytes + result.cost.kv_bytes
    assert result.bytes_per_token == read / 2
    assert result.bytes_per_second == pytest.approx(read / 2 * result.decode.mean)
    needed = result.cost.weight_bytes + result.cost.cache_bytes
    assert result.memory_ratio == pytest.approx(result.peak_memory / needed)
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
            return super().submit(request)

        def _forward(self):
            lengths.append(self._batch.cache[0].lengths)
            return super()._forward()

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
    def count(writing, reuse, batch=1):
        sizes = {"num_layers": writing + reuse, "num_kv_reuse_layers": reuse}
        return count_operations(
            random_model(random_config(np.random.default_rng(seed), **sizes), rng), batch
        )

    seed = int(rng.integers(2**31))
    by_writing = {b - a for a, b in pairwise(count(n, 0) for n in range(1, 5))}
    by_reuse = {b - a for a, b in pairwise(count(2, n) for n in range(1, 5))}
    assert len(by_writing) == len(by_reuse) == 1
    # A block that reuses keys and values has neither to make.
    assert 0 < by_reuse.pop() < by_writing.pop()
    assert count(2, 1, batch=3) == count(2, 1)


@pytest.mark.parametrize("packed", [False, True])
def test_adapters_are_there_while_their_case_runs(rng, monkeypatch, packed):
    """And are counted, in bytes and in operations."""
    sizes = {"num_layers": 2, "num_kv_reuse_layers": 1, "num_heads": 2, "hidden_dim": 32}
    config = random_config(rng, **sizes, num_kv_heads=1, hidden_dim_scale_factor=2.0)
    model = random_model(config, rng)
    if packed:
        quantize_model(model, {}, QuantizationRule(2), QuantizationRule(4))
    tokens = mx.array([[1, 2, 3]])
    before, logits = step_cost(model, BenchmarkCase(), "int8"), model(tokens)
    rank, seen = int(rng.integers(1, 9)), []

    class Watched(Engine):
        def __init__(self, model, *args, **options):
            super().__init__(model, *args, **options)
            seen.append((len(adapter_arrays(model)), model(tokens)))

    monkeypatch.setattr(benchmark, "Engine", Watched)
    result = run_case(model, BenchmarkCase(4, 3, adapter_rank=rank), repetitions=1)
    assert [count for count, _ in seen] == [1, 1], "one array, for a warm-up and a run"
    assert not any(mx.allclose(adapted, logits, atol=1e-4) for _, adapted in seen)
    assert adapter_arrays(model) == {}
    assert mx.array_equal(model(tokens), logits)
    cost = result.cost
    assert cost.weight_bytes == before.weight_bytes
    pairs = 2 * (4 * 32 + 3 * (32 + 64)) + 2 * (32 + config.head_dim)
    blocks = 10 * 2 * 15 * (rank + 1)  # of each A and B, at most, to fill its last block up
    assert 2 * rank * pairs <= cost.adapter_bytes <= 2 * (rank * pairs + blocks)
    assert cost.model_bytes == cost.weight_bytes + cost.adapter_bytes
    assert result.bytes_per_token == cost.model_bytes + cost.kv_bytes
    assert result.memory_ratio == result.peak_memory / (cost.model_bytes + cost.cache_bytes)
    assert cost.operations >= before.operations


def test_rows_may_have_adapters_of_their_own(rng, monkeypatch):
    model = random_model(random_config(rng, num_layers=2, num_kv_reuse_layers=1), rng)
    seen = []

    class Watched(Engine):
        def step(self):
            seen.append(len(adapter_arrays(self.model)))
            return super().step()

    monkeypatch.setattr(benchmark, "Engine", Watched)
    costs = [
        run_case(
            model, BenchmarkCase(4, 3, batch=5, adapter_rank=2, adapters=count), repetitions=1
        ).cost
        for count in (1, 3)
    ]
    assert set(seen) == {1, 3}
    assert costs[1].adapter_bytes == 3 * costs[0].adapter_bytes
    assert adapter_arrays(model) == {}


def test_operations_of_an_adapter_without_a_kernel_for_it(model):
    before = count_operations(model)
    attach_random_adapters(model, 4)
    linear = 5 * model.args.num_layers
    assert count_operations(model) >= before + 3 * linear, "x A, its product with B, and a sum each"


def test_operations_leave_the_state_alone(model):
    count_operations(model)
    tokens = mx.array([[1, 2, 3]])
    before = model(tokens)
    count_operations(model, 2, "float")
    assert mx.array_equal(model(tokens), before)


def test_a_tokenizer_s_text_is_made_too(model, rng):
    made = []

    class Words(WordTokenizer):
        def decode(self, tokens):
            made.extend(tokens)
            return super().decode(tokens)

    run_case(model, BenchmarkCase(3, 5), repetitions=2, tokenizer=Words(model.args.vocab_size))
    assert len(made) == 3 + 2 * 5


def test_cases_that_say_nothing():
    for bad in [
        {"prompt_tokens": 0},
        {"generated_tokens": 2},
        {"batch": 0},
        {"depth": -1},
        {"adapter_rank": -1},
        {"adapters": 0},
    ]:
        (name,) = bad
        with pytest.raises(RequestError, match=f"{name} of a benchmark is {bad[name]}; at least"):
            BenchmarkCase(**bad)


def test_more_adapters_than_rows_or_none():
    for case, says in [
        ({"batch": 9}, "adapter_rank is 0"),
        ({"batch": 3, "adapter_rank": 4}, "at most 3"),
        ({"batch": 9, "adapter_rank": 4, "adapters": 9}, "at most 8"),
    ]:
        with pytest.raises(RequestError, match=f"adapters of a benchmark is .*{says}"):
            BenchmarkCase(**({"adapters": 4} | case))


def test_only_afm_models_have_a_depth(rng):
    from mlx_lm.models import llama

    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "intermediate_size": 32,
        "num_attention_heads": 2,
    }
    zoo = llama.Model(
        llama.ModelArgs("llama", rms_norm_eps=1e-5, vocab_size=50, num_key_value_heads=2, **sizes)
    )
    result = run_case(zoo, BenchmarkCase(4, 3), repetitions=1)
    assert (
        result.cost
        is result.bytes_per_token
        is result.bytes_per_second
        is result.memory_ratio
        is None
    )
    with pytest.raises(RequestError, match="depth is 7: only the cache of an AFM model"):
        run_case(zoo, BenchmarkCase(4, 3, depth=7), repetitions=1)
