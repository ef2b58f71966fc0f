"""Dispatches and bytes of a decoded token on Metal, counted in the traced graph."""

import dataclasses
import itertools
from collections import Counter

import mlx.core as mx
import pytest

from afm_mlx.adapters.active import BatchAdapters, bind
from afm_mlx.adapters.resident import ResidentAdapter
from afm_mlx.adapters.target_modules import target_modules
from afm_mlx.config import PRESETS
from afm_mlx.kernels import Part
from afm_mlx.kernels.metal import runtime
from afm_mlx.model.model import Model
from afm_mlx.quantization.rule import AFM_EMBEDDING_RULE, AFM_RULE
from tests.metal import zoo_steps
from tests.metal.launches import cache_of, record, shapes_only
from tests.tools.graph import count_dispatches, decode_cost

ARRAY = mx.zeros((4, 6))

# -- the count itself


def test_rules_of_the_count():
    for i, (function, dispatches) in enumerate(
        (
            (lambda x: x + 1, 1),
            (lambda x: x.astype(mx.float16), 1),
            (lambda x: x.astype(mx.float32), 0),  # it is float32
            (lambda x: x.T, 0),
            (lambda x: x.T.reshape(-1), 1),  # the order changes, so numbers have to move
            (lambda x: x.reshape(2, 2, 6).swapaxes(0, 1), 0),
            (lambda x: x[:1].swapaxes(0, 1).reshape(-1), 0),  # an axis of 1 has no order
            (lambda x: x[:, None, :2], 0),
            (lambda x: x.view(mx.uint16), 0),
            (lambda x: x.T.view(mx.uint16), 1),
            (lambda x: x.split(2, axis=1)[1].reshape(-1), 1),
            (lambda x: x.split(2, axis=0)[1].reshape(-1), 0),
            (lambda x: mx.concatenate([x, x, x]), 3),
            (lambda x: mx.pad(x, 1), 2),
            (lambda x: mx.fast.rms_norm(x, None, 1e-5), 1),
            (lambda x: mx.softmax(x @ x.T, axis=-1), 2),
            (lambda x: mx.argmax(x, axis=-1), 1),
            (lambda x: x[mx.array([1, 2])], 1),
        )
    ):
        assert count_dispatches(function, ARRAY).dispatches == dispatches, f"function {i}"

    def without_a_rule(x):
        return mx.slice_update(x, mx.ones((1, 6)), mx.array([0]), axes=[0])

    with pytest.raises(NotImplementedError, match="no rule says what DynamicSliceUpdate costs"):
        count_dispatches(without_a_rule, ARRAY)


def test_bytes_are_those_of_stored_arrays_once_per_reader():
    stored = mx.zeros((10, 6))
    nbytes = stored.nbytes

    def read(function):
        return count_dispatches(function, ARRAY, stored).bytes_read - ARRAY.nbytes

    assert read(lambda x, w: x @ w.T) == nbytes
    assert read(lambda x, w: (x @ w.T) @ w) == 2 * nbytes
    assert read(lambda x, w: x @ w[:5].T) == nbytes // 2
    assert read(lambda x, w: x + w[mx.array([3])]) == 6 * 4 + 4  # a row and its index
    assert read(lambda x, w: x + w[0, 0]) == 4


# -- the whole model


def packed(preset: str) -> Model:
    return shapes_only(PRESETS[preset], AFM_RULE, AFM_EMBEDDING_RULE)


def step_cost(
    model: Model, rows: int = 1, capacity: int = 512, run=Model.__call__, tokens: int = 1
):
    """Of the next tokens of each row, for which their caches have room."""
    cache = cache_of(model, capacity - tokens, capacity)
    cache = [type(entry).merge([entry] * rows) for entry in cache] if rows > 1 else cache
    cost = decode_cost(model, run, mx.zeros((rows, tokens), mx.int32), cache)
    assert all(kernel.startswith("afm_") for kernel in cost.kernels)
    return cost


@pytest.mark.parametrize("run", [Model.__call__, Model.greedy], ids=["logits", "greedy"])
def test_a_token_of_the_3b(run):
    model = packed("afm-3b")
    blocks, writing = model.args.num_layers, model.args.num_kv_layers
    short = step_cost(model, run=run)
    # The head's logits are a product like the blocks'; a choice comes without them.
    greedy = {"afm_packed_argmax": 1, "afm_packed_select": 1} if run is Model.greedy else {}
    assert short.kernels == {
        "afm_embedding": 1,
        "afm_packed_vector": 4 * blocks + (not greedy),
        "afm_write_and_attend": writing,
        "afm_attention_decode": blocks - writing,
        **greedy,
    }
    assert short.bytes_read <= 0.90e9
    assert short.dispatches <= 320
    assert short.inputs <= 8 * short.dispatches
    assert short.source_bytes <= 5_300 * short.dispatches
    # What a long context splits, the products merge.
    long = step_cost(model, capacity=4096, run=run)
    assert long.kernels == short.kernels
    keys_and_values = 2 * 2 * 128 * blocks  # bytes per column
    longer = (4096 - 512) * keys_and_values
    assert long.bytes_read - short.bytes_read == pytest.approx(longer, rel=1e-4)


def with_adapters(model: Model, rows: list[int]) -> Model:
    """The model with an adapter of these ranks on every layer, one for each row; 0 for none."""
    numbers = mx.zeros((1024,), mx.float16)  # counting reads nothing
    mx.eval(numbers)
    paths = [place.path for place in target_modules(model)]
    residents = {
        rank: ResidentAdapter(numbers, dict.fromkeys(paths, Part(0, 0, rank)), 1.0, "", rank)
        for rank in set(rows) - {0}
    }
    bind(model).set(BatchAdapters.of([residents.get(rank) for rank in rows]))
    return model


@pytest.mark.parametrize(
    "capacity", [512, 4096]
)  # attention in one part, or in several on most GPUs
@pytest.mark.parametrize(
    "ranks", [[0, 0], [8], [16], [8, 32], [8, 12, 16, 20, 24, 28, 31, 32]], ids=str
)
def test_a_token_with_adapters_takes_a_dispatch_more_for_each_product(ranks, capacity):
    config = dataclasses.replace(PRESETS["afm-3b"], num_layers=4, num_kv_reuse_layers=2)
    model = shapes_only(config, AFM_RULE, AFM_EMBEDDING_RULE)
    plain = step_cost(model, len(ranks), capacity)
    adapted = step_cost(with_adapters(model, ranks), len(ranks), capacity)
    wanted = 4 * model.args.num_layers * any(ranks)
    assert adapted.kernels["afm_low_rank_shrink"] == wanted
    assert adapted.dispatches == plain.dispatches + wanted


# The choices under a constraint are drawn from logits.
@pytest.mark.parametrize("run", [Model.verify, Model.verify_greedy], ids=["logits", "greedy"])
@pytest.mark.parametrize("rank", [0, 16])
def test_several_tokens_of_a_row_cost_no_more_dispatches_than_one(run, rank):
    model = with_adapters(packed("afm-3b"), [rank])
    for tokens in (2, 5, 8):
        cost = step_cost(model, run=run, tokens=tokens)
        shrinks = cost.kernels["afm_low_rank_shrink"]
        assert shrinks == bool(rank) * 4 * model.args.num_layers
        assert cost.dispatches - shrinks <= 330, tokens
        assert cost.kernels["afm_write_and_attend"] == model.args.num_kv_layers


def test_a_batch_costs_no_more_dispatches_than_a_row():
    model = packed("afm-nano")
    assert step_cost(model, 3).dispatches == step_cost(model).dispatches


def test_few_texts_of_products_serve_every_number_of_rows():
    """One vector, 2 to 6 of them a pass, and matrices: for each product of a block, and the head."""
    config = dataclasses.replace(PRESETS["afm-3b"], num_layers=2, num_kv_reuse_layers=1)
    model, names = shapes_only(config, AFM_RULE, AFM_EMBEDDING_RULE), set()
    for rows, capacity in itertools.product(range(1, 33), (256, 4096)):
        entries = cache_of(model, capacity - 1, capacity)
        cache = [type(entry).merge([entry] * rows) for entry in entries]
        for call in record(lambda c=cache, n=rows: model.greedy(mx.zeros((n, 1), mx.int32), c)):
            kernel, inputs, options = call
            sent = options["template"], options["output_dtypes"]
            names.add(runtime.library(kernel, inputs, *sent))
    kernels = Counter(name.split("__")[0] for name in names)
    assert kernels["afm_packed_vector"] == 2 * 4 + 1
    assert (
        kernels["afm_packed_matrix"] == 4
    )  # queries and keys, output and down, gate and up, the head
    assert kernels["afm_packed_argmax"] == 1


@pytest.mark.parametrize("name", zoo_steps.NAMES)
def test_a_token_of_a_zoo_model_takes_fewer_dispatches_than_in_mlx_lm(name):
    for context, more in zip(zoo_steps.CONTEXTS, (0, 1), strict=True):  # attention takes two
        ours, own_block = zoo_steps.dispatches(name, context, ours=True)
        theirs, block = zoo_steps.dispatches(name, context, ours=False)
        norms = 2 if "qwen3" in name else 0  # of queries and keys
        assert (own_block, block) == (14 + norms + more, 19 + norms + more)
        assert ours < 0.8 * theirs
