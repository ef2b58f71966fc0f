"""The benchmark of scores, on a small model."""

from bench import scores
from tests.tools.engines import SIZES, tiny
from tests.tools.models import WordTokenizer


def test_every_figure_is_measured(rng):
    model, tokenizer = tiny(rng), WordTokenizer(SIZES["vocab_size"])
    figures = scores.four_choices(model, tokenizer, count=2, context=30)
    assert figures["questions"] == 2
    assert figures["ratio"] > 0
    found = scores.memory(model, tokenizer, 40)
    assert found["scored"] > 0 < found["plain"]
