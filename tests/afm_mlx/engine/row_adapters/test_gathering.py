"""Rows of one adapter run together when the pool has no room for all: each adapter is loaded once."""

from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.engine.engine import Engine
from afm_mlx.engine.request import Request
from tests.tools.engines import Adapters, run, some_prompt


def test_rows_of_one_adapter_are_gathered_before_it_is_evicted(rng, model, tokenizer, tmp_path):
    names, adapters = "abcdefgh", Adapters(model, rng, tmp_path)
    prompts = [some_prompt(rng, length) for length in rng.integers(2, 9, 3 * len(names))]
    with AdapterPool(model) as plenty:
        for name in names:
            adapters.add(plenty, name, 2)
        sizes = [plenty.load(name).nbytes for name in names]
        with AdapterPool(model, budget=2 * max(sizes)) as scarce:
            for name in names:
                scarce.register(name, tmp_path / name)
            answers = []
            for pool in (plenty, scarce):
                engine = Engine(model, tokenizer, adapters=pool)
                for i, prompt in enumerate(
                    prompts
                ):  # in turns: each needs another one than the one before
                    engine.submit(Request(prompt, 3 + i % 4, adapter=names[i % len(names)]))
                answers.append(
                    {row: [r.token for r in found] for row, found in run(engine).items()}
                )
            assert answers[0] == answers[1]
            assert scarce.describe()["loads"] == len(names)
