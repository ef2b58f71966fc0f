"""A tiny model in float, and a tokenizer with which no answer ends by itself."""

import pytest

from tests.tools.engines import SIZES, tiny
from tests.tools.models import WordTokenizer


@pytest.fixture
def model(rng):
    return tiny(rng)


@pytest.fixture
def tokenizer():
    return WordTokenizer(SIZES["vocab_size"], ends=())
