"""Libraries that MLX compiles for a model on Metal: how many there are, and that a warm-up has them all."""

import dataclasses
from collections import Counter

import mlx.core as mx
import pytest

from afm_mlx.adapters.active import bind
from afm_mlx.config import PRESETS
from afm_mlx.engine.warm_up import warm_up
from afm_mlx.kernels import dispatch
from afm_mlx.kernels.metal import runtime
from afm_mlx.model.model import Model
from afm_mlx.quantization.rule import AFM_EMBEDDING_RULE, AFM_RULE
from tests.kernels.metal.test_decode_cost import with_adapters
from tests.metal.launches import cache_of, record, shapes_only

ROWS, TOKENS, COLUMNS = range(1, 34), range(2, 9), range(256, 4097, 256)


@pytest.fixture(scope="module")
def model():
    """The 3B with one block of each kind."""
    config = dataclasses.replace(PRESETS["afm-3b"], num_layers=2, num_kv_reuse_layers=1)
    return shapes_only(config, AFM_RULE, AFM_EMBEDDING_RULE)


def libraries(run) -> set[str]:
    return {
        runtime.library(kernel, inputs, options["template"], options["output_dtypes"])
        for kernel, inputs, options in record(run)
    }


def step(model, run, rows, tokens, columns) -> set[str]:
    """Libraries of the next tokens of rows whose caches have room for them."""
    cache = [
        type(entry).merge([entry] * rows) for entry in cache_of(model, columns - tokens, columns)
    ]
    return libraries(lambda: run(model, mx.zeros((rows, tokens), mx.int32), cache))


def by_kernel(names) -> dict[str, int]:
    return Counter(name.split("__")[0].removeprefix("afm_") for name in names)


def test_no_library_depends_on_the_length_of_the_context(model):
    for rows in (1, 2, 3, 8):
        first, *others = (step(model, Model.greedy, rows, 1, columns) for columns in COLUMNS)
        assert all(other == first for other in others), rows
    for tokens in TOKENS:
        first, *others = (step(model, Model.verify, 1, tokens, columns) for columns in COLUMNS)
        # What several dispatches of a long context have computed is merged.
        assert all(by_kernel(other - first) in ({}, {"attention_merge": 1}) for other in others)
        assert all(other >= first for other in others)


def test_what_a_batch_can_meet_is_compiled_before(model):
    met = set()
    for rows in ROWS:
        for run in (Model.__call__, Model.greedy):
            for columns in (256, 4096):
                met |= step(model, run, rows, 1, columns)
    assert by_kernel(met) == {
        "embedding": 2,  # up to 7 tokens, or more, as MLX passes them
        "write_and_attend": 2,  # the same of rows
        "attention_decode": 2,
        "packed_vector": 11,
        "packed_matrix": 5,
        "packed_argmax": 1,
        "packed_select": 1,
        "rms_norm": 2,
    }
    for rows in (1, 2, 33):
        for tokens in TOKENS:
            for columns in (256, 4096):
                met |= step(model, Model.verify_greedy, rows, tokens, columns)
    for length in (1, 5, 40, 300):
        prompt, cache = mx.zeros((1, length), mx.int32), model.make_cache()
        met |= libraries(lambda p=prompt, c=cache: model.prefill(p, c))
    assert met <= libraries(lambda: list(warm_up(model, max(ROWS), drafts=True)))


@pytest.mark.parametrize("ranks", [[16], [0, 8], [8, 32], [8, 16, 32, 0]], ids=str)
def test_adapters_of_the_usual_ranks_meet_no_other_library(model, ranks):
    try:
        warm = libraries(lambda: list(warm_up(model, 8, adapters=True)))
        met = set()
        for rows in range(1, 9):
            with_adapters(model, [ranks[i % len(ranks)] for i in range(rows)])
            for run in (Model.__call__, Model.greedy):
                met |= step(model, run, rows, 1, 512)
    finally:
        bind(model).set(None)
    assert any("low_rank_shrink" in name for name in met)
    assert met <= warm


def test_each_library_is_evaluated_once_in_a_step_of_its_own(model, monkeypatch):
    def compiled(kernel, template):
        return lambda **options: [
            mx.zeros(shape, dtype)
            for shape, dtype in zip(options["output_shapes"], options["output_dtypes"], strict=True)
        ]

    evaluated = []
    monkeypatch.setattr(runtime, "_compiled", compiled)
    # Without the parameters that masks take channels of, which are a dict.
    monkeypatch.setattr(mx, "eval", lambda x: isinstance(x, dict) or evaluated.append(x))
    names = []
    with dispatch.force("metal"):
        for name in warm_up(model, 3, drafts=True):
            names += [] if name is None else [name]
            assert len(evaluated) == len(names)
    assert len(names) == len(set(names)) > 20
    assert not vars(runtime._recorded)
