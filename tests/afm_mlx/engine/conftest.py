"""A tiny model in float, and a tokenizer with which no answer ends by itself."""

import mlx.core as mx
import pytest

from afm_mlx.engine.row import Row
from tests.tools.engines import SIZES, tiny
from tests.tools.models import WordTokenizer


@pytest.fixture
def model(rng):
    return tiny(rng)


@pytest.fixture
def tokenizer():
    return WordTokenizer(SIZES["vocab_size"], ends=())


@pytest.fixture
def chunks(model, monkeypatch):
    """The (rows, columns) that the model has prefilled so far."""
    chunks, prefill = [], type(model).prefill

    def counted(self, tokens, cache):
        chunks.append(tokens.shape)
        return prefill(self, tokens, cache)

    monkeypatch.setattr(type(model), "prefill", counted)
    return chunks


@pytest.fixture
def events(monkeypatch):
    """The order in which steps are submitted, and their tokens read back."""
    events, submit, take = [], mx.async_eval, Row.take
    monkeypatch.setattr(mx, "async_eval", lambda *a: (events.append("submit"), submit(*a)))
    monkeypatch.setattr(Row, "take", lambda *a: (events.append("read"), take(*a))[1])
    return events
