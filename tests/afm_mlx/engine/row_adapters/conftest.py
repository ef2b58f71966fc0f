"""A tiny model, and a pool of adapters for it."""

import pytest

from afm_mlx.adapters.pool import AdapterPool
from afm_mlx.engine.engine import Engine
from tests.tools.adapters import SIZES, gated_reads
from tests.tools.engines import Adapters, tiny
from tests.tools.models import WordTokenizer
from tests.tools.zoo import zoo_model


@pytest.fixture
def model(request, rng):
    """A model of float weights, keys and values, or of the kind and the bits that a parameter says."""
    kind, kv_bits = getattr(request, "param", ("float", None))
    if kind == "llama":
        return zoo_model(kind, SIZES["vocab_size"], int(rng.integers(2**31)))
    return tiny(rng, kind, kv_bits)


@pytest.fixture
def tokenizer():
    tokenizer = WordTokenizer(SIZES["vocab_size"])
    tokenizer.eos_token_ids = set()
    return tokenizer


@pytest.fixture
def adapters(model, rng, tmp_path):
    return Adapters(model, rng, tmp_path)


@pytest.fixture
def pool(model, adapters):
    """A pool with the adapters a to d, of ranks 4, 4, 8 and 3."""
    with AdapterPool(model) as pool:
        for name, rank in zip("abcd", (4, 4, 8, 3), strict=True):
            adapters.add(pool, name, rank)
        yield pool


@pytest.fixture
def make_engine(model, tokenizer, pool):
    return lambda **options: Engine(model, tokenizer, adapters=pool, **options)


@pytest.fixture
def gate(monkeypatch):
    """Reads wait until it is opened."""
    with gated_reads(monkeypatch) as gate:
        yield gate
