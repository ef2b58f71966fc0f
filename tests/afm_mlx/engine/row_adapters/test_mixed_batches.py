"""Rows with adapters of their own run as if each were alone."""

import numpy as np
import pytest

from afm_mlx.adapters.active import BatchAdapters
from afm_mlx.engine.request import Request
from afm_mlx.engine.scheduler import PATIENCE
from afm_mlx.kernels import MAX_ADAPTERS
from tests.tools.compare import assert_close
from tests.tools.engines import (
    BITS,
    forced,
    logprobs_of,
    run,
    some_prompt,
    tokens_of,
    wanted_logprobs,
)


@pytest.mark.parametrize("model", [(kind, kv) for kind in BITS for kv in (8, None)], indirect=True)
def test_a_mixed_batch_is_its_rows_one_by_one(rng, make_engine, model, pool, adapters):
    """Ragged prompts; none, several ranks, one on few layers, sums with a name and without."""
    # Keys and values on the boundary of two int8 codes may fall to either side.
    int8 = model.args.kv_bits == 8
    # So may activations between two of the 16-bit integers that packed layers multiply: ragged prompts have
    # another attention than a prompt alone.
    allowed = 0.1 if int8 else 1e-3
    adapters.add(pool, "r32", 32)
    adapters.add(pool, "few", 5, keys="up_proj")
    named, unnamed = {"c": 0.5, "d": -0.3}, {"r32": 0.4, "few": 1}
    pool.register("sum", named)
    # What each row asks for, and the weights that it means.
    rows = [(name, {name: 1}) for name in ("a", "c", "r32", "few", "a")]
    rows += [(None, {}), (None, {}), ("sum", named), (unnamed, unnamed)]
    rng.shuffle(rows)
    prompts = [some_prompt(rng, n) for n in rng.integers(1, 14, len(rows))]
    answers = [some_prompt(rng, n) for n in rng.integers(2, 8, len(rows))]

    def together(indices):
        options = {"kv": "int8" if int8 else "float", "prefill_step_size": 5}
        engine = make_engine(max_batch=len(rows), **options)
        for i in indices:
            sampler, adapter = forced(answers[i]), rows[i][0]
            engine.submit(Request(prompts[i], len(answers[i]), sampler, adapter=adapter))
        return [logprobs_of(responses) for _, responses in sorted(run(engine).items())]

    differences = []
    for i, mixed in enumerate(together(range(len(rows)))):
        (alone,) = together([i])
        assert np.abs(mixed - alone).max() < allowed
        wanted = wanted_logprobs(adapters.merged(rows[i][1]), prompts[i], answers[i])
        assert_close(mixed, wanted, 0.05 if int8 else 1e-3, rows[i], least=1)
        if rows[i][1]:
            plain = wanted_logprobs(model, prompts[i], answers[i])
            differences.append(np.abs(mixed - plain).max())
    assert max(differences) > 0.5


@pytest.mark.parametrize("model", [("float", None), ("llama", None)], indirect=True)
def test_rows_with_adapters_join_and_leave(rng, make_engine, pool, model):
    """One after the other, in the middle of others' answers, more of them than fit."""
    requests = [
        Request(
            some_prompt(rng, rng.integers(1, 9)),
            int(rng.integers(1, 9)),
            adapter=["a", "b", "c", "d", None][rng.integers(5)],
        )
        for _ in range(12)
    ]
    engine, ids, found = make_engine(max_batch=3, prefill_step_size=3), [], {}
    while engine.busy or len(ids) < 12:
        if len(ids) < 12:
            ids.append(engine.submit(requests[len(ids)]))
        for response in engine.step():
            found.setdefault(response.row, []).append(response)
    for row, request in zip(ids, requests, strict=True):
        alone = make_engine()
        alone.submit(request)
        assert [tokens_of(found)[row]] == list(tokens_of(run(alone)).values())
    assert not any(entry["rows"] for entry in pool.describe()["adapters"])


@pytest.fixture
def many(pool, adapters):
    """Names of more loaded adapters than run side by side."""
    names = [f"n{i}" for i in range(MAX_ADAPTERS + 3)]
    for name in names:
        adapters.add(pool, name, 2, keys="up_proj")
        pool.load(name)
    return names


def test_more_adapters_than_run_side_by_side(rng, make_engine, many, monkeypatch):
    most, of = [], BatchAdapters.of
    monkeypatch.setattr(BatchAdapters, "of", lambda rows: (most.append(len(rows)), of(rows))[1])
    engine, prompt = make_engine(max_batch=16), some_prompt(rng, 4)
    names = [*many, None, many[0]]
    ids = [engine.submit(Request(prompt, 3, adapter=name)) for name in names]
    found = tokens_of(run(engine))
    assert max(most) == MAX_ADAPTERS + 2  # the row without, and one adapter twice
    for row, name in zip(ids, names, strict=True):
        alone = make_engine()
        alone.submit(Request(prompt, 3, adapter=name))
        assert [found[row]] == list(tokens_of(run(alone)).values())


def test_rows_of_one_adapter_too_many_are_overtaken_for_a_while_only(make_engine, many):
    engine = make_engine(max_batch=32)

    def submit(name, count):
        return engine.submit(Request([1, 2], count, adapter=name, logprobs=False))

    # Two rows each, of which one always goes on when the other one ends.
    row_of = {submit(name, count): name for name in many[:MAX_ADAPTERS] for count in (3, 6)}
    engine.step()
    last, ended = submit(many[-1], 1), 0
    for _ in range(100):
        responses = engine.step()
        if any(response.row == last for response in responses):
            break
        for response in responses:
            if response.finish_reason is not None:
                ended += 1
                name = row_of.pop(response.row)
                row_of[submit(name, 6)] = name
    else:
        pytest.fail(f"the row has not started after {ended} others")
    assert PATIENCE <= ended <= PATIENCE + 4 * MAX_ADAPTERS
