"""Rows with adapters of their own run as if each were alone."""

import numpy as np
import pytest

from afm_mlx.adapters.active import BatchAdapters
from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.adapters.scheduler import PATIENCE
from afm_mlx.engine import row_adapters
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.request import Request
from afm_mlx.kernels import MAX_ADAPTERS
from tests.tools.adapters import draw_tensors, write_folder
from tests.tools.engines import (
    BITS,
    Adapters,
    forced,
    logprobs_of,
    run,
    some_prompt,
    tiny,
    wanted_logprobs,
)
from tests.tools.models import WordTokenizer
from tests.tools.zoo import zoo_model


@pytest.mark.parametrize("kv", ["int8", "float"])
@pytest.mark.parametrize("kind", BITS)
def test_a_mixed_batch_is_its_rows_one_by_one(rng, tokenizer, tmp_path, kind, kv):
    """Ragged prompts; none, ranks 8, 16 and 32, one on few layers, sums with a name and without."""
    # Keys and values on the boundary of two int8 codes may fall to either side.
    int8 = kv == "int8"
    model = tiny(rng, kind, 8 if int8 else None)
    pool, adapters = AdapterPool(model), Adapters(model, rng, tmp_path)
    for name, rank in (("r8", 8), ("r16", 16), ("r32", 32)):
        adapters.add(pool, name, rank)
    adapters.add(pool, "few", 5, keys="up_proj")
    pool.register("sum", {"r8": 0.5, "r16": -0.3})
    rows = [None, "r8", "r16", "r32", "few", "sum", {"r32": 0.4, "few": 1}, "r8", None]
    rows = [rows[i] for i in rng.permutation(len(rows))]
    prompts = [some_prompt(rng, n) for n in rng.integers(1, 14, len(rows))]
    answers = [some_prompt(rng, n) for n in rng.integers(2, 8, len(rows))]

    def submit(engine, i):
        return engine.submit(
            Request(prompts[i], len(answers[i]), forced(answers[i]), adapter=rows[i])
        )

    options = {"kv": kv, "adapters": pool, "prefill_step_size": 5}
    engine = Engine(model, tokenizer, max_batch=len(rows), **options)
    ids = [submit(engine, i) for i in range(len(rows))]
    together = run(engine)
    spread = 0.0
    for i, row in enumerate(rows):
        engine = Engine(model, tokenizer, **options)
        submit(engine, i)
        (alone,) = run(engine).values()
        mixed, alone = logprobs_of(together[ids[i]]), logprobs_of(alone)
        assert np.abs(mixed - alone).max() < (0.1 if int8 else 1e-4)
        weights = {"sum": {"r8": 0.5, "r16": -0.3}}.get(row) if isinstance(row, str) else row
        weights = weights or ({} if row is None else {row: 1})
        wanted = wanted_logprobs(adapters.merged(weights), prompts[i], answers[i])
        error = np.abs(mixed - wanted).max() / max(1, np.abs(wanted).max())
        assert error < (0.05 if int8 else 1e-3)
        if row is not None:
            plain = wanted_logprobs(model, prompts[i], answers[i])
            spread = max(spread, np.abs(mixed - plain).max())
    assert spread > 0.5
    pool.close()


def test_a_zoo_model_runs_mixed_batches_too(rng, tokenizer, tmp_path):
    vocab = 64
    model = zoo_model("llama", vocab, int(rng.integers(2**31)))
    pool = AdapterPool(model)
    for name, rank in (("x", 4), ("y", 6)):
        pool.register(name, write_folder(tmp_path / name, draw_tensors(model, rng, rank)))
    rows, answer = [None, "x", "y"], rng.integers(0, vocab, 4).tolist()
    tokenizer = WordTokenizer(vocab)
    tokenizer.eos_token_ids = set()
    prompts = [rng.integers(0, vocab, n).tolist() for n in (5, 2, 9)]

    def submit(engine, i):
        return engine.submit(Request(prompts[i], 4, forced(answer), adapter=rows[i]))

    engine = Engine(model, tokenizer, adapters=pool)
    ids = [submit(engine, i) for i in range(3)]
    together = run(engine)
    for i in range(3):
        engine = Engine(model, tokenizer, adapters=pool)
        submit(engine, i)
        (alone,) = run(engine).values()
        assert np.abs(logprobs_of(together[ids[i]]) - logprobs_of(alone)).max() < 1e-3
    pool.close()


def test_rows_with_adapters_join_and_leave(rng, model, tokenizer, setup):
    """One after the other, in the middle of others' answers, more of them than fit."""
    pool, _ = setup
    names = [["a", "b", "c", "d", None][i] for i in rng.integers(0, 5, 12)]
    prompts = [some_prompt(rng, n) for n in rng.integers(1, 9, 12)]
    limits = [int(n) for n in rng.integers(1, 9, 12)]
    engine = Engine(model, tokenizer, max_batch=3, prefill_step_size=3, adapters=pool)
    ids, found = {}, {}
    while engine.busy or len(ids) < 12:
        if len(ids) < 12:
            i = len(ids)
            ids[engine.submit(Request(prompts[i], limits[i], adapter=names[i]))] = i
        for response in engine.step():
            found.setdefault(response.row, []).append(response)
    for row, i in ids.items():
        alone = Engine(model, tokenizer, adapters=pool)
        alone.submit(Request(prompts[i], limits[i], adapter=names[i]))
        (wanted,) = run(alone).values()
        assert [r.token for r in found[row]] == [r.token for r in wanted]
    assert not any(entry["rows"] for entry in pool.describe()["adapters"])


def test_more_adapters_than_run_side_by_side(rng, model, tokenizer, tmp_path, monkeypatch):
    pool, adapters = AdapterPool(model), Adapters(model, rng, tmp_path)
    names = [f"n{i}" for i in range(MAX_ADAPTERS + 3)]
    for name in names:
        adapters.add(pool, name, 2, keys="up_proj")
        pool.load(name)
    most, of = [], BatchAdapters.of
    monkeypatch.setattr(
        row_adapters.BatchAdapters, "of", lambda rows: (most.append(rows), of(rows))[1]
    )
    engine = Engine(model, tokenizer, max_batch=16, adapters=pool)
    prompt = some_prompt(rng, 4)
    ids = {
        engine.submit(Request(prompt, 3, adapter=name)): name for name in [*names, None, names[0]]
    }
    found = run(engine)
    for row, name in ids.items():
        alone = Engine(model, tokenizer, adapters=pool)
        alone.submit(Request(prompt, 3, adapter=name))
        (wanted,) = run(alone).values()
        assert [r.token for r in found[row]] == [r.token for r in wanted]
    assert (
        max(len(rows) for rows in most) == MAX_ADAPTERS + 2
    )  # the row without, and one adapter twice
    pool.close()


def test_rows_of_one_adapter_too_many_are_overtaken_for_a_while_only(
    rng, model, tokenizer, tmp_path
):
    pool, adapters = AdapterPool(model), Adapters(model, rng, tmp_path)
    names = [f"n{i}" for i in range(MAX_ADAPTERS + 1)]
    for name in names:
        adapters.add(pool, name, 2, keys="up_proj")
        pool.load(name)
    *busy, late = names
    engine = Engine(model, tokenizer, max_batch=32, adapters=pool)

    def submit(name, count):
        return engine.submit(Request([1, 2], count, adapter=name, logprobs=False))

    # Two rows each, of which one always goes on when the other one ends.
    row_of = {submit(name, count): name for name in busy for count in (3, 6)}
    engine.step()
    last, ended = submit(late, 1), 0
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
    pool.close()
