"""A prompt on Metal: what it needs besides MLX's products, and dispatches counted in the traced graph."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from afm_mlx import kernels
from afm_mlx.adapters.active import BatchAdapters, bind
from afm_mlx.adapters.resident import ResidentAdapter
from afm_mlx.adapters.target_modules import target_modules
from afm_mlx.config import PRESETS
from afm_mlx.kernels import PackedWeight, Part, ProductOptions, dispatch
from afm_mlx.kernels.metal import prompts, runtime
from afm_mlx.kernels.selftest import oracle
from afm_mlx.kernels.selftest.specs import DTYPES
from afm_mlx.quantization.rule import AFM_EMBEDDING_RULE, AFM_RULE
from tests.metal.launches import cache_of, shapes_only
from tests.tools.compare import assert_close
from tests.tools.graph import Cost, count_dispatches
from tests.tools.problems import assert_solved, draw_heads

GRID = PackedWeight(mx.zeros((2, 4), mx.uint32), 2, "balanced", mx.ones((2,)))


def test_many_vectors_are_normed_with_two_roundings(metal, rng):
    for rows, in_dims in ((33, 2048), (7, 33), (1, 4)):
        x = rng.standard_normal((rows, in_dims)).astype(np.float32)
        x[0] *= 2.0**70 if rows > 1 else 1  # whose squares overflow
        weight = rng.uniform(0.5, 2, in_dims).astype(np.float32)
        got = prompts.normed(mx.array(x), GRID, ProductOptions(norm=mx.array(weight), eps=1e-5))
        assert np.isnan(got[0]).all() == (rows > 1)
        finite = slice(int(rows > 1), None)
        wanted = oracle.rms_norm(x[finite].astype(np.float64), weight.astype(np.float64), 1e-5)
        # Squares' sum, of which half is seen, and its root, then two products.
        assert_close(np.array(got[finite]) / wanted, np.ones_like(wanted), (8 + 3) * 2.0**-24)


@pytest.mark.parametrize("has_bfloat", [True, False])
def test_vectors_of_a_grid_are_float16_on_a_gpu_without_bfloat16(metal, monkeypatch, has_bfloat):
    """They are rounded as little as that type allows, and up to 1,448 of the norm's weights fit."""
    monkeypatch.setattr(runtime, "has_bfloat", lambda: has_bfloat)
    # A vector with one number, whose norm has it times the root of the vector's length.
    x, norm = mx.zeros((33, 2048)), mx.full((2048,), 1440.0)
    x[:, 5] = 3.0
    options, palette = ProductOptions(norm=norm, eps=0.0), GRID._replace(mode="palette")
    for dtype, weight in ((mx.bfloat16, GRID), (mx.bfloat16, palette), (mx.float32, GRID)):
        got = prompts.normed(x.astype(dtype), weight, options)
        narrow = not has_bfloat and dtype == mx.bfloat16 and weight is GRID
        assert got.dtype == (mx.float16 if narrow else dtype)
        wanted = mx.array(1440.0 * 2048**0.5)
        assert mx.all(got[:, 5] == wanted.astype(got.dtype)).item()


@pytest.mark.parametrize("stored", [mx.int8, None], ids=["codes", "floats"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_a_prompt(metal, rng, dtype, stored):
    """In chunks, of one row and several, whose keys are a part of a longer buffer."""
    for batch, tokens, capacity in ((1, 9, 9), (2, 5, 12), (3, 1, 7)):
        options = {"capacity": capacity, "stored": stored or dtype}
        problem = draw_heads(rng, "causal_attention", dtype, batch, tokens, (4, 2, 16), **options)
        assert dispatch.select("causal_attention", problem.case).name == "metal/causal_attention"
        assert_solved(problem, kernels.causal_attention)


# -- what it costs


def chunk_cost(tokens: int, rank: int = 0) -> Cost:
    """Of the second chunk of a prompt to the 3B, with an adapter on every layer unless `rank` is 0."""
    model = shapes_only(PRESETS["afm-3b"], AFM_RULE, AFM_EMBEDDING_RULE)
    if rank:
        numbers, places = mx.zeros((1 << 20,), mx.float16), itertools.count(0, 16)
        mx.eval(numbers)
        parts = {
            each.path: Part(next(places), next(places), rank) for each in target_modules(model)
        }
        bind(model).set(BatchAdapters.of([ResidentAdapter(numbers, parts, 1.0, "", rank)]))
    cache = cache_of(model, 512, 1024)
    writing = [entry for entry in cache if not entry.empty()]
    arrays = dict(tree_flatten(model.parameters()))
    arrays |= {f"cache.{i}": entry.buffer for i, entry in enumerate(writing)}

    def traced(tokens, **arrays):
        for i, entry in enumerate(writing):
            entry.buffer = arrays.pop(f"cache.{i}")
        model.update(tree_unflatten(arrays))
        model.prefill(tokens, cache)
        return [entry.buffer for entry in writing]

    return count_dispatches(traced, mx.zeros((1, tokens), mx.int32), **arrays)


@pytest.mark.parametrize(("generation", "tokens"), [(13, 512), (16, 256), (16, 512), (17, 512)])
def test_a_chunk_of_the_3b(monkeypatch, generation, tokens):
    monkeypatch.setattr(dispatch, "device", lambda: "gpu")
    monkeypatch.setattr(runtime, "gpu_generation", lambda: generation)
    monkeypatch.setattr(runtime, "has_bfloat", lambda: generation not in (13, 14))
    monkeypatch.setattr(runtime, "has_matrix_units", lambda: generation >= 17)
    dispatch.select.cache_clear()
    # Of the last writing block, a prompt needs keys and values only.
    writing, blocks = 35, 34
    cost = chunk_cost(tokens)
    products = 5 * blocks + 1
    multiplying = {"afm_dequantize": products, "Matmul": products}
    if of_codes := generation == 17 or tokens == 256:
        multiplying = {"QuantizedMatmul": products}
    # Scales multiply the products of a grid, also queries, keys and values.
    scaled = writing if of_codes or generation == 13 else 0
    assert cost.kernels == {
        "afm_embedding": 1,
        "afm_rms_norm": writing + blocks,
        **multiplying,
        "compiled_add_up": 2 * blocks + scaled,
        "compiled_swiglu": blocks,
        "afm_rope_norm_quantize": writing,
        "SliceUpdate": 2 * writing,
        # Attention: queries and outputs by the scales of keys and values, and codes as floats.
        "compiled_times": 2 * blocks,
        "AsType": blocks,
        "scaled_dot_product_attention": blocks,
    }
    # Of every matrix's adapter: two factors in order and in the activations' type, and a product with each.
    adapted = chunk_cost(tokens, rank=16)
    more = adapted.kernels - cost.kernels
    assert more.pop("compiled_add_up", 0) == writing - scaled
    assert more.pop("Equal") == 1  # which rows have an adapter
    assert more.pop("Select") == writing  # B of three projections
    assert set(more) <= {"AsType", "Reshape", "Matmul"}
    assert more.total() <= 4 * products
