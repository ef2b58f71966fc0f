"""A tiny model, and a pool of adapters for it."""

import pytest

from afm_mlx.adapters.pool import AdapterPool
from tests.tools.adapters import SIZES, gated_reads
from tests.tools.engines import Adapters, tiny
from tests.tools.models import WordTokenizer


@pytest.fixture
def model(rng):
    return tiny(rng)


@pytest.fixture
def tokenizer():
    tokenizer = WordTokenizer(SIZES["vocab_size"])
    tokenizer.eos_token_ids = set()
    return tokenizer


@pytest.fixture
def setup(model, rng, tmp_path):
    """A pool with the adapters a to d, of ranks 4, 4, 8 and 3, and its folders."""
    pool = AdapterPool(model)
    adapters = Adapters(model, rng, tmp_path)
    for name, rank in zip("abcd", (4, 4, 8, 3), strict=True):
        adapters.add(pool, name, rank)
    yield pool, adapters
    pool.close()


@pytest.fixture
def gate(monkeypatch):
    """Reads wait until it is opened."""
    with gated_reads(monkeypatch) as gate:
        yield gate
