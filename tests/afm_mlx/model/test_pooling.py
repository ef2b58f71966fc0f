"""Vectors of texts: pooling against loops in NumPy; states against a model's head, and transformers."""

import ast
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import numpy as np
import pytest
from mlx.utils import tree_flatten

from afm_mlx.adapters.lora import add_lora
from afm_mlx.engine.batch import RowCaches, prefill_tokens
from afm_mlx.errors import RequestError
from afm_mlx.model.pooling import (
    check_states,
    hidden_dim_of,
    hidden_states,
    last_states,
    normalize,
    pool,
    pooled_states,
)
from afm_mlx.quantization.quantize_model import quantize_model
from tests.tools.compare import assert_close
from tests.tools.engines import SIZES, some_prompt, tiny
from tests.tools.models import random_config, random_model
from tests.tools.zoo import zoo_config, zoo_model

VOCAB = SIZES["vocab_size"]
WIDTHS = {"hidden_dim": 32, "num_heads": 4, "num_kv_heads": 2, "hidden_dim_scale_factor": 3.0}


def test_pooling_takes_the_last_or_the_mean_of_each_rows_tokens(rng):
    hidden, lengths = rng.normal(size=(3, 5, 4)).astype(np.float32), [5, 1, 3]
    last = [hidden[b, n - 1] for b, n in enumerate(lengths)]
    mean = [hidden[b, :n].mean(0) for b, n in enumerate(lengths)]
    for pooling, wanted in (("last", last), ("mean", mean)):
        for dtype, atol in ((mx.float32, 1e-6), (mx.bfloat16, 1e-2)):
            found = pool(mx.array(hidden).astype(dtype), mx.array(lengths), pooling)
            assert found.dtype == mx.float32
            np.testing.assert_allclose(np.array(found), wanted, atol=atol, rtol=atol)
    with pytest.raises(ValueError, match="pooling is 'max'; allowed are last and mean"):
        pool(mx.array(hidden), mx.array(lengths), "max")


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("kind", ["float", "packed", "llama"])
def test_the_last_tokens_alone_give_the_states_that_all_give(rng, kind, pooling):
    """And the same gradients, in training."""
    if kind == "llama":
        model = zoo_model("llama", VOCAB, int(rng.integers(2**31)))
    else:
        config = random_config(
            rng, vocab_size=VOCAB, num_layers=4, num_kv_reuse_layers=2, kv_bits=8, **WIDTHS
        )
        model = random_model(config, rng)
        if kind == "packed":
            model = quantize_model(model, config.to_dict())[0]
    tokens, lengths = mx.array(rng.integers(0, VOCAB, (3, 9))), mx.array([9, 1, 4])

    def whole():
        return pool(hidden_states(model, tokens), lengths, pooling)

    def short():
        return pooled_states(model, tokens, lengths, pooling)

    assert short().dtype == mx.float32
    assert_close(short(), whole(), 1e-5)
    add_lora(model.train(), 2, 1.0)
    assert_close(short(), whole(), 1e-5)
    towards = mx.array(rng.normal(size=whole().shape).astype(np.float32))
    wanted, found = (
        dict(tree_flatten(nn.value_and_grad(model, lambda f=f: (f() * towards).sum())()[1]))
        for f in (whole, short)
    )
    for name, gradient in wanted.items():
        assert_close(found[name], gradient, 1e-4, name, least=0.1)


@pytest.mark.parametrize("dimensions", [None, 1, 3, 8])
def test_vectors_are_cut_and_have_a_norm_of_one(rng, dimensions):
    vectors = rng.normal(size=(4, 8)).astype(np.float32)
    kept = vectors[:, :dimensions]
    wanted = kept / np.linalg.norm(kept, axis=-1, keepdims=True)
    np.testing.assert_allclose(
        np.array(normalize(mx.array(vectors), dimensions)), wanted, atol=1e-6
    )


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_gradient_reaches_the_models_weights_and_no_padding(rng, pooling):
    model = tiny(rng)
    model.train()
    prompts = mx.array([some_prompt(rng, 9), some_prompt(rng, 9)])

    def loss(parameters, inputs):
        model.update(parameters)
        vectors = normalize(pool(hidden_states(model, inputs), mx.array([9, 4]), pooling), 16)
        return vectors[0] @ vectors[1]

    grads = mx.grad(loss)(model.trainable_parameters(), prompts)
    layer = grads["model"]["layers"][0]["mlp"]["up_proj"]["weight"]
    assert mx.isfinite(layer).all()
    assert mx.abs(layer).max() > 0
    padded = mx.where(mx.array([[False] * 9, [False] * 4 + [True] * 5]), 0, prompts)
    values = [loss(model.trainable_parameters(), inputs).item() for inputs in (prompts, padded)]
    assert values[0] == pytest.approx(values[1], abs=1e-6)


@pytest.mark.parametrize("kind", ["float", "2-bit"])
def test_states_of_afm_are_the_input_of_the_embeddings_product(rng, kind):
    model, prompt = tiny(rng, kind), mx.array([some_prompt(rng, 12)])
    states = hidden_states(model, prompt)
    assert states.shape == (1, 12, hidden_dim_of(model))
    cache = model.make_cache("float")
    parts = [hidden_states(model, part, cache) for part in (prompt[:, :5], prompt[:, 5:])]
    atol = 1e-5 if kind == "float" else 2e-2
    assert mx.allclose(mx.concatenate(parts, axis=1), states, atol=atol, rtol=0)
    logits = model.model.embedding.as_linear(states)
    np.testing.assert_allclose(logits, model(prompt), atol=10 * atol)
    model.train()
    assert mx.allclose(hidden_states(model, prompt), states, atol=atol, rtol=0)


@pytest.mark.parametrize("kind", ["float", "2-bit", "llama"])
@pytest.mark.parametrize("starts", [(0, 0), (5, 5), (5, 9)])
def test_last_states_behind_a_cache(rng, kind, starts):
    """Rows that begin at one position, or at several, and end with padding; also with one token to come."""
    model = tiny(rng, kind) if kind != "llama" else zoo_model(kind, VOCAB, 7)
    prompts = [some_prompt(rng, start + 8) for start in starts]
    caches = RowCaches(model, "float", None)
    rows = [caches.make() for _ in prompts]
    for row, prompt, start in zip(rows, prompts, starts, strict=True):
        if start:
            prefill_tokens(model, mx.array([prompt[:start]]), row)
    batch = caches.merged(rows)
    lengths = [8, 3]
    for entry in batch:
        entry.prepare(lengths=lengths, right_padding=[8 - length for length in lengths])
    inputs = mx.array([prompt[start:] for prompt, start in zip(prompts, starts, strict=True)])
    found = last_states(model, inputs, mx.array(lengths), batch)
    for entry in batch:
        entry.finalize()
    known = [prompt[: s + n] for prompt, s, n in zip(prompts, starts, lengths, strict=True)]
    atol = 2e-2 if kind == "2-bit" else 1e-5
    for state, tokens in zip(found, known, strict=True):
        assert mx.allclose(
            state, hidden_states(model, mx.array([tokens]))[0, -1], atol=atol, rtol=0
        )
    one = last_states(model, mx.array([[7], [9]]), mx.array([1, 1]), batch)
    for state, tokens, token in zip(one, known, (7, 9), strict=True):
        wanted = hidden_states(model, mx.array([[*tokens, token]]))[0, -1]
        assert mx.allclose(state, wanted, atol=atol, rtol=0)


def test_the_last_state_in_a_sliding_window_sees_the_window(rng):
    model, prompt = tiny(rng), mx.array([some_prompt(rng, 40)])
    caches = [model.make_cache("float", 16, sliding_window=True) for _ in range(2)]
    for cache in caches:
        model.prefill(prompt[:, :20], cache)
    found = last_states(model, prompt[:, 20:], mx.array([20]), caches[0])
    wanted = hidden_states(model, prompt[:, 20:], caches[1])[:, -1]
    assert mx.allclose(found, wanted, atol=1e-5, rtol=0)
    assert not mx.allclose(found, hidden_states(model, prompt)[:, -1], atol=1e-3, rtol=0)


@pytest.mark.parametrize(("kind", "name"), [("llama", "LlamaModel"), ("qwen3", "Qwen3Model")])
def test_states_of_the_zoo_are_those_that_transformers_has(rng, kind, name):
    import torch
    import transformers
    from mlx.utils import tree_flatten

    model, prompt = zoo_model(kind, VOCAB, 7), some_prompt(rng, 12)
    config = zoo_config(kind, VOCAB)
    theirs = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(**config)).eval()
    assert type(theirs).__name__ == name
    weights = {
        key.removeprefix("model."): torch.tensor(np.array(value))
        for key, value in tree_flatten(model.parameters())
    }
    theirs.load_state_dict(weights)
    with torch.no_grad():
        wanted = theirs(torch.tensor([prompt])).last_hidden_state.numpy()
    np.testing.assert_allclose(hidden_states(model, mx.array([prompt])), wanted, atol=1e-4)
    assert hidden_dim_of(model) == config["hidden_size"]


@pytest.mark.parametrize(
    "kind", ["gemma3_text", "gemma4", "gpt_oss", "lfm2", "falcon_h1", "mamba2"]
)
def test_states_of_the_zoo_are_the_heads_input(rng, kind, monkeypatch):
    model, prompt = zoo_model(kind, VOCAB, 7), mx.array([some_prompt(rng, 12)])
    text = getattr(model, "language_model", model)
    seen = []
    trunk = text["backbone"] if kind == "mamba2" else text.model
    head = text.lm_head if "lm_head" in text else next(iter(trunk.children().values()))
    method = "__call__" if "lm_head" in text else "as_linear"
    original = getattr(type(head), method)

    def recorded(self, x):
        if self is head and mx.issubdtype(x.dtype, mx.floating):
            seen.append(x)
        return original(self, x)

    monkeypatch.setattr(type(head), method, recorded)
    model(prompt)
    assert len(seen) == 1
    assert mx.allclose(hidden_states(model, prompt), seen[0], atol=1e-6)


def test_every_model_of_mlx_lm_ends_its_trunk_with_a_norm_or_is_refused():
    refused = []
    for path in Path(mlx_lm.models.__path__[0]).glob("*.py"):
        tree = ast.parse(
            path.read_text()
        )  # not imported: one of them asks for a package, and exits
        classes = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef)}
        if "Model" not in classes or "language_model" in (whole := ast.unparse(classes["Model"])):
            continue  # no model, or one around the model of a text
        name = next(
            (n for n in ("model", "transformer", "backbone") if f"self.{n} = " in whole), ""
        )
        built = whole.partition(f"self.{name} = ")[2].partition("(")[0] if name else ""
        if built not in classes:
            continue  # a subclass, or a model of another module
        (call,) = [n for n in classes[built].body if getattr(n, "name", "") == "__call__"] or [None]
        body = "" if call is None else "\n".join(map(ast.unparse, call.body[-2:]))
        if ("norm" not in body.lower() and "ln_f" not in body) or "as_linear" in body:
            refused.append(path.stem)
    assert sorted(refused) == ["gpt_neox", "lille-130m", "olmo", "phixtral"]
    for name in [*refused, "gemma3n", "muse_spark"]:
        made = type("Model", (type(zoo_model("llama", 8, 0)),), {})
        made.__module__ = f"mlx_lm.models.{name}"
        with pytest.raises(RequestError, match=f"No embeddings of {name}: mlx-lm's model"):
            check_states(made.__new__(made))
